"""Memory stays flat: over calls, errors, distinct shapes and captured graphs.

Host memory is counted in bytes that malloc has given out and in blocks of the interpreter: one
object that each call leaves behind is as many of them as there are calls.

Where there is a GPU, the tests run in a process of their own: a profiler that another test has
started stays in the process, and takes memory with each call of any device.
"""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_op
from tests.bad_input import FOUR
from tests.case import make_case
from tests.contexts.test_cuda_graphs import capture
from tests.ops import BF16, F32, Pair

CALLS = int(os.environ.get("FUSED_OP_LEAK_CALLS", 1000))
ALONE = "FUSED_OP_LEAKS_ALONE"  # in the environment of that process
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Heap(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks given_out free top".split()
    ]


def host_memory() -> tuple[int, int]:
    """(bytes that malloc has given out, blocks that the interpreter has)."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs mallinfo2 of glibc 2.33")
    libc.mallinfo2.restype = Heap
    heap = libc.mallinfo2()
    return heap.given_out + heap.hblkhd, sys.getallocatedblocks()


def device_memory() -> tuple[int, int]:
    """(bytes of tensors, bytes that PyTorch has from the driver), of this process alone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def assert_flat(device: str, work, calls: int = CALLS, warm_up: int = 50) -> None:
    """Nothing grows while work(i) is called; what happens once only is over after the warm-up.

    With a GPU, the driver and PyTorch take memory of their own at times. A leak takes memory in
    every window of so many calls: one window without a fault shows that there is none.
    """
    if torch.cuda.is_available() and ALONE not in os.environ:
        pytest.skip("test_beside_a_gpu runs it")
    for i in range(warm_up):
        work(i)
    windows = 4 if torch.cuda.is_available() else 1
    for window in range(windows):
        faults = faults_of(device, work, warm_up + window * calls, calls)
        if not faults:
            return
    raise AssertionError(faults)


def faults_of(device: str, work, first: int, calls: int) -> list[str]:
    """What has grown too far over so many calls."""
    before = host_memory(), device_memory() if device == "cuda" else (0, 0)
    for i in range(calls):
        work(first + i)
    after = host_memory(), device_memory() if device == "cuda" else (0, 0)
    (heap, blocks), (tensors, reserved) = (
        [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
    )
    # Less than the smallest block of malloc, and half an object, a call. With a GPU the driver and
    # PyTorch's allocator take a little more at times.
    heap_limit = max(8 * calls, 16384) if device == "cpu" else max(64 * calls, 32768)
    limits = {
        f"{heap} bytes of the heap": heap < heap_limit,
        f"{blocks} objects": blocks < max(calls // 2, 500),
        f"{tensors} bytes of tensors on the GPU": tensors <= 0,
        f"{reserved} bytes of the GPU's segments": reserved <= 2**21,
    }
    return [f"{what} after {calls} calls" for what, kept in limits.items() if not kept]


@needs_gpu
@pytest.mark.slow
@pytest.mark.skipif(ALONE in os.environ, reason="this is its process")
def test_beside_a_gpu():
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    env = os.environ | {ALONE: "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=FOUR, ids=str)
def op(request):
    return request.param


def step(op, case):
    leaves = case.leaves(case.present)
    outputs = op.fused(*leaves.values(), **case.options)
    outputs = outputs if op.adds else (outputs,)
    torch.autograd.backward(outputs, case.grads)


@pytest.mark.parametrize("pair", [Pair(F32, F32), Pair(BF16, F32)], ids=str)
def test_forward_and_backward(op, pair, device):
    case = make_case(op, (8, 64), pair, device)
    assert_flat(device, lambda i: step(op, case))


def test_what_kernels_need_beside_their_results(device):
    """Copies of strided rows, float32 factors, dropout masks, main_grad, workspaces."""
    x = torch.randn(64, 40, device=device).t()
    norms = [
        fused_op.FusedLayerNorm(64, device=device, dropout_p=0.1, zero_centered=True),
        fused_op.FusedRMSNorm(64, device=device, fuse_wgrad_accumulation=True),
    ]
    norms[1].weight.main_grad = torch.zeros(64, device=device)

    def work(i):
        for norm in norms:
            norm(x.detach().requires_grad_()).sum().backward()
            norm.zero_grad()

    assert_flat(device, work)


def test_errors(op, device):
    """In forward, and where one tensor after another has been looked at."""
    case = make_case(op, (8, 64), Pair(F32, F32), device)
    wrong = [
        {"weight": case.inputs["weight"][:5]},
        {"weight": case.inputs["weight"].long()},
        {"input": case.inputs["input"].long()},
        {"weight": "weight"},
    ]

    def work(i):
        with pytest.raises((RuntimeError, TypeError)):
            op.fused(**case.inputs | wrong[i % len(wrong)])

    assert_flat(device, work)


def test_errors_in_backward(op, device):
    """A graph that an exception leaves half-way is freed."""
    case = make_case(op, (8, 64), Pair(F32, F32), device)

    def fail(grad):
        raise ValueError("on purpose")

    def work(i):
        leaves = case.leaves(case.present)
        rows = leaves["input"] * 1
        rows.register_hook(fail)
        outputs = op.fused(**leaves | {"input": rows})
        with pytest.raises(ValueError, match="on purpose"):
            (outputs[0] if op.adds else outputs).sum().backward()

    assert_flat(device, work)


def test_distinct_shapes(op, device):
    """A cache by shape would grow with each of them."""
    data = torch.randn(2, 1 << 15, device=device)

    # On a GPU each width has a kernel. The warm-up sees every width, and most sizes: the heap keeps
    # some of what they took.
    def work(i):
        rows, cols = 1 + i % 331, 65 + i % 24
        x, y = (t[: rows * cols].view(rows, cols).requires_grad_() for t in data)
        result = op.fused(*((x, y) if op.adds else (x,)))
        (result[0] if op.adds else result).sum().backward()
        data.grad = None

    assert_flat(device, work, warm_up=2000)


@needs_gpu
def test_captured_graphs(op):
    case = make_case(op, (512, 1024), Pair(F32, F32), "cuda")

    def work(i):
        leaves = case.leaves(case.present)

        def both():
            outputs = op.fused(*leaves.values(), **case.options)
            outputs = outputs if op.adds else (outputs,)
            return (*outputs, *torch.autograd.grad(outputs, [*leaves.values()], case.grads))

        graph, result = capture(both)
        graph.replay()
        torch.cuda.synchronize()
        del result
        graph.reset()

    assert_flat("cuda", work, calls=50, warm_up=5)


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_leak_is_noticed(device, size):
    """Catches a count that is flat whatever is kept."""
    kept = []
    with pytest.raises(AssertionError, match="after 1000 calls"):
        assert_flat(device, lambda i: kept.append(torch.zeros(size, device=device)), calls=1000)
