"""Every example builds, passes its own tests and runs its scripts, in a copy of its folder.

For the CPU where no GPU is in sight, or as USE_CUDA says. Needs neither the installed library nor a
network; `python -m pytest -q --noconftest tests/packaging/test_examples.py` runs it alone.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from build_backend import find_cuda_home

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEW_OP = "my_op"  # made by templates/new_op.py
SECOND_OP = "swiglu"  # made by it too, and then changed as the guide says
SOURCES = {".py", ".h", ".cpp", ".cu", ".md"}
INSTALLABLE = ["scale_bias_relu", NEW_OP, SECOND_OP, "reduce_sum", "convrnn"]
BUILT = [*INSTALLABLE, "square"]

pytestmark = pytest.mark.slow


def environment():
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # ninja of a venv
    env.setdefault("USE_CUDA", "1" if torch.cuda.is_available() else "0")
    home = find_cuda_home()
    if home is not None:
        env.setdefault("CUDA_HOME", str(home))
    return env


def run(folder, *arguments):
    """A Python command in folder; its output is the message of a failure."""
    command = [sys.executable, *arguments]
    env = {**environment(), "TORCH_EXTENSIONS_DIR": str(folder / "build")}  # of square's JIT build
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def make(name, folder):
    if name in (NEW_OP, SECOND_OP):
        run(EXAMPLES.parent, "examples/templates/new_op.py", name, str(folder))
        if name == SECOND_OP:
            patch = EXAMPLES / "templates/swiglu.patch"
            subprocess.run(["patch", "-s", "-p1", "-i", patch], cwd=folder, check=True)
    else:
        ignore = shutil.ignore_patterns("build", "*.so", "__pycache__", ".pytest_cache")
        shutil.copytree(EXAMPLES / name, folder, ignore=ignore)


def build(folder):
    if (folder / "setup.py").exists():
        run(folder, "setup.py", "-q", "build_ext", "--inplace")
    else:
        run(folder, "-c", "import load_jit; load_jit.square_ext()")


@pytest.fixture
def built(tmp_path_factory):
    """Gives the folder of an example that is built; the processes of pytest-xdist build it once."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "examples"
    root.mkdir(exist_ok=True)

    def build_once(name):
        folder, is_built = root / name, root / f"{name}.built"
        with FileLock(root / f"{name}.lock"):
            if not is_built.exists():
                make(name, folder)
                build(folder)
                is_built.touch()
        return folder

    return build_once


@pytest.mark.parametrize("name", BUILT)
def test_own_tests(built, name):
    print(run(built(name), "-m", "pytest", "-q", "-p", "no:cacheprovider"))


def test_scale_bias_relu_trains(built):
    run(built("scale_bias_relu"), "train.py", "--steps", "60")


@pytest.mark.parametrize("name", INSTALLABLE)
def test_benchmark_runs(built, name):
    """Also prints what it measured, for a run with -s."""
    options = ["--no-compile", "--shape", "8,8,256,3"] if name == "convrnn" else []
    print(run(built(name), "benchmark.py", *options))


def test_square_says_that_it_works(built):
    output = run(built("square"), "load_jit.py")
    print(output)
    assert "square works on" in output


@pytest.mark.parametrize("name", [NEW_OP, SECOND_OP])
def test_new_op_leaves_no_placeholder(built, name):
    """Catches a name that new_op.py does not rename, and a place that the patch forgets."""
    files = [file for file in built(name).rglob("*") if file.suffix in SOURCES]
    assert {file.suffix for file in files} == SOURCES
    for file in files:
        assert not re.search("template_?op", file.read_text(), re.IGNORECASE), file
        assert name == NEW_OP or "YOUR OP" not in file.read_text(), file
    assert (built(name) / ".gitignore").exists()


def test_new_op_finds_the_toolkit_of_a_wrapped_nvcc(tmp_path):
    """Catches a setup.py that takes the folder above a wrapper, such as ccache's, for CUDA's."""
    make(NEW_OP, tmp_path / NEW_OP)
    toolkit, wrapper = tmp_path / "cuda-13", tmp_path / "bin" / "nvcc"
    (toolkit / "bin").mkdir(parents=True)
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "#$ TOP={toolkit}/bin/.." >&2\n')
    wrapper.chmod(0o755)
    code = (
        "import os, runpy, setuptools; setuptools.setup = lambda **arguments: None\n"
        "runpy.run_path('setup.py'); print(os.environ['CUDA_HOME'])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    env |= {"PATH": f"{wrapper.parent}{os.pathsep}{env['PATH']}", "USE_CUDA": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path / NEW_OP, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(toolkit)


@pytest.mark.parametrize(
    ("name", "message"), [("My-Op", "in lower case"), ("torch", "is a module"), ("x", "not empty")]
)
def test_new_op_refuses(tmp_path, name, message):
    target = tmp_path / name
    if name == "x":
        (target / "mine").mkdir(parents=True)
    with pytest.raises(AssertionError, match=message):
        run(EXAMPLES / "templates", "new_op.py", name, str(target))
