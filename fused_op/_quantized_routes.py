"""How a call with a quantised output runs: by the kernel or by the formula, with its gradient.

``quantized.py`` has the public functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from fused_op_cuda import KernelError

from ._arguments import check_bools, check_rows, check_tensor, checked
from ._contexts import is_autocast, is_recording, is_transformed, unrecorded
from ._disabled import open_blocks
from ._formulas import compose
from ._norm_formula import check_shapes
from ._ops import register_fake
from ._options import (
    Norm,
    Options,
    Rounding,
    Tensors,
    backward_options,
    compute_dtype,
    default_ndim,
    machine_eps,
    normalized_ndim,
    op_name,
)
from ._quantize import (
    BLOCK,
    Convention,
    QuantizedNorm,
    Rule,
    Scheme,
    checked_rule,
    padded_rows,
    quantize,
)
from ._routes import _cast, _distinct, check_alone, warn_of_missing_kernel
from .functional import _backward

Given = tuple[Any, ...]  # the arguments of checked_rule after `scale`


class Call(NamedTuple):
    """The arguments of a call that are not tensors, checked."""

    options: Options
    rule: Rule
    keep_output: bool


def run(
    op: Callable[..., Any], tensors: Tensors, options: Options, given: Given, keep_output: bool
) -> QuantizedNorm:
    """Check a call of the public function ``op``, and choose its route."""
    if has_torch_function(tensors):
        return _override(op, tensors, options, given, keep_output)
    name = op.__name__
    check_rows(name, "input", tensors[0])
    if tensors[1] is not None:
        check_rows(name, "residual", tensors[1])
    for each, parameter in zip(("weight", "bias"), tensors[2:4], strict=True):
        if parameter is not None:
            check_tensor(name, each, parameter)
    rule = checked_rule(name, tensors[4], *given)
    check_bools(name, keep_output=keep_output)
    norm_tensors = (*tensors[:4], None)
    options = checked(name, options, norm_tensors)
    call = Call(options, rule, keep_output)
    if is_autocast(tensors[0]):
        tensors = (*_cast(norm_tensors)[:4], tensors[4])
    if is_dynamo_compiling():
        tensors = (*_distinct((*tensors[:4], None))[:4], tensors[4])
    if open_blocks or is_transformed() or is_recording():
        return _composed(tensors, call)
    differentiates = any(t is not None and t.requires_grad for t in tensors[:4])
    if torch.is_grad_enabled() and differentiates:
        results: Any = _QuantizedFunction.apply(*tensors, call)  # type: ignore[no-untyped-call]
    else:
        results = _forward(tensors, call, False)[:4]
    return QuantizedNorm(*results)


def _override(
    op: Callable[..., Any], tensors: Tensors, options: Options, given: Given, keep_output: bool
) -> QuantizedNorm:
    """Let ``__torch_function__`` of a tensor, or of the active mode, take the call.

    It sees a function that returns a plain tuple. PyTorch's default rebuilds the result from its
    type and an iterator, which does not work for a NamedTuple.
    """

    @functools.wraps(op)
    def as_tuple(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(op(*args, **kwargs))

    names = "scheme", "dtype", "convention", "power_of_two", "scale_dtype", "scale_layout"
    values: dict[str, Any] = dict(zip(names, given, strict=True))
    values |= {name: getattr(options, name) for name in Options._fields}
    values |= dict(zip(("input", "residual", "weight", "bias", "scale"), tensors, strict=True))
    values["keep_output"] = keep_output
    wanted = {name: values[name] for name in inspect.signature(op).parameters}
    return QuantizedNorm(*handle_torch_function(as_tuple, tensors, **wanted))


# quantized, scale, output, sum, stats
_Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _forward(tensors: Tensors, call: Call, save_stats: bool) -> _Results:
    """The results of the kernel. Without a kernel, those of the formula, without statistics."""
    options, rule, keep_output = call
    _, residual, weight, bias, scale = tensors
    assert options.eps is not None
    try:
        quantized, scales, output, sum, stats = torch.ops.fused_op.norm_quantized.default(
            options.norm,
            *tensors,
            normalized_ndim(options, weight, bias),
            options.eps,
            options.zero_centered,
            options.rounding,
            options.out_dtype,
            options.residual_dtype,
            *rule,
            keep_output,
            save_stats,
        )
    except KernelError as error:
        warn_of_missing_kernel(error)
        with torch.no_grad():
            return *_composed(tensors, call), None
    if scale is not None:
        scales = scale.reciprocal() if rule.convention == "te" else scale.detach()
    return (
        quantized,
        scales,
        output if keep_output else None,
        sum if residual is not None else None,
        stats if save_stats else None,
    )


def _composed(tensors: Tensors, call: Call) -> QuantizedNorm:
    """The call in PyTorch operations."""
    options, rule, keep_output = call
    input, residual, weight, bias, scale = tensors
    norm_tensors = input, residual, weight, bias, None
    if not is_dynamo_compiling():
        check_alone(norm_tensors, options)
    if input.dtype == torch.float64:
        raise RuntimeError(
            f"{op_name(options.norm, residual is not None)}_quantized: input must be float16, "
            f"bfloat16 or float32 where the output is quantised, got {input.dtype}"
        )
    outputs = compose(norm_tensors, options)
    output, sum = outputs if isinstance(outputs, tuple) else (outputs, None)
    output = output.contiguous()
    with torch.no_grad():
        ndim = normalized_ndim(options, weight, bias)
        quantized, scales = quantize(output, ndim, scale, rule)
    if keep_output:
        return QuantizedNorm(quantized, scales, output, sum)
    placeholder = output + (math.nan - output).detach() if output.requires_grad else None
    return QuantizedNorm(quantized, scales, placeholder, sum)


class _QuantizedFunction(torch.autograd.Function):
    """The op. The gradient of its output is that of the norm."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        call: Call,
    ) -> Any:
        options = call.options
        tensors = input, residual, weight, bias, scale
        quantized, scales, output, sum, stats = _forward(tensors, call, True)
        if output is None:
            dtype = options.out_dtype or input.dtype
            output = input.new_full((1,), math.nan, dtype=dtype).expand(input.shape)
        x = input if sum is None else sum
        ctx.save_for_backward(x, weight, None, stats, None)
        ctx.options = backward_options((input, residual, weight, bias, None), options, False)
        ctx.mark_non_differentiable(quantized, scales)
        ctx.set_materialize_grads(False)
        return quantized, scales, output, sum

    @staticmethod
    def backward(
        ctx: Any,
        _quantized: Tensor | None,
        _scale: Tensor | None,
        grad_output: Tensor | None,
        grad_sum: Tensor | None = None,
    ) -> Any:
        gradients = _backward(ctx, grad_output, grad_sum, ctx.needs_input_grad[:4])
        return *gradients, None, None


def _norm_quantized(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    output_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    scheme: Scheme,
    dtype: torch.dtype,
    convention: Convention,
    power_of_two: bool,
    scale_dtype: torch.dtype,
    transposed: bool,
    keep_output: bool,
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of the op, without data."""
    ndim = normalized_ndim or default_ndim(weight, bias)
    leading, shape = input.shape[: input.dim() - ndim], input.shape[input.dim() - ndim :]
    op = f"{op_name(norm, residual is not None)}_quantized"
    unrecorded(lambda: check_shapes(input, residual, weight, bias, shape, f"{op}: "))
    rows, cols = math.prod(leading), math.prod(shape)
    padded = padded_rows(rows) if transposed else rows
    quantized = input.new_empty((padded, cols), dtype=dtype)[:rows].view(input.shape)
    scales, output, sum, stats = (input.new_empty(0) for _ in range(4))
    if scheme == "token":
        scales = input.new_empty((*leading, 1), dtype=scale_dtype)
    elif scheme == "block128":
        blocks = (cols + BLOCK - 1) // BLOCK
        if transposed:
            scales = input.new_empty((blocks, padded), dtype=scale_dtype)
            scales = scales[:, :rows].t().view(*leading, blocks)
        else:
            scales = input.new_empty((*leading, blocks), dtype=scale_dtype)
    if keep_output:
        output = input.new_empty(input.shape, dtype=output_dtype or input.dtype)
    if residual is not None:
        sum = input.new_empty(input.shape, dtype=sum_dtype or residual.dtype)
    if save_stats:
        count = 2 if norm == "layer_norm" else 1
        stats = input.new_empty((count, rows), dtype=compute_dtype(input))
    return quantized, scales, output, sum, stats


register_fake("norm_quantized", _norm_quantized)


def quantized_twin(op: Callable[..., QuantizedNorm]) -> Callable[..., QuantizedNorm]:
    """The op in plain PyTorch operations."""
    signature = inspect.signature(op)
    norm: Norm = "layer_norm" if "layer" in op.__name__ else "rms_norm"

    @functools.wraps(op)
    def twin(*args: Any, **kwargs: Any) -> QuantizedNorm:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {"residual": None, "bias": None, "residual_dtype": None} | bound.arguments
        fields = {name: values[name] for name in Options._fields if name in values}
        tensors = tuple(values[name] for name in ("input", "residual", "weight", "bias", "scale"))
        given = (values[name] for name in (
            "scheme", "dtype", "convention", "power_of_two", "scale_dtype", "scale_layout"
        ))  # fmt: skip
        options = Options(norm, **fields)
        if options.eps is None:
            options = options._replace(eps=machine_eps(values["input"]))
        rule = checked_rule(op.__name__, values["scale"], *given)
        return _composed(tensors, Call(options, rule, values["keep_output"]))

    twin.__doc__ = f"Twin of :func:`fused_op.{op.__name__}`."
    return twin
