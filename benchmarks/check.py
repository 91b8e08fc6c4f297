"""Checks that an implementation computes the op, before it is timed.

This is no test of the library (test_correctness.py is). It keeps implementations out of the tables
that are fast because they compute something else, ours included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .grids import DROPOUT_P, Case
from .peers import Run, torch_run
from .timing import tensors_in

# Relative L2 error beyond which values are wrong, not imprecise: it must let pass what some peers
# round twice (about 2^-8 in bf16), and stop what was computed from the wrong data.
_WRONG = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4, "float64": 1e-4}
_CHECKED_ROWS = 64
_FULLY_CHECKED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class InputSet:
    """The large tensors of one call; parameters are shared by all sets of a case."""

    input: Tensor
    residual: Tensor | None
    grad_outputs: tuple[Tensor, ...]


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    """Fresh autograd leaves over the same memory; None stays None."""
    return [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def check_values(
    case: Case, run: Run, item: InputSet, weight: Tensor, bias: Tensor | None
) -> float:
    """Largest relative L2 error among outputs and gradients, against PyTorch in fp64.

    Rows are independent, so a large case is checked only on its first rows, for which the
    gradients of the parameters say nothing.

    Raises:
        RuntimeError: the values are wrong.
    """
    everything = case.rows * case.cols <= _FULLY_CHECKED_ELEMENTS
    rows = case.rows if everything else _CHECKED_ROWS

    def evaluate(function: Run, cut: int, dtype: torch.dtype | None) -> list[Tensor]:
        tensors = [item.input[:cut], None if item.residual is None else item.residual[:cut]]
        given = leaves(
            *(t if t is None or dtype is None else t.to(dtype) for t in (*tensors, weight, bias))
        )
        with torch.enable_grad():
            outputs = list(tensors_in(function(*given)))
        if "backward" in case.modes:
            wanted = [leaf for leaf in given if leaf is not None]
            grads = [g[:cut].to(o.dtype) for g, o in zip(item.grad_outputs, outputs, strict=True)]
            outputs += torch.autograd.grad(outputs, wanted, grads)
        return [output.detach() for output in outputs]

    found = evaluate(run, case.rows, None)
    right_run = torch_run(case.op)
    if case.drops:
        scale = _scale_of_drops(found, item, rows)
        without = torch_run(case.op.removeprefix("dropout_"))

        def right_run(x: Tensor, *others: Tensor | None) -> Any:
            return without(x * scale, *others)

    truth = evaluate(right_run, rows, torch.float64)
    error = 0.0
    for one, right in zip(found, truth, strict=True):
        if one.dim() == 1 and not everything:
            continue
        # Inputs are of order one, so what is smaller than that (dx of two columns, say) has
        # cancelled and has no digits of its own to be right in.
        scale = right.norm().clamp_min(right.numel() ** 0.5)
        error = max(error, float((one[: right.shape[0]].double() - right).norm() / scale))
    if not error <= _WRONG[case.dtype]:  # also a NaN
        raise RuntimeError(f"wrong values: relative error {error:.1e} against fp64")
    return error


def _scale_of_drops(found: list[Tensor], item: InputSet, rows: int) -> Tensor:
    """The factor of each input, 0 or 1 / (1 - p), recovered from the results.

    The sum shows it. For inputs that are lost in the rounding of the sum, their gradient does: it
    is zero where an input was dropped (and seldom by chance).

    Raises:
        RuntimeError: far more or fewer were dropped than p says.
    """
    assert item.residual is not None
    share = (found[1][:rows] - item.residual[:rows]).double() / item.input[:rows].double()
    kept_here = share > 0.5 / (1 - DROPOUT_P)
    if len(found) > 2:
        lost = item.input[:rows].abs() < 2**-6 * item.residual[:rows].abs()
        kept_here = torch.where(lost, found[2][:rows] != 0, kept_here)
    scale = kept_here.double() / (1 - DROPOUT_P)
    kept = float((scale > 0).double().mean())
    chance = (DROPOUT_P * (1 - DROPOUT_P) / scale.numel()) ** 0.5
    if not abs(kept - (1 - DROPOUT_P)) < 0.01 + 6 * chance:
        raise RuntimeError(f"wrong values: {kept:.3f} of the elements are kept, p is {DROPOUT_P}")
    return scale
