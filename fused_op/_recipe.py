"""Classes that exist in this process only: subclasses with another forward, made by a recipe.

An instance changes into such a class and back by its ``__class__``. It is pickled as one of its
original class, together with the recipe that makes the class again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# In the __dict__ of such a class: the original class, and what it was made by.
RECIPE = "_fused_recipe"


def make_subclass(
    original: Any,
    recipe: Any,
    class_of: Callable[[Any, Any], type[nn.Module]],
    name: str,
    members: dict[str, Any],
) -> type[nn.Module]:
    """A subclass of ``original`` whose instances can be pickled.

    Args:
        original: the class.
        recipe: what it is made by; can be pickled.
        class_of: the function of a module that returns this class, given ``original`` and
            ``recipe``.
        name: its name.
        members: ``forward``, and what else its ``__dict__`` is to hold.
    """

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, args, *state = original.__reduce_ex__(self, protocol)
        make, *args = (original if part is cls else part for part in (make, *args))
        return _restore, (class_of, original, recipe, make, tuple(args)), *state

    added = {RECIPE: (original, recipe), "__reduce_ex__": reduce_ex}
    cls: type[nn.Module] = type(name, (original,), members | added)
    return cls


def recipe_of(cls: type) -> Any:
    """What the class, or a base of it, was made by; ``None``: it is an ordinary class."""
    _, recipe = getattr(cls, RECIPE, (None, None))
    return recipe


def _restore(class_of: Any, original: Any, recipe: Any, make: Any, args: Any) -> nn.Module:
    module: nn.Module = make(*args)
    module.__class__ = class_of(original, recipe)
    return module
