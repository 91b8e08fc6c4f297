"""Passes of this package in the documented slots of ``torch._inductor.config``.

A slot holds one pass. ``install`` puts ours behind what a user has put there, and a ``Slot`` takes
it out again. Each pass has a ``uuid``, by which Inductor's caches keep what was compiled with it
apart from what was not.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

import fused_op_cuda

GraphPass = Callable[[fx.Graph], None]  # a function of its own name


def install(name: str, ours: GraphPass) -> Slot:
    """Run ``ours`` in the slot ``torch._inductor.config.<name>``, after what is there already.

    Args:
        name: of the slot.
        ours: changes a graph in place.

    Raises:
        RuntimeError: this version of torch has no such slot.
    """
    import torch._inductor.config as config  # slow to import, and few need it

    if not hasattr(config, name):
        raise RuntimeError(f"fused_op: this torch has no torch._inductor.config.{name}")
    return Slot(config, name, ours)


class Slot:
    """A pass of ours in a slot, until ``remove``."""

    def __init__(self, config: Any, name: str, ours: GraphPass) -> None:
        """See :func:`install`."""
        self._config, self._name = config, name
        self._pass = _behind(getattr(config, name), ours)
        setattr(config, name, self._pass)

    def remove(self) -> None:
        """Take the pass out, and those of ours under it that were removed before.

        While another one is around it, it stays in the slot and does nothing.
        """
        self._pass.fused_op_is_on = False
        current = getattr(self._config, self._name)
        while getattr(current, "fused_op_is_on", True) is False:
            current = current.before
        setattr(self._config, self._name, current)


def _behind(before: Any, ours: GraphPass) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    others = [] if before is None else before if isinstance(before, (list, tuple)) else [before]

    class Pass(CustomGraphPass):
        fused_op_is_on = True

        def __init__(self) -> None:
            self.before = before

        def __call__(self, graph: fx.Graph) -> None:
            for other in others:
                other(graph)
            if self.fused_op_is_on:
                ours(graph)

        def uuid(self) -> Any:
            """None, which turns Inductor's caches off, if another pass has none."""
            ids = [getattr(other, "uuid", lambda: None)() for other in others]
            own = _version(), ours.__qualname__, self.fused_op_is_on
            return None if None in ids else (*own, *ids)

        def __deepcopy__(self, memo: Any) -> Any:
            copied = Pass()
            copied.fused_op_is_on = self.fused_op_is_on
            return copied

        def __reduce__(self) -> Any:
            """For the key of a cache: of some slots, torch pickles what it could ask ``uuid``."""
            if (uuid := self.uuid()) is None:
                # As pickle says of what it cannot take. Torch 2.7 goes on without a cache after no
                # other error.
                raise TypeError("another pass has no uuid")
            return _restored, (uuid,)

    return Pass()


def _restored(uuid: Any) -> Any:
    raise pickle.UnpicklingError("a pass cannot be restored from the key of a cache")


@cache
def _version() -> str:
    """Another one after each change of this package: graphs call its functions and ops."""
    digest = hashlib.sha256(fused_op_cuda.build_info()["source_hash"].encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def arguments_of(call: fx.Node) -> dict[str, Any]:
    """All arguments of one of our ops, by name and in the order of its schema."""
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), call.args, strict=False)) | dict(call.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}
