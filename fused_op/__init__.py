"""Fused LayerNorm and RMSNorm for PyTorch, on CUDA and CPU. Start with ``functional.py``."""

from pathlib import Path

import torch

from ._source_hash import source_hash as _source_hash

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

# In a source tree, the module may be of other sources: of an edit ago, or of another commit.
_tree = Path(__file__).parents[1]
if (_tree / "csrc" / "fused_op.h").exists() and (
    fused_op_cuda.build_info().get("source_hash") != _source_hash(_tree)
):
    _command = "pip install --force-reinstall --no-deps ."
    if Path(fused_op_cuda.__file__).parent == _tree:
        _command = "python setup.py build_ext --inplace"
    raise ImportError(
        f"{fused_op_cuda.__file__} was not built from the csrc/ and setup.py that are now in "
        f"{_tree}. There, run: {_command}"
    )

from . import reference  # noqa: E402  the checks above have to come first
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
