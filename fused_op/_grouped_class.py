"""For a class of group norms, a subclass of it whose forward is the fused op.

The counterpart of ``_fused_class.py``, which is for norms of rows and of the channels of a pixel.
``_grouped_proof.py`` decides which modules may get such a class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._group_norm import FusedGroupNorm, fused_group_norm
from ._recipe import made_once, make_subclass
from .modules import takes_original


class GroupedFormula(NamedTuple):
    """What the forward of a group norm computes, besides its shape."""

    groups: str  # the attribute of its instances that holds how many groups there are
    eps: str | float  # the attribute that holds it, or the number in the code
    dims: tuple[int, ...] = ()  # the numbers of dimensions of inputs that were compared
    dtypes: tuple[torch.dtype, ...] = ()  # of such inputs, if it has no parameters

    def groups_of(self, module: nn.Module) -> int:
        groups: int = getattr(module, self.groups)
        return groups

    def eps_of(self, module: nn.Module) -> Any:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def takes(self, input: Tensor, affine: Tensor | None) -> bool:
        """Whether inputs like this one were compared, with this weight or bias or none."""
        dtypes = self.dtypes if affine is None else (affine.dtype,)
        return input.dtype in dtypes and input.dim() in self.dims


def grouped_class(original: type[nn.Module], formula: GroupedFormula) -> type[nn.Module]:
    """The fused class: :class:`FusedGroupNorm` for PyTorch's own, else a subclass of ``original``.

    It is always the same one for the same arguments.
    """
    if original is nn.GroupNorm:
        return FusedGroupNorm
    return _subclass(original, formula)


@made_once
def _subclass(original: Any, formula: GroupedFormula) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What was proved is the call with such an input, in the dtype of the parameters, or in some
        # dtypes if there are none.
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        affine = bias if weight is None else weight
        if (
            len(args) != 1
            or kwargs
            or not isinstance(args[0], Tensor)
            or not formula.takes(args[0], affine)
            or (
                is_dynamo_compiling() and takes_original(self, args[0], weight, bias, is_image=True)
            )
        ):
            return original.forward(self, *args, **kwargs)
        try:
            return fused_group_norm(
                args[0], formula.groups_of(self), weight, bias, formula.eps_of(self)
            )
        except (RuntimeError, TypeError):
            if not takes_original(self, args[0], weight, bias, has_failed=True, is_image=True):
                raise
        return original.forward(self, *args)

    members = {
        "__module__": __name__,
        "__doc__": f"``{original.__qualname__}`` whose forward is the fused group norm.",
        "forward": forward,
    }
    return make_subclass(original, formula, grouped_class, f"Fused{original.__name__}", members)
