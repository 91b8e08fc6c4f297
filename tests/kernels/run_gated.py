"""The gated RMS norm on the interpreted GPU: its forward and then its backward."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.interpreter import ROUNDINGS, Gpu, code_of, empty, pointer, rows_of, wide
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import BackwardArgs, ForwardArgs, Rows


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_gated_forward.restype = made.gpu_gated_backward.restype = ctypes.c_char_p
    return made


class Gating(NamedTuple):
    sigmoid: bool = False
    first: bool = False
    groups: int = 1
    rounding: str = "once"

    def in_c(self) -> tuple[bool, bool, int]:
        return self.sigmoid, self.first, self.groups


def grouped(rows: Tensor, groups: int) -> Tensor:
    """Rows of the kernels: a group each."""
    return rows if groups == 1 else rows.unflatten(-1, (groups, rows.shape[-1] // groups))


def run(
    gpu: Gpu,
    gating: Gating,
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    grad_output: Tensor,
    eps: float = 1e-5,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, ...]:
    """Output, and gradients of input, gate and weight. Rows are 2-D, and may be strided."""
    x, z, dy = (grouped(t, gating.groups) for t in (input, gate, grad_output))
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    output, stats = empty(*input.shape, dtype=input.dtype), empty(1, rows, dtype=wide(input.dtype))
    param = input.dtype if weight is None else weight.dtype
    common = {
        "kind": 1, "dtype": code_of(input.dtype), "param_dtype": code_of(param), "rows": rows,
        "rounding": ROUNDINGS.index(gating.rounding), "cols": cols, "weight": pointer(weight),
    }  # fmt: skip
    args = ForwardArgs(
        **common, input=rows_of(x), output=Rows(output.data_ptr(), code_of(output.dtype)),
        stats=stats.data_ptr(), eps=eps,
    )  # fmt: skip
    beside = ctypes.byref(rows_of(z))
    gpu._begin()
    gpu._reads(input=input, gate=gate, weight=weight)
    gpu._writes(output=output, stats=stats)
    gpu._end(library().gpu_gated_forward(ctypes.byref(args), beside, *gating.in_c()))

    like = (input, gate, weight)
    made = [
        empty(*t.shape, dtype=t.dtype) if want and t is not None else None
        for t, want in zip(like, wanted, strict=True)
    ]
    grads = [Rows(pointer(g), code_of(t.dtype)) for g, t in zip(made, like[:2], strict=False)]
    args = BackwardArgs(
        **common, x=rows_of(x), grad_output=rows_of(dy), stats=stats.data_ptr(),
        grad_input=grads[0], grad_residual=Rows(None, code_of(input.dtype)),
        grad_weight=pointer(made[2]),
    )  # fmt: skip
    call = ctypes.byref(args), beside, ctypes.byref(grads[1]), *gating.in_c()
    gpu._begin()
    size = ctypes.c_int64()
    problem = library().gpu_gated_backward(*call, ctypes.byref(size))
    assert not problem, problem
    workspace = empty(size.value, dtype=torch.uint8)
    args.workspace = workspace.data_ptr() if size.value else None
    gpu._reads(grad_output=grad_output, input=input, gate=gate, weight=weight, stats=stats)
    gpu._writes(grad_input=made[0], grad_gate=made[1], grad_weight=made[2])
    if size.value:
        gpu._allow("workspace", workspace.data_ptr(), size.value, True, True)
    gpu._end(library().gpu_gated_backward(*call, None))
    return output, *made
