"""Parameter gradients that are added straight to ``weight.main_grad``, as in Megatron-LM.

``main_grad`` is a float32 buffer of the parameter's shape that outlives a backward pass. The
attribute ``grad_added_to_main_grad`` is set to True, and autograd gets a meaningless gradient, so
that hooks still fire. A parameter without such an attribute gets none.

The addition is a part of the op's kernel, on the stream of the op, and not of autograd's
AccumulateGrad: a caller that uses one module on several streams has to order them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

import fused_op_cuda

from ._contexts import is_differentiated
from ._options import BackwardOptions, BackwardTensors, Gradients, Wanted

Parameters = tuple[Tensor | None, Tensor | None]  # weight and bias, with their attributes


def add_to_main_grad(
    parameters: Parameters,
    backward: Any,
    tensors: BackwardTensors,
    options: BackwardOptions,
    wanted: Wanted,
) -> Gradients:
    """Call ``backward``, which is ``norm_backward`` or its twin, for gradients of rows alone."""
    if is_compiling():
        raise RuntimeError("fused_op: main_grad is not added to under torch.compile")
    if not any(wanted[2:]):
        grad_x, grad_residual, *_ = backward(tensors, options, wanted)
        return grad_x, grad_residual, None, None
    weight, bias = (
        parameter if is_wanted else None
        for parameter, is_wanted in zip(parameters, wanted[2:], strict=True)
    )
    main_grads = _main_grad_of(weight), _main_grad_of(bias)
    if backward is fused_op_cuda.norm_backward:
        into = fused_op_cuda.norm_backward_into
        grad_x, grad_residual, *_ = into(tensors, options, wanted, main_grads)
    else:
        grad_output, grad_sum, x, *_ = tensors
        if is_differentiated(grad_output, grad_sum):
            # A derivative of the added gradient would go to .grad, where nobody expects it.
            raise RuntimeError(
                "fused_op: main_grad holds numbers alone: with fuse_wgrad_accumulation=True there "
                "are no gradients of gradients (create_graph=True), batched or forward-mode ones. "
                "Leave the flag out, or freeze the parameters of this module"
            )
        fused_op_cuda.check_main_grads(x, options.normalized_ndim, main_grads)
        unrounded = options._replace(param_dtype=torch.float32)
        grad_x, grad_residual, *gradients = backward(tensors, unrounded, wanted)
        for main_grad, gradient in zip(main_grads, gradients, strict=True):
            if main_grad is not None:
                main_grad.add_(gradient)
    return grad_x, grad_residual, _dummy(weight), _dummy(bias)


def _main_grad_of(parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise RuntimeError(
            "fused_op: with fuse_wgrad_accumulation=True a parameter needs the attribute "
            "main_grad, a float32 tensor of its shape"
        )
    return main_grad


def _dummy(parameter: Any) -> Tensor | None:
    if parameter is None or not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)
