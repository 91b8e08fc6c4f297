"""The functions as modules: subclasses of PyTorch's own with another ``forward``.

``isinstance``, ``state_dict``, initialisation, ``repr`` and the constructor are PyTorch's, and
checkpoints load in both directions. Options that PyTorch does not have are keyword-only
arguments of the constructor; ``repr`` shows those that are not the default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._arguments import KERNEL_DTYPES, check_eps, check_extras
from ._options import Rounding, Shape
from .functional import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
    norm_of_module,
)

# In the __dict__ of a module that convert changed: its previous class.
CONVERTED = "_class_before_convert"
_KNOWN_DEVICES = frozenset({"cpu", "cuda", "meta"})


def takes_original(
    module: Any, *tensors: Tensor | None, has_failed: bool = False, is_image: bool = False
) -> bool:
    """Whether a converted module calls its original forward, so that it runs wherever that runs.

    Args:
        module: any module; False for one that ``convert`` did not change.
        tensors: the input, weight and bias of the call.
        has_failed: the fused op has raised. A tensor subclass may not support it, the original may
            broadcast, or the input may come from inference mode. A missing build or a failed launch
            is no reason.
        is_image: the parameters belong to dimension 1 of the input, not to its last ones.
    """
    if not hasattr(module, CONVERTED):
        return False
    given = [t for t in tensors if isinstance(t, Tensor)]
    # Compiled code cannot try the fused op first.
    may_broadcast = has_failed or is_dynamo_compiling()
    return any(
        (has_failed and type(t) not in (Tensor, nn.Parameter))  # first: some have no dtype
        or t.dtype not in KERNEL_DTYPES
        or t.layout is not torch.strided
        or t.is_nested
        or t.device.type not in _KNOWN_DEVICES
        or (has_failed and t.is_inference() and torch.is_grad_enabled())
        or (may_broadcast and t is not given[0] and _normalized(given[0], t, is_image) != t.shape)
        for t in given
    )


def _normalized(input: Tensor, parameter: Tensor, is_image: bool) -> torch.Size:
    """The sizes of the dimensions that the parameter belongs to."""
    return input.shape[1:2] if is_image else input.shape[-parameter.dim() :]


def _do_nothing(module: nn.Module, args: Any) -> None:
    """The hook of :meth:`_Extras._keep_off_fast_paths`."""


class _Extras:
    """The options that PyTorch's modules do not have: put before one in the bases of a class.

    As class attributes, because instances that ``convert`` changed have no others.
    """

    zero_centered: bool = False
    rounding: Rounding = "once"
    dropout_p: float = 0.0
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    memory_efficient: bool = False
    fuse_wgrad_accumulation: bool = False

    def _set_extras(self, **extras: Any) -> None:
        """Run before PyTorch's constructor, which calls reset_parameters."""
        check_extras(type(self).__name__, **extras)
        for name, value in extras.items():
            if value != getattr(_Extras, name):
                object.__setattr__(self, name, value)

    def _keep_off_fast_paths(self: Any) -> None:
        """Make sure that forward is called, if the result depends on more than the parameters.

        In inference, ``nn.TransformerEncoderLayer`` reads the parameters of its norms without
        calling ``forward``, unless one of its modules has a hook.
        """
        if self.zero_centered or self.rounding != "once" or self.out_dtype is not None:
            self.register_forward_pre_hook(_do_nothing)

    def reset_parameters(self: Any) -> None:
        """Set the factor to 1 and the bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered and self.weight is not None:
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """The arguments of the constructor; of the options those that are not the default."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return shown + "".join(
            f", {name}={getattr(self, name)!r}"
            for name in _Extras.__annotations__
            if getattr(self, name) != getattr(_Extras, name)
        )


class FusedLayerNorm(_Extras, nn.LayerNorm):
    """``torch.nn.LayerNorm`` by the kernel of :func:`fused_op.fused_layer_norm`.

    Args:
        normalized_shape: the last dimensions of the input, normalised together; an int for one.
        eps: added to the variance before the root.
        elementwise_affine: False: neither weight nor bias.
        bias: False: no bias.
        device: of the parameters.
        dtype: of the parameters; beside a 16-bit input float32 costs nothing.
        zero_centered: multiply by ``1 + weight``; the weight is initialised to 0. A ``state_dict``
            does not record this: PyTorch's class would load it and multiply by ``weight``.
        rounding: ``"once"``, or ``"before_weight"``: the normalised values are rounded to the dtype
            of the input before the weight, as in Llama; see the function.
        dropout_p: of the output, while the module is in training mode.
        out_dtype: of the output; default: that of the input.
        memory_efficient: as in :func:`fused_op.fused_layer_norm`.
        fuse_wgrad_accumulation: add the gradients of weight and bias to their attribute
            ``main_grad``, a float32 tensor, in the same kernel. As in Megatron-LM,
            ``grad_added_to_main_grad`` is set, and autograd gets a meaningless gradient.

    Shape:
        ``[..., *normalized_shape]`` to the same.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`fused_op.fused_layer_norm`; from the
            constructor, if its arguments show the mistake.

    Source: Ba, Kiros and Hinton 2016 (https://arxiv.org/abs/1607.06450).
    """

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
        rounding: Rounding = "once",
        dropout_p: float = 0.0,
        out_dtype: torch.dtype | None = None,
        memory_efficient: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        """See the class."""
        self._set_extras(
            zero_centered=zero_centered,
            rounding=rounding,
            dropout_p=dropout_p,
            out_dtype=out_dtype,
            memory_efficient=memory_efficient,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        check_eps(type(self).__name__, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._keep_off_fast_paths()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise input."""
        weight, bias = self.weight, self.bias
        if is_dynamo_compiling() and takes_original(self, input, weight, bias):
            return super().forward(input)
        try:
            tensors = input, None, weight, bias, None
            output: Tensor = norm_of_module(fused_layer_norm, self, tensors)
            return output
        except (RuntimeError, TypeError):
            if not takes_original(self, input, weight, bias, has_failed=True):
                raise
        return super().forward(input)


class FusedRMSNorm(_Extras, nn.RMSNorm):
    """``torch.nn.RMSNorm`` by the kernel of :func:`fused_op.fused_rms_norm`.

    Args:
        normalized_shape: the last dimensions of the input, normalised together; an int for one.
        eps: added to the mean square before the root; ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), whatever the dtype of the input.
        elementwise_affine: False: no weight.
        device: of the weight.
        dtype: of the weight; beside a 16-bit input float32 costs nothing.
        zero_centered: multiply by ``1 + weight``; the weight is initialised to 0. A ``state_dict``
            does not record this: PyTorch's class would load it and multiply by ``weight``.
        rounding: ``"once"``, or ``"before_weight"``: the normalised values are rounded to the dtype
            of the input before the weight, as in Llama; see the function.
        dropout_p: of the output, while the module is in training mode.
        out_dtype: of the output; default: that of the input.
        memory_efficient: as in :func:`fused_op.fused_rms_norm`.
        fuse_wgrad_accumulation: as in :class:`FusedLayerNorm`.

    Shape:
        ``[..., *normalized_shape]`` to the same.

    Raises:
        RuntimeError, TypeError, ValueError: as :class:`FusedLayerNorm`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
        rounding: Rounding = "once",
        dropout_p: float = 0.0,
        out_dtype: torch.dtype | None = None,
        memory_efficient: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        """See the class."""
        self._set_extras(
            zero_centered=zero_centered,
            rounding=rounding,
            dropout_p=dropout_p,
            out_dtype=out_dtype,
            memory_efficient=memory_efficient,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        if eps is not None:
            check_eps(type(self).__name__, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._keep_off_fast_paths()

    def forward(self, x: Tensor) -> Tensor:  # the name that nn.RMSNorm gives it
        """Normalise x."""
        weight = self.weight
        if is_dynamo_compiling() and takes_original(self, x, weight):
            return super().forward(x)
        try:
            tensors = x, None, weight, None, None
            output: Tensor = norm_of_module(fused_rms_norm, self, tensors)
            return output
        except (RuntimeError, TypeError):
            if not takes_original(self, x, weight, has_failed=True):
                raise
        return super().forward(x)


class FusedAddLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` of ``input + residual``, by :func:`fused_op.fused_add_layer_norm`.

    The arguments are those of :class:`FusedLayerNorm`, except these:

    Args:
        dropout_p: of the input, before the addition, while the module is in training mode.
        residual_dtype: of the sum; default: that of the residual. It replaces
            ``memory_efficient``.

    Shape:
        Two tensors ``[..., *normalized_shape]`` of one shape to two of the same.
    """

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
        rounding: Rounding = "once",
        dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        """See the class."""
        self._set_extras(residual_dtype=residual_dtype)
        super().__init__(
            *(normalized_shape, eps, elementwise_affine, bias, device, dtype),
            zero_centered=zero_centered,
            rounding=rounding,
            dropout_p=dropout_p,
            out_dtype=out_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )

    def forward(  # type: ignore[override]  # this class adds a second input
        self, input: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum as the new residual."""
        tensors = input, residual, self.weight, self.bias, None
        outputs: tuple[Tensor, Tensor] = norm_of_module(fused_add_layer_norm, self, tensors)
        return outputs


class FusedAddRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` of ``input + residual``, by :func:`fused_op.fused_add_rms_norm`.

    The arguments are those of :class:`FusedRMSNorm`, except these:

    Args:
        dropout_p: of the input, before the addition, while the module is in training mode.
        residual_dtype: of the sum; default: that of the residual. It replaces
            ``memory_efficient``.

    Shape:
        Two tensors ``[..., *normalized_shape]`` of one shape to two of the same.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
        rounding: Rounding = "once",
        dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        """See the class."""
        self._set_extras(residual_dtype=residual_dtype)
        super().__init__(
            *(normalized_shape, eps, elementwise_affine, device, dtype),
            zero_centered=zero_centered,
            rounding=rounding,
            dropout_p=dropout_p,
            out_dtype=out_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )

    def forward(  # type: ignore[override]  # this class adds a second input
        self, input: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum as the new residual."""
        tensors = input, residual, self.weight, None, None
        outputs: tuple[Tensor, Tensor] = norm_of_module(fused_add_rms_norm, self, tensors)
        return outputs
