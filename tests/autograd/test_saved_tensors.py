"""What backward keeps, and who may take it away in between: checkpointing, hooks, offloading.

Catches saved tensors that bypass autograd's hooks (an activation that no offloading sees), more of
them than documented, and a second forward that gives other bits than the first.
"""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.calls import Calls, arguments, assert_same, loss, outputs
from tests.ops import BF16

FORWARD = "fused_op::norm_forward"

pytestmark = pytest.mark.usefixtures("recorder")


def saved(op, args):
    """What an op hands to autograd, in order, beside its result."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = op.fused(*args)
    return kept, outputs(result)


def test_saved_is_the_input_the_weight_and_the_statistics(op, device):
    """Catches another activation kept alive: with a residual, the sum is one that there is."""
    args = arguments(op, requires_grad=True, device=device)
    (x, weight, stats), result = saved(op, args)
    named = dict(zip(op.inputs, args, strict=True))
    assert x.data_ptr() == (result[1] if op.adds else named["input"]).data_ptr()
    assert weight.data_ptr() == named["weight"].data_ptr()
    rows = args[0].numel() // args[0].shape[-1]
    assert stats.shape == (2 if op.centred else 1, rows)


def test_hooks_replace_what_is_saved(op, device):
    """Catches a backward that reads another tensor than the one that the hooks give back."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    with saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(device)):
        result = op.fused(*args)
    assert_same(torch.autograd.grad(loss(result), args), expected, rtol=0, atol=0)
    with saved_tensors_hooks(lambda t: t, torch.zeros_like):
        output = outputs(op.fused(*args))[0]
    assert not torch.autograd.grad(output.sum(), args)[0].any()  # all it reads is 0


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu(op, device, pin_memory):
    """Catches saved tensors that do not come back from there as they were."""
    if pin_memory and device == "cpu":
        pytest.skip("memory is pinned for a GPU")
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    with save_on_cpu(pin_memory=pin_memory):
        result = op.fused(*args)
    assert_same(torch.autograd.grad(loss(result), args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint(op, device, use_reentrant, autocast):
    """Catches a second forward that differs, or that runs outside of the first one's autocast;
    and one that does not happen, so that nothing was saved by checkpointing."""
    args = arguments(op, requires_grad=True, device=device)

    def block(first, *others):
        return op.fused(first * 2, *others)

    def checkpointed(*args):
        return checkpoint(block, *args, use_reentrant=use_reentrant)

    runs = []
    for function in (block, checkpointed):
        for leaf in args:
            leaf.grad = None
        with profile() as trace:
            with torch.autocast(device, BF16, enabled=autocast):
                total = loss(function(*args))
            total.backward()
        forwards = [event.name for event in trace.events()].count(FORWARD)
        runs.append((forwards, (total, *(leaf.grad for leaf in args))))
    (once, expected), (twice, actual) = runs
    assert (once, twice) == (1, 2)
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [False, True])
def test_selective_checkpoint(op, device, keep):
    """Catches an op that a policy cannot name, and so cannot keep or compute again by choice."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    norm = torch.ops.fused_op.norm_forward.default

    def policy(context, operator, *args, **kwargs):
        save = operator is norm and keep
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    with Calls() as calls:
        result = checkpoint(
            op.fused,
            *args,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        grads = torch.autograd.grad(loss(result), args)
    assert calls.names.count(FORWARD) == (1 if keep else 2)
    assert_same(grads, expected, rtol=0, atol=0)


def test_compiled_checkpoint(op, device):
    """Catches a graph break inside, and a second forward that the compiler does not repeat."""
    torch._dynamo.reset()
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args):
        return checkpoint(op.fused, *args, use_reentrant=False)

    assert_same(torch.autograd.grad(loss(compiled(*args)), args), expected, rtol=0, atol=0)
