"""For a class of gated norms, a subclass of it whose forward with a gate is the fused op.

The counterpart of ``_fused_class.py`` and ``_proof.py``, which are for norms of one input. Such a
class can compute more forms: the position of the gate, its activation, groups. ``convert`` takes
the form whose comparison shows the roundings of the original. A call without a gate runs the fused
norm of one input, if that was proved to be the same, and the original otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import reference
from ._fused_class import Formula, fused_class
from ._gated_rms_norm import fused_gated_rms_norm
from ._options import Activation, Rounding, compute_dtype
from ._probe import Refusal, check_side_effects, make_probe, run_forward
from ._proof import BATCHES, MAGNITUDES, MORE_BATCHES, SAME_ELEMENTS, SAME_SHARE, Match
from ._recipe import made_once, make_subclass

GROUP_NAMES = ("n_groups", "ngroups", "num_groups", "norm_groups")


class GatedFormula(NamedTuple):
    """What the forward of a gated norm class computes of an input and a gate."""

    activation: Activation
    gate_first: bool
    rounding: Rounding
    zero_centered: bool
    eps: str  # the attribute of its instances
    groups: str  # the attribute that holds how many groups there are, or their size; "": one
    without: Formula | None = None  # of calls without a gate; None: the original's forward

    def group_size(self, module: nn.Module, cols: int) -> int:
        if not self.groups:
            return cols
        value: int = getattr(module, self.groups)
        return cols // value if self.groups in GROUP_NAMES else value

    def keywords(self, module: nn.Module, cols: int) -> dict[str, Any]:
        return {
            "eps": getattr(module, self.eps),
            "group_size": self.group_size(module, cols),
            "activation": self.activation,
            "gate_first": self.gate_first,
            "zero_centered": self.zero_centered,
            "rounding": self.rounding,
        }


def gate_parameter(cls: Any) -> inspect.Parameter | None:
    """The second parameter of a forward that takes an input and then a gate, and no more."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    is_gated = len(parameters) == 2 and parameters[1].name in ("gate", "z")
    return parameters[1] if is_gated else None


@made_once
def gated_class(original: Any, formula: GatedFormula) -> type[nn.Module]:
    """The fused class: always the same one for the same arguments."""
    parameter = gate_parameter(original)
    assert parameter is not None
    gate_name = parameter.name
    alone: Any = original if formula.without is None else fused_class(original, formula.without)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What was proved is the call with a gate, in rows of the dtype of the weight.
        if len(args) == 1 and not kwargs:
            return alone.forward(self, *args)
        given = (*args, *(kwargs[name] for name in kwargs if name == gate_name))
        weight = self.weight
        if (
            len(given) != 2
            or len(args) + len(kwargs) != 2
            or not all(
                isinstance(t, Tensor)
                and t.dtype == weight.dtype
                and t.device == weight.device
                and t.shape == given[0].shape
                and t.layout is torch.strided
                for t in given
            )
        ):
            return original.forward(self, *args, **kwargs)
        keywords = formula.keywords(self, given[0].shape[-1])
        return fused_gated_rms_norm(*given, weight, **keywords)

    members = {
        "__module__": __name__,
        "__doc__": f"``{original.__qualname__}`` whose forward with a gate is the fused op.",
        "forward": forward,
    }
    return make_subclass(original, formula, gated_class, f"Fused{original.__name__}", members)


def prove_gated(
    module: nn.Module,
    eps_name: str,
    without: Formula | None,
    like: Tensor,
    shared: dict[int, Any],
) -> tuple[type[nn.Module], Match]:
    """The fused class of a gated norm, and how near its results are; or a Refusal."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or module._parameters.get("bias") is not None:
        raise Refusal("has no weight of one dimension, or has a bias")
    found: list[tuple[type[nn.Module], Match]] = []
    refusal: Refusal | None = None
    for formula in _candidates(module, eps_name, like):
        formula = formula._replace(without=without)
        fused = gated_class(type(module), formula)
        try:
            match = _prove(module, fused, formula, like, weight.numel(), shared)
        except Refusal as reason:
            refusal = refusal or reason
            if reason.is_of_run:
                raise
            continue
        if match.same_roundings or like.dtype.itemsize != 2:
            return fused, match
        found.append((fused, match))
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda each: each[1].differing)


def _candidates(module: nn.Module, eps_name: str, like: Tensor) -> list[GatedFormula]:
    groups = held_ints(module, (*GROUP_NAMES, "group_size"))
    activations: list[Activation] = ["silu", "sigmoid"]
    roundings: list[Rounding] = ["once"]
    if like.dtype.itemsize == 2:
        roundings.append("before_weight")
    every = itertools.product(activations, (False, True), roundings, (False, True), (*groups, ""))
    return [GatedFormula(a, f, r, z, eps_name, g) for a, f, r, z, g in every]


def held_ints(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """The names under which the module holds a number of groups, or their size."""
    found = []
    for name in names:
        with contextlib.suppress(Exception):  # of a property
            if type(getattr(module, name)) is int:
                found.append(name)
    return found


def _prove(
    module: nn.Module,
    fused: type[nn.Module],
    formula: GatedFormula,
    like: Tensor,
    cols: int,
    shared: dict[int, Any],
) -> Match:
    size = formula.group_size(module, cols)
    if size < 1 or cols % size:
        raise Refusal(f"its {formula.groups} does not divide its columns")
    generator = torch.Generator(like.device).manual_seed(0)
    compute = compute_dtype(like)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=like.device, dtype=compute)

    def some(batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        count = math.prod(batch)
        scale = torch.tensor(MAGNITUDES, dtype=compute, device=like.device)
        row = torch.arange(count, device=like.device).reshape(*batch, 1) % len(scale)
        x, gate = normal(*batch, cols) * scale[row], normal(*batch, cols) * 3
        return x.to(like.dtype), gate.to(like.dtype)

    devices = [like.device] if like.device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices),
        torch.autocast(like.device.type, enabled=False),
    ):
        probe = make_probe(module, normal, shared)
        for training in (False, True):
            probe.training = training
            x, gate = some((2, 3))
            check_side_effects(probe, x, shared, gate)
            for batch in BATCHES if training else (*BATCHES, *MORE_BATCHES):
                try:
                    _compare_outputs(probe, fused, formula, *some(batch))
                except Refusal as refusal:  # a batch that the original takes in no form
                    if not refusal.is_of_run or batch in BATCHES[1:2]:
                        raise
            rows = normal(2, 5, cols).to(like.dtype)
            _compare_gradients(probe, fused, formula, rows, some((2, 5))[1], normal)
            _compare_special_rows(probe, fused, *some((2, 3)))
        probe.training = False
        count = -(-SAME_ELEMENTS // cols)
        x, gate = normal(1, count, cols).to(like.dtype), normal(1, count, cols).to(like.dtype)
        differing = 1.0
        if like.dtype.itemsize == 2:
            with torch.no_grad():
                old, new = (run_forward(c, probe, x, gate) for c in (type(probe), fused))
            differing = int((old != new).sum()) / x.numel()
    ulps = 1 if differing <= SAME_SHARE or like.dtype.itemsize != 2 else 2
    return Match(ulps, formula.rounding, differing)


def _scales(probe: nn.Module, formula: GatedFormula, x: Tensor, gate: Tensor) -> Tensor:
    """What roundings of the outputs are relative to."""
    keywords = formula.keywords(probe, x.shape[-1]) | {"rounding": "once"}
    weight: Any = probe.weight
    output = reference.fused_gated_rms_norm(
        x.double(), gate.double(), weight.detach().double(), **keywords
    )
    return output.abs()


def _noise(cols: int, dtype: torch.dtype) -> float:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return 4 * (16 + math.log2(cols)) * torch.finfo(wide).eps / 2


@torch.no_grad()
def _compare_outputs(
    probe: nn.Module, fused: type[nn.Module], formula: GatedFormula, x: Tensor, gate: Tensor
) -> None:
    old, new = (run_forward(cls, probe, x, gate).double() for cls in (type(probe), fused))
    scale = _scales(probe, formula, x, gate)
    info = torch.finfo(x.dtype)
    # Each is off by half an ulp at most of x̂, of its product with the weight, of the gate, of the
    # result; and by a spacing of subnormal numbers, times what comes behind it.
    weight: Any = probe.weight
    subnormal = info.eps * info.smallest_normal * (1 + weight.detach().double().abs())
    subnormal = subnormal * (1 + gate.double().abs())
    bound = (3 * info.eps + 2 * _noise(x.shape[-1], x.dtype)) * scale + 2 * subnormal
    if not bool(((old - new).abs() <= bound).all()):
        raise Refusal("differs from the gated RMS norms that there are", is_of_values=True)


def _compare_gradients(
    probe: nn.Module,
    fused: type[nn.Module],
    formula: GatedFormula,
    x: Tensor,
    gate: Tensor,
    normal: Callable[..., Tensor],
) -> None:
    dy = normal(*x.shape).to(x.dtype)
    found = []
    weight: Any = probe.weight
    with torch.enable_grad():
        for cls in (type(probe), fused):
            leaves = [t.detach().requires_grad_() for t in (x, gate)]
            y = run_forward(cls, probe, *leaves)
            if not y.requires_grad:
                raise Refusal("gives no gradient")
            found.append(torch.autograd.grad(y, [*leaves, weight], dy, allow_unused=True))
    info = torch.finfo(x.dtype)
    for name, old, new in zip(("input", "gate", "weight"), *found, strict=True):
        if old is None or new is None:
            raise Refusal(f"gives no gradient of its {name}")
        # Terms of a row cancel, and terms of a column: relative to the largest of either.
        largest = new.double().abs().amax(-1, keepdim=True) + old.double().abs().amax()
        bound = (32 * info.eps + 8 * _noise(x.shape[-1], x.dtype)) * largest
        if not bool(((old - new).double().abs() <= bound).all()):
            raise Refusal(f"the gradient of its {name} is another than that of the fused op")


@torch.no_grad()
def _compare_special_rows(
    probe: nn.Module, fused: type[nn.Module], x: Tensor, gate: Tensor
) -> None:
    """Rows of zeros give what the op gives, and NaN and infinities show."""
    x, gate = x.clone(), gate.clone()
    x[0, 0, -1], x[0, 1, -1], gate[0, 2, -1] = math.nan, math.inf, math.nan
    x[1, 0] = 0
    old, new = (run_forward(cls, probe, x, gate) for cls in (type(probe), fused))
    if bool(old[0].isfinite().flatten(1).all(-1).any()):
        raise Refusal("hides NaN or infinities of its input")
    if not torch.allclose(old[1, 0], new[1, 0], 1e-2, 1e-6):
        raise Refusal("differs from the gated RMS norms in rows of zeros")
