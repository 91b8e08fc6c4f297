"""The kernels that quantise, on the interpreted GPU: the bits of each rule, from their own output.

What this catches beside that: what tests/kernels/test_run_kernels.py lists, of these kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.case import generator
from tests.kernels import run_quantized
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.run_quantized import Result
from tests.kernels.test_run_kernels import needs_interpreter
from tests.numerics.test_quantized import RULES, assert_bits, to_8_bits
from tests.ops import BF16, F16, F32

LN, RMS = "layer_norm", "rms_norm"
BY_NAME = {str(rule): rule for rule in RULES}


@dataclass(frozen=True)
class Call:
    norm: str
    rows: int
    cols: int
    rule: str = "torchao-token-float8_e4m3fn"
    dtype: torch.dtype = BF16
    adds: bool = False
    params: torch.dtype | None = None  # that of the input unless said
    transposed: bool = False
    rare: bool = False  # rows that do not vary, are huge, zero, or hold NaN and infinity
    shift: int = 0  # elements from a multiple of 16 bytes to the first row
    sms: int = 132

    def __str__(self) -> str:
        default = Call("", 0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("norm=", "").replace("torch.", "")


CALLS = [
    # Lanes of a warp, a warp, several warps; blocks of many lanes, and of many packs.
    Call(RMS, 5, 8),
    Call(LN, 33, 64, "vllm-token-float8_e4m3fn"),
    Call(RMS, 9, 112, "torchao-block128-float8_e5m2-power", F16),
    Call(LN, 5, 200, "deep_gemm-block128-float8_e4m3fn", params=F32, adds=True),
    Call(RMS, 5, 320, "vllm-block128-float8_e4m3fn", F32, transposed=True),
    Call(LN, 7, 576, "te-block128-float8_e4m3fn-power", transposed=True),
    Call(RMS, 4, 1024, "vllm-token-int8", adds=True),
    Call(RMS, 3, 1152, "deep_gemm-block128-float8_e4m3fn-power", F16, params=F32),
    Call(LN, 2, 3200, "torchao-token-float8_e5m2-power", F32),
    Call(RMS, 3, 5120, "te-block128-float8_e5m2", sms=2),
    Call(LN, 2, 6144, "vllm-block128-int8", F16, adds=True),
    Call(RMS, 2, 8192, "vllm-token-float8_e4m3fn"),
    Call(RMS, 1, 16384, "torchao-block128-float8_e4m3fn", F16),
    # Two kernels: rows of no whole vectors, of six lanes, at other addresses, and long ones.
    Call(RMS, 9, 144, "torchao-block128-float8_e5m2-power", F16),
    Call(LN, 5, 3, "torchao-block128-float8_e4m3fn"),
    Call(RMS, 3, 129, "vllm-block128-float8_e4m3fn", F16),
    Call(LN, 3, 1000, "vllm-token-float8_e4m3fn", shift=3, adds=True),
    Call(RMS, 2, 2050, "te-block128-float8_e4m3fn", F32),
    Call(RMS, 2, 20000, "torchao-token-float8_e4m3fn"),
    Call(LN, 1, 20001, "deep_gemm-block128-float8_e4m3fn-power", F16, transposed=True),
    # Rows whose moments are taken again.
    Call(LN, 6, 96, "torchao-token-float8_e4m3fn", rare=True),
    Call(RMS, 6, 1152, "vllm-block128-float8_e4m3fn", F32, rare=True),
    Call(LN, 6, 4096, "te-block128-float8_e4m3fn-power", rare=True, adds=True),
    Call(RMS, 6, 250, "vllm-token-int8", rare=True),
]


def place(values: Tensor, shift: int) -> Tensor:
    memory = empty(values.numel() + 16, dtype=values.dtype)
    placed = memory[shift : shift + values.numel()].view(values.shape)
    return placed.copy_(values)


def make_inputs(call: Call) -> dict[str, Tensor | None]:
    g = generator("cpu", str(call))

    def rows(shift: int = 0) -> Tensor:
        values = torch.randn(call.rows, call.cols, generator=g)
        values = values * torch.randn(call.rows, 1, generator=g).exp2()
        if call.rare:
            values[0], values[1, call.cols // 2], values[2, -1] = 0, torch.nan, torch.inf
            values[3], values[4] = 7, values[4] * (1e30 if call.dtype != F16 else 1e3)
        return place(values.to(call.dtype), shift)

    def parameter() -> Tensor:
        return place(torch.randn(call.cols, generator=g).to(call.params or call.dtype), 0)

    return {
        "input": rows(call.shift),
        "residual": rows() if call.adds else None,
        "weight": parameter(),
        "bias": parameter() if call.norm == LN else None,
    }


def run(call: Call, inputs: dict, keep_output: bool) -> tuple[Result, Gpu]:
    gpu, rule = Gpu(call.sms), BY_NAME[call.rule]
    result = run_quantized.forward(
        gpu, rule.arguments, norm=call.norm, transposed=call.transposed,
        keep_output=keep_output, **inputs,
    )  # fmt: skip
    return result, gpu


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_bits(call):
    """Catches another scale or rounding than the rule's, and an output that is not the norm's."""
    inputs = make_inputs(call)
    result, gpu = run(call, inputs, keep_output=True)
    quantized, scale = BY_NAME[call.rule](result.output)
    assert_bits(result.scale, scale)
    assert_bits(result.quantized, quantized)
    output, total, _ = gpu.forward(norm=call.norm, **inputs)
    assert_bits(result.output, output)
    assert_bits(result.sum, total)
    vectors = call.cols * call.dtype.itemsize % 16 == 0 and call.shift == 0 and call.cols <= 16384
    vectors = vectors and call.cols != 144
    assert result.in_registers == vectors
    if vectors:
        bare, _ = run(call, inputs, keep_output=False)
        assert bare.output is None
        assert_bits(bare.scale, scale)
        assert_bits(bare.quantized, quantized)


@needs_interpreter
@pytest.mark.parametrize("cols", [64, 100])
@pytest.mark.parametrize("convention", ["torchao", "te", "vllm"])
def test_the_scale_of_a_tensor(convention, cols):
    call = Call(RMS, 5, cols)
    dtype = torch.int8 if convention == "vllm" else torch.float8_e5m2
    rule = {"scheme": "tensor", "dtype": dtype, "convention": convention, "power_of_two": False}
    scale = place(torch.tensor([0.037]), 0)
    inputs = make_inputs(call) | {"scale": scale, "keep_output": True}
    result = run_quantized.forward(Gpu(), rule, norm=RMS, **inputs)
    factor = scale if convention == "te" else 1 / scale
    assert_bits(result.quantized, to_8_bits(result.output.float() * factor, dtype))


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[1], CALLS[3], CALLS[9]], ids=str)
def test_rows_do_not_depend_on_others(call):
    """Catches a maximum that takes in a neighbour's lanes."""
    inputs = make_inputs(call)
    whole, _ = run(call, inputs, keep_output=False)
    for name in ("input", "residual"):
        if inputs[name] is not None:
            inputs[name] = place(inputs[name][1:2], 0)
    one, _ = run(replace(call, rows=1), inputs, keep_output=False)
    assert_bits(one.quantized, whole.quantized[1:2])
    assert_bits(one.scale, whole.scale[1:2])


@needs_interpreter
def test_no_two_calls_share_a_kernel():
    """Catches a kernel that is found again for another dtype or rule, which its key lacks."""
    rules = [str(rule) for rule in RULES if rule.scheme == "token"]
    for dtype, rule in itertools.product((BF16, F16), rules):
        call = Call(RMS, 3, 40, rule, dtype)
        result, _ = run(call, make_inputs(call), keep_output=True)
        quantized, scale = BY_NAME[rule](result.output)
        assert_bits(result.scale, scale)
        assert_bits(result.quantized, quantized)


@needs_interpreter
def test_both_kernels_run():
    """Catches calls of which none comes to one of the two ways."""
    calls = CALLS[0], CALLS[13]
    gpus = [run(call, make_inputs(call), keep_output=True)[1] for call in calls]
    ran = [launch.kernel for gpu in gpus for launch in gpu.launches]
    assert any("forward_kernel<fused_op::cuda::QuantizedOp" in kernel for kernel in ran)
    assert any("quantize_rows_kernel<" in kernel for kernel in ran)
