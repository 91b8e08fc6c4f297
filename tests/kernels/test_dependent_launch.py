"""Kernels of sm_90 and newer are placed while the ones before them still run: they wait, both for
what they read and for what those still read."""

import pytest
import torch

from fused_op import fused_layer_norm, fused_rms_norm
from tests.ops import DEVICES

pytestmark = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")

# Each takes another kernel, forward and backward: a lane or more a row, a warp, a CTA, few rows and
# many, a cluster, two kernels.
SHAPES = [(4096, 3), (4096, 64), (2048, 1024), (100, 1024), (3000, 768), (200, 8192), (700, 5120)]
SHAPES += [(5, 40_000), (300, 40_000)]


def calls(shape):
    """A chain of calls in which each reads what the one before it wrote, and memory is reused."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16)

    def run():
        leaf = x.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        y = leaf
        for _ in range(4):
            y = fused_layer_norm(y, w)
            y = fused_rms_norm(y, w)
        return (y, *torch.autograd.grad(y, (leaf, w), torch.ones_like(y)))

    return run


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chain_gives_the_bits_of_its_steps_one_by_one(shape) -> None:
    """Catches a kernel that reads before the one in front has written, or writes memory that was
    given back and is still read."""
    run = calls(shape)
    with torch.autograd.graph.saved_tensors_hooks(_waits, _waits):
        expected = run()
    torch.cuda.synchronize()
    for _ in range(20):
        for ours, one_by_one in zip(run(), expected, strict=True):
            assert torch.equal(ours, one_by_one)


def _waits(tensor):
    torch.cuda.synchronize()
    return tensor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_late_input_is_waited_for(shape) -> None:
    """Catches a kernel that starts without the kernel of another library before it: here one that
    takes milliseconds, and then a copy into the input."""
    new = torch.randn(shape, device="cuda")
    weight = torch.randn(shape[1], device="cuda")
    expected = fused_layer_norm(new, weight)
    x = torch.zeros_like(new)
    for _ in range(3):
        x.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        x.copy_(new)
        assert torch.equal(fused_layer_norm(x, weight), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_a_graph_too(shape) -> None:
    """Catches edges between kernels that a capture drops."""
    run = calls(shape)
    expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for ours, eager in zip(captured, expected, strict=True):
        assert torch.equal(ours, eager)
