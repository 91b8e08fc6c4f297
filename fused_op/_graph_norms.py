"""The norms of this package in graphs as dynamo recorded them, before autograd."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ._graph_effects import value_of
from ._inductor import arguments_of

_FORWARD = torch.ops.fused_op.norm_forward.default
_BACKWARD = torch.ops.fused_op.norm_backward.default

# All that the graphs of our own autograd.Function contain.
_OF_OUR_FUNCTION: Any = (
    *(_FORWARD, _BACKWARD, torch.ops.fused_op.in_row_order.default, operator.getitem),
    *(torch._C._set_grad_enabled, torch._C._are_functorch_transforms_active),
    *("unsqueeze", "squeeze"),  # what is saved, and back
)


def is_call(node: Any, targets: Any) -> bool:
    """Whether a node is one of these calls, with its first operand by position."""
    is_call = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return is_call and bool(node.args) and node.target in targets


def shape_of(node: Any) -> tuple[Any, ...]:
    value = value_of(node)
    return () if value is None else tuple(value.shape)


def may_differ(shape: Any, other: Any) -> bool:
    return not all(statically_known_true(m == n) for m, n in zip(shape, other, strict=True))


def arguments_of_norm(graph: fx.Graph, call: fx.Node) -> dict[str, Any] | None:
    """The arguments of ``norm_forward``, by name, if a call is a norm of this package."""
    return arguments_of(call) if call.target is _FORWARD else _recorded(graph, call)


def _recorded(graph: fx.Graph, call: fx.Node) -> dict[str, Any] | None:
    """The arguments of the op in an ``autograd.Function``, which has a graph of its own."""
    if getattr(call.target, "__name__", "") != "autograd_function_apply":
        return None
    names: Any = call.args[:2]
    forward, backward = (getattr(graph.owning_module, name.target).graph for name in names)
    if not _is_ours(forward, backward):
        return None
    (op,) = forward.find_nodes(op="call_function", target=_FORWARD)
    placeholders = forward.find_nodes(op="placeholder")[2 - len(call.args) :]  # without ctx
    outer = dict(zip(placeholders, call.args[2:], strict=False))
    inner = arguments_of(op)
    given = {name: outer.get(v) if isinstance(v, fx.Node) else v for name, v in inner.items()}
    lost = [name for name, value in inner.items() if value is not None and given[name] is None]
    return None if lost else given


def _is_ours(forward: fx.Graph, backward: fx.Graph) -> bool:
    """Whether two graphs are the norm and its gradients, from a saved input, and nothing else."""
    calls = [n for graph in (forward, backward) for n in graph.nodes if "call" in n.op]
    ops = [n for n in calls if n.target in (_FORWARD, _BACKWARD)]
    if [n.target for n in ops] != [_FORWARD, _BACKWARD]:
        return False
    given = arguments_of(ops[1])
    gradients = [(ops[1], i) for i, is_wanted in enumerate(given["wanted"]) if is_wanted]
    return (
        all(n.target in _OF_OUR_FUNCTION for n in calls)
        and not given["x_is_output"]
        and _results(forward)[:1] == [(ops[0], 0)]
        and [result for result in _results(backward) if result is not None] == gradients
    )


def _results(graph: fx.Graph) -> list[Any]:
    """Operands of the calls that compute the results; forward returns what it saves behind them."""
    results: Any = graph.output_node().args[0]
    while results and isinstance(results[0], tuple):
        results = results[0]
    computed = [r.args[0] if is_call(r, ("squeeze",)) else r for r in results]
    return [result.args if isinstance(result, fx.Node) else result for result in computed]
