"""The table of ops that the tests walk through, and how far a result may lie from the truth.

Truth is the same op of `fused_op.reference` in fp64, and autograd through it. How far a result may
be from it is derived: one rounding to the type of the result, plus roundings of the compute type
times the condition of that result. Nothing here needs pytest: `python test_correctness.py` imports
this file too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fused_op
import fused_op.reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Op:
    """A fused function, its twin in plain PyTorch, and its tensor arguments in call order."""

    name: str
    fused: Callable
    reference: Callable
    inputs: tuple[str, ...]
    zero_centered: bool = False

    @property
    def centred(self) -> bool:
        """LayerNorm subtracts the mean, RMSNorm does not."""
        return "layer" in self.name

    @property
    def adds(self) -> bool:
        return "residual" in self.inputs

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name in ("weight", "bias"))

    def factor(self, weight: Tensor | None) -> Tensor | None:
        """What the normalised values are multiplied by."""
        return 1 + weight if self.zero_centered and weight is not None else weight

    def __str__(self) -> str:
        return self.name + ("-zero_centered" if self.zero_centered else "")


def _op(name: str, *inputs: str) -> Op:
    return Op(name, getattr(fused_op, name), getattr(fused_op.reference, name), inputs)


def zero_centered(op: Op) -> Op:
    """The op with weights that are kept minus one."""
    fused, reference = (partial(f, zero_centered=True) for f in (op.fused, op.reference))
    return Op(op.name, fused, reference, op.inputs, zero_centered=True)


OPS = [
    _op("fused_layer_norm", "input", "weight", "bias"),
    _op("fused_rms_norm", "input", "weight"),
    _op("fused_add_layer_norm", "input", "residual", "weight", "bias"),
    _op("fused_add_rms_norm", "input", "residual", "weight"),
]
# Each norm, with a residual and without; tests/numerics/test_zero_centered.py has the others.
OPS += [zero_centered(OPS[1]), zero_centered(OPS[2])]


class Pair(NamedTuple):
    """The dtype of the rows, and of weight and bias."""

    rows: torch.dtype
    params: torch.dtype

    def __str__(self) -> str:
        names = {F16: "f16", BF16: "bf16", F32: "f32", F64: "f64"}
        return f"{names[self.rows]}-{names[self.params]}"


PAIRS = [
    Pair(F32, F32),
    Pair(F16, F16),
    Pair(F16, F32),
    Pair(BF16, BF16),
    Pair(BF16, F32),
    Pair(F64, F64),
]


class Tolerance(NamedTuple):
    """What one rounding costs, for results of one dtype."""

    rounding: float  # the result's own rounding: half a spacing, relative to the result
    smallest: float  # the spacing of subnormal numbers: what that rounding costs near zero
    compute: float  # a rounding of the type that sums and statistics are held in


def _tolerance(dtype: torch.dtype) -> Tolerance:
    info, compute = torch.finfo(dtype), torch.finfo(F64 if dtype is F64 else F32)
    return Tolerance(info.eps / 2, info.eps * info.smallest_normal, compute.eps / 2)


TOLERANCE = {dtype: _tolerance(dtype) for dtype in (F16, BF16, F32, F64)}


def steps(terms: int) -> float:
    """How many roundings a formula with a sum over `terms` may cost, relative to its condition.

    Eight for the formula and log2 for a tree of sums. Four times that, since rsqrt is off by up
    to 2 ulp on a GPU, and a lane that adds k values one by one errs like sqrt(k) roundings.
    """
    return 4 * (8 + math.log2(max(terms, 1)))


def condition(
    op: Op,
    eps: float,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    least: float = torch.finfo(F32).smallest_normal,
    xhat: Tensor | None = None,
) -> dict[str, Tensor]:
    """What rounding errors are relative to: each formula in fp64 with all its terms positive.

    `shift` is what subtracting the mean cancels: the roundings of the mean, and of the sum behind
    it, move every normalised value of the row by rounding * shift. `x` and `dy` are [rows, cols].
    A product below `least`, the smallest normal number of the type that computes, is rounded as if
    it were that number; in a sum over rows each may be. `xhat` are the normalised values that
    backward goes by, where they are not those of `x` but of a stored output.
    """
    mean = x.mean(-1, keepdim=True) if op.centred else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    shift = x.abs().mean(-1, keepdim=True) * rstd if op.centred else 0.0
    xhat = ((x - mean) * rstd if xhat is None else xhat).abs() + shift
    # The sum of 1 and a weight is rounded once, relative to itself.
    dy, factor = dy.abs(), torch.ones_like(x[:1]) if weight is None else op.factor(weight).abs()
    wdy = dy * factor
    pullback = wdy + wdy.mean(-1, keepdim=True) + xhat * (wdy * xhat).mean(-1, keepdim=True)
    return {
        "output": xhat * factor + (0 if bias is None else bias.abs()),
        "grad_x": pullback * rstd * (1 + shift),
        "grad_weight": (dy * (xhat + least) + least).sum(0),
        "grad_bias": dy.sum(0),
    }


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every subset of the names, the empty one first."""
    return [s for k in range(len(names) + 1) for s in itertools.combinations(names, k)]


def pairwise(*factors: list) -> list[tuple]:
    """Combinations in which every two values of two different factors meet; greedy, no chance."""

    def pairs(row: tuple) -> set:
        return set(itertools.combinations(enumerate(row), 2))

    candidates = {row: pairs(row) for row in itertools.product(*(range(len(f)) for f in factors))}
    missing = set().union(*candidates.values())
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(candidates[row] & missing))
        missing -= candidates.pop(best)
        rows.append(tuple(f[i] for f, i in zip(factors, best, strict=True)))
    return rows
