"""Gradients of parameters that are added straight to ``weight.main_grad``, as Megatron-LM has it.

``main_grad`` is a float32 buffer of the parameter's shape that lives over many backward passes. An
attribute ``grad_added_to_main_grad`` is set to True, and autograd gets a gradient without meaning
instead, so that hooks still fire. Where the parameter has no such attribute, it gets none.

The addition is a part of the op's kernel, on the stream of the op, and not of autograd's
AccumulateGrad: whoever uses one module on several streams has to order them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

import fused_op_cuda

from ._routes import is_differentiated


def add_to_main_grad(
    backward: Any, arguments: tuple[Any, ...], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Call ``backward``, which is ``norm_backward`` or its twin, for gradients of rows alone."""
    if is_compiling():
        raise RuntimeError("fused_op: main_grad is not added to under torch.compile")
    *call, wanted = arguments
    if not any(wanted[2:]):
        grad_x, grad_residual, *_ = backward(*arguments)
        return grad_x, grad_residual, None, None
    parameters = [
        parameter if is_wanted else None
        for parameter, is_wanted in zip((weight, bias), wanted[2:], strict=True)
    ]
    main_grads = [None if p is None else _main_grad_of(p) for p in parameters]
    if backward is fused_op_cuda.norm_backward:
        grad_x, grad_residual, *_ = fused_op_cuda.norm_backward_into(*call, wanted, *main_grads)
    else:
        _, grad_output, grad_sum, x, _, _, _, _, normalized_ndim, *_ = call
        if is_differentiated(grad_output, grad_sum):
            # A derivative of what is added would go to .grad, where nobody looks for it.
            raise RuntimeError(
                "fused_op: main_grad holds numbers alone: with fuse_wgrad_accumulation=True there "
                "are no gradients of gradients (create_graph=True), batched or forward-mode ones. "
                "Leave the flag out, or freeze the parameters of this module"
            )
        fused_op_cuda.check_main_grads(x, normalized_ndim, *main_grads)
        call[-1] = torch.float32  # the dtype of parameters: their gradients are not rounded
        grad_x, grad_residual, *gradients = backward(*call, wanted)
        for main_grad, gradient in zip(main_grads, gradients, strict=True):
            if main_grad is not None:
                main_grad.add_(gradient)
    grad_weight, grad_bias = (None if p is None else _dummy(p) for p in parameters)
    return grad_x, grad_residual, grad_weight, grad_bias


def _main_grad_of(parameter: Tensor) -> Tensor:
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise RuntimeError(
            "fused_op: with fuse_wgrad_accumulation=True a parameter needs the attribute "
            "main_grad, a float32 tensor of its shape"
        )
    return main_grad


def _dummy(parameter: Any) -> Tensor | None:
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)
