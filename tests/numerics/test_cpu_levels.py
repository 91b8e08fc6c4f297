"""The levels of instructions that the CPU backend is compiled for.

Catches a level that rounds otherwise than the rest (a fused multiply-add, another conversion of 16
bits), one that is never taken, and a choice that is silently ignored.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_op import fused_add_layer_norm, fused_layer_norm, fused_rms_norm

CALLS = 250
LEVELS = {"AVX512": ["default", "avx2", "avx512"], "AVX2": ["default", "avx2"]}
SCRIPT = Path(__file__).with_name("cpu_level_bits.py")


def available():
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ["default"])


def run(level, *args):
    environment = {**os.environ, "FUSED_OP_CPU": level}
    return subprocess.run(
        [sys.executable, *map(str, args)], env=environment, capture_output=True, text=True
    )


def drawn_calls(level, threads):
    done = run(level, "-m", "tests.numerics.cpu_level_bits", CALLS, threads)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == CALLS
    return lines


@pytest.mark.slow
def test_levels_and_threads_give_the_same_bits():
    levels = available()
    expected = drawn_calls("", 1)
    assert len({line.split(": ")[-1] for line in expected}) > CALLS * 0.9
    for level in levels:
        for threads in (1, 3) if level == levels[-1] else (1,):
            differing = [
                (ours, theirs)
                for ours, theirs in zip(drawn_calls(level, threads), expected, strict=True)
                if ours != theirs
            ]
            assert not differing, f"{level}, {threads} threads: {differing[:3]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "level, loops", [("default", "without AVX"), ("avx2", "in AVX2"), ("avx512", "in AVX-512")]
)
def test_the_report_names_the_level(level, loops):
    """Catches a level that is chosen and not taken, and a report that names another."""
    if level not in available():
        pytest.skip("this CPU lacks it")
    code = "from fused_op.__main__ import devices; print(next(devices())[1])"
    for choice in (level, "") if level == available()[-1] else (level,):
        done = run(choice, "-c", code)
        assert done.stdout.startswith(f"loops {loops}, "), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", ["avx1024", "AVX2", " "])
def test_a_level_that_does_not_exist_is_refused(level):
    code = "import torch, fused_op; fused_op.fused_rms_norm(torch.ones(2, 4))"
    done = run(level, "-c", code)
    assert done.returncode == 1
    assert "FUSED_OP_CPU must be default, avx2 or avx512" in done.stderr
    assert f"got '{level}'" in done.stderr


@pytest.mark.skipif(platform.machine() == "x86_64", reason="this CPU may have them")
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_a_level_that_the_cpu_lacks_is_refused(level):
    test_a_level_that_does_not_exist_is_refused(level)


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
