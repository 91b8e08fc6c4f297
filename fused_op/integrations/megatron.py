"""Megatron-Core's norms, for any of its backends.

    class Backend(FusedNorms, LocalSpecProvider):
        pass

``Backend`` is then what its specs take their modules from. Nothing of Megatron is imported: a norm
is built from the fields of its config.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..modules import FusedLayerNorm, FusedRMSNorm


class FusedNorms:
    """Put before a ``BackendSpecProvider`` in the bases of a class, it supplies the norms."""

    fuse_wgrad_accumulation: bool = False
    """Add gradients to ``main_grad`` in the kernel. Megatron's DDP has to keep it in float32, as it
    does with ``grad_reduce_in_fp32``."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        """What builds a norm; which of the two it is, the config says.

        ``has_residual`` is for the first norms of a layer. Built for it, they return their input
        too, as the residual.
        """
        return _Builder(self.fuse_wgrad_accumulation, returns_residual=has_residual)


class _Builder:
    """Builds a norm as ``megatron.core.transformer.torch_norm.WrappedTorchNorm`` does."""

    def __init__(self, fuse_wgrad_accumulation: bool, returns_residual: bool) -> None:
        self._fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.returns_residual = returns_residual

    def __call__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> nn.Module:
        norm = build_norm(config, hidden_size, eps, self._fuse_wgrad_accumulation)
        if self.returns_residual:
            is_layer_norm = isinstance(norm, FusedLayerNorm)
            norm.__class__ = LayerNormWithResidual if is_layer_norm else RMSNormWithResidual
        return norm


def build_norm(
    config: Any, hidden_size: int, eps: float = 1e-5, fuse_wgrad_accumulation: bool = False
) -> FusedLayerNorm | FusedRMSNorm:
    """The norm that a ``TransformerConfig`` asks for.

    Args:
        config: read for ``normalization``, ``layernorm_zero_centered_gamma``,
            ``memory_efficient_layer_norm``, ``sequence_parallel``, ``params_dtype`` and
            ``use_cpu_initialization``.
        hidden_size: the columns.
        eps: of the norm.
        fuse_wgrad_accumulation: as in :class:`fused_op.FusedLayerNorm`.

    Raises:
        ValueError: ``normalization`` is neither "LayerNorm" nor "RMSNorm".
    """
    classes = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}
    if config.normalization not in classes:
        raise ValueError(
            f"fused_op: normalization must be LayerNorm or RMSNorm, got {config.normalization!r}"
        )
    on_cpu = getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available()
    norm: FusedLayerNorm | FusedRMSNorm = classes[config.normalization](
        hidden_size,
        eps,
        device="cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device()),
        dtype=getattr(config, "params_dtype", None),
        zero_centered=config.layernorm_zero_centered_gamma,
        memory_efficient=config.memory_efficient_layer_norm,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )
    for parameter in norm.parameters():
        # Megatron adds the gradients of such parameters over the ranks of a sequence.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class _ReturnsResidual:
    """A norm that returns its input too, which Megatron then adds the branch to."""

    returns_residual = True

    def forward(self: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm and the residual."""
        return super().forward(input), input  # type: ignore[misc]


class LayerNormWithResidual(_ReturnsResidual, FusedLayerNorm):  # type: ignore[misc]
    """:class:`fused_op.FusedLayerNorm` that returns ``(output, input)``."""


class RMSNormWithResidual(_ReturnsResidual, FusedRMSNorm):  # type: ignore[misc]
    """:class:`fused_op.FusedRMSNorm` that returns ``(output, input)``."""
