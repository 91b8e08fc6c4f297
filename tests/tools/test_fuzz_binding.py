"""A share of the long run of fuzz_binding.py, and that it sees a crash."""

import subprocess
import sys

import pytest

from tests.tools import fuzz_binding


@pytest.mark.slow
def test_random_calls_never_end_the_process(device, capfd):
    """Catches an argument that reaches a kernel unchecked: a signal in place of an exception."""
    calls = 3000 if device == "cpu" else 500
    fuzz_binding.main(["--calls", str(calls), "--seed", "0", "--device", device])
    made, _, answers, _ = capfd.readouterr().out.split()
    assert int(made) == calls
    assert int(answers) > 0.02 * calls, "the arguments are too wild to test anything"


def test_a_crash_is_reported(monkeypatch):
    """Catches a run that would be called clean whatever happens in it."""
    command = (
        "import os, sys; from tests.tools import fuzz_binding;"
        "fuzz_binding.norm = lambda pool: (os.abort, (), {});"
        "fuzz_binding.main(sys.argv[1:])"
    )
    inner = [sys.executable, "-c", command]
    run = subprocess.run

    def run_crashing(arguments, **options):
        return run(inner + arguments[3:], **options)

    monkeypatch.setattr(subprocess, "run", run_crashing)
    with pytest.raises(SystemExit, match=r"(?s)seed 7: status -6 in this call .*call \d+: abort"):
        fuzz_binding.main(["--seconds", "60", "--seed", "7"])
