"""Residual additions and rotations beside the norms of a compiled model, moved into their kernels.

Inductor cannot fuse an addition with an op that it does not generate. ``compile_pass`` finds the
additions in its graphs, forward and backward, and lets the norms do them. The rotations of
attention, and additions behind dropout, are found before: in ``_compiled_rotations.py`` and
``_compiled_dropouts.py``.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import _compiled_dropouts, _compiled_rotations
from ._inductor import arguments_of, install

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
_SQUEEZE = torch.ops.aten.squeeze.dim
_FORWARD = torch.ops.fused_op.norm_forward.default
_BACKWARD = torch.ops.fused_op.norm_backward.default


class CompilePassReport(NamedTuple):
    """What a :class:`CompilePass` did in the graphs that were compiled so far.

    Graphs from the compiler's caches may not be counted.
    """

    forward: int
    """Norms that now add the residual, too, to what they drop where dropout was in front of it."""
    backward: int
    """Backward passes of norms that now add the gradient of the residual, too."""
    rotations: int
    """Norms of queries or keys that now apply the rotary embedding, too."""
    left: dict[str, int]
    """Additions, rotations and dropouts beside a norm that stayed, by reason."""

    def __str__(self) -> str:
        """A line for each count."""
        lines = [f"additions fused into norms: {self.forward} forward, {self.backward} backward"]
        if self.rotations:
            lines.append(f"rotations fused into norms: {self.rotations}")
        lines += [f"  left {count}: {reason}" for reason, count in self.left.items()]
        return "\n".join(lines)


class CompilePass:
    """A handle of :func:`compile_pass`, and a context manager."""

    def __init__(self) -> None:
        """See :func:`compile_pass`."""
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._slots = [
            install("pre_grad_custom_pass", self._fuse_before_autograd),
            install("post_grad_custom_pre_pass", self._fuse_additions),
        ]

    def undo(self) -> None:
        """Leave graphs that are compiled from now on alone. Twice has no effect."""
        for slot in self._slots:
            slot.remove()

    def report(self) -> CompilePassReport:
        """Return what it has done so far."""
        with self._lock:
            counts = {name: self._done[name] for name in ("forward", "backward", "rotations")}
            return CompilePassReport(**counts, left=dict(self._left))

    def _fuse_before_autograd(self, graph: fx.Graph) -> None:
        rotations, rotations_left = _compiled_rotations.fuse_rotations(graph)
        dropouts, dropouts_left = _compiled_dropouts.fuse_dropouts(graph)
        with self._lock:
            self._done += Counter(rotations=rotations, forward=dropouts)
            self._left += rotations_left + dropouts_left

    def _fuse_additions(self, graph: fx.Graph) -> None:
        order = {node: i for i, node in enumerate(graph.nodes)}
        done: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for node in graph.find_nodes(op="call_function", target=_FORWARD):
            if (addition := _addition_before(node)) is None:
                continue
            if reason := _why_not_forward(node, addition, order):
                left[reason] += 1
            else:
                _fuse_forward(graph, node, addition, order)
                done["forward"] += 1
        for node in graph.find_nodes(op="call_function", target=_BACKWARD):
            if (found := _addition_after(node)) is None:
                continue
            if reason := _why_not_backward(node, *found, order):
                left[reason] += 1
            else:
                _fuse_backward(graph, node, *found)
                done["backward"] += 1
        with self._lock:
            self._done += done
            self._left += left

    def __enter__(self) -> CompilePass:
        """Return the handle itself, which is on from its making."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo."""
        self.undo()


def compile_pass() -> CompilePass:
    """Have ``torch.compile`` fuse residual additions, and rotations, with this package's norms.

    In a graph that Inductor compiles, ``x + y`` before a norm becomes :func:`fused_add_layer_norm`
    or :func:`fused_add_rms_norm`, with the same bits. In backward, the kernel also adds the
    gradient that arrives at the residual: ``round(dx + gradient)`` instead of
    ``round(round(dx) + gradient)``, which is the same in float32 and float64.

    Dropout of one operand moves with the addition: ``x + dropout(y)`` before a norm. Nothing stores
    the mask then. Its numbers follow ``torch.manual_seed`` but differ from those that Inductor
    would draw, and the probability is rounded to a multiple of ``2^-16``.

    The rotary embedding of queries and keys moves into the RMS norm in front of it, as
    :func:`fused_rms_norm_rope` with the roundings of both: models that compute
    ``heads * cos + rotate_half(heads) * sin`` as Llama of transformers does, with cos and sin of
    the dtype of the heads. Both halves of cos and sin must be seen to be equal, so the graph has to
    contain where they come from: a layer that is compiled alone, or checkpointed, keeps its
    rotations.

    An addition stays if it broadcasts or converts, if its result does not lie in memory row by row,
    if dropout follows the norm, or if Inductor fuses it better with what computes its operand.

    Additions move on modules of this package, on converted models, and on norms that
    :func:`override_torch` replaced; rotations and dropout not on the last ones. Graphs that already
    exist do not change: call this before the first call of the model.

    Returns:
        A handle, which is also a context manager. ``undo()``, or the end of the ``with`` block,
        ends it, and ``report()`` says what it did.

    Raises:
        RuntimeError: this torch has no slots for such passes in ``torch._inductor.config``.
    """
    return CompilePass()


def _is_plain_addition(node: Any, may_widen: bool = False) -> bool:
    """Whether a node adds two tensors of its own shape, dtype and device, not scaled.

    With ``may_widen``, one of them may have 16 bits beside float32, as under autocast.
    """
    if not isinstance(node, fx.Node) or node.target is not _ADD:
        return False
    if len(node.args) != 2 or node.kwargs:
        return False
    values: list[Any] = [a.meta.get("val") if isinstance(a, fx.Node) else None for a in node.args]
    val: Any = node.meta.get("val")
    if not all(isinstance(v, torch.Tensor) for v in (val, *values)):
        return False
    narrow = [v.dtype for v in values if v.dtype != val.dtype]
    if narrow and not (may_widen and val.dtype is torch.float32 and len(narrow) == 1):
        return False
    return all(dtype in (torch.float16, torch.bfloat16) for dtype in narrow) and all(
        (v.device, v.dim()) == (val.device, val.dim())
        and all(statically_known_true(n == m) for n, m in zip(v.shape, val.shape, strict=True))
        for v in values
    )


# --- Forward ------------------------------------------------------------------------------------


def _addition_before(norm: fx.Node) -> fx.Node | None:
    """The addition whose result a norm without a residual normalises."""
    given = arguments_of(norm)
    addition = given["input"]
    if isinstance(addition, fx.Node) and addition.target is _CLONE:  # in the order of rows
        addition = addition.args[0]
    is_add = isinstance(addition, fx.Node) and addition.target is _ADD
    return addition if is_add and given["residual"] is None else None


def _why_not_forward(norm: fx.Node, addition: fx.Node, order: dict[fx.Node, int]) -> str:
    given = arguments_of(norm)
    if not _is_plain_addition(addition, may_widen=True):
        return "the addition broadcasts, scales or converts"
    if given["dropout_p"]:
        return "dropout follows the norm"
    if not addition.meta["val"].is_contiguous():
        return "the sum does not lie in memory row by row"
    operands = [operand for operand in addition.args if isinstance(operand, fx.Node)]
    if any(_is_fused_by_inductor(operand) for operand in operands):
        return "Inductor fuses the addition with what computes its operand"
    parameters = [given[name] for name in ("weight", "bias") if given[name] is not None]
    # A norm of an earlier rewrite is new in the graph, as what it replaces was.
    if any(order.get(p, 0) > order[addition] for p in parameters):
        return "the parameters of the norm are computed after the addition"
    return ""


def _is_fused_by_inductor(operand: fx.Node) -> bool:
    """Whether an operand, unlike a result of mm, would be written to memory only for us."""
    tags = getattr(operand.target, "tags", ())
    return torch.Tag.pointwise in tags and len(operand.users) == 1


def _fuse_forward(
    graph: fx.Graph, norm: fx.Node, addition: fx.Node, order: dict[fx.Node, int]
) -> None:
    # A residual may be wider than the input, and gives the sum its dtype; the output keeps its own.
    both: Any = addition.args
    operands = sorted(both, key=lambda operand: operand.meta["val"].dtype.itemsize)
    given = arguments_of(norm) | dict(zip(("input", "residual"), operands, strict=True))
    given["output_dtype"] = given["output_dtype"] or addition.meta["val"].dtype
    if operands[0].meta["val"].dtype != operands[1].meta["val"].dtype:
        given["rounding"] = "once"  # the sum is wider than 16 bits, which it could be rounded to
    output, _, stats = norm.meta["val"]
    with graph.inserting_before(addition):
        fused = graph.call_function(_FORWARD, tuple(given.values()))
        sum = graph.call_function(operator.getitem, (fused, 1))
    fused.meta = norm.meta | {"val": (output, addition.meta["val"], stats)}
    sum.meta = dict(addition.meta)
    order[fused] = order[sum] = order[addition]
    norm.replace_all_uses_with(fused)
    graph.erase_node(norm)
    addition.replace_all_uses_with(sum)
    graph.erase_node(addition)


# --- Backward -----------------------------------------------------------------------------------


def _addition_after(backward: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gradient of the input, and the addition that alone uses it."""
    gradient = _only(user for user in backward.users if user.args == (backward, 0))
    if gradient is None:
        return None
    user = _only(gradient.users)
    if user is not None and user.target is _SQUEEZE and user.args == (gradient, 0):
        gradient, user = user, _only(user.users)  # of unlike_image(x)
    return (gradient, user) if user is not None and user.target is _ADD else None


def _only(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The node, if there is one alone."""
    found = [*nodes]
    return found[0] if len(found) == 1 else None


def _why_not_backward(
    backward: fx.Node, gradient: fx.Node, addition: fx.Node, order: dict[fx.Node, int]
) -> str:
    given = arguments_of(backward)
    if not _is_plain_addition(addition):
        return "the addition of gradients broadcasts, scales or converts"
    if given["residual_dtype"] is not None or given["dropout_p"] or given["x_is_output"]:
        return "the norm has a residual, dropout or memory_efficient already"
    other = _other_operand(gradient, addition)
    x = given["x"].meta["val"]
    if not x.dtype == given["input_dtype"] == addition.meta["val"].dtype:
        return "the gradients differ in dtype"
    if order[other] > order[backward]:
        return "the other gradient is computed after that of the norm"
    return ""


def _other_operand(gradient: fx.Node, addition: fx.Node) -> Any:
    first, second = addition.args
    return second if first is gradient else first


def _fuse_backward(
    graph: fx.Graph, backward: fx.Node, gradient: fx.Node, addition: fx.Node
) -> None:
    given = arguments_of(backward)
    # The kernel reads no residual: that there is one says that grad_sum has to be added.
    given["grad_sum"] = _other_operand(gradient, addition)
    if gradient.target is _SQUEEZE:  # x has one more dimension, in front, and so has its gradient
        with graph.inserting_before(backward):
            grad_sum = graph.call_function(torch.ops.aten.unsqueeze.default, (given["grad_sum"], 0))
        grad_sum.meta = {"val": given["grad_sum"].meta["val"].unsqueeze(0)}
        given["grad_sum"] = grad_sum
    given["residual_dtype"] = given["input_dtype"]
    backward.args, backward.kwargs = tuple(given.values()), {}
    addition.replace_all_uses_with(gradient)
    graph.erase_node(addition)
