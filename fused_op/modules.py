"""The functions as modules: subclasses of PyTorch's own, of which ``forward`` is replaced.

So ``isinstance``, ``state_dict``, initialisation, ``repr`` and the constructor are PyTorch's, and a
checkpoint of the one loads into the other. What the functions have beyond PyTorch's is a
keyword-only argument of the constructor, and ``repr`` shows it where it is not the default.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .functional import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
)
from .reference import Shape


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` by the kernel of :func:`fused_op.fused_layer_norm`.

    Args:
        normalized_shape: the last dimensions of the input, normalised together; an int for one.
        eps: added to the variance before the root.
        elementwise_affine: False: neither weight nor bias.
        bias: False: no bias.
        device: of the parameters.
        dtype: of the parameters; beside a 16-bit input it may be float32.
        zero_centered: multiply by ``1 + weight``; the weight is initialised to 0.

    Shape:
        ``[..., *normalized_shape]`` to the same, in the dtype of the input.

    Raises:
        RuntimeError, TypeError, ValueError: in forward, as :func:`fused_op.fused_layer_norm`.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """

    zero_centered: bool = False  # of instances that convert has made out of nn.LayerNorm

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        """See the class."""
        self.zero_centered = zero_centered  # first: PyTorch's constructor calls reset_parameters
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Set the factor to 1 and the bias to 0."""
        super().reset_parameters()
        if self.zero_centered and self.weight is not None:
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return super().extra_repr() + (", zero_centered=True" if self.zero_centered else "")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise input."""
        return fused_layer_norm(
            *(input, self.weight, self.bias, self.eps),
            normalized_shape=self.normalized_shape,
            zero_centered=self.zero_centered,
        )


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` by the kernel of :func:`fused_op.fused_rms_norm`.

    Args:
        normalized_shape: the last dimensions of the input, normalised together; an int for one.
        eps: added to the mean square before the root; ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), whatever the dtype of the input.
        elementwise_affine: False: no weight.
        device: of the weight.
        dtype: of the weight; beside a 16-bit input it may be float32.
        zero_centered: multiply by ``1 + weight``; the weight is initialised to 0.

    Shape:
        ``[..., *normalized_shape]`` to the same, in the dtype of the input.

    Raises:
        RuntimeError, TypeError, ValueError: in forward, as :func:`fused_op.fused_rms_norm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """

    zero_centered: bool = False  # of instances that convert has made out of nn.RMSNorm

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        """See the class."""
        self.zero_centered = zero_centered  # first: PyTorch's constructor calls reset_parameters
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the factor to 1."""
        super().reset_parameters()
        if self.zero_centered and self.weight is not None:
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return super().extra_repr() + (", zero_centered=True" if self.zero_centered else "")

    def forward(self, x: Tensor) -> Tensor:  # the name that nn.RMSNorm gives it
        """Normalise x."""
        return fused_rms_norm(
            *(x, self.weight, self.eps),
            normalized_shape=self.normalized_shape,
            zero_centered=self.zero_centered,
        )


class FusedAddLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` of ``input + residual``, by :func:`fused_op.fused_add_layer_norm`.

    The arguments, parameters and errors are those of :class:`FusedLayerNorm`.

    Shape:
        Two tensors ``[..., *normalized_shape]``, of one shape and dtype, to two of the same.
    """

    def forward(  # type: ignore[override]  # a second input is what this class adds
        self, input: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum as the new residual."""
        return fused_add_layer_norm(
            *(input, residual, self.weight, self.bias, self.eps),
            normalized_shape=self.normalized_shape,
            zero_centered=self.zero_centered,
        )


class FusedAddRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` of ``input + residual``, by :func:`fused_op.fused_add_rms_norm`.

    The arguments, parameters and errors are those of :class:`FusedRMSNorm`.

    Shape:
        Two tensors ``[..., *normalized_shape]``, of one shape and dtype, to two of the same.
    """

    def forward(  # type: ignore[override]  # a second input is what this class adds
        self, input: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum as the new residual."""
        return fused_add_rms_norm(
            *(input, residual, self.weight, self.eps),
            normalized_shape=self.normalized_shape,
            zero_centered=self.zero_centered,
        )
