"""The modules of the norms over the channels of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import as_int, check_bools, check_eps
from ._channels_first import (
    check_activation,
    fused_channels_first_layer_norm,
    fused_channels_first_rms_norm,
)
from ._options import PixelActivation


class ChannelsFirstNorm(nn.Module):
    """What the two modules have in common: parameters, options and their checks."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        eps: float,
        elementwise_affine: bool,
        bias: bool,
        activation: PixelActivation,
        device: Any,
        dtype: Any,
    ) -> None:
        """See the classes."""
        super().__init__()
        name = type(self).__name__
        num_channels = as_int(name, "num_channels", num_channels)
        check_eps(name, eps)
        check_bools(name, elementwise_affine=elementwise_affine, bias=bias)
        check_activation(name, activation)
        self.num_channels, self.eps, self.activation = num_channels, eps, activation
        self.elementwise_affine = elementwise_affine
        for parameter, wanted in (("weight", True), ("bias", bias)):
            values = torch.empty(num_channels, device=device, dtype=dtype)
            is_there = elementwise_affine and wanted
            self.register_parameter(parameter, nn.Parameter(values) if is_there else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        shown = f"{self.num_channels}, eps={self.eps}"
        shown += f", elementwise_affine={self.elementwise_affine}"
        if self.elementwise_affine:
            shown += f", bias={self.bias is not None}"
        return shown if self.activation is None else f"{shown}, activation={self.activation!r}"

    def _check_channels(self, input: Any) -> None:
        """Without a weight, nothing else says how many channels there have to be."""
        if (
            self.weight is None
            and isinstance(input, Tensor)
            and input.dim() > 1
            and input.shape[1] != self.num_channels
        ):
            raise RuntimeError(
                f"{type(self).__name__}: input must have {self.num_channels} channels, dimension "
                f"1, got shape {list(input.shape)}"
            )


class FusedChannelsFirstLayerNorm(ChannelsFirstNorm):
    """:func:`fused_op.fused_channels_first_layer_norm` with its weight and bias.

    Its parameters and checkpoints are those of the ``LayerNorm2d`` of ConvNeXt, SAM and timm.

    Args:
        num_channels: of the input, dimension 1.
        eps: added to the variance before the root.
        elementwise_affine: False: neither weight nor bias.
        bias: False: no bias.
        activation: ``"silu"`` behind the norm, in the same pass; see the function.
        device: of the parameters.
        dtype: of the parameters; beside a 16-bit input float32 costs nothing.

    Shape:
        ``[N, num_channels, *spatial]`` to the same.

    Raises:
        RuntimeError, TypeError, ValueError: as the function; from the constructor, if its
            arguments show the mistake.

    Source: Liu et al. 2022 (https://arxiv.org/abs/2201.03545).
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        activation: PixelActivation = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(num_channels, eps, elementwise_affine, bias, activation, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of each pixel."""
        self._check_channels(input)
        return fused_channels_first_layer_norm(
            input, self.weight, self.bias, self.eps, activation=self.activation
        )


class FusedChannelsFirstRMSNorm(ChannelsFirstNorm):
    """:func:`fused_op.fused_channels_first_rms_norm` with its weight, and a bias if asked for.

    The arguments are those of :class:`FusedChannelsFirstLayerNorm`, except these:

    Args:
        eps: added to the mean square before the root.
        bias: True: add a bias.

    Shape:
        ``[N, num_channels, *spatial]`` to the same.

    Raises:
        RuntimeError, TypeError, ValueError: as :class:`FusedChannelsFirstLayerNorm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        *,
        activation: PixelActivation = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(num_channels, eps, elementwise_affine, bias, activation, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of each pixel."""
        self._check_channels(input)
        return fused_channels_first_rms_norm(
            input, self.weight, self.bias, self.eps, activation=self.activation
        )
