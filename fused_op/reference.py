"""Each op in plain PyTorch operations: the truth that tests, benchmarks and docs compare with.

The arithmetic is in float32 (float64 for float64 inputs) and a result is rounded once. Called with
float64 copies of its inputs, a function gives the truth for every other dtype. All of it can be
differentiated any number of times, in any mode; PyTorch's own ``layer_norm`` is not used, because
its third derivatives are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ._contexts import unrecorded
from ._options import (
    BackwardOptions,
    BackwardTensors,
    Gradients,
    Norm,
    Shape,
    Wanted,
    compute_dtype,
    default_ndim,
    machine_eps,
)
from ._philox import dropout_state, keep_mask, keep_scale

# norm, x, how many dimensions are normalised, what they are multiplied by, what is added, eps
Normalize = Callable[[Norm, Tensor, int, Tensor | None, Tensor | None, float], Tensor]


def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_layer_norm`; ``memory_efficient`` changes nothing here."""
    p = dropout_p if training else 0.0
    state = dropout_state(input) if p > 0 else None
    return compute(
        "layer_norm",
        input,
        weight=weight,
        bias=bias,
        rng_state=state,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        dropout_p=p,
        output_dtype=out_dtype,
    )[0]


def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Twin of :func:`fused_op.fused_rms_norm`; ``memory_efficient`` changes nothing here."""
    p = dropout_p if training else 0.0
    state = dropout_state(input) if p > 0 else None
    return compute(
        "rms_norm",
        input,
        weight=weight,
        rng_state=state,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        dropout_p=p,
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
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_layer_norm`."""
    p = dropout_p if training else 0.0
    state = dropout_state(input) if p > 0 else None
    output, sum = compute(
        "layer_norm",
        input,
        residual=residual,
        weight=weight,
        bias=bias,
        rng_state=state,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        dropout_p=p,
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
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`fused_op.fused_add_rms_norm`."""
    p = dropout_p if training else 0.0
    state = dropout_state(input) if p > 0 else None
    output, sum = compute(
        "rms_norm",
        input,
        residual=residual,
        weight=weight,
        rng_state=state,
        eps=eps,
        normalized_shape=normalized_shape,
        zero_centered=zero_centered,
        dropout_p=p,
        output_dtype=out_dtype,
        sum_dtype=residual_dtype,
    )
    assert sum is not None
    return output, sum


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


def normalize(
    norm: Norm, x: Tensor, ndim: int, factor: Tensor | None, offset: Tensor | None, eps: float
) -> Tensor:
    """The formula of a norm, in the dtype of x."""
    output, _ = _normalized(norm, x, ndim, eps)
    if factor is not None:
        output = output * factor
    return output if offset is None else output + offset


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
    dropout_p: float = 0.0,
    output_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    normalize: Normalize = normalize,
) -> tuple[Tensor, Tensor | None]:
    """The formula of all the ops: (output, sum), the sum being None without a residual.

    The arguments are those of ``norm_forward`` in ``csrc/fused_op.h``, and what normalises.
    """
    shape = unrecorded(check_shapes, input, residual, weight, bias, normalized_shape)
    compute = compute_dtype(input)
    if eps is None:
        eps = machine_eps(input)
    x, sum = input, None
    if residual is not None:
        addend = _cast(input, compute)
        if dropout_p > 0:
            addend = _drop(addend, rng_state, dropout_p, len(shape))
        x = sum = _cast(addend + residual.to(compute), sum_dtype or residual.dtype)
    factor = None if weight is None else _factor(weight, compute, zero_centered)
    offset = None if bias is None else _cast(bias, compute)
    output = normalize(norm, _cast(x, compute), len(shape), factor, offset, eps)
    if residual is None and dropout_p > 0:
        output = _drop(output, rng_state, dropout_p, len(shape))
    return _cast(output, output_dtype or input.dtype), sum


def normalize_backward(
    tensors: BackwardTensors, options: BackwardOptions, wanted: Wanted
) -> Gradients:
    """Gradients of ``compute`` for input, residual, weight and bias, as functions of all theirs.

    The arguments are those of ``norm_backward`` in ``csrc/fused_op.h``, but eps takes the place of
    the statistics: mean and rstd are computed from x again, since saved ones would be constants to
    the next derivative. x is never the output.
    """
    grad_output, grad_sum, x, weight, _, _, rng_state = tensors
    norm, normalized_ndim, eps, zero_centered, dropout_p, *_ = options
    input_dtype, residual_dtype = options.input_dtype, options.residual_dtype
    eps = machine_eps(x) if eps is None else eps
    compute = compute_dtype(x)
    normalized, rstd = _normalized(norm, _cast(x, compute), normalized_ndim, eps)
    grad = _cast(grad_output, compute)
    if dropout_p > 0 and residual_dtype is None:
        grad = _drop(grad, rng_state, dropout_p, normalized_ndim)
    grad_input = grad_residual = grad_weight = grad_bias = None
    if wanted[0] or wanted[1]:
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
        grad_residual = _cast(grad_x, residual_dtype or input_dtype)
        if dropout_p > 0 and residual_dtype is not None:
            grad_x = _drop(grad_x, rng_state, dropout_p, normalized_ndim)
        grad_input = _cast(grad_x, input_dtype)
    if wanted[2]:
        grad_weight = _cast(_sum_rows(grad * normalized, normalized_ndim), options.param_dtype)
    if wanted[3]:
        grad_bias = _cast(_sum_rows(grad, normalized_ndim), options.param_dtype)
    return grad_input, grad_residual, grad_weight, grad_bias


def _drop(x: Tensor, rng_state: Tensor | None, p: float, normalized_ndim: int) -> Tensor:
    """X with dropped elements at zero and the others scaled, so that the mean stays."""
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
    prefix: str = "",  # of an error's sentence
) -> tuple[int, ...]:
    """The normalised shape. Nothing is broadcast."""
    if residual is not None and input.shape != residual.shape:
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


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, but never the same tensor again as the result of an operation.

    Dynamo of PyTorch 2.11 gives an autograd.Function that returns such a result zero gradients.
    """
    return x if x.dtype == dtype else x.to(dtype)


def _normalized(norm: Norm, x: Tensor, normalized_ndim: int, eps: float) -> tuple[Tensor, Tensor]:
    """(normalized x, rstd), before weight and bias."""
    dims = _last_dims(normalized_ndim)
    low, high = _bounds(x.detach(), dims)
    largest = torch.maximum(high, -low)
    spread = high - low if norm == "layer_norm" else largest
    scale = _power_of_two(spread, largest.clamp(min=math.sqrt(max(eps, 0))))
    x = x * scale
    if norm == "layer_norm":
        # In two steps, because one rounding of the mean shows where it is far from zero. The first
        # takes off a constant, as far as derivatives are concerned: the second is the formula.
        mean = x.detach().mean(dims, keepdim=True)
        x = x - mean.clamp(low * scale, high * scale)
        x = x - x.mean(dims, keepdim=True)
    rstd = (x.square().mean(dims, keepdim=True) + eps * scale * scale).rsqrt()
    return x * rstd, rstd * scale


def _bounds(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each row; zeros where it has none."""
    if unrecorded(lambda: 0 in x.shape[dims[0] :]):
        zeros = x.sum(dims, keepdim=True)
        return zeros, zeros
    return x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)


def _power_of_two(spread: Tensor, largest: Tensor) -> Tensor:
    """What each row is multiplied by, so that its squares neither overflow nor vanish.

    It is 1 for moderate numbers, and brings others near to 1, because derivatives take rstd to
    higher powers. Nothing is rounded by it.
    """
    scale = torch.ones_like(spread)
    quarter = math.frexp(torch.finfo(spread.dtype).max)[1] // 4
    for exponent in (quarter, 2 * quarter, 3 * quarter):
        to_one = 2.0 ** (exponent + quarter // 2)
        scale = torch.where(spread > 2.0**exponent, 1 / to_one, scale)
        scale = torch.where(largest < 2.0**-exponent, to_one, scale)
    return scale


def _factor(weight: Tensor, compute: torch.dtype, zero_centered: bool) -> Tensor:
    """What the normalised values are multiplied by."""
    factor = _cast(weight, compute)
    # Not the integer 1, which the exporter of ONNX in PyTorch 2.11 cannot promote.
    return factor + 1.0 if zero_centered else factor


def _last_dims(count: int) -> list[int]:
    return list(range(-count, 0))


def _sum_rows(x: Tensor, normalized_ndim: int) -> Tensor:
    # sum([]) would sum over everything
    return x.sum(list(range(x.dim() - normalized_ndim))) if x.dim() > normalized_ndim else x
