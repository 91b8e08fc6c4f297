"""The layout of a long row over a cluster of CTAs, for every row, device and dtype there is.

The launchers decide on the host, so that no GPU is needed. What this catches: a CTA without a part
of the row, which ends while its peers still write into its shared memory; a row that is not
covered; a cluster, CTA or shared memory beyond a limit.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_layout_is_valid(tmp_path):
    program = tmp_path / "cluster_layouts"
    source = ROOT / "tests" / "cluster_layouts.cpp"
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    walked = int(done.stdout.split()[0])
    assert walked > 10_000_000
