"""What benchmarks.block compares: a transformer block with the norms of several libraries.

Every variant builds a module for an op of grids.OPS. A plain norm is called as `norm(input)`, one
with an addition as `norm(input, residual)`; that returns the output and the sum, as
FusedAddRMSNorm does, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .grids import DROPOUT_P
from .peers import LAYER_NORM_EPS, OURS, RMS_NORM_EPS, MissingOp


class AddNorm(nn.Module):
    """PyTorch's dropout and addition before any norm."""

    def __init__(self, norm: nn.Module, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout_p = dropout_p

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.dropout_p:
            input = F.dropout(input, self.dropout_p)
        total = input + residual
        return self.norm(total), total


def _torch(op: str, hidden: int) -> nn.Module:
    norm: nn.Module
    if op.endswith("layer_norm"):
        norm = nn.LayerNorm(hidden, LAYER_NORM_EPS)
    else:
        norm = nn.RMSNorm(hidden, RMS_NORM_EPS)
    return AddNorm(norm, _dropout_p(op)) if "add_" in op else norm


def _fused(op: str, hidden: int) -> nn.Module:
    from fused_op import FusedAddLayerNorm, FusedAddRMSNorm

    if "add_" not in op:
        return _fused_norm(op, hidden)
    if op.endswith("layer_norm"):
        return FusedAddLayerNorm(hidden, LAYER_NORM_EPS, dropout_p=_dropout_p(op))
    return FusedAddRMSNorm(hidden, RMS_NORM_EPS, dropout_p=_dropout_p(op))


def _fused_norm(op: str, hidden: int, **options: Any) -> nn.Module:
    from fused_op import FusedLayerNorm, FusedRMSNorm

    if op.endswith("layer_norm"):
        return FusedLayerNorm(hidden, LAYER_NORM_EPS, **options)
    return FusedRMSNorm(hidden, RMS_NORM_EPS, **options)


def _separate_add(op: str, hidden: int) -> nn.Module:
    if "add_" not in op:
        raise MissingOp(f"{op} adds nothing")
    return AddNorm(_fused_norm(op, hidden), _dropout_p(op))


def _memory_efficient(op: str, hidden: int) -> nn.Module:
    norm = _fused_norm(op, hidden, memory_efficient=True)
    return AddNorm(norm, _dropout_p(op)) if "add_" in op else norm


def _liger(op: str, hidden: int) -> nn.Module:
    from liger_kernel.transformers import LigerFusedAddRMSNorm, LigerLayerNorm, LigerRMSNorm

    if op == "add_rms_norm":
        fused: nn.Module = LigerFusedAddRMSNorm(hidden, eps=RMS_NORM_EPS)
        return fused
    make = LigerLayerNorm if op.endswith("layer_norm") else LigerRMSNorm
    eps = LAYER_NORM_EPS if op.endswith("layer_norm") else RMS_NORM_EPS
    # Its RMSNorm writes the gradient of its input over that of its output, unless told otherwise;
    # as the only reader of that one it may, so it is left at its default.
    norm: nn.Module = make(hidden, eps=eps)
    return AddNorm(norm, _dropout_p(op)) if "add_" in op else norm


def _dropout_p(op: str) -> float:
    return DROPOUT_P if op.startswith("dropout_") else 0.0


@dataclass(frozen=True)
class Variant:
    """`build(op, hidden)` makes the module, or raises; then it is left out, with the reason."""

    name: str
    build: Callable[[str, int], nn.Module]
    compiled: bool = False  # measured by torch.compile too


TORCH = "PyTorch"
VARIANTS = (
    Variant(TORCH, _torch, compiled=True),
    Variant(OURS, _fused, compiled=True),
    Variant(f"{OURS}, separate add", _separate_add),
    Variant(f"{OURS}, memory_efficient", _memory_efficient),
    Variant("Liger", _liger),
)


class Block(nn.Module):
    """Pre-norm attention and MLP, on the last branch that is not added yet and the stream.

    Each norm comes right after an addition, so the two can be one kernel in the chain of blocks of
    any pre-norm transformer.
    """

    def __init__(self, hidden: int, make_norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.heads = max(1, hidden // 128)
        self.attention_norm = make_norm()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = make_norm()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        y, stream = self.attention_norm(branch, stream)
        batch, length, width = y.shape
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        branch = self.project(y.transpose(1, 2).reshape(batch, length, width))
        y, stream = self.mlp_norm(branch, stream)
        return self.down(F.gelu(self.up(y))), stream
