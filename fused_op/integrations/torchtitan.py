"""torchtitan's norms, by its override mechanism.

    --override.imports fused_op.integrations.torchtitan.rms_norm
    --override.imports fused_op.integrations.torchtitan.layer_norm

Parameters, initialisation, checkpoints and sharding are those of torchtitan's own norms, of which
these are subclasses. Its optimizer, FSDP and tensor parallelism do not notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import derive, override
from torchtitan.models.common import nn_modules

from ..modules import FusedLayerNorm, FusedRMSNorm

# Theirs first: their constructor takes a config and passes its fields on, to ours. They have no
# forward, so that it is ours.


class TitanRMSNorm(nn_modules.RMSNorm, FusedRMSNorm):  # type: ignore[misc, unused-ignore]
    """torchtitan's RMSNorm by the kernel of :func:`fused_op.fused_rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):  # type: ignore[misc, unused-ignore]
        """The same fields; each class of torchtitan is built by a Config of its own."""


class TitanLayerNorm(nn_modules.LayerNorm, FusedLayerNorm):  # type: ignore[misc, unused-ignore]
    """torchtitan's LayerNorm by the kernel of :func:`fused_op.fused_layer_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.LayerNorm.Config):  # type: ignore[misc, unused-ignore]
        """The same fields; each class of torchtitan is built by a Config of its own."""


# `exact`: a subclass of their norm may have a forward of its own, as that of Qwen3.5 has.
@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=nn_modules.RMSNorm.Config, exact=True, description="fused_op's RMS norm"
)
def rms_norm(config: Any) -> Any:
    """The config of the fused norm, with the fields of the given one."""
    return derive(config, TitanRMSNorm.Config)


@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=nn_modules.LayerNorm.Config, exact=True, description="fused_op's layer norm"
)
def layer_norm(config: Any) -> Any:
    """The config of the fused norm, with the fields of the given one."""
    return derive(config, TitanLayerNorm.Config)
