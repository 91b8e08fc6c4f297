"""`python -m fused_op`: a report that is true, and a check that can fail."""

import re
import subprocess
import sys

import pytest
import torch

import fused_op
import fused_op_cuda
from fused_op import __main__ as report
from tests.ops import DEVICES, OPS, PAIRS


def lines(output: str, verdict: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"  {verdict}  ")]


def test_command():
    """Catches a command that cannot be run, and an op, device or dtype pair that is not checked."""
    run = subprocess.run([sys.executable, "-m", "fused_op"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    info = fused_op.build_info()
    for fact in ("version", "torch", "cuda", "cuda_archs", "no_cuda_reason"):
        assert info[fact] in run.stdout.partition("Devices")[0]
    assert torch.__version__ in run.stdout
    gpus = torch.cuda.device_count() if info["cuda"] and "cuda" in DEVICES else 0
    passed = lines(run.stdout, "pass")
    assert len(set(passed)) == len(report.OPS) * len(PAIRS) * (1 + gpus)
    for op in report.OPS:
        assert sum(f" {op} " in line for line in passed) == len(PAIRS) * (1 + gpus)
    assert run.stdout.endswith("\nAll passed\n")


@pytest.mark.skipif(bool(fused_op.build_info()["cuda"]), reason="see kernels/test_kernel_cache.py")
def test_cache_of_a_build_without_cuda(capsys):
    assert report.main(["cache", "--clear"]) == 0
    assert "This build has no CUDA backend, and compiles no kernels: " in capsys.readouterr().out


def test_the_table_is_that_of_the_tests():
    """Catches an op or a dtype pair that is added to the tests' tables alone."""
    assert {op.name: op.inputs for op in OPS} == report.OPS
    assert {tuple(pair) for pair in PAIRS} == set(report.PAIRS)


def with_one_changed(name, index, change):
    """A stand-in for a function of the binding: one of its results is changed."""
    real = getattr(fused_op_cuda, name)

    def changed(*args):
        found = list(real(*args))
        if found[index] is not None:
            found[index] = change(found[index])
        return tuple(found)

    return changed


@pytest.mark.parametrize(
    ("binding", "index", "named"),
    [
        ("norm_forward", 0, "output"),
        ("norm_forward", 1, "sum"),
        ("norm_forward", 2, "gradient of input"),  # the statistics
        ("norm_backward", 0, "gradient of input"),
        ("norm_backward", 2, "gradient of weight"),
        ("norm_backward", 3, "gradient of bias"),
    ],
)
@pytest.mark.parametrize("wrong", ["percents", "one element", "NaN"])
def test_a_wrong_result_fails(binding, index, named, wrong, monkeypatch, device, in_python):
    """Catches a tolerance that lets a wrong kernel pass, in any result and for any dtype."""

    def change(t):
        t = t.clone()
        if wrong == "percents":
            return t * 1.02  # a few roundings of bfloat16
        t.view(-1)[-1] = float("nan") if wrong == "NaN" else t.view(-1)[-1] + t.abs().max()
        return t

    monkeypatch.setattr(fused_op_cuda, binding, with_one_changed(binding, index, change))
    for rows, params in report.PAIRS:
        problem = report.check("fused_add_layer_norm", device, rows, params)
        assert f"{named} is off by" in problem, (rows, params)


def test_right_results_pass_with_room(device, monkeypatch):
    """Catches a tolerance so tight that another compiler or GPU would fail: random numbers in the
    last bits of the arithmetic must still pass."""
    torch.manual_seed(0)

    def noisy(t):  # two roundings of float32, or of float64: below those of 16 bits
        eps = torch.finfo(t.dtype).eps
        return t * (1 + eps * torch.randn_like(t)) if eps < 1e-6 else t

    for index in (0, 2):
        monkeypatch.setattr(
            fused_op_cuda, "norm_forward", with_one_changed("norm_forward", index, noisy)
        )
    for op in report.OPS:
        for rows, params in report.PAIRS:
            assert report.check(op, device, rows, params) == ""


def test_failures_are_counted_and_do_not_stop_the_rest(monkeypatch, capsys):
    """Catches an exit status of 0 after a failure, and an exception that ends the report."""
    real = fused_op.fused_rms_norm

    def fails(input, *args, **options):
        if input.dtype is torch.float64:
            raise RuntimeError("no such kernel\nand more")
        return real(input, *args, **options) * (1.5 if input.dtype is torch.float32 else 1)

    monkeypatch.setattr(fused_op, "fused_rms_norm", fails)
    assert report.main() == 1
    output = capsys.readouterr().out
    wrong, raised = lines(output, "FAIL")[:2]
    assert re.search(r"fused_rms_norm +cpu +float32: output is off by \d", wrong)
    assert re.search(r"fused_rms_norm +cpu +float64: RuntimeError: no such kernel$", raised)
    assert f"\n{len(lines(output, 'FAIL'))} failed\n" in output
    assert len(lines(output, "pass")) == len(lines(output, "FAIL")) / 2 * (len(report.OPS) * 6 - 2)


@pytest.mark.parametrize(
    ("archs", "runs_on", "not_on"),
    [
        ("9.0", [(9, 0)], [(8, 0), (8, 9), (10, 0), (12, 0)]),
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("7.5;9.0+PTX", [(7, 5), (9, 0), (10, 0), (12, 0)], [(7, 0), (8, 0)]),
        ("7.5 8.0", [(7, 5), (8, 6)], [(9, 0)]),
        ("9.0a", [(9, 0)], [(9, 1), (10, 0)]),
        ("9.0a+PTX", [(9, 0)], [(10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("Hopper", [(9, 0)], []),
    ],
)
def test_which_gpus_a_build_is_for(archs, runs_on, not_on):
    """Catches a GPU that is said to be covered and has no code, or the reverse."""
    assert all(report.covers(archs, capability) for capability in runs_on)
    assert not any(report.covers(archs, capability) for capability in not_on)


@pytest.mark.parametrize(
    ("archs", "cuda"), [("9.0", "13.0"), ("8.0", "13.0"), ("", "13.0"), ("", "")]
)
def test_gpus_are_listed(archs, cuda, monkeypatch):
    """Catches a GPU that is missing from the report, or checked without code for it."""
    info = {**fused_op.build_info(), "cuda": cuda, "cuda_archs": archs}
    monkeypatch.setattr(fused_op, "build_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (8, 6)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["H200", "RTX 3090"][index])
    _, first, second = report.devices()
    assert first[0] == "cuda:0" and first[1].startswith("H200, capability 9.0, ")
    assert second[0] == "cuda:1" and second[1].startswith("RTX 3090, capability 8.6, ")
    for (_, text, is_covered), only in ((first, "9.0"), (second, "8.0")):
        assert is_covered is (archs == only or bool(cuda and not archs))  # without nvcc: all
        assert ("NOT covered" in text) is not is_covered


def test_no_gpu_is_said(monkeypatch):
    """Catches a report that leaves open whether torch or the machine is without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in ((None, "torch is a build without CUDA"), ("13.0", "torch sees none")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert list(report.devices())[1:] == [("cuda", f"no GPU: {reason}", False)]
