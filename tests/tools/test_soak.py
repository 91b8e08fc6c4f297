"""A few seconds of soak.py, and that it notices a difference."""

import re

import pytest
import torch

from tests.tools import soak


def test_two_runs_agree(device, capsys):
    """Catches memory of an earlier batch that shows in a later one, and sums in any order."""
    soak.main(["--minutes", "0.03", "--device", device])
    steps, bits = re.search(r"(\d+) steps agreed .* losses (\w+)", capsys.readouterr().out).groups()
    assert int(steps) >= soak.CHUNK and int(bits, 16) > 0


def test_a_difference_is_noticed(device, monkeypatch):
    """Catches a soak that passes whatever it computes."""
    run, calls = soak.Run.losses, []

    def other(self, steps):
        losses = run(self, steps)
        calls.append(self)
        if len(calls) == 2:
            losses[7] = torch.nextafter(losses[7], losses[7] + 1)
        return losses

    monkeypatch.setattr(soak.Run, "losses", other)
    with pytest.raises(SystemExit, match="step 7 of seed 0"):
        soak.main(["--minutes", "0", "--device", device])
