"""Each op in plain PyTorch operations: the truth that tests, benchmarks and docs compare with.

The arithmetic is in float32 (float64 for float64 inputs) and a result is rounded once. Called with
float64 copies of its inputs, a function gives the truth for every other dtype. All of it can be
differentiated any number of times, in any mode; PyTorch's own ``layer_norm`` is not used, because
its third derivatives are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Shape = int | Sequence[int]
Norm = Literal["layer_norm", "rms_norm"]


def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_layer_norm`."""
    return normalize("layer_norm", input, weight, bias, eps, normalized_shape, zero_centered)


def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_rms_norm`."""
    return normalize("rms_norm", input, weight, None, eps, normalized_shape, zero_centered)


def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_layer_norm`."""
    sum = add(input, residual)
    return normalize("layer_norm", sum, weight, bias, eps, normalized_shape, zero_centered), sum


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_rms_norm`."""
    sum = add(input, residual)
    return normalize("rms_norm", sum, weight, None, eps, normalized_shape, zero_centered), sum


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Twin of :func:`fused_op.layer_norm`."""
    return normalize("layer_norm", input, weight, bias, eps, normalized_shape)


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Twin of :func:`fused_op.rms_norm`."""
    return normalize("rms_norm", input, weight, None, eps, normalized_shape)


def add(input: Tensor, residual: Tensor) -> Tensor:
    """The sum that is normalised, rounded to the dtype in which it is kept."""
    if input.shape != residual.shape:  # never broadcast
        raise RuntimeError(
            f"residual must have the shape of input, {list(input.shape)}, "
            f"got {list(residual.shape)}"
        )
    return input + residual


def normalize(
    norm: Norm,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    normalized_shape: Shape | None,
    zero_centered: bool = False,
) -> Tensor:
    """The formula of all the ops: ``normalized(x) * weight + bias`` over the last dimensions.

    If ``zero_centered``, ``1 + weight`` takes the place of ``weight``.
    """
    if normalized_shape is None:
        affine = weight if weight is not None else bias
        normalized_shape = x.shape[-1:] if affine is None else affine.shape
    elif isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise RuntimeError(f"Given normalized_shape={shape}, got input of size {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != shape:  # never broadcast
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of "
                f"shape {list(parameter.shape)} and normalized_shape = {list(shape)}"
            )
    if eps is None:
        eps = torch.finfo(compute_dtype(x)).eps
    output, _ = _normalized(norm, _cast(x, compute_dtype(x)), len(shape), eps)
    if weight is not None:
        output = output * _factor(weight, output.dtype, zero_centered)
    if bias is not None:
        output = output + bias.to(output.dtype)
    return _cast(output, x.dtype)


def normalize_backward(
    norm: Norm,
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    normalized_ndim: int,
    zero_centered: bool,
    param_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``normalize`` for x, weight and bias, as functions of all they depend on.

    Mean and rstd are computed from x again: saved ones would be constants to the next derivative.
    """
    compute = compute_dtype(x)
    normalized, rstd = _normalized(norm, _cast(x, compute), normalized_ndim, eps)
    grad = grad_output.to(compute)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        dims = _last_dims(normalized_ndim)
        scaled = grad if weight is None else grad * _factor(weight, compute, zero_centered)
        # The pullback of the normalisation removes what it is blind to: a change of scale and,
        # for layer norm, of offset.
        projected = scaled - normalized * (scaled * normalized).mean(dims, keepdim=True)
        if norm == "layer_norm":
            projected = projected - scaled.mean(dims, keepdim=True)
        grad_x = projected * rstd
        if grad_sum is not None:
            grad_x = grad_x + grad_sum.to(compute)
        grad_x = _cast(grad_x, x.dtype)
    if wanted[1]:
        grad_weight = _cast(_sum_rows(grad * normalized, normalized_ndim), param_dtype)
    if wanted[2]:
        grad_bias = _cast(_sum_rows(grad, normalized_ndim), param_dtype)
    return grad_x, grad_weight, grad_bias


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, but never the same tensor again as the result of an operation.

    Dynamo of PyTorch 2.11 gives an autograd.Function that returns such a result zero gradients.
    """
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and sums for inputs like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _normalized(norm: Norm, x: Tensor, normalized_ndim: int, eps: float) -> tuple[Tensor, Tensor]:
    """(normalized x, rstd), before weight and bias."""
    dims = _last_dims(normalized_ndim)
    if norm == "layer_norm":
        x = x - x.mean(dims, keepdim=True)
    rstd = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return x * rstd, rstd


def _factor(weight: Tensor, compute: torch.dtype, zero_centered: bool) -> Tensor:
    """What the normalised values are multiplied by."""
    return 1 + weight.to(compute) if zero_centered else weight.to(compute)


def _last_dims(count: int) -> list[int]:
    return list(range(-count, 0))


def _sum_rows(x: Tensor, normalized_ndim: int) -> Tensor:
    # sum([]) would sum over everything
    return x.sum(list(range(x.dim() - normalized_ndim))) if x.dim() > normalized_ndim else x
