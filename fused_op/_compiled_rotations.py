"""Rotary embedding behind the RMS norms of queries and keys in a compiled model: one op for both.

The pass sees a graph as dynamo recorded it, before autograd, which then differentiates the fused
op. It looks for what Llama of transformers does, and Qwen3, Gemma 3 and others took over::

    heads = norm(projection.view(batch, seq, heads, head_dim)).transpose(1, 2)
    angles = torch.cat((freqs, freqs), -1)  # from here on, both halves of cos and sin are equal
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    output = heads * cos + turned * sin

``heads`` may also be the first columns of each head, with the others put beside the output.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ._graph_effects import changes_mode, may_change, shows_order, value_of
from ._graph_norms import arguments_of_norm, is_call, may_differ, shape_of
from ._rms_norm_rope import fused_rms_norm_rope

_ADD: Any = (operator.add, torch.add, "add")
_MUL: Any = (operator.mul, torch.mul, "mul")
_NEG: Any = (operator.neg, torch.neg, "neg")
_CAT: Any = (torch.cat,)
_UNSQUEEZE: Any = (torch.unsqueeze, "unsqueeze")
_TRANSPOSE: Any = (torch.transpose, "transpose")
# What computes each element from the one in its place.
_ELEMENTWISE: Any = (torch.cos, "cos", torch.sin, "sin", "to", "float", "contiguous", *_MUL)


class _Rotation(NamedTuple):
    """``turned * cos + cat(-turned[..., half:], turned[..., :half]) * sin``."""

    output: fx.Node
    heads: fx.Node  # [batch, heads, seq, head_dim], or with seq before heads
    turned: fx.Node  # [..., rotary_dim]: `heads`, or their first columns
    cos: fx.Node  # [batch or 1, seq, rotary_dim]
    sin: fx.Node
    head_dimension: int  # of `heads`: 1 or 2


class _Norm(NamedTuple):
    node: fx.Node  # the call
    output: fx.Node
    given: dict[str, Any]  # the arguments of the op, by name


def fuse_rotations(graph: fx.Graph) -> tuple[int, Counter[str]]:
    """Fuse what can be fused: how many, and how many were left for which reason."""
    done, left = 0, Counter[str]()
    for addition in [node for node in graph.nodes if is_call(node, _ADD)]:
        rotation = _rotation_of(addition)
        norm = None if rotation is None else _norm_before(graph, rotation)
        if rotation is None or norm is None:
            continue
        reason = _why_not(graph, rotation, norm) or _fuse(graph, rotation, norm)
        if reason:
            left[reason] += 1
        else:
            done += 1
    return done, left


# --- What it looks for --------------------------------------------------------------------------


def _rotation_of(addition: fx.Node) -> _Rotation | None:
    for direct, across in _orders(addition, _ADD):
        for turned, cos in _orders(direct, _MUL):
            for crossed, sin in _orders(across, _MUL):
                if _is_crossed(crossed, turned):
                    return _with_angles(*_whole(addition, turned), turned, cos, sin)
    return None


def _orders(node: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a call, and again in the other order, if it is one of these calls."""
    if is_call(node, targets) and len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        yield first, second
        yield second, first


def _is_crossed(node: Any, turned: Any) -> bool:
    """Whether a node is ``cat((-turned[..., half:], turned[..., :half]), -1)``."""
    parts = _parts_side_by_side(node)
    cols = shape_of(turned)[-1:]
    if len(parts) != 2 or not cols or not isinstance(cols[0], int) or cols[0] % 2:
        return False
    negated, first = parts
    if not is_call(negated, _NEG):
        return False
    half = cols[0] // 2
    halves = [_slice_of(part) for part in (first, negated.args[0])]
    return halves == [(turned, slice(None, half, None)), (turned, slice(half, None, None))]


def _whole(addition: fx.Node, turned: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Output and heads of a rotation, of which ``turned`` may be the first columns."""
    source, columns = _slice_of(turned)
    users = [*addition.users]
    cols = shape_of(turned)[-1]
    if columns != slice(None, cols, None) or len(users) != 1:
        return addition, turned
    parts = _parts_side_by_side(users[0])
    rest = source, slice(cols, None, None)
    is_whole = len(parts) == 2 and parts[0] is addition and _slice_of(parts[1]) == rest
    return (users[0], source) if is_whole else (addition, turned)


def _parts_side_by_side(node: Any) -> Any:
    """The operands of a ``cat`` along the last dimension."""
    if not is_call(node, _CAT):
        return ()
    parts: Any = node.args[0]
    dimension = [*node.args[1:], *node.kwargs.values()]
    return parts if dimension in ([-1], [len(shape_of(node)) - 1]) else ()


def _slice_of(node: Any) -> tuple[Any, Any]:
    """``heads`` and ``columns`` of ``heads[..., columns]``."""
    if not is_call(node, (operator.getitem,)):
        return None, None
    source, index = node.args
    is_slice = isinstance(index, tuple) and index[:-1] == (Ellipsis,)
    return (source, index[-1]) if is_slice else (None, None)


def _with_angles(
    output: fx.Node, heads: fx.Node, turned: fx.Node, cos: Any, sin: Any
) -> _Rotation | None:
    if not is_call(cos, _UNSQUEEZE) or not is_call(sin, _UNSQUEEZE):
        return None
    dimensions = [_dimensions(angles) for angles in (cos, sin)]
    cos, sin = cos.args[0], sin.args[0]
    ranks = [len(shape_of(node)) for node in (heads, cos, sin)]
    if dimensions not in ([[1], [1]], [[2], [2]]) or ranks != [4, 3, 3]:
        return None
    return _Rotation(output, heads, turned, cos, sin, dimensions[0][0])


def _dimensions(call: fx.Node) -> list[int]:
    """The arguments of a call that are dimensions, where its result has four."""
    dimensions = (*call.args[1:], *call.kwargs.values())
    return [d % 4 for d in dimensions if isinstance(d, int)]


def _norm_before(graph: fx.Graph, rotation: _Rotation) -> _Norm | None:
    """The RMS norm of this package whose output is rotated."""
    output: Any = rotation.heads
    if rotation.head_dimension == 1 and is_call(output, _TRANSPOSE):
        if _dimensions(output) not in ([1, 2], [2, 1]):
            return None
        output = output.args[0]
    call = output.args[0] if is_call(output, (operator.getitem,)) else output
    if not isinstance(call, fx.Node) or (call is not output and output.args[1] != 0):
        return None
    given = arguments_of_norm(graph, call)
    return _Norm(call, output, given) if given and given["norm"] == "rms_norm" else None


# --- Whether it may be fused --------------------------------------------------------------------


def _why_not(graph: fx.Graph, rotation: _Rotation, norm: _Norm) -> str:
    given, weight = norm.given, norm.given["weight"]
    output, heads, turned, cos, sin, _ = rotation
    of_norm = [given["input"], *([] if weight is None else [weight])]
    values: dict[fx.Node, Any] = {
        n: value_of(n) for n in (output, norm.output, heads, turned, cos, sin, *of_norm)
    }
    if any(value is None for value in values.values()):
        return "a tensor is not a plain one"
    if given["normalized_ndim"] != 1 or any(
        given[name] is not None for name in ("residual", "bias", "rng_state")
    ):
        return "the norm in front of a rotation has a residual, a bias, dropout or more dimensions"
    if not _shapes_fit(rotation):
        return "cos and sin are not those of each position"
    expected = {norm.output: 1, heads: 2, turned: 3}  # the last holds where some are the same
    if any(len(node.users) != count for node, count in expected.items()):
        return "normalised heads are used without rotation, too"
    dtype = values[heads].dtype
    if {values[node].dtype for node in (given["input"], cos, sin, output)} != {dtype}:
        return "the dtypes of a norm and of the rotation behind it differ"
    # Elsewhere the product with the weight is not rounded before the rotation.
    is_rounded = weight is None or (values[weight].dtype == dtype and not given["zero_centered"])
    if given["rounding"] != "once" and not is_rounded:
        return "the roundings of a norm and of the rotation behind it do not fit together"
    chains = [_chain_of_halves(angles) for angles in (cos, sin)]
    if not all(chains) or values[cos].requires_grad or values[sin].requires_grad:
        return "the graph does not show that both halves of cos and sin are equal"
    between = _between((norm.output, cos, sin), output)
    if may_change(graph, {*chains[0], *chains[1], *of_norm, *between}):
        return "something may change in place what a rotation or the norm before it reads"
    is_same_mode = values[norm.output].requires_grad == values[output].requires_grad
    if not is_same_mode or changes_mode(graph, norm.node, output):
        return "a norm and the rotation behind it are not in the same mode"
    return ""


def _between(operands: tuple[fx.Node, ...], result: fx.Node) -> set[fx.Node]:
    """What leads from some nodes to another one, with them and without it."""
    found, rest = set[fx.Node](), [result]
    while rest:
        new = set(rest.pop().all_input_nodes) - found
        found |= new
        rest += new - set(operands)
    return found


def _shapes_fit(rotation: _Rotation) -> bool:
    """Whether there is a number in cos and sin for each pair of columns of each position."""
    batch, *middle, _ = shape_of(rotation.heads)
    expected = [batch, middle[2 - rotation.head_dimension], shape_of(rotation.turned)[-1]]
    cos = shape_of(rotation.cos)
    return not (
        may_differ(cos, shape_of(rotation.sin))
        or may_differ(shape_of(rotation.output), shape_of(rotation.heads))
        or (may_differ(cos, expected) and may_differ(cos, [1, *expected[1:]]))
    )


def _chain_of_halves(angles: Any) -> list[fx.Node]:
    """How ``angles`` came from ``cat((x, x), -1)``, element by element; or nothing."""
    chain: list[fx.Node] = []
    while isinstance(angles, fx.Node):
        chain.append(angles)
        parts = _parts_side_by_side(angles)
        if len(parts) == 2 and parts[0] is parts[1]:
            return chain
        if not is_call(angles, _ELEMENTWISE) or len(angles.all_input_nodes) != 1:
            return []
        angles = angles.args[0]
    return []


# --- Fusing -------------------------------------------------------------------------------------


def _fuse(graph: fx.Graph, rotation: _Rotation, norm: _Norm) -> str:
    """Put the fused op where the rotation was. Returns a reason if that has to stay."""
    output, given = rotation.output, norm.given
    rounding = "before_rotation" if given["rounding"] == "once" else "before_weight"
    swaps = rotation.head_dimension == 1
    half = slice(None, shape_of(rotation.cos)[-1] // 2, None)
    new: list[fx.Node] = []

    def call(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(function, args, kwargs)
        new.append(node)
        values = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["example_value"] = function(*values, **kwargs)
        return node

    try:
        with graph.inserting_before(output):
            angles = [call(operator.getitem, a, (..., half)) for a in (rotation.cos, rotation.sin)]
            rows = given["input"]
            if swaps and norm.output is rotation.heads:
                rows = call(torch.transpose, rows, 1, 2)
            options = {"zero_centered": given["zero_centered"], "rounding": rounding}
            operands = rows, *angles, given["weight"], given["eps"]
            fused = call(fused_rms_norm_rope, *operands, **options)
            fused = call(torch.transpose, fused, 1, 2) if swaps else fused
        reason = _why_not_instead(fused, output)
    except Exception as error:  # what it does not foresee must not keep a model from compiling
        reason = f"fused_rms_norm_rope does not take it: {error}"
    if reason:
        for node in reversed(new):
            graph.erase_node(node)
        return reason
    # What is left without a user has no effect, and goes with the compiler's first pass over it.
    output.replace_all_uses_with(fused)
    graph.erase_node(output)
    return ""


def _why_not_instead(fused: fx.Node, output: fx.Node) -> str:
    new, old = fused.meta["example_value"], output.meta["example_value"]
    if may_differ(new.stride(), old.stride()) and shows_order(output):
        return "what uses the output of a rotation may depend on its order in memory"
    return ""
