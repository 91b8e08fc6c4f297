"""Norms over the channels of images: ``csrc/channels_first.cpp`` is the other half.

The kernels take contiguous planes. Where the channels of a pixel are neighbours in memory, its
channels are a row, and the norms of rows take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from ._arguments import as_float, check_eps, check_parameter, check_rows, check_tensor
from ._channels_first_formula import channels_are_last, channels_first
from ._ops import register_fake
from ._options import Norm, PixelActivation, compute_dtype
from ._sizes import holds
from ._variant import Variant, is_strided
from .functional import fused_layer_norm, fused_rms_norm


def fused_channels_first_layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: PixelActivation = None,
) -> Tensor:
    """LayerNorm over the channels of each pixel, of ``[N, C, *spatial]``, without a permutation.

    That is the ``LayerNorm2d`` of ConvNeXt and of SAM: the values are those of
    ``layer_norm(input.movedim(1, -1)).movedim(-1, 1)``.

    Args:
        input: ``[N, C]`` or ``[N, C, *spatial]``, float16, bfloat16, float32 or float64, on CPU or
            CUDA. Contiguous, or with channels that are innermost in memory, as in
            ``torch.channels_last``; any other layout is copied once.
        weight: ``[C]``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16 bits,
            float32; any other of the four is converted in each call, and its gradient back.
        bias: ``[C]``, likewise; ``None`` means 0.
        eps: added to the variance before the root; finite.
        activation: ``"silu"``: the result is ``silu(n)`` of the normalised values ``n``, in one
            pass over contiguous planes. Channels-last input takes a pass more for it.

    Returns:
        A tensor of the shape and dtype of ``input``. Its channels are innermost where those of
        ``input`` are, else it is contiguous. The arithmetic is in float32 (float64 for float64) and
        the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument is of the wrong kind.
        ValueError: ``eps`` is NaN or infinite, or ``activation`` is neither of the two.

    Source: Liu et al. 2022 (https://arxiv.org/abs/2201.03545).
    """
    return _call(
        fused_channels_first_layer_norm, "layer_norm", input, weight, bias, eps, activation
    )


def fused_channels_first_rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: PixelActivation = None,
) -> Tensor:
    """RMSNorm over the channels of each pixel, of ``[N, C, *spatial]``, without a permutation.

    That is the norm of the autoencoders of Wan and of DC-AE, and the ``RmsNorm2d`` of timm.
    Arguments, result and errors are those of :func:`fused_channels_first_layer_norm`, but ``eps``
    is added to the mean square. For an input whose channels are innermost, a bias costs a pass
    more, as the activation does.

    Source: Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """
    return _call(fused_channels_first_rms_norm, "rms_norm", input, weight, bias, eps, activation)


def _call(
    function: Callable[..., Tensor],
    norm: Norm,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    tensors = input, weight, bias
    if has_torch_function(tensors):
        handled: Tensor = handle_torch_function(
            function, tensors, *tensors, eps, activation=activation
        )
        return handled
    op = _op(norm)
    check_tensor(op, "input", input)
    eps = as_float(op, "eps", eps)
    if not is_dynamo_compiling():  # whose dynamic numbers have no isfinite: what is called checks
        check_eps(op, eps)
    check_activation(op, activation)
    if is_strided(input) and input.dim() > 1:
        if holds(math.prod(input.shape[2:]) == 1):  # a row for each sample
            _check_tensors(op, *tensors, activation)
            return _rows(norm, input.flatten(1), weight, bias, eps, activation).view(input.shape)
        if channels_are_last(input):
            _check_tensors(op, *tensors, activation)
            rows = input.movedim(1, -1)
            return _rows(norm, rows, weight, bias, eps, activation).movedim(-1, 1)
    planes = in_planes(input)
    given = spread_out(planes)
    if given is not planes:
        _check_tensors(op, *tensors, activation)
    output: Tensor = _CHANNELS_FIRST((given, weight, bias), (norm, eps, activation))
    return output if given is planes else output.view(input.shape)


def in_planes(input: Tensor) -> Tensor:
    """The contiguous input; ``input`` itself if it is, or is of a layout that will be refused."""
    return input.contiguous() if is_strided(input) else input


def spread_out(planes: Tensor) -> Tensor:
    """A view ``[N, C, pixels]`` of contiguous images that are traced.

    Inductor would keep images for backward as ``torch.channels_last``, in a copy of their own.
    """
    return planes.flatten(2) if is_dynamo_compiling() and planes.dim() > 3 else planes


def _op(norm: Norm) -> str:
    return f"fused_channels_first_{norm}"


def _rows(
    norm: Norm,
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    """Of channels that are neighbours. What no norm of rows does follows in its precision."""
    adds = norm == "rms_norm" and bias is not None
    wide = compute_dtype(rows) if adds or activation is not None else None
    if norm == "layer_norm":
        output = fused_layer_norm(rows, weight, bias, eps, out_dtype=wide)
    else:
        output = fused_rms_norm(rows, weight, eps, out_dtype=wide)
    if adds and bias is not None:
        output = output + bias.to(output.dtype)
    if activation is not None:
        output = F.silu(output)
    return output.to(rows.dtype)


def _formula(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    return channels_first(norm, input, weight, bias, eps, activation)


def _check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    activation: PixelActivation,
) -> None:
    op = _op(norm)
    check_eps(op, eps)
    _check_tensors(op, input, weight, bias, activation)


def _check_tensors(
    op: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: PixelActivation,
) -> None:
    check_activation(op, activation)
    if input.dim() < 2:
        raise RuntimeError(
            f"{op}: input must have at least two dimensions, [N, C, *spatial], got shape "
            f"{list(input.shape)}"
        )
    check_rows(op, "input", input)
    check_parameter(op, "weight", weight, input.shape[1])
    check_parameter(op, "bias", bias, input.shape[1])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.device != input.device:
            raise RuntimeError(
                f"{op}: {name}: Tensor on device {parameter.device} is not on the expected device "
                f"{input.device} of input"
            )


def check_activation(op: str, activation: Any) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(
            f"{op}: argument 'activation' must be str or None, not {type(activation).__name__}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")


def _fake_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    activation: PixelActivation,
    save_stats: bool,
) -> tuple[Tensor, Tensor]:
    _check(input, weight, bias, norm, eps, activation)
    pixels = input.shape[0] * math.prod(input.shape[2:])
    stats = input.new_empty((1 + (norm == "layer_norm"), pixels), dtype=compute_dtype(input))
    return input.new_empty(input.shape), stats if save_stats else input.new_empty(0)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    norm: Norm,
    activation: PixelActivation,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    channels = (input.shape[1],)
    like = ((input.shape, input), (channels, weight), (channels, bias))
    grads = [
        (input if t is None else t).new_empty(shape if want else 0)
        for (shape, t), want in zip(like, wanted, strict=True)
    ]
    return grads[0], grads[1], grads[2]


register_fake("channels_first_forward", _fake_forward)
register_fake("channels_first_backward", _fake_backward)

_CHANNELS_FIRST = Variant("channels_first", _formula, _check, by_rows=False)
