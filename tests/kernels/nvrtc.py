"""PTX of the library's kernels, by NVRTC and the options that csrc/cuda/compile.cpp passes.

The library itself compiles to machine code, which nothing without a GPU can run. NVRTC is that of
the CUDA torch, or of the toolkit that nvcc belongs to; neither torch nor fused_op need be built for
CUDA.
"""

import ctypes
import re
import sys
from functools import cache
from pathlib import Path

import build_backend

CSRC = Path(__file__).parents[2] / "csrc"
TARGET = "compute_90"


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC, or None where there is none."""
    packages = "cuda_nvrtc", "cu13", "cu14"  # of CUDA 12, 13 and later
    folders = [Path(p, "nvidia", package, "lib") for p in sys.path for package in packages]
    if home := build_backend.find_cuda_home():
        folders += [home / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so*")):
            return ctypes.CDLL(str(path))
    return None


def why_not() -> str:
    """Why nothing can be compiled here; empty if it can."""
    return "" if library() else "no NVRTC: neither a CUDA build of torch nor a toolkit has it"


@cache
def options() -> tuple[str, ...]:
    """Those of every compilation, as compile.cpp lists them."""
    text = (CSRC / "cuda" / "compile.cpp").read_text()
    listed = re.search(r"kOptions = \{(.*?)\};", text, re.DOTALL)
    found = tuple(re.findall(r'^ *"(-.*?)",', listed[1], re.MULTILINE))
    assert "-fmad=false" in found, "the options are not where they used to be"
    includes = (f"--include-path={CSRC}", f"--include-path={CSRC / 'rtc'}")
    return (*found, f"--gpu-architecture={TARGET}", *includes)


def compile_ptx(header: str, name: str) -> tuple[str, str]:
    """(mangled name, PTX) of a kernel. `header` is a path below csrc/, or source text."""
    nvrtc = library()
    source = header if "\n" in header else f'#include "{header}"\n'
    program, size, symbol = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()

    def call(function: str, *arguments) -> None:
        status = getattr(nvrtc, f"nvrtc{function}")(*arguments)
        assert status == 0, f"nvrtc{function}: {status}"

    def text(what: str) -> str:
        call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"Get{what}", program, buffer)
        return buffer.value.decode()

    call("CreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        call("AddNameExpression", program, name.encode())
        flags = [flag.encode() for flag in options()]
        flags = (ctypes.c_char_p * len(flags))(*flags)
        if nvrtc.nvrtcCompileProgram(program, len(flags), flags):
            raise RuntimeError(f"NVRTC could not compile {name}:\n{text('ProgramLog')}")
        call("GetLoweredName", program, name.encode(), ctypes.byref(symbol))
        return symbol.value.decode(), text("PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
