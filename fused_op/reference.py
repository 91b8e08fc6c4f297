"""Each op in plain PyTorch operations: the truth that tests, benchmarks and docs compare with.

Called with float64 copies of its inputs, a function gives the truth for every other dtype. The
exception is ``rounding="before_weight"``, because float64 has nothing to round. The formula of the
norms is in ``_norm_formula.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import quantized  # `import X as X` below: callers find X here, too
from ._channels_first_formula import channels_first
from ._group_norm_formula import group_norm
from ._modulated_formula import beside as beside
from ._modulated_formula import gated_sum as gated_sum
from ._modulated_formula import modulated as modulated
from ._norm_formula import Affine as Affine
from ._norm_formula import Normalize as Normalize
from ._norm_formula import apply_affine as apply_affine
from ._norm_formula import cast, normalized_rows, weight_factor
from ._norm_formula import check_shapes as check_shapes
from ._norm_formula import compute as compute
from ._norm_formula import contiguous as contiguous
from ._norm_formula import normalize as normalize
from ._norm_formula import normalize_backward as normalize_backward
from ._norm_formula import rounded as rounded
from ._options import (
    Activation,
    PixelActivation,
    Rounding,
    Shape,
    compute_dtype,
    machine_eps,
    rounds_first,
)
from ._philox import dropout_state
from ._quantize import QuantizedNorm as QuantizedNorm
from ._quantized_routes import quantized_twin
from ._rope_formula import fused_qk_norm_rope as fused_qk_norm_rope
from ._rope_formula import fused_rms_norm_rope as fused_rms_norm_rope


def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_layer_norm`; ``memory_efficient`` changes nothing here."""
    return compute(
        "layer_norm",
        input,
        weight=weight,
        bias=bias,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        rounding=rounding,
        **_dropout(input, dropout_p, training),
        output_dtype=out_dtype,
    )[0]


def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_rms_norm`; ``memory_efficient`` changes nothing here."""
    return compute(
        "rms_norm",
        input,
        weight=weight,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        rounding=rounding,
        **_dropout(input, dropout_p, training),
        output_dtype=out_dtype,
    )[0]


def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_layer_norm`."""
    output, sum = compute(
        "layer_norm",
        input,
        residual=residual,
        weight=weight,
        bias=bias,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        rounding=rounding,
        **_dropout(input, dropout_p, training),
        output_dtype=out_dtype,
        sum_dtype=residual_dtype,
    )
    assert sum is not None
    return output, sum


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_rms_norm`."""
    output, sum = compute(
        "rms_norm",
        input,
        residual=residual,
        weight=weight,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        rounding=rounding,
        **_dropout(input, dropout_p, training),
        output_dtype=out_dtype,
        sum_dtype=residual_dtype,
    )
    assert sum is not None
    return output, sum


def _dropout(input: Tensor, p: float, training: bool) -> dict[str, Any]:
    """The arguments of ``compute`` for dropout with a new mask, or without."""
    if not training or p == 0:
        return {}
    return {"dropout_p": p, "rng_state": dropout_state(input)}


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Twin of :func:`fused_op.layer_norm`."""
    return compute(
        "layer_norm", input, weight=weight, bias=bias, eps=eps, normalized_shape=normalized_shape
    )[0]


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Twin of :func:`fused_op.rms_norm`."""
    return compute("rms_norm", input, weight=weight, eps=eps, normalized_shape=normalized_shape)[0]


def fused_l2_norm(input: Tensor, eps: float = 1e-6) -> Tensor:
    """Twin of :func:`fused_op.fused_l2_norm`."""
    normalized, _ = normalized_rows("l2_norm", cast(input, compute_dtype(input)), 1, eps)
    return contiguous(cast(normalized, input.dtype))


def fused_gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    group_size: int | None = None,
    activation: Activation = "silu",
    gate_first: bool = False,
    zero_centered: bool = False,
    rounding: Rounding = "once",
) -> Tensor:
    """Twin of :func:`fused_op.fused_gated_rms_norm`."""
    compute = compute_dtype(input)
    x, gate = cast(input, compute), cast(gate, compute)
    factor = torch.sigmoid(gate) if activation == "sigmoid" else gate * torch.sigmoid(gate)
    if gate_first:
        x = x * factor
    cols = x.shape[-1]
    size = cols if group_size is None else group_size
    grouped = x if size == cols else x.reshape(*x.shape[:-1], cols // size, size)
    x, _ = normalized_rows("rms_norm", grouped, 1, machine_eps(input) if eps is None else eps)
    x = x if size == cols else x.flatten(-2)
    if rounds_first(rounding, input.dtype):
        x = rounded(x, input.dtype)
    if weight is not None:
        x = x * weight_factor(weight, compute, zero_centered)
        if rounds_first(rounding, input.dtype) and weight.dtype == input.dtype:
            # With 1 added, the factor has 32 bits, and so does the product.
            x = x if zero_centered else rounded(x, input.dtype)
    if not gate_first:
        x = x * factor
    return contiguous(cast(x, input.dtype))


def fused_modulated_layer_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Twin of :func:`fused_op.fused_modulated_layer_norm`."""
    return modulated("layer_norm", input, scale, shift, weight, bias, eps)


def fused_modulated_rms_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Twin of :func:`fused_op.fused_modulated_rms_norm`."""
    return modulated("rms_norm", input, scale, shift, weight, None, eps)


def fused_gated_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_gated_add_layer_norm`."""
    sum = gated_sum(input, residual, gate)
    return modulated("layer_norm", sum, scale, shift, weight, bias, eps, input.dtype), sum


def fused_gated_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_gated_add_rms_norm`."""
    sum = gated_sum(input, residual, gate)
    return modulated("rms_norm", sum, scale, shift, weight, None, eps, input.dtype), sum


def fused_rms_norm_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of :func:`fused_op.fused_rms_norm_add`."""
    branch = fused_rms_norm(input, weight, eps, zero_centered=zero_centered, rounding=rounding)
    return residual.to(residual_dtype or residual.dtype) + branch


def fused_post_add_pre_rms_norm(
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None = None,
    pre_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_post_add_pre_rms_norm`."""
    branch = fused_rms_norm(input, post_weight, eps, zero_centered=zero_centered, rounding=rounding)
    return fused_add_rms_norm(
        branch,
        residual,
        pre_weight,
        eps,
        zero_centered=zero_centered,
        rounding=rounding,
        residual_dtype=residual_dtype,
    )


def fused_channels_first_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: PixelActivation = None,
) -> Tensor:
    """Twin of :func:`fused_op.fused_channels_first_layer_norm`."""
    return channels_first("layer_norm", input, weight, bias, eps, activation)


def fused_channels_first_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: PixelActivation = None,
) -> Tensor:
    """Twin of :func:`fused_op.fused_channels_first_rms_norm`."""
    return channels_first("rms_norm", input, weight, bias, eps, activation)


def fused_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: PixelActivation = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Twin of :func:`fused_op.fused_group_norm`."""
    return group_norm(input, num_groups, weight, bias, scale, shift, eps, activation)


fused_rms_norm_quantized = quantized_twin(quantized.fused_rms_norm_quantized)
fused_layer_norm_quantized = quantized_twin(quantized.fused_layer_norm_quantized)
fused_add_rms_norm_quantized = quantized_twin(quantized.fused_add_rms_norm_quantized)
fused_add_layer_norm_quantized = quantized_twin(quantized.fused_add_layer_norm_quantized)
