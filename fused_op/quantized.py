"""Norms whose output is quantised in the same pass: fp8 or int8, and the scales.

The gradient goes straight through: backward is that of the norm, with the gradient of the output as
if it were not rounded. ``_quantized_routes.py`` runs the calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import check_tensor
from ._options import Options, Rounding, Shape
from ._quantize import Convention, QuantizedNorm, ScaleLayout, Scheme
from ._quantized_routes import run


def fused_rms_norm_quantized(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scheme: Scheme = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    convention: Convention = "torchao",
    scale: Tensor | None = None,
    power_of_two: bool | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: ScaleLayout = "row_major",
    keep_output: bool = False,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
) -> QuantizedNorm:
    """:func:`fused_rms_norm`, and its output quantised in the same pass.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16 or float32.
        weight: as in :func:`fused_rms_norm`.
        eps: likewise.
        scheme: what a scale covers. ``"tensor"``: the whole tensor; the argument ``scale`` is the
            scale. ``"token"``: a row. ``"block128"``: 128 neighbouring columns of a row; the last
            block of a row may be shorter.
        dtype: ``torch.float8_e4m3fn``; with torchao and te also ``torch.float8_e5m2``, with vllm
            also ``torch.int8``. Values are rounded to nearest even and saturated.
        convention: the library whose rule the scales follow: ``"torchao"``, ``"vllm"``,
            ``"deep_gemm"`` (only blocks) or ``"te"`` (tensor and blocks).
        scale: for scheme ``"tensor"``: one float32 on the device of ``input``. The output is about
            ``quantized * scale``; with te, as in its quantizers, ``quantized / scale``.
        power_of_two: round scales to powers of two. Possible for torchao (rows and blocks),
            deep_gemm and te (blocks); by default, te rounds the scales of blocks.
        scale_dtype: float32, or ``torch.float8_e8m0fnu`` for powers of two.
        scale_layout: of blocks. ``"transposed"``: the scales of neighbouring rows are adjacent, and
            rows are padded to a multiple of 4, as ``scaled_mm`` and DeepGEMM read them.
            ``quantized`` is padded to as many rows; both are zero there.
        keep_output: also return the output.
        normalized_shape: as in :func:`fused_rms_norm`.
        zero_centered: likewise.
        rounding: likewise.
        out_dtype: the dtype to which the output is rounded before it is quantised. The bits are
            those of the norm followed by the convention's own quantisation.

    Returns:
        A :class:`QuantizedNorm`. ``quantized`` has the shape of ``input``. ``scale`` decodes
        it: ``[..., 1]`` for rows, ``[..., blocks]``, or one for the tensor. ``output`` is the
        output of the norm if ``keep_output``. Gradients arrive through it. If they are recorded
        and it is not kept, it is a placeholder of NaN without memory of its own, to which a linear
        layer sends the gradient of its input. ``sum`` is None.

        NaN and infinity stay in their row. They show in its scale; with te, in its values.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: arguments that do not go together, such as a dtype that the convention lacks.
    """
    given = scheme, dtype, convention, power_of_two, scale_dtype, scale_layout
    options = Options(
        "rms_norm", eps, normalized_shape, zero_centered, rounding, out_dtype=out_dtype
    )
    tensors = input, None, weight, None, scale
    return run(fused_rms_norm_quantized, tensors, options, given, keep_output)


def fused_layer_norm_quantized(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scheme: Scheme = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    convention: Convention = "torchao",
    scale: Tensor | None = None,
    power_of_two: bool | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: ScaleLayout = "row_major",
    keep_output: bool = False,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
) -> QuantizedNorm:
    """:func:`fused_layer_norm`, and its output quantised in the same pass.

    See :func:`fused_rms_norm_quantized` for the arguments and for what is returned.
    """
    given = scheme, dtype, convention, power_of_two, scale_dtype, scale_layout
    options = Options(
        "layer_norm", eps, normalized_shape, zero_centered, rounding, out_dtype=out_dtype
    )
    tensors = input, None, weight, bias, scale
    return run(fused_layer_norm_quantized, tensors, options, given, keep_output)


def fused_add_rms_norm_quantized(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scheme: Scheme = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    convention: Convention = "torchao",
    scale: Tensor | None = None,
    power_of_two: bool | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: ScaleLayout = "row_major",
    keep_output: bool = False,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> QuantizedNorm:
    """:func:`fused_add_rms_norm`, and its output quantised in the same pass.

    See :func:`fused_rms_norm_quantized` for the arguments and for what is returned; ``sum`` is the
    new residual.
    """
    given = scheme, dtype, convention, power_of_two, scale_dtype, scale_layout
    options = Options(
        "rms_norm", eps, normalized_shape, zero_centered, rounding, 0.0, True, out_dtype,
        residual_dtype,
    )  # fmt: skip
    check_tensor("fused_add_rms_norm_quantized", "residual", residual)
    tensors = input, residual, weight, None, scale
    return run(fused_add_rms_norm_quantized, tensors, options, given, keep_output)


def fused_add_layer_norm_quantized(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scheme: Scheme = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
    convention: Convention = "torchao",
    scale: Tensor | None = None,
    power_of_two: bool | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: ScaleLayout = "row_major",
    keep_output: bool = False,
    normalized_shape: Shape | None = None,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> QuantizedNorm:
    """:func:`fused_add_layer_norm`, and its output quantised in the same pass.

    See :func:`fused_rms_norm_quantized` for the arguments and for what is returned; ``sum`` is the
    new residual.
    """
    given = scheme, dtype, convention, power_of_two, scale_dtype, scale_layout
    options = Options(
        "layer_norm", eps, normalized_shape, zero_centered, rounding, 0.0, True, out_dtype,
        residual_dtype,
    )  # fmt: skip
    check_tensor("fused_add_layer_norm_quantized", "residual", residual)
    tensors = input, residual, weight, bias, scale
    return run(fused_add_layer_norm_quantized, tensors, options, given, keep_output)
