"""The plan of a call: how its rows lie over threads, for every width, type and device there is.

Plans are made on the host, so that no GPU is needed. What this catches: a row that is not covered,
a warp without a part of it, a launch beyond a limit, a vector that a row does not hold, and a lane
of an element that depends on how many rows there are: a row would have other bits beside others.
And a CTA of a cluster without a part of the row, which would end while its peers still write into
its shared memory.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_plan_is_valid(tmp_path):
    program = tmp_path / "plans"
    planner = sorted((ROOT / "csrc" / "cuda").glob("plan*.cpp"))
    rules = sorted((ROOT / "tests" / "kernels").glob("plans*.cpp"))
    sources = [str(path) for path in (*rules, *planner)]
    flags = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    counts = list(map(int, re.findall(r"(\d+) (?:plans )?of", done.stdout)))
    # forward, variants, long, backward, long, channels, groups
    least = (40_000_000, 4_000_000, 100_000_000, 70_000_000, 20_000_000, 8_000_000, 2_000_000)
    assert len(counts) == 7 and all(map(int.__gt__, counts, least))
