"""The modulated norms on the interpreted GPU: a forward or a backward, as the op launches it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.interpreter import Gpu, code_of, empty, pointer, rows_of, wide
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import I64, BackwardArgs, ConstRows, ForwardArgs, Rows, Split, struct

Modulation = struct(
    ("scale", ConstRows), ("shift", ConstRows), ("gate", ConstRows), ("rows_each", I64)
)  # fmt: skip
KINDS = {"layer_norm": 0, "rms_norm": 1, "biased_rms_norm": 3, "identity": 4}


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_modulated_forward.restype = ctypes.c_char_p
    made.gpu_modulated_backward.restype = ctypes.c_char_p
    return made


class Entries(NamedTuple):
    """[entries, cols], each shared by so many rows."""

    scale: Tensor
    shift: Tensor | None
    gate: Tensor | None
    rows_each: int
    shares: bool = False  # more rows may share one, even if none do here

    @property
    def are_shared(self) -> bool:
        return self.rows_each > 1 or self.shares

    def in_c(self) -> ctypes.Structure:
        return Modulation(*map(self._rows, self[:3]), self.rows_each)

    def _rows(self, entries: Tensor | None) -> ctypes.Structure:
        """As entries() of core/modulated.h has them."""
        if entries is None:
            return ConstRows()
        stride = entries.stride(0)
        split, each = Split(), self.rows_each
        if each > 1 and len(entries) > 1:
            shift = (each - 1).bit_length()
            split = Split(each, (2**32 * (2**shift - each)) // each + 1, shift, stride)
        stride = stride if each == 1 else 0
        return ConstRows(entries.data_ptr(), code_of(entries.dtype), stride, split)


def forward(
    gpu: Gpu,
    norm: str,
    input: Tensor,
    entries: Entries,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """output, sum, stats."""
    rows, cols = input.shape
    output = empty(rows, cols, dtype=input.dtype)
    row = input if residual is None else residual
    sum = None if residual is None else empty(rows, cols, dtype=row.dtype)
    stats = empty(2 if norm == "layer_norm" else 1, rows, dtype=wide(input.dtype))
    args = ForwardArgs(
        kind=KINDS[norm], dtype=code_of(row.dtype), rows=rows, cols=cols,
        param_dtype=code_of(input.dtype if weight is None else weight.dtype),
        input=rows_of(input), residual=rows_of(residual), weight=pointer(weight),
        bias=pointer(bias), output=Rows(output.data_ptr(), code_of(output.dtype)),
        sum=pointer(sum), stats=stats.data_ptr(), eps=eps,
    )  # fmt: skip
    gpu._begin()
    gpu._reads(input=input, residual=residual, weight=weight, bias=bias)
    gpu._reads(scale=entries.scale, shift=entries.shift, gate=entries.gate)
    gpu._writes(output=output, stats=stats, sum=sum)
    gpu._end(library().gpu_modulated_forward(ctypes.byref(args), ctypes.byref(entries.in_c())))
    return output, sum, stats


class Sums(NamedTuple):
    """Gradients of x and, where each row has an entry, of scale; and sums over rows."""

    x: Tensor | None
    scale: Tensor | None  # of rows with an entry each
    weight: Tensor | None  # of each entry, or of the weight
    bias: Tensor | None


def backward(
    gpu: Gpu,
    norm: str,
    x: Tensor,
    entries: Entries,
    grad_output: Tensor,
    stats: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    grad_sum: Tensor | None = None,
) -> Sums:
    """The kernel's results: csrc/modulated_backward.cpp makes gradients of them.

    With "identity", `scale` is the gate, and `weight` of the result is its gradient.
    """
    rows, cols = x.shape
    shared = entries.are_shared
    count = len(entries.scale) if shared else 1
    plain = weight is None and bias is None
    params = (entries.scale if shared and plain else x if weight is None else weight).dtype
    if shared and not plain:
        params = wide(x.dtype)
        weight, bias = (None if t is None else t.to(params) for t in (weight, bias))
        weight = None if weight is None else empty(cols, dtype=params).copy_(weight)
    sums = [empty(count * cols, dtype=params), None]
    if norm in ("layer_norm", "biased_rms_norm"):
        sums[1] = empty(count * cols, dtype=params)
    dx = empty(rows, cols, dtype=x.dtype)
    dscale = None if shared else empty(rows, cols, dtype=entries.scale.dtype)
    args = BackwardArgs(
        kind=KINDS[norm], dtype=code_of(x.dtype), param_dtype=code_of(params), rows=rows, cols=cols,
        x=rows_of(x), grad_output=rows_of(grad_output), grad_sum=rows_of(grad_sum),
        weight=pointer(weight), bias=pointer(bias),
        stats=stats.data_ptr(), grad_input=Rows(pointer(dx), code_of(x.dtype)),
        grad_residual=Rows(None, code_of(x.dtype)),
        grad_weight=pointer(sums[0]), grad_bias=pointer(sums[1]),
    )  # fmt: skip
    grad_scale = Rows(pointer(dscale), code_of(entries.scale.dtype))
    call = (
        ctypes.byref(args), ctypes.byref(entries.in_c()), ctypes.byref(grad_scale),
        count if shared else 0,
    )  # fmt: skip
    gpu._begin()
    size = ctypes.c_int64()
    problem = library().gpu_modulated_backward(*call, ctypes.byref(size))
    assert not problem, problem
    workspace = empty(size.value, dtype=torch.uint8)
    args.workspace = workspace.data_ptr() if size.value else None
    gpu._reads(x=x, grad_output=grad_output, weight=weight, bias=bias, stats=stats)
    gpu._reads(scale=entries.scale, grad_sum=grad_sum)
    gpu._writes(grad_x=dx, grad_scale=dscale, grad_weight=sums[0], grad_bias=sums[1])
    if size.value:
        gpu._allow("workspace", workspace.data_ptr(), size.value, True, True)
    gpu._end(library().gpu_modulated_backward(*call, None))
    shaped = [None if t is None else t.view(count, cols) for t in sums]
    return Sums(dx, dscale, *shaped)
