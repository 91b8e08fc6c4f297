"""The interpreter of PTX finds what is wrong with a kernel, and computes what a GPU would.

Catches an interpreter that lets through what test_run_kernels.py relies on it to find: each kernel
here has one fault, and runs without it.
"""

import math

import pytest
import torch

from tests.kernels import interpreter, nvrtc
from tests.kernels.interpreter import Gpu, KernelFault
from tests.kernels.small_kernels import BAD, GOOD, WAIT

pytestmark = pytest.mark.skipif(
    bool(interpreter.why_not()), reason=f"no interpreter: {interpreter.why_not()}"
)


def run(body: str, size: int = 64) -> torch.Tensor:
    """The kernel on one CTA of 64 threads, or a cluster of two if it has results for two."""
    ctas = size // 64
    kernel = f'extern "C" __global__ void test_kernel(const float* from, float* to) {{{body}}}\n'
    source = torch.arange(64, dtype=torch.float32)
    result = interpreter.empty(size, dtype=torch.float32)
    ptx = nvrtc.compile_ptx(kernel, "test_kernel")[1]
    Gpu().run(ptx, ctas, 64, source, result, cluster=ctas, shared=256 if "extern" in body else 0)
    return result


@pytest.mark.parametrize("name", GOOD)
def test_right_kernels(name):
    result = run(WAIT + GOOD[name], 64 if name in ("sum", "copy") else 128)
    expected = {
        "sum": torch.full((64,), 63 * 32.0),
        "copy": torch.arange(64.0).div(4, rounding_mode="floor") * 4,
        "cluster": torch.tensor([1.0, 0.0]).repeat_interleave(64),
        "send": torch.tensor([1.0, 0.0]).repeat_interleave(64),
    }
    assert torch.equal(result, expected[name])


def test_the_list_of_all_kernels_compiles():
    """Catches two headers of kernels that no program can include, as a reader would."""
    name = "fused_op::cuda::add_partials_kernel<float, float>"
    assert ".entry" in nvrtc.compile_ptx("cuda/fused_op_kernel.cuh", name)[1]


@pytest.mark.parametrize("name", BAD)
def test_faults(name):
    base, old, new, said = BAD[name]
    whole = WAIT + GOOD[base]
    assert old in whole
    with pytest.raises(KernelFault, match=f"(?s){said}"):
        run(whole.replace(old, new, 1), 64 if base in ("sum", "copy") else 128)


ARITHMETIC = {  # an expression of x, and what it is; the results are those of IEEE 754
    "fmaf(x, x, -1.0f)": lambda x: (x.double() * x.double() - 1).float(),
    "x / 3.0f": lambda x: x / 3,
    "sqrtf(x)": lambda x: x.double().sqrt().float(),
    "static_cast<float>(static_cast<int>(x) * 0x10001 >> 3)": lambda x: (
        x.int() * 0x10001 >> 3
    ).float(),
    "static_cast<float>(__funnelshift_l(7u, static_cast<unsigned>(x), 29))": lambda x: (
        ((x.long() << 32 | 7) << 29 >> 32) % 2**32
    ).float(),
    "static_cast<float>(__byte_perm(static_cast<unsigned>(x), 0x04030201, 0x7405))": lambda x: (
        x.long() * 256 + 0x04010002
    ).float(),
    "static_cast<float>(static_cast<long long>(x) % 7)": lambda x: (x.long() % 7).float(),
    "x > 5.0f || x != x ? fminf(x, 9.0f) : fmaxf(x, 2.0f)": lambda x: torch.where(
        x > 5, x.clamp(max=9), x.clamp(min=2)
    ),
    "static_cast<float>(__umulhi(static_cast<unsigned>(x), 0x80000000u))": lambda x: (
        x.long() // 2
    ).float(),
}


@pytest.mark.parametrize("expression", ARITHMETIC)
def test_arithmetic(expression):
    body = f"{WAIT} const float x = from[threadIdx.x]; to[threadIdx.x] = {expression};"
    assert torch.equal(run(body), ARITHMETIC[expression](torch.arange(64, dtype=torch.float32)))


@pytest.mark.parametrize(
    ("dtype", "convert", "back"),
    [
        (torch.float16, "f16.f32 half, %1;", "cvt.f32.f16 %0, half;"),
        (torch.bfloat16, "bf16.f32 half, %1;", "mov.b32 %0, {0, half};"),
        (torch.float8_e4m3fn, "satfinite.e4m3x2.f32 half, %1, %1;", "cvt.rn.f32.u16 %0, half;"),
    ],
    ids=["f16", "bf16", "e4m3"],
)
def test_conversions(dtype, convert, back):
    """Every exponent that float32 has; ties, subnormals, overflow, infinity and NaN."""
    exponents = torch.arange(-150, 128).double()
    mantissas = torch.tensor(
        [1.0, 1.0 + 2**-11, 1.0 + 2**-10, 1 + 3 * 2**-11, 1.0625, 1.1875, 1.99999]
    )
    values = (exponents.exp2()[:, None] * mantissas).float().flatten()
    values = torch.cat([values, -values, torch.tensor([0.0, math.inf, -math.inf, math.nan])])
    if dtype == torch.float8_e4m3fn:  # to the largest instead of NaN, as PTX says
        wanted = values.clamp(-448, 448).to(dtype).view(torch.uint8).float() * 257
        wanted[values.isnan()] = 0x7F7F
    else:
        wanted = values.to(dtype).float()
    code = f"{{ .reg .b16 half; cvt.rn.{convert} {back} }}"
    for at in range(0, len(values), 64):
        part = values[at : at + 64]
        found = convert_by_ptx(code, torch.nn.functional.pad(part, (0, 64 - len(part))))
        assert torch.equal(
            found[: len(part)].nan_to_num(1e38), wanted[at : at + 64].nan_to_num(1e38)
        )


def convert_by_ptx(code: str, values: torch.Tensor) -> torch.Tensor:
    body = f"""{WAIT} float x = from[threadIdx.x], y;
      asm("{code}" : "=f"(y) : "f"(x)); to[threadIdx.x] = y;"""
    kernel = f'extern "C" __global__ void test_kernel(const float* from, float* to) {{{body}}}\n'
    result = interpreter.empty(64, dtype=torch.float32)
    Gpu().run(nvrtc.compile_ptx(kernel, "test_kernel")[1], 1, 64, values, result)
    return result
