"""A norm of one's own takes one struct: a source and an epilogue that csrc/ knows nothing of.

Catches a kernel that takes anything else of a source or an epilogue than what core/source.h and
core/epilogue.h say, such as the members of the library's own.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fused_op_cuda
from tests.kernels import toy_variant
from tests.kernels.toy_kernel import needs_nvrtc, nvrtc_version
from tests.ops import BF16, DEVICES, F32, F64

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("c++")
# No width of the core table: even, of whole packs or not, odd, of several warps.
WIDTHS = [24, 145, 1152, 3202]
DTYPES = {"bf16": (BF16, BF16, F32), "f32": (F32, F32, BF16)}  # input, parameters, output
# For fewer than some hundred, backward has a kernel of its own, with other arguments.
ROWS = [301, 3000]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_arguments_lie_where_cpp_puts_them(tmp_path):
    (tmp_path / "layout.cpp").write_text(toy_variant.LAYOUT)
    command = [COMPILER, "-std=c++20", "-fsyntax-only", f"-I{CSRC}", str(tmp_path / "layout.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_nvrtc
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("cols", WIDTHS)
def test_it_compiles(cols, dtypes, backward):
    names = tuple(toy_variant.NAMES[dtype] for dtype in DTYPES[dtypes])
    _, kernels = toy_variant.plan(backward, True, 4096, cols, names)
    assert len(kernels) == (2 if backward else 1)
    for kernel in kernels:  # of a plan whose registers were counted for the library's epilogue
        symbol, _, log = fused_op_cuda._compile(*kernel, 90, toy_variant.HEADERS)
        assert "partials" in kernel[0] or ("SoftCap" in symbol and "Scale2" in symbol)
        # With predicated stores, which keep vectors whole, one backward kernel spills.
        most = 36 if nvrtc_version() >= (13, 0) else 44
        assert max(int(count) for count in re.findall(r"(\d+) bytes spill", log)) <= most


def right(centred, x, weight, bias):
    """The output in float64."""
    x = 2 * x
    x = x - x.mean(-1, keepdim=True) if centred else x
    xhat = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    z = xhat * weight + (bias if centred else 0)
    return toy_variant.CAP * torch.tanh(z / toy_variant.CAP)


def assert_near(found, truth):
    """Within the roundings of the result and of some arithmetic, relative to the largest."""
    error = (found.double() - truth).abs()
    bound = torch.finfo(found.dtype).eps * truth.abs() + 2e-6 * truth.abs().max().clamp(min=1)
    assert bool((error <= bound).all()), f"off by {error.max().item():.2g}"


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@needs_nvrtc
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", WIDTHS)
def test_it_computes(cols, rows, dtypes, centred):
    g = torch.Generator("cuda").manual_seed(0)
    x_dtype, dtype, out_dtype = DTYPES[dtypes]
    # Each a tensor of its own: the plan has them begin where vectors may.
    x, dy = (torch.randn(rows, cols, device="cuda", generator=g) for _ in range(2))
    weight, bias = (torch.randn(cols, device="cuda", generator=g).to(dtype) for _ in range(2))
    x, dy = x.to(x_dtype), dy.to(out_dtype)
    leaves = [t.to(F64).requires_grad_() for t in (x, weight, bias)][: 3 if centred else 2]
    truth = right(centred, *leaves, *[None] * (3 - len(leaves)))
    gradients = torch.autograd.grad(truth, leaves, dy.to(F64))

    driver = toy_variant.Driver()
    y, scaled, stats = toy_variant.forward(driver, centred, x, weight, bias, out_dtype)
    assert torch.equal(scaled, 2 * x)
    assert_near(y, truth.detach())
    for found, gradient in zip(
        toy_variant.backward(driver, centred, scaled, stats, weight, bias, dy),
        gradients,
        strict=True,
    ):
        assert_near(found, gradient)
