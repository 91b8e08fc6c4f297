"""What is active around a call: a trace, a transform, another derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_Result = TypeVar("_Result")


def is_transformed() -> bool:
    """Is torch.func or forward-mode AD on, in or around code that is being compiled?

    In compiled code, both ignore an autograd.Function and see the op in it, which has no derivative
    of its own: gradients would be zeros, without an error.
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


def is_autocast(tensor: Tensor) -> bool:
    """Is autocast on for the device of this tensor? It has no answer for others, such as meta."""
    device = tensor.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def is_recording() -> bool:
    """Does ``torch.jit.trace`` record what is called here? It does not inside its operators."""
    return (
        torch._C._get_tracing_state() is not None
        and not torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer")
    )


def unrecorded(function: Callable[..., _Result], *args: Any) -> _Result:
    """``function(*args)`` with sizes as numbers, not as the tensors that they are in a trace."""
    if not is_recording():
        return function(*args)
    state = torch._C._get_tracing_state()
    set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        return function(*args)
    finally:
        set_state(state)
