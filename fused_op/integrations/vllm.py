"""vLLM's IR ops ``rms_norm`` and ``fused_add_rms_norm``, as the provider "fused_op".

vLLM finds ``register`` by itself, through the entry point ``vllm.general_plugins`` of this package.
The provider is used where the configuration names it:

    --kernel-config.ir_op_priority.rms_norm=fused_op
    --kernel-config.ir_op_priority.fused_add_rms_norm=fused_op
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import KERNEL_DTYPES
from ..functional import fused_add_rms_norm, fused_rms_norm

PROVIDER = "fused_op"


def register() -> None:
    """Register both implementations. Nothing is chosen by that, and twice is once.

    Raises:
        ImportError: vLLM is not installed, or older than its IR.
    """
    from vllm.ir import ops

    for op, implementation, supports in (
        (ops.rms_norm, _rms_norm, _supports),
        (ops.fused_add_rms_norm, _fused_add_rms_norm, _supports_add),
    ):
        if PROVIDER not in op.impls:
            op.register_impl(PROVIDER, supports_args=supports)(implementation)


# The schemas have to be those of vLLM's own implementations, names included.


def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return fused_rms_norm(x, weight, epsilon)


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return fused_add_rms_norm(x, x_residual, weight, epsilon)


def _supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Statistics of a part of a row are not ours."""
    return (
        variance_size is None
        and x.dtype in KERNEL_DTYPES
        and x.device.type in ("cpu", "cuda")
        and (weight is None or weight.dtype in (x.dtype, torch.float32))
    )


def _supports_add(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x_residual.dtype == x.dtype and _supports(x, weight, epsilon, variance_size)
