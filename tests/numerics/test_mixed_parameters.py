"""Weight and bias of any floating dtype beside rows of any other, on every way that a call takes.

Catches a pair that is refused, a parameter that is read in a wrong dtype, a gradient in another
dtype than its parameter's or rounded twice, and a way that knows fewer pairs than the kernels.
"""

import itertools
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fused_op
from fused_op import convert, disabled
from tests.calls import Calls, arguments, assert_same, loss, outputs
from tests.case import SEED, make_case
from tests.ops import BF16, F16, F32, F64, Pair

DTYPES = (F16, BF16, F32, F64)


@pytest.mark.parametrize("rows", DTYPES, ids=str)
def test_values_and_gradients(op, rows, device):
    for dtypes in itertools.product(DTYPES, repeat=len(op.parameters)):
        for absent in ((), *((name,) for name in op.parameters)):
            case = make_case(op, (5, 33), Pair(rows, rows), device, absent)
            given = dict(zip(op.parameters, dtypes, strict=True))
            params = {n: case.inputs[n].to(d) for n, d in given.items() if n not in absent}
            case = case.with_inputs(**params)
            case.check(case.run())


def random_arguments(op, device, requires_grad=True) -> list[Tensor]:
    """Small rows and parameters, each parameter in a dtype of its own draw."""
    draw = random.Random(f"{SEED} {op}")
    rows = draw.choice(DTYPES)
    made = [
        t.to(rows if t.dim() > 1 else draw.choice([d for d in DTYPES if d is not rows]))
        for t in arguments(op, device=device)
    ]
    return [t.detach().requires_grad_(requires_grad) for t in made]


def gradients(op, args) -> tuple[Tensor, ...]:
    result = op.fused(*args)
    return (*outputs(result), *torch.autograd.grad(loss(result), args))


def compiled(op, args):
    torch._dynamo.reset()
    function = torch.compile(op.fused, fullgraph=True, backend="aot_eager")
    result = function(*args)
    return (*outputs(result), *torch.autograd.grad(loss(result), args))


def dispatched(op, args):
    with Calls() as calls:
        result = gradients(op, args)
    assert "fused_op::norm_forward" in calls.names and "fused_op::norm_backward" in calls.names
    return result


def under_autocast(op, args):
    with torch.autocast(args[0].device.type, BF16):
        return gradients(op, args)


def without_kernels(op, args):
    with disabled():
        return gradients(op, args)


def transformed(op, args):
    """By torch.func, whose gradients have the dtypes of the leaves as well."""
    grads = torch.func.grad(lambda *a: loss(op.fused(*a)).float(), tuple(range(len(args))))(*args)
    return (*outputs(op.fused(*args)), *grads)


@pytest.mark.parametrize(
    "way", [compiled, dispatched, under_autocast, without_kernels, transformed]
)
def test_every_way_gives_what_the_kernels_give(op, way, device):
    args = random_arguments(op, device)
    expected, actual = gradients(op, args), way(op, args)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype is wanted.dtype
        eps = torch.finfo(min(got.dtype, args[0].dtype, key=lambda d: d.itemsize)).eps
        scale = wanted.abs().max().item()
        torch.testing.assert_close(got, wanted, rtol=0, atol=max(8 * eps, 1e-5) * max(scale, 1))


def test_without_a_gradient_in_one_call(op, device):
    args = random_arguments(op, device, requires_grad=False)
    with torch.no_grad():
        assert_same(op.fused(*args), op.fused(*(t.detach().requires_grad_() for t in args)))


def test_second_derivatives(op, device):
    """Catches a gradient whose own derivative is lost on its way to the dtype of the parameter."""
    args = [t.to(F64 if t.dim() > 1 else F32) for t in arguments(op, device=device)]
    leaves = [t.requires_grad_() for t in args]
    wide = [t.detach().to(F64).requires_grad_() for t in args]

    def second(given):
        first = torch.autograd.grad(loss(op.fused(*given)), given, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), given)

    for got, wanted, leaf in zip(second(leaves), second(wide), leaves, strict=True):
        assert got.dtype is leaf.dtype
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_memory_efficient_and_the_function(device):
    x = torch.randn(4, 24, device=device, dtype=BF16).requires_grad_()
    w, b = torch.rand(24, device=device).half() + 1, torch.randn(24, device=device)
    w.requires_grad_(), b.requires_grad_()
    calls = (
        lambda: fused_op.fused_layer_norm(x, w, b),
        lambda: fused_op.fused_layer_norm(x, w, b, memory_efficient=True),
        lambda: fused_op.FusedLayerNormFunction.apply(x, w, b, 1e-5),
    )
    results = []
    for call in calls:
        y = call()
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, w, b))))
    for got in results[1:]:
        assert [t.dtype for t in got] == [BF16, BF16, F16, F32]
        torch.testing.assert_close(got, results[0], rtol=0.05, atol=0.1)


def test_main_grad(device):
    module = fused_op.FusedLayerNorm(24, device=device, fuse_wgrad_accumulation=True)
    module.weight.data = module.weight.data.to(BF16)
    x = torch.randn(6, 24, device=device)
    for p in module.parameters():
        p.main_grad = torch.zeros(24, device=device)
    module(x).square().sum().backward()
    expected = fused_op.FusedLayerNorm(24, device=device)
    expected(x).square().sum().backward()
    torch.testing.assert_close(module.weight.main_grad, expected.weight.grad)
    torch.testing.assert_close(module.bias.main_grad, expected.bias.grad)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_converted_rms_norm_of_every_pair_is_as_near_to_the_truth(scale, device):
    """As the original: it takes every pair, and answers in the dtype of its input."""
    for rows, weight in itertools.product(DTYPES, repeat=2):
        module = nn.RMSNorm(24, device=device, dtype=weight)
        nn.init.normal_(module.weight)
        x = (scale * torch.randn(5, 24, device=device)).to(rows)
        before = module(x)
        assert convert(module).converted
        after = module(x)
        assert after.dtype is before.dtype is rows
        # None stands for the epsilon of the arithmetic, which the original takes from the wider one
        eps = torch.finfo(F64 if rows is F64 else F32).eps
        truth = F.rms_norm(x.double(), (24,), module.weight.double(), eps)
        error, theirs = ((y.double() - truth).abs().max().item() for y in (after, before))
        roundings = torch.finfo(rows).eps + 16 * torch.finfo(F64 if rows is F64 else F32).eps
        assert error <= 2 * theirs + roundings * truth.abs().max().item(), (rows, weight)
