"""A stand-in for a norm module, to run its forward on, and why the module stays as it is.

The probe shares no state with the module that a forward could change: what a forward does besides
computing its result would be lost with the forward, and shows as a change of the probe.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._channels_first_formula import channels_are_last

# The numbers of dimensions of images, [N, C, *spatial], the most common one first.
RANKS = (4, 3, 5)
_VALUES = (int, float, complex, str, bytes, bytearray, set, frozenset)


class Refusal(Exception):
    """Why a module stays as it is; the sentence begins after the module's name."""

    def __init__(self, *args: str, is_of_run: bool = False, is_of_values: bool = False) -> None:
        """Say where it comes from: a forward that cannot be run on rows, or gives other values."""
        super().__init__(*args)
        self.is_of_run = is_of_run
        self.is_of_values = is_of_values


def make_probe(
    module: nn.Module, normal: Callable[..., Tensor], shared: dict[int, Any]
) -> nn.Module:
    """A module of the same class and state, but for random parameters and buffers, and no hooks.

    Args:
        module: left as it is.
        normal: makes random numbers of a shape.
        shared: objects that are not copied, by their id: the modules and parameters of the model.
    """
    memo = dict(shared)
    probe: nn.Module = object.__new__(module.__class__)
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers"):
            value = {n: _random_like(t, normal) for n, t in value.items()}
        elif "_hooks" in name and isinstance(value, dict):
            value = type(value)()
        else:
            value = _copy(value, memo)
        probe.__dict__[name] = value
    return probe


def dtypes_of(module: nn.Module, like: Tensor) -> tuple[torch.dtype, ...]:
    """Of the rows that a proof in that of ``like`` allows; ``()``: that of the parameters."""
    given = (*module._parameters.values(), *module._buffers.values())
    return () if any(t is not None for t in given) else (like.dtype,)


def state_key(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that differ in the values of their parameters alone.

    Objects other than plain values are equal to themselves only.
    """
    key: list[Any] = [type(module)]
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers"):
            key += [(name, n, _kind(t)) for n, t in value.items()]
        elif isinstance(value, (*_VALUES, type(None))) or (
            isinstance(value, tuple) and all(isinstance(v, int) for v in value)
        ):
            key.append((name, type(value), repr(value)))
        elif name != "_modules" and "_hooks" not in name:
            key.append((name, id(value)))
    return tuple(key)


def _kind(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    shape = None if is_lazy(tensor) else tensor.shape
    return type(tensor), shape, tensor.dtype, tensor.device


def _random_like(tensor: Tensor | None, normal: Callable[..., Tensor]) -> Tensor | None:
    if tensor is None:
        return None
    values = normal(*tensor.shape).to(tensor.dtype)
    return nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group: nothing that a forward leaves its traces in
        return value


def run_forward(cls: Any, probe: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
    """``cls.forward`` of the probe; a Refusal where it raises, or gives no tensor like x."""
    before = probe.__class__
    probe.__class__ = cls  # for what forward looks up in its class
    try:
        y = cls.forward(probe, x, *more)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise Refusal(
            f"forward of rows {list(x.shape)} raises {type(error).__name__}: {reason}",
            is_of_run=True,
        ) from error
    finally:
        probe.__class__ = before
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        got = f"{y.dtype}{list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise Refusal(f"forward of {x.dtype}{list(x.shape)} returns {got}", is_of_run=True)
    return y


def check_side_effects(probe: nn.Module, x: Tensor, shared: dict[int, Any], *more: Tensor) -> None:
    """Run forward, and refuse where that leaves traces in the module: the fused one would not."""
    before = {name: _copy(value, dict(shared)) for name, value in probe.__dict__.items()}
    given = {
        "input": x,
        **{f"argument {i}": t for i, t in enumerate(more)},
        **probe._parameters,
        **probe._buffers,
    }
    tensors = {name: (t, t._version) for name, t in given.items() if t is not None}
    run_forward(type(probe), probe, x, *more)
    for name, (tensor, version) in tensors.items():
        if tensor._version != version:  # even if its values are the same as before
            raise Refusal(f"its forward writes to its {name}, which the fused one would not")
    after = probe.__dict__
    for name in (*after, *before):
        if name not in before or name not in after or not _same(before[name], after[name]):
            raise Refusal(
                f"its forward changes its attribute {name}, which the fused one would not"
            )


def _same(a: Any, b: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a value is as its copy was made; what cannot be compared counts as the same."""
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen = seen | {id(a)}
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_same, a, b, [seen] * len(a)))
    if isinstance(a, _VALUES):
        return bool(a == b)
    return _same(vars(a), vars(b), seen) if hasattr(a, "__dict__") else True


def image_ranks(
    module: nn.Module, like: Tensor, channels: int, shared: dict[int, Any]
) -> dict[int, bool]:
    """The numbers of dimensions of the images, channels first, that a forward takes.

    With each, whether the output of contiguous images has the channels innermost in memory.
    """
    shapes = {rank: (2, channels, 3, 5, 2)[:rank] for rank in RANKS}
    outputs = {
        rank: _try_forward(module, like, torch.ones(shape, device=like.device), shared)
        for rank, shape in shapes.items()
    }
    return {rank: channels_are_last(y) for rank, y in outputs.items() if y is not None}


def _try_forward(
    module: nn.Module, like: Tensor, x: Tensor, shared: dict[int, Any]
) -> Tensor | None:
    """The output of a module with parameters of ones, or None if it raises."""
    probe = make_probe(module, lambda *size: torch.ones(size, device=like.device), shared)
    devices = [like.device] if like.is_cuda else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        torch.autocast(like.device.type, enabled=False),
    ):
        try:
            return run_forward(type(probe), probe.eval(), x.to(like))
        except Refusal:
            return None


def explain(
    refusal: Refusal, module: nn.Module, like: Tensor, cols: int, shared: dict[int, Any]
) -> Refusal:
    """The refusal in words of what the module is, where that can be told."""
    if isinstance(module, nn.modules.batchnorm._NormBase) or "running_mean" in module._buffers:
        return Refusal("is a batch or instance norm: it normalises over the batch, or over images")
    if not (refusal.is_of_run or refusal.is_of_values):
        return refusal
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if required := [p.name for p in named if p.default is p.empty]:
        return Refusal(f"its forward takes more than the input ({', '.join(required)})")
    if refusal.is_of_run:
        if image_ranks(module, like, cols, shared):
            return Refusal("takes images, channels first: dimension 1, not the last")
        if named:
            return Refusal(f"{refusal} (it also takes {', '.join(p.name for p in named)})")
        return refusal
    # A norm gives large rows, and the same twice as large, one result.
    x = torch.linspace(-64, 100, 2 * cols, device=like.device).view(2, cols)
    small, large = (_try_forward(module, like, t, shared) for t in (x, 2 * x))
    if small is not None and large is not None and not torch.allclose(small, large, 0.1, 0.1):
        return Refusal("is not a norm: its output grows with its input")
    return refusal
