"""The public functions, and the autograd Function that records them.

Each passes its call to ``run`` in ``_routes.py``, which picks a route: straight to a kernel,
through the Function below, or past both. Functions with PyTorch's signatures are in
``torch_functional.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import check_tensor
from ._ops import register_rules
from ._options import (
    Given,
    Gradients,
    Options,
    Rounding,
    Shape,
    Tensors,
    Wanted,
    backward_options,
)
from ._routes import overridable, run, run_backward, run_forward
from ._row_order import unlike_image


@overridable
def fused_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm: ``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; any other layout is copied once.
        weight: ``normalized_shape``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16
            bits, float32; any other of the four is converted in each call, and its gradient back.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.
        normalized_shape: the last dimensions, normalised together; default: the shape of ``weight``
            or ``bias``, else the last dimension.
        zero_centered: multiply by ``1 + weight``, added in the precision of the arithmetic, for
            weights stored minus one (Gemma, Megatron's LayerNorm1p). No effect without ``weight``.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_weight"``: the
            normalised values, too, as in ``weight * normalized.to(input.dtype)`` of Llama and most
            language models. The gradient of ``weight`` is then that of the rounded values; the
            rounding itself counts as the identity. No difference in float32 and float64.
        dropout_p: probability, rounded to a multiple of ``2^-16`` (to 1 only from 1), that an
            element of the output becomes 0; the others are divided by ``1 - dropout_p``. The mask
            follows ``torch.manual_seed``; backward computes it again, and nothing stores it.
        training: ``False`` turns dropout off.
        out_dtype: dtype of the output: float32 for a 16-bit input, float16 or bfloat16 for float32;
            default: that of ``input``.
        memory_efficient: save the output for backward instead of the input. This saves memory if
            the following linear layer keeps the output anyway. Backward divides it by the
            weight: the normalised values carry the rounding of the output, and a weight closer to 0
            than 1e-5 counts as 1e-5. No second derivative, no dropout, no weights that start at 0.

    Returns:
        A contiguous tensor of the shape of ``input``, in ``out_dtype``. The arithmetic is in
        float32 (float64 for float64) and the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is not finite, ``dropout_p`` is not between 0 and 1 or is combined
            with ``memory_efficient``, or ``rounding`` is neither of the two.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    given: Given = (
        "layer_norm", eps, normalized_shape, zero_centered, rounding, dropout_p, training,
        out_dtype, None, memory_efficient, False, False,
    )  # fmt: skip
    tensors = input, None, weight, bias, None
    output: Tensor = run(fused_layer_norm, _NormFunction, given, tensors)
    return output


@overridable
def fused_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm: ``input / sqrt(mean(input²) + eps) * weight`` over the last dimensions.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; any other layout is copied once.
        weight: ``normalized_shape``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16
            bits, float32; any other of the four is converted in each call, and its gradient back.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), as in ``torch.nn.functional.rms_norm``.
        normalized_shape: the last dimensions, normalised together; default: the shape of
            ``weight``, else the last dimension.
        zero_centered: multiply by ``1 + weight``, added in the precision of the arithmetic, for
            weights stored minus one (Gemma, Megatron's LayerNorm1p). No effect without ``weight``.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_weight"``: the
            normalised values, too, as in ``weight * normalized.to(input.dtype)`` of Llama and most
            language models. The gradient of ``weight`` is then that of the rounded values; the
            rounding itself counts as the identity. No difference in float32 and float64.
        dropout_p: probability, rounded to a multiple of ``2^-16`` (to 1 only from 1), that an
            element of the output becomes 0; the others are divided by ``1 - dropout_p``. The mask
            follows ``torch.manual_seed``; backward computes it again, and nothing stores it.
        training: ``False`` turns dropout off.
        out_dtype: dtype of the output: float32 for a 16-bit input, float16 or bfloat16 for float32;
            default: that of ``input``.
        memory_efficient: save the output for backward instead of the input. This saves memory if
            the following linear layer keeps the output anyway. Backward divides it by the
            weight: the normalised values carry the rounding of the output, and a weight closer to 0
            than 1e-5 counts as 1e-5. No second derivative, no dropout, no weights that start at 0.

    Returns:
        A tensor of the shape of ``input``, in ``out_dtype``: contiguous, or channels-last for a
        channels-last input, as in PyTorch. The arithmetic is in float32 (float64 for float64) and
        the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is not finite, ``dropout_p`` is not between 0 and 1 or is combined
            with ``memory_efficient``, or ``rounding`` is neither of the two.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    given: Given = (
        "rms_norm", eps, normalized_shape, zero_centered, rounding, dropout_p, training,
        out_dtype, None, memory_efficient, False, False,
    )  # fmt: skip
    tensors = input, None, weight, None, None
    output: Tensor = run(fused_rms_norm, _NormFunction, given, tensors)
    return output


@overridable
def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; any other layout is copied once.
        residual: shape and device of ``input``; its dtype, or float32 beside a 16-bit ``input``.
        weight: ``normalized_shape``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16
            bits, float32; any other of the four is converted in each call, and its gradient back.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.
        normalized_shape: the last dimensions, normalised together; default: the shape of ``weight``
            or ``bias``, else the last dimension.
        zero_centered: multiply by ``1 + weight``, added in the precision of the arithmetic, for
            weights stored minus one (Gemma, Megatron's LayerNorm1p). No effect without ``weight``.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_weight"``: the
            normalised values, too, as in ``weight * normalized.to(input.dtype)`` of Llama and most
            language models. The gradient of ``weight`` is then that of the rounded values; the
            rounding itself counts as the identity. No difference in float32 and float64.
        dropout_p: probability, rounded to a multiple of ``2^-16`` (to 1 only from 1), that an
            element of ``input`` becomes 0 before the addition; the others are divided by
            ``1 - dropout_p``. The mask follows ``torch.manual_seed``; it is never stored.
        training: ``False`` turns dropout off.
        residual_dtype: dtype of the sum: that of ``residual``, or float32 beside 16-bit rows.
        out_dtype: dtype of the output: float32 for a 16-bit input, float16 or bfloat16 for float32;
            default: that of ``input``.

    Returns:
        ``(output, sum)``, contiguous and of the shape of ``input``. The sum is rounded to its
        dtype, and the statistics are those of the rounded sum. The arithmetic is in float32
        (float64 for float64), and the output is rounded once. The gradients of ``input`` and
        ``residual`` may be one tensor.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is not finite, ``dropout_p`` not between 0 and 1, or ``rounding`` wrong.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """
    if residual is None:
        check_tensor("fused_add_layer_norm", "residual", residual)
    given: Given = (
        "layer_norm", eps, normalized_shape, zero_centered, rounding, dropout_p, training,
        out_dtype, residual_dtype, False, False, False,
    )  # fmt: skip
    tensors = input, residual, weight, bias, None
    outputs: tuple[Tensor, Tensor] = run(fused_add_layer_norm, _NormFunction, given, tensors)
    return outputs


@overridable
def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``input + residual`` in one pass, returning the sum as the new residual.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
            Rows may be strided; any other layout is copied once.
        residual: shape and device of ``input``; its dtype, or float32 beside a 16-bit ``input``.
        weight: ``normalized_shape``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16
            bits, float32; any other of the four is converted in each call, and its gradient back.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), as in ``torch.nn.functional.rms_norm``.
        normalized_shape: the last dimensions, normalised together; default: the shape of
            ``weight``, else the last dimension.
        zero_centered: multiply by ``1 + weight``, added in the precision of the arithmetic, for
            weights stored minus one (Gemma, Megatron's LayerNorm1p). No effect without ``weight``.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_weight"``: the
            normalised values, too, as in ``weight * normalized.to(input.dtype)`` of Llama and most
            language models. The gradient of ``weight`` is then that of the rounded values; the
            rounding itself counts as the identity. No difference in float32 and float64.
        dropout_p: probability, rounded to a multiple of ``2^-16`` (to 1 only from 1), that an
            element of ``input`` becomes 0 before the addition; the others are divided by
            ``1 - dropout_p``. The mask follows ``torch.manual_seed``; it is never stored.
        training: ``False`` turns dropout off.
        residual_dtype: dtype of the sum: that of ``residual``, or float32 beside 16-bit rows.
        out_dtype: dtype of the output: float32 for a 16-bit input, float16 or bfloat16 for float32;
            default: that of ``input``.

    Returns:
        ``(output, sum)``, contiguous and of the shape of ``input``. The sum is rounded to its
        dtype, and the statistics are those of the rounded sum. The arithmetic is in float32
        (float64 for float64), and the output is rounded once. The gradients of ``input`` and
        ``residual`` may be one tensor.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is not finite, ``dropout_p`` not between 0 and 1, or ``rounding`` wrong.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    if residual is None:
        check_tensor("fused_add_rms_norm", "residual", residual)
    given: Given = (
        "rms_norm", eps, normalized_shape, zero_centered, rounding, dropout_p, training,
        out_dtype, residual_dtype, False, False, False,
    )  # fmt: skip
    tensors = input, residual, weight, None, None
    outputs: tuple[Tensor, Tensor] = run(fused_add_rms_norm, _NormFunction, given, tensors)
    return outputs


class _NormFunction(torch.autograd.Function):
    """Every op as one differentiable function; without a residual it returns only the output.

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
        options: Options,
    ) -> Any:
        return _forward(ctx, (input, residual, weight, bias, rng_state), options, True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        gradients = _backward(ctx, grad_output, grad_sum, ctx.needs_input_grad[:4])
        return *gradients, None, None


class FusedLayerNormFunction(torch.autograd.Function):
    """Layer norm as ``FusedLayerNormFunction.apply(input, weight, bias, eps)``.

    :func:`fused_layer_norm` computes the same. It is faster without a gradient, and supports
    autocast, ``torch.func`` and tensor subclasses.
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
        options = Options("layer_norm", eps)
        tensors = input, None, weight, bias, None
        return _forward(ctx, tensors, options, save_stats=any(ctx.needs_input_grad))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        """Compute the gradients of input, weight and bias, where needed."""
        # One for each argument that was passed: weight, bias and eps may be missing.
        count = len(ctx.needs_input_grad)
        input, weight, bias, _ = (*ctx.needs_input_grad, False, False, False)[:4]
        gradients = _backward(ctx, grad_output, None, (input, False, weight, bias))
        return (gradients[0], *gradients[2:], None)[:count]


def _forward(ctx: Any, tensors: Tensors, options: Options, save_stats: bool) -> Any:
    """Run the op, and save what its backward reads."""
    input, residual, weight, bias, rng_state = tensors
    output, sum, stats = run_forward(tensors, options, save_stats)
    x_is_output = options.memory_efficient and stats is not None
    x = output if x_is_output else input if residual is None else sum
    ctx.save_for_backward(unlike_image(x), weight, bias if x_is_output else None, stats, rng_state)
    ctx.options = backward_options(tensors, options, x_is_output)
    if options.main_grad:
        # Parameters themselves: hooks and checkpointing return saved tensors without attributes.
        ctx.parameters = weight, bias
    ctx.set_materialize_grads(False)
    return output if residual is None else (output, sum)


def _backward(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, wanted: Wanted
) -> Gradients:
    """The gradients of input, residual, weight and bias that are wanted."""
    options = ctx.options
    x, weight, bias, stats, rng_state = ctx.saved_tensors
    if grad_output is None:
        if options.shares_gradient():
            return grad_sum if wanted[0] else None, grad_sum if wanted[1] else None, None, None
        like = x if grad_sum is None else grad_sum  # traced, x may be unlike_image(x)
        grad_output = torch.zeros_like(like, dtype=options.output_dtype)
    tensors = grad_output, grad_sum, x, weight, bias, stats, rng_state
    parameters = ctx.parameters if options.main_grad else None
    grad_x, grad_residual, grad_weight, grad_bias = run_backward(
        tensors, options, wanted, parameters
    )
    if wanted[1] and options.shares_gradient():
        grad_residual = grad_x  # as torch.add does; autograd copies a tensor stored twice
    return (
        grad_x if wanted[0] else None,
        grad_residual if wanted[1] else None,
        grad_weight if wanted[2] else None,
        grad_bias if wanted[3] else None,
    )


def norm_of_module(op: Any, module: Any, tensors: Tensors) -> Any:
    """``op`` with the options of a module of ``modules.py``.

    Faster than the call of ``op``, which takes them as keyword arguments, and knows ``main_grad``.
    """
    dropout_p = module.dropout_p
    given: Given = (
        "layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm",
        module.eps,
        module.normalized_shape,
        module.zero_centered,
        module.rounding,
        dropout_p,
        not dropout_p or module.training,  # torch.compile compiles again when training changes
        module.out_dtype,
        module.residual_dtype,
        module.memory_efficient,
        module.fuse_wgrad_accumulation,
        False,
    )
    return run(op, _NormFunction, given, tensors)
