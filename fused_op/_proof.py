"""Whether the fused op may take the place of a norm module's forward: both are run and compared.

Random parameters stand in for the module's own: a fresh model's ones and zeros would hide what the
forward does with them. The rows come in two, three and four dimensions, since a forward may tell
images from sequences by that, and in magnitudes from far below the root of eps to far above it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reference import Norm, Shape, compute, compute_dtype

BATCHES: tuple[tuple[int, ...], ...] = ((7,), (2, 5), (2, 3, 5))
MAGNITUDES = (2.0**-20, 2.0**-10, 2.0**-3, 1.0, 2.0**3, 2.0**10)


class Refusal(Exception):
    """Why a module stays as it is; the sentence begins after the module's name."""


class Formula(NamedTuple):
    """What the forward of a module computes, besides its shape and its eps."""

    norm: Norm
    zero_centered: bool  # multiplies by 1 + weight


def prove(
    module: nn.Module, fused: type[nn.Module], formula: Formula, like: Tensor, shape: Shape
) -> int:
    """Compare a module's forward, and the gradients through it, with that of its fused class.

    Args:
        module: left as it is; its hooks do not run.
        fused: the class it would get.
        formula: what that class computes.
        like: a tensor of the dtype and device to compare in.
        shape: what the module normalises together.

    Returns:
        How many spacings of the dtype (ulp) the outputs may be apart: 1 where the original rounds
        once too, 2 where it rounds the normalised values as well, before the weight.

    Raises:
        Refusal: they differ by more, or the original cannot be run.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator(like.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(
            *size, generator=generator, device=like.device, dtype=compute_dtype(like)
        )

    magnitudes = torch.tensor(MAGNITUDES, dtype=compute_dtype(like), device=like.device)
    probe = copy.copy(module)
    probe.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(normal(*p.shape).to(p.dtype))
        for name, p in module._parameters.items()
    }
    devices = [like.device] if like.device.type == "cuda" else []
    ulps = 1
    with torch.random.fork_rng(devices), torch.autocast(like.device.type, enabled=False):
        for training in (False, True):
            probe.training = training
            for batch in BATCHES:
                per_row = *batch, *[1] * len(shape)
                rows = normal(*batch, *shape) + normal(*per_row)
                row = torch.arange(math.prod(batch), device=like.device).reshape(per_row)
                x = (rows * magnitudes[row % len(MAGNITUDES)]).to(like.dtype)
                ulps = max(ulps, _compare_outputs(probe, fused, formula, x, shape))
            # At magnitude 1 alone: the gradient of small rows overflows float16.
            _compare_gradients(probe, fused, formula, rows.to(like.dtype), shape, normal)
    return ulps


def _call(cls: Any, probe: nn.Module, x: Tensor) -> Tensor:
    before = probe.__class__
    probe.__class__ = cls  # for what forward looks up in its class
    try:
        y = cls.forward(probe, x)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise Refusal(
            f"forward of rows {list(x.shape)} raises {type(error).__name__}: {reason}"
        ) from error
    finally:
        probe.__class__ = before
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        got = f"{y.dtype}{list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise Refusal(f"forward of {x.dtype}{list(x.shape)} returns {got}")
    return y


@torch.no_grad()
def _compare_outputs(
    probe: nn.Module, fused: type[nn.Module], formula: Formula, x: Tensor, shape: tuple[int, ...]
) -> int:
    old, new = _call(type(probe), probe, x).double(), _call(fused, probe, x).double()
    factor, bias = _params(probe, formula)
    truth = compute(*(formula.norm, x.double(), None, factor, bias, None, _eps(probe, x), shape))[0]
    noise = _noise(x, shape) * _condition(probe, formula, x, shape)["output"]
    ulp = _ulp(torch.maximum(old.abs(), new.abs()), x.dtype)
    # A normalised value that is subnormal is off by half the smallest spacing, times the factor.
    info = torch.finfo(x.dtype)
    subnormal = info.eps * info.smallest_normal / 2 * (1.0 if factor is None else factor.abs())
    # One rounding to the dtype is half an ulp off. Where the normalised value is rounded first,
    # half an ulp of that, times the factor, is up to one ulp of the result beside it.
    error = (old - truth).abs()
    once = bool((error <= ulp / 2 + noise).all())
    proved = once or bool((error <= 3 * ulp / 2 + subnormal + noise).all())
    # The fused result is half an ulp off itself.
    ulps = 1 if once else 2
    if proved and bool(((old - new).abs() <= ulps * ulp + subnormal + 2 * noise).all()):
        return ulps
    raise Refusal(
        f"differs from {formula.norm} over the last {len(shape)} dimension(s) by more than "
        f"{x.dtype} rounds"
    )


def _compare_gradients(
    probe: nn.Module,
    fused: type[nn.Module],
    formula: Formula,
    x: Tensor,
    shape: tuple[int, ...],
    normal: Callable[..., Tensor],
) -> None:
    dy = normal(*x.shape).to(x.dtype)
    names = ["input", *(name for name, p in probe._parameters.items() if p is not None)]
    found = []
    with torch.enable_grad():
        for cls in (type(probe), fused):
            leaf = x.detach().requires_grad_()
            inputs = [leaf, *(p for p in probe._parameters.values() if p is not None)]
            y = _call(cls, probe, leaf)
            if not y.requires_grad:
                raise Refusal("gives no gradient")
            found.append(torch.autograd.grad(y, inputs, dy, allow_unused=True))
    condition = _condition(probe, formula, x, shape, dy)
    # An original in 16 bits rounds a handful of terms on its way back: twice four ulp of the sum of
    # their magnitudes. A sum over rows may be held in 16 bits too, one rounding for each level.
    tolerance = 8 * torch.finfo(x.dtype).eps + 2 * _noise(x, shape)
    for name, old, new in zip(names, *found, strict=True):
        bound = tolerance * condition[f"grad_{name}"]
        if old is None or new is None or not bool(((old - new).double().abs() <= bound).all()):
            raise Refusal(f"the gradient of its {name} is another than that of {formula.norm}")


def _ulp(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of the dtype's numbers at the magnitudes ``y``."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(y.clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(y, info.eps), exponent - 1)


def _params(probe: nn.Module, formula: Formula) -> tuple[Tensor | None, Tensor | None]:
    """What the normalised values are multiplied by, and what is added to them."""
    weight, bias = (getattr(probe, name, None) for name in ("weight", "bias"))
    return (
        None if weight is None else weight.detach().double() + formula.zero_centered,
        None if bias is None else bias.detach().double(),
    )


def _noise(x: Tensor, shape: tuple[int, ...]) -> float:
    """What the arithmetic of an implementation adds, relative to the condition.

    It costs eight roundings for the formula and a tree's levels for its sums; four times that,
    since rsqrt is off by up to 2 ulp on a GPU and a lane adds some values one by one.
    """
    steps = 4 * (8 + math.log2(max(math.prod(shape), 1)))
    return steps * torch.finfo(compute_dtype(x)).eps / 2


def _eps(module: Any, x: Tensor) -> float:
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    return torch.finfo(compute_dtype(x)).eps if eps is None else float(eps)


def _condition(
    probe: nn.Module,
    formula: Formula,
    x: Tensor,
    shape: tuple[int, ...],
    dy: Tensor | None = None,
) -> dict[str, Tensor]:
    """What rounding errors are relative to: each formula in float64 with all terms positive."""
    dims = tuple(range(-len(shape), 0))
    rows = tuple(range(x.dim() - len(shape)))
    factor, bias = _params(probe, formula)
    centred = formula.norm == "layer_norm"
    x, eps = x.detach().double(), _eps(probe, x)
    mean = x.mean(dims, keepdim=True) if centred else torch.zeros_like(x)
    rstd = ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
    # Subtracting the mean cancels: its rounding moves every normalised value of the row.
    shift = x.abs().mean(dims, keepdim=True) * rstd * centred
    xhat = (x - mean).abs() * rstd + shift
    factor = torch.ones_like(x) if factor is None else factor.abs()
    result = {"output": xhat * factor + (0.0 if bias is None else bias.abs())}
    if dy is not None:
        dy = dy.double().abs()
        wdy = dy * factor
        pull = wdy + wdy.mean(dims, keepdim=True) + xhat * (wdy * xhat).mean(dims, keepdim=True)
        result["grad_input"] = pull * rstd * (1 + shift)
        result["grad_weight"] = (dy * xhat).sum(rows)
        result["grad_bias"] = dy.sum(rows)
    return result
