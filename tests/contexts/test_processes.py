"""Other processes and threads: pickles, forked children, any number of threads.

Catches a child that waits for threads which its parent had, results that depend on how many threads
there are, and calls that disturb one another.
"""

import copy
import multiprocessing
import pickle
import threading

import pytest
import torch

import fused_op
from fused_op import fused_layer_norm
from tests.calls import assert_same, loss, outputs


def test_pickle_and_deepcopy(op):
    function = getattr(fused_op, op.name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert pickle.loads(pickle.dumps(fused_op.FusedLayerNormFunction)) is (
        fused_op.FusedLayerNormFunction
    )


def in_child(x, queue):
    queue.put(fused_layer_norm(x)[-1, -1].item())  # torch.sum would hang


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_hang(threads):
    threads(2)
    x = torch.randn(1024, 4096)
    expected = fused_layer_norm(x)[
        -1, -1
    ].item()  # OpenMP's threads exist now, but not in the child
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(x, queue))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked child hangs")
    assert child.exitcode == 0 and queue.get() == expected


def test_bits_do_not_depend_on_threads(op, threads):
    for shape in ((300, 700), (3, 100_003), (20_000, 8)):
        torch.manual_seed(0)
        args = [
            torch.randn(shape if name in ("input", "residual") else shape[-1:], requires_grad=True)
            for name in op.inputs
        ]
        results = []
        for count in (1, 2, 3):
            threads(count)
            result = op.fused(*args)
            results.append((*outputs(result), *torch.autograd.grad(loss(result), args)))
        assert_same(results[0], results[1], rtol=0, atol=0)
        assert_same(results[0], results[2], rtol=0, atol=0)


def test_threads_share_tensors():
    x, w = torch.randn(300, 300, requires_grad=True), torch.randn(300, requires_grad=True)
    expected = torch.autograd.grad(fused_layer_norm(x, w).square().sum(), (x, w))
    wrong = []

    def work():
        for _ in range(50):
            actual = torch.autograd.grad(fused_layer_norm(x, w).square().sum(), (x, w))
            if not all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)):
                wrong.append(actual)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
