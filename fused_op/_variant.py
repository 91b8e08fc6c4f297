"""Turns the two ops of a variant into a function: autograd, transforms, compilation, a switch.

A variant is a function beside the norms of ``functional.py``, with ops of its own: its C++ half is
a file like ``csrc/l2_norm.cpp``, its Python half one like ``_l2_norm.py``. That file checks the
arguments, and passes the call to the variant's :class:`Variant`, which picks its route:

- the ops, through an ``autograd.Function`` if a gradient is needed. Compilation, and tensors that
  are not plain memory, take this route, too: the dispatcher knows them.
- the formula in PyTorch operations, for function transforms, forward-mode AD, a gradient that is
  differentiated again, ``torch.jit.trace`` and ONNX, ``disabled()``, and a kernel that is not
  available.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_op_cuda import KernelError

from ._contexts import is_differentiated, is_recording, is_transformed
from ._disabled import open_blocks
from ._routes import warn_of_missing_kernel

Tensors = tuple[Tensor | None, ...]
Options = tuple[Any, ...]
Outputs = Tensor | tuple[Tensor, ...]
Saved = Tensor | tuple[Tensor, ...]


def _tensors(tensors: Tensors, outputs: Outputs) -> Tensors:
    return tensors


class Ops(NamedTuple):
    """The functions of a variant. ``tensors`` and ``options`` belong to a call, in the same order.

    ``forward(tensors, options, save)`` returns ``(outputs, stats)``. ``outputs`` is one tensor or
    several. ``stats`` is what backward needs beside the tensors, if ``save``: one or several.
    ``backward(grads, tensors, stats, options, wanted)`` returns a gradient, or None, for each of
    the tensors. ``grads`` has None for outputs that were not used; at least one was.
    ``formula(*tensors, *options)`` returns the outputs, by operations that can be differentiated
    any number of times. ``check(*tensors, *options)`` refuses what the ops refuse.

    A variant whose backward reads an output in place of an argument has two more:
    ``kept(tensors, outputs)`` returns the tensors for ``backward``, in the order of the arguments.
    ``gradients(grads, kept, options, wanted)`` returns the same as ``backward``, by operations that
    can be differentiated.
    """

    forward: Callable[[Tensors, Options, bool], tuple[Outputs, Saved]]
    backward: Callable[[tuple[Tensor | None, ...], Tensors, Any, Options, Any], Tensors]
    formula: Callable[..., Outputs]
    check: Callable[..., None]
    kept: Callable[[Tensors, Outputs], Tensors] = _tensors
    gradients: Callable[[tuple[Tensor | None, ...], Tensors, Options, Any], Tensors] | None = None


class Variant:
    """A call of the function: ``variant(tensors, options)``."""

    def __init__(self, ops: Ops) -> None:
        """Make the ``autograd.Function`` of these ops."""
        self.ops = ops
        self.function = _function_of(ops)

    def __call__(self, tensors: Tensors, options: Options) -> Any:
        """Run it. The arguments that are not tensors must have the types that the ops take."""
        if open_blocks or is_transformed() or _is_recorded():
            self.ops.check(*tensors, *options)
            return self.ops.formula(*tensors, *options)
        if any(t is not None and (t.layout is not torch.strided or t.is_nested) for t in tensors):
            self.ops.check(*tensors, *options)  # the dispatcher has no readable error for these
        _register_rules()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            tensors = _distinct(tensors) if is_dynamo_compiling() else tensors
            return self.function.apply(options, *tensors)
        return _forward(self.ops, tensors, options, False)[0]


def _is_recorded() -> bool:
    if is_dynamo_compiling():
        return torch.onnx.is_in_onnx_export()
    return is_recording() or torch.onnx.is_in_onnx_export()


def _register_rules() -> None:
    if not is_dynamo_compiling() and "torch.distributed.tensor" in sys.modules:
        from . import _dtensor as _dtensor


def _function_of(ops: Ops) -> Any:
    class VariantFunction(torch.autograd.Function):
        """Records a call of the variant for autograd."""

        @staticmethod
        def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Any:
            outputs, stats = _forward(ops, tensors, options, True)
            saved = stats if isinstance(stats, tuple) else (stats,)
            ctx.save_for_backward(*ops.kept(tensors, outputs), *saved)
            ctx.options, ctx.count = options, len(tensors)
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            unpacked = ctx.saved_tensors  # once: checkpointing refuses a second time
            kept, saved = unpacked[: ctx.count], unpacked[ctx.count :]
            stats = saved if len(saved) > 1 else saved[0]
            wanted = ctx.needs_input_grad[1:]
            return None, *_backward(ops, grads, kept, stats, ctx.options, wanted)

    return VariantFunction


def _forward(
    ops: Ops, tensors: Tensors, options: Options, save: bool
) -> tuple[Outputs, Saved | None]:
    """The outputs, and the statistics, which are None if the formula took the call."""
    if is_dynamo_compiling():
        return ops.forward(tensors, options, save)
    try:
        return ops.forward(tensors, options, save)
    except KernelError as error:
        warn_of_missing_kernel(error)
    return ops.formula(*tensors, *options), None


def _backward(
    ops: Ops,
    grads: tuple[Tensor | None, ...],
    kept: Tensors,
    stats: Saved | None,
    options: Options,
    wanted: Any,
) -> Tensors:
    if stats is not None and is_dynamo_compiling():
        return ops.backward(grads, kept, stats, options, wanted)
    if stats is not None and not open_blocks and not is_differentiated(*grads):
        try:
            return ops.backward(grads, kept, stats, options, wanted)
        except KernelError as error:
            warn_of_missing_kernel(error)
    if ops.gradients is not None:
        return ops.gradients(grads, kept, options, wanted)
    return _backward_by_formula(ops, grads, kept, options, wanted)


def _backward_by_formula(
    ops: Ops, grads: tuple[Tensor | None, ...], tensors: Tensors, options: Options, wanted: Any
) -> Tensors:
    """The gradients as functions of the tensors and of ``grads``, to be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one tensor may be two arguments, each with its own gradient.
        inputs = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_(w)
            for t, w in zip(tensors, wanted, strict=True)
        ]
        outputs = ops.formula(*inputs, *options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if dy is not None]
    sought = [t for t, w in zip(inputs, wanted, strict=True) if w]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            sought,  # type: ignore[arg-type]  # every wanted gradient is there
            [dy for _, dy in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
        if pairs and sought
        else [None] * len(sought)
    )
    return tuple(next(found) if w else None for w in wanted)


def _distinct(tensors: Tensors) -> Tensors:
    """Replace repeated tensors by views: dynamo cannot trace a tensor that is passed twice."""
    return tuple(
        t.view_as(t) if t is not None and any(t is other for other in tensors[:i]) else t
        for i, t in enumerate(tensors)
    )
