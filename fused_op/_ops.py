"""What the dispatcher ops return, without computing it: shapes and dtypes for torch.compile & Co.

The schemas are in ``csrc/fused_op.cpp``, the meaning of arguments and results in
``csrc/fused_op.h``. A result that was not asked for has no elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference import compute_dtype


def _norm_forward(
    norm: str,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    affine = weight if weight is not None else bias
    ndim = normalized_ndim or (1 if affine is None else affine.dim())
    rows = math.prod(input.shape[: input.dim() - ndim])
    count = 2 if norm == "layer_norm" else 1
    output = input.new_empty(input.shape)
    return (
        output,
        input.new_empty(0 if residual is None else input.shape),
        input.new_empty((count, rows), dtype=compute_dtype(input))
        if save_stats
        else input.new_empty(0),
    )


def _norm_backward(
    norm: str,
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    normalized_ndim: int,
    zero_centered: bool,
    param_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[x.dim() - normalized_ndim :]
    return (
        x.new_empty(x.shape if wanted[0] else 0),
        x.new_empty(shape, dtype=param_dtype) if wanted[1] else x.new_empty(0),
        x.new_empty(shape, dtype=param_dtype) if wanted[2] else x.new_empty(0),
    )


torch.library.register_fake("fused_op::norm_forward", _norm_forward)
torch.library.register_fake("fused_op::norm_backward", _norm_backward)
