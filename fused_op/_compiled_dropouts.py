"""Dropout in front of a residual addition and a norm in a compiled model: one op for the three.

The pass sees a graph as dynamo recorded it, before autograd. It looks for what GPT-2, BERT and
their successors do, with the norm of this package::

    hidden = residual + dropout(branch, p, training=True)
    output = norm(hidden)

Inductor computes dropout and addition in a kernel of its own, from which the norm would read the
sum again. Backward would read a mask; the fused op computes it again.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ._graph_effects import changes_mode, may_change, value_of
from ._graph_norms import arguments_of_norm, is_call, may_differ
from ._options import Options
from ._philox import traced_dropout_state
from ._routes import run
from .functional import _NormFunction, fused_add_layer_norm, fused_add_rms_norm

_ADD: Any = (operator.add, torch.add, "add")


class _Dropped(NamedTuple):
    """``norm(residual + dropout(branch, p))``."""

    norm: fx.Node  # the call
    given: dict[str, Any]  # its arguments, by name
    addition: fx.Node
    dropout: fx.Node
    branch: fx.Node
    residual: fx.Node
    p: float


def fuse_dropouts(graph: fx.Graph) -> tuple[int, Counter[str]]:
    """Fuse what can be fused: how many, and how many were left for which reason."""
    done, left = 0, Counter[str]()
    for call in [*graph.nodes]:
        if (found := _dropped_before(graph, call)) is None:
            continue
        if reason := _why_not(graph, found) or _fuse(graph, found):
            left[f"dropout: {reason}"] += 1
        else:
            done += 1
    return done, left


def _dropped_before(graph: fx.Graph, call: fx.Node) -> _Dropped | None:
    given = arguments_of_norm(graph, call) if call.op == "call_function" else None
    if not given or given["residual"] is not None or not is_call(given["input"], _ADD):
        return None
    addition: Any = given["input"]
    if len(addition.args) != 2 or addition.kwargs:
        return None
    for dropout, residual in (addition.args, addition.args[::-1]):
        branch, p = _operands_of_dropout(dropout)
        if branch is not None and isinstance(residual, fx.Node) and residual is not dropout:
            return _Dropped(call, given, addition, dropout, branch, residual, p)
    return None


def _operands_of_dropout(node: Any) -> tuple[fx.Node | None, float]:
    """What training drops elements of, and how likely; or nothing."""
    if not isinstance(node, fx.Node) or node.target is not F.dropout:
        return None, 0.0
    call = inspect.signature(F.dropout).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    input, p, training, inplace = call.args
    is_plain = isinstance(p, float) and 0 < p < 1 and training is True and inplace is False
    return (input, p) if is_plain else (None, 0.0)


def _why_not(graph: fx.Graph, found: _Dropped) -> str:
    given = found.given
    parameters = [given[name] for name in ("weight", "bias") if given[name] is not None]
    read = [found.branch, found.residual, found.dropout, found.addition, *parameters]
    if any(value_of(node) is None for node in read):
        return "a tensor is not a plain one"
    branch: Any = value_of(found.branch)
    residual: Any = value_of(found.residual)
    sum: Any = value_of(found.addition)
    if len(found.dropout.users) != 1:
        return "what it drops is used elsewhere, too"
    widens = branch.dtype.itemsize == 2 and residual.dtype is torch.float32
    if sum.dtype != residual.dtype or not (branch.dtype == sum.dtype or widens):
        return "the addition converts"
    if any(
        value.dim() != sum.dim() or may_differ(value.shape, sum.shape)
        for value in (branch, residual)
    ):
        return "the addition broadcasts"
    if not sum.is_contiguous() or not branch.stride(-1) == residual.stride(-1) == 1:
        return "operands or sum do not lie in memory row by row"
    if given["rng_state"] is not None:
        return "dropout follows the norm, too"
    return _why_not_here(graph, found, read, parameters)


def _why_not_here(
    graph: fx.Graph, found: _Dropped, read: list[fx.Node], parameters: list[fx.Node]
) -> str:
    order = {node: i for i, node in enumerate(graph.nodes)}
    if any(order[p] > order[found.addition] for p in parameters):
        return "the parameters of the norm are computed after the addition"
    if may_change(graph, read):
        return "something may change in place what the norm would read"
    if changes_mode(graph, found.dropout, found.norm):
        return "dropout and norm are not in the same mode"
    from torch._inductor import config  # slow to import

    if config.fallback_random:
        return "fallback_random asks for the random numbers of eager mode"
    return ""


def _fuse(graph: fx.Graph, found: _Dropped) -> str:
    """Put the fused op where the addition was. Returns a reason if that has to stay."""
    norm, addition = found.norm, found.addition
    is_tuple = value_of(norm) is None
    outputs = [user for user in norm.users if user.args == (norm, 0)] if is_tuple else [norm]
    if not outputs or (is_tuple and len(outputs) != len(norm.users)):
        return "not the output alone of the norm is used"
    old = value_of(outputs[0]), value_of(addition)
    if any(value is None for value in old):
        return "a tensor is not a plain one"
    options = _options_of(found, *old)
    if options is None:
        return "the normalised dimensions are not constant"
    operands = found.branch, found.residual, found.given["weight"], found.given["bias"], options
    if reason := _why_not_instead(operands, old):
        return reason
    with graph.inserting_before(addition):
        fused = graph.call_function(_add_norm_of_dropped, operands)
        new = [graph.call_function(operator.getitem, (fused, i)) for i in range(2)]
    for node, value in zip((fused, *new), (old, *old), strict=True):
        node.meta["example_value"] = value  # the old ones, with which their views share memory
    for node in outputs:
        node.replace_all_uses_with(new[0])
    for node in dict.fromkeys((*outputs, norm)):
        graph.erase_node(node)
    addition.replace_all_uses_with(new[1])
    graph.erase_node(addition)
    graph.erase_node(found.dropout)
    return ""


def _options_of(found: _Dropped, output: Any, sum: Any) -> Options | None:
    given = found.given
    shape = tuple(sum.shape[sum.dim() - given["normalized_ndim"] :])
    if not all(isinstance(size, int) for size in shape):
        return None
    # A sum that is wider than the branch has no 16 bits that could be rounded to.
    widens = value_of(found.branch).dtype != sum.dtype  # type: ignore[union-attr]
    return Options(
        given["norm"],
        given["eps"],
        shape,
        given["zero_centered"],
        "once" if widens else given["rounding"],
        found.p,
        out_dtype=output.dtype,
        is_checked=True,
    )


def _why_not_instead(operands: tuple[Any, ...], old: tuple[Any, Any]) -> str:
    """Why the fused op cannot take the place of what there was."""
    values: Any = [value_of(node) if isinstance(node, fx.Node) else node for node in operands]
    try:
        with old[1].fake_mode, torch.no_grad():  # nothing is recorded, nor saved by anyone's hooks
            results = _add_norm_of_dropped(*values)
    except Exception as error:  # what it does not foresee must not keep a model from compiling
        return f"the fused op does not take it: {error}"
    for new, before in zip(results, old, strict=True):
        if new.dtype != before.dtype or may_differ(new.stride(), before.stride()):
            return "the results of the fused op are others"
    return ""


def _add_norm_of_dropped(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    op: Any = fused_add_layer_norm if options.norm == "layer_norm" else fused_add_rms_norm
    tensors = input, residual, weight, bias, traced_dropout_state(input)
    outputs: tuple[Tensor, Tensor] = run(op, _NormFunction, options, tensors)
    return outputs
