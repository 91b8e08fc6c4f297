"""Python arguments that are not tensors: checked, and converted to what the ops take.

Tensors are checked in ``csrc/checks.cpp``, once for every caller.
"""

from __future__ import annotations

import contextlib
import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state

from ._contexts import unrecorded
from ._options import Options, Tensors, machine_eps
from ._sizes import differ

KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def checked(op: str, options: Options, tensors: Tensors) -> Options:
    """The options of a call, in the types that the ops take. Raises the error for a wrong one."""
    eps, shape, training = options.eps, options.normalized_shape, options.training
    input, residual, *_ = tensors
    if residual is not None:
        check_tensor(op, "residual", residual)
    if shape is not None:
        shape = as_normalized_shape(op, input, shape)
    if eps is None and options.norm == "rms_norm":
        check_tensor(op, "input", input)
        eps = machine_eps(input)
    if type(eps) is not float:
        eps = as_float(op, "eps", eps)
    check_bools(op, zero_centered=options.zero_centered, training=training)
    check_rounding(op, options.rounding)
    dropout_p = check_options(
        *(op, options.dropout_p, options.out_dtype, options.residual_dtype),
        options.memory_efficient,
    )
    return Options(  # dynamo of torch 2.7 cannot trace _replace
        norm=options.norm,
        eps=eps,
        normalized_shape=shape,
        zero_centered=options.zero_centered,
        rounding=options.rounding,
        dropout_p=dropout_p if training else 0.0,
        training=training,
        out_dtype=options.out_dtype,
        residual_dtype=options.residual_dtype,
        memory_efficient=options.memory_efficient,
        main_grad=options.main_grad,
        is_checked=True,
    )


def as_float(op: str, name: str, value: Any) -> float:
    if isinstance(value, (float, int)):  # dynamic numbers have no attributes
        return float(value)
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.requires_grad
    if not is_number:
        raise TypeError(f"{op}: argument '{name}' must be float, not {type(value).__name__}")
    return float(value)


def as_int(op: str, name: str, value: Any) -> Any:
    """An int, also out of NumPy; a size that only the data decides stays what it is."""
    if not isinstance(value, (bool, Tensor)):
        if isinstance(value, (int, torch.SymInt)):
            return value
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{op}: argument '{name}' must be int, not {type(value).__name__}")


def check_bools(op: str, **values: Any) -> None:
    """Accept only bool, as PyTorch does: not 0 and 1, and not NumPy's bool."""
    for name, value in values.items():
        kind = type(value)
        if kind is not bool:  # NumPy's bool has the same name
            found = kind.__name__
            if kind.__module__ != "builtins":
                found = f"{kind.__module__}.{found}"
            raise TypeError(f"{op}: argument '{name}' must be bool, not {found}")


def check_rounding(op: str, rounding: Any) -> None:
    if not isinstance(rounding, str):
        raise TypeError(f"{op}: argument 'rounding' must be str, not {type(rounding).__name__}")
    if rounding not in ("once", "before_weight"):
        raise ValueError(f"{op}: rounding must be 'once' or 'before_weight', got {rounding!r}")


def check_options(
    op: str, dropout_p: Any, output_dtype: Any, sum_dtype: Any, memory_efficient: Any
) -> float:
    """``dropout_p`` as a float. Checks values of unusual types."""
    check_bools(op, memory_efficient=memory_efficient)
    for name, dtype in (("out_dtype", output_dtype), ("residual_dtype", sum_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{op}: argument '{name}' must be torch.dtype, not {type(dtype).__name__}"
            )
    p = as_float(op, "dropout_p", dropout_p)
    if not 0 <= p <= 1:  # also refuses NaN
        raise ValueError(f"{op}: dropout probability has to be between 0 and 1, but got {p}")
    if memory_efficient and p > 0:
        raise ValueError(
            f"{op}: memory_efficient=True keeps the output for backward, and dropout "
            "drops elements of it: use one of them"
        )
    return p


def check_extras(
    op: str,
    rounding: Any = "once",
    dropout_p: Any = 0.0,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    memory_efficient: Any = False,
    **bools: Any,
) -> None:
    """Refuse arguments of a module that each of its calls would refuse."""
    check_bools(op, **bools)
    check_rounding(op, rounding)
    check_options(op, dropout_p, out_dtype, residual_dtype, memory_efficient)
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if dtype is not None and dtype not in KERNEL_DTYPES:
            raise RuntimeError(
                f"{op}: {name} must be float16, bfloat16, float32 or float64, got {dtype}"
            )


def check_eps(op: str, eps: Any) -> None:
    if not math.isfinite(as_float(op, "eps", eps)):
        raise ValueError(f"{op}: eps must be finite, got {eps}")


def check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: argument '{name}' must be Tensor, not {type(value).__name__}")


def check_rows(op: str, name: str, rows: Tensor) -> None:
    """Check that kernels take these rows, like ``check_rows`` in ``csrc/checks.cpp``."""
    check_tensor(op, name, rows)
    if rows.is_nested or rows.layout != torch.strided:
        found = f"{'a nested one of ' if rows.is_nested else ''}layout {rows.layout}"
        raise RuntimeError(f"{op}: {name} must be a dense (strided) tensor, got {found}")
    if rows.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(
            f"{op}: not implemented for '{rows.dtype}': {name} must be float16, bfloat16, float32 "
            "or float64"
        )
    if rows.dim() == 0:
        raise RuntimeError(f"{op}: {name} must have at least one dimension, got a 0-dim tensor")


def check_residual(op: str, residual: Tensor, input: Tensor, sum_dtype: torch.dtype | None) -> None:
    """Check that it can be added to ``input``, like ``check_residual_kind``."""
    check_rows(op, "residual", residual)
    if differ(residual.shape, input.shape):
        raise RuntimeError(
            f"{op}: residual must have the shape of input, {list(input.shape)}, "
            f"got {list(residual.shape)}"
        )
    for name, dtype, beside in (
        ("residual must have the dtype of input", residual.dtype, input.dtype),
        ("residual_dtype must be the dtype of residual", sum_dtype, residual.dtype),
    ):
        wide = torch.float32 if beside.itemsize == 2 else beside
        if dtype not in (None, beside, wide):
            or_wide = f", or {wide}" if wide != beside else ""
            raise RuntimeError(f"{op}: {name}, {beside}{or_wide}, got {dtype}")


def check_parameter(op: str, name: str, parameter: Tensor | None, cols: int) -> None:
    """Check that it has ``cols`` columns, like ``check_param_kind`` and ``check_param_shape``."""
    if parameter is None:
        return
    check_tensor(op, name, parameter)
    if parameter.layout != torch.strided:
        raise RuntimeError(
            f"{op}: {name} must be a dense (strided) tensor, got layout {parameter.layout}"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise RuntimeError(
            f"{op}: mixed dtype: expect parameter to have scalar type of Float, Half, BFloat16 or "
            f"Double, got {name} of {parameter.dtype}"
        )
    if parameter.shape != (cols,):
        raise RuntimeError(
            f"{op}: Expected {name} to be of same shape as normalized_shape, but got {name} of "
            f"shape {list(parameter.shape)} and normalized_shape = [{cols}]"
        )


def as_normalized_shape(op: str, input: Tensor, normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple. Checks that the shape of input ends in it."""
    may_record = _get_tracing_state() is not None  # under torch.jit.trace, where sizes are tensors
    if isinstance(normalized_shape, (int, torch.SymInt)) or (
        may_record and isinstance(normalized_shape, Tensor)
    ):
        normalized_shape = (normalized_shape,)
    if not isinstance(normalized_shape, (tuple, list)):
        raise TypeError(
            f"{op}: argument 'normalized_shape' must be tuple of ints, not "
            f"{type(normalized_shape).__name__}"
        )
    for size in normalized_shape:
        if not isinstance(size, (int, torch.SymInt)) and not hasattr(size, "__index__"):
            raise TypeError(
                f"{op}: argument 'normalized_shape' must be tuple of ints, but found element of "
                f"type {type(size).__name__}"
            )
    check_tensor(op, "input", input)
    shape = tuple(normalized_shape)
    if not shape:
        raise RuntimeError(
            f"{op}: Expected normalized_shape to be at least 1-dimensional, i.e., containing at "
            "least one element, but got normalized_shape = []"
        )
    if may_record:
        unrecorded(_check_ends_in, op, input, shape)
    else:
        _check_ends_in(op, input, shape)
    return shape


def _check_ends_in(op: str, input: Tensor, shape: tuple[Any, ...]) -> None:
    try:
        ends = tuple(input.shape[-len(shape) :])
    except RuntimeError as error:  # csrc/checks.cpp raises all other errors
        raise RuntimeError(
            f"{op}: input must be a dense (strided) tensor, got a nested one, which has no shape"
        ) from error
    if ends != shape:
        wanted = ", ".join(f"{size}" for size in shape)
        raise RuntimeError(
            f"{op}: Given normalized_shape=[{wanted}], expected input with shape [*, {wanted}],"
            f" but got input of size{list(input.shape)}"
        )
