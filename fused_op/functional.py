"""The public functions, their autograd Function, and the route that a call takes.

A call that the kernels can take as it is goes straight to the binding (``fused_op_cuda``); with a
gradient to record, through ``_NormFunction``. ``torch.compile`` sees the same Function over the
dispatcher ops ``torch.ops.fused_op``, and so do fake, sharded and lazily negated tensors. Function
transforms and forward-mode AD take the composite formula of ``reference.py``, and so does every
call while the kernels are ``disabled()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op_cuda

from . import _ops as _ops  # the fake kernels
from . import reference
from ._arguments import as_float, check_tensor, count_normalized, refuse_as_bool, rms_eps
from ._disabled import open_blocks
from .reference import Norm, Shape

_Result = TypeVar("_Result")


def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """Layer norm: ``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; other layouts are copied once.
        weight: ``normalized_shape``, in the dtype of ``input``, or float32 beside a 16-bit input;
            ``None`` means 1.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.
        normalized_shape: what is normalised together; default: the shape of ``weight`` or ``bias``,
            else the last dimension.
        zero_centered: multiply by ``1 + weight``, for weights that are kept minus one, as Gemma's
            and those of Megatron's LayerNorm1p. The 1 is added in the precision of the arithmetic.
            ``weight=None`` means a factor of 1 here too.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The arithmetic is in float32
        (float64 for float64) and the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument is of the wrong kind.
        ValueError: ``eps`` is NaN or infinite.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    if has_torch_function_variadic(input, weight, bias):
        return _overridden(
            fused_layer_norm,
            *(input, weight, bias, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
        )
    ndim = 0 if normalized_shape is None else count_normalized(input, normalized_shape)
    output: Tensor = _norm("layer_norm", input, None, weight, bias, eps, ndim, zero_centered)
    return output


def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """RMS norm: ``input / sqrt(mean(input²) + eps) * weight`` over the last dimensions.

    Args:
        input: as in :func:`fused_layer_norm`.
        weight: as in :func:`fused_layer_norm`.
        eps: added to the mean square before the root; finite; ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), as in ``torch.nn.functional.rms_norm``.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.

    Returns:
        As :func:`fused_layer_norm`.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    if has_torch_function_variadic(input, weight):
        return _overridden(
            fused_rms_norm,
            *(input, weight, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
        )
    ndim = 0 if normalized_shape is None else count_normalized(input, normalized_shape)
    eps = rms_eps(input, eps)
    output: Tensor = _norm("rms_norm", input, None, weight, None, eps, ndim, zero_centered)
    return output


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
    """Layer norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: as in :func:`fused_layer_norm`.
        residual: of the shape, dtype and device of ``input``.
        weight: as in :func:`fused_layer_norm`.
        bias: as in :func:`fused_layer_norm`.
        eps: as in :func:`fused_layer_norm`.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.

    Returns:
        ``(output, sum)``, both like ``input``. The sum is rounded to its dtype, and the statistics
        are those of the rounded sum. The gradients of ``input`` and ``residual`` may be one tensor.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    if has_torch_function_variadic(input, residual, weight, bias):
        return _overridden(
            fused_add_layer_norm,
            *(input, residual, weight, bias, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
        )
    check_tensor("residual", residual)
    ndim = 0 if normalized_shape is None else count_normalized(input, normalized_shape)
    outputs: tuple[Tensor, Tensor]
    outputs = _norm("layer_norm", input, residual, weight, bias, eps, ndim, zero_centered)
    return outputs


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: as in :func:`fused_layer_norm`.
        residual: of the shape, dtype and device of ``input``.
        weight: as in :func:`fused_layer_norm`.
        eps: as in :func:`fused_rms_norm`.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.

    Returns:
        As :func:`fused_add_layer_norm`.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    if has_torch_function_variadic(input, residual, weight):
        return _overridden(
            fused_add_rms_norm,
            *(input, residual, weight, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
        )
    check_tensor("residual", residual)
    ndim = 0 if normalized_shape is None else count_normalized(input, normalized_shape)
    eps = rms_eps(input, eps)
    outputs: tuple[Tensor, Tensor]
    outputs = _norm("rms_norm", input, residual, weight, None, eps, ndim, zero_centered)
    return outputs


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """:func:`fused_layer_norm` with the signature of ``torch.nn.functional.layer_norm``.

    Its errors have the exception types of PyTorch's and contain their sentences.
    """
    if has_torch_function_variadic(input, weight, bias):
        return _overridden(layer_norm, input, normalized_shape, weight, bias, eps)
    ndim = count_normalized(input, normalized_shape)
    output: Tensor = _norm("layer_norm", input, None, weight, bias, eps, ndim)
    return output


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """:func:`fused_rms_norm` with the signature of ``torch.nn.functional.rms_norm``.

    Its errors have the exception types of PyTorch's and contain their sentences.
    """
    if has_torch_function_variadic(input, weight):
        return _overridden(rms_norm, input, normalized_shape, weight, eps)
    ndim = count_normalized(input, normalized_shape)
    output: Tensor = _norm("rms_norm", input, None, weight, None, rms_eps(input, eps), ndim)
    return output


class _NormFunction(torch.autograd.Function):
    """Every op as one differentiable function; without a residual it returns the output alone.

    The classic form, with ``ctx`` in forward: ``setup_context`` costs 45 us a call, and a ``jvp``
    would break ``torch.compile(fullgraph=True)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        normalized_ndim: int,
        eps: float,
        zero_centered: bool,
    ) -> Any:
        output, sum = _forward(
            ctx, norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered
        )
        return output if residual is None else (output, sum)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        input, residual, weight, bias, *_ = ctx.needs_input_grad
        wanted = (input or residual, weight, bias)
        grad_x, grad_weight, grad_bias = _backward(ctx, grad_output, grad_sum, wanted)
        # One tensor for both, as torch.add does: autograd copies where it would be stored twice.
        grad_input = grad_x if input else None
        grad_residual = grad_x if residual else None
        return grad_input, grad_residual, grad_weight, grad_bias, None, None, None, None


class FusedLayerNormFunction(torch.autograd.Function):
    """Layer norm as ``FusedLayerNormFunction.apply(input, weight, bias, eps)``.

    :func:`fused_layer_norm` means the same; it is faster without a gradient, and knows autocast,
    ``torch.func`` and tensor subclasses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        """Run the kernel and save what backward reads."""
        return _forward(ctx, "layer_norm", input, None, weight, bias, 0, eps, False)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        """Compute the gradients of those of input, weight and bias that need one."""
        needs = ctx.needs_input_grad
        return *_backward(ctx, grad_output, None, needs[:3]), *[None] * (len(needs) - 3)


def _forward(
    ctx: Any,
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor | None]:
    call = norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered
    output, sum, stats = _raw_forward()(*call, any(ctx.needs_input_grad))
    affine = weight if weight is not None else bias
    if affine is None:
        ctx.constants = norm, eps, normalized_ndim or 1, zero_centered, input.dtype
    else:
        ctx.constants = norm, eps, normalized_ndim or affine.dim(), zero_centered, affine.dtype
    ctx.save_for_backward(input if residual is None else sum, weight, stats)
    ctx.set_materialize_grads(False)
    return output, sum


def _backward(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_output is None:
        return grad_sum, None, None
    norm, eps, *constants = ctx.constants
    x, weight, stats = ctx.saved_tensors
    backward: Any = fused_op_cuda.norm_backward
    if stats is None or open_blocks:  # no kernel in forward, or none now
        backward, stats = reference.normalize_backward, eps
    elif is_compiling():
        backward = torch.ops.fused_op.norm_backward.default
    elif torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        # This gradient is itself differentiated, or batched by vmap. Means are computed again from
        # x, as PyTorch operations on all that the gradient depends on.
        backward, stats = reference.normalize_backward, eps
    grad_x, grad_weight, grad_bias = backward(
        norm, grad_output, grad_sum, x, weight, stats, *constants, wanted
    )
    return (
        grad_x if wanted[0] else None,
        grad_weight if wanted[1] else None,
        grad_bias if wanted[2] else None,
    )


def _raw_forward() -> Any:
    """The forward op without autograd: dynamo can only trace the one of the dispatcher."""
    if open_blocks:
        return _composite_forward
    if is_compiling():
        return torch.ops.fused_op.norm_forward.default
    return fused_op_cuda.norm_forward


# Function.apply without its Python half, which inspects the call for setup_context and functorch:
# neither concerns _NormFunction here. Semi-private, hence the fallback.
_apply = getattr(super(torch.autograd.Function, _NormFunction), "apply", _NormFunction.apply)


def _norm(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int,
    zero_centered: bool = False,
) -> Any:
    """Take one of the routes. ``normalized_ndim`` 0 stands for the default of normalized_shape."""
    if type(eps) is not float:
        eps = as_float(eps)
    if type(zero_centered) is not bool:
        refuse_as_bool("zero_centered", zero_centered)
    if is_compiling():
        if torch.is_autocast_enabled(input.device.type):
            input, residual, weight, bias = _cast(input, residual, weight, bias)
        if residual is input:  # dynamo cannot trace a Function that gets a tensor twice
            residual = input.view_as(input)
        return _dispatch(norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered)
    route = _check if open_blocks else fused_op_cuda.norm
    result = route(norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered)
    if type(result) is not int:
        return result
    if result == fused_op_cuda.AUTOGRAD:
        return _apply(input, residual, weight, bias, norm, normalized_ndim, eps, zero_centered)
    if result == fused_op_cuda.DISPATCH:
        return _dispatch(norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered)
    if result == fused_op_cuda.CAST:
        input, residual, weight, bias = _cast(input, residual, weight, bias)
        return _norm(norm, input, residual, weight, bias, eps, normalized_ndim, zero_centered)
    return _composite(norm, input, residual, weight, bias, normalized_ndim, eps, zero_centered)


class _NotPlain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing; but under any mode ``fused_op_cuda.norm`` takes no tensor for plain."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _check(*args: Any) -> int:
    """``fused_op_cuda.norm`` without its kernel: says what it refuses, and CAST or COMPOSITE."""
    with _NotPlain():  # type: ignore[no-untyped-call]
        result = fused_op_cuda.norm(*args)
    return fused_op_cuda.CAST if result == fused_op_cuda.CAST else fused_op_cuda.COMPOSITE


def _composite(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
) -> Any:
    """The formula in PyTorch's operations."""
    affine = weight if weight is not None else bias
    ndim = normalized_ndim or (1 if affine is None else affine.dim())
    x = input if residual is None else reference.add(input, residual)
    shape = x.shape[x.dim() - ndim :]
    output = reference.normalize(norm, x, weight, bias, eps, shape, zero_centered)
    return output if residual is None else (output, x)


def _composite_forward(*args: Any) -> tuple[Tensor, Tensor | None, None]:
    """``norm_forward`` without its kernel, and so without statistics for backward."""
    *call, _ = args
    if not is_compiling():
        _check(*call)
    result = _composite(*call)
    return (*result, None) if isinstance(result, tuple) else (result, None, None)


def _dispatch(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
) -> Any:
    """Through the dispatcher, where each kind of tensor finds its own implementation."""
    tensors = (input, residual, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _NormFunction.apply(*tensors, norm, normalized_ndim, eps, zero_centered)  # type: ignore[no-untyped-call]
    output, sum, _ = _raw_forward()(norm, *tensors, normalized_ndim, eps, zero_centered, False)
    return output if residual is None else (output, sum)


def _cast(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Under autocast, dtypes that do not fit together meet in the wider one, and lose nothing."""
    if residual is not None:
        dtype = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(dtype), residual.to(dtype)
    params = {p.dtype for p in (weight, bias) if p is not None}
    if params != {input.dtype}:
        dtype = reference.compute_dtype(input)
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return input, residual, weight, bias


def _overridden(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Ask __torch_function__ of the tensors among args, or of the mode that is on."""
    result: _Result = handle_torch_function(function, args, *args, **kwargs)
    return result
