"""The autograd Function behind the ops: autograd's rules, as far as it could break them.

Catches gradients of two leaves in one memory, saved tensors that nobody guards, derivatives of
higher order that lose a term.
"""

import pytest
import torch
import torch.nn.functional as F

from fused_op import fused_add_layer_norm, fused_layer_norm, reference
from tests.calls import Calls, arguments, assert_same, loss

pytestmark = pytest.mark.usefixtures("recorder")


def test_one_gradient_tensor_for_two_leaves_is_stored_twice():
    # backward returns one tensor for input and residual; .grad of one must not be .grad of both
    for use in (lambda out, sum: out, lambda out, sum: sum, lambda out, sum: out + sum):
        x, r = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
        for _ in range(2):  # the second one accumulates in place
            use(*fused_add_layer_norm(x, r)).square().sum().backward()
            before = r.grad.clone()
            x.grad.mul_(2)
            assert torch.equal(r.grad, before)
            x.grad.div_(2)
            assert torch.equal(x.grad, before)


def test_intermediate_gradients_do_not_leak_either():
    x, r = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    a, b = x * 1, r * 1
    a.retain_grad()
    b.retain_grad()
    fused_add_layer_norm(a, b)[0].square().sum().backward()
    before = b.grad.clone()
    a.grad.zero_()
    x.grad.zero_()
    assert torch.equal(b.grad, before) and torch.equal(r.grad, before)


def test_only_one_output_used():
    x, r, w = (torch.randn(s, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    output, sum = fused_add_layer_norm(x, r, w)
    gx, gr, gw = torch.autograd.grad(sum.sum(), (x, r, w), allow_unused=True, retain_graph=True)
    assert gw is None and torch.equal(gx, torch.ones(4, 6)) and torch.equal(gr, gx)
    gx, gr, gw = torch.autograd.grad(output.square().sum(), (x, r, w))
    expected = torch.autograd.grad(F.layer_norm(x + r, (6,), w).square().sum(), (x, r, w))
    assert_same((gx, gr, gw), expected)


def test_saved_tensors_are_guarded():
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    y = x * 1
    out = fused_layer_norm(y, w)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    output, sum = fused_add_layer_norm(x, x, w)
    sum.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    out = fused_layer_norm(x, w)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    with torch.inference_mode():
        inference = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fused_layer_norm(inference, w)


def test_frozen_inputs_get_no_gradient(op):
    for chosen in range(len(op.inputs)):
        args = arguments(op)
        args[chosen].requires_grad_()
        with Calls() as calls:
            loss(op.fused(*args)).backward()
        assert "fused_op::norm_backward" in calls.names
        assert [t.grad is not None for t in args] == [i == chosen for i in range(len(args))]


def test_third_derivatives(op, device):
    def third(function, args):
        total = loss(function(*args))
        for _ in range(3):
            grads = torch.autograd.grad(total, args, create_graph=True)
            total = sum(
                (g * torch.linspace(-1, 1, g.numel(), device=device).view_as(g)).sum()
                for g in grads
            )
        return torch.autograd.grad(total, args)

    args = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    assert_same(third(op.fused, args), third(op.reference, args))


def test_double_backward_where_parameters_depend_on_the_input():
    # the gradient's own history reaches the input on more ways than one
    def second(norm):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
        w = x.sin().sum(0)
        (g,) = torch.autograd.grad(norm(x * x, w, w.exp()).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)

    assert_same(second(fused_layer_norm), second(reference.fused_layer_norm))
