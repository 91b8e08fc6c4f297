"""The kernels that come with the package, FUSED_OP_JIT and FUSED_OP_MAX_KERNELS."""

import re
import shutil
from pathlib import Path

import pytest

import fused_op_cuda
from tests.children import ROOT, Done, run_children
from tests.kernels.toy_kernel import KERNEL, find, needs_nvrtc

pytestmark = [needs_nvrtc, pytest.mark.usefixtures("cache")]
JITS = "", "0", "1", "require"
FIND = "from tests.kernels.toy_kernel import find; print(find()[2])"


def run_python(code: str, path: Path = ROOT, **env: str) -> Done:
    """In a new process, which finds the module in `path`."""
    return run_children(code, [env], path)[0]


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
        "import fused_op_cuda as f; from tests.kernels.toy_kernel import HEADERS, KERNEL;"
        "f._write_package(*KERNEL, HEADERS)",
        installed,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(kernels_of(installed).iterdir())) == 1


def test_the_package_comes_first(installed, cache):
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
    asked = [f"find(({KERNEL[0]!r}, {KERNEL[1]!r}, {arch}))[2]" for arch in (90, 93)]
    # The module in `installed` has to be the one that is imported: print which it was.
    code = "import fused_op_cuda as f; from tests.kernels.toy_kernel import find;"
    code += f"print({', '.join(asked)}, f.__file__)"
    try:
        for done in run_children(code, [{"FUSED_OP_JIT": jit} for jit in JITS], installed):
            assert done.stderr == ""
            *origins, file = done.stdout.split()
            assert origins == ["package"] * 2 and Path(file).parent == installed
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
        "import fused_op_cuda as f; from tests.kernels.toy_kernel import HEADERS, KERNEL;"
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


def test_kernels_are_compiled_by_default(cache):
    for jit in ("", "1", "require"):
        shutil.rmtree(cache, ignore_errors=True)
        assert run_python(FIND, FUSED_OP_JIT=jit).stdout == "compiled\n"


def test_unknown_value_of_jit():
    done = run_python(FIND, FUSED_OP_JIT="yes")
    assert "RuntimeError: FUSED_OP_JIT must be 0, 1 or require, got 'yes'" in done.stderr


def test_count_of_kernels():
    code = "import fused_op_cuda as f; print(f._max_kernels())"
    counts = "64", "", "0", "-1", "1.5", "many", "12 ", "9999999999"
    good, default, *bad = run_children(code, [{"FUSED_OP_MAX_KERNELS": n} for n in counts])
    assert (good.stdout, default.stdout) == ("64\n", "512\n")
    for count, done in zip(counts[2:], bad, strict=True):
        wanted = f"RuntimeError: FUSED_OP_MAX_KERNELS must be a positive integer, got '{count}'"
        assert wanted in done.stderr


def test_jit_is_read_once(cache, monkeypatch):
    assert find()[2] == "compiled"
    monkeypatch.setenv("FUSED_OP_JIT", "0")
    assert find()[2] == "cache"
