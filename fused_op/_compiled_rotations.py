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
from torch import Tensor, fx

from ._inductor import arguments_of
from ._rms_norm_rope import fused_rms_norm_rope

_FORWARD = torch.ops.fused_op.norm_forward.default

_ADD: Any = (operator.add, torch.add, "add")
_MUL: Any = (operator.mul, torch.mul, "mul")
_NEG: Any = (operator.neg, torch.neg, "neg")
_CAT: Any = (torch.cat,)
_UNSQUEEZE: Any = (torch.unsqueeze, "unsqueeze")
_TRANSPOSE: Any = (torch.transpose, "transpose")
_SWAPPED = ([1, 2], [2, 1])
# What computes each element from the one in its place.
_ELEMENTWISE: Any = (torch.cos, "cos", torch.sin, "sin", "to", "float", "contiguous", *_MUL)


_IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift, operator.setitem),
}


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
    for addition in [node for node in graph.nodes if _is_call(node, _ADD)]:
        rotation = _rotation_of(addition)
        norm = None if rotation is None else _norm_before(graph, rotation)
        if rotation is None or norm is None:
            continue
        if reason := _why_not(graph, rotation, norm):
            left[reason] += 1
        else:
            _fuse(graph, rotation, norm)
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
    if _is_call(node, targets) and len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        yield first, second
        yield second, first


def _is_call(node: Any, targets: Any) -> bool:
    is_call = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return is_call and node.target in targets


def _is_crossed(node: Any, turned: Any) -> bool:
    """Whether a node is ``cat((-turned[..., half:], turned[..., :half]), -1)``."""
    parts = _parts_side_by_side(node)
    cols = _shape(turned)[-1:]
    if len(parts) != 2 or not cols or not isinstance(cols[0], int) or cols[0] % 2:
        return False
    negated, first = parts
    if not _is_call(negated, _NEG):
        return False
    half = cols[0] // 2
    halves = [_slice_of(part) for part in (first, negated.args[0])]
    return halves == [(turned, slice(None, half, None)), (turned, slice(half, None, None))]


def _whole(addition: fx.Node, turned: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Output and heads of a rotation, of which ``turned`` may be the first columns."""
    source, columns = _slice_of(turned)
    users = [*addition.users]
    cols = _shape(turned)[-1]
    if columns != slice(None, cols, None) or len(users) != 1:
        return addition, turned
    parts = _parts_side_by_side(users[0])
    rest = source, slice(cols, None, None)
    is_whole = len(parts) == 2 and parts[0] is addition and _slice_of(parts[1]) == rest
    return (users[0], source) if is_whole else (addition, turned)


def _parts_side_by_side(node: Any) -> Any:
    """The operands of a ``cat`` along the last dimension."""
    if not _is_call(node, _CAT) or len(node.args) != 1:
        return ()
    is_last = node.kwargs.get("dim") in (-1, len(_shape(node)) - 1)
    return node.args[0] if is_last else ()


def _slice_of(node: Any) -> tuple[Any, Any]:
    """``heads`` and ``columns`` of ``heads[..., columns]``."""
    if not _is_call(node, (operator.getitem,)):
        return None, None
    source, index = node.args
    is_slice = isinstance(index, tuple) and index[:-1] == (Ellipsis,)
    return (source, index[-1]) if is_slice else (None, None)


def _with_angles(
    output: fx.Node, heads: fx.Node, turned: fx.Node, cos: Any, sin: Any
) -> _Rotation | None:
    if not _is_call(cos, _UNSQUEEZE) or not _is_call(sin, _UNSQUEEZE):
        return None
    dimensions: list[Any] = []
    for angles in (cos, sin):
        dimensions += [d % 4 for d in (*angles.args[1:], *angles.kwargs.values())]
    cos, sin = cos.args[0], sin.args[0]
    ranks = [len(_shape(node)) for node in (heads, cos, sin)]
    if dimensions not in ([1, 1], [2, 2]) or ranks != [4, 3, 3]:
        return None
    return _Rotation(output, heads, turned, cos, sin, dimensions[0])


def _norm_before(graph: fx.Graph, rotation: _Rotation) -> _Norm | None:
    """The RMS norm of this package whose output is rotated."""
    output: Any = rotation.heads
    if rotation.head_dimension == 1 and _is_call(output, _TRANSPOSE):
        if [dimension % 4 for dimension in output.args[1:]] not in _SWAPPED:
            return None
        output = output.args[0]
    call = output.args[0] if _is_call(output, (operator.getitem,)) else output
    if not isinstance(call, fx.Node) or (call is not output and output.args[1] != 0):
        return None
    given = arguments_of(call) if call.target is _FORWARD else _recorded(graph, call)
    return _Norm(call, output, given) if given and given["norm"] == "rms_norm" else None


def _recorded(graph: fx.Graph, call: fx.Node) -> dict[str, Any] | None:
    """The arguments of the op in an ``autograd.Function``, which has a graph of its own."""
    if getattr(call.target, "__name__", "") != "autograd_function_apply":
        return None
    of_forward: Any = call.args[0]
    body = getattr(graph.owning_module, of_forward.target).graph
    ops = body.find_nodes(op="call_function", target=_FORWARD)
    if len(ops) != 1:
        return None
    outer = dict(zip(body.find_nodes(op="placeholder"), call.args[2:], strict=False))
    inner = arguments_of(ops[0])
    given = {name: outer.get(v) if isinstance(v, fx.Node) else v for name, v in inner.items()}
    lost = [name for name, value in inner.items() if value is not None and given[name] is None]
    return None if lost else given


# --- Whether it may be fused --------------------------------------------------------------------


def _why_not(graph: fx.Graph, rotation: _Rotation, norm: _Norm) -> str:
    given, weight = norm.given, norm.given["weight"]
    _, heads, turned, cos, sin, _ = rotation
    dtype = _value(heads).dtype
    taken_once = {"residual": None, "bias": None, "dropout_p": 0.0, "normalized_ndim": 1}
    if any(given[name] != value for name, value in taken_once.items()):
        return "the norm in front of a rotation has a residual, a bias or dropout"
    expected = {norm.output: 1, heads: 2, turned: 3}  # the last holds where some are the same
    if any(len(node.users) != count for node, count in expected.items()):
        return "normalised heads are used without rotation, too"
    if {_value(node).dtype for node in (given["input"], cos, sin, turned)} != {dtype}:
        return "the dtypes of a norm and of the rotation behind it differ"
    # Elsewhere the product with the weight is not rounded before the rotation.
    is_rounded = weight is None or (_value(weight).dtype == dtype and not given["zero_centered"])
    if given["rounding"] != "once" and not is_rounded:
        return "the roundings of a norm and of the rotation behind it do not fit together"
    chains = [_chain_of_halves(angles) for angles in (cos, sin)]
    if not all(chains) or any(_value(angles).requires_grad for angles in (cos, sin)):
        return "the graph does not show that both halves of cos and sin are equal"
    if _is_disturbed(graph, rotation.output, norm, {*chains[0], *chains[1]}):
        return "something changes in place, or a mode, between a norm and the rotation behind it"
    return ""


def _chain_of_halves(angles: Any) -> list[fx.Node]:
    """How ``angles`` came from ``cat((x, x), -1)``, element by element; or nothing."""
    chain: list[fx.Node] = []
    while isinstance(angles, fx.Node):
        chain.append(angles)
        parts = _parts_side_by_side(angles)
        if len(parts) == 2 and parts[0] is parts[1]:
            return chain
        scale = angles.args[1:] if angles.target in _MUL else ()
        if not _is_call(angles, _ELEMENTWISE) or any(isinstance(s, fx.Node) for s in scale):
            return []
        angles = angles.args[0]
    return []


def _is_disturbed(graph: fx.Graph, output: fx.Node, norm: _Norm, angles: set[fx.Node]) -> bool:
    """Whether computing the norm where the rotation ends could give something else."""
    is_behind_norm = False
    for node in graph.nodes:
        if node is output:
            return False
        is_behind_norm = is_behind_norm or node is norm.node
        name = getattr(node.target, "__name__", str(node.target))
        changed = _changed_by(node, name)
        if is_behind_norm and (changed or "set_grad" in name or "autocast" in name):
            return True
        while isinstance(changed, fx.Node):  # a view of what is its first argument, perhaps
            if changed in angles:
                return True
            changed = changed.args[0] if changed.args else None
    return True


def _changed_by(node: fx.Node, name: str) -> Any:
    """What a call changes in place, if it does."""
    if node.op not in ("call_function", "call_method"):
        return None
    schema = getattr(node.target, "_schema", None)
    changes = (
        (name.endswith("_") and not name.endswith("__"))
        or node.target in _IN_PLACE
        or node.kwargs.get("inplace")
        or (schema is not None and schema.is_mutable)
    )
    return node.kwargs.get("out") or (node.args[0] if changes and node.args else None)


# --- Fusing -------------------------------------------------------------------------------------


def _fuse(graph: fx.Graph, rotation: _Rotation, norm: _Norm) -> None:
    half = _shape(rotation.cos)[-1] // 2
    rounding = "before_rotation" if norm.given["rounding"] == "once" else "before_weight"
    swaps = rotation.head_dimension == 1
    with graph.inserting_before(rotation.output):
        angles = [
            _called(graph, operator.getitem, source, (Ellipsis, slice(None, half, None)))
            for source in (rotation.cos, rotation.sin)
        ]
        rows = norm.given["input"]
        if swaps and norm.output is rotation.heads:
            rows = _called(graph, torch.transpose, rows, 1, 2)
        fused = _called(
            *(graph, fused_rms_norm_rope, rows, *angles, norm.given["weight"], norm.given["eps"]),
            zero_centered=norm.given["zero_centered"],
            rounding=rounding,
        )
        if swaps:
            fused = _called(graph, torch.transpose, fused, 1, 2)
    # What is left without a user has no effect, and goes with the compiler's first pass over it.
    rotation.output.replace_all_uses_with(fused)
    graph.erase_node(rotation.output)


def _called(graph: fx.Graph, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(function, args, kwargs)
    values = [_value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["example_value"] = function(*values, **kwargs)
    return node


def _value(node: fx.Node) -> Tensor:
    """A tensor without data, from which dynamo knows shape and dtype."""
    value: Tensor = node.meta["example_value"]
    return value


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()
