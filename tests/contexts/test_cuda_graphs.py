"""CUDA graphs, streams and devices: the kernels run where and when PyTorch's would.

Catches a call that capture refuses (it waits for the GPU, or takes memory of its own), a replay
that reads the old numbers, and a kernel on another stream or device than the current tensors'.
"""

import copy
import gc

import pytest
import torch
from torch import nn

import fused_op
from tests.calls import assert_same, loss, outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# One block does all the work, or many do, and sum the parameters' gradients in a second kernel.
SHAPES = pytest.mark.parametrize("shape", [(3, 6), (700, 1000), (5, 65536)], ids=str)


@pytest.fixture(autouse=True)
def no_garbage():
    """What earlier tests left is freed before a capture, not in it: that would invalidate it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaves(op, shape, device="cuda", requires_grad=True):
    shapes = [shape if name in ("input", "residual") else shape[-1:] for name in op.inputs]
    return [torch.randn(s, device=device, requires_grad=requires_grad) for s in shapes]


def refill(tensors):
    """Other numbers in the same memory, where a graph will find them."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))


def results(function, args):
    """Outputs and gradients, without the history that leads to them."""
    result = function(*args)
    grads = torch.autograd.grad(loss(result), args)
    return tuple(t.detach() for t in (*outputs(result), *grads))


def capture(work):
    """(graph, what work() returned): a replay fills those tensors again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what happens once only, such as loading a kernel, happens here
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@SHAPES
def test_forward(op, shape):
    args = leaves(op, shape, requires_grad=False)
    graph, result = capture(lambda: outputs(op.fused(*args)))
    for _ in range(2):
        refill(args)
        graph.replay()
        assert_same(result, op.fused(*args), rtol=0, atol=0)


@SHAPES
def test_forward_and_backward(op, shape):
    args = leaves(op, shape)
    graph, result = capture(lambda: results(op.fused, args))
    for _ in range(2):
        refill(args)
        graph.replay()
        assert_same(result, results(op.fused, args), rtol=0, atol=0)


class Block(nn.Module):
    """Each module once."""

    def __init__(self):
        super().__init__()
        self.first, self.second = fused_op.FusedLayerNorm(64), fused_op.FusedRMSNorm(64)
        self.third, self.last = fused_op.FusedAddLayerNorm(64), fused_op.FusedAddRMSNorm(64)

    def forward(self, x):
        branch, residual = self.third(self.second(self.first(x).relu()), x)
        return self.last(branch, residual)


def test_training_step():
    """Forward, backward and the optimizer's step in one graph, beside the same steps without."""
    model = Block().cuda()
    x, target = torch.randn(2, 32, 64, device="cuda")

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad(set_to_none=True)
            output, residual = model(x)
            (output * target + residual).square().mean().backward()
            optimizer.step()

        return step

    graph, _ = capture(step_of(model))
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    eager_step = step_of(twin)
    for _ in range(3):
        refill([x])
        graph.replay()
        eager_step()
    trained = tuple(model.parameters())
    assert_same(trained, tuple(twin.parameters()))
    assert not any(torch.equal(p, s) for p, s in zip(trained, start, strict=True))


@pytest.mark.parametrize(
    "name", ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm"]
)
def test_make_graphed_callables(name):
    module = getattr(fused_op, name)(64, device="cuda")
    twin = copy.deepcopy(module)

    def rows():
        count = 2 if "Add" in name else 1
        return tuple(torch.randn(32, 64, device="cuda", requires_grad=True) for _ in range(count))

    graphed = torch.cuda.make_graphed_callables(module, rows())
    for _ in range(2):
        args = rows()
        both = []
        for norm in (graphed, twin):
            result = norm(*args)
            grads = torch.autograd.grad(loss(result), [*args, *norm.parameters()])
            # clones: the next call of a graph writes into the same memory
            both.append(tuple(t.detach().clone() for t in (*outputs(result), *grads)))
        assert_same(*both, rtol=0, atol=0)


def test_compile_with_cuda_graphs(op):
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(op.fused, fullgraph=True, mode="reduce-overhead")
    args = leaves(op, (32, 64))
    for _ in range(4):  # warm-up, capture, replays
        refill(args)
        torch.compiler.cudagraph_mark_step_begin()
        actual = tuple(t.clone() for t in results(compiled, args))
        assert_same(actual, results(op.fused, args))
    assert counters["inductor"]["cudagraph_skips"] == 0


@SHAPES
def test_stream_other_than_the_default(op, shape):
    """The numbers arrive late, on that stream: whoever does not wait there computes with zeros."""
    values = leaves(op, shape)
    expected = results(op.fused, values)
    late = [torch.zeros_like(t, requires_grad=True) for t in values]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # clock cycles, some 50 ms
        with torch.no_grad():
            for tensor, value in zip(late, values, strict=True):
                tensor.copy_(value)
        actual = results(op.fused, late)
    stream.synchronize()
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@SHAPES
def test_device_other_than_the_current(op, shape):
    args = leaves(op, shape, device="cuda:1")
    with torch.cuda.device(1):
        expected = results(op.fused, args)
    with torch.cuda.device(0):
        actual = results(op.fused, args)
        assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda", 1) for t in actual)
    assert_same(actual, expected, rtol=0, atol=0)
