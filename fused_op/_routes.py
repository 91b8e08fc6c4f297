"""Which route a call takes. ``run`` and ``run_backward`` choose; the routes are below them.

=============  ====================================================================================
kernel         plain tensors: the binding takes the call as it is. If a gradient is needed, a node
               in C++ records it for autograd, ``csrc/autograd.cpp``
``AUTOGRAD``   gradients that are added to ``main_grad``: the autograd Function, over the binding
``CHECK``      unusual arguments, or wrong ones: called again after the checks of
               ``_arguments.py``; or ``__torch_function__`` of a tensor or a mode takes the call,
               for example for per-sample gradients, ``_per_sample.py``
``DROPOUT``    called again with the state of a mask, or without dropout outside of training
``CAST``       autocast is on, and the dtypes of rows do not fit together: called again after a cast
``RECORD``     ``torch.jit.trace`` and ONNX: PyTorch's own norms, ``_recorded.py``
``DISPATCH``   tensors that are not plain memory, and compilation: the dispatcher, where each kind
               of tensor has its own implementation; that of DTensor is in ``_dtensor.py``
``COMPOSITE``  function transforms, forward-mode AD, ``disabled()``, and a kernel that is not
               available: the formulas, ``_formulas.py``
=============  ====================================================================================

``csrc/routing.h`` and ``csrc/fused_op.cpp`` choose, as far as C++ can.

This file asks ``is_dynamo_compiling`` instead of ``is_compiling``, which takes longer. Other
compilations, such as a non-strict export, call with tensors that the binding recognises as not
plain.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op_cuda
from fused_op_cuda import KernelError, Route

from . import _ops
from ._arguments import checked
from ._contexts import is_autocast, is_differentiated, is_transformed
from ._disabled import open_blocks
from ._formulas import compose
from ._main_grad import Parameters, add_to_main_grad
from ._norm_formula import normalize_backward
from ._options import (
    BackwardOptions,
    BackwardTensors,
    ForwardResults,
    Given,
    Gradients,
    Options,
    Tensors,
    Wanted,
)
from ._philox import dropout_state
from ._recorded import record
from ._row_order import in_row_order, is_compiled
from ._sizes import holds

# The names of a public function's arguments, by position and by keyword.
_OVERRIDABLE: dict[str, tuple[list[str], list[str]]] = {}

_NAMES = (*Options._fields, "input", "residual", "weight", "bias", "rng_state")

Op = TypeVar("Op", bound=Callable[..., Any])

_AUTOGRAD = Route.AUTOGRAD  # an attribute of an Enum takes as long as a call


def overridable(op: Op) -> Op:
    """Let ``__torch_function__`` of a tensor or a mode take the calls of a public function."""
    parameters = inspect.signature(op).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    _OVERRIDABLE[op.__name__] = [p.name for p in parameters if p.name not in keywords], keywords
    return op


def run(op: Callable[..., Any], function: Any, given: Given, tensors: Tensors) -> Any:
    """Call the public function ``op``; ``function`` is the autograd Function that records it."""
    if is_dynamo_compiling():
        return _run_traced(op, function, Options(*given), tensors)
    try:
        kernel: Any = check_alone if open_blocks else fused_op_cuda.norm
        result: Any = kernel(tensors, given)
    except KernelError as error:
        warn_of_missing_kernel(error)
        result = Route.COMPOSITE
    if type(result) is not Route:
        return result
    options = Options(*given)
    if result is _AUTOGRAD:
        return function.apply(*tensors, options)
    if result is Route.CHECK:
        if _is_overridden(tensors, options):
            return _override(op, options, tensors)
        return run(op, function, *_checked(op, options, tensors))
    if result is Route.DROPOUT:
        if options.training:
            input, residual, weight, bias, _ = tensors
            return run(op, function, given, (input, residual, weight, bias, dropout_state(input)))
        return run(op, function, options._replace(dropout_p=0.0), tensors)
    if result is Route.CAST:
        return run(op, function, options, _cast(tensors))
    if result is Route.RECORD or torch.onnx.is_in_onnx_export():
        return record(tensors, options)
    if result is Route.DISPATCH or options.main_grad:  # only the Function knows about them
        return _dispatch(function, tensors, options)
    return compose(tensors, options)


def _run_traced(op: Callable[..., Any], function: Any, options: Options, tensors: Tensors) -> Any:
    """``run`` while dynamo compiles, where nothing may look at the memory of a tensor."""
    if _is_overridden(tensors, options):
        return _override(op, options, tensors)
    options, tensors = _checked(op, options, tensors)
    if is_autocast(tensors[0]):
        tensors = _cast(tensors)
    if is_transformed():
        return compose(tensors, options)
    input, residual, weight, bias, rng_state = _distinct(tensors)
    input = _with_dense_rows(input, options)
    if residual is not None:
        residual = _with_dense_rows(residual, options)
    return _dispatch(function, (input, residual, weight, bias, rng_state), options)


def _with_dense_rows(tensor: Tensor, options: Options) -> Tensor:
    """The copy that the op would make of permuted rows, in the graph, where it costs nothing.

    The result of a convolution, permuted, is such rows. Inductor adds the bias and writes them in
    this order; an op would get, and save for backward, what eager mode has in memory.
    """
    if tensor.dim() == 0 or not holds(tensor.stride(-1) != 1):
        return tensor
    if options.norm == "rms_norm" and tensor.dim() in (4, 5) and holds(tensor.stride(1) == 1):
        return tensor  # torch.channels_last: as in PyTorch, the output keeps what the op has to see
    return tensor.contiguous()


def _checked(op: Callable[..., Any], options: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    options = checked(op.__name__, options, tensors)
    if options.dropout_p:
        tensors = (*tensors[:4], dropout_state(tensors[0]))
    return options, tensors


def _is_overridden(tensors: Tensors, options: Options) -> bool:
    # A call with main_grad comes from a module, not from a public function.
    return not options.main_grad and has_torch_function(tensors)


def _override(op: Callable[..., Any], options: Options, tensors: Tensors) -> Any:
    """Let ``__torch_function__`` of a tensor, or of the active mode, take the call."""
    _ops.register_per_sample_rules()
    values: dict[str, Any] = dict(zip(_NAMES, (*options, *tensors), strict=True))
    positional, keywords = _OVERRIDABLE[op.__name__]
    args = (values[name] for name in positional)
    kwargs = {name: values[name] for name in keywords}
    return handle_torch_function(op, tensors, *args, **kwargs)


def run_forward(tensors: Tensors, options: Options, save_stats: bool) -> ForwardResults:
    """The forward of the autograd Function."""
    if is_dynamo_compiling():
        if open_blocks or is_transformed():
            return _forward_by_formula(tensors, options)
        return _ops.norm_forward(tensors, options, save_stats)
    if open_blocks:
        return _forward_by_formula(tensors, options)
    try:
        return fused_op_cuda.norm_forward(tensors, options, save_stats)
    except KernelError as error:
        warn_of_missing_kernel(error)
        return _forward_by_formula(tensors, options)


def run_backward(
    tensors: BackwardTensors,
    options: BackwardOptions,
    wanted: Wanted,
    parameters: Parameters | None,
) -> Gradients:
    """The backward of the autograd Function. ``parameters`` are those with a ``main_grad``.

    The node in C++ calls it, too, when it does not run the kernel itself: ``csrc/autograd.cpp``.
    """
    # The kernel, the dispatcher's op and the formula have the same arguments.
    grad_output, grad_sum, x, *_, stats, _ = tensors
    if is_compiled(grad_output):
        grad_output, grad_sum = in_row_order(grad_output), in_row_order(grad_sum)
        if x.dim() > grad_output.dim():
            return _run_unlike_image(grad_output, grad_sum, tensors, options, wanted, parameters)
        tensors = grad_output, grad_sum, *tensors[2:]
    formula: Any = normalize_backward
    backward: Any = fused_op_cuda.norm_backward
    if stats is None or open_blocks:  # no kernel in forward, or none now
        backward = formula
    elif is_dynamo_compiling():
        backward = _ops.norm_backward
    elif is_differentiated(grad_output, grad_sum):
        # The means have to depend on x, too, by operations that PyTorch can differentiate.
        backward = formula
    if options.x_is_output and backward is formula:
        raise RuntimeError(
            f"fused_{options.norm}: with memory_efficient=True the input is not kept, so that its "
            "gradient can neither be differentiated again nor be computed by other means"
        )
    if parameters is not None:
        backward = partial(add_to_main_grad, parameters, backward)
        formula = partial(add_to_main_grad, parameters, formula)
    try:
        gradients: Gradients = backward(tensors, options, wanted)
    except KernelError as error:
        if options.x_is_output:
            raise
        warn_of_missing_kernel(error)
        gradients = formula(tensors, options, wanted)
    return gradients


def _run_unlike_image(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    tensors: BackwardTensors,
    options: BackwardOptions,
    wanted: Wanted,
    parameters: Parameters | None,
) -> Gradients:
    """``run_backward`` for x with the dimension in front that ``unlike_image`` gave it."""
    grads = grad_output.unsqueeze(0), None if grad_sum is None else grad_sum.unsqueeze(0)
    gradients = run_backward((*grads, *tensors[2:]), options, wanted, parameters)
    dx, dresidual, dweight, dbias = gradients
    dx = None if dx is None else dx.squeeze(0)
    return dx, None if dresidual is None else dresidual.squeeze(0), dweight, dbias


def _dispatch(function: Any, tensors: Tensors, options: Options) -> Any:
    """Call through the dispatcher, where each kind of tensor has its own implementation."""
    _ops.register_rules()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return function.apply(*tensors, options)
    output, sum, _ = run_forward(tensors, options, False)
    return output if tensors[1] is None else (output, sum)


def _forward_by_formula(tensors: Tensors, options: Options) -> ForwardResults:
    """``norm_forward`` without a kernel, and therefore without statistics for backward."""
    if not is_dynamo_compiling():
        check_alone(tensors, options)
    outputs = compose(tensors, options)
    return (*outputs, None) if isinstance(outputs, tuple) else (outputs, None, None)


class _NotPlain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing. But under any mode, no tensor is plain to ``fused_op_cuda.norm``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def check_alone(tensors: Tensors, options: Given) -> Route:
    """``fused_op_cuda.norm`` without its kernel: raises its errors, and returns the route."""
    with _NotPlain():  # type: ignore[no-untyped-call]
        route = fused_op_cuda.norm(tensors, options)
    return Route.COMPOSITE if route is Route.DISPATCH else route  # type: ignore[return-value]


# Warnings already given. Each kernel has its own message, so Python would show each once.
warned: list[RuntimeError] = []


def warn_of_missing_kernel(error: RuntimeError) -> None:
    """Warn, once, that PyTorch operations replace a kernel that is not available.

    With ``FUSED_OP_JIT=require`` this is an error.
    """
    if os.environ.get("FUSED_OP_JIT") == "require":
        raise error
    if not warned:
        warned.append(error.with_traceback(None))
        warnings.warn(
            f"fused_op: slower PyTorch operations replace missing kernels. The first: {error}",
            stacklevel=2,
        )


def _cast(tensors: Tensors) -> Tensors:
    """Under autocast, cast rows of different dtypes to the wider one, which loses nothing."""
    input, residual, weight, bias, rng_state = tensors
    wider = residual is not None and residual.dtype == torch.float32 and input.dtype.itemsize == 2
    if residual is not None and not wider:
        dtype = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(dtype), residual.to(dtype)
    return input, residual, weight, bias, rng_state


def _distinct(tensors: Tensors) -> Tensors:
    """Replace repeated tensors by views: dynamo cannot trace a tensor that is passed twice."""
    input, residual, weight, bias, rng_state = tensors
    if residual is input:
        residual = input.view_as(input)
    if weight is not None and (weight is input or weight is tensors[1]):
        weight = weight.view_as(weight)
    if bias is not None and (bias is input or bias is tensors[1] or bias is tensors[2]):
        bias = bias.view_as(bias)
    return input, residual, weight, bias, rng_state
