"""The script for compute-sanitizer, which nothing else runs, still runs, and has every kernel.

Catches a kernel that the plans choose and no call of every_kernel.py does, and a change of an
op that it does not follow: it would fail on the day that it is needed, or find no fault there
because it launches nothing.
"""

import os
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fused_op
from fused_op._kernel_plan import gpu_of
from tests.case import SEED
from tests.kernels import every_kernel, sanitize_gpu
from tests.kernels.every_kernel import Trait, planned, traits, traits_of
from tests.ops import DEVICES, PAIRS

needs_cuda_build = pytest.mark.skipif(
    not fused_op.build_info()["cuda"], reason="a build without CUDA makes no plans"
)


def traits_of_all(calls, gpu) -> set[Trait]:
    return set().union(*(traits_of(call, gpu)[0] for call in calls))


@pytest.mark.slow
@needs_cuda_build
def test_every_kernel_of_a_sample(pair):
    """Catches a grid of calls that misses a tile, an op or dtypes that other calls have."""
    gpu = gpu_of(None, None)
    covered = traits_of_all(planned(pair, gpu), gpu)
    g = random.Random(SEED)
    variants = every_kernel.variants(pair)
    for _ in range(3000):
        step = g.choice([1, 2, 8, 16, 64])
        cols = max(round(2 ** g.uniform(0, 18)) // step * step, step)
        call = replace(g.choice(variants), cols=cols, rows=round(2 ** g.uniform(0, 20)))
        missed = traits_of(call, gpu)[0] - covered
        assert not missed, f"{call} (FUSED_OP_SEED={SEED})"


@pytest.mark.slow
@needs_cuda_build
def test_the_list(pair):
    """Catches a list that grows until nobody runs it, repeats itself, or lacks an option."""
    calls = planned(pair, gpu_of(None, None))
    assert 300 < len(calls) == len(set(calls)) < 1000
    assert sum(call.rows * call.cols for call in calls) < 3 * 2**29
    assert {call.op for call in calls} == {"layer_norm", "rms_norm"}
    for name in ("residual", "out_dtype", "rounding"):
        assert {getattr(call, name) for call in calls} == {
            getattr(call, name) for call in every_kernel.variants(pair)
        }
    for name in ("dropout", "memory_efficient", "misaligned"):
        assert {getattr(call, name) for call in calls} == {False, True}


@pytest.mark.slow
@needs_cuda_build
def test_every_kernel_that_there_is():
    """Catches a kernel of csrc/cuda that no call of a pair comes to, and one of the core table."""
    gpu = gpu_of(None, None)._replace(fast_memory=True)  # for rows in turn
    pair = PAIRS[3]
    assert str(pair) == "bf16-bf16"
    covered = traits_of_all(planned(pair, gpu), gpu)
    assert {trait.kernel for trait in covered} == {
        *(f"forward_{form}kernel" for form in ("", "flat_", "cluster_", "in_turn_", "streamed_")),
        *(f"backward_{form}kernel" for form in ("", "few_", "row_sums_", "columns_", "cluster_")),
        "add_partials_kernel",
    }
    # The last argument of a tile says whether it is in the core table.
    core = Counter(t.kernel for t in covered if t.kind == "tile" and t.values[-1] == "true")
    assert core == {"forward_kernel": 12, "backward_kernel": 7}


def test_traits():
    """Catches a name that is taken apart wrongly, so that all kernels seem to be one."""
    op = "fused_op::cuda::ForwardOp<fused_op::LayerNorm, fused_op::Plain<float, false>, "
    op += "fused_op::Affine<float, fused_op::BFloat16, false>, fused_op::cuda::Vectors>"
    tile = "fused_op::cuda::ForwardTile<4, 32, 3, 2, false, 512, 2, 300, false>"
    found = traits(f"fused_op::cuda::forward_kernel<{op}, {tile}>", 300)
    plain = "fused_op::LayerNorm, fused_op::Plain<T, false>, fused_op::Affine<T, T, false>, "
    assert found == {
        Trait("tile", "forward_kernel", ("Vectors", "4", "32", "3", "2", "false", "false")),
        Trait("op", "forward_kernel", (plain + "fused_op::cuda::Vectors", "warp")),
        Trait("types", "forward_kernel", ("float", "float", "fused_op::BFloat16")),
    }
    assert traits("fused_op::cuda::add_partials_kernel<float, double>", 300) == {
        Trait("types", "add_partials_kernel", ("float, double",))
    }


@pytest.mark.slow
@needs_cuda_build
def test_portable_clusters():
    """Catches an option that leaves nothing out, so that the tool crashes, or too much."""
    pair, gpu = PAIRS[3], gpu_of(None, 90)
    calls = planned(pair, gpu, portable=True)
    assert max(traits_of(call, gpu)[1] for call in planned(pair, gpu)) > 8
    assert max(traits_of(call, gpu)[1] for call in calls) in range(2, 9)
    missed = traits_of_all(planned(pair, gpu), gpu) - traits_of_all(calls, gpu)
    assert {trait.values for trait in missed if trait.kind == "cluster"} == {("large",)}
    assert {trait.kernel for trait in missed} == {t.kernel for t in missed if t.kind == "cluster"}
    assert len(missed) < 10


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_script(capsys):
    """Catches a script that fails, skips calls, or whose calls are not those of the plans."""
    every_kernel.main(["--dtype", "float64", "--share", "1/16"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and int(lines[0].split()[1]) > 20
    every_kernel.main(["--dtype", "bfloat16", "--share", "3/64"])
    calls = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(calls) == 2 and calls[0] > 10 and calls[1] > 2 * 10


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts another compute-sanitizer in front, and two GPUs; returns its arguments so far."""
    log = tmp_path / "arguments"
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {log}\n'
        'case "$*" in *"$BAD"*) echo invalid read; exit "$STATUS";; esac\n'
        "echo bf16-bf16: 5 calls; echo bf16-f32: 10 calls; echo == ERROR SUMMARY: 0 errors\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("BAD", "nothing of the kind")
    monkeypatch.setattr(sanitize_gpu, "places", lambda _: ["0", "0", "1"])
    return lambda: log.read_text().splitlines()


def test_sanitize_gpu(sanitizer, capsys, tmp_path):
    """Catches a share that is left out or comes twice, or a process without its own memory."""
    assert sanitize_gpu.main(["--logs", str(tmp_path / "logs")]) == 0
    lines = sanitizer()
    total = 0
    for tool, dtypes in sanitize_gpu.SHARES.items():
        for dtype, shares in dtypes.items():
            mine = [line for line in lines if f"--tool {tool} " in line and f" {dtype} " in line]
            given = sorted(line.partition("--share ")[2].split()[0] for line in mine)
            assert given == sorted(f"{i}/{shares}" for i in range(1, shares + 1))
            assert all(("--portable-clusters" in line) == (tool == "synccheck") for line in mine)
            assert all(("--parameters-as-rows" in line) == (tool == "racecheck") for line in mine)
            total += shares
    assert len(lines) == total == len(list((tmp_path / "logs").iterdir()))
    assert {line.split()[0] for line in lines} == {"0", "1"}
    assert all(line.split()[1] == "1" and "--error-exitcode 1" in line for line in lines)
    assert "racecheck: 240 calls in 24 processes, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_sanitize_gpu_tells_a_failure(sanitizer, capsys, monkeypatch, status):
    """Catches a fault, or a process that made no call, that is lost among the others."""
    monkeypatch.setenv("BAD", "--share 3/8")
    monkeypatch.setenv("STATUS", str(status))
    assert sanitize_gpu.main(["--tool", "initcheck"]) == 1
    printed = capsys.readouterr().out
    assert (
        f"initcheck bfloat16 3/8: status {status}; 0 calls" in printed and "invalid read" in printed
    )
    assert "initcheck: 70 calls in 8 processes, 1 failed" in printed


def test_sanitize_gpu_uses_the_visible_gpus(monkeypatch):
    """Catches a process on a GPU that its user had left to others."""
    memory = SimpleNamespace(total_memory=2 * sanitize_gpu.PROCESS_BYTES)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sanitize_gpu.places(None) == ["0", "0", "1", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert sanitize_gpu.places(1) == ["3", "5"]
