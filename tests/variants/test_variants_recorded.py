"""Who records a call of a variant: the node in C++, or the Function in Python.

Catches a node that gives other bits than the Function, loses a gradient where only some are wanted
or only some outputs are used, or touches Python where it has no need to.
"""

import itertools
import threading

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch.library import opcheck

import fused_op
import fused_op_cuda
from fused_op import _variant
from tests.calls import assert_same, loss, outputs
from tests.variants.test_variants_saved import EVERY, gradients

NODE = "VariantNode"


@pytest.fixture(params=EVERY)
def plain(request, device):
    return EVERY[request.param](device)


def by_function(call):
    fused_op_cuda.record_in_cpp(False)
    try:
        return call()
    finally:
        fused_op_cuda.record_in_cpp(True)


def test_the_node_records_plain_calls_and_runs_without_python(plain, monkeypatch):
    function, leaves = plain
    result = function(*leaves)
    assert all(NODE in y.grad_fn.name() for y in outputs(result))
    assert not any(
        NODE in y.grad_fn.name() for y in outputs(by_function(lambda: function(*leaves)))
    )

    def python(*args):
        raise AssertionError("backward went through Python")

    monkeypatch.setattr(_variant, "run_backward", python)
    total = loss(result)
    found = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(total, leaves)))
    thread.start()
    thread.join()
    assert len(found) == len(leaves)


def test_the_same_bits_whichever_gradients_are_wanted(plain):
    function, leaves = plain
    for count in (1, 2, len(leaves)):
        for wanted in itertools.combinations(range(len(leaves)), count):
            tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
            ours = [tensors[i] for i in wanted]

            def run(function=function, tensors=tensors, ours=ours):
                result = outputs(function(*tensors))
                used = [[y] for y in result if y.requires_grad] + [result]
                return [
                    torch.autograd.grad(loss(tuple(ys)), ours, retain_graph=True, allow_unused=True)
                    for ys in used
                ]

            for mine, other in zip(run(), by_function(run), strict=True):
                assert [g is None for g in mine] == [g is None for g in other]
                kept = [(a, b) for a, b in zip(mine, other, strict=True) if a is not None]
                for a, b in kept:
                    assert_same(a, b, rtol=0, atol=0)
                    assert a.stride() == b.stride()


def test_second_derivatives_and_batches_of_gradients(plain):
    function, leaves = plain

    def run():
        result = outputs(function(*leaves))
        first = torch.autograd.grad(loss(result), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        batch = torch.stack([torch.ones_like(result[0]), torch.full_like(result[0], 2)])
        batched = torch.autograd.grad(
            function(*leaves) if len(result) == 1 else function(*leaves)[0],
            leaves, batch, is_grads_batched=True, allow_unused=True,
        )  # fmt: skip
        return *first, *second, *(g for g in batched if g is not None)

    assert_same(run(), by_function(run), rtol=0, atol=0)


def test_what_autograd_refuses(plain):
    function, leaves = plain
    first = torch.ones_like(leaves[0]).requires_grad_()
    result = loss(function(first, *leaves[1:]))
    with torch.no_grad():
        first.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    result = loss(function(*leaves))
    gradients(lambda *_: result, leaves)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(lambda *_: result, leaves)


@pytest.mark.slow
def test_compiled_autograd_and_anomaly_mode(plain):
    function, leaves = plain
    expected = gradients(function, leaves)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert_same(gradients(function, leaves), expected, rtol=0, atol=0)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_same(gradients(function, leaves), expected, rtol=0, atol=0)


def test_a_profiler_sees_the_ops(plain):
    function, leaves = plain
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(function, leaves)
    ours = [e.name for e in profile.events() if e.name.startswith("fused_op::")]
    assert any("_forward" in name for name in ours) and any("_backward" in name for name in ours)


@pytest.mark.parametrize("shape", [(4, 6), (2, 1, 6)], ids=str)
def test_a_passed_gradient_shares_no_memory(shape, recorder, device):
    """Where the gradient of an argument is that of the output, which others have, too."""
    x, weight = torch.randn(shape, device=device), torch.ones(6, device=device)
    upstream = torch.full(shape, 2.0, device=device)

    def modulated(shift):
        return fused_op.fused_modulated_rms_norm(x, torch.zeros_like(shift), shift)

    calls = [(shape, lambda t: fused_op.fused_rms_norm_add(x, t, weight)), (shape, modulated)]
    calls += [((2, 6), modulated)] if shape == (2, 1, 6) else []  # another shape than the output's
    for size, call in calls:
        a, b = (torch.zeros(size, device=device, requires_grad=True) for _ in range(2))
        for _ in range(3):
            ((call(a) + call(b)) * upstream).sum().backward()
        assert (a.grad == 6).all() and (b.grad == 6).all()
        a.grad, given = None, upstream.clone()
        for _ in range(2):
            call(a).backward(given)
        assert (a.grad == 4).all() and torch.equal(given, upstream)


@pytest.mark.parametrize("entries", [(2, 6), (2, 3, 6)], ids=str)
def test_zeros_stand_for_an_output_that_is_not_used(entries, recorder, device):
    x = torch.randn(2, 3, 6, device=device)
    made = [torch.randn(entries, device=device).requires_grad_() for _ in range(3)]
    _, sum = fused_op.fused_gated_add_rms_norm(x, x, *made)
    _, scale, shift = torch.autograd.grad(sum.sum(), made)
    assert scale.count_nonzero() == shift.count_nonzero() == 0


def test_the_fake_of_a_backward_without_the_outputs_gradient(device):
    """Of strides that are not those of the sum, and with and without each gradient."""
    x, weight = torch.randn(4, 6, device=device), torch.ones(6, device=device)
    ops = torch.ops.fused_op
    _, sum, stats = ops.post_add_pre_rms_norm_forward(
        x, x, weight, weight, 1e-6, False, "once", None, True
    )
    for wanted in itertools.product([False, True], repeat=4):
        opcheck(
            ops.post_add_pre_rms_norm_backward.default,
            (None, x.t().contiguous().t(), x, sum, weight, weight, stats, False, "once",
             torch.float32, wanted),
        )  # fmt: skip


def test_options_that_no_op_takes_are_errors():
    x = torch.ones(2, 6)
    with pytest.raises(RuntimeError, match="group_size"):
        fused_op.fused_gated_rms_norm(x, x, group_size=2**63)
    for count in ((), (1e-6, 1)):
        with pytest.raises(RuntimeError, match="l2_norm: not the arguments of its ops"):
            fused_op_cuda._variant("l2_norm").call((x,), count, None)
