"""Post-norm and addition: ``csrc/post_add_pre_rms_norm.cpp`` is the C++ half.

Calls that its kernel cannot take go to ``fused_rms_norm`` and an addition, with the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ._arguments import (
    as_float,
    check_bools,
    check_eps,
    check_options,
    check_parameter,
    check_residual,
    check_rounding,
    check_rows,
    check_tensor,
)
from ._norm_formula import normalize_backward
from ._ops import register_fake
from ._options import BackwardOptions, Rounding, compute_dtype, machine_eps
from ._variant import Variant
from .functional import fused_rms_norm

_OP = "fused_rms_norm_add"


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
    """``residual + rms_norm(input)`` in one pass: the norm after a block, and the addition.

    The blocks of OLMo 2 and 3 end with it. The result is bit for bit that of
    :func:`fused_rms_norm` and an addition.

    Args:
        input: ``[..., cols]``, float16, bfloat16, float32 or float64, on CPU or CUDA: the output of
            the block. Rows may be strided; any other layout is copied once.
        residual: shape and device of ``input``; its dtype, or float32 beside a 16-bit ``input``.
        weight: ``[cols]``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16 bits,
            float32; any other of the four is converted in each call, and its gradient back.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64).
        zero_centered: multiply by ``1 + weight``, for weights that are stored minus one. The 1 is
            added in the precision of the arithmetic.
        rounding: ``"once"``: the norm rounds only its output to 16 bits. ``"before_weight"``: the
            normalised values are first rounded to the dtype of ``input``, as in
            ``weight * normalized.to(input.dtype)``. For derivatives, rounding is the identity.
        residual_dtype: dtype of the sum: that of ``residual``, or float32 beside 16-bit rows.

    Returns:
        The sum, contiguous and of the shape of ``input``. The norm is rounded to the dtype of
        ``input`` before the addition. For backward ``input`` and a number for each row are saved.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite, or ``rounding`` is neither of the two.

    Source: OLMo Team 2025 (https://arxiv.org/abs/2501.00656).
    """
    tensors = input, residual, weight
    keywords: dict[str, Any] = {
        "zero_centered": zero_centered,
        "rounding": rounding,
        "residual_dtype": residual_dtype,
    }
    if has_torch_function(tensors):
        return handle_torch_function(fused_rms_norm_add, tensors, *tensors, eps, **keywords)
    check_tensor(_OP, "input", input)
    check_tensor(_OP, "residual", residual)
    check_bools(_OP, zero_centered=zero_centered)
    check_rounding(_OP, rounding)
    check_options(_OP, 0.0, None, residual_dtype, False)
    eps = machine_eps(input) if eps is None else as_float(_OP, "eps", eps)
    options = eps, zero_centered, rounding, residual_dtype
    sum: Tensor = _RMS_NORM_ADD(tensors, options)
    return sum


def _passed(_: Any) -> tuple[int, int]:
    """The gradient of the residual is that of the sum."""
    return 1, 0


def _gradients(grads: Any, saved: Any, options: Any, wanted: Any) -> Any:
    (grad,), (_, zero_centered, rounding, _) = grads, options
    input, weight = saved["input"], saved["weight"]
    of_norm = BackwardOptions(
        *("rms_norm", 1, options[0], zero_centered, rounding, 0.0, False, input.dtype, None),
        *(input.dtype if weight is None else weight.dtype, input.dtype, False),
    )
    tensors = grad.to(input.dtype), None, input, weight, None, None, None
    wants = wanted[0], False, wanted[2], False
    grad_input, _, grad_weight, _ = normalize_backward(tensors, of_norm, wants)
    return grad_input, grad if wanted[1] else None, grad_weight


def _formula(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
) -> Tensor:
    branch = fused_rms_norm(input, weight, eps, zero_centered=zero_centered, rounding=rounding)
    return (residual.to(sum_dtype or residual.dtype) + branch).contiguous()


def _check(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
) -> None:
    check_eps(_OP, eps)
    check_rows(_OP, "input", input)
    check_residual(_OP, residual, input, sum_dtype)
    check_parameter(_OP, "weight", weight, input.shape[-1])


def _fake_forward(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
    save_stats: bool,
) -> tuple[Tensor, Tensor]:
    _check(input, residual, weight, eps, zero_centered, rounding, sum_dtype)
    stats = input.new_empty((1, math.prod(input.shape[:-1])), dtype=compute_dtype(input))
    sum = input.new_empty(input.shape, dtype=sum_dtype or residual.dtype)
    return sum, stats if save_stats else input.new_empty(0)


def _fake_backward(
    grad_sum: Tensor,
    input: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    zero_centered: bool,
    rounding: Rounding,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    like_weight = input if weight is None else weight
    return (
        input.new_empty(input.shape if wanted[0] else 0),
        like_weight.new_empty(like_weight.shape) if wanted[1] else input.new_empty(0),
    )


register_fake("rms_norm_add_forward", _fake_forward)
register_fake("rms_norm_add_backward", _fake_backward)

_RMS_NORM_ADD = Variant("rms_norm_add", _formula, _check, gradients=_gradients, passed=_passed)
