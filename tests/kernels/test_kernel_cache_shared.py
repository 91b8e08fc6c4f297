"""Processes and threads that want a kernel at the same time: one compiles, nobody hangs.

A forked child stands for another process: it shares nothing with this one but the files.
"""

import fcntl
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import fused_op_cuda
from tests.kernels.toy_kernel import KERNEL, TOY, file_of, find, needs_nvrtc

pytestmark = [needs_nvrtc, pytest.mark.usefixtures("cache")]
FORK = multiprocessing.get_context("fork")
ENOUGH = 120  # seconds, after which a process hangs


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
