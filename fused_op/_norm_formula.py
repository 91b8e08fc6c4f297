"""The formula of the norms and its gradients, in plain PyTorch operations.

``reference.py`` offers it under the names of the ops. It also takes the calls that no kernel can
take (``_formulas.py``). The arithmetic is float32, or float64 for float64 inputs, and a result is
rounded once. Everything can be differentiated any number of times, in any mode. PyTorch's own
``layer_norm`` is not used, because its third derivatives are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ._contexts import is_recording, unrecorded
from ._options import (
    BackwardOptions,
    BackwardTensors,
    Gradients,
    Norm,
    Rounding,
    Shape,
    Wanted,
    compute_dtype,
    default_ndim,
    machine_eps,
    rounds_first,
)
from ._philox import keep_mask, keep_scale, recorded_mask
from ._sizes import differ


class Affine(NamedTuple):
    """What happens to normalised values: they are rounded, multiplied and added to."""

    factor: Tensor | None
    offset: Tensor | None
    round_to: torch.dtype | None


# norm, x, how many dimensions are normalised, eps, and what follows
Normalize = Callable[[Norm, Tensor, int, float, Affine], Tensor]


def normalize(norm: Norm, x: Tensor, ndim: int, eps: float, affine: Affine) -> Tensor:
    """The formula of a norm, in the dtype of x."""
    normalized, _ = normalized_rows(norm, x, ndim, eps)
    return apply_affine(affine, normalized)


def apply_affine(affine: Affine, x: Tensor) -> Tensor:
    """``rounded(x) * factor + offset``."""
    factor, offset, round_to = affine
    x = rounded(x, round_to)
    output = x if factor is None else x * factor
    return output if offset is None else output + offset


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The values of ``x.to(dtype)`` in the dtype of x, or x itself without a dtype.

    For derivatives, this is the identity; ``to`` alone would round gradients, too.
    """
    return x if dtype is None else x + (x.to(dtype).to(x.dtype) - x).detach()


def compute(
    norm: Norm,
    input: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rng_state: Tensor | None = None,
    eps: float | None = None,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    output_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    normalize: Normalize = normalize,
) -> tuple[Tensor, Tensor | None]:
    """The formula of the norms: (output, sum). Without a residual, the sum is None.

    The arguments are those of ``norm_forward`` in ``csrc/fused_op.h``, and ``normalize``.
    """
    shape = unrecorded(check_shapes, input, residual, weight, bias, normalized_shape)
    compute = compute_dtype(input)
    if eps is None:
        eps = machine_eps(input)
    x, sum = input, None
    if residual is not None:
        addend = cast(input, compute)
        if dropout_p > 0:
            addend = _drop(addend, rng_state, dropout_p, len(shape))
        x = sum = cast(addend + residual.to(compute), sum_dtype or residual.dtype)
    factor = None if weight is None else weight_factor(weight, compute, zero_centered)
    offset = None if bias is None else cast(bias, compute)
    round_to = input.dtype if rounds_first(rounding, input.dtype) else None
    affine = Affine(factor, offset, round_to)
    output = normalize(norm, cast(x, compute), len(shape), eps, affine)
    if residual is None and dropout_p > 0:
        output = _drop(output, rng_state, dropout_p, len(shape))
    return cast(output, output_dtype or input.dtype), sum


def normalize_backward(
    tensors: BackwardTensors, options: BackwardOptions, wanted: Wanted
) -> Gradients:
    """Gradients of ``compute`` for input, residual, weight and bias, to be differentiated again.

    The arguments are those of ``norm_backward`` in ``csrc/fused_op.h``, but eps takes the place of
    the statistics: mean and rstd are computed from x again, since saved ones would be constants to
    the next derivative. x is never the output.
    """
    grad_output, grad_sum, x, weight, _, _, rng_state = tensors
    norm, normalized_ndim, eps, zero_centered, rounding, dropout_p, *_ = options
    input_dtype, residual_dtype = options.input_dtype, options.residual_dtype
    eps = machine_eps(x) if eps is None else eps
    compute = compute_dtype(x)
    normalized, rstd = normalized_rows(norm, cast(x, compute), normalized_ndim, eps)
    grad = cast(grad_output, compute)
    if dropout_p > 0 and residual_dtype is None:
        grad = _drop(grad, rng_state, dropout_p, normalized_ndim)
    grad_input = grad_residual = grad_weight = grad_bias = None
    if wanted[0] or wanted[1]:
        dims = _last_dims(normalized_ndim)
        scaled = grad if weight is None else grad * weight_factor(weight, compute, zero_centered)
        # The pullback removes the directions that do not change the normalised values: scale and,
        # for layer norm, offset.
        projected = scaled - normalized * (scaled * normalized).mean(dims, keepdim=True)
        if norm == "layer_norm":
            projected = projected - scaled.mean(dims, keepdim=True)
        grad_x = projected * rstd
        if grad_sum is not None:
            grad_x = grad_x + grad_sum.to(compute)
        grad_residual = cast(grad_x, residual_dtype or input_dtype)
        if dropout_p > 0 and residual_dtype is not None:
            grad_x = _drop(grad_x, rng_state, dropout_p, normalized_ndim)
        grad_input = cast(grad_x, input_dtype)
    if wanted[2]:
        if rounds_first(rounding, input_dtype):
            normalized = rounded(normalized, input_dtype)
        grad_weight = cast(_sum_rows(grad * normalized, normalized_ndim), options.param_dtype)
    if wanted[3]:
        grad_bias = cast(_sum_rows(grad, normalized_ndim), options.param_dtype)
    return grad_input, grad_residual, grad_weight, grad_bias


def _drop(x: Tensor, rng_state: Tensor | None, p: float, normalized_ndim: int) -> Tensor:
    """X with dropped elements set to zero and the others scaled, which preserves the mean."""
    if is_recording():
        return torch.where(recorded_mask(x, p), x * keep_scale(p), 0)
    assert rng_state is not None
    cols = math.prod(x.shape[x.dim() - normalized_ndim :])
    rows = math.prod(x.shape[: x.dim() - normalized_ndim])
    kept = keep_mask(rng_state, rows, cols, p, x.device).reshape(x.shape)
    # The result of where has the memory format of its first argument.
    kept = torch.zeros_like(x, dtype=torch.bool) | kept
    return torch.where(kept, x * keep_scale(p), 0)


def check_shapes(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape | None,
    prefix: str = "",  # of error messages
) -> tuple[int, ...]:
    """The normalised shape. Nothing is broadcast."""
    if residual is not None and differ(input.shape, residual.shape):
        raise RuntimeError(
            f"{prefix}residual must have the shape of input, {list(input.shape)}, "
            f"got {list(residual.shape)}"
        )
    if normalized_shape is None:
        normalized_shape = input.shape[max(input.dim() - default_ndim(weight, bias), 0) :]
    elif isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"{prefix}Given normalized_shape={shape}, got input of size {tuple(input.shape)}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != shape:
            raise RuntimeError(
                f"{prefix}Expected {name} to be of same shape as normalized_shape, but got {name} "
                f"of shape {list(parameter.shape)} and normalized_shape = {list(shape)}"
            )
    return shape


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without an operation that returns x itself.

    With Dynamo of PyTorch 2.11, a Function that returns such a result has zero gradients.
    """
    return x if x.dtype == dtype else x.to(dtype)


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, without an operation that returns x itself; see ``cast``."""
    return x if x.is_contiguous() else x.contiguous()


def normalized_rows(
    norm: Norm | Literal["l2_norm"], x: Tensor, normalized_ndim: int, eps: float
) -> tuple[Tensor, Tensor]:
    """(normalized x, rstd), before weight and bias."""
    dims = _last_dims(normalized_ndim)
    low, high = _bounds(x.detach(), dims)
    largest = torch.maximum(high, -low)
    spread = high - low if norm == "layer_norm" else largest
    scale = _power_of_two(spread, largest.clamp(min=math.sqrt(max(eps, 0))))
    x = x * scale
    if norm == "layer_norm":
        # In two steps, because the rounding of a mean far from zero would show. For derivatives,
        # the first step subtracts a constant; the second is the formula.
        # (Torch 2.7 has no rule for a clamp of DTensors.)
        mean = x.detach().mean(dims, keepdim=True)
        x = x - torch.minimum(torch.maximum(mean, low * scale), high * scale)
        x = x - x.mean(dims, keepdim=True)
    squares = x.square()
    total = squares.sum(dims, keepdim=True) if norm == "l2_norm" else squares.mean(dims, True)
    rstd = (total + eps * scale * scale).rsqrt()
    return x * rstd, rstd * scale


def _bounds(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each row; zeros for an empty row."""
    if unrecorded(lambda: 0 in x.shape[dims[0] :]):
        zeros = x.sum(dims, keepdim=True)
        return zeros, zeros
    return x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)


def _power_of_two(spread: Tensor, largest: Tensor) -> Tensor:
    """A factor for each row, with which its squares neither overflow nor vanish.

    It is 1 for moderate numbers and brings others close to 1, because derivatives contain higher
    powers of rstd. A power of two rounds nothing.
    """
    scale = torch.ones_like(spread)
    quarter = math.frexp(torch.finfo(spread.dtype).max)[1] // 4
    for exponent in (quarter, 2 * quarter, 3 * quarter):
        to_one = 2.0 ** (exponent + quarter // 2)
        scale = torch.where(spread > 2.0**exponent, 1 / to_one, scale)
        scale = torch.where(largest < 2.0**-exponent, to_one, scale)
    return scale


def weight_factor(weight: Tensor, compute: torch.dtype, zero_centered: bool) -> Tensor:
    """The factor of the normalised values."""
    factor = cast(weight, compute)
    # A float, because the ONNX exporter of PyTorch 2.11 cannot promote the integer 1.
    return factor + 1.0 if zero_centered else factor


def _last_dims(count: int) -> list[int]:
    return list(range(-count, 0))


def _sum_rows(x: Tensor, normalized_ndim: int) -> Tensor:
    # sum([]) would sum over everything
    return x.sum(list(range(x.dim() - normalized_ndim))) if x.dim() > normalized_ndim else x
