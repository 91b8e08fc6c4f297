"""The compiled module: see csrc/fused_op.h for what the functions take and return."""

from typing import TypedDict

import torch
from torch import Tensor

class _BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: str  # "" without CUDA
    cuda_archs: str
    no_cuda_reason: str  # "" with CUDA
    debug: bool

def build_info() -> _BuildInfo: ...

# What norm() leaves to the caller.
AUTOGRAD: int
DISPATCH: int
COMPOSITE: int
CAST: int

def norm(
    norm: str,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    /,
) -> Tensor | tuple[Tensor, Tensor] | int: ...
def norm_forward(
    norm: str,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    save_stats: bool,
    /,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
def norm_backward(
    norm: str,
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    normalized_ndim: int,
    zero_centered: bool,
    param_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    /,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
