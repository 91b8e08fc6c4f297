"""The compiled module: see csrc/fused_op.h for what the functions take and return."""

from enum import Enum
from typing import TypedDict

from torch import Tensor

from fused_op._options import (
    BackwardOptions,
    BackwardTensors,
    ForwardResults,
    Given,
    Gradients,
    Options,
    Outputs,
    Tensors,
    Wanted,
)

class _BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: str  # "" without CUDA
    cuda_archs: str
    no_cuda_reason: str  # "" with CUDA
    debug: bool
    source_hash: str  # of fused_op/_source_hash.py

def build_info() -> _BuildInfo: ...
def cpu_level() -> str: ...  # "default", "avx2" or "avx512"

# A CUDA kernel that cannot be had: it is not in the core table, and there is no compiler.
class KernelError(RuntimeError): ...

# Where a call goes that norm() leaves to the caller: csrc/routing.h.
class Route(Enum):
    AUTOGRAD = ...
    CHECK = ...
    DROPOUT = ...
    DISPATCH = ...
    COMPOSITE = ...
    RECORD = ...
    CAST = ...

# The tuples and the options are those of fused_op/_options.py.
def norm(tensors: Tensors, given: Given, /) -> Outputs | Route: ...
def norm_forward(tensors: Tensors, options: Options, save_stats: bool, /) -> ForwardResults: ...
def norm_backward(
    tensors: BackwardTensors, options: BackwardOptions, wanted: Wanted, /
) -> Gradients: ...
def norm_backward_into(
    tensors: BackwardTensors,
    options: BackwardOptions,
    wanted: Wanted,
    main_grads: tuple[Tensor | None, Tensor | None],
    /,
) -> Gradients: ...
def check_main_grads(
    x: Tensor, normalized_ndim: int, main_grads: tuple[Tensor | None, Tensor | None], /
) -> None: ...
def record_in_cpp(value: bool) -> None: ...
def open_disabled_block() -> None: ...
def close_disabled_block() -> None: ...
def dropout_state(input: Tensor, /) -> Tensor: ...

# A variant: csrc/variant_call.h.
class VariantOps:
    # The outputs, one or several; None if the call is not one of plain tensors.
    def call(
        self,
        tensors: tuple[Tensor | None, ...],
        options: tuple[object, ...],
        passed: tuple[int, int] | None,
        /,
    ) -> Tensor | tuple[Tensor, ...] | None: ...

def _variant(name: str, /) -> VariantOps: ...

# PyTorch's own norms: csrc/torch_override.h.
def override_torch() -> list[str]: ...
def restore_torch() -> None: ...
def override_counts() -> tuple[dict[str, int], dict[str, int]]: ...

# Kernels that are compiled at their first use: csrc/kernel_tools.h.
class _CacheInfo(TypedDict):
    folder: str  # "" where there is none
    problem: str  # why kernels are not kept; "" if they are
    kernels: int
    bytes: int
    package_folder: str

def _compile(
    header: str, name: str, arch: int, headers: dict[str, str] = ...
) -> tuple[str, bytes, str]: ...  # symbol, code, log
def _find_kernel(
    header: str, name: str, arch: int, headers: dict[str, str] = ..., patience_s: float = ...
) -> tuple[str, bytes, str]: ...  # symbol, code, "package", "cache" or "compiled"
def _write_package(
    header: str, name: str, arch: int, headers: dict[str, str] = ..., folder: str = ...
) -> None: ...  # of the package, if ""
def _plan(
    *,
    backward: bool,
    centred: bool,
    rows: int,
    cols: int,
    input: str,  # dtypes are "f16", "bf16", "f32" and "f64"
    residual: str,  # "" without one
    parameters: str,
    output: str,
    rounding: str,
    dropout: bool,
    memory_efficient: bool,
    aligned: bool,
    multiprocessors: int,
    shared_bytes: int,
    arch: int = ...,  # without clusters, if 0
    fast_memory: bool = ...,  # for its multiprocessors
) -> tuple[
    dict[str, int], list[tuple[str, str, bool]]
]: ...  # the plan, and of each kernel its header, name, and whether the extension contains it
def _has_fast_memory(device: int) -> bool: ...
def _kernel_key(header: str, name: str, arch: int, headers: dict[str, str] = ...) -> str: ...
def _kernel_sources() -> dict[str, str]: ...
def _cache_info() -> _CacheInfo: ...
def _clear_cache() -> int: ...
def _max_kernels() -> int: ...
def _compiler_identity() -> str: ...  # "" if it cannot be loaded
def _why_no_compiler() -> str: ...  # "" if it can
