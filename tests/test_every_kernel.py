"""The script for compute-sanitizer, which nothing else runs, still runs.

Catches a change of an op or of the table of ops that tests/every_kernel.py does not follow: it
would fail on the day that it is needed, or find no fault there because it launches nothing.
"""

import pytest
import torch

from tests import every_kernel
from tests.ops import DEVICES, OPS, PAIRS


def test_cases(pair):
    """Catches a list that is empty, misses an op, or has rows without columns: no kernel runs."""
    cases = every_kernel.cases(pair)
    at_odd_addresses = [op for op in OPS if not op.zero_centered]
    longer = len(every_kernel.SHAPES) * (len(OPS) + len(at_odd_addresses))
    assert len(cases) > longer > len(every_kernel.SHAPES) * len(OPS)  # shorter than a vector too
    assert {op for op, *_ in cases} == set(OPS)
    assert all(rows > 0 and cols > 0 for _, rows, cols, _ in cases)


def test_portable_clusters(pair):
    """Catches an option that leaves nothing out, so that the tool crashes, or too much."""
    left_out = sum(1 for _ in every_kernel.calls(pair)) - sum(
        1 for _ in every_kernel.calls(pair, portable=True)
    )
    assert 0 < left_out < 70


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_script(capsys):
    """Catches a script that fails or skips calls; one dtype, with both dtypes of its parameters."""
    every_kernel.main(["--dtype", "bfloat16"])
    calls = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    plain = len(every_kernel.cases(next(p for p in PAIRS if p.rows == torch.bfloat16)))
    with_options = 4 * len(every_kernel.SHAPES)  # at least one option of each op, at two shifts
    assert len(calls) == 2 and calls[0] > plain + with_options and calls[1] == 2 * calls[0]
