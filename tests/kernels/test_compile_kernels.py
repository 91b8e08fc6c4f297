"""NVRTC, as the module drives it: a kernel's text in, machine code or a readable error out."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fused_op
import fused_op_cuda
from tests.kernels.toy_kernel import (
    HEADERS,
    KERNEL,
    OTHER,
    TOY,
    needs_nvrtc,
    nvrtc_version,
    stable,
)

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("c++")
HEADER, NAME, ARCH = KERNEL
A_LATER_GPU = 990  # PTX, which can be read

# What the stand-ins of csrc/rtc have to be like.
STAND_INS = """
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

static_assert(sizeof(std::int8_t) == 1 && sizeof(std::uint8_t) == 1);
static_assert(sizeof(std::int16_t) == 2 && sizeof(std::uint16_t) == 2);
static_assert(sizeof(std::int32_t) == 4 && sizeof(std::uint32_t) == 4);
static_assert(sizeof(std::int64_t) == 8 && sizeof(std::uint64_t) == 8);
static_assert(std::int8_t(-1) < 0 && std::int16_t(-1) < 0 && std::int32_t(-1) < 0);
static_assert(std::int64_t(-1) < 0 && std::intptr_t(-1) < 0 && std::ptrdiff_t(-1) < 0);
static_assert(std::uint8_t(-1) > 0 && std::uint16_t(-1) > 0 && std::uint32_t(-1) > 0);
static_assert(std::uint64_t(-1) > 0 && std::uintptr_t(-1) > 0 && std::size_t(-1) > 0);
static_assert(std::is_same_v<std::size_t, decltype(sizeof(0))>);
static_assert(std::is_same_v<std::ptrdiff_t, decltype((char*)0 - (char*)0)>);
static_assert(sizeof(std::uintptr_t) == sizeof(void*) && sizeof(std::intptr_t) == sizeof(void*));
static_assert(std::is_same_v<int, int> && !std::is_same_v<int, const int>);
static_assert(std::is_same_v<std::conditional_t<true, int, float>, int>);
static_assert(std::is_same_v<std::conditional_t<false, int, float>, float>);
static_assert(std::min(1, 2) == 1 && std::min(2, 1) == 1);
static_assert(std::max(1, 2) == 2 && std::max(2, 1) == 2);
static_assert(std::clamp(0, 1, 3) == 1 && std::clamp(2, 1, 3) == 2 && std::clamp(4, 1, 3) == 3);

__global__ void kernel(float* data, double* wide, std::int64_t) {
  std::memcpy(data, wide, sizeof(float));
  data[1] = std::sqrt(data[2]);
  data[2] = std::fma(data[3], data[4], data[5]);
  wide[1] = std::sqrt(wide[2]);
}
"""


def compile(name=NAME, arch=ARCH, headers=HEADERS):
    return fused_op_cuda._compile(HEADER, name, arch, headers)


@needs_nvrtc
def test_compiles_a_kernel_of_the_test():
    """A header of the caller's, which includes embedded ones, a template and a constexpr function
    of the host."""
    symbol, code, log = compile()
    assert symbol == "_ZN3toy13double_kernelIfLi128EEEvPT_l"  # std::int64_t is long, as on the host
    assert code.startswith(b"\x7fELF")
    assert symbol.encode() in code
    assert re.search(r"Used \d+ registers", log)
    assert "0 bytes spill stores" in log


@needs_nvrtc
def test_the_same_code_twice():
    """Catches a compilation that depends on what was compiled before, and a log that changes it."""
    symbol, code, _ = compile()
    other_symbol, other_code, _ = compile(OTHER[1])
    assert other_symbol != symbol and stable(other_code) != stable(code)
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda _: compile(), range(80)):  # seconds, which must not matter
            assert (found[0], stable(found[1])) == (symbol, stable(code))


@needs_nvrtc
@pytest.mark.parametrize("arch", [75, 80, 86, 90])
def test_machine_code_for_gpus_that_the_compiler_knows(arch):
    assert compile(arch=arch)[1].startswith(b"\x7fELF")


@needs_nvrtc
def test_ptx_for_later_gpus():
    """Catches a GPU newer than torch's NVRTC for which nothing can be compiled."""
    symbol, code, _ = compile(arch=A_LATER_GPU)
    target = re.search(rb"\.target sm_(\d+)\n", code)
    assert int(target[1]) >= 120 or fused_op.build_info()["cuda"] < "12.8"
    assert b".entry " + symbol.encode() in code


@needs_nvrtc
def test_no_target_for_old_gpus():
    with pytest.raises(RuntimeError, match=r"NVRTC .* has no target for compute capability 1\.3"):
        compile(arch=13)


@needs_nvrtc
def test_products_and_sums_fuse_where_the_source_says_so():
    """Catches another rounding than nvcc's, which gets the same flag."""

    def ptx_of(value: str) -> str:
        text = f"__global__ void kernel(float* x) {{ x[0] = {value}; }}"
        return compile("kernel", A_LATER_GPU, {HEADER: text})[1].decode()

    assert "fma.rn.f32" in ptx_of("fmaf(x[1], x[2], x[3])")
    plain = ptx_of("x[1] * x[2] + x[3]")
    assert "mul" in plain and "add" in plain and "fma" not in plain


@needs_nvrtc
@pytest.mark.parametrize(
    ("headers", "name", "message"),
    [
        ({HEADER: TOY + "int x = ;"}, NAME, r"toy\.cuh\(20\): error: expected an expression"),
        ({HEADER: '#include "cuda/no.cuh"'}, NAME, r'open source file "cuda/no\.cuh"'),
        ({}, NAME, r'open source file "toy\.cuh"'),
        (HEADERS, "toy::no_kernel", r'namespace "toy" has no member "no_kernel"'),
        (HEADERS, "toy::double_kernel<float, x>", r'identifier "x" is undefined'),
    ],
)
def test_errors_show_the_compilers_log(headers, name, message):
    with pytest.raises(RuntimeError) as caught:
        compile(name, headers=headers)
    text = str(caught.value)
    assert re.match(
        rf"NVRTC [\d.]+ \w* could not compile {re.escape(name)} for sm_90: NVRTC_", text
    )
    assert re.search(message, text), text


@needs_nvrtc
def test_stand_ins_of_the_standard_library():
    symbol, *_ = compile("kernel", headers={HEADER: STAND_INS})
    assert symbol == "_Z6kernelPfPdl"


@needs_nvrtc
def test_every_header_of_a_kernel_is_embedded():
    """Catches a file that setup.py leaves out, and a text that a string literal changes."""
    expected = {
        path.relative_to(CSRC).as_posix(): path.read_text("utf-8")
        for path in [*CSRC.glob("core/*.h"), *CSRC.glob("cuda/*.cuh"), *CSRC.glob("cuda/*.h")]
    }
    stand_ins = {path.name: path.read_text("utf-8") for path in CSRC.joinpath("rtc").iterdir()}
    assert re.findall("#include <(.+)>", STAND_INS) == sorted(stand_ins)
    assert fused_op_cuda._kernel_sources() == expected | stand_ins


WITHOUT_NVRTC = """
#include <cstdio>

#include "cuda/compile.h"

namespace fused_op::cuda {
const SourceFile kSourceFiles[] = {{"", ""}};
const int kSourceFileCount = 0;
}  // namespace fused_op::cuda

int main() {
  try {
    fused_op::cuda::compile({"toy.cuh", "kernel"}, 90);
  } catch (const fused_op::cuda::CompileError& error) {
    const bool same = error.what() == fused_op::cuda::why_no_compiler();
    std::printf("%s|%s|%d", error.what(), fused_op::cuda::compiler_identity().c_str(), same);
  }
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_without_nvrtc(tmp_path):
    """Catches a crash, or an error without a reason, where torch's libraries are trimmed."""
    main, program = tmp_path / "main.cpp", tmp_path / "main"
    main.write_text(WITHOUT_NVRTC)
    flags = ["-std=c++20", f"-I{CSRC}", '-DFUSED_OP_CUDA_VERSION="99.0"', "-pthread", "-ldl"]
    sources = [str(main), str(CSRC / "cuda" / "compile.cpp")]
    subprocess.run([COMPILER, *sources, *flags, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    reason, identity, same = done.stdout.split("|")
    assert re.match(r"NVRTC cannot be loaded: libnvrtc\.so\.99: ", reason)
    assert identity == "" and same == "1"


@needs_nvrtc
def test_identity_of_the_compiler():
    """Catches a library whose build is not told from another of the same version."""
    build = r"[0-9a-f]{16,}"
    if nvrtc_version() < (13, 0):  # whose wheels hide it: size and time of the file take its place
        (path,) = set(re.findall(r"/\S*libnvrtc\.so\S*", Path("/proc/self/maps").read_text()))
        file = Path(path).stat()
        build += f"|{file.st_size}_{int(file.st_mtime)}"
    assert re.fullmatch(rf"NVRTC \d+\.\d+ ({build})", fused_op_cuda._compiler_identity())
    assert fused_op_cuda._why_no_compiler() == ""


@pytest.mark.skipif(bool(fused_op.build_info()["cuda"]), reason="a build with CUDA")
@pytest.mark.parametrize("name", ["_cache_info", "_clear_cache", "_kernel_sources"])
def test_a_build_without_cuda_says_so(name):
    with pytest.raises(RuntimeError, match="fused_op was built without CUDA: "):
        getattr(fused_op_cuda, name)()
    with pytest.raises(RuntimeError, match="fused_op was built without CUDA: "):
        compile()
