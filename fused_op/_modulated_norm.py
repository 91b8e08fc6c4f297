"""The modulated norms (AdaLN), and the gated residual before them: ``csrc/modulated_norm.cpp``.

scale, shift and gate have entries: one row for each sample, each frame, each token, or one for all,
which neighbouring rows of the input share. ``csrc/core/modulated.h`` has the formulas.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ._arguments import (
    as_float,
    check_eps,
    check_parameter,
    check_residual,
    check_rows,
    check_tensor,
)
from ._modulated_formula import gated_sum, modulated
from ._ops import register_fake
from ._options import Norm, compute_dtype, machine_eps
from ._sizes import holds
from ._variant import Variant


def fused_modulated_layer_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm, modulated by a condition: ``layer_norm(input) * (1 + scale) + shift``.

    This is AdaLN, the norm of diffusion transformers (DiT, Stable Diffusion 3, Flux, Wan).

    Args:
        input: ``[..., cols]``, float16, bfloat16, float32 or float64, on CPU or CUDA. Rows may be
            strided; any other layout is copied once.
        scale: rows that rows of ``input`` share. Its dimensions are the first ones of ``input``,
            then ones, then ``cols``. With ``input`` of ``[B, F, S, cols]`` that is ``[cols]``,
            ``[B, cols]``, ``[B, 1, 1, cols]``, ``[B, F, cols]``, ``[B, F, 1, cols]`` or the shape
            of ``input``. Ones at the end may be left out. Any of these dtypes, but float64 only
            beside float64. A chunk of a wider projection is read in place.
        shift: like ``scale``, with entries for the same rows; ``None`` means 0. If the two
            differ in dtype, both are converted.
        weight: ``[cols]``, of the layer norm; ``None`` means 1. Fast in the dtype of ``input``, or
            in float32 beside a 16-bit ``input``.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The arithmetic is in float32
        (float64 for float64), 1 is added there, and the result is rounded once. Gradients of
        ``scale`` and ``shift`` are summed over the rows that share an entry, in a fixed order.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite.

    Source: Peebles and Xie 2023 (https://arxiv.org/abs/2212.09748), its ``modulate``.
    """
    tensors = input, scale, shift, weight, bias
    if has_torch_function(tensors):
        return handle_torch_function(fused_modulated_layer_norm, tensors, *tensors, eps)
    return _modulated("layer_norm", tensors, eps)


def fused_modulated_rms_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """RMS norm, modulated by a condition: ``rms_norm(input) * (1 + scale) + shift``.

    Arguments, results and errors are those of :func:`fused_op.fused_modulated_layer_norm`, without
    a bias. ``eps=None``: the machine epsilon of the arithmetic, as in
    ``torch.nn.functional.rms_norm``.
    """
    tensors = input, scale, shift, weight
    if has_torch_function(tensors):
        return handle_torch_function(fused_modulated_rms_norm, tensors, *tensors, eps)
    return _modulated("rms_norm", (*tensors, None), eps)


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
    """Modulated layer norm of ``residual + gate * input``, and that sum as the new residual.

    This stands between two branches of a diffusion transformer: the end of one, and the beginning
    of the next.

    Args:
        input: the output of a branch, as in :func:`fused_op.fused_modulated_layer_norm`.
        residual: shape and device of ``input``; its dtype, or float32 beside a 16-bit ``input``.
        gate: like ``scale``, with entries for the same rows.
        scale: as in :func:`fused_op.fused_modulated_layer_norm`.
        shift: as there.
        weight: as there.
        bias: as there.
        eps: as there.

    Returns:
        ``(output, residual)``, contiguous: ``output`` like ``input``, and the sum in the dtype of
        ``residual``. The sum is computed in float32 (float64 for float64) and rounded once. The
        norm is that of the rounded sum.

    Raises:
        RuntimeError, TypeError, ValueError: as in :func:`fused_op.fused_modulated_layer_norm`.
    """
    tensors = input, residual, gate, scale, shift, weight, bias
    if has_torch_function(tensors):
        return handle_torch_function(fused_gated_add_layer_norm, tensors, *tensors, eps)
    return _gated_add("layer_norm", tensors, eps)


def fused_gated_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Modulated RMS norm of ``residual + gate * input``, and that sum as the new residual.

    Arguments, results and errors are those of :func:`fused_op.fused_gated_add_layer_norm`, without
    a bias; ``eps`` is as in :func:`fused_op.fused_modulated_rms_norm`.
    """
    tensors = input, residual, gate, scale, shift, weight
    if has_torch_function(tensors):
        return handle_torch_function(fused_gated_add_rms_norm, tensors, *tensors, eps)
    return _gated_add("rms_norm", (*tensors, None), eps)


def _modulated(norm: Norm, tensors: Any, eps: Any) -> Tensor:
    op = f"fused_modulated_{norm}"
    input, scale, *_ = tensors
    check_tensor(op, "input", input)
    check_tensor(op, "scale", scale)
    eps = machine_eps(input) if eps is None and norm == "rms_norm" else as_float(op, "eps", eps)
    output: Tensor = _MODULATED_NORM(tensors, (norm, eps))
    return output


def _gated_add(norm: Norm, tensors: Any, eps: Any) -> tuple[Tensor, Tensor]:
    op = f"fused_gated_add_{norm}"
    for name, tensor in zip(("input", "residual", "gate", "scale"), tensors[:4], strict=True):
        check_tensor(op, name, tensor)
    input = tensors[0]
    eps = machine_eps(input) if eps is None and norm == "rms_norm" else as_float(op, "eps", eps)
    outputs: tuple[Tensor, Tensor] = _GATED_ADD_NORM(tensors, (norm, eps))
    return outputs


def _passed(place: int, tensors: Any) -> tuple[int, int] | None:
    """If shift has the shape of the input, its gradient is that of the output."""
    input, shift = tensors[0], tensors[place]
    if not isinstance(shift, Tensor) or shift.dim() != input.dim():
        return None
    return (place, 0) if holds(shift.numel() == input.numel()) else None


def _modulated_formula(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
) -> Tensor:
    return modulated(norm, input, scale, shift, weight, bias, eps)


def _gated_formula(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
) -> tuple[Tensor, Tensor]:
    sum = gated_sum(input, residual, gate)
    return modulated(norm, sum, scale, shift, weight, bias, eps, input.dtype), sum


def _check_modulated(
    input: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    op: str = "",
) -> None:
    op = op or f"fused_modulated_{norm}"
    check_eps(op, eps)
    check_rows(op, "input", input)
    rows = _check_entries(op, "scale", scale, input)
    if shift is not None:
        _check_same_entries(op, "shift", shift, input, scale, rows)
    check_parameter(op, "weight", weight, input.shape[-1])
    check_parameter(op, "bias", bias, input.shape[-1])


def _check_gated(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
) -> None:
    op = f"fused_gated_add_{norm}"
    _check_modulated(input, scale, shift, weight, bias, norm, eps, op)
    check_residual(op, residual, input, None)
    rows = _check_entries(op, "scale", scale, input)
    _check_same_entries(op, "gate", gate, input, scale, rows)


def _check_entries(op: str, name: str, entries: Tensor, input: Tensor) -> int:
    """How many rows of input share an entry; 0 if input is empty."""
    check_rows(op, name, entries)
    if (entries.dtype == torch.float64) != (input.dtype == torch.float64):
        raise RuntimeError(
            f"{op}: {name} of {entries.dtype} does not fit input of {input.dtype}: both or none "
            "must be float64"
        )
    dim, leading = 0, entries.dim() - 1  # sizes that only the data decides count as equal
    fits = leading < input.dim() and entries.shape[-1] == input.shape[-1]
    while fits and dim < leading and not holds(entries.shape[dim] != input.shape[dim]):
        dim += 1
    if not fits or any(holds(size != 1) for size in entries.shape[dim:-1]):
        raise RuntimeError(
            f"{op}: the shape of {name} must be the first dimensions of input, "
            f"{list(input.shape)}, then ones, then the last dimension, got "
            f"{list(entries.shape)}: expand or reshape it"
        )
    return math.prod(input.shape[dim:-1])


def _check_same_entries(
    op: str, name: str, entries: Tensor, input: Tensor, scale: Tensor, rows: int
) -> None:
    if holds(_check_entries(op, name, entries, input) != rows):
        raise RuntimeError(
            f"{op}: {name} must have entries for the same rows as scale, {list(scale.shape)}, got "
            f"{list(entries.shape)}: expand the smaller one"
        )


def _empty_stats(input: Tensor, norm: str) -> Tensor:
    stats = 2 if norm == "layer_norm" else 1
    return input.new_empty((stats, math.prod(input.shape[:-1])), dtype=compute_dtype(input))


def _fake_modulated_forward(
    input: Tensor, scale: Tensor, shift: Any, weight: Any, bias: Any, norm: Any, eps: float,
    save_stats: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_modulated(input, scale, shift, weight, bias, norm, eps)
    stats = _empty_stats(input, norm) if save_stats else input.new_empty(0)
    return input.new_empty(input.shape), stats


def _fake_gated_forward(
    input: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, shift: Any, weight: Any,
    bias: Any, norm: Any, eps: float, save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_gated(input, residual, gate, scale, shift, weight, bias, norm, eps)
    stats = _empty_stats(input, norm) if save_stats else input.new_empty(0)
    return input.new_empty(input.shape), residual.new_empty(input.shape), stats


def _empty_grads(tensors: Any, wanted: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        t.new_empty(t.shape) if w else tensors[0].new_empty(0)
        for t, w in zip(tensors, wanted, strict=True)
    )


def _fake_modulated_backward(
    grad_output: Tensor, input: Tensor, scale: Tensor, shift: Any, weight: Any, bias: Any,
    stats: Tensor, norm: str, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    return _empty_grads((input, scale, shift, weight, bias), wanted)


def _fake_gated_backward(
    grad_output: Any, grad_sum: Any, input: Tensor, residual: Tensor, gate: Tensor,
    scale: Tensor, shift: Any, weight: Any, bias: Any, sum: Tensor, stats: Tensor, norm: str,
    wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = input, residual, gate, scale, shift, weight, bias
    made = list(_empty_grads(tensors, wanted))
    if wanted[0] or wanted[2]:  # which are computed from it
        made[1] = residual.new_empty(input.shape)
    return tuple(made)


register_fake("modulated_norm_forward", _fake_modulated_forward)
register_fake("modulated_norm_backward", _fake_modulated_backward)
register_fake("gated_add_norm_forward", _fake_gated_forward)
register_fake("gated_add_norm_backward", _fake_gated_backward)

_MODULATED_NORM = Variant(
    "modulated_norm", _modulated_formula, _check_modulated, passed=partial(_passed, 2)
)
_GATED_ADD_NORM = Variant(
    "gated_add_norm", _gated_formula, _check_gated, passed=partial(_passed, 4)
)
