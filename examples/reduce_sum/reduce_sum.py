"""Sums whose bits never vary, over all elements or over rows, with their gradient.

The compiled half is reduce_sum_ext (csrc/); setup.py builds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# isort: split
import reduce_sum_ext  # after torch, which loads the libraries that it is linked to


class ReduceSumFunction(torch.autograd.Function):
    """What autograd runs forward and backward; `reduce_sum` calls it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, by_row: bool) -> Tensor:
        ctx.shape = input.shape
        ctx.by_row = by_row
        return reduce_sum_ext.sum(input, by_row)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Every element was added once: its gradient is that of its sum. A view with stride 0 says
        # so without moving a byte, which no kernel can beat; and it can be differentiated again.
        grad = grad_output.unsqueeze(-1) if ctx.by_row else grad_output
        return grad.expand(ctx.shape), None


def reduce_sum(input: Tensor, dim: int | None = None) -> Tensor:
    """The sum over all elements, or over the last dimension.

    Args:
        input: any shape, float16, bfloat16, float32 or float64, on CPU or CUDA.
        dim: None for all elements, -1 for the last dimension.

    Returns:
        The sums, like `input` without the dimensions that were summed over. They are added up in
        float32 (float64 for float64), rounded once, and the same bits every time: a sum depends on
        its own elements and their number, on nothing else.

    Raises:
        RuntimeError: for another dtype or device.
        ValueError: for another dim.
    """
    if dim is not None and dim not in (-1, input.dim() - 1):
        raise ValueError(
            f"reduce_sum: dim must be None or the last dimension of input {tuple(input.shape)}, "
            f"got {dim}"
        )
    return ReduceSumFunction.apply(input, dim is not None)


def reference(input: Tensor, dim: int | None = None) -> Tensor:
    """`reduce_sum` in plain PyTorch: what tests and benchmark compare with."""
    return input.sum() if dim is None else input.sum(dim)
