"""What the routes of ``functional.py`` share: a call as one value, the ways past the kernels.

They ask ``is_dynamo_compiling`` and not ``is_compiling``, which takes longer: what else compiles,
as a non-strict export does, calls with tensors that the binding knows not to be plain.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op_cuda

from . import reference
from ._disabled import open_blocks
from ._ops import keeps_format
from .reference import Norm, Normalize

# input, residual, weight, bias, rng_state
Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


# What a call is beside its tensors; what the forward op takes comes first, in its order. Not a
# NamedTuple: making one and taking it apart is 1 us of the 41 us of a forward and backward.
Call = tuple[
    Norm,
    int,  # normalized_ndim; 0 stands for the default of normalized_shape
    float,  # eps
    bool,  # zero_centered
    float,  # dropout_p
    torch.dtype | None,  # output_dtype
    torch.dtype | None,  # sum_dtype
    bool,  # memory_efficient
    bool,  # main_grad: add the parameters' gradients to their main_grad
]


def op_options(call: Call) -> tuple[Any, ...]:
    """What the forward op takes behind the tensors."""
    return call[1:7]


def is_transformed() -> bool:
    """Is torch.func or forward-mode AD on, in or around code that is being compiled?

    There both look past an autograd.Function at the op in it, which has no derivative of its own:
    gradients would be zeros, without an error.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_differentiated(*grads: Tensor | None) -> bool:
    """Is a gradient that is computed from these differentiated itself, or batched by vmap?"""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and any(
        grad is not None and forward_ad.unpack_dual(grad).tangent is not None  # type: ignore[no-untyped-call]
        for grad in grads
    )


def raw_forward() -> Any:
    """The forward op without autograd: dynamo can only trace the one of the dispatcher."""
    if open_blocks or (is_dynamo_compiling() and is_transformed()):
        return composite_forward
    if is_dynamo_compiling():
        return torch.ops.fused_op.norm_forward.default
    return _kernel_forward


def _kernel_forward(*args: Any) -> Any:
    try:
        return fused_op_cuda.norm_forward(*args)
    except fused_op_cuda.KernelError as error:
        warn_of_missing_kernel(error)
        return composite_forward(*args)


class _NotPlain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing; but under any mode ``fused_op_cuda.norm`` takes no tensor for plain."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def check_alone(*args: Any) -> int:
    """``fused_op_cuda.norm`` without its kernel: says what it refuses, and CAST or COMPOSITE."""
    with _NotPlain():  # type: ignore[no-untyped-call]
        result = fused_op_cuda.norm(*args)
    return fused_op_cuda.CAST if result == fused_op_cuda.CAST else fused_op_cuda.COMPOSITE


# What has been warned of: each kernel has its own message, which would be shown once more.
warned: list[RuntimeError] = []


def warn_of_missing_kernel(error: RuntimeError) -> None:
    """Say, once, that PyTorch's operations take the place of a kernel that cannot be had.

    With ``FUSED_OP_JIT=require`` that is an error.
    """
    if os.environ.get("FUSED_OP_JIT") == "require":
        raise error
    if not warned:
        warned.append(error.with_traceback(None))
        warnings.warn(
            "fused_op: PyTorch's operations, which are slower, take calls of which a kernel is "
            f"missing. The first: {error}",
            stacklevel=2,
        )


def composite(tensors: Tensors, call: Call, normalize: Normalize = reference.normalize) -> Any:
    """The formula in PyTorch's operations, with another core on demand."""
    input, residual, weight, bias, rng_state = tensors
    norm, ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype, *_ = call
    affine = weight if weight is not None else bias
    ndim = ndim or (1 if affine is None else affine.dim())
    shape = reference.unrecorded(lambda: input.shape[input.dim() - ndim :])
    output, sum = reference.compute(
        *(norm, input, residual, weight, bias, rng_state, eps, shape),
        *(zero_centered, dropout_p, output_dtype, sum_dtype, normalize),
    )
    if sum is not None:
        return _contiguous(output), _contiguous(sum)
    if norm == "rms_norm" and keeps_format(input):
        return output  # the operations have kept it
    return _contiguous(output)


def _contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, but never the same tensor again, as ``reference._cast``."""
    return x if x.is_contiguous() else x.contiguous()


def composite_forward(*args: Any) -> tuple[Tensor, Tensor | None, None]:
    """``norm_forward`` without its kernel, and so without statistics for backward."""
    norm, input, residual, weight, bias, rng_state, *rest, _ = args
    if not is_dynamo_compiling():
        check_alone(*args[:-1])
    result = composite((input, residual, weight, bias, rng_state), (norm, *rest, False, False))
    return (*result, None) if isinstance(result, tuple) else (result, None, None)


def cast(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
) -> Tensors:
    """Under autocast, rows that do not fit together meet in the wider dtype, and lose nothing."""
    wider = residual is not None and residual.dtype == torch.float32 and input.dtype.itemsize == 2
    if residual is not None and not wider:
        dtype = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(dtype), residual.to(dtype)
    return input, residual, weight, bias, rng_state


def distinct(tensors: Tensors) -> Tensors:
    """No tensor twice, which dynamo cannot trace as arguments of a Function: a view instead."""
    input, residual, weight, bias, rng_state = tensors
    if residual is input:
        residual = input.view_as(input)
    if weight is not None and (weight is input or weight is tensors[1]):
        weight = weight.view_as(weight)
    if bias is not None and (bias is input or bias is tensors[1] or bias is tensors[2]):
        bias = bias.view_as(bias)
    return input, residual, weight, bias, rng_state
