"""The modulated norms and the gated residual in PyTorch operations, for ``reference.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from ._norm_formula import Affine, cast, contiguous, normalize
from ._options import Norm, compute_dtype, machine_eps


def modulated(
    norm: Norm,
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The formula of the modulated norms. ``dtype``: of the result, if it is not that of input."""
    compute = compute_dtype(input)
    affine = Affine(
        None if weight is None else cast(weight, compute),
        None if bias is None else cast(bias, compute),
        None,
    )
    x = normalize(norm, cast(input, compute), 1, machine_eps(input) if eps is None else eps, affine)
    x = x * (cast(beside(scale, input), compute) + 1.0)
    if shift is not None:
        x = x + cast(beside(shift, input), compute)
    return contiguous(cast(x, dtype or input.dtype))


def gated_sum(input: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
    """``residual + gate * input``, rounded once."""
    compute = compute_dtype(input)
    branch = cast(beside(gate, input), compute) * cast(input, compute)
    return contiguous(cast(cast(residual, compute) + branch, residual.dtype))


def beside(entries: Tensor, input: Tensor) -> Tensor:
    """Reshape entries, which share their leading dimensions with input, so that they broadcast."""
    leading = entries.dim() - 1
    if leading in (0, input.dim() - 1):
        return entries
    ones = [1] * (input.dim() - entries.dim())
    return entries.reshape(*entries.shape[:-1], *ones, entries.shape[-1])
