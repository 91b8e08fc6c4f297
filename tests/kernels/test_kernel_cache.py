"""The files of compiled kernels: found again, and never trusted blindly."""

import hashlib
import os
import re
from pathlib import Path

import pytest

import fused_op_cuda
from fused_op.__main__ import main
from tests.kernels.toy_kernel import HEADERS, KERNEL, OTHER, TOY, file_of, find, needs_nvrtc

pytestmark = [needs_nvrtc, pytest.mark.usefixtures("cache")]


def problem() -> str:
    return fused_op_cuda._cache_info()["problem"]


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
