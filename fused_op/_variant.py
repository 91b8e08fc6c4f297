"""Turns the two ops of a variant into a function: autograd, transforms, compilation, a switch.

A variant is a function beside the norms of ``functional.py``, with ops of its own: its C++ half is
a file like ``csrc/l2_norm.cpp``, its Python half one like ``_l2_norm.py``. That file checks the
arguments, and passes the call to the variant's :class:`Variant`, which picks its route:

- plain tensors: the ops, through ``csrc/variant_call.cpp``. If a gradient is needed, a node in C++
  records the call for autograd.
- tensors that are not plain memory, and compilation: the ops by the dispatcher, which knows them,
  through an ``autograd.Function`` if a gradient is needed.
- the formula in PyTorch operations, for function transforms, forward-mode AD, a gradient that is
  differentiated again, ``torch.jit.trace`` and ONNX, ``disabled()``, and a kernel that is not
  available.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

import fused_op_cuda
from fused_op_cuda import KernelError

from ._contexts import is_differentiated, is_recording, is_transformed
from ._disabled import open_blocks
from ._ops import check_one_device, register_rules
from ._routes import warn_of_missing_kernel
from ._row_order import in_row_order, is_compiled
from ._sizes import differ

Tensors = tuple[Tensor | None, ...]
Options = tuple[Any, ...]
Outputs = Tensor | tuple[Tensor, ...]
Passed = tuple[int, int]  # the number of a tensor, and that of an output
PassedGradient = tuple[int, int, torch.dtype, tuple[int, ...]]  # and the dtype, shape


class RecordedCall(NamedTuple):
    """What backward knows about a call: as in ``csrc/variant_call.cpp``."""

    saved: dict[str, Tensor | None]  # by name
    options: Options
    wanted: tuple[bool, ...]  # for each of the tensors
    passed: PassedGradient | None


_VARIANTS: dict[str, Variant] = {}


def _none_passed(_: Tensors) -> None:
    return None


def _no_views(*_: Any) -> tuple[Tensor, ...]:
    return ()


class Variant:
    """A function whose ops are ``torch.ops.fused_op.<name>_forward`` and ``<name>_backward``.

    The arguments of forward are tensors, then options, then ``save_stats``; its results are outputs
    and ``stats``. An argument of backward is one of these tensors, options or results, which its
    name tells, or ``grad_`` and the name of an output, or ``wanted``: a bool for each result. A
    result is ``grad_`` and the name of a tensor. The tensors and results that backward takes are
    saved. An option may be one of backward alone.

    A call is ``variant(tensors, options)``, in the order of forward; options of backward follow.

    Args:
        name: of the ops.
        formula: ``formula(*tensors, *options)`` returns the outputs, by operations that can be
            differentiated any number of times.
        check: ``check(*tensors, *options)`` refuses what the ops refuse.
        gradients: for a variant that does not save all of its tensors.
            ``gradients(grads, saved, options, wanted)`` returns a gradient, or None, for each, by
            operations that can be differentiated. ``grads`` has None for outputs that were not
            used; ``saved`` is by name.
        passed: ``passed(tensors)`` names a tensor whose gradient is that of an output, in its own
            dtype and shape: no op may return what it is given.
        views: ``views(tensors, options)`` returns further outputs, which are views of the tensors:
            nor may an op return those.
        by_rows: the kernels read gradients row by row, and not images in their memory format.
    """

    def __init__(
        self,
        name: str,
        formula: Callable[..., Outputs],
        check: Callable[..., None],
        *,
        gradients: Callable[..., Tensors] | None = None,
        passed: Callable[[Tensors], Passed | None] = _none_passed,
        views: Callable[[Tensors, Options], tuple[Tensor, ...]] = _no_views,
        by_rows: bool = True,
    ) -> None:
        """See the class."""
        self.name = name
        self.formula, self.check, self.gradients = formula, check, gradients
        self.passed, self.views, self.by_rows = passed, views, by_rows
        self.forward_op: Any = getattr(torch.ops.fused_op, f"{name}_forward").default
        self.backward_op: Any = getattr(torch.ops.fused_op, f"{name}_backward").default
        self._read_schemas()
        self.function = _function_of(name)
        self.in_cpp = fused_op_cuda._variant(name)
        _VARIANTS[name] = self

    def _read_schemas(self) -> None:
        """As ``csrc/variant_ops.cpp`` does."""
        *arguments, _ = self.forward_op._schema.arguments
        self.tensor_names = [a.name for a in arguments if "Tensor" in str(a.type)]
        self.option_names = [a.name for a in arguments[len(self.tensor_names) :]]
        self.forward_options = len(self.option_names)
        self.result_names = [r.name for r in self.forward_op._schema.returns]
        tensors = self.tensor_names + self.result_names
        self.backward_names = [a.name for a in self.backward_op._schema.arguments]
        self.saved_names = [name for name in self.backward_names if name in tensors]
        self.grad_names = [name for name in self.backward_names if name.startswith("grad_")]
        known = [*tensors, *self.option_names, *self.grad_names, "wanted"]
        self.option_names += [name for name in self.backward_names if name not in known]
        self.differentiated = [
            result.name.removeprefix("grad_") for result in self.backward_op._schema.returns
        ]

    def __call__(self, tensors: Tensors, options: Options) -> Any:
        """Run it. The arguments that are not tensors must have the types that the ops take."""
        if not is_dynamo_compiling():
            outputs = self._call_in_cpp(tensors, options)
            if outputs is not None:
                return outputs
            self._check_devices(tensors, options)
        if open_blocks or is_transformed() or _is_recorded():
            self.check(*tensors, *options)
            return self.formula(*tensors, *options)
        if not all(t is None or is_strided(t) for t in tensors):
            self.check(*tensors, *options)  # the dispatcher has no readable error for these
        register_rules()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            tensors = _distinct(tensors) if is_dynamo_compiling() else tensors
            return self.function.apply(options, *tensors)
        return _one_or_all(self.forward(tensors, options, False)[0])

    def _check_devices(self, tensors: Tensors, options: Options) -> None:
        """Before the dispatcher takes a tensor of memory for one of the meta device beside it."""
        devices = {t.device for t in tensors if isinstance(t, Tensor)}
        if len(devices) > 1:
            self.check(*tensors, *options)  # it may say it in the words of the function
            named = dict(zip(self.tensor_names, tensors, strict=True))
            check_one_device(f"fused_op::{self.name}_forward", named)

    def _call_in_cpp(self, tensors: Tensors, options: Options) -> Any:
        """The outputs of a call of plain tensors; None for any other."""
        try:
            outputs = self.in_cpp.call(tensors, options, self.passed(tensors))
        except KernelError:  # reported where the call goes then
            return None
        if outputs is None or self.views is _no_views:
            return outputs
        return (*outputs, *self.views(tensors, options))

    def forward(self, tensors: Tensors, options: Options, save: bool) -> tuple[Any, Tensor | None]:
        """The outputs, and the statistics, which are None if the formula took the call."""
        given = *tensors, *options[: self.forward_options], save
        if is_dynamo_compiling():
            *outputs, stats = self.forward_op(*given)
        else:
            try:
                *outputs, stats = self.forward_op(*given)
            except KernelError as error:
                warn_of_missing_kernel(error)
                result = self.formula(*tensors, *options)
                return (result if isinstance(result, tuple) else (result,)), None
        return (*outputs, *self.views(tensors, options)), stats

    def backward(self, grads: Tensors, call: RecordedCall) -> Tensors:
        """A gradient, or None, for each of the tensors. At least one of ``grads`` is there."""
        saved, options, wanted, _ = call
        has_stats = saved["stats"] is not None
        if self.by_rows and any(map(is_compiled, grads)):
            grads = tuple(map(in_row_order, grads))
        if has_stats and is_dynamo_compiling():
            return self._backward_by_op(grads, call)
        if has_stats and not open_blocks and not is_differentiated(*grads):
            try:
                return self._backward_by_op(grads, call)
            except KernelError as error:
                warn_of_missing_kernel(error)
        if self.gradients is not None:
            return self.gradients(grads, saved, options, wanted)
        tensors = tuple(saved[name] for name in self.tensor_names)
        return _backward_by_formula(self.formula, grads, tensors, options, wanted)

    def _backward_by_op(self, grads: Tensors, call: RecordedCall) -> Tensors:
        saved, options, wanted, passed = call
        # By name: the dynamo of PyTorch 2.7 makes symbols of numbers, and assigns no item by one.
        found: dict[str, Tensor | None] = dict.fromkeys(self.tensor_names)
        asked = dict(zip(self.tensor_names, wanted, strict=True))
        if passed is not None and wanted[passed[0]]:
            number, output, dtype, shape = passed
            name = self.tensor_names[number]
            found[name] = _gradient_of(grads[output], dtype, shape, saved)
            asked[name] = False
        of_op = [asked[name] for name in self.differentiated]
        if any(of_op):
            given: dict[str, Any] = {**saved, "wanted": of_op}
            given.update(zip(self.option_names, options, strict=True))
            given.update(zip(self.grad_names, grads, strict=True))
            results = self.backward_op(*[given[name] for name in self.backward_names])
            results = results if isinstance(results, tuple) else (results,)
            for name, result in zip(self.differentiated, results, strict=True):
                found[name] = result if asked[name] else found[name]
        return tuple(found.values())


def _gradient_of(
    grad: Tensor | None, dtype: torch.dtype, shape: Any, saved: dict[str, Tensor | None]
) -> Tensor:
    """The gradient of an output as that of a tensor: itself, where it fits, or a copy.

    Autograd copies a tensor that it would accumulate twice, but does not see that two share memory.
    """
    if grad is None:
        like = next(t for t in saved.values() if t is not None)
        return like.new_zeros(shape, dtype=dtype)  # a DTensor beside DTensors
    if differ(grad.shape, shape):
        return grad.to(dtype, copy=True).reshape(shape)
    return grad.to(dtype)


def run_backward(
    name: str, grads: Tensors, saved: Tensors, options: Options, wanted: Any, passed: Any
) -> Tensors:
    """The backward of the node in C++, where that does not run the op itself."""
    variant = _VARIANTS[name]
    by_name = dict(zip(variant.saved_names, saved, strict=True))
    return variant.backward(grads, RecordedCall(by_name, options, wanted, passed))


def variant_named(op: str) -> Variant:
    """The variant that has this forward, ``fused_op::<name>_forward``."""
    return _VARIANTS[op.removeprefix("fused_op::").removesuffix("_forward")]


def _is_recorded() -> bool:
    if is_dynamo_compiling():
        return torch.onnx.is_in_onnx_export()
    return is_recording() or torch.onnx.is_in_onnx_export()


def is_strided(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def _one_or_all(outputs: tuple[Tensor, ...]) -> Outputs:
    return outputs[0] if len(outputs) == 1 else outputs


def _function_of(name: str) -> Any:
    # The dynamo of PyTorch 2.7 refuses a variant among what these functions close over.
    class VariantFunction(torch.autograd.Function):
        """Records a call of the variant for autograd."""

        @staticmethod
        def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Any:
            variant = _VARIANTS[name]
            outputs, stats = variant.forward(tensors, options, True)
            by_name: dict[str, Any] = dict(zip(variant.tensor_names, tensors, strict=True))
            results = variant.result_names[:-1]  # less stats; outputs may have views behind them
            by_name.update(zip(results, outputs[: len(results)], strict=True))
            by_name["stats"] = stats
            ctx.save_for_backward(*[by_name[saved] for saved in variant.saved_names])
            ctx.options, ctx.passed = options, variant.passed(tensors)
            if ctx.passed is not None:
                passed: Any = tensors[ctx.passed[0]]
                ctx.passed = *ctx.passed, passed.dtype, passed.shape
            ctx.set_materialize_grads(False)
            return _one_or_all(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            variant = _VARIANTS[name]
            # Unpacked once: checkpointing refuses a second time.
            saved = dict(zip(variant.saved_names, ctx.saved_tensors, strict=True))
            call = RecordedCall(saved, ctx.options, ctx.needs_input_grad[1:], ctx.passed)
            return None, *variant.backward(grads, call)

    return VariantFunction


def _backward_by_formula(
    formula: Callable[..., Outputs], grads: Tensors, tensors: Tensors, options: Options, wanted: Any
) -> Tensors:
    """The gradients as functions of the tensors and of ``grads``, to be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one tensor may be two arguments, each with its own gradient.
        inputs = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_(w)
            for t, w in zip(tensors, wanted, strict=True)
        ]
        outputs = formula(*inputs, *options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = zip(outputs, grads, strict=True)
    # An output may depend on none of the tensors that need a gradient, as a sum does on weights.
    pairs = [(y, dy) for y, dy in given if dy is not None and y.requires_grad]
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
