"""The dispatcher's ops: calls of them, and their results without data.

Compilers need only the shapes and dtypes of results. The schemas are in ``csrc/dispatcher.cpp``,
the meaning of arguments and results in ``csrc/fused_op.h``. A result that was not asked for has no
elements.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ._contexts import unrecorded
from ._norm_formula import check_shapes
from ._options import (
    BackwardOptions,
    BackwardTensors,
    ForwardResults,
    Gradients,
    Norm,
    Options,
    Rounding,
    Tensors,
    Wanted,
    compute_dtype,
    default_ndim,
    machine_eps,
    normalized_ndim,
    op_name,
    shares_gradient,
)


def norm_forward(tensors: Tensors, options: Options, save_stats: bool) -> ForwardResults:
    """``fused_op_cuda.norm_forward`` by the dispatcher, which dynamo can trace."""
    input, _, weight, bias, _ = tensors
    results: ForwardResults = torch.ops.fused_op.norm_forward.default(
        options.norm,
        *tensors,
        normalized_ndim=normalized_ndim(options, weight, bias),
        eps=machine_eps(input) if options.eps is None else options.eps,
        zero_centered=options.zero_centered,
        rounding=options.rounding,
        dropout_p=options.dropout_p,
        output_dtype=options.out_dtype,
        sum_dtype=options.residual_dtype,
        save_stats=save_stats,
    )
    return results


def norm_backward(tensors: BackwardTensors, options: BackwardOptions, wanted: Wanted) -> Gradients:
    """``fused_op_cuda.norm_backward`` by the dispatcher, which dynamo can trace."""
    gradients: Gradients = torch.ops.fused_op.norm_backward.default(
        options.norm,
        *tensors,
        normalized_ndim=options.normalized_ndim,
        zero_centered=options.zero_centered,
        rounding=options.rounding,
        dropout_p=options.dropout_p,
        x_is_output=options.x_is_output,
        input_dtype=options.input_dtype,
        residual_dtype=options.residual_dtype,
        param_dtype=options.param_dtype,
        wanted=wanted,
    )
    return gradients


def _norm_forward(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    dropout_p: float,
    output_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    ndim = normalized_ndim or default_ndim(weight, bias)
    shape = input.shape[max(input.dim() - ndim, 0) :]
    op = op_name(norm, residual is not None)
    unrecorded(lambda: check_shapes(input, residual, weight, bias, shape, f"{op}: "))
    rows = math.prod(input.shape[: input.dim() - ndim])
    count = 2 if norm == "layer_norm" else 1
    sum = input.new_empty(0)
    if residual is not None:
        sum = input.new_empty(input.shape, dtype=sum_dtype or residual.dtype)
    stats = input.new_empty(0)
    if save_stats:
        stats = input.new_empty((count, rows), dtype=compute_dtype(input))
    output = input.new_empty(input.shape, dtype=output_dtype or input.dtype)
    if norm == "rms_norm" and residual is None and keeps_format(input):
        output = output.contiguous(memory_format=suggest_memory_format(input))
    return output, sum, stats


def keeps_format(input: Tensor) -> bool:
    """Whether the RMS norm of this input is channels-last like it, as in PyTorch."""
    if input.dim() not in (4, 5):
        return False
    return unrecorded(suggest_memory_format, input) != torch.contiguous_format


def _norm_backward(
    norm: Norm,
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    rng_state: Tensor | None,
    normalized_ndim: int,
    zero_centered: bool,
    rounding: Rounding,
    dropout_p: float,
    x_is_output: bool,
    input_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    param_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = x.shape[x.dim() - normalized_ndim :]
    shared = shares_gradient(dropout_p, input_dtype, residual_dtype)
    input, residual, *parameters = wanted

    def empty(is_wanted: bool, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        return x.new_empty(shape if is_wanted else 0, dtype=dtype if is_wanted else x.dtype)

    return (
        empty(input or (shared and residual), x.shape, input_dtype),
        empty(residual and not shared, x.shape, residual_dtype),
        empty(parameters[0], shape, param_dtype),
        empty(parameters[1], shape, param_dtype),
    )


def _dropout_state(like: Tensor, on_device: bool) -> Tensor:
    device = like.device if on_device or like.is_meta else torch.device("cpu")
    return like.new_empty(2, dtype=torch.int64, device=device)


def _dropout_states(
    info: Any, in_dims: tuple[int, None], like: Tensor, on_device: bool
) -> tuple[Tensor, int]:
    """A state for each sample: vmap calls this only with ``randomness="different"``."""
    draw = torch.ops.fused_op.dropout_state.default
    return torch.stack([draw(one, on_device) for one in like.unbind(in_dims[0])]), 0


def check_one_device(op: str, arguments: dict[str, Any]) -> None:
    """Check that the tensors among the arguments, by name, are where the first of them is."""
    (first, expected), *others = (
        (name, value.device) for name, value in arguments.items() if isinstance(value, Tensor)
    )
    for name, device in others:
        if device != expected:
            raise RuntimeError(
                f"{op}: {name}: Tensor on device {device} is not on the expected device {expected} "
                f"of {first}"
            )


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Tell the dispatcher the results of an op without data: ``fake``, for tensors of one device.

    The dispatcher also calls it where one tensor of a call is on the meta device. Its results would
    then be memory that nobody writes.
    """
    names = list(inspect.signature(fake).parameters)

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        given.pop("rng_state", None)  # of a call on a GPU, it may be on the CPU
        check_one_device(f"fused_op::{name}", given)
        return fake(*args, **kwargs)

    torch.library.register_fake(f"fused_op::{name}", checked)


def register_rules() -> None:
    """Give the ops their rules for DTensor, as soon as there can be one: importing it is slow.

    Not by ``sys.modules``: torch.compile would look at each of thousands of modules.
    """
    if hasattr(torch.distributed, "tensor"):
        from . import _dtensor as _dtensor


def register_per_sample_rules() -> None:
    """As ``register_rules``, for the ExpandedWeights of per-sample gradients."""
    if hasattr(torch.nn.utils, "_expanded_weights"):
        from . import _per_sample as _per_sample


register_fake("norm_forward", _norm_forward)
register_fake("norm_backward", _norm_backward)
register_fake("dropout_state", _dropout_state)
torch.library.register_vmap("fused_op::dropout_state", _dropout_states)
