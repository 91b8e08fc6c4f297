"""The same numbers by every route, for rows that are hard: huge, tiny, constant, far from zero.

The kernels take care of such rows, and so must the formula that every other route computes. The
truth is the reference in float64 on rows of moderate size.
"""

import random
from functools import cache, partial
from itertools import product

import pytest
import torch

import fused_op
from tests.calls import Calls
from tests.case import SEED, generator
from tests.ops import F32, F64

COLS = 256


def with_autograd(function, x, weight, dy, create_graph=False):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), dy, create_graph=create_graph)


def with_mode(*args):
    with Calls():
        return with_autograd(*args)


def with_disabled(*args):
    with fused_op.disabled():
        return with_autograd(*args)


def with_vjp(function, x, weight, dy):
    y, pullback = torch.func.vjp(function, x, weight)
    return y, *pullback(dy)


def with_vmap(function, x, weight, dy):
    """Per-row gradients, summed."""
    one = torch.func.vmap(lambda *args: with_vjp(function, *args), in_dims=(0, None, 0))
    y, dx, dweight = one(x, weight, dy)
    return y, dx, dweight.sum(0)


def with_batched_grad(function, x, weight, dy):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    grads = torch.autograd.grad(y, (x, weight), dy[None], is_grads_batched=True)
    return y, *(grad[0] for grad in grads)


@pytest.fixture(autouse=True)
def compiled_afresh():
    """A test compiles a function once, whatever the numbers of its rows."""
    torch._dynamo.reset()
    functions.cache_clear()
    compiled.cache_clear()
    compiled_vjp.cache_clear()


@cache
def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@cache
def compiled_vjp(function):
    return compiled(partial(with_vjp, function))


ROUTES = {
    "plain": with_autograd,
    "create_graph": lambda *args: with_autograd(*args, create_graph=True),
    "mode": with_mode,
    "disabled": with_disabled,
    "vjp": with_vjp,
    "vmap": with_vmap,
    "batched_grad": with_batched_grad,
    "compiled": lambda function, *args: with_autograd(compiled(function), *args),
    "compiled_disabled": lambda function, *args: with_disabled(compiled(function), *args),
    "compiled_vjp": lambda function, *args: compiled_vjp(function)(*args),
}


@cache
def functions(norm, eps):
    """The norm, and the same as the output of add + norm, for which x is the residual."""
    norm_alone, add_norm = (getattr(fused_op, f"fused_{kind}{norm}") for kind in ("", "add_"))
    return (
        lambda x, weight: norm_alone(x, weight, eps=eps),
        lambda x, weight: add_norm(torch.zeros_like(x), x, weight, eps=eps)[0],
    )


def compare(norm, route, x, eps, bounds, device, unit=1.0):
    """Outputs and gradients, as multiples of their largest, against those of x / unit."""
    g = generator(device, norm, "gradients")
    dy = torch.randn(x.shape, generator=g, dtype=x.dtype, device=device)
    weight = torch.randn(COLS, generator=g, dtype=x.dtype, device=device)
    twin = getattr(fused_op.reference, f"fused_{norm}")
    truth = with_autograd(
        lambda x, weight: twin(x, weight, eps=eps / unit / unit),
        *(x.to(F64) / unit, weight.to(F64), dy.to(F64)),
    )
    truth = truth[0], truth[1] / unit, truth[2]
    for function in functions(norm, eps):
        results = ROUTES[route](function, x, weight, dy)
        names = ("output", "grad_input", "grad_weight")
        for name, actual, expected, bound in zip(names, results, truth, bounds, strict=True):
            error = ((actual.to(F64) - expected).abs().max() / expected.abs().max()).item()
            assert error <= bound, f"{name} errs by {error:.3g} (FUSED_OP_SEED={SEED})"


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_rows_of_any_size(norm, route, dtype, device):
    """Catches a formula whose squares overflow, and one whose derivative takes rstd to a power that
    vanishes or overflows. With eps = 0, rows as small as the kernels can take them."""
    draw = random.Random(f"{SEED} {norm} {route} {dtype}")
    low, high = (-17, 37) if dtype is F32 else (-150, 306)
    bound = 100 * torch.finfo(dtype).eps
    # One of each kind: squares that overflow, cubes that do, and any.
    for power in (draw.uniform(high / 2, high), draw.uniform(high / 3, high / 2),
                  draw.uniform(low, low / 2), draw.uniform(low, high)):  # fmt: skip
        g = generator(device, norm, power)
        unit = 2.0 ** int(power * 3.32)
        x = torch.randn(3, COLS, generator=g, dtype=dtype, device=device) * unit
        eps = 0.0 if power < 0 else 1e-5
        compare(norm, route, x, eps, (bound, bound, bound), device, unit)


@pytest.mark.parametrize("route", ROUTES)
def test_mean_far_from_zero(route, device):
    """Catches one rounding of the mean, which at 1e4 standard deviations is 3e-4 of one. Kernels
    compute gradients from a mean that is rounded once, when it is saved."""
    far = 10 ** random.Random(f"{SEED} {route}").uniform(3.5, 4)
    g = generator(device, far)
    x = torch.randn(3, COLS, generator=g, device=device) + far
    compare("layer_norm", route, x, 1e-5, (1e-6, 3e-4, 6e-4), device)


@pytest.mark.parametrize("route", ROUTES)
def test_constant_rows(route, device):
    """Catches a mean that is a rounding off: 1 / sqrt(eps) makes it visible. The output is zero to
    the bit, and the gradient that of a row at zero."""
    dy = torch.randn(2, COLS, generator=generator(device, route), device=device)
    weight = torch.ones(COLS, device=device)
    values = 0.0, 1 / 3, 1e4, -1e30, 3.4e38
    for value, function in product(values, functions("layer_norm", 1e-5)):
        x = torch.full((2, COLS), value, device=device)
        y, dx, dweight = ROUTES[route](function, x, weight, dy)
        assert not y.any() and not dweight.any(), value
        expected = (dy - dy.mean(-1, keepdim=True)) / 1e-5**0.5
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("route", ROUTES)
def test_bad_values_stay_in_their_row(norm, route, device):
    x = torch.randn(4, COLS, generator=generator(device, route), device=device)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    dy, weight = torch.ones_like(x), torch.ones(COLS, device=device)
    for function in functions(norm, 1e-5):
        y, dx, _ = ROUTES[route](function, x, weight, dy)
        for result in (y, dx):
            assert result[[0, 3]].isfinite().all()
            assert result[1].isnan().all() and result[2, 5].isnan()


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("power", [-15, 0, 10, 17])
def test_second_derivatives_of_large_and_small_rows(norm, power, device):
    """Catches a power of rstd that leaves the range of float32 though the derivative does not."""
    g = generator(device, norm, power)
    unit = 2.0 ** int(power * 3.32)
    x, v, dy = torch.randn(3, 2, COLS, generator=g, device=device).unbind()
    weight = torch.randn(COLS, generator=g, device=device)

    def second(function, x, weight, dy, v):
        leaves = [t.clone().requires_grad_() for t in (x, weight, dy)]
        (dx,) = torch.autograd.grad(function(*leaves[:2]), leaves[0], leaves[2], create_graph=True)
        return torch.autograd.grad(dx, leaves, v)

    eps = 0.0 if power < 0 else 1e-5
    twin = getattr(fused_op.reference, f"fused_{norm}")
    wide = [t.to(F64) for t in (x, weight, dy, v)]
    truth = second(lambda x, w: twin(x, w, eps=eps / unit / unit), *wide)
    for function in functions(norm, eps):
        results = second(function, x * unit, weight, dy, v)
        for actual, expected, times in zip(results, truth, (unit**2, unit, unit), strict=True):
            error = (actual.to(F64) * times - expected).abs().max() / expected.abs().max()
            assert error < 1e-4
