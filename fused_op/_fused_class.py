"""For a norm class of any library, a subclass of it whose forward is the fused op.

An instance changes into it and back by its ``__class__``; ``convert.py`` decides which may. Such a
class exists in this process only, so an instance is pickled as one of its original class, together
with the recipe that makes the class again.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from .functional import fused_layer_norm, fused_rms_norm
from .modules import FusedLayerNorm, FusedRMSNorm
from .reference import Norm

EPS_NAMES = ("variance_epsilon", "eps")


def fused_class(
    original: type[nn.Module], norm: Norm, zero_centered: bool, eps_name: str
) -> type[nn.Module]:
    """The fused class of a norm class: always the same one for the same arguments.

    Args:
        original: the class; its instances have ``weight`` and ``bias``, or one of them, or none.
        norm: what its forward computes.
        zero_centered: whether its forward multiplies by ``1 + weight``.
        eps_name: the attribute of its instances that holds eps.

    Returns:
        :class:`FusedLayerNorm` or :class:`FusedRMSNorm` for PyTorch's own, else a new subclass of
        ``original``.
    """
    if original is nn.LayerNorm:
        return FusedLayerNorm
    if original is nn.RMSNorm:
        return FusedRMSNorm
    key: Any = original  # typeshed's Hashable does not know classes
    return _subclass(key, norm, zero_centered, eps_name)


def is_fused(cls: type) -> bool:
    """Whether ``convert`` may have given this very class, and not a subclass of it, to a module."""
    return cls in (FusedLayerNorm, FusedRMSNorm) or "_fused_recipe" in vars(cls)


@functools.cache
def _subclass(original: Any, norm: Norm, zero_centered: bool, eps_name: str) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What was proved is the call with rows of the parameters' dtype. Anything else, such as a
        # gate beside the input or 16-bit rows under float32 weights, goes to the original.
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        affine = bias if weight is None else weight
        if (
            len(args) != 1
            or kwargs
            or not isinstance(args[0], Tensor)
            or (affine is not None and args[0].dtype != affine.dtype)
        ):
            return original.forward(self, *args, **kwargs)
        eps, shape = getattr(self, eps_name), getattr(self, "normalized_shape", None)
        options: dict[str, Any] = {"normalized_shape": shape, "zero_centered": zero_centered}
        if norm == "layer_norm":
            return fused_layer_norm(args[0], weight, bias, eps, **options)
        return fused_rms_norm(args[0], weight, eps, **options)

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = original.__reduce_ex__(self, protocol)
        make, args, *state = reduced
        make, *args = (original if part is cls else part for part in (make, *args))
        return _restore, (*recipe, make, tuple(args)), *state

    recipe = original, norm, zero_centered, eps_name
    cls = type(
        f"Fused{original.__name__}",
        (original,),
        {
            "__module__": __name__,
            "__doc__": f"``{original.__qualname__}`` whose forward is the fused {norm}.",
            "_fused_recipe": recipe,
            "__reduce_ex__": reduce_ex,
            "forward": forward,
        },
    )
    return cls


def _restore(
    original: type[nn.Module],
    norm: Norm,
    zero_centered: bool,
    eps_name: str,
    make: Any,
    args: tuple[Any, ...],
) -> Any:
    """Unpickle: an instance as the original class makes it, in its fused class."""
    module = make(*args)
    module.__class__ = fused_class(original, norm, zero_centered, eps_name)
    return module
