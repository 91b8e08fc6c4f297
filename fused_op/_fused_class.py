"""For a norm class of any library, a subclass of it whose forward is the fused op.

``_judge.py`` decides which modules may get such a class.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._channels_first import fused_channels_first_layer_norm, fused_channels_first_rms_norm
from ._group_norm import FusedGroupNorm
from ._options import Norm, Rounding, machine_eps
from ._recipe import RECIPE, made_once, make_subclass
from .functional import fused_layer_norm, fused_rms_norm
from .modules import FusedLayerNorm, FusedRMSNorm, takes_original

# "rounded 1 + weight" is that sum in the dtype of the weight; "1" leaves a weight unused.
Factor = Literal["weight", "1 + weight", "rounded 1 + weight", "1"]


class Formula(NamedTuple):
    """What the forward of a norm class computes, besides its shape."""

    norm: Norm
    factor: Factor  # what it multiplies by
    eps: str | float  # the attribute of its instances that holds it, or the number in the code
    rounding: Rounding = "once"
    # How many dimensions the images have whose channels, dimension 1, it normalises; (): it
    # normalises the last dimensions.
    images: tuple[int, ...] = ()
    # Its output has the channels innermost in memory, whatever the images have: it permutes them.
    innermost: bool = False
    dtypes: tuple[torch.dtype, ...] = ()  # of rows that were compared, if it has no parameters

    def eps_of(self, module: nn.Module) -> Any:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps


def fused_class(original: type[nn.Module], formula: Formula) -> type[nn.Module]:
    """The fused class of a norm class: always the same one for the same arguments.

    Args:
        original: the class; its instances have ``weight`` and ``bias``, or one of them, or none.
        formula: what its forward computes.

    Returns:
        :class:`FusedLayerNorm` or :class:`FusedRMSNorm` for PyTorch's own, else a new subclass of
        ``original``.
    """
    if original is nn.LayerNorm:
        return FusedLayerNorm
    if original is nn.RMSNorm:
        return FusedRMSNorm
    return _subclass(original, formula)


def is_fused(cls: type) -> bool:
    """Whether ``convert`` may have given this very class, and not a subclass of it, to a module."""
    return cls in (FusedLayerNorm, FusedRMSNorm, FusedGroupNorm) or RECIPE in cls.__dict__


@made_once
def _subclass(original: Any, formula: Formula) -> type[nn.Module]:
    norm, kind, _, rounding, images, innermost, dtypes = formula
    zero_centered, is_rounded = kind == "1 + weight", kind == "rounded 1 + weight"
    kind_of = {"is_image": bool(images)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What was proved is the call with rows, or such images, of the parameters' dtype, or of
        # some dtypes if there are none. Anything else, such as a gate beside the input or 16-bit
        # rows under float32 weights, goes to the original.
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        affine = bias if weight is None else weight
        if (
            len(args) != 1
            or kwargs
            or not isinstance(args[0], Tensor)
            or args[0].dtype not in (dtypes if affine is None else (affine.dtype,))
            or (images and args[0].dim() not in images)
            or (is_dynamo_compiling() and takes_original(self, args[0], weight, bias, **kind_of))
        ):
            return original.forward(self, *args, **kwargs)
        factor = None if kind == "1" else weight
        if is_rounded and factor is not None:
            factor = factor + 1
        eps, shape = formula.eps_of(self), getattr(self, "normalized_shape", None)
        options: dict[str, Any] = {
            "normalized_shape": shape,
            "zero_centered": zero_centered,
            "rounding": rounding,
        }
        try:
            if images:
                x = _with_channels_innermost(args[0]) if innermost else args[0]
                return _of_image(norm, x, factor, bias, eps)
            if norm == "layer_norm":
                return fused_layer_norm(args[0], factor, bias, eps, **options)
            return fused_rms_norm(args[0], factor, eps, **options)
        except (RuntimeError, TypeError):
            if not takes_original(self, args[0], weight, bias, has_failed=True, **kind_of):
                raise
        return original.forward(self, *args)

    members = {
        "__module__": __name__,
        "__doc__": f"``{original.__qualname__}`` whose forward is the fused {norm}.",
        "forward": forward,
    }
    return make_subclass(original, formula, fused_class, f"Fused{original.__name__}", members)


def _with_channels_innermost(x: Tensor) -> Tensor:
    """A copy, unless they are. The op then writes its output like that."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _of_image(norm: Norm, x: Tensor, weight: Any, bias: Any, eps: float | None) -> Tensor:
    eps = machine_eps(x) if eps is None else eps
    if norm == "layer_norm":
        return fused_channels_first_layer_norm(x, weight, bias, eps)
    return fused_channels_first_rms_norm(x, weight, bias, eps)
