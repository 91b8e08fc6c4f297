"""The implementations that are compared, all behind one signature.

Every peer's function is called as `run(input, residual, weight, bias)`; residual and bias are None
where the op has none. It returns the output, or (output, sum) for the add ops. All of them record
autograd, so that one way of timing a backward serves all. A peer that cannot be imported, or that
has no such op, raises; the caller prints the reason and goes on.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import DROPOUT_P

Result = Tensor | tuple[Tensor, Tensor]
Run = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Result]

LAYER_NORM_EPS = 1e-5
RMS_NORM_EPS = 1e-6
OURS = "fused_op"


class MissingOp(Exception):
    """The peer has no such op."""


@dataclass(frozen=True)
class Peer:
    """One implementation: `load(op)` imports it and returns its function for that op."""

    name: str
    distribution: str  # the name on the package index, to look the version up
    load: Callable[[str], Run]
    # Ops whose parameters must be fp32 whatever the input is; parameter traffic is negligible.
    float32_parameters: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


def torch_run(op: str) -> Run:
    """The op in PyTorch's own functions; also what every peer's values are compared with."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if op.endswith("layer_norm"):
            return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPS)
        return F.rms_norm(x, weight.shape, weight, RMS_NORM_EPS)

    def plain(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Result:
        return norm(x, weight, bias)

    def add(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Result:
        total = x + residual
        return norm(total, weight, bias), total

    def drop(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Result:
        return add(F.dropout(x, DROPOUT_P), residual, weight, bias)

    return drop if op.startswith("dropout_") else add if op.startswith("add_") else plain


def _ours(op: str) -> Run:
    from fused_op import (
        fused_add_layer_norm,
        fused_add_rms_norm,
        fused_layer_norm,
        fused_rms_norm,
    )

    runs: dict[str, Run] = {
        "layer_norm": lambda x, _, w, b: fused_layer_norm(x, w, b, LAYER_NORM_EPS),
        "rms_norm": lambda x, _, w, b: fused_rms_norm(x, w, RMS_NORM_EPS),
        "add_layer_norm": lambda x, r, w, b: fused_add_layer_norm(x, r, w, b, LAYER_NORM_EPS),
        "add_rms_norm": lambda x, r, w, b: fused_add_rms_norm(x, r, w, RMS_NORM_EPS),
        "dropout_add_layer_norm": lambda x, r, w, b: fused_add_layer_norm(
            x, r, w, b, LAYER_NORM_EPS, dropout_p=DROPOUT_P
        ),
        "dropout_add_rms_norm": lambda x, r, w, b: fused_add_rms_norm(
            x, r, w, RMS_NORM_EPS, dropout_p=DROPOUT_P
        ),
    }
    return runs[op]


def _compiled(op: str) -> Run:
    import torch._functorch.config as functorch_config

    # A backward that frees its saved tensors cannot be called again, and a timed one is.
    functorch_config.donated_buffer = False
    # Beyond 8 shapes of one function torch.compile gives up and runs it eagerly.
    torch.compiler.reset()
    compiled: Run = torch.compile(torch_run(op), dynamic=False, fullgraph=True)
    return compiled


def _liger(op: str) -> Run:
    from liger_kernel.ops import (
        LigerFusedAddRMSNormFunction,
        LigerLayerNormFunction,
        LigerRMSNormFunction,
    )

    # Not in place (the last argument): a timed backward must find its dy unchanged.
    rms_options: tuple[Any, ...] = (RMS_NORM_EPS, 0.0, "llama", False)
    runs: dict[str, Run] = {
        "layer_norm": lambda x, _, w, b: LigerLayerNormFunction.apply(x, w, b, LAYER_NORM_EPS),
        "rms_norm": lambda x, _, w, b: LigerRMSNormFunction.apply(x, w, *rms_options),
        "add_rms_norm": lambda x, r, w, b: LigerFusedAddRMSNormFunction.apply(
            x, r, w, *rms_options
        ),
    }
    return _choose(runs, op)


def _liger_cute(op: str) -> Run:
    from liger_kernel import functional as liger

    impl = "nvidia-cutedsl"  # what Liger chooses on Hopper where CuTe DSL is installed
    runs: dict[str, Run] = {
        "layer_norm": lambda x, _, w, b: liger.layer_norm(x, w, b, LAYER_NORM_EPS, impl=impl),
        "rms_norm": lambda x, _, w, b: liger.rms_norm(x, w, RMS_NORM_EPS, impl=impl),
        "add_rms_norm": lambda x, r, w, b: liger.fused_add_rms_norm(
            x, r, w, RMS_NORM_EPS, impl=impl
        ),
    }
    return _choose(runs, op)


def _fla(op: str) -> Run:
    from fla.modules.layernorm import layer_norm, rms_norm

    if op.startswith("dropout_"):
        raise MissingOp(f"it has no {op}")
    function, eps = (
        (layer_norm, LAYER_NORM_EPS) if op.endswith("layer_norm") else (rms_norm, RMS_NORM_EPS)
    )

    def run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Result:
        result: Result = function(x, weight, bias, residual, eps, prenorm=residual is not None)
        return result

    return run


def _quack(op: str) -> Run:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm

    class QuackLayerNorm(torch.autograd.Function):
        """QuACK has both kernels, but no autograd for its layer norm."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            out, rstd, mean = layernorm_fwd(
                x, weight, bias, LAYER_NORM_EPS, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, weight, rstd, mean)
            return out

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, dy, rstd, mean)

    def layer_norm(x: Tensor, _: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            return QuackLayerNorm.apply(x, weight, bias)
        return layernorm_fwd(x, weight, bias, LAYER_NORM_EPS)

    runs: dict[str, Run] = {
        "layer_norm": layer_norm,
        "rms_norm": lambda x, _, w, b: rmsnorm(x, w, eps=RMS_NORM_EPS),
        "add_rms_norm": lambda x, r, w, b: rmsnorm(
            x, w, residual=r, eps=RMS_NORM_EPS, prenorm=True
        ),
    }
    return _choose(runs, op)


def _apex(op: str) -> Run:
    from apex.normalization.fused_layer_norm import (
        fused_layer_norm_affine,
        fused_rms_norm_affine,
    )

    runs: dict[str, Run] = {
        "layer_norm": lambda x, _, w, b: fused_layer_norm_affine(x, w, b, w.shape, LAYER_NORM_EPS),
        "rms_norm": lambda x, _, w, b: fused_rms_norm_affine(x, w, w.shape, RMS_NORM_EPS),
    }
    return _choose(runs, op)


def _flash_attention(op: str) -> Run:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    function = layer_norm_fn if op.endswith("layer_norm") else rms_norm_fn
    eps = LAYER_NORM_EPS if op.endswith("layer_norm") else RMS_NORM_EPS
    p = DROPOUT_P if op.startswith("dropout_") else 0.0

    def run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Result:
        return function(
            *(x, weight, bias),
            residual=residual,
            eps=eps,
            dropout_p=p,
            prenorm=residual is not None,
        )

    return run


def _choose(runs: dict[str, Run], op: str) -> Run:
    if op not in runs:
        raise MissingOp(f"it has no {op}")
    return runs[op]


PEERS: tuple[Peer, ...] = (
    Peer(OURS, "fused_op", _ours),
    Peer("PyTorch", "torch", torch_run),
    Peer("torch.compile", "torch", _compiled),
    Peer("Liger", "liger_kernel", _liger),
    Peer("Liger CuTe", "liger_kernel", _liger_cute),
    Peer("FLA", "fla-core", _fla),
    Peer("QuACK", "quack-kernels", _quack, float32_parameters=("layer_norm",)),
    Peer("Apex", "apex", _apex),
    Peer("flash-attention", "flash-attn", _flash_attention),
)


def select(names: Sequence[str] | None) -> tuple[Peer, ...]:
    """Ours first, then the named peers (all of them for None), in the order of `PEERS`.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    if names is None:
        return PEERS
    known = {peer.name.lower(): peer for peer in PEERS}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise ValueError(
            f"unknown peer {unknown[0]!r}; known are {', '.join(peer.name for peer in PEERS)}"
        )
    wanted = {name.lower() for name in names} | {OURS}
    return tuple(peer for peer in PEERS if peer.name.lower() in wanted)
