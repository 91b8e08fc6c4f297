"""A context that has a part of the GPU, where large clusters of CTAs may have no place."""

import subprocess
import sys

import pytest
import torch

from tests.ops import DEVICES

PROGRAM = """
import sys, torch, fused_op
from torch.cuda.green_contexts import GreenContext

torch.manual_seed(0)
SHAPES = ((40, 32768), (40, 65536), (64, 131072), (40, 262144))
inputs = [torch.randn(shape).bfloat16().cuda() for shape in SHAPES]
weights = [torch.randn(shape[1]).bfloat16().cuda() for shape in SHAPES]

def run():
    results = []
    # In this thread: those of autograd are not in the green context.
    with torch.autograd.set_multithreading_enabled(False):
        for x, w in zip(inputs, weights):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            for outputs in (
                (fused_op.fused_layer_norm(*leaves),),
                (fused_op.fused_rms_norm(*leaves, 1e-6),),
                fused_op.fused_add_layer_norm(leaves[0], x, leaves[1]),
            ):
                dx, dweight = torch.autograd.grad(outputs, leaves, [x] * len(outputs))
                # Rows have the same bits, whatever kernel took them.
                results += [*(y.detach() for y in outputs), dx, dweight.float()]
    torch.cuda.synchronize()
    return results

def part(multiprocessors):
    try:
        context = GreenContext.create(num_sms=multiprocessors, device_id=0)
    except RuntimeError as error:
        print("no green contexts:", error)
        sys.exit()
    context.set_context()
    found = run()
    context.pop_context()
    return found

multiprocessors = int(sys.argv[2])
if sys.argv[1] == "whole first":
    whole, some = run(), part(multiprocessors)
else:
    some, whole = part(multiprocessors), run()
for a, b in zip(whole, some, strict=True):
    if a.dtype == torch.bfloat16:
        assert torch.equal(a, b), (a.shape, (a.float() - b.float()).abs().max())
    else:  # gradients of the weight: other chunks of rows
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * a.abs().max().item())
print("equal")
"""


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("multiprocessors", [8, 16, 64])
@pytest.mark.parametrize("order", ["whole first", "part first"])
def test_green_context(order, multiprocessors):
    """Catches a cluster whose size was found to fit for the whole GPU and is launched on a part of
    it, or the other way round: the launch fails. dx and y have the same bits on both."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters before compute capability 9.0")
    pytest.importorskip("torch.cuda.green_contexts", reason="PyTorch 2.9 and later")
    command = [sys.executable, "-c", PROGRAM, order, str(multiprocessors)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.stdout.startswith("no green contexts:"):
        pytest.skip(done.stdout.strip())
    assert done.stdout == "equal\n", done.stderr[-2000:]
