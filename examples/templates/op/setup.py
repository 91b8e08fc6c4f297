"""Builds template_op_ext, the compiled half of template_op.py.

    python setup.py build_ext --inplace     into this folder
    pip install --no-build-isolation .      into the environment

USE_CUDA=0 leaves the CUDA backend out. CUDA_HOME (the toolkit), TORCH_CUDA_ARCH_LIST (the GPUs to
build for, such as 9.0) and MAX_JOBS are PyTorch's own variables.
"""

import os
import re
import shutil
import subprocess

import torch
from setuptools import setup


def ask_nvcc_for_its_toolkit() -> None:
    """Set CUDA_HOME where the nvcc on the PATH is a wrapper, such as ccache's, outside the toolkit.

    PyTorch takes the folder above it, where a wrapper has no headers beside it.
    """
    nvcc = shutil.which("nvcc")
    if nvcc and not {"CUDA_HOME", "CUDA_PATH"}.intersection(os.environ):
        command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
        dryrun = subprocess.run(command, capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
        if top:
            os.environ["CUDA_HOME"] = os.path.realpath(top[1].strip())


ask_nvcc_for_its_toolkit()
from torch.utils.cpp_extension import (  # noqa: E402  # it reads CUDA_HOME when it is imported
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
)

NAME = "template_op"

use_cuda = os.environ.get("USE_CUDA") != "0" and torch.version.cuda is not None
if use_cuda and CUDA_HOME is None:
    # pip hides the output of a build that succeeds: no CPU-only build unasked where there is a GPU.
    if torch.cuda.is_available():
        raise SystemExit(f"{NAME}: there is a GPU but no nvcc; set CUDA_HOME, or USE_CUDA=0")
    use_cuda = False
if use_cuda and not torch.cuda.is_available():
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")  # no GPU here to ask

sources = ["csrc/binding.cpp", "csrc/cpu.cpp"]
# -g0: setuptools asks for debug information, a third of the time. OpenMP: for at::parallel_for.
cxx = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden"]
nvcc = ["-std=c++20", "-O3", "-lineinfo"]  # -lineinfo: profilers name source lines
# PyTorch switches off the conversions of __half and __nv_bfloat16, which plain nvcc has.
for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"):
    nvcc.append(f"-U__CUDA_NO_{name}__")
if use_cuda:
    sources.append("csrc/kernel.cu")

extension = (CUDAExtension if use_cuda else CppExtension)(
    name=f"{NAME}_ext",
    sources=sources,
    define_macros=[("WITH_CUDA", "1")] if use_cuda else [],
    extra_compile_args={"cxx": cxx, "nvcc": nvcc},
    # Where the compiler links libstdc++ statically, its symbols stay inside the module: mixed with
    # torch's, the first number printed into an error message would crash.
    extra_link_args=["-Wl,--exclude-libs,ALL"],
    depends=["csrc/op.h", "csrc/kernel.h"],
)
if use_cuda:
    # libc10_cuda brings it along; a toolkit installed by pip has no libcudart.so to link with.
    extension.libraries.remove("cudart")

setup(
    name=NAME,
    version="0.1.0",
    py_modules=[NAME],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
)
