"""RMS norm and rotary embedding on the interpreted GPU: its forward and then its backward."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.interpreter import Gpu, code_of, empty, pointer, rows_of, wide
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import BackwardArgs, ConstRows, ForwardArgs, Rows


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_rope_forward.restype = made.gpu_rope_backward.restype = ctypes.c_char_p
    return made


class Turn(ctypes.Structure):
    _fields_ = (
        ("cos", ConstRows),
        ("sin", ConstRows),
        *((name, ctypes.c_int) for name in ("period", "half", "heads")),
        *((name, ctypes.c_bool) for name in ("adjacent", "has_own_weights", "rounds_norm")),
        ("grad_rows", ConstRows),
    )


class Options(NamedTuple):
    style: str = "neox"
    rounding: str = "once"


def run(
    gpu: Gpu,
    options: Options,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    grad_output: Tensor,
    grad_rows: Tensor | None,
    eps: float = 1e-5,
    wants_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Output, and gradient of the weight; that of the input goes to `grad_rows`.

    Rows are [tokens, heads, head_dim], and may be strided; cos and sin have a row for each of some
    tokens in turn.
    """
    tokens, heads, cols = input.shape
    rows = tokens * heads
    output, stats = (
        empty(tokens, heads, cols, dtype=input.dtype),
        empty(1, rows, dtype=wide(input.dtype)),
    )
    param = input.dtype if weight is None else weight.dtype
    common = {
        "kind": 1, "dtype": code_of(input.dtype), "param_dtype": code_of(param), "rows": rows,
        "rounding": int(options.rounding == "before_weight"), "cols": cols,
        "weight": pointer(weight),
    }  # fmt: skip
    turn = Turn(
        rows_of(cos), rows_of(sin), len(cos), cos.shape[1], heads, options.style == "gptj",
        weight is not None and weight.dim() == 2 and heads > 1,
        options.rounding == "before_rotation",
    )  # fmt: skip
    args = ForwardArgs(
        **common, input=lying(input), output=Rows(output.data_ptr(), code_of(output.dtype)),
        stats=stats.data_ptr(), eps=eps,
    )  # fmt: skip
    gpu._begin()
    gpu._reads(input=input, cos=cos, sin=sin, weight=weight)
    gpu._writes(output=output, stats=stats)
    gpu._end(library().gpu_rope_forward(ctypes.byref(args), ctypes.byref(turn)))

    grad_weight = None
    if weight is not None and wants_weight:
        grad_weight = empty(*weight.shape, dtype=weight.dtype)
    if grad_rows is not None:
        turn.grad_rows = lying(grad_rows)
    args = BackwardArgs(
        **common, x=lying(input), grad_output=lying(grad_output), stats=stats.data_ptr(),
        grad_input=Rows(pointer(grad_rows), code_of(input.dtype)),
        grad_residual=Rows(None, code_of(input.dtype)), grad_weight=pointer(grad_weight),
    )  # fmt: skip
    call = ctypes.byref(args), ctypes.byref(turn)
    gpu._begin()
    size = ctypes.c_int64()
    problem = library().gpu_rope_backward(*call, ctypes.byref(size))
    assert not problem, problem
    workspace = empty(size.value, dtype=torch.uint8)
    args.workspace = workspace.data_ptr() if size.value else None
    gpu._reads(grad_output=grad_output, input=input, cos=cos, sin=sin, weight=weight, stats=stats)
    gpu._writes(grad_weight=grad_weight)
    if grad_rows is not None and grad_rows.is_contiguous():
        gpu._writes(grad_input=grad_rows)
    elif grad_rows is not None:
        for token in grad_rows:
            gpu._writes(grad_input=token)
    if size.value:
        gpu._allow("workspace", workspace.data_ptr(), size.value, True, True)
    gpu._end(library().gpu_rope_backward(*call, None))
    return output, grad_weight


def lying(rows: Tensor) -> ctypes.Structure:
    """At one stride where they are so."""
    tokens, heads, cols = rows.shape
    one_stride = heads == 1 or tokens == 1 or rows.stride(0) == heads * rows.stride(1)
    if not one_stride:
        return rows_of(rows)
    stride = rows.stride(0) if heads == 1 else rows.stride(1)
    return rows_of(rows.as_strided((math.prod((tokens, heads)), cols), (stride, 1)))
