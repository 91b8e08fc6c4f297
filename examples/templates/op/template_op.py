"""input * scale, with its gradient: an op of PyTorch's dispatcher, torch.ops.template_op.

The compiled half is template_op_ext (csrc/), which setup.py builds: the schema and the kernels.
This file has the public names, and what PyTorch asks besides: results without data, gradients, and
batches.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

# The library registers its ops when it is loaded. It is not a Python module: nothing to import.
_spec = importlib.util.find_spec("template_op_ext")
if _spec is None:
    raise ImportError("template_op_ext is not built: python setup.py build_ext --inplace")
torch.ops.load_library(_spec.origin)


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


def sample_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Arguments in call order. YOUR OP: tests and benchmark take all inputs from here."""
    return torch.randn(shape, dtype=dtype, device=device), 1.5


class TemplateOp(nn.Module):
    """`template_op` as a layer. YOUR OP: learnt tensors are nn.Parameter attributes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return template_op(input, self.scale)


# YOUR OP: from here on, what PyTorch needs to know. Each function has the arguments of the schema
# in csrc/binding.cpp.


# Shape, dtype and device of the results, without data: torch.compile and torch.export trace these.
@torch.library.register_fake("template_op::forward")
def _fake_forward(input: Tensor, scale: float) -> Tensor:
    return input.new_empty(input.shape)


@torch.library.register_fake("template_op::backward")
def _fake_backward(grad_output: Tensor, scale: float) -> Tensor:
    return grad_output.new_empty(grad_output.shape)


class TemplateOpFunction(torch.autograd.Function):
    """The gradient of `forward`, for autograd and for torch.func (grad, jacrev, vmap)."""

    generate_vmap_rule = True  # vmap runs what is registered for the ops, below

    @staticmethod
    def forward(input: Tensor, scale: float) -> Tensor:
        return torch.ops.template_op.forward(input, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        # Tensors that backward reads go into ctx.save_for_backward(...), nowhere else.
        _, ctx.scale = inputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # One gradient for each argument; None where there is none.
        return TemplateOpBackward.apply(grad_output, ctx.scale), None


class TemplateOpBackward(torch.autograd.Function):
    """The gradient of `backward`: without it, second derivatives would come out as zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_output: Tensor, scale: float) -> Tensor:
        return torch.ops.template_op.backward(grad_output, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        _, ctx.scale = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return TemplateOpBackward.apply(grad, ctx.scale), None  # it is linear: its own gradient


# The same for callers of torch.ops, which torch.func cannot differentiate.
for _name, _function in (("forward", TemplateOpFunction), ("backward", TemplateOpBackward)):
    torch.library.register_autograd(
        f"template_op::{_name}", _function.backward, setup_context=_function.setup_context
    )


# What vmap runs: the samples lie along in_dims[0], and more elements are all that they are to an
# elementwise op. The second result says where the samples lie in the first.
@torch.library.register_vmap("template_op::forward")
def _vmap_forward(info: Any, in_dims: Any, input: Tensor, scale: float) -> tuple[Tensor, int]:
    return torch.ops.template_op.forward(input, scale), in_dims[0]


@torch.library.register_vmap("template_op::backward")
def _vmap_backward(info: Any, in_dims: Any, grad: Tensor, scale: float) -> tuple[Tensor, int]:
    return torch.ops.template_op.backward(grad, scale), in_dims[0]
