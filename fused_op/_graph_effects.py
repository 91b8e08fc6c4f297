"""What the other calls of a graph do to tensors, for passes over graphs as dynamo records them.

Such a graph is not functional: a call may change a tensor in place, through any view of it, and
modes are entered and left between calls.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

_IN_PLACE: Any = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift, operator.setitem),
)
_MODES = ("set_grad", "autocast", "inference_mode")
# Their results lie in memory as their operands do, or may.
_KEEP_ORDER: Any = (
    *(operator.getitem, "expand", "transpose", "reshape", "permute"),
    *(torch.transpose, torch.permute, torch.reshape, F.scaled_dot_product_attention),
)
# Their results do not depend on where in memory an operand lies.
_CHOOSE_ORDER: Any = (torch.matmul, operator.matmul, "matmul", F.linear, torch.bmm)


def value_of(node: Any) -> FakeTensor | None:
    """The tensor without data that dynamo has for a node; None for other kinds, such as DTensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if type(value) is FakeTensor else None


def may_change(graph: fx.Graph, nodes: Iterable[fx.Node]) -> bool:
    """Whether a call of the graph may change one of these tensors, or could not be looked into."""
    values = [value_of(node) for node in nodes]
    if any(value is None or value.is_inference() or value._version for value in values):
        return True  # a version counts the changes, those through views included
    memory = {_memory(value) for value in values}
    return any(
        _memory(value_of(operand)) in memory
        for node in graph.nodes
        if _may_write(node)
        for operand in node.all_input_nodes
    )


def _memory(value: Tensor | None) -> Any:
    """What is the same for all views of a tensor."""
    return None if value is None else value.untyped_storage()._cdata


def _may_write(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        names = node.target.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(node.target, name) for name in names]
    else:
        overloads = [node.target]
    schemas = [getattr(overload, "_schema", None) for overload in overloads]
    name = getattr(node.target, "__name__", str(node.target))
    return (
        any(schema is not None and schema.is_mutable for schema in schemas)
        or node.target in _IN_PLACE
        or name.startswith("__i")
        or (name.endswith("_") and not name.endswith("__"))
        or "out" in node.kwargs
        or _has_true(node, "inplace")
    )


def _has_true(call: fx.Node, name: str) -> bool:
    """Whether an argument of this name is given and not False."""
    if name in call.kwargs:
        return call.kwargs[name] is not False
    try:
        given = inspect.signature(call.target).bind(*call.args, **call.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no Python function
        return False
    return given.arguments.get(name, False) is not False


def changes_mode(graph: fx.Graph, first: fx.Node, last: fx.Node) -> bool:
    """Whether a mode is entered or left between two calls."""
    is_between = False
    for node in graph.nodes:
        if node is last:
            return False
        is_between = is_between or node is first
        name = getattr(node.target, "__name__", str(node.target))
        if is_between and any(mode in name for mode in _MODES):
            return True
    return True  # the first call comes after the last


def shows_order(node: fx.Node) -> bool:
    """Whether something may depend on the order of a tensor's dimensions in memory."""
    return any(_shows_order_of_operand(user) for user in node.users)


def _shows_order_of_operand(user: fx.Node) -> bool:
    if user.op not in ("call_function", "call_method"):
        return True
    if user.target in _CHOOSE_ORDER or (user.target == "contiguous" and len(user.args) == 1):
        return bool(user.kwargs)
    return user.target not in _KEEP_ORDER or shows_order(user)
