"""No two kernels share a key, by which the table of loaded kernels finds them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.test_run_kernels import needs_interpreter

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@needs_interpreter
def test_every_kernel_has_a_key_of_its_own():
    """Catches a key that lacks a dtype, an option or a rule: a call after another one with that key
    would get its kernel, and wrong results without an error."""
    command = [sys.executable, "-m", "tests.kernels.every_key"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(re.findall(r"(\w+) (\d+)", done.stdout))
    least = dict.fromkeys(("norms", "quantized", "gated", "rope", "modulated"), 800)
    least["images"] = 250
    assert counts.keys() == least.keys()
    assert all(int(counts[name]) > count for name, count in least.items()), counts
