"""torch.func, batched gradients and forward-mode AD, beside plain calls and the reference.

Catches a transformed tensor that reaches a kernel, whose memory means something else, and a
derivative or a refusal that is not that of a plain call.
"""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import fused_op
from fused_op import fused_add_layer_norm, fused_layer_norm
from tests.calls import SHAPE, Calls, arguments, assert_same, loss, outputs


def test_function_transforms(op, device):
    args = arguments(op, dtype=torch.float64, device=device)
    all_args = tuple(range(len(args)))

    def fused(*a):
        return loss(op.fused(*a))

    def truth(*a):
        return loss(op.reference(*a))

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_same(transform(fused, all_args)(*args), transform(truth, all_args)(*args))
    batched = [
        t.expand(5, *t.shape) * torch.arange(1, 6, device=device).view(5, *[1] * t.dim())
        for t in args
    ]
    each = [op.fused(*row) for row in zip(*batched, strict=True)]
    expected = tuple(map(torch.stack, zip(*map(outputs, each), strict=True)))
    assert_same(outputs(torch.func.vmap(op.fused)(*batched)), expected)
    per_sample = torch.func.vmap(torch.func.grad(fused, all_args))(*batched)
    assert_same(per_sample, torch.func.vmap(torch.func.grad(truth, all_args))(*batched))
    assert_same(torch.func.functionalize(op.fused)(*args), op.fused(*args))
    # the gradient of a recorded graph, for several grad_outputs at once
    leaves = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    output = outputs(op.fused(*leaves))[0]
    grads = torch.randn(7, *SHAPE, dtype=torch.float64, device=device)
    at_once = torch.autograd.grad(output, leaves, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(output, leaves, g, retain_graph=True) for g in grads]
    assert_same(at_once, tuple(map(torch.stack, zip(*one_by_one, strict=True))))


def test_transforms_check_like_kernels():
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        torch.func.vmap(lambda x: fused_layer_norm(x, torch.ones(1), normalized_shape=6))(
            torch.randn(4, 6)
        )
    with pytest.raises(RuntimeError, match="residual must have the shape of input"):
        torch.func.vmap(lambda x: fused_add_layer_norm(x, x[:1]))(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        torch.func.vmap(lambda x: fused_layer_norm(x, torch.ones(6).long()))(torch.randn(4, 6))


def test_forward_ad(op, device):
    args = arguments(op, dtype=torch.float64, device=device)
    tangents = [torch.randn_like(t) for t in args]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(args, tangents, strict=True)]
        actual = tuple(forward_ad.unpack_dual(o).tangent for o in outputs(op.fused(*duals)))
        expected = tuple(forward_ad.unpack_dual(o).tangent for o in outputs(op.reference(*duals)))
    assert_same(actual, expected)


@pytest.mark.parametrize("context", [contextlib.nullcontext, Calls, fused_op.disabled])
@pytest.mark.parametrize("backward_in", ["same", "plain"])
def test_dual_gradients(op, context, backward_in, device):
    """Catches a backward that meets a tangent in what arrives at it, and has none to give back:
    the forward was an ordinary one, so that the kernel's derivative is asked for."""
    args = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    with context():
        results = outputs(op.fused(*args))
    expected_results = outputs(op.reference(*args))
    grads = [torch.randn_like(result) for result in results]
    for dual in range(len(results)):  # one of them, and each alone

        def tangents(results, dual=dual):
            given = list(grads)
            given[dual] = forward_ad.make_dual(grads[dual], grads[dual].sin())
            found = torch.autograd.grad(results, args, given, retain_graph=True)
            return [forward_ad.unpack_dual(gradient) for gradient in found]

        with forward_ad.dual_level():
            with context() if backward_in == "same" else contextlib.nullcontext():
                actual = tangents(results)
            for ours, theirs in zip(actual, tangents(expected_results), strict=True):
                assert_same(ours.primal, theirs.primal)
                assert (ours.tangent is None) == (theirs.tangent is None)
                if ours.tangent is not None:
                    assert_same(ours.tangent, theirs.tangent)


def test_kernels_go_on_in_a_dual_level_without_tangents(device, monkeypatch):
    """Catches a formula for what is no derivative: with memory_efficient there is none."""
    x = torch.randn(4, 6, device=device, requires_grad=True)
    y = fused_op.fused_layer_norm(x, memory_efficient=True)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with forward_ad.dual_level():
        (actual,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert_same(actual, expected, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="with memory_efficient=True the input is not kept"):
            torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), y.detach()))
