"""The kernels that come with the package, FUSED_OP_JIT and FUSED_OP_MAX_KERNELS."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fused_op_cuda
from tests.kernels.toy_kernel import KERNEL, find, needs_nvrtc

pytestmark = [needs_nvrtc, pytest.mark.usefixtures("cache")]
ROOT = Path(__file__).parents[2]
FIND = (
    "import torch, fused_op_cuda as f; from tests.kernels.toy_kernel import find; print(find()[2])"
)
MAX_KERNELS = "import torch, fused_op_cuda as f; print(f._max_kernels())"


def run_python(code: str, path: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """In a new process, which finds the module in `path`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,  # -c puts it first on sys.path
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def installed(tmp_path):
    """A copy of the module, with a folder of kernels of its own beside it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    module = Path(fused_op_cuda.__file__)
    (folder / module.name).symlink_to(module)
    return folder


def kernels_of(installed: Path) -> Path:
    return installed / "fused_op" / "_kernels"


def write_package(installed: Path) -> None:
    done = run_python(
        "import torch, fused_op_cuda as f; from tests.kernels.toy_kernel import HEADERS, KERNEL;"
        "f._write_package(*KERNEL, HEADERS)",
        installed,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(kernels_of(installed).iterdir())) == 1


@pytest.mark.parametrize("jit", ["", "0", "1", "require"])
def test_the_package_comes_first(installed, cache, jit):
    """Read-only, of whatever user, through links, for GPUs of the same major version: as installed.
    No lock and no cache, and no compiler runs."""
    write_package(installed)
    (path,) = kernels_of(installed).iterdir()
    assert kernels_of(installed).stat().st_mode & 0o755 == 0o755
    assert path.stat().st_mode & 0o444 == 0o444
    assert b"\ncompiler " not in path.read_bytes()
    real = path.rename(installed / "real")
    path.symlink_to(real)
    kernels_of(installed).chmod(0o555)
    try:
        for arch in (90, 93):
            code = FIND.replace("find()", f"find(({KERNEL[0]!r}, {KERNEL[1]!r}, {arch}))")
            # The module in `installed` has to be the one that is imported: check that it was.
            done = run_python(code + "; print(f.__file__)", installed, FUSED_OP_JIT=jit)
            assert done.stderr == ""
            origin, file = done.stdout.split()
            assert origin == "package" and Path(file).parent == installed
    finally:
        kernels_of(installed).chmod(0o755)
    assert not cache.exists()


def test_torn_file_of_the_package_is_no_kernel(installed):
    write_package(installed)
    (path,) = kernels_of(installed).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert run_python(FIND, installed).stdout == "compiled\n"


def test_package_that_cannot_be_written_to(installed):
    (installed / "fused_op").touch()
    done = run_python(
        "import torch, fused_op_cuda as f; from tests.kernels.toy_kernel import HEADERS, KERNEL;"
        "f._write_package(*KERNEL, HEADERS)",
        installed,
    )
    assert re.search("RuntimeError: .*/fused_op/_kernels cannot be opened", done.stderr)


def test_nothing_is_compiled_or_read_if_jit_is_0(cache):
    find()
    content = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    done = run_python(FIND, FUSED_OP_JIT="0")
    assert "RuntimeError: FUSED_OP_JIT is 0, and the package does not have" in done.stderr
    assert KERNEL[1] in done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == content
    shutil.rmtree(cache)
    run_python(FIND, FUSED_OP_JIT="0")
    assert not cache.exists()


@pytest.mark.parametrize("jit", ["", "1", "require"])
def test_kernels_are_compiled_by_default(jit):
    assert run_python(FIND, FUSED_OP_JIT=jit).stdout == "compiled\n"


def test_unknown_value_of_jit():
    done = run_python(FIND, FUSED_OP_JIT="yes")
    assert "RuntimeError: FUSED_OP_JIT must be 0, 1 or require, got 'yes'" in done.stderr


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "many", "12 ", "9999999999"])
def test_unknown_count_of_kernels(count):
    done = run_python(MAX_KERNELS, FUSED_OP_MAX_KERNELS=count)
    wanted = f"RuntimeError: FUSED_OP_MAX_KERNELS must be a positive integer, got '{count}'"
    assert wanted in done.stderr


def test_count_of_kernels():
    assert run_python(MAX_KERNELS, FUSED_OP_MAX_KERNELS="64").stdout == "64\n"
    assert run_python(MAX_KERNELS, FUSED_OP_MAX_KERNELS="").stdout == "512\n"


def test_jit_is_read_once(cache, monkeypatch):
    assert find()[2] == "compiled"
    monkeypatch.setenv("FUSED_OP_JIT", "0")
    assert find()[2] == "cache"
