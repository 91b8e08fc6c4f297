"""Norms over channels on the interpreted GPU: forward and then backward."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from tests.kernels.interpreter import Gpu, code_of, empty, pointer, wide
from tests.kernels.interpreter import library as interpreter
from tests.kernels.toy_variant import BackwardArgs, ConstRows, ForwardArgs, Rows

KINDS = {"layer_norm": 0, "rms_norm": 3}  # the RMS norm with a bias


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_channels_first_forward.restype = ctypes.c_char_p
    made.gpu_channels_first_backward.restype = ctypes.c_char_p
    made.gpu_channels_first_workspace.restype = ctypes.c_int64
    return made


def planes(tensor: Tensor) -> ctypes.Structure:
    assert tensor.is_contiguous()
    return ConstRows(tensor.data_ptr(), code_of(tensor.dtype), tensor.shape[1])


def run(
    gpu: Gpu,
    norm: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    grad_output: Tensor,
    silu: bool = False,
    eps: float = 1e-5,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, ...]:
    """Output, and gradients of input, weight and bias. Images are [N, C, pixels]."""
    samples, channels, pixels = input.shape
    param = next((t.dtype for t in (weight, bias) if t is not None), input.dtype)
    common = {
        "kind": KINDS[norm], "dtype": code_of(input.dtype), "param_dtype": code_of(param),
        "rows": samples * pixels, "cols": channels, "weight": pointer(weight),
        "bias": pointer(bias),
    }  # fmt: skip
    more = ctypes.c_int64(pixels), silu
    output = empty(*input.shape, dtype=input.dtype)
    stats = empty(1 + (norm == "layer_norm"), samples * pixels, dtype=wide(input.dtype))
    args = ForwardArgs(
        **common, input=planes(input), output=Rows(output.data_ptr(), code_of(output.dtype)),
        stats=stats.data_ptr(), eps=eps,
    )  # fmt: skip
    gpu._begin()
    gpu._reads(input=input, weight=weight, bias=bias)
    gpu._writes(output=output, stats=stats)
    gpu._end(library().gpu_channels_first_forward(ctypes.byref(args), *more))

    shapes = (input.shape, (channels,), (channels,))
    dtypes = (input.dtype, param, param)
    made = [
        empty(*shape, dtype=dtype) if want else None
        for want, shape, dtype in zip(wanted, shapes, dtypes, strict=True)
    ]
    args = BackwardArgs(
        **common, x=planes(input), grad_output=planes(grad_output), stats=stats.data_ptr(),
        grad_input=Rows(pointer(made[0]), code_of(input.dtype)),
        grad_residual=Rows(None, code_of(input.dtype)), grad_weight=pointer(made[1]),
        grad_bias=pointer(made[2]),
    )  # fmt: skip
    gpu._begin()
    size = library().gpu_channels_first_workspace(ctypes.byref(args), *more)
    workspace = empty(size, dtype=torch.uint8)
    args.workspace = workspace.data_ptr() if size else None
    gpu._reads(grad_output=grad_output, input=input, weight=weight, stats=stats)
    gpu._reads(bias=bias if silu else None)
    gpu._writes(grad_input=made[0], grad_weight=made[1], grad_bias=made[2])
    if size:
        gpu._allow("workspace", workspace.data_ptr(), size, True, True)
    gpu._end(library().gpu_channels_first_backward(ctypes.byref(args), *more))
    return output, *made
