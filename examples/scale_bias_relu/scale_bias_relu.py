"""relu(input * scale + bias) in one kernel, with its gradient: the functions and the module.

The compiled half is scale_bias_relu_ext (csrc/); setup.py builds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# isort: split
import scale_bias_relu_ext  # after torch, which loads the libraries that it is linked to


class ScaleBiasReluFunction(torch.autograd.Function):
    """What autograd runs forward and backward; `fused_op_forward` calls it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        output = scale_bias_relu_ext.forward(input, bias, scale)
        # The output tells where the relu let the gradient through, and the next layer keeps it
        # anyway: so this op needs no memory of its own for backward.
        ctx.save_for_backward(output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        input_wanted, bias_wanted, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # create_graph=True: this gradient is itself differentiated. PyTorch's operations can
            # be; a kernel's result would count as a constant, and the second derivative be wrong.
            grad = torch.where(output <= 0, 0, grad_output)
            leading = list(range(output.dim() - 1))
            grad_bias = grad.reshape(1) if output.dim() == 0 else grad.sum(leading)
            return grad * ctx.scale, grad_bias if bias_wanted else None, None
        grad_input, grad_bias = scale_bias_relu_ext.backward(
            grad_output, output, ctx.scale, input_wanted, bias_wanted
        )
        return grad_input, grad_bias, None


def fused_op_forward(input: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """relu(input * scale + bias), in one pass over memory.

    Args:
        input: `[..., features]`, float16, bfloat16, float32 or float64, on CPU or CUDA.
        bias: `[features]`, dtype and device of `input`; None means 0.
        scale: a number; it gets no gradient.

    Returns:
        A tensor like `input`. It is computed in float32 (float64 for float64) and rounded once.

    Raises:
        RuntimeError: for another shape, dtype or device; the message names the argument.
    """
    if bias is not None and bias.dtype != input.dtype:
        if torch.is_autocast_enabled(input.device.type):  # the layer before has 16-bit outputs then
            bias = bias.to(input.dtype)
    return ScaleBiasReluFunction.apply(input, bias, scale)


def custom_relu(x: Tensor) -> Tensor:
    """relu(x): the smallest use of the op."""
    return fused_op_forward(x)


def reference(input: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """`fused_op_forward` in plain PyTorch: what tests and benchmark compare with."""
    output = input * scale
    if bias is not None:
        output = output + bias
    return torch.relu(output)


class FusedOpLayer(nn.Module):
    """`fused_op_forward` with a learnt bias for each of `features`."""

    def __init__(
        self,
        features: int,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return fused_op_forward(input, self.bias, self.scale)

    def extra_repr(self) -> str:
        return f"features={self.features}, scale={self.scale}"
