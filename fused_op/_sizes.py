"""Comparisons of sizes, some of which only the data decides, such as those of ``x[mask]``.

A compiler cannot decide them. Checks let such sizes pass, and leave them to the op, which runs with
the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling


def holds(comparison: Any) -> bool:
    """Whether a comparison of sizes is known to hold."""
    if is_dynamo_compiling() or isinstance(comparison, torch.SymBool):
        from torch.fx.experimental import symbolic_shapes  # slow to import

        if hasattr(symbolic_shapes, "guard_or_false"):
            known: bool = symbolic_shapes.guard_or_false(comparison)
            return known
    return True if comparison else False  # PyTorch 2.7 traces no bool() of a comparison


def lies_in_order(tensor: Tensor) -> bool:
    """Whether a tensor is known to be contiguous. A dimension of size one may hide it."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not holds(stride == expected):
            return False
        expected = expected * size
    return True


def differ(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to differ."""
    if len(shape) != len(other):
        return True
    for m, n in zip(shape, other, strict=True):  # PyTorch 2.7 traces no any() of comparisons
        if holds(m != n):
            return True
    return False
