"""Classes that exist in this process only: subclasses with another forward, made by a recipe.

An instance changes into such a class and back by its ``__class__``. It is pickled as one of its
original class, together with the recipe that makes the class again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ._probe import Refusal

# In the __dict__ of such a class: the original class, what it was made by, and the forward that the
# original had then.
RECIPE = "_fused_recipe"
_lock = threading.RLock()  # the original's __init_subclass__ may convert a module itself


def made_once(make: Callable[[Any, Any], type[nn.Module]]) -> Callable[[Any, Any], type[nn.Module]]:
    """Let ``make(original, recipe)`` return the class that it has made before, while that is used.

    A cache would keep all classes for ever, also of modules that a notebook defines again and
    again. It would also miss that the original has another forward by now.
    """

    @functools.wraps(make)
    def find_or_make(original: Any, recipe: Any) -> type[nn.Module]:
        with _lock:
            for cls in _made(original, recipe):
                if vars(cls)[RECIPE][2] == original.forward:
                    return cls
            return make(original, recipe)

    return find_or_make


def _made(original: Any, recipe: Any) -> list[type[nn.Module]]:
    """The classes in use that were made by this, each of another forward of the original."""
    subclasses = type.__subclasses__(original)
    return [c for c in subclasses if vars(c).get(RECIPE, ())[:2] == (original, recipe)]


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

    Raises:
        Refusal: ``original`` allows no subclass.
    """

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, args, *state = original.__reduce_ex__(self, protocol)
        make, *args = (original if part is cls else part for part in (make, *args))
        return _restore, (class_of, original, recipe, make, tuple(args)), *state

    try:
        cls: type[nn.Module] = type(name, (original,), members | {"__reduce_ex__": reduce_ex})
    except Exception as error:  # of its metaclass or __init_subclass__
        raise Refusal(f"its class refuses a subclass: {type(error).__name__}: {error}") from error
    # Only now: an original that refuses it may still list the class among its subclasses.
    type.__setattr__(cls, RECIPE, (original, recipe, original.forward))
    return cls


def recipe_of(cls: type) -> Any:
    """What the class, or a base of it, was made by; ``None``: it is an ordinary class."""
    _, recipe, _ = getattr(cls, RECIPE, (None, None, None))
    return recipe


def _restore(class_of: Any, original: Any, recipe: Any, make: Any, args: Any) -> nn.Module:
    module: nn.Module = make(*args)
    made = _made(original, recipe)  # a copy gets the class of what it is a copy of
    module.__class__ = made[0] if len(made) == 1 else class_of(original, recipe)
    return module
