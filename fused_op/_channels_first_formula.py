"""The norms over the channels of images in PyTorch operations, for ``reference.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._norm_formula import Affine, cast, contiguous, normalize
from ._options import Norm, PixelActivation, compute_dtype
from ._sizes import holds


def channels_first(
    norm: Norm,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    """The formula of the norms over dimension 1."""
    compute = compute_dtype(input)
    affine = Affine(
        None if weight is None else cast(weight, compute),
        None if bias is None else cast(bias, compute),
        None,
    )
    x = normalize(norm, cast(input.movedim(1, -1), compute), 1, eps, affine)
    if activation is not None:
        x = x * torch.sigmoid(x)
    x = cast(x, input.dtype)
    if channels_are_last(input):
        return contiguous(x).movedim(-1, 1)
    return contiguous(x.movedim(-1, 1))


def channels_are_last(input: Tensor) -> bool:
    """Whether the channels of a pixel are neighbours in memory, and those of a plane are not."""
    if not (holds(input.shape[1] > 1) and holds(input.stride(1) == 1)):
        return False
    # One pixel, or none, is contiguous as well.
    return not (holds(math.prod(input.shape[2:]) == 1) or holds(input.numel() == 0))
