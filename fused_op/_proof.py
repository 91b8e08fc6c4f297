"""Whether the fused op may replace a norm module's forward: both are run and compared.

Random parameters replace the module's own, because the ones and zeros of a new model would hide
what the forward does with them. Rows have one to five dimensions, and there are none to more than a
hundred of them, because a forward may tell images from sequences that way. Their magnitudes range
from far below the root of eps to far above it, and some are zeros, NaN or infinities, because a
forward may hide those.

A norm over the channels of images gets images. Their pixels are the rows of everything else here:
a view with the channels last. In memory the channels are dimension 1, or the last, because a
forward may look at that as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._fused_class import Formula
from ._norm_formula import compute
from ._options import Rounding, compute_dtype
from ._probe import Refusal, check_side_effects, make_probe, run_forward

BATCHES: tuple[tuple[int, ...], ...] = ((7,), (2, 5), (2, 3, 5))
# Where the original runs them too; outside of training alone, since they take as long as the rest.
MORE_BATCHES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (65,), (17, 1), (2, 1, 2, 1, 3))
MOST_ELEMENTS = 1 << 22  # of a batch; if rows are long, 7 of them may have more
# The same of images and their pixels, as many sizes as an image has besides its channels.
IMAGES = ((2, 3, 5, 2),)
MORE_IMAGES = ((2, 3, 5, 2), (0, 2, 2, 2), (1, 1, 1, 1), (65, 2, 1, 1), (1, 67, 1, 2))
MAGNITUDES = (2.0**-20, 2.0**-10, 2.0**-3, 1.0, 2.0**3, 2.0**10)
LARGEST = {torch.float16: 2.0**12}  # times a normal number, 2**15
OTHERS_LARGEST = 2.0**50  # sums of whose squares are finite in float32
# Of the outputs of two forwards that round at the same places. A value next to a tie may fall on
# either side of it, by the arithmetic in between: 5e-5 of them at most on average. Chance may make
# that ten times as many, since equal values of a row cross it together. With roundings at other
# places a quarter differs.
SAME_SHARE = 5e-4
SAME_ELEMENTS = 1 << 18


class Match(NamedTuple):
    """How near the results of a module and of its fused class are."""

    ulps: int  # spacings of the dtype that they may be apart, by their roundings to it
    rounding: Rounding  # of the fused class
    differing: float  # in 16 bits, the share of outputs that have other bits; else 1
    # The original rounds more than its normalised values: no number of spacings bounds that.
    rounds_statistics: bool = False

    @property
    def same_roundings(self) -> bool:
        return self.differing <= SAME_SHARE


def prove(
    module: nn.Module,
    fused: type[nn.Module],
    formula: Formula,
    like: Tensor,
    shape: tuple[int, ...],
    shared: dict[int, Any],
) -> Match:
    """Compare a module's forward, and the gradients through it, with that of its fused class.

    Args:
        module: left as it is; its hooks do not run.
        fused: the class it would get.
        formula: what that class computes; for images of one number of dimensions, if of images.
        like: a tensor of the dtype and device to compare in.
        shape: what the module normalises together.
        shared: as of :func:`make_probe`.

    Returns:
        How near the outputs are: 1 ulp apart where the original rounds once, 2 where it rounds the
        normalised values as well, before the weight.

    Raises:
        Refusal: they differ by more, or the original cannot be run.
    """
    if math.prod(shape) == 0:
        raise Refusal("normalises no elements")
    generator = torch.Generator(like.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=like.device, dtype=compute_dtype(like))

    largest = LARGEST.get(like.dtype, OTHERS_LARGEST)
    magnitudes = torch.tensor((*MAGNITUDES, largest), dtype=compute_dtype(like), device=like.device)

    def some_rows(batch: tuple[int, ...], as_planes: bool) -> tuple[Tensor, Tensor]:
        """At magnitude 1, and at all magnitudes in turn."""
        per_row = *batch, *[1] * len(shape)
        rows = normal(*batch, *shape) + normal(*per_row)
        row = torch.arange(math.prod(batch), device=like.device).reshape(per_row)
        scaled = rows * magnitudes[row % len(magnitudes)]
        both = rows.to(like.dtype), scaled.to(like.dtype)
        return (_as_planes(both[0]), _as_planes(both[1])) if as_planes else both

    planes = bool(formula.images)
    few, batches, more, many = _batches(formula, math.prod(shape))
    devices = [like.device] if like.device.type == "cuda" else []
    ulps = 1
    # A caller's inference mode would leave no gradients to compare.
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices),
        torch.autocast(like.device.type, enabled=False),
    ):
        probe = make_probe(module, normal, shared)
        for training in (False, True):
            probe.training = training
            check_side_effects(probe, _input(some_rows(few, planes)[0], formula), shared)
            for batch in batches:
                rows, x = some_rows(batch, planes)
                ulps = max(ulps, _compare_outputs(probe, fused, formula, x, shape))
            # At magnitude 1 alone: the gradient of small rows overflows float16.
            _compare_gradients(probe, fused, formula, rows, shape, normal)
            _compare_special_rows(probe, fused, formula, rows, len(shape))
        probe.training = False
        for batch in more:
            _, x = some_rows(batch, as_planes=False)
            try:
                ulps = max(ulps, _compare_outputs(probe, fused, formula, x, shape))
            except Refusal as refusal:
                if not refusal.is_of_run:
                    raise
        if planes:
            rows, _ = some_rows(batches[0], as_planes=False)
            _compare_gradients(probe, fused, formula, rows, shape, normal)
        differing = 1.0
        if like.dtype.itemsize == 2:
            differing = _share_of_others(probe, fused, formula, some_rows(many, planes)[0])
    return Match(ulps, formula.rounding, differing)


def _batches(formula: Formula, cols: int) -> tuple[tuple[int, ...], Any, Any, tuple[int, ...]]:
    """A small one; those that the original has to run, and need not; one of many rows."""
    many = -(-SAME_ELEMENTS // cols)
    if not formula.images:
        most = max(BATCHES[0][0], MOST_ELEMENTS // cols)
        some, more = ([_fewer(b, most) for b in each] for each in (BATCHES, MORE_BATCHES))
        return (3,), some, more, (many,)
    sizes = formula.images[0] - 1
    some, more = ([batch[:sizes] for batch in each] for each in (IMAGES, MORE_IMAGES))
    return (3, 1, 1, 1)[:sizes], some, more, (1, many, 1, 1)[:sizes]


def _fewer(batch: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Of as many dimensions, with at most so many rows."""
    return batch if math.prod(batch) <= most else (*[1] * (len(batch) - 1), most)


def _as_planes(pixels: Tensor) -> Tensor:
    """The same pixels, in the memory of an image whose channels are dimension 1."""
    return pixels.movedim(-1, 1).contiguous().movedim(1, -1)


def _input(rows: Tensor, formula: Formula) -> Tensor:
    """What forward takes: the rows, or the image of which they are the pixels."""
    return rows.movedim(-1, 1) if formula.images else rows


def _run(cls: Any, probe: nn.Module, rows: Tensor, formula: Formula) -> Tensor:
    y = run_forward(cls, probe, _input(rows, formula))
    return y.movedim(1, -1) if formula.images else y


@torch.no_grad()
def _compare_outputs(
    probe: nn.Module, fused: type[nn.Module], formula: Formula, x: Tensor, shape: tuple[int, ...]
) -> int:
    old, new = (_run(cls, probe, x, formula).double() for cls in (type(probe), fused))
    factor, bias = _params(probe, formula)
    eps = _eps(probe, formula, x)
    truth, _ = compute(
        formula.norm, x.double(), weight=factor, bias=bias, eps=eps, normalized_shape=shape
    )
    condition = _condition(probe, formula, x, shape)["output"]
    noise = noise_of(x, shape) * condition
    ulp = ulp_of(torch.maximum(old.abs(), new.abs()), x.dtype)
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
    over = "the channels, dimension 1," if formula.images else f"the last {len(shape)} dimension(s)"
    difference = f"differs from {formula.norm} over {over}"
    if bool((error <= 3 * info.eps * condition + subnormal + noise).all()):
        raise Refusal(f"{difference} by roundings to {x.dtype} in between, which are not ours")
    raise Refusal(f"{difference} by more than {x.dtype} rounds", is_of_values=True)


@torch.no_grad()
def _share_of_others(
    probe: nn.Module, fused: type[nn.Module], formula: Formula, x: Tensor
) -> float:
    """Of the outputs, those with other bits."""
    try:
        old, new = (_run(cls, probe, x, formula) for cls in (type(probe), fused))
    except Refusal:  # of so many rows
        return 1.0
    return int((old != new).sum()) / x.numel()


@torch.no_grad()
def _compare_special_rows(
    probe: nn.Module, fused: type[nn.Module], formula: Formula, rows: Tensor, normalized_ndim: int
) -> None:
    """Rows of zeros give what the op gives, and NaN and infinities show."""
    last = rows.dim() - normalized_ndim - 1
    x = rows.flatten(0, last).clone()
    if x.numel() == 0:
        return
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        x[row].view(-1)[-1] = value
    x[3] = 0
    given = _as_planes(x.view(rows.shape)) if formula.images else x
    old, new = (_run(cls, probe, given, formula) for cls in (type(probe), fused))
    if formula.images:
        old, new = old.flatten(0, last), new.flatten(0, last)
    for row in range(3):
        if bool(old[row].isfinite().all()):
            raise Refusal("hides NaN or infinities of its input")
    scale = 8 * torch.finfo(x.dtype).eps * (1 + new[3].abs().nan_to_num())
    both_nan = old[3].isnan() & new[3].isnan()  # 0 / 0, where eps is 0
    if not bool((both_nan | ((old[3] - new[3]).abs() <= scale)).all()):
        raise Refusal(f"differs from {formula.norm} in rows of zeros")


def _compare_gradients(
    probe: nn.Module,
    fused: type[nn.Module],
    formula: Formula,
    x: Tensor,
    shape: tuple[int, ...],
    normal: Callable[..., Tensor],
) -> None:
    dy = normal(*x.shape).to(x.dtype)
    parameters = {name: p for name, p in probe._parameters.items() if p is not None}
    found = []
    with torch.enable_grad():
        for cls in (type(probe), fused):
            leaf = x.detach().requires_grad_()
            y = _run(cls, probe, leaf, formula)
            if not y.requires_grad:
                raise Refusal("gives no gradient")
            inputs = [leaf, *parameters.values()]
            found.append(torch.autograd.grad(y, inputs, dy, allow_unused=True))
    condition = _condition(probe, formula, x, shape, dy)
    # An original in 16 bits rounds a handful of terms on its way back: twice four ulp of the sum of
    # their magnitudes. A sum over rows may be held in 16 bits too, one rounding for each level.
    tolerance = 8 * torch.finfo(x.dtype).eps + 2 * noise_of(x, shape)
    for name, old, new in zip(("input", *parameters), *found, strict=True):
        bound = tolerance * condition[f"grad_{name}"]
        if old is None or new is None or not bool(((old - new).double().abs() <= bound).all()):
            raise Refusal(f"the gradient of its {name} is another than that of {formula.norm}")


def ulp_of(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of the dtype's numbers at the magnitudes ``y``."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(y.clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(y, info.eps), exponent - 1)


def _params(probe: nn.Module, formula: Formula) -> tuple[Tensor | None, Tensor | None]:
    """What the normalised values are multiplied by, and what is added to them."""
    weight, bias = (getattr(probe, name, None) for name in ("weight", "bias"))
    if formula.factor == "1":
        weight = None
    if weight is not None:
        weight = weight.detach()
        if formula.factor == "rounded 1 + weight":
            weight = weight + 1
        weight = weight.double() + (formula.factor == "1 + weight")
    return weight, None if bias is None else bias.detach().double()


def noise_of(x: Tensor, shape: tuple[int, ...]) -> float:
    """What the arithmetic of an implementation adds, relative to the condition.

    It costs eight roundings for the formula and a tree's levels for its sums; four times that,
    since rsqrt is off by up to 2 ulp on a GPU and a lane adds some values one by one.
    """
    steps = 4 * (8 + math.log2(max(math.prod(shape), 1)))
    return steps * torch.finfo(compute_dtype(x)).eps / 2


def _eps(probe: nn.Module, formula: Formula, x: Tensor) -> float:
    eps = formula.eps_of(probe)
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
    x, eps = x.detach().double(), _eps(probe, formula, x)
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
