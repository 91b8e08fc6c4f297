"""Whether the fused group norm may replace a module's forward: both are run and compared.

The counterpart of ``_proof.py``. Each group of a sample has a magnitude of its own, as a row has
there. Inputs have two to five dimensions, as planes and with the channels innermost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._gated_class import GROUP_NAMES, held_ints
from ._group_norm_formula import group_norm
from ._grouped_class import GroupedFormula, grouped_class
from ._options import compute_dtype
from ._probe import RANKS, Refusal, check_side_effects, dtypes_of, make_probe, run_forward
from ._proof import (
    LARGEST,
    MAGNITUDES,
    MORE_IMAGES,
    OTHERS_LARGEST,
    SAME_ELEMENTS,
    Match,
    noise_of,
    ulp_of,
)

_DIMS = (*RANKS, 2)
# Of an original with other roundings than ours: those of F.group_norm on a GPU, which rounds eps to
# the dtype of the input, and in some versions the statistics. In float16, 1e-6 is off by 1.3 %.
_ROUNDINGS = 16
_STATISTICS = 3  # what _compare_outputs returns for these, in place of a number of ulps


def groups_name(module: nn.Module) -> str | None:
    """The attribute that holds how many groups there are."""
    return next(iter(held_ints(module, GROUP_NAMES)), None)


def prove_grouped(
    module: nn.Module,
    epsilons: tuple[str | float, ...],
    like: Tensor,
    shared: dict[int, Any],
) -> tuple[type[nn.Module], Match]:
    """The fused class of a group norm, and how near its results are.

    Args:
        module: left as it is; its hooks do not run.
        epsilons: the attribute that holds eps, or the numbers that the code may have.
        like: a tensor of the dtype and device to compare in.
        shared: as of :func:`make_probe`.

    Raises:
        Refusal: the results differ by more than roundings, or the original cannot be run.
    """
    groups = groups_name(module)
    if groups is None:
        raise Refusal("has no number of groups")
    channels = _channels(module, getattr(module, groups))
    refusal: Refusal | None = None  # of the most common number of dimensions
    for eps in epsilons:
        formula = GroupedFormula(groups, eps, dtypes=dtypes_of(module, like))
        if formula.eps_of(module) is None:
            raise Refusal("has no eps")
        matches: dict[int, Match] = {}
        for dims in _DIMS:
            each = formula._replace(dims=(dims,))
            try:
                fused = grouped_class(type(module), each)
                matches[dims] = _prove(module, fused, each, like, channels, shared)
            except Refusal as reason:
                refusal = refusal or reason
                if type(module) is nn.GroupNorm:  # whose fused class takes any number
                    raise
        # Of one that takes images, two dimensions alone are not worth a class.
        if matches and (max(matches) > 2 or (refusal is not None and refusal.is_of_run)):
            found = matches.values()
            after = grouped_class(type(module), formula._replace(dims=tuple(sorted(matches))))
            return after, Match(
                max(match.ulps for match in found),
                "once",
                max(match.differing for match in found),
                any(match.rounds_statistics for match in found),
            )
    assert refusal is not None
    raise refusal


def _channels(module: nn.Module, groups: int) -> int:
    shapes = {
        t.shape for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
    }
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise Refusal("has no weight and bias of one value for each channel")
    channels = next(iter(shapes))[0] if shapes else getattr(module, "num_channels", 2 * groups)
    if groups < 1 or not isinstance(channels, int) or channels < 1 or channels % groups:
        raise Refusal(f"its number of groups, {groups}, does not divide its channels")
    return channels


def _prove(
    module: nn.Module,
    fused: type[nn.Module],
    formula: GroupedFormula,
    like: Tensor,
    channels: int,
    shared: dict[int, Any],
) -> Match:
    """How near the results are for inputs of one number of dimensions."""
    (dims,), groups = formula.dims, formula.groups_of(module)
    generator = torch.Generator(like.device).manual_seed(0)
    compute = compute_dtype(like)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=like.device, dtype=compute)

    largest = LARGEST.get(like.dtype, OTHERS_LARGEST)
    magnitudes = torch.tensor((*MAGNITUDES, largest), dtype=compute, device=like.device)

    def some(batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """At magnitude 1, and the groups at all magnitudes in turn: samples, then pixels."""
        samples, *pixels = batch[: dims - 1]
        x = normal(samples, groups, channels // groups * math.prod(pixels))
        x = x + normal(samples, groups, 1)
        group = torch.arange(samples * groups, device=like.device).view(samples, groups, 1)
        both = x, x * magnitudes[group % len(magnitudes)]
        small, scaled = (t.to(like.dtype).view(samples, channels, *pixels) for t in both)
        return small, scaled

    samples = max(2, -(-len(magnitudes) // groups))
    some_images = samples, 3, 5, 2
    layouts = [_planes] if dims == 2 else [_planes, _channels_innermost]
    many = -(-SAME_ELEMENTS // (channels * 30)), 30, 1, 1
    many = many if dims > 2 else (-(-SAME_ELEMENTS // channels), 1, 1, 1)
    devices = [like.device] if like.device.type == "cuda" else []
    level, differing = 1, 0.0
    # A caller's inference mode would leave no gradients to compare.
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices),
        torch.autocast(like.device.type, enabled=False),
    ):
        probe = make_probe(module, normal, shared)
        for training in (False, True):
            probe.training = training
            check_side_effects(probe, some((3, 2, 2, 2))[0], shared)
            for layout in layouts:
                ones, scaled = map(layout, some(some_images))
                level = max(level, _compare_outputs(probe, fused, formula, scaled))
                # At magnitude 1 alone: the gradient of small groups overflows float16.
                _compare_gradients(probe, fused, formula, ones, normal)
                _compare_special_groups(probe, fused, formula, layout(some((4, 3, 2, 2))[0]))
        probe.training = False
        for batch in MORE_IMAGES:
            try:
                level = max(level, _compare_outputs(probe, fused, formula, some(batch)[1]))
            except Refusal as refusal:
                if not refusal.is_of_run:
                    raise
        for layout in layouts:
            differing = max(differing, _share_of_others(probe, fused, layout(some(many)[0])))
    return Match(min(level, 2), "once", differing, level == _STATISTICS)


def _planes(x: Tensor) -> Tensor:
    return x


def _channels_innermost(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@torch.no_grad()
def _compare_outputs(
    probe: nn.Module, fused: type[nn.Module], formula: GroupedFormula, x: Tensor
) -> int:
    """1 or 2, the ulp that the outputs may be apart, or _STATISTICS."""
    given, found = (run_forward(cls, probe, x) for cls in (type(probe), fused))
    old, new = given.double(), found.double()
    groups, eps = formula.groups_of(probe), float(formula.eps_of(probe))
    weight, bias = (_of(probe, name) for name in ("weight", "bias"))
    wide = [None if t is None else t.detach().double() for t in (weight, bias)]
    truth = group_norm(x.double(), groups, wide[0], wide[1], None, None, eps, None)
    noise = _noise(x, groups) * _condition(probe, formula, x, cancels=True)["output"]
    info = torch.finfo(x.dtype)
    ulp = ulp_of(torch.maximum(old.abs(), new.abs()), x.dtype)
    # A normalised value that is subnormal is off by half the smallest spacing, times the factor.
    factor = 1.0 if wide[0] is None else wide[0].abs().view(-1, *[1] * (x.dim() - 2))
    subnormal = info.eps * info.smallest_normal / 2 * factor
    error = (old - truth).abs()
    once = bool((error <= ulp / 2 + noise).all())
    proved = once or bool((error <= 3 * ulp / 2 + subnormal + noise).all())
    ulps = 1 if once else 2
    if proved and bool(((old - new).abs() <= ulps * ulp + subnormal + 2 * noise).all()):
        return ulps
    difference = f"differs from group_norm of {groups} groups"
    condition = _condition(probe, formula, x)["output"]
    near = bool((error <= _ROUNDINGS * info.eps * condition + subnormal + noise).all())
    ours = bool(((new - truth).abs() <= ulp_of(new.abs(), x.dtype) / 2 + noise).all())
    if x.dtype.itemsize == 2 and near and ours:
        if torch.equal(given, F.group_norm(x, groups, weight, bias, eps)):
            return _STATISTICS
        raise Refusal(f"{difference} by roundings to {x.dtype} in between, which are not ours")
    raise Refusal(f"{difference} by more than {x.dtype} rounds", is_of_values=True)


def _of(probe: nn.Module, name: str) -> Tensor | None:
    found: Tensor | None = getattr(probe, name, None)
    return found


@torch.no_grad()
def _share_of_others(probe: nn.Module, fused: type[nn.Module], x: Tensor) -> float:
    """Of the outputs, those with other bits; not told of 32 bits and more."""
    if x.dtype.itemsize != 2:
        return 1.0
    try:
        old, new = (run_forward(cls, probe, x) for cls in (type(probe), fused))
    except Refusal:  # of so many samples
        return 1.0
    return int((old != new).sum()) / x.numel()


@torch.no_grad()
def _compare_special_groups(
    probe: nn.Module, fused: type[nn.Module], formula: GroupedFormula, x: Tensor
) -> None:
    """Groups of zeros give what the op gives, and NaN and infinities show."""
    channels = x.shape[1] // formula.groups_of(probe)
    for sample, value in enumerate((math.nan, math.inf, -math.inf)):
        x[sample, -1] = value
    x[3] = 0
    old, new = (run_forward(cls, probe, x) for cls in (type(probe), fused))
    for sample in range(3):
        if bool(old[sample, -channels:].isfinite().all()):
            raise Refusal("hides NaN or infinities of its input")
    scale = 8 * torch.finfo(x.dtype).eps * (1 + new[3].abs().nan_to_num())
    both_nan = old[3].isnan() & new[3].isnan()  # 0 / 0, where eps is 0
    if not bool((both_nan | ((old[3] - new[3]).abs() <= scale)).all()):
        raise Refusal("differs from group_norm in groups of zeros")


def _compare_gradients(
    probe: nn.Module,
    fused: type[nn.Module],
    formula: GroupedFormula,
    x: Tensor,
    normal: Callable[..., Tensor],
) -> None:
    dy = normal(*x.shape).to(x.dtype)
    parameters = {name: p for name, p in probe._parameters.items() if p is not None}
    found = []
    with torch.enable_grad():
        for cls in (type(probe), fused):
            leaf = x.detach().requires_grad_()
            y = run_forward(cls, probe, leaf)
            if not y.requires_grad:
                raise Refusal("gives no gradient")
            inputs = [leaf, *parameters.values()]
            found.append(torch.autograd.grad(y, inputs, dy, allow_unused=True))
    # An original in 16 bits may read rounded statistics, and rounds a handful of terms.
    roundings = _condition(probe, formula, x, dy)
    noise = _condition(probe, formula, x, dy, cancels=True)
    some, little = 8 * torch.finfo(x.dtype).eps, 2 * _noise(x, formula.groups_of(probe))
    for name, old, new in zip(("input", *parameters), *found, strict=True):
        key = f"grad_{name}"
        bound = some * roundings[key] + little * noise[key]
        if old is None or new is None or not bool(((old - new).double().abs() <= bound).all()):
            raise Refusal(f"the gradient of its {name} is another than that of group_norm")


def _noise(x: Tensor, groups: int) -> float:
    return noise_of(x, (x.shape[1] // groups, *x.shape[2:]))


def _condition(
    probe: nn.Module,
    formula: GroupedFormula,
    x: Tensor,
    dy: Tensor | None = None,
    *,
    cancels: bool = False,
) -> dict[str, Tensor]:
    """What rounding errors are relative to: each formula in float64 with all terms positive.

    With ``cancels`` that of the variance counts as well, as the difference of two means:
    PyTorch takes it so where the channels are innermost.
    """
    groups, shape = formula.groups_of(probe), x.shape
    split = shape[0], groups, shape[1] // groups, math.prod(shape[2:])
    x = x.detach().double().reshape(split)
    mean = x.mean((2, 3), keepdim=True)
    rstd = ((x - mean).square().mean((2, 3), keepdim=True) + float(formula.eps_of(probe))).rsqrt()
    # Subtracting the mean cancels: its rounding moves every normalised value of the group.
    shift = x.abs().mean((2, 3), keepdim=True) * rstd
    spread = 1 + x.square().mean((2, 3), keepdim=True) * rstd.square() * cancels
    xhat = (x - mean).abs() * rstd * spread + shift
    weight, bias = (_of(probe, name) for name in ("weight", "bias"))
    factor, offset = (
        torch.full((1,), fill, dtype=x.dtype, device=x.device)
        if t is None
        else t.detach().double().abs().view(groups, -1, 1)
        for t, fill in ((weight, 1.0), (bias, 0.0))
    )
    result = {"output": (xhat * factor + offset).reshape(shape)}
    if dy is not None:
        dy = dy.double().abs().reshape(split)
        wdy = dy * factor
        means = wdy.mean((2, 3), keepdim=True), (wdy * xhat).mean((2, 3), keepdim=True)
        pull = wdy + means[0] + xhat * means[1]
        result["grad_input"] = (pull * rstd * (1 + shift) * spread).reshape(shape)
        result["grad_weight"] = (dy * xhat).sum((0, 3)).flatten()
        result["grad_bias"] = dy.sum((0, 3)).flatten()
    return result
