"""Python arguments that are no tensors, brought into the form that the ops take.

Tensors are checked in ``csrc/checks.h``, once for every caller.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .reference import compute_dtype


def rms_eps(input: Tensor, eps: float | None) -> float:
    if eps is not None:
        return eps
    check_tensor("input", input)
    return torch.finfo(compute_dtype(input)).eps


def as_float(eps: Any) -> float:
    is_number = hasattr(eps, "__float__") or hasattr(eps, "__index__")
    if isinstance(eps, Tensor):
        is_number = eps.dim() == 0 and not eps.requires_grad
    if not is_number:
        raise TypeError(f"fused_op: argument 'eps' must be float, not {type(eps).__name__}")
    return float(eps)


def refuse_as_bool(name: str, value: Any) -> NoReturn:
    """For whatever is no bool, as PyTorch has it: neither 0 and 1 nor NumPy's are taken for one."""
    kind = type(value)  # NumPy's is a bool by name, too
    found = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise TypeError(f"fused_op: argument '{name}' must be bool, not {found}")


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"fused_op: argument '{name}' must be Tensor, not {type(value).__name__}")


def count_normalized(input: Tensor, normalized_shape: Any) -> int:
    """Length of normalized_shape, after a check that input ends in it."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    if not isinstance(normalized_shape, (tuple, list)):
        raise TypeError(
            "fused_op: argument 'normalized_shape' must be tuple of ints, not "
            f"{type(normalized_shape).__name__}"
        )
    for size in normalized_shape:
        if not isinstance(size, (int, torch.SymInt)) and not hasattr(size, "__index__"):
            raise TypeError(
                "fused_op: argument 'normalized_shape' must be tuple of ints, but found element of "
                f"type {type(size).__name__}"
            )
    check_tensor("input", input)
    shape = tuple(normalized_shape)
    if not shape:
        raise RuntimeError(
            "fused_op: Expected normalized_shape to be at least 1-dimensional, i.e., containing at "
            "least one element, but got normalized_shape = []"
        )
    if tuple(input.shape[-len(shape) :]) != shape:
        wanted = ", ".join(map(str, shape))
        raise RuntimeError(
            f"fused_op: Given normalized_shape=[{wanted}], expected input with shape [*, {wanted}],"
            f" but got input of size{list(input.shape)}"
        )
    return len(shape)
