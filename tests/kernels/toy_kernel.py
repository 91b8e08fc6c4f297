"""A kernel that csrc/ knows nothing of, for tests of the compilation at first use."""

import hashlib
import re
from pathlib import Path

import pytest

import fused_op
import fused_op_cuda

TOY = """#pragma once
#include <cstdint>

#include "cuda/device_info.h"

namespace toy {

constexpr float twice(float value) { return 2 * value; }

template <typename T, int kThreads>
__global__ void double_kernel(T* data, std::int64_t count) {
  static_assert(fused_op::cuda::kMaxDevices > 0);
  const std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (i < count) {
    data[i] = twice(data[i]);
  }
}

}  // namespace toy
"""
KERNEL = ("toy.cuh", "toy::double_kernel<float, 128>", 90)
HEADERS = {"toy.cuh": TOY}
OTHER = ("toy.cuh", "toy::double_kernel<float, 256>", 90)


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that compiles kernels at their first use."""
    found = re.search(r"(\d+)\.(\d+)", fused_op_cuda._compiler_identity())
    return int(found[1]), int(found[2])


def why_not() -> str:
    """Why nothing can be compiled here; empty if it can."""
    if reason := fused_op.build_info()["no_cuda_reason"]:
        return reason
    return fused_op_cuda._why_no_compiler()


needs_nvrtc = pytest.mark.skipif(bool(why_not()), reason=f"no compiler: {why_not()}")


def stable(code: bytes) -> bytes:
    """Machine code without the time, which NVRTC puts into the names of internal variables."""
    return re.sub(rb"fused_op_cu_[0-9a-f]{8}", b"", code)


def find(kernel=KERNEL, headers=HEADERS, **options) -> tuple[str, bytes, str]:
    """(symbol, code, origin)."""
    symbol, code, origin = fused_op_cuda._find_kernel(*kernel, headers, **options)
    return symbol, stable(code), origin


def file_of(folder: Path, suffix: str = "kernel", key: str = "") -> Path:
    """Where the cache keeps the toy kernel, or what locks it."""
    key = key or fused_op_cuda._kernel_key(*KERNEL, HEADERS)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.{suffix}"
