"""Fused LayerNorm and RMSNorm for PyTorch, on CUDA and CPU. Start with ``functional.py``."""

import torch

try:
    import fused_op_cuda  # after torch, whose libraries it needs
except ImportError as error:
    raise ImportError(
        "fused_op is not built, or was built for another torch than the installed "
        f"{torch.__version__}: {error}. At the root of its repository, run: "
        "pip install --force-reinstall --no-deps ."
    ) from error

_built_for = fused_op_cuda.build_info()["torch"]
if _built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"fused_op was built for torch {_built_for}, but torch {torch.__version__} is installed, "
        "and its C++ interface differs. At the root of its repository, run: "
        "pip install --force-reinstall --no-deps ."
    )

from . import reference  # noqa: E402  the check above has to come first
from ._disabled import disabled  # noqa: E402
from .convert import convert, revert  # noqa: E402
from .functional import (  # noqa: E402
    FusedLayerNormFunction,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
    layer_norm,
    rms_norm,
)
from .modules import (  # noqa: E402
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
)

__version__: str = fused_op_cuda.build_info()["version"]
build_info = fused_op_cuda.build_info
fused_op = fused_layer_norm

__all__ = [
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedLayerNorm",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "build_info",
    "convert",
    "disabled",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_layer_norm",
    "fused_op",
    "fused_rms_norm",
    "layer_norm",
    "reference",
    "revert",
    "rms_norm",
]
