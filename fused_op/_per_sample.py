"""Per-sample gradients, by PyTorch's ``call_for_per_sample_grads``, of the public functions.

It replaces parameters by ExpandedWeights, and a registry tells what a function does with those.
``_ops.register_per_sample_rules`` imports this file once they can exist: importing them is slow.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils._expanded_weights import expanded_weights_impl, expanded_weights_utils

from . import functional, torch_functional
from ._arguments import checked
from ._formulas import compose
from ._norm_formula import Affine, rounded
from ._options import Norm, Options, Tensors
from ._philox import dropout_state
from ._routes import check_alone

_utils: Any = expanded_weights_utils  # without annotations


class _PerSample:
    """The formula of ``_norm_formula.compute``, whose core is the kernel and then ``_Affine``."""

    @staticmethod
    def apply(keywords: tuple[str, ...], function: Any, *values: Any) -> Any:
        args, kwargs = _utils.standard_kwargs(keywords, values)
        expanded = _by_name(function, args, kwargs)
        given = _by_name(function, *_utils._check_and_unexpand_args(function, args, kwargs))
        name, input, residual = function.__name__, given.pop("input"), given.pop("residual", None)
        weight, bias = given.pop("weight"), given.pop("bias", None)
        norm: Norm = "layer_norm" if "layer_norm" in name else "rms_norm"
        options = Options(norm, **given)
        tensors: Tensors = input, residual, weight, bias, None
        options = checked(name, options, tensors)
        if options.dropout_p:
            tensors = input, residual, weight, bias, dropout_state(input)
        check_alone(tensors, options)

        def normalize(norm: Norm, x: Tensor, ndim: int, eps: float, affine: Affine) -> Tensor:
            if x.dim() == ndim:
                raise RuntimeError(
                    f"{name}: a per-sample gradient needs a batch dimension, but all dimensions "
                    f"of input, of size{list(x.shape)}, are normalized"
                )
            kernel: Any = getattr(functional, f"fused_{norm}")
            rows = kernel(x, eps=eps, normalized_shape=x.shape[x.dim() - ndim :])
            rows = rounded(rows, affine.round_to)
            constants = (None if t is None else t.detach() for t in affine[:2])
            output: Tensor = _Affine.apply(  # type: ignore[no-untyped-call]
                rows, expanded["weight"], expanded.get("bias"), *constants
            )
            return output

        return compose(tensors, options, normalize)


class _Affine(torch.autograd.Function):
    """``rows * factor + offset``, where weight and bias get their gradients for each sample."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        factor: Tensor | None,
        offset: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, factor)
        ctx.parameters = weight, bias
        output = rows.clone() if factor is None else rows * factor
        return output if offset is None else output.add_(offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, factor = ctx.saved_tensors
        weight, bias = ctx.parameters
        _utils.set_grad_sample_if_exists(weight, lambda p: _sum_samples(grad * rows, p))
        _utils.set_grad_sample_if_exists(bias, lambda p: _sum_samples(grad, p))
        grad_rows = grad if factor is None else grad * factor
        return (grad_rows if ctx.needs_input_grad[0] else None), None, None, None, None


def _sum_samples(terms: Tensor, parameter: Tensor) -> Tensor:
    sums: Tensor = _utils.sum_over_all_but_batch_and_last_n(terms, parameter.dim())
    return sums.to(parameter.dtype)


def _by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_register: Any = expanded_weights_impl.implements_per_sample_grads
for _function in (
    functional.fused_layer_norm,
    functional.fused_rms_norm,
    functional.fused_add_layer_norm,
    functional.fused_add_rms_norm,
    torch_functional.layer_norm,
    torch_functional.rms_norm,
):
    _register(_function)(_PerSample)
