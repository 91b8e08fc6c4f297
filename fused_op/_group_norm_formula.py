"""The group norm in PyTorch operations, for ``reference.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._channels_first_formula import channels_are_last
from ._norm_formula import Affine, cast, contiguous, normalize
from ._options import PixelActivation, compute_dtype


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    """The formula of the group norm."""
    compute = compute_dtype(input)
    samples, channels, *spatial = input.shape
    elements = channels // num_groups * math.prod(spatial)
    x = cast(input, compute).reshape(samples, num_groups, elements)
    x = normalize("layer_norm", x, 1, eps, Affine(None, None, None)).reshape(input.shape)
    factor, offset = (_of_channels(t, 1, input) for t in (weight, bias))
    scale, shift = (_of_channels(t, samples, input) for t in (scale, shift))
    if scale is not None:
        scale = scale + 1.0
        factor = scale if factor is None else factor * scale
        offset = None if offset is None else offset * scale
    if factor is not None:
        x = x * factor
    for addend in (offset, shift):
        x = x if addend is None else x + addend
    if activation is not None:
        x = x * torch.sigmoid(x)
    return like_layout(cast(x, input.dtype), input)


def like_layout(output: Tensor, input: Tensor) -> Tensor:
    """The output with channels that are innermost in memory where those of ``input`` are."""
    if channels_are_last(input):
        return contiguous(output.movedim(1, -1)).movedim(-1, 1)
    return contiguous(output)


def _of_channels(values: Tensor | None, samples: int, input: Tensor) -> Tensor | None:
    """What belongs to a channel, in the shape that broadcasts over the pixels."""
    if values is None:
        return None
    ones = [1] * (input.dim() - 2)
    return cast(values, compute_dtype(input)).reshape(samples, input.shape[1], *ones)
