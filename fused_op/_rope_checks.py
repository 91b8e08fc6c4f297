"""What norms with rotary embedding refuse, with the messages of ``csrc/rope_call.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _rope_formula
from ._arguments import as_float, check_bools, check_eps, check_rows, check_tensor
from ._options import machine_eps
from ._sizes import differ, holds

OP = "fused_rms_norm_rope"
QK_OP = "fused_qk_norm_rope"


def checked_eps(
    op: str,
    input: Tensor,
    cos: Any,
    sin: Any,
    eps: Any,
    style: Any,
    zero_centered: Any,
    rounding: Any,
) -> float:
    """Eps as a float. Checks what the ops cannot check."""
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(op, name, angles)
        if angles.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{op}: {name} gets no gradient here; pass {name}.detach()")
    check_bools(op, zero_centered=zero_centered)
    for name, value in (("style", style), ("rounding", rounding)):
        if not isinstance(value, str):
            raise TypeError(f"{op}: argument '{name}' must be str, not {type(value).__name__}")
    return machine_eps(input) if eps is None else as_float(op, "eps", eps)


def check_call(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    style: str,
    zero_centered: bool,
    rounding: str,
) -> None:
    _check_options(OP, eps, style, rounding)
    check_rows(OP, "input", input)
    if input.dim() < 2:
        raise RuntimeError(
            f"{OP}: input must have shape [..., heads, head_dim], got {list(input.shape)}"
        )
    _check_heads(OP, "weight", weight, input)
    _check_angles(OP, cos, sin, input)


def check_qk_call(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    style: str,
    zero_centered: bool,
    rounding: str,
) -> None:
    _check_options(QK_OP, eps, style, rounding)
    check_rows(QK_OP, "qkv", qkv)
    if heads <= 0 or kv_heads <= 0:
        raise ValueError(
            f"{QK_OP}: heads and kv_heads must be positive, got {heads} and {kv_heads}"
        )
    if max(heads, kv_heads) >= 2**31:
        raise ValueError(
            f"{QK_OP}: there are more than 2^31 heads: heads and kv_heads are {heads} and "
            f"{kv_heads}"
        )
    every = heads + 2 * kv_heads
    if qkv.shape[-1] % every:
        raise RuntimeError(
            f"{QK_OP}: the last dimension of qkv must be (heads + 2 * kv_heads) * head_dim, a "
            f"multiple of {every}, got {qkv.shape[-1]}"
        )
    q, k, _ = _rope_formula.split(qkv, heads, kv_heads)
    _check_heads(QK_OP, "q_weight", q_weight, q)
    _check_heads(QK_OP, "k_weight", k_weight, k)
    _check_angles(QK_OP, cos, sin, q)


def _check_options(op: str, eps: float, style: str, rounding: str) -> None:
    if style not in ("neox", "gptj"):
        raise ValueError(f"{op}: style must be 'neox' or 'gptj', got {style!r}")
    if rounding not in ("once", "before_rotation", "before_weight"):
        raise ValueError(
            f"{op}: rounding must be 'once', 'before_rotation' or 'before_weight', got {rounding!r}"
        )
    check_eps(op, eps)


def _check_heads(op: str, name: str, weight: Tensor | None, rows: Tensor) -> None:
    if weight is None:
        return
    check_tensor(op, name, weight)
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise RuntimeError(
            f"{op}: mixed dtype: expect parameter to have scalar type of Float, Half, BFloat16 or "
            f"Double, got {name} of {weight.dtype}"
        )
    heads, cols = rows.shape[-2:]
    if weight.shape not in ((cols,), (heads, cols)):
        raise RuntimeError(
            f"{op}: Expected {name} of shape [{cols}] or [{heads}, {cols}], one number for each "
            f"column of a head or of all heads, but got {name} of shape {list(weight.shape)}"
        )


def _check_angles(op: str, cos: Tensor, sin: Tensor, rows: Tensor) -> None:
    tokens = list(rows.shape[:-2])
    for name, angles in (("cos", cos), ("sin", sin)):
        check_rows(op, name, angles)
        if angles.dim() == 0:
            raise RuntimeError(f"{op}: {name} must have at least one dimension, got a 0-dim tensor")
        sizes = list(angles.shape[:-1])
        while sizes and holds(sizes[0] == 1):
            del sizes[0]
        if sizes and differ(sizes, tokens[-len(sizes) :]):
            raise RuntimeError(
                f"{op}: {name} must have shape [..., rotary_dim / 2] with the last of the sizes "
                f"{tokens} in front (input without heads and head_dim), got {list(angles.shape)}"
            )
        if 2 * angles.shape[-1] > rows.shape[-1]:
            raise RuntimeError(
                f"{op}: {name} rotates twice its last dimension, {2 * angles.shape[-1]} columns, "
                f"and a head has {rows.shape[-1]}"
            )
    if differ(sin.shape, cos.shape):
        raise RuntimeError(
            f"{op}: sin must have the shape of cos, {list(cos.shape)}, got {list(sin.shape)}"
        )
    if sin.dtype != cos.dtype:
        raise RuntimeError(f"{op}: sin must have the dtype of cos, {cos.dtype}, got {sin.dtype}")
