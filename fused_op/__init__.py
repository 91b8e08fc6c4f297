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
from ._channels_first import (  # noqa: E402
    fused_channels_first_layer_norm,
    fused_channels_first_rms_norm,
)
from ._channels_first_modules import (  # noqa: E402
    FusedChannelsFirstLayerNorm,
    FusedChannelsFirstRMSNorm,
)
from ._compile_pass import CompilePass, CompilePassReport, compile_pass  # noqa: E402
from ._disabled import disabled  # noqa: E402
from ._gated_rms_norm import FusedGatedRMSNorm, fused_gated_rms_norm  # noqa: E402
from ._group_norm import FusedGroupNorm, fused_group_norm  # noqa: E402
from ._l2_norm import fused_l2_norm  # noqa: E402
from ._modulated_norm import (  # noqa: E402
    fused_gated_add_layer_norm,
    fused_gated_add_rms_norm,
    fused_modulated_layer_norm,
    fused_modulated_rms_norm,
)
from ._override import OverrideReport, TorchOverride, override_torch  # noqa: E402
from ._post_add_pre_rms_norm import (  # noqa: E402
    FusedPostAddPreRMSNorm,
    fused_post_add_pre_rms_norm,
)
from ._rms_norm_add import fused_rms_norm_add  # noqa: E402
from ._rms_norm_rope import fused_qk_norm_rope, fused_rms_norm_rope  # noqa: E402
from .convert import convert, revert  # noqa: E402
from .functional import (  # noqa: E402
    FusedLayerNormFunction,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
)
from .modules import (  # noqa: E402
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
)
from .quantized import (  # noqa: E402
    fused_add_layer_norm_quantized,
    fused_add_rms_norm_quantized,
    fused_layer_norm_quantized,
    fused_rms_norm_quantized,
)
from .reference import QuantizedNorm  # noqa: E402
from .torch_functional import layer_norm, rms_norm  # noqa: E402

__version__: str = fused_op_cuda.build_info()["version"]
build_info = fused_op_cuda.build_info
fused_op = fused_layer_norm

__all__ = [
    "CompilePass",
    "CompilePassReport",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedChannelsFirstLayerNorm",
    "FusedChannelsFirstRMSNorm",
    "FusedGatedRMSNorm",
    "FusedGroupNorm",
    "FusedLayerNorm",
    "FusedLayerNormFunction",
    "FusedPostAddPreRMSNorm",
    "FusedRMSNorm",
    "OverrideReport",
    "QuantizedNorm",
    "TorchOverride",
    "build_info",
    "compile_pass",
    "convert",
    "disabled",
    "fused_add_layer_norm",
    "fused_add_layer_norm_quantized",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quantized",
    "fused_channels_first_layer_norm",
    "fused_channels_first_rms_norm",
    "fused_gated_add_layer_norm",
    "fused_gated_add_rms_norm",
    "fused_gated_rms_norm",
    "fused_group_norm",
    "fused_l2_norm",
    "fused_layer_norm",
    "fused_layer_norm_quantized",
    "fused_modulated_layer_norm",
    "fused_modulated_rms_norm",
    "fused_op",
    "fused_post_add_pre_rms_norm",
    "fused_qk_norm_rope",
    "fused_rms_norm",
    "fused_rms_norm_add",
    "fused_rms_norm_quantized",
    "fused_rms_norm_rope",
    "layer_norm",
    "override_torch",
    "reference",
    "revert",
    "rms_norm",
]
