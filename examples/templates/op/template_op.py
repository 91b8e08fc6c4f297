"""input * scale, with its gradient: the functions and the module.

The compiled half is template_op_ext (csrc/); setup.py builds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# isort: split
import template_op_ext  # after torch, which loads the libraries that it is linked to


class TemplateOpFunction(torch.autograd.Function):
    """What autograd runs forward and backward; `template_op` calls it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, scale: float) -> Tensor:
        # YOUR OP: tensors that backward reads go into ctx.save_for_backward(...), nowhere else.
        ctx.scale = scale
        return template_op_ext.forward(input, scale)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # One gradient for each argument of forward; None where there is none. YOUR OP: compute only
        # what ctx.needs_input_grad asks for.
        if torch.is_grad_enabled():
            # create_graph=True: this gradient is itself differentiated. PyTorch's operations can
            # be; a kernel's result would count as a constant, and the second derivative be wrong.
            return grad_output * ctx.scale, None
        return template_op_ext.backward(grad_output, ctx.scale), None


def template_op(input: Tensor, scale: float = 1.0) -> Tensor:
    """input * scale.

    Args:
        input: any shape, float16, bfloat16, float32 or float64, on CPU or CUDA.
        scale: a number; it gets no gradient.

    Returns:
        A tensor like `input`. It is computed in float32 (float64 for float64) and rounded once.

    Raises:
        RuntimeError: for another dtype or device; the message names the argument.
    """
    return TemplateOpFunction.apply(input, scale)


def reference(input: Tensor, scale: float = 1.0) -> Tensor:
    """`template_op` in plain PyTorch. YOUR OP: begin here; tests and benchmark compare with it."""
    return input * scale


class TemplateOp(nn.Module):
    """`template_op` as a layer. YOUR OP: learnt tensors are nn.Parameter attributes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return template_op(input, self.scale)
