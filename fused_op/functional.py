"""The public functions, their autograd Function, and the route that a call takes.

A call that the kernels can take as it is goes straight to the binding (``fused_op_cuda``); with a
gradient to record, through ``_NormFunction``. ``torch.compile`` sees the same Function over the
dispatcher ops ``torch.ops.fused_op``, and so do fake, sharded and lazily negated tensors. Function
transforms and forward-mode AD take the composite formula of ``reference.py``, and so does every
call while the kernels are ``disabled()``. ``torch.jit.trace`` records PyTorch's own norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

import fused_op_cuda
from fused_op_cuda import KernelError

from . import reference
from ._arguments import (
    as_float,
    check_bools,
    check_options,
    check_tensor,
    count_normalized,
    op_name,
    rms_eps,
)
from ._disabled import open_blocks
from ._main_grad import add_to_main_grad
from ._ops import (
    param_grad_dtype,
    register_per_sample_rules,
    register_rules,
    shares_gradient,
)
from ._philox import dropout_state
from ._recorded import record
from ._routes import (
    Call,
    Tensors,
    cast,
    check_alone,
    composite,
    distinct,
    is_differentiated,
    is_transformed,
    op_options,
    raw_forward,
    warn_of_missing_kernel,
)
from .reference import Norm, Shape

_Result = TypeVar("_Result")


def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm: ``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; other layouts are copied once.
        weight: ``normalized_shape``, in any of these dtypes; ``None`` means 1. The kernels read
            that of ``input``, and float32 beside a 16-bit input; others are converted to the dtype
            of the arithmetic in each call, and the gradient back.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.
        normalized_shape: what is normalised together; default: the shape of ``weight`` or ``bias``,
            else the last dimension.
        zero_centered: multiply by ``1 + weight``, for weights that are kept minus one, as Gemma's
            and those of Megatron's LayerNorm1p. The 1 is added in the precision of the arithmetic.
            ``weight=None`` means a factor of 1 here too.
        dropout_p: probability with which an element of the output becomes 0; the others are
            divided by ``1 - dropout_p``. It is rounded to a multiple of ``2^-16`` first, and to 1
            only if it is 1. The mask follows ``torch.manual_seed``; it is made in the same kernel
            and again in backward, and never stored.
        training: False: no dropout.
        out_dtype: dtype of the output: float32 for a 16-bit input, any but float64 for float32;
            default: that of ``input``.
        memory_efficient: save the output for backward instead of the input, which needs less memory
            where the output is kept anyway, as by a linear layer behind it. Backward takes the
            normalised values from the output, by a division by the weight: they carry the rounding
            of the output's dtype, and a weight closer to zero than 1e-5 is taken for 1e-5: not for
            weights that start at 0. There is no second derivative. Not together with dropout.

    Returns:
        A contiguous tensor of the shape of ``input``, in ``out_dtype``. The arithmetic is in
        float32 (float64 for float64) and the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument is of the wrong kind.
        ValueError: ``eps`` is NaN or infinite, or ``dropout_p`` is not between 0 and 1.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    if has_torch_function_variadic(input, weight, bias):
        return _overridden(
            fused_layer_norm,
            *(input, weight, bias, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
            dropout_p=dropout_p,
            training=training,
            out_dtype=out_dtype,
            memory_efficient=memory_efficient,
        )
    ndim = 0
    if normalized_shape is not None:
        ndim = count_normalized("fused_layer_norm", input, normalized_shape)
    output: Tensor = _norm(
        "layer_norm", input, None, weight, bias, eps, ndim, zero_centered, dropout_p, training,
        out_dtype, None, memory_efficient,
    )  # fmt: skip
    return output


def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm: ``input / sqrt(mean(input²) + eps) * weight`` over the last dimensions.

    Args:
        input: as in :func:`fused_layer_norm`.
        weight: as in :func:`fused_layer_norm`.
        eps: added to the mean square before the root; finite; ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), as in ``torch.nn.functional.rms_norm``.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.
        dropout_p: as in :func:`fused_layer_norm`.
        training: as in :func:`fused_layer_norm`.
        out_dtype: as in :func:`fused_layer_norm`.
        memory_efficient: as in :func:`fused_layer_norm`.

    Returns:
        As :func:`fused_layer_norm`, but channels-last for a channels-last input, as PyTorch's.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    if has_torch_function_variadic(input, weight):
        return _overridden(
            fused_rms_norm,
            *(input, weight, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
            dropout_p=dropout_p,
            training=training,
            out_dtype=out_dtype,
            memory_efficient=memory_efficient,
        )
    ndim = 0
    if normalized_shape is not None:
        ndim = count_normalized("fused_rms_norm", input, normalized_shape)
    eps = rms_eps("fused_rms_norm", input, eps)
    output: Tensor = _norm(
        "rms_norm", input, None, weight, None, eps, ndim, zero_centered, dropout_p, training,
        out_dtype, None, memory_efficient,
    )  # fmt: skip
    return output


def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: as in :func:`fused_layer_norm`.
        residual: of the shape and device of ``input``, in its dtype or in float32.
        weight: as in :func:`fused_layer_norm`.
        bias: as in :func:`fused_layer_norm`.
        eps: as in :func:`fused_layer_norm`.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.
        dropout_p: probability with which an element of ``input`` becomes 0 before the addition; the
            others are divided by ``1 - dropout_p``. As in :func:`fused_layer_norm` otherwise.
        training: False: no dropout.
        residual_dtype: dtype of the sum, the new residual: that of ``residual`` (the default) or
            float32. Beside a 16-bit ``input``, ``residual`` may be float32 already.
        out_dtype: as in :func:`fused_layer_norm`.

    Returns:
        ``(output, sum)``, both of the shape of ``input``. The sum is rounded to its dtype, and the
        statistics are those of the rounded sum. The gradients of ``input`` and ``residual`` may be
        one tensor.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    if has_torch_function_variadic(input, residual, weight, bias):
        return _overridden(
            fused_add_layer_norm,
            *(input, residual, weight, bias, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
            dropout_p=dropout_p,
            training=training,
            residual_dtype=residual_dtype,
            out_dtype=out_dtype,
        )
    check_tensor("fused_add_layer_norm", "residual", residual)
    ndim = 0
    if normalized_shape is not None:
        ndim = count_normalized("fused_add_layer_norm", input, normalized_shape)
    outputs: tuple[Tensor, Tensor] = _norm(
        "layer_norm", input, residual, weight, bias, eps, ndim, zero_centered, dropout_p, training,
        out_dtype, residual_dtype,
    )  # fmt: skip
    return outputs


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: as in :func:`fused_layer_norm`.
        residual: as in :func:`fused_add_layer_norm`.
        weight: as in :func:`fused_layer_norm`.
        eps: as in :func:`fused_rms_norm`.
        normalized_shape: as in :func:`fused_layer_norm`.
        zero_centered: as in :func:`fused_layer_norm`.
        dropout_p: as in :func:`fused_add_layer_norm`.
        training: as in :func:`fused_add_layer_norm`.
        residual_dtype: as in :func:`fused_add_layer_norm`.
        out_dtype: as in :func:`fused_add_layer_norm`.

    Returns:
        As :func:`fused_add_layer_norm`.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_layer_norm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    if has_torch_function_variadic(input, residual, weight):
        return _overridden(
            fused_add_rms_norm,
            *(input, residual, weight, eps),
            normalized_shape=normalized_shape,
            zero_centered=zero_centered,
            dropout_p=dropout_p,
            training=training,
            residual_dtype=residual_dtype,
            out_dtype=out_dtype,
        )
    check_tensor("fused_add_rms_norm", "residual", residual)
    ndim = 0
    if normalized_shape is not None:
        ndim = count_normalized("fused_add_rms_norm", input, normalized_shape)
    eps = rms_eps("fused_add_rms_norm", input, eps)
    outputs: tuple[Tensor, Tensor] = _norm(
        "rms_norm", input, residual, weight, None, eps, ndim, zero_centered, dropout_p, training,
        out_dtype, residual_dtype,
    )  # fmt: skip
    return outputs


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """:func:`fused_layer_norm` with the signature of ``torch.nn.functional.layer_norm``.

    Its errors have the exception types of PyTorch's and contain their sentences.
    """
    if has_torch_function_variadic(input, weight, bias):
        return _overridden(layer_norm, input, normalized_shape, weight, bias, eps)
    ndim = count_normalized("layer_norm", input, normalized_shape)
    output: Tensor = _norm("layer_norm", input, None, weight, bias, eps, ndim)
    return output


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """:func:`fused_rms_norm` with the signature of ``torch.nn.functional.rms_norm``.

    Its errors have the exception types of PyTorch's and contain their sentences.
    """
    if has_torch_function_variadic(input, weight):
        return _overridden(rms_norm, input, normalized_shape, weight, eps)
    ndim = count_normalized("rms_norm", input, normalized_shape)
    output: Tensor = _norm(
        "rms_norm", input, None, weight, None, rms_eps("rms_norm", input, eps), ndim
    )
    return output


class _NormFunction(torch.autograd.Function):
    """Every op as one differentiable function; without a residual it returns the output alone.

    The classic form, with ``ctx`` in forward: ``setup_context`` costs 45 us a call, and a ``jvp``
    would break ``torch.compile(fullgraph=True)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rng_state: Tensor | None,
        call: Call,
    ) -> Any:
        return _forward(ctx, input, residual, weight, bias, rng_state, call)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        input, residual, weight, bias = _backward(
            ctx, grad_output, grad_sum, ctx.needs_input_grad[:4]
        )
        return input, residual, weight, bias, None, None


class FusedLayerNormFunction(torch.autograd.Function):
    """Layer norm as ``FusedLayerNormFunction.apply(input, weight, bias, eps)``.

    :func:`fused_layer_norm` means the same; it is faster without a gradient, and knows autocast,
    ``torch.func`` and tensor subclasses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        """Run the kernel and save what backward reads."""
        register_rules()
        call: Call = ("layer_norm", 0, eps, False, 0.0, None, None, False, False)
        return _forward(ctx, input, None, weight, bias, None, call)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        """Compute the gradients of those of input, weight and bias that need one."""
        input, *parameters = ctx.needs_input_grad
        wanted = (input, False, *parameters[:2], False, False)[:4]
        grad_input, _, *gradients = _backward(ctx, grad_output, None, wanted)
        return (grad_input, *gradients, None)[: len(ctx.needs_input_grad)]


def _forward(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    call: Call,
) -> Any:
    (
        norm, ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype,
        memory_efficient, main_grad,
    ) = call  # fmt: skip
    output, sum, stats = raw_forward()(
        norm, input, residual, weight, bias, rng_state,
        ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype, any(ctx.needs_input_grad),
    )  # fmt: skip
    affine = weight if weight is not None else bias
    x_is_output = memory_efficient and stats is not None
    x = output if x_is_output else input if residual is None else sum
    ctx.save_for_backward(x, weight, bias if x_is_output else None, stats, rng_state)
    ctx.constants = (
        norm,
        ndim or (1 if affine is None else affine.dim()),
        eps,
        zero_centered,
        dropout_p,
        x_is_output,
        # Themselves: what is saved comes back without attributes from hooks and checkpointing.
        (weight, bias) if main_grad else None,
        input.dtype,
        None if residual is None else residual.dtype,
        param_grad_dtype(input, weight, bias),
        output_dtype or input.dtype,
    )
    ctx.set_materialize_grads(False)
    return output if residual is None else (output, sum)


def _backward(
    ctx: Any,
    grad_output: Tensor | None,
    grad_sum: Tensor | None,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    x, weight, bias, stats, rng_state = ctx.saved_tensors
    (
        norm, ndim, eps, zero_centered, dropout_p, x_is_output, parameters,
        input_dtype, residual_dtype, param_dtype, output_dtype,
    ) = ctx.constants  # fmt: skip
    shared = shares_gradient(dropout_p, input_dtype, residual_dtype)
    if grad_output is None:
        if shared:
            return (grad_sum if wanted[0] else None, grad_sum if wanted[1] else None, None, None)
        grad_output = torch.zeros_like(x, dtype=output_dtype)
    backward: Any = fused_op_cuda.norm_backward
    if stats is None or open_blocks:  # no kernel in forward, or none now
        backward, stats = reference.normalize_backward, eps
    elif is_dynamo_compiling():
        backward = torch.ops.fused_op.norm_backward.default
    elif is_differentiated(grad_output, grad_sum):
        # Means are computed again from x, as PyTorch operations on all that the gradient depends
        # on.
        backward, stats = reference.normalize_backward, eps
    if x_is_output and backward is reference.normalize_backward:
        raise RuntimeError(
            f"fused_{norm}: with memory_efficient=True the input is not kept, so that its "
            "gradient can neither be differentiated again nor be computed by other means"
        )

    def gradients(backward: Any, stats: Any) -> Any:
        arguments = (
            norm, grad_output, grad_sum, x, weight, bias, stats, rng_state, ndim, zero_centered,
            dropout_p, x_is_output, input_dtype, residual_dtype, param_dtype, wanted,
        )  # fmt: skip
        if parameters is not None:
            return add_to_main_grad(backward, arguments, *parameters)
        return backward(*arguments)

    try:
        grad_x, grad_residual, grad_weight, grad_bias = gradients(backward, stats)
    except KernelError as error:
        if x_is_output:
            raise
        warn_of_missing_kernel(error)
        found = gradients(reference.normalize_backward, eps)
        grad_x, grad_residual, grad_weight, grad_bias = found
    # One tensor for both, as torch.add does: autograd copies where it would be stored twice.
    return (
        grad_x if wanted[0] else None,
        (grad_x if shared else grad_residual) if wanted[1] else None,
        grad_weight if wanted[2] else None,
        grad_bias if wanted[3] else None,
    )


# Function.apply without its Python half, which inspects the call for setup_context and functorch:
# neither concerns _NormFunction here. Semi-private, hence the fallback.
_apply = getattr(super(torch.autograd.Function, _NormFunction), "apply", _NormFunction.apply)


def _norm(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int,
    zero_centered: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    output_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
    main_grad: bool = False,
) -> Any:
    """Take one of the routes. ``normalized_ndim`` 0 stands for the default of normalized_shape."""
    if type(eps) is not float:
        eps = as_float(op_name(norm, residual), "eps", eps)
    if zero_centered is not False or training is not True:
        op = op_name(norm, residual)
        check_bools(op, zero_centered=zero_centered, training=training)
    rng_state = None
    if (
        output_dtype is not None
        or sum_dtype is not None
        or memory_efficient is not False
        or type(dropout_p) is not float  # a tensor must not be compared
        or dropout_p != 0.0
    ):
        op = op_name(norm, residual)
        dropout_p = check_options(op, dropout_p, output_dtype, sum_dtype, memory_efficient)
        if not training:
            dropout_p = 0.0
        if dropout_p:
            rng_state = dropout_state(input)
    # Here and in what calls this, arguments go one by one: unpacked tuples took a third of the time
    # of a call without a gradient, which ends at the first return.
    is_traced = is_dynamo_compiling()
    if not is_traced:
        route: Any = check_alone if open_blocks else fused_op_cuda.norm
        try:
            result = route(
                norm, input, residual, weight, bias, rng_state,
                normalized_ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype,
            )  # fmt: skip
        except KernelError as error:
            warn_of_missing_kernel(error)
            result = fused_op_cuda.COMPOSITE
        if type(result) is not int:
            return result
    tensors = input, residual, weight, bias, rng_state
    call = (
        norm, normalized_ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype,
        memory_efficient, main_grad,
    )  # fmt: skip
    if is_traced:
        return _traced(tensors, call)
    if result == fused_op_cuda.CAST:
        tensors = cast(*tensors)
        try:
            result = route(norm, *tensors, *op_options(call))
        except KernelError as error:
            warn_of_missing_kernel(error)
            result = fused_op_cuda.COMPOSITE
        if type(result) is not int:
            return result
    if result == fused_op_cuda.AUTOGRAD:
        return _apply(*tensors, call)
    if reference.is_recording() or torch.onnx.is_in_onnx_export():
        return record(tensors, call)
    if result == fused_op_cuda.DISPATCH or main_grad:  # which the Function alone knows of
        return _dispatch(tensors, call)
    return composite(tensors, call)


def norm_to_main_grad(
    norm: Norm, module: Any, input: Tensor, residual: Tensor | None, bias: Tensor | None
) -> Any:
    """The call of a module of ``modules.py`` whose parameters' gradients go to ``main_grad``."""
    op = op_name(norm, residual)
    ndim = count_normalized(op, input, module.normalized_shape)
    eps = module.eps if norm == "layer_norm" else rms_eps(op, input, module.eps)
    return _norm(
        *(norm, input, residual, module.weight, bias, eps, ndim, module.zero_centered),
        *(module.dropout_p, module.training, module.out_dtype, module.residual_dtype),
        *(module.memory_efficient, True),
    )


def _traced(tensors: Tensors, call: Call) -> Any:
    """The route of a call that is being compiled."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        tensors = cast(*tensors)
    if is_transformed():
        return composite(tensors, call)
    return _dispatch(distinct(tensors), call)


def _dispatch(tensors: Tensors, call: Call) -> Any:
    """Through the dispatcher, where each kind of tensor finds its own implementation."""
    register_rules()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _NormFunction.apply(*tensors, call)  # type: ignore[no-untyped-call]
    try:
        output, sum, _ = raw_forward()(call[0], *tensors, *op_options(call), False)
    except KernelError as error:
        warn_of_missing_kernel(error)
        return composite(tensors, call)
    return output if tensors[1] is None else (output, sum)


def _overridden(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Ask __torch_function__ of the tensors among args, or of the mode that is on."""
    register_per_sample_rules()
    result: _Result = handle_torch_function(function, args, *args, **kwargs)
    return result
