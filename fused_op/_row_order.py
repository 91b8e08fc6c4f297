"""Tensors of compiled graphs, in the order in which a kernel reads rows.

Attention hands its gradients over head by head, and the norm of the queries wants them token by
token. An op would copy them itself, which no compiler sees. The copy of a graph costs nothing:
Inductor lets what computes the gradient write it there.

What is saved for backward, Inductor writes in an order of its own if it takes it for an image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._sizes import holds, lies_in_order


def is_compiled(tensor: Tensor | None) -> bool:
    """Whether a compiler may be looking: it passes tensors without data, or records the call."""
    return tensor is not None and (is_dynamo_compiling() or type(tensor) is not Tensor)


def _in_row_order(tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy if its dimensions are permuted in memory."""
    pairs = zip(tensor.stride(), tensor.stride()[1:], strict=False)
    if any(holds(outer < inner) and not holds(outer == 0) for outer, inner in pairs):
        return tensor.contiguous()
    return tensor


def in_row_order(tensor: Any) -> Any:
    """``_in_row_order`` as an op, for a tensor or None.

    Dynamo records the op, and decides nothing by strides that are another tensor's when it runs.
    """
    return None if tensor is None else torch.ops.fused_op.in_row_order.default(tensor)


_LIBRARY = torch.library.Library("fused_op", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "in_row_order(Tensor(a) self) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("in_row_order", _in_row_order, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def unlike_image(x: Any) -> Any:
    """A view to save of a contiguous tensor of four dimensions that is traced, with one in front.

    In a model with convolutions, Inductor keeps any tensor of four dimensions for backward as
    ``torch.channels_last``, in a copy of its own if the op in forward reads another order.
    """
    if is_dynamo_compiling() and type(x) is Tensor and x.dim() == 4 and lies_in_order(x):
        return x.unsqueeze(0)
    return x
