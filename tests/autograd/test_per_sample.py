"""Per-sample gradients by PyTorch's call_for_per_sample_grads, as nn.LayerNorm has them.

Catches a function that its registry does not know, a gradient that is that of another sample or of
their sum, and an option that the gradients of each sample forget.
"""

import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import fused_op
from tests.calls import arguments, assert_same, outputs
from tests.contexts.test_tracing import Call, ramp
from tests.norms import LlamaNorm
from tests.ops import OPS


def check(module, *rows, loss_reduction="sum", rtol=1.3e-6, atol=1e-5):
    """Beside a loop over the samples: results, gradients of rows, and of parameters for each."""

    def product(results, factors):
        pairs = zip(outputs(results), factors, strict=True)
        return sum((result.double() * factor).sum() for result, factor in pairs)

    rows = [t.detach().clone().requires_grad_() for t in rows]
    expected = module(*rows)
    factors = [ramp(t) for t in outputs(expected)]
    wanted = torch.autograd.grad(product(expected, factors), rows)
    result = call_for_per_sample_grads(module, loss_reduction=loss_reduction)(*rows)
    product(result, factors).backward()
    tolerance = {"rtol": rtol, "atol": atol}
    assert_same(result, expected, **tolerance)
    assert_same(tuple(t.grad for t in rows), wanted, **tolerance)
    parameters = [p for p in module.parameters() if p.requires_grad]
    assert all(p.grad is None and len(p.grad_sample) == len(rows[0]) for p in parameters)
    scale = len(rows[0]) if loss_reduction == "mean" else 1
    for i in range(len(rows[0])):
        sample = product(module(*(t[i : i + 1] for t in rows)), [f[i : i + 1] for f in factors])
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(sample, parameters), strict=True
        ):
            assert_same(parameter.grad_sample[i], gradient * scale, **tolerance)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_every_op(op, device, loss_reduction):
    args = arguments(op, requires_grad=True, device=device)
    check(Call(op.fused, args), *args[: 1 + op.adds], loss_reduction=loss_reduction)


@pytest.mark.parametrize("seed", range(15))
def test_options_at_random(seed, pair, device):
    draw = random.Random(f"{seed} {pair}")
    op = draw.choice(OPS[:4])
    args = arguments(op, requires_grad=True, dtype=pair.rows, device=device)
    options = {"zero_centered": draw.random() < 0.5}
    options["rounding"] = draw.choice(["once", "before_weight"])
    if pair.rows is not torch.float64:
        options["out_dtype"] = draw.choice([None, torch.float32])
        if op.adds:
            options["residual_dtype"] = draw.choice([None, torch.float32])
    if not op.adds:
        options["normalized_shape"] = draw.choice([None, args[0].shape[-1:]])
    module = Call(op.fused, args, **options).to(pair.params)
    if draw.random() < 0.5:
        next(module.parameters()).requires_grad_(False)
    # A gradient of one sample sums four terms, of which each is rounded to 16 bits here or there.
    eps = max(torch.finfo(pair.rows).eps, 1e-6)
    if any(p.requires_grad for p in module.parameters()):
        check(module, *args[: 1 + op.adds], rtol=16 * eps, atol=64 * eps)


def test_other_doors(device):
    """The functions with PyTorch's signatures, modules, and what convert has made."""
    x, w, b = torch.randn(4, 3, 8, device=device), torch.randn(8), torch.randn(8)
    check(Call(lambda x, w, b: fused_op.layer_norm(x, (8,), w, b), [w, b]).to(device), x)
    check(Call(lambda x, w: fused_op.rms_norm(x, (8,), weight=w), [w]).to(device), x)
    check(Call(lambda x, b: fused_op.fused_layer_norm(x, bias=b), [b]).to(device), x)
    for cls in (fused_op.FusedLayerNorm, fused_op.FusedRMSNorm):
        check(nn.Sequential(nn.Linear(8, 8), cls(8, zero_centered=True), nn.ReLU()).to(device), x)
        check(cls((3, 8), memory_efficient=True, device=device), x)
        with fused_op.disabled():
            check(cls(8, device=device), x)
    model = nn.Sequential(LlamaNorm(8), nn.LayerNorm(8)).to(device)
    assert len(fused_op.convert(model).converted) == 2
    check(model, x)
    check(fused_op.FusedLayerNorm(8, device=device), x.as_strided((4, 3, 8), (8, 1, 2)))


def test_one_module_that_is_called_twice():
    """Catches a gradient that replaces the one before."""
    norm, x = fused_op.FusedLayerNorm(8), torch.randn(4, 8)
    check(Call(lambda x, w: fused_op.rms_norm(fused_op.rms_norm(x, 8, w), 8, w), [norm.weight]), x)


@pytest.mark.parametrize("adds", [False, True])
def test_dropout(device, adds):
    """The mask is that of an ordinary call, and gradients follow it."""
    cls = fused_op.FusedAddLayerNorm if adds else fused_op.FusedLayerNorm
    module = cls(64, dropout_p=0.5, device=device)
    rows = [torch.randn(6, 3, 64, device=device) for _ in range(1 + adds)]
    torch.manual_seed(5)
    expected = outputs(module(*rows))
    torch.manual_seed(5)
    result = outputs(call_for_per_sample_grads(module)(*rows))
    assert_same(result, expected)
    result[0].sum().backward()
    kept = (result[0] != 0).float() / (1 if adds else 0.5)  # added to, no element is zero
    assert_same(module.bias.grad_sample, kept.sum(1))


def test_second_derivative_of_the_rows():
    module = fused_op.FusedRMSNorm(5, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)

    def function(x):
        module.weight.grad_sample = None
        return call_for_per_sample_grads(module)(x)

    assert torch.autograd.gradgradcheck(function, x)


def test_what_is_refused():
    norm = fused_op.FusedLayerNorm(8)
    for module, args, message in (
        (norm, (torch.randn(8),), "needs a batch dimension"),
        (fused_op.FusedRMSNorm((4, 8)), (torch.randn(4, 8),), "needs a batch dimension"),
        (norm, (torch.randn(4, 7),), "Given normalized_shape"),
        (norm, (torch.randn(4, 8).int(),), "fused_layer_norm"),
        (
            Call(lambda x, w: fused_op.rms_norm(x, 8, w, eps="1"), [norm.weight]),
            (torch.randn(4, 8),),
            "eps",
        ),
    ):
        with pytest.raises((RuntimeError, TypeError), match=message):
            call_for_per_sample_grads(module)(*args)
    with pytest.raises(RuntimeError, match="batch size"):
        call_for_per_sample_grads(norm, batch_size=3)(torch.randn(4, 8))


def test_import_is_lazy():
    """Catches an import of the package that takes PyTorch's per-sample gradients with it."""
    code = "import sys, fused_op; assert 'torch.nn.utils._expanded_weights' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
