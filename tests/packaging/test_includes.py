"""What each part of csrc/ may include, beyond standard headers: the layers stay apart."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FILES = sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*") if path.is_file())

ALLOWED = {  # the first pattern that fits a file holds
    "core/*": r"core/|cuda_\w+\.h",  # torch-free: for g++ and nvcc
    "rtc/*": r"rtc/",  # for NVRTC
    "cuda/kernels.cpp": r"cuda/|cuda_runtime_api\.h|pthread\.h",  # a kernel of the core table
    "cuda/*.cpp": r"core/|cuda/|(dirent|dlfcn|elf|fcntl|link|pthread|unistd)\.h|sys/",
    "cuda/driver.h": r"cuda\.h",
    "cuda/*": r"core/|cuda/|cuda_\w+\.h|cooperative_groups",  # torch-free: compiles in seconds
    "cpu/*": r"core/|cpu/|(cpuid|immintrin)\.h",
    "backend.*": r"backend\.h|core/|cpu/|cuda/|ATen/|c10/|pthread\.h",
    "call_keys.h": r"(ATen|c10)/(?!cuda)|torch/",
    "routing.cpp": r"(backend|call_keys|checks|dispatcher|fused_op|routing)\.h|"
    r"(ATen|c10)/(?!cuda)|torch/",
    "autograd.cpp": r"(autograd|checks|routing)\.h|core/|ATen/|torch/",
    "dispatcher.cpp": r"(checks|dispatcher|variant)\.h|ATen/core/|torch/",
    "fused_op.cpp": r"(autograd|backend|checks|fused_op|kernel_tools|python_arguments|routing)\.h|"
    r"torch(/|_override\.h)|variant_call\.h",
    "torch_override.cpp": r"(autograd|backend|checks|routing|torch_override)\.h|core/|ATen/|torch/",
    "python_arguments.cpp": r"(checks|python_arguments|routing)\.h|ATen/|torch/",
    "python_arguments.h": r"(fused_op|routing)\.h|pybind11/",
    "kernel_tools.*": r"kernel_tools\.h|cuda/(call_plan|compile|kernel_files|kernels|launch)\.h|"
    r"pybind11/",
    "variant.h": r"torch/",
    "variant_*": r"(autograd|call_keys|variant_call|variant_ops)\.h|core/|ATen/|pybind11/|torch/",
    "*": r"(backend|checks|fused_op|kernel_arguments|modulated_norm|rope_call|variant)\.h|core/|"
    r"(ATen|c10)/(?!cuda)",
}
# The first three cost half a minute of compilation in each file, the last one needs cuBLAS.
NOWHERE = r"torch/(extension|all)\.h|ATen/ATen\.h|ATen/cuda/CUDAContext\.h"


@pytest.mark.parametrize("file", FILES)
def test_includes(file):
    allowed = next(rule for pattern, rule in ALLOWED.items() if fnmatch(file, pattern))
    for header in re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', (CSRC / file).read_text()):
        standard = re.fullmatch(r"\w+", header)
        assert standard or re.match(allowed, header), f"{file} must not include {header}"
        assert not re.match(NOWHERE, header), f"{file} includes {header}: take a narrower header"
