"""A forward with a quantised output on the interpreted GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.interpreter import ROUNDINGS, Gpu, code_of, empty, pointer, rows_of
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import I32, I64, Bool, ForwardArgs, Pointer, Rows, struct

Rule = struct(("format", I32), ("convention", I32), ("scheme", I32), ("power_of_two", Bool))
Quantization = struct(
    ("rule", Rule), ("quantized", Pointer), ("given", Pointer), ("scales", Pointer),
    ("exponents", Bool), ("row_stride", I64), ("block_stride", I64),
)  # fmt: skip
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
CONVENTIONS = ("torchao", "vllm", "deep_gemm", "te")
SCHEMES = ("tensor", "token", "block128")


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_quantized.restype = ctypes.c_char_p
    made.gpu_quantizes_in_registers.restype = ctypes.c_bool
    return made


class Result(NamedTuple):
    quantized: Tensor
    scale: Tensor | None
    output: Tensor | None
    sum: Tensor | None
    in_registers: bool


def forward(
    gpu: Gpu,
    rule: dict,
    *,
    norm: str,
    input: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    rounding: str = "once",
    keep_output: bool = False,
    transposed: bool = False,
) -> Result:
    """What torch.ops.fused_op.norm_quantized returns; rows of transposed scales are not padded."""
    rows, cols = input.shape
    dtype = input.dtype if residual is None else residual.dtype
    blocks = {"tensor": 0, "token": 1, "block128": (cols + 127) // 128}[rule["scheme"]]
    quantized = empty(rows, cols, dtype=rule["dtype"])
    scales = empty(*((blocks, rows) if transposed else (rows, blocks)), dtype=torch.float32)
    total = None if residual is None else empty(rows, cols, dtype=dtype)
    param = next((t.dtype for t in (weight, bias) if t is not None), input.dtype)
    args = ForwardArgs(
        kind=0 if norm == "layer_norm" else 1, dtype=code_of(dtype), param_dtype=code_of(param),
        rounding=ROUNDINGS.index(rounding), rows=rows, cols=cols, input=rows_of(input),
        residual=rows_of(residual), weight=pointer(weight), bias=pointer(bias),
        output=Rows(None, code_of(input.dtype)), sum=pointer(total), eps=1e-5,
    )  # fmt: skip
    to = Quantization(
        rule=Rule(
            FORMATS.index(rule["dtype"]), CONVENTIONS.index(rule["convention"]),
            SCHEMES.index(rule["scheme"]), rule["power_of_two"],
        ),
        quantized=quantized.data_ptr(), given=pointer(scale),
        scales=scales.data_ptr() if blocks else None,
        row_stride=1 if transposed else blocks, block_stride=rows if transposed else 1,
    )  # fmt: skip
    in_registers = library().gpu_quantizes_in_registers(ctypes.byref(args))
    output = None
    if keep_output or not in_registers:
        output = empty(rows, cols, dtype=input.dtype)
        args.output.data = output.data_ptr()
    gpu._begin()
    gpu._reads(input=input, residual=residual, weight=weight, bias=bias, scale=scale)
    gpu._writes(quantized=quantized, scales=scales if blocks else None, output=output, sum=total)
    gpu._end(library().gpu_quantized(ctypes.byref(args), ctypes.byref(to)))
    scales = scales.t() if transposed else scales
    return Result(quantized, scales if blocks else None, output, total, in_registers)
