"""Threads, streams and devices at once; processes that end, and hooks that raise, in backward.

Catches state that calls share, a call on another thread's stream, memory that is given away while a
kernel still reads it, and locks that are held where an exception passes.
"""

import signal
import subprocess
import sys
import threading

import pytest
import torch

import fused_op
from tests.bad_input import FOUR
from tests.case import Case, make_case
from tests.numerics.test_determinism import same_bits
from tests.ops import DEVICES, F32, PAIRS, Pair

needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
SHAPES = [(3, 33), (300, 300), (70, 2048)]  # the longer ones release the interpreter


def run(case: Case) -> dict[str, torch.Tensor]:
    """The case without its poison, whose deterministic mode is one for all threads."""
    leaves = case.leaves(case.present)
    outputs = case.op.fused(*leaves.values(), **case.options)
    outputs = outputs if case.op.adds else (outputs,)
    grads = torch.autograd.grad(outputs, list(leaves.values()), case.grads)
    return {str(i): t.detach() for i, t in enumerate((*outputs, *grads))}


def in_threads(*jobs) -> None:
    """Each job in a thread, all begun at once; the first exception of any is raised here."""
    start, errors = threading.Barrier(len(jobs)), []

    def work(job):
        try:
            start.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_of_all_ops(device, shape):
    """Eight threads with an op, dtypes and tensors of their own."""
    cases = [make_case(FOUR[i % 4], shape, PAIRS[i % len(PAIRS)], device) for i in range(8)]
    truth = [run(case) for case in cases]

    def job(case, expected):
        def work():
            for _ in range(15):
                got = run(case)
                assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"

        return work

    in_threads(*map(job, cases, truth))


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_streams_and_devices(shape):
    """Each thread on each of its streams in turn, on every GPU, without a wait in between."""
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    cases = [
        make_case(FOUR[i % 4], shape, PAIRS[i % len(PAIRS)], d) for i in range(8) for d in devices
    ]
    truth = [run(case) for case in cases]
    for device in devices:
        torch.cuda.synchronize(device)

    def job(case, expected):
        def work():
            streams = [torch.cuda.Stream(case.device) for _ in range(3)]
            found = []
            for i in range(30):
                with torch.cuda.stream(streams[i % 3]):
                    found.append(run(case))
            torch.cuda.synchronize(case.device)
            for got in found:
                assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"

        return work

    in_threads(*map(job, cases, truth))


def test_an_exception_in_a_hook_of_backward(device):
    """It arrives, nothing is locked, and the next backward of the same tensors is right."""
    for op in FOUR:
        case = make_case(op, (300, 300), Pair(F32, F32), device)
        expected = run(case)
        for place in ("rows", "output"):
            leaves = case.leaves(case.present)
            rows = leaves["input"] * 1
            outputs = op.fused(**leaves | {"input": rows})
            outputs = outputs if op.adds else (outputs,)
            hooked = rows if place == "rows" else outputs[0]

            def fail(grad):
                raise ValueError("on purpose")

            hooked.register_hook(fail)
            with pytest.raises(ValueError, match="on purpose"):
                torch.autograd.backward(outputs, case.grads)
        got = run(case)
        assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"


def test_exceptions_beside_good_calls(device):
    """Threads whose calls are refused do not disturb those whose calls are not."""
    case = make_case(FOUR[0], (300, 300), Pair(F32, F32), device)
    expected = run(case)

    def good():
        for _ in range(30):
            got = run(case)
            assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"

    def bad():
        for _ in range(300):
            with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
                fused_op.fused_layer_norm(case.inputs["input"], case.inputs["weight"][:5])

    in_threads(good, bad, good, bad)


EXIT = """
import sys, threading, torch, fused_op
device, how, whose = sys.argv[1:]
ours, theirs = fused_op.fused_layer_norm, torch.nn.functional.layer_norm
norm = ours if whose == "ours" else lambda x: theirs(x, x.shape[-1:])
torch.set_num_threads(2)
x = torch.randn(3000, 1000, device=device, requires_grad=True)
started = threading.Event()

def train():
    for _ in range(20):
        norm(x).square().sum().backward()
        started.set()
    assert x.grad.isfinite().all()
    print("trained")

def leave(grad):
    sys.exit(0)

if how == "thread":  # the main thread ends first, and its exit waits in the middle of training
    threading.Thread(target=train).start()
    started.wait()
elif how == "queued":  # nobody waits for the device
    for _ in range(20):
        norm(x).square().sum().backward()
    print("trained")
else:
    y = norm(x * 1)
    y.register_hook(leave)
    print("trained", flush=True)
    y.sum().backward()
"""


# How some of these programs end with PyTorch's own norms too, on a device whose backward has a
# thread: likely it still frees the hook's exception while the interpreter goes down.
UNWOUND = (-signal.SIGABRT, "trained\n", "terminate called without an active exception\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "queued", "hook"])
def test_the_interpreter_exits_during_backward(device, how):
    """Catches an exit that hangs or ends by a signal, where one with PyTorch's own norm does not.
    (A daemon thread in backward ends any PyTorch program by a signal: nothing to compare.)"""

    def end(whose):
        command = [sys.executable, "-c", EXIT, device, how, whose]
        for _ in range(8 if how == "hook" and device != "cpu" else 1):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            ended = done.returncode, done.stdout, done.stderr[-2000:]
            if ended != UNWOUND:
                break
        return ended

    ended = end("ours")
    if ended[:2] != (0, "trained\n"):
        assert ended[:2] == end("theirs")[:2], ended[2]


@needs_gpu
@pytest.mark.parametrize("op", FOUR, ids=str)
def test_memory_freed_on_another_stream(op):
    """What PyTorch's own operators promise: inputs that come from another stream and were recorded
    on this one may be freed while the kernel waits, and what is written over them comes later."""
    case = make_case(op, (512, 1024), Pair(F32, F32), "cuda")
    expected = run(case)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(5):
        moved = Case(
            op,
            {name: t.clone() for name, t in case.inputs.items()},
            tuple(g.clone() for g in case.grads),
        )
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # clock cycles: the kernels below have not begun
            for t in (*moved.inputs.values(), *moved.grads):
                t.record_stream(side)
            got = run(moved)
        shapes = [t.shape for t in (*moved.inputs.values(), *moved.grads)]
        del moved, t
        for shape in shapes:  # whatever is free on the first stream is overwritten at once
            torch.full(shape, float("nan"), device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"


@needs_gpu
@pytest.mark.parametrize("op", FOUR, ids=str)
def test_intermediate_memory_stays_on_its_stream(op):
    """Workspaces, statistics and copies of strided rows are freed by the op before its kernels run:
    another stream must not get them."""
    case = make_case(op, (4096, 512), Pair(F32, F32), "cuda")
    rows = {n: t.t().contiguous().t() for n, t in case.inputs.items() if n not in op.parameters}
    case = case.with_inputs(**rows)
    expected = run(case)
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(20_000_000)
            got = run(case)
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.full((4096, 512), float("nan"), device="cuda")
                torch.full((512,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        assert all(same_bits(got[name], expected[name]) for name in expected), f"{case}"
