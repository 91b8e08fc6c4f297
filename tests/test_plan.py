"""The plan of a call: how its rows lie over threads, for every width, type and device there is.

Plans are made on the host, so that no GPU is needed. What this catches: a row that is not covered,
a warp without a part of it, a launch beyond a limit, a vector that a row does not hold, and a lane
of an element that depends on how many rows there are: a row would have other bits beside others.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_plan_is_valid(tmp_path):
    program = tmp_path / "plans"
    planner = [str(ROOT / "csrc" / "cuda" / name) for name in ("plan.cpp", "plan_backward.cpp")]
    sources = [str(ROOT / "tests" / "plans.cpp"), *planner]
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    forward, backward = map(int, re.findall(r"(\d+) (?:plans )?of", done.stdout))
    assert forward > 50_000_000 and backward > 200_000_000
