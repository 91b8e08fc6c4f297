"""The levels of instructions that the CPU backend is compiled for.

Catches a level that rounds otherwise than the rest (a fused multiply-add, another conversion of 16
bits), one that is never taken, and a choice that is silently ignored.
"""

import platform

import pytest
import torch

from fused_op import fused_add_layer_norm, fused_layer_norm, fused_rms_norm
from tests.children import run_children

CALLS = 250
LEVELS = {"AVX512": ["default", "avx2", "avx512"], "AVX2": ["default", "avx2"]}
LOOPS = {"default": "without AVX", "avx2": "in AVX2", "avx512": "in AVX-512"}
DRAW = f"""
import os, torch
from tests.numerics.cpu_level_bits import digests
torch.set_num_threads(int(os.environ["THREADS"]))
print(*digests({CALLS}), sep="\\n")
"""


def available():
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ["default"])


@pytest.mark.slow
def test_levels_and_threads_give_the_same_bits():
    levels = available()
    chosen = [("", "1"), *((level, "1") for level in levels), (levels[-1], "3")]
    done = run_children(DRAW, [{"FUSED_OP_CPU": level, "THREADS": n} for level, n in chosen])
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    expected, *others = (each.stdout.splitlines() for each in done)
    assert len(expected) == CALLS
    assert len({line.split(": ")[-1] for line in expected}) > CALLS * 0.9
    for (level, threads), lines in zip(chosen[1:], others, strict=True):
        differing = [pair for pair in zip(lines, expected, strict=True) if pair[0] != pair[1]]
        assert not differing, f"{level}, {threads} threads: {differing[:3]}"


@pytest.mark.slow
def test_the_report_names_the_level():
    """Catches a level that is chosen and not taken, and a report that names another."""
    code = "from fused_op.__main__ import devices; print(next(devices())[1])"
    choices = [*available(), ""]
    done = run_children(code, [{"FUSED_OP_CPU": choice} for choice in choices])
    for choice, each in zip(choices, done, strict=True):
        level = choice or choices[-2]
        assert each.stdout.startswith(f"loops {LOOPS[level]}, "), each.stderr


def assert_refused(*levels):
    code = "import torch, fused_op; fused_op.fused_rms_norm(torch.ones(2, 4))"
    done = run_children(code, [{"FUSED_OP_CPU": level} for level in levels])
    for level, each in zip(levels, done, strict=True):
        assert each.returncode == 1
        assert "FUSED_OP_CPU must be default, avx2 or avx512" in each.stderr
        assert f"got '{level}'" in each.stderr


@pytest.mark.slow
def test_a_level_that_does_not_exist_is_refused():
    assert_refused("avx1024", "AVX2", " ")


@pytest.mark.skipif(platform.machine() == "x86_64", reason="this CPU may have them")
def test_a_level_that_the_cpu_lacks_is_refused():
    assert_refused("avx2", "avx512")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 17, 40, 255, 1024, 1100, 2081, 5000])
def test_a_row_alone_has_the_bits_that_it_has_beside_others(dtype, cols):
    """Catches lanes of one row that take in another: rows are computed two or many at a time."""
    torch.manual_seed(cols)
    rows = 300 if cols < 100 else 7
    x = torch.randn(rows, cols, dtype=torch.float64)
    x[1::5] += 40  # such rows are computed with more care
    x = x.to(dtype)
    residual, dy = torch.randn(2, rows, cols).to(dtype)
    weight, bias = torch.randn(2, cols).to(dtype)

    def results(part):
        leaf = x[part].clone().requires_grad_()
        total, added = fused_add_layer_norm(leaf, residual[part], weight, bias)
        outputs = [fused_layer_norm(leaf, weight, bias), fused_rms_norm(leaf, weight), total, added]
        grads = [torch.autograd.grad(y, leaf, dy[part], retain_graph=True)[0] for y in outputs]
        return outputs + grads

    whole = results(slice(None))
    for part in (slice(0, 1), slice(1, 2), slice(rows - 1, rows), slice(1, 4)):
        for ours, expected in zip(results(part), whole, strict=True):
            assert torch.equal(ours, expected[part])


@pytest.mark.parametrize("norm", [fused_layer_norm, fused_rms_norm])
@pytest.mark.parametrize("cols", [2, 6, 8, 17, 64, 300, 1024])
def test_rounding_is_that_of_few_operations(norm, cols):
    """Catches a mean taken without its rest, where it is a few deviations: that costs a bit of y,
    and no bound of another test notices."""
    torch.manual_seed(0)
    x, weight = torch.randn(360, cols).sin(), torch.randn(cols).exp()
    x[::3] += 2
    expected = norm(x.double(), weight.double(), eps=1e-5)
    error = (norm(x, weight, eps=1e-5).double() - expected).abs().max() / expected.abs().max()
    # Half a unit of the result, and some more of x - mean, rstd and the product with the weight.
    assert error < 2.5 * torch.finfo(torch.float32).eps
