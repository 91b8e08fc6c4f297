"""RMS norm and rotary embedding of queries and keys: ``csrc/rms_norm_rope.cpp`` is the C++ half.

``fused_rms_norm_rope`` takes queries or keys. ``fused_qk_norm_rope`` takes a packed projection and
returns its values, too. Backward then writes one gradient; that of a split would copy three.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import _rope_formula
from ._arguments import as_int, check_tensor
from ._ops import register_fake
from ._options import compute_dtype
from ._rope_checks import OP, QK_OP, check_call, check_qk_call, checked_eps
from ._rope_formula import RopeRounding, Style
from ._variant import Variant


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
    """RMS norm of each head, then its rotary position embedding, in one pass.

    Args:
        input: ``[..., heads, head_dim]``, queries or keys; float16, bfloat16, float32 or float64,
            on CPU or CUDA. Part of a packed projection is read in place.
        cos: ``[..., rotary_dim / 2]``, a number for each pair of columns; any of these dtypes. Its
            leading sizes are those of ``input`` without ``heads`` and ``head_dim``, or the last of
            them: ``[seq, rotary_dim / 2]`` serves a whole batch. The first ``rotary_dim`` columns
            are rotated, the others only normalised. It gets no gradient.
        sin: like ``cos``.
        weight: ``[head_dim]``, or ``[heads, head_dim]`` for heads with weights of their own;
            ``None`` means 1. As in :func:`fused_op.fused_rms_norm`.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic, as in ``torch.nn.functional.rms_norm``.
        style: ``"neox"`` rotates column ``j`` with column ``j + rotary_dim / 2``, as Llama does;
            ``"gptj"`` rotates neighbours, ``2j`` and ``2j + 1``, as GPT-J and GLM do.
        zero_centered: multiply by ``1 + weight``, for weights that are stored minus one.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_rotation"``: the
            normalised values, weight included, are rounded to the dtype of ``input`` first, as by a
            norm that is a function of its own; and if cos and sin have that dtype, so is each
            product with them. ``"before_weight"``: that, after the roundings of
            ``weight * normalized.to(input.dtype)``, as in Qwen3. For derivatives, rounding is the
            identity; it changes nothing in float32 and float64.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The arithmetic is in float32
        (float64 for float64). For backward ``input`` and a number for each head are saved.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument. Or cos or
            sin require a gradient.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite, or ``style`` or ``rounding`` has another value.

    Source: Su et al. 2021 (https://arxiv.org/abs/2104.09864).
    """
    tensors = input, cos, sin, weight
    keywords: Any = {"style": style, "zero_centered": zero_centered, "rounding": rounding}
    if has_torch_function(tensors):
        return handle_torch_function(fused_rms_norm_rope, tensors, *tensors, eps, **keywords)
    check_tensor(OP, "input", input)
    eps = checked_eps(OP, input, cos, sin, eps, **keywords)
    output: Tensor = _RMS_NORM_ROPE(tensors, (eps, style, zero_centered, rounding))
    return output


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
    """Queries, keys and values of a packed projection: the first two normalised and rotated.

    Args:
        qkv: ``[..., (heads + 2 * kv_heads) * head_dim]``: heads of queries, of keys, of values.
        cos: as in :func:`fused_op.fused_rms_norm_rope`, for the tokens of ``qkv``.
        sin: like ``cos``.
        q_weight: ``[head_dim]``, or a row for each head; ``None`` means 1.
        k_weight: likewise.
        eps: as in :func:`fused_op.fused_rms_norm_rope`, like the options below.
        heads: of queries.
        kv_heads: of keys, and of values.
        style: see there.
        zero_centered: see there.
        rounding: see there.

    Returns:
        ``(q, k, v)``, each ``[..., heads, head_dim]``. q and k are contiguous; v is a view of
        ``qkv``. Backward writes the gradient of ``qkv`` once, as a whole.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_op.fused_rms_norm_rope`, and if the
            last dimension of ``qkv`` is not a whole number of such heads.
    """
    tensors = qkv, cos, sin, q_weight, k_weight
    keywords: Any = {"style": style, "zero_centered": zero_centered, "rounding": rounding}
    counts: Any = {"heads": heads, "kv_heads": kv_heads}
    if has_torch_function(tensors):
        keywords |= counts
        return handle_torch_function(fused_qk_norm_rope, tensors, *tensors, eps, **keywords)
    check_tensor(QK_OP, "qkv", qkv)
    heads, kv_heads = (as_int(QK_OP, name, count) for name, count in counts.items())
    eps = checked_eps(QK_OP, qkv, cos, sin, eps, **keywords)
    options = eps, heads, kv_heads, style, zero_centered, rounding
    outputs: tuple[Tensor, Tensor, Tensor] = _QK_NORM_ROPE(tensors, options)
    return outputs


def _formula(
    input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, *options: Any
) -> Tensor:
    keywords = dict(zip(("style", "zero_centered", "rounding"), options, strict=True))
    return _rope_formula.fused_rms_norm_rope(input, cos, sin, weight, eps, **keywords)


def _qk_views(tensors: Any, options: Any) -> tuple[Tensor]:
    """The values."""
    return (_rope_formula.split(tensors[0], *options[1:3])[2],)


def _qk_formula(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    names = "heads", "kv_heads", "style", "zero_centered", "rounding"
    keywords = dict(zip(names, options, strict=True))
    return _rope_formula.fused_qk_norm_rope(qkv, cos, sin, q_weight, k_weight, eps, **keywords)


def _fake_forward(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    style: str,
    zero_centered: bool,
    rounding: str,
    save_stats: bool,
) -> tuple[Tensor, Tensor]:
    check_call(input, cos, sin, weight, eps, style, zero_centered, rounding)
    rows = math.prod(input.shape[:-1])
    stats = input.new_empty((1, rows), dtype=compute_dtype(input))
    return input.new_empty(input.shape), stats if save_stats else input.new_empty(0)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    style: str,
    zero_centered: bool,
    rounding: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape if wanted[0] else 0),
        _empty_like_weight(input, weight, wanted[1]),
    )


def _fake_qk_forward(
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
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = eps, heads, kv_heads, style, zero_centered, rounding
    check_qk_call(qkv, cos, sin, q_weight, k_weight, *options)
    q, k, _ = _rope_formula.split(qkv, heads, kv_heads)
    rows = math.prod(qkv.shape[:-1]) * (heads + kv_heads)
    stats = qkv.new_empty((1, rows), dtype=compute_dtype(qkv)) if save_stats else qkv.new_empty(0)
    return qkv.new_empty(q.shape), qkv.new_empty(k.shape), stats


def _fake_qk_backward(
    grad_q: Tensor | None,
    grad_k: Tensor | None,
    grad_v: Tensor | None,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    stats: Tensor,
    heads: int,
    kv_heads: int,
    style: str,
    zero_centered: bool,
    rounding: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        qkv.new_empty(qkv.shape if wanted[0] else 0),
        _empty_like_weight(qkv, q_weight, wanted[1]),
        _empty_like_weight(qkv, k_weight, wanted[2]),
    )


def _empty_like_weight(beside: Tensor, weight: Tensor | None, wanted: bool) -> Tensor:
    if weight is None or not wanted:
        return beside.new_empty(0)
    return beside.new_empty(weight.shape, dtype=weight.dtype)


register_fake("rms_norm_rope_forward", _fake_forward)
register_fake("rms_norm_rope_backward", _fake_backward)
register_fake("qk_norm_rope_forward", _fake_qk_forward)
register_fake("qk_norm_rope_backward", _fake_qk_backward)

_RMS_NORM_ROPE = Variant("rms_norm_rope", _formula, check_call)
_QK_NORM_ROPE = Variant("qk_norm_rope", _qk_formula, check_qk_call, views=_qk_views)
