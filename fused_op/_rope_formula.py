"""RMS norm with rotary embedding in PyTorch operations, for ``reference.py``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ._norm_formula import (
    Affine,
    apply_affine,
    cast,
    contiguous,
    normalize,
    rounded,
    weight_factor,
)
from ._options import compute_dtype, machine_eps

Style = Literal["neox", "gptj"]
RopeRounding = Literal["once", "before_rotation", "before_weight"]


def fused_rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    style: Style = "neox",
    zero_centered: bool = False,
    rounding: RopeRounding = "once",
) -> Tensor:
    """Twin of :func:`fused_op.fused_rms_norm_rope`."""
    compute, dtype = compute_dtype(input), input.dtype
    eps = machine_eps(input) if eps is None else eps
    rounds = dtype.itemsize == 2 and rounding != "once"
    # A product with a 32-bit weight has 32 bits, unless it is rounded as the output of a norm.
    rounds_norm = rounds and (
        rounding == "before_rotation"
        or weight is None
        or (weight.dtype == dtype and not zero_centered)
    )
    factor = None if weight is None else weight_factor(weight, compute, zero_centered)
    affine = Affine(None, None, dtype if rounds and rounding == "before_weight" else None)
    x = normalize("rms_norm", cast(input, compute), 1, eps, affine)
    x = apply_affine(Affine(factor, None, None), x)
    x = rounded(x, dtype if rounds_norm else None)
    rounds_products = rounds_norm and cos.dtype == dtype
    turned = _turn(x, cos, sin, style, dtype if rounds_products else None)
    return contiguous(cast(turned, dtype))


def fused_qk_norm_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    heads: int,
    kv_heads: int,
    style: Style = "neox",
    zero_centered: bool = False,
    rounding: RopeRounding = "once",
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_qk_norm_rope`."""
    q, k, v = split(qkv, heads, kv_heads)
    q, k = (
        fused_rms_norm_rope(
            *(x, cos, sin, weight, eps),
            style=style,
            zero_centered=zero_centered,
            rounding=rounding,
        )
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, v


def split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, as views."""
    every = heads + 2 * kv_heads
    rows = qkv.reshape(*qkv.shape[:-1], every, qkv.shape[-1] // every)
    return (
        rows.narrow(-2, 0, heads),
        rows.narrow(-2, heads, kv_heads),
        rows.narrow(-2, heads + kv_heads, kv_heads),
    )


def _turn(x: Tensor, cos: Tensor, sin: Tensor, style: str, round_to: torch.dtype | None) -> Tensor:
    """Heads with their first columns rotated, in pairs."""
    while cos.dim() >= x.dim():  # of size 1, which must not become dimensions of the output
        cos, sin = cos.squeeze(0), sin.squeeze(0)
    cos, sin = (cast(angles, x.dtype).unsqueeze(-2) for angles in (cos, sin))  # over heads
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if style == "neox":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    first = rounded(a * cos, round_to) - rounded(b * sin, round_to)
    second = rounded(b * cos, round_to) + rounded(a * sin, round_to)
    if style == "neox":
        return torch.cat((first, second, rest), -1)
    return torch.cat((torch.stack((first, second), -1).flatten(-2), rest), -1)
