"""Every example builds, passes its own tests and runs its scripts, in a copy of its folder.

For the CPU where no GPU is in sight, or as USE_CUDA says. Needs neither the installed library nor a
network; `python -m pytest -q --noconftest tests/test_examples.py` runs it alone.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from build_backend import find_cuda_home

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BUILT = ["scale_bias_relu"]

pytestmark = pytest.mark.examples


def environment():
    env = dict(os.environ)
    env.setdefault("USE_CUDA", "1" if torch.cuda.is_available() else "0")
    home = find_cuda_home()
    if home is not None:
        env.setdefault("CUDA_HOME", str(home))
    return env


def run(folder, *arguments):
    """A Python command in folder; its output is the message of a failure."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def build(folder):
    run(folder, "setup.py", "-q", "build_ext", "--inplace")


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Folders with a build under way in each: name -> (folder, future). Two at a time."""
    root = tmp_path_factory.mktemp("examples")
    ignore = shutil.ignore_patterns("build", "*.so", "__pycache__", ".pytest_cache")
    with ThreadPoolExecutor(2) as pool:
        started = {}
        for name in BUILT:
            folder = shutil.copytree(EXAMPLES / name, root / name, ignore=ignore)
            started[name] = folder, pool.submit(build, folder)
        yield started


@pytest.fixture
def built(builds):
    def wait_for(name):
        folder, future = builds[name]
        future.result()
        return folder

    return wait_for


@pytest.mark.parametrize("name", BUILT)
def test_own_tests(built, name):
    print(run(built(name), "-m", "pytest", "-q", "-p", "no:cacheprovider"))


def test_scale_bias_relu_trains(built):
    run(built("scale_bias_relu"), "train.py", "--steps", "60")


@pytest.mark.parametrize("name", BUILT)
def test_benchmark_runs(built, name):
    """Also prints what it measured, for a run with -s."""
    print(run(built(name), "benchmark.py"))
