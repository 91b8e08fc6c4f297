"""Calls of the group norm, and how far their results may be from the formula in fp64."""

import torch

import fused_op.reference
from fused_op import fused_group_norm
from tests.case import generator, uninitialized_is_nan
from tests.ops import F64, TOLERANCE, steps
from tests.variants.table import run

SMALL, GROUPS = (2, 6, 3, 4), 3
NAMES = ("input", "weight", "bias", "scale", "shift")


def innermost(images):
    """The same values, with the channels innermost in memory."""
    return images.movedim(1, -1).contiguous().movedim(-1, 1)


def fused(groups, activation=None, function=fused_group_norm, **options):
    """The function of its tensors, by their names."""

    def call(input, weight=None, bias=None, scale=None, shift=None, **more):
        return function(
            input, groups, weight, bias, activation=activation, scale=scale, shift=shift,
            **(options | more),
        )  # fmt: skip

    return call


def reference(groups, activation=None, **options):
    return fused(groups, activation, fused_op.reference.fused_group_norm, **options)


def arguments(shape, pair, device="cpu", requires_grad=False):
    """Random ones; scale and shift are chunks of one projection."""
    g = generator(device, shape, str(pair))

    def normal(*size):
        return torch.randn(size, generator=g, device=device)

    x = normal(*shape) * normal(*shape[:2], *[1] * (len(shape) - 2)).exp2() + 1
    scale, shift = normal(shape[0], 3 * shape[1]).to(pair.rows).chunk(3, 1)[1:]
    found = {
        "input": x.to(pair.rows),
        "weight": normal(shape[1]).to(pair.params),
        "bias": normal(shape[1]).to(pair.params),
        "scale": scale,
        "shift": shift,
    }
    return {name: t.requires_grad_(requires_grad) for name, t in found.items()}


def of_channels(t, like):
    return t.reshape(*t.shape[: 1 if t.dim() == 1 else 2], *[1] * (like.dim() - 2))


def conditions(inputs, grad, groups, activation, eps):
    """What roundings are relative to: each formula in fp64 with all its terms positive."""
    x = inputs["input"]
    ones = x.new_ones(x.shape[1])
    size = x.abs().max().clamp(min=1)
    x = x / size  # whose squares do not overflow
    rows = x.reshape(x.shape[0], groups, -1)
    mean = rows.mean(-1, keepdim=True)
    rstd = ((rows - mean).square().mean(-1, keepdim=True) + eps / size / size).rsqrt()
    # What subtracting the mean cancels is rounded as the sum behind the mean is.
    xhat = ((rows - mean).abs() + rows.abs().mean(-1, keepdim=True)) * rstd
    weight = of_channels(inputs.get("weight", ones), x).abs()
    bias = of_channels(inputs.get("bias", 0 * ones), x).abs()
    more = 1 + of_channels(inputs["scale"], x).abs() if "scale" in inputs else 1
    shift = of_channels(inputs["shift"], x).abs() if "shift" in inputs else 0
    shown = xhat.reshape(x.shape)
    n = (shown * weight + bias) * more + shift
    dn = grad.abs() * (1 + n / 2) if activation else grad.abs()  # silu'' is 1/2 at most
    wdn = (dn * weight * more).reshape(rows.shape)
    along = xhat * (wdn * xhat).mean(-1, keepdim=True)
    lost = 1 + rows.abs().mean(-1, keepdim=True) * rstd
    dx = rstd * lost * (wdn + wdn.mean(-1, keepdim=True) + along) / size
    first = (dn * shown).flatten(2).sum(2) if x.dim() > 2 else dn * shown
    second = dn.flatten(2).sum(2) if x.dim() > 2 else dn
    more = more if isinstance(more, int) else more.reshape(first.shape)
    weight, bias = weight.flatten(), bias.flatten()
    return {
        "output": n,
        "grad_input": dx.reshape(x.shape),
        "grad_weight": (first * more).sum(0),
        "grad_bias": (second * more).sum(0),
        "grad_scale": first * weight + second * bias,
        "grad_shift": second,
    }


def check(inputs, grad, groups, activation=None, eps=1e-5):
    """Each result has its dtype and shape, and is as near to truth as derived."""
    with uninitialized_is_nan():
        found = run(fused(groups, activation), inputs, grad, {"eps": eps})
    wide = {name: t.to(F64) for name, t in inputs.items()}
    truth = run(reference(groups, activation), wide, grad.to(F64), {"eps": eps})
    x = inputs["input"]
    if x.numel() == 0:
        for name, t in found.items():
            assert t.shape == truth[name].shape and (t == 0).all(), name
        return found
    scale = conditions(wide, grad.to(F64), groups, activation, eps)
    elements, pixels = x[0].numel() // groups, x[0, 0].numel()
    for name, t in found.items():
        like = inputs.get(name.removeprefix("grad_"), x)
        assert (t.dtype, t.shape, t.device) == (like.dtype, like.shape, like.device), name
        one = TOLERANCE[t.dtype]
        terms = {"grad_weight": len(x) * pixels, "grad_bias": len(x) * pixels}
        count = steps(elements) + (0 if like is x else steps(terms.get(name, pixels)))
        bound = one.rounding * truth[name].abs() + one.smallest
        bound = bound + TOLERANCE[x.dtype].compute * count * scale[name].reshape(t.shape)
        error = (t.to(F64) - truth[name]).abs() / (bound + 1e-300)
        assert error.max() <= 1, f"{name}: {error.max():.3g} of the tolerance"
    return found
