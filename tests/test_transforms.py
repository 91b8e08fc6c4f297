"""torch.func, batched gradients and forward-mode AD, beside plain calls and the reference.

Catches a transformed tensor that reaches a kernel, whose memory means something else, and a
derivative or a refusal that is not that of a plain call.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from fused_op import fused_add_layer_norm, fused_layer_norm
from tests.calls import SHAPE, arguments, assert_same, loss, outputs


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
