"""The files of compiled kernels: found again, never trusted blindly, compiled once for all.

A forked child stands for another process: it shares nothing with this one but the files.
"""

import fcntl
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fused_op_cuda
from fused_op.__main__ import main
from tests.toy_kernel import HEADERS, KERNEL, OTHER, TOY, file_of, find, needs_nvrtc

pytestmark = needs_nvrtc
ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
ENOUGH = 120  # seconds, after which a process hangs


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the cache, which the first kernel creates."""
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def problem() -> str:
    return fused_op_cuda._cache_info()["problem"]


def run_python(code: str, path: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """In a new process, which finds the module in `path`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,  # -c puts it first on sys.path
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=ENOUGH,
    )


FIND = "import torch, fused_op_cuda as f; from tests.toy_kernel import find; print(find()[2])"
MAX_KERNELS = "import torch, fused_op_cuda as f; print(f._max_kernels())"


# --- Found again ----------------------------------------------------------------------------------


def test_second_time_from_the_cache(cache):
    symbol, code, origin = find()
    assert origin == "compiled"
    assert [path.name for path in cache.iterdir()] == [file_of(cache).name]  # no lock, no rest
    assert find() == (symbol, code, "cache")
    assert find(OTHER)[2] == "compiled"


def test_folder_and_file_are_private(cache):
    previous = os.umask(0)
    try:
        find()
    finally:
        os.umask(previous)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert file_of(cache).stat().st_mode & 0o777 == 0o600


def test_folder_of_the_cache(tmp_path, monkeypatch):
    """Which variable counts, and that the folders above are created."""

    def folder() -> str:
        return fused_op_cuda._cache_info()["folder"]

    assert folder() == str(tmp_path / "cache")
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", f"{tmp_path}/a/../b///")
    assert folder() == str(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", "relative")
    assert folder() == str(tmp_path / "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", "")
    assert folder() == str(tmp_path / "xdg" / "fused_op")
    monkeypatch.delenv("FUSED_OP_CACHE_DIR")
    assert folder() == str(tmp_path / "xdg" / "fused_op")
    for unset in ("", "relative"):  # which the specification of XDG says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert folder() == str(tmp_path / "home" / ".cache" / "fused_op")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder() == str(tmp_path / "home" / ".cache" / "fused_op")
    assert find()[2] == "compiled" and find()[2] == "cache"
    assert (tmp_path / "home" / ".cache").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("HOME")
    assert folder() == "" and "no home directory" in problem()
    assert find()[2] == "compiled"


def test_key_tells_kernels_apart():
    """Catches code of an edit ago, or for another GPU, that is found in the place of new code."""
    (header, name, arch), edited = KERNEL, {"toy.cuh": TOY + "\n"}
    keys = {
        fused_op_cuda._kernel_key(header, name, arch, HEADERS),
        fused_op_cuda._kernel_key(header, OTHER[1], arch, HEADERS),
        fused_op_cuda._kernel_key(header, name, 80, HEADERS),
        fused_op_cuda._kernel_key(header, name, arch, edited),
        fused_op_cuda._kernel_key(header, name, arch, HEADERS | {"more.cuh": ""}),
        fused_op_cuda._kernel_key("other.cuh", name, arch, HEADERS),
    }
    assert len(keys) == 6
    for key in keys:
        assert re.search(r"^sources [0-9a-f]{64}$", key, re.MULTILINE)
        assert "\noptions -std=c++20 -default-device -fmad=false\n" in key
        assert f"\ncompiler {fused_op_cuda._compiler_identity()}\n" in key
        assert key.endswith("\n\n") and "\n\n" not in key[:-1]  # no key begins with another
    assert find()[2] == find(headers=edited)[2] == find((header, name, 80))[2] == "compiled"
    assert find()[2] == find(headers=edited)[2] == find((header, name, 80))[2] == "cache"


@pytest.mark.parametrize("line", ["sources", "compiler", "arch", "options"])
def test_a_file_of_another_key_is_not_taken(cache, line):
    """Catches a file that is found by its name alone: of other sources, say, under this name."""
    find()
    key = fused_op_cuda._kernel_key(*KERNEL, HEADERS)
    path = file_of(cache)
    other = re.sub(rf"(?m)^{line} .*", f"{line} other", key)
    assert other != key
    body = (
        path.read_bytes()
        .partition(b"\n")[2]
        .partition(b"\n")[2]
        .replace(key.encode(), other.encode())
    )
    write(path, body)
    assert find()[2] == "compiled"
    assert key.encode() in path.read_bytes()
    assert find()[2] == "cache"


def write(path: Path, body: bytes) -> None:
    """A file with a right checksum."""
    path.write_bytes(b"fused_op kernel 1\n%s\n" % hashlib.sha256(body).hexdigest().encode() + body)


# --- Damaged, or of somebody else -----------------------------------------------------------------


@pytest.mark.parametrize("damage", ["torn", "empty", "a bit", "longer", "no symbol", "format"])
def test_damaged_file_is_compiled_again(cache, damage):
    symbol, code, _ = find()
    path = file_of(cache)
    content = path.read_bytes()
    if damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "a bit":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "no symbol":
        write(path, fused_op_cuda._kernel_key(*KERNEL, HEADERS).encode())
    else:
        path.write_bytes(content.replace(b"kernel 1\n", b"kernel 2\n", 1))
    assert find() == (symbol, code, "compiled")
    assert find() == (symbol, code, "cache")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720])
def test_folder_that_others_may_write_to_is_not_used(cache, mode):
    find()
    before = sorted(path.stat().st_mtime_ns for path in cache.iterdir())
    cache.chmod(mode)
    assert find()[2] == find()[2] == "compiled"
    assert problem() == f"{cache} can be written to by other users"
    assert sorted(path.stat().st_mtime_ns for path in cache.iterdir()) == before
    cache.chmod(0o755)
    assert find()[2] == "cache"


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_file_that_others_may_write_to_is_replaced(cache, mode):
    find()
    file_of(cache).chmod(mode)
    assert find()[2] == "compiled"
    assert file_of(cache).stat().st_mode & 0o777 == 0o600
    assert find()[2] == "cache"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_folder_or_file_of_another_user_is_not_used(cache):
    find()
    os.chown(file_of(cache), 12345, -1)
    assert find()[2] == "compiled"
    assert find()[2] == "cache"  # it was replaced
    os.chown(cache, 12345, -1)
    assert find()[2] == find()[2] == "compiled"
    assert problem() == f"{cache} belongs to user 12345"


@pytest.mark.parametrize("slash", ["", "/", "/."])
def test_link_to_a_folder_is_not_followed(cache, tmp_path, monkeypatch, slash):
    find()
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to("elsewhere")
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", str(cache) + slash)
    assert find()[2] == find()[2] == "compiled"
    assert problem() == f"{cache} is a symbolic link"


def test_link_to_a_file_is_not_followed(cache, tmp_path):
    find()
    moved = file_of(cache).rename(tmp_path / "elsewhere")
    content = moved.read_bytes()
    file_of(cache).symlink_to(moved)
    assert find()[2] == "compiled"
    assert not file_of(cache).is_symlink()
    assert moved.read_bytes() == content
    assert find()[2] == "cache"


def test_link_to_a_lock_is_not_followed(cache, tmp_path):
    """Catches a file that is created, or opened for writing, wherever a link points to."""
    cache.mkdir(0o700)
    file_of(cache, "lock").symlink_to(tmp_path / "elsewhere")
    assert find()[2] == "compiled"
    assert not (tmp_path / "elsewhere").exists()
    assert find()[2] == "cache"


def test_pipe_does_not_block(cache):
    cache.mkdir(0o700)
    os.mkfifo(file_of(cache))
    assert find()[2] == "compiled"
    assert find()[2] == "cache"


@pytest.mark.parametrize("place", ["a file", "a file above", "cannot be created"])
def test_unusable_folder_costs_compilations_alone(tmp_path, monkeypatch, capfd, place):
    """Catches an error, or a warning for each kernel, where the home directory is read-only."""
    (tmp_path / "file").touch()
    path = {"a file": tmp_path / "file", "a file above": tmp_path / "file" / "cache"}
    monkeypatch.setenv("FUSED_OP_CACHE_DIR", str(path.get(place, "/proc/fused_op")))
    first = find()
    assert first[2] == "compiled"
    assert find() == first
    assert capfd.readouterr() == ("", "")
    assert "cannot be opened" in problem()
    with pytest.raises(RuntimeError, match="cannot be opened"):
        fused_op_cuda._clear_cache()


def test_a_file_that_cannot_be_replaced(cache, capfd):
    """As where the disk is full: a folder lies in the place of the file."""
    file_of(cache).mkdir(parents=True)
    cache.chmod(0o700)
    assert find()[2] == find()[2] == "compiled"
    assert [path.name for path in cache.iterdir()] == [file_of(cache).name]
    assert capfd.readouterr() == ("", "")


def test_clear_removes_what_is_ours(cache):
    find()
    find(OTHER)
    lock, torn = file_of(cache, "lock"), file_of(cache, "kernel.17.tmp")
    theirs = [cache / "notes.txt", cache / "other.kernel", cache / ("0" * 64 + ".txt")]
    for path in [lock, torn, *theirs]:
        path.write_text("12345")
    info = fused_op_cuda._cache_info()
    assert info["kernels"] == 2
    assert info["bytes"] == 10 + sum(
        path.stat().st_size for path in cache.glob("*.kernel") if len(path.name) > 64
    )
    assert fused_op_cuda._clear_cache() == 2
    assert sorted(cache.iterdir()) == sorted(theirs)
    assert fused_op_cuda._cache_info()["kernels"] == fused_op_cuda._clear_cache() == 0
    assert find()[2] == "compiled"


# --- python -m fused_op cache ---------------------------------------------------------------------


def test_command(cache, capsys):
    find()
    find(OTHER)
    assert main(["cache"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert found["folder"] == str(cache)
    assert found["kernels"] == "2"
    assert found["bytes"] == str(sum(path.stat().st_size for path in cache.iterdir()))
    assert found["problem"] == "none"
    assert fused_op_cuda._compiler_identity().startswith(found["compiler"] + " ")
    assert re.fullmatch(r".*/fused_op/_kernels, \d+ kernels", found["package"])
    assert main(["cache", "--clear"]) == 0
    assert "\nkernels   0, 2 removed\n" in capsys.readouterr().out
    assert list(cache.iterdir()) == []


def test_command_says_what_is_wrong(cache, capsys):
    """Catches a status of 0 where every process compiles anew."""
    cache.mkdir(0o777)
    cache.chmod(0o777)
    assert main(["cache"]) == 1
    wrong = f"{cache} can be written to by other users"
    assert f"\nproblem   {wrong}: kernels are not kept\n" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 1
    assert capsys.readouterr().out == f"Not cleared: {wrong}\n"


# --- Several at once ------------------------------------------------------------------------------


def in_children(function, count: int) -> list:
    """What forked children return that call function(their index) at the same time."""
    start, results = FORK.Barrier(count), FORK.SimpleQueue()

    def child(index: int) -> None:
        start.wait(ENOUGH)
        results.put(function(index))

    children = [FORK.Process(target=child, args=(index,), daemon=True) for index in range(count)]
    for each in children:
        each.start()
    for each in children:
        each.join(ENOUGH)
    codes = [each.exitcode for each in children]
    for each in children:
        each.kill()
    assert codes == [0] * count
    return [results.get() for _ in children]


def test_eight_processes_compile_once(cache):
    for turn in range(5):
        headers = {"toy.cuh": TOY + f"// {turn}\n"}
        found = in_children(lambda _, headers=headers: find(headers=headers), 8)
        assert sorted(origin for *_, origin in found) == ["cache"] * 7 + ["compiled"]
        assert len({result[:2] for result in found}) == 1
    assert len(list(cache.iterdir())) == 5  # no lock is left behind


def test_threads_compile_once(cache):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: find(), range(8)))
    assert sorted(origin for *_, origin in found) == ["cache"] * 7 + ["compiled"]


def test_who_holds_the_lock_and_hangs_is_not_waited_for(cache):
    cache.mkdir(0o700)
    with file_of(cache, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find(patience_s=0.1)[2] == "compiled"
        assert find(patience_s=0.1)[2] == "cache"
    file_of(cache).unlink()
    assert find(patience_s=ENOUGH)[2] == "compiled"  # the file of a lock is no lock


def test_kernel_of_a_holder_that_hangs_is_taken(cache, tmp_path):
    """Catches a wait for a lock that a forked child has inherited: the kernel is there."""
    find()
    content = file_of(cache).read_bytes()
    file_of(cache).unlink()
    with file_of(cache, "lock").open("w") as lock, ThreadPoolExecutor(1) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threads.submit(find, patience_s=ENOUGH)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").rename(file_of(cache))
        assert waiting.result(timeout=ENOUGH)[2] == "cache"


def test_children_that_are_forked_during_a_compilation_compile():
    """Catches a lock that is held in the parent at the fork, and so in the child for ever."""
    stop = threading.Event()

    def compile_on() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            fused_op_cuda._compile(*KERNEL, {"toy.cuh": TOY + f"// {count}\n"})

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(compile_on) for _ in range(2)]
        try:
            for turn in range(10):
                headers = {"toy.cuh": TOY + f"// child {turn}\n"}
                [found] = in_children(lambda _, headers=headers: find(headers=headers), 1)
                assert found[2] == "compiled"
        finally:
            stop.set()
        for each in running:
            each.result(ENOUGH)


# --- FUSED_OP_JIT and the package -----------------------------------------------------------------


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
        "import torch, fused_op_cuda as f; from tests.toy_kernel import HEADERS, KERNEL;"
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
        "import torch, fused_op_cuda as f; from tests.toy_kernel import HEADERS, KERNEL;"
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
