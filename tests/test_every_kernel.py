"""The script for compute-sanitizer, which nothing else runs, still runs.

Catches a change of an op or of the table of ops that tests/every_kernel.py does not follow: it
would fail on the day that it is needed, or find no fault there because it launches nothing.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from tests import every_kernel, sanitize_gpu
from tests.ops import DEVICES, OPS, PAIRS


def test_cases(pair):
    """Catches a list that is empty, misses an op, or has rows without columns: no kernel runs."""
    cases = every_kernel.cases(pair)
    at_odd_addresses = [op for op in OPS if not op.zero_centered]
    longer = len(every_kernel.SHAPES) * (len(OPS) + len(at_odd_addresses))
    assert len(cases) > longer > len(every_kernel.SHAPES) * len(OPS)  # shorter than a vector too
    assert {op for op, *_ in cases} == set(OPS)
    assert all(rows > 0 and cols > 0 for _, rows, cols, _ in cases)


def test_portable_clusters(pair):
    """Catches an option that leaves nothing out, so that the tool crashes, or too much."""
    left_out = sum(1 for _ in every_kernel.calls(pair)) - sum(
        1 for _ in every_kernel.calls(pair, portable=True)
    )
    assert 0 < left_out < 70


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_script(capsys):
    """Catches a script that fails or skips calls; one dtype, with both dtypes of its parameters."""
    every_kernel.main(["--dtype", "bfloat16"])
    calls = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    plain = len(every_kernel.cases(next(p for p in PAIRS if p.rows == torch.bfloat16)))
    with_options = 4 * len(every_kernel.SHAPES)  # at least one option of each op, at two shifts
    assert len(calls) == 2 and calls[0] > plain + with_options and calls[1] == 2 * calls[0]


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
            total += shares
    assert len(lines) == total == len(list((tmp_path / "logs").iterdir()))
    assert {line.split()[0] for line in lines} == {"0", "1"}
    assert all(line.split()[1] == "1" and "--error-exitcode 1" in line for line in lines)
    assert "racecheck: 160 calls in 16 processes, 0 failed" in capsys.readouterr().out


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
