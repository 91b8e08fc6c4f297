"""A convolutional recurrence in one launch, as ops of PyTorch's dispatcher: torch.ops.convrnn.

    h_t = tanh(x_t + conv1d(h_{t-1}, kernel, padding="same"))

The compiled half is convrnn_ext (csrc/); setup.py builds it. It has the schema and the kernels of
the ops; what their results look like and what their gradients are is said here.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# The library registers its ops when it is loaded. It is no Python module: nothing to import.
_spec = importlib.util.find_spec("convrnn_ext")
if _spec is None:
    raise ImportError("convrnn_ext is not built: python setup.py build_ext --inplace")
torch.ops.load_library(_spec.origin)


# Shape, dtype and device of the results, without data: how torch.compile and export trace the op.
@torch.library.register_fake("convrnn::forward")
def _fake_forward(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("convrnn::backward")
def _fake_backward(
    grad_output: Tensor, output: Tensor, kernel: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_kernel = kernel.new_empty(kernel.shape)
    return output.new_empty(output.shape), grad_kernel, hidden.new_empty(hidden.shape)


# The gradient is an op, too: the compiler sees both, and can plan the memory of both.
def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, kernel, hidden = inputs
    ctx.save_for_backward(output, kernel, hidden)  # x is not needed: tanh' = 1 - h²


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.convrnn.backward(grad_output, *ctx.saved_tensors)


torch.library.register_autograd("convrnn::forward", _backward, setup_context=_save)


# Without this, a second derivative would come out as zero, with no more than a warning.
def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("convrnn: second derivatives are not implemented")


torch.library.register_autograd("convrnn::backward", _no_second_derivative)


def convrnn_forward(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    """All states of the recurrence, in one launch.

    Args:
        x: `[batch, steps, columns]`, float16, bfloat16, float32 or float64, on CPU or CUDA.
        kernel: `[1, 1, taps]`, as conv1d has it; dtype and device of `x`.
        hidden: `[batch, columns]`, the state before the first step; dtype and device of `x`.

    Returns:
        `[batch, steps, columns]`: the state after each step. A step is computed in float32
        (float64 for float64), and rounded once.

    Raises:
        RuntimeError: for another shape, dtype or device; on CUDA also for more columns than shared
            memory holds (about 14000 in float32 on an H100); the message names what is wrong.
    """
    return torch.ops.convrnn.forward(x, kernel, hidden)


def reference(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    """`convrnn_forward` in plain PyTorch: what tests and benchmark compare with."""
    states = []
    for x_t in x.unbind(1):
        hidden = torch.tanh(x_t + F.conv1d(hidden[:, None], kernel, padding="same")[:, 0])
        states.append(hidden)
    return torch.stack(states, 1)
