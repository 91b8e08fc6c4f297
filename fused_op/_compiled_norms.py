"""PyTorch's norms in graphs that Inductor compiles, replaced by ours: for ``override_torch``.

Inductor decomposes PyTorch's norms, so no kernel that is registered for them is called. The pass
changes the graph before that: as dynamo recorded it, before autograd.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ._arguments import KERNEL_DTYPES
from ._options import Shape
from .functional import fused_layer_norm, fused_rms_norm

_lock = threading.Lock()
counts = {"replaced": 0, "kept": 0}  # norms in graphs, since the process began


def replace_norms(graph: fx.Graph) -> None:
    """Let PyTorch's norms in a graph of torch functions be computed by ours."""
    for target, ours in _OURS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            is_taken = _takes(**_tensors(ours, node))
            if is_taken:
                node.target = ours
            with _lock:
                counts["replaced" if is_taken else "kept"] += 1


def _tensors(function: Any, node: fx.Node) -> dict[str, Tensor | None]:
    """What dynamo knows of the tensors of a call."""
    call = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    given = {name: call.get(name) for name in ("input", "weight", "bias")}
    return {
        name: node.meta.get("example_value") if isinstance(node, fx.Node) else None
        for name, node in given.items()
    }


def _takes(input: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether there is a kernel for a call, whose arguments dynamo has found to be right."""
    if input is None:
        return False
    dtypes = {t.dtype for t in (weight, bias) if t is not None}
    fitting = {input.dtype} | ({torch.float32} if input.dtype.itemsize == 2 else set())
    return (
        input.dtype in KERNEL_DTYPES
        and input.layout is torch.strided
        and not input.is_nested
        and input.device.type in ("cpu", "cuda")
        and len(dtypes) <= 1
        and dtypes <= fitting
    )


def _layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # of torch.layer_norm, which does not use it
) -> Tensor:
    return fused_layer_norm(
        *(input, weight, bias, eps),
        normalized_shape=normalized_shape,
        out_dtype=_out_dtype("layer_norm", input),
    )


def _rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return fused_rms_norm(
        *(input, weight, eps),
        normalized_shape=normalized_shape,
        out_dtype=_out_dtype("rms_norm", input),
    )


_OURS: dict[Any, Any] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}


def _out_dtype(op: str, input: Tensor) -> torch.dtype | None:
    """float32 where autocast has the norm computed in that, as it does on CUDA."""
    device = input.device.type
    is_cast = torch.is_autocast_enabled(device) and (
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", f"Autocast{device.upper()}")
    )
    return torch.float32 if is_cast and input.dtype.itemsize == 2 else None
