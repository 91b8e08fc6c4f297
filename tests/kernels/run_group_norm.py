"""Group norms on the interpreted GPU: forward and then backward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_bool, c_double, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from tests.kernels.interpreter import Gpu, code_of, empty, pointer, wide
from tests.kernels.interpreter import library as interpreter


class ChannelArgs(ctypes.Structure):  # as all below: of csrc/core/group_norm.h
    _fields_ = [
        ("param_dtype", c_int), ("weight", c_void_p), ("bias", c_void_p), ("entry_dtype", c_int),
        ("scale", c_void_p), ("shift", c_void_p), ("entry_stride", c_int64),
    ]  # fmt: skip


GROUP_NORM_ARGS = [
    ("dtype", c_int), ("samples", c_int64), ("channels", c_int64), ("pixels", c_int64),
    ("groups", c_int64), ("nhwc", c_bool), ("silu", c_bool), ("channel", ChannelArgs),
]  # fmt: skip


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        *GROUP_NORM_ARGS, ("input", c_void_p), ("output", c_void_p), ("stats", c_void_p),
        ("eps", c_double), ("workspace", c_void_p),
    ]  # fmt: skip


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        *GROUP_NORM_ARGS, ("input", c_void_p), ("grad_output", c_void_p), ("stats", c_void_p),
        ("grad_input", c_void_p), ("grad_weight", c_void_p), ("grad_bias", c_void_p),
        ("grad_scale", c_void_p), ("grad_shift", c_void_p), ("workspace", c_void_p),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    made = interpreter()
    made.gpu_group_norm_forward.restype = ctypes.c_char_p
    made.gpu_group_norm_backward.restype = ctypes.c_char_p
    made.gpu_group_norm_forward_workspace.restype = c_int64
    made.gpu_group_norm_workspace.restype = c_int64
    made.gpu_reads_nhwc.restype = c_bool
    return made


def reads_nhwc(image: Tensor, groups: int) -> bool:
    """Whether there are kernels for such an image with its channels innermost."""
    samples, channels, pixels = image.shape
    args = ForwardArgs(
        dtype=code_of(image.dtype), samples=samples, channels=channels, pixels=pixels, groups=groups
    )
    return library().gpu_reads_nhwc(ctypes.byref(args))


def _placed(image: Tensor, nhwc: bool) -> Tensor:
    if not nhwc:
        return image
    return empty(*image.mT.shape, dtype=image.dtype).copy_(image.mT)


def _allow_workspace(gpu: Gpu, args: ctypes.Structure, size_of: Callable) -> Tensor:
    size = size_of(ctypes.byref(args))
    workspace = empty(size, dtype=torch.uint8)
    if size:
        args.workspace = workspace.data_ptr()
        gpu._allow("workspace", workspace.data_ptr(), size, True, True)
    return workspace


def run(
    gpu: Gpu,
    groups: int,
    inputs: dict[str, Tensor],
    grad_output: Tensor,
    silu: bool = False,
    eps: float = 1e-5,
    nhwc: bool = False,
    wanted: tuple[str, ...] = ("input", "weight", "bias", "scale", "shift"),
) -> dict[str, Tensor]:
    """The output, and the gradients that are wanted. Images are [N, C, pixels]; with nhwc, the
    kernels get copies of them whose channels are neighbours."""
    input = _placed(inputs["input"], nhwc)
    grad_output = _placed(grad_output, nhwc)
    samples, channels, pixels = inputs["input"].shape
    given = {name: inputs.get(name) for name in ("weight", "bias", "scale", "shift")}
    dtype_of = {
        name: next((inputs[n].dtype for n in names if n in inputs), input.dtype)
        for names in (("weight", "bias"), ("scale", "shift"))
        for name in names
    }
    entries = next((t for t in (given["scale"], given["shift"]) if t is not None), None)
    channel = ChannelArgs(
        param_dtype=code_of(dtype_of["weight"]), entry_dtype=code_of(dtype_of["scale"]),
        entry_stride=0 if entries is None else entries.stride(0),
        **{name: pointer(t) for name, t in given.items()},
    )  # fmt: skip
    common = {
        "dtype": code_of(input.dtype), "samples": samples, "channels": channels, "pixels": pixels,
        "groups": groups, "nhwc": nhwc, "silu": silu, "channel": channel, "input": input.data_ptr(),
    }  # fmt: skip
    output = empty(*input.shape, dtype=input.dtype)
    stats = empty(2, samples * groups, dtype=wide(input.dtype))
    forward = ForwardArgs(**common, output=output.data_ptr(), stats=stats.data_ptr(), eps=eps)
    assert not nhwc or reads_nhwc(inputs["input"], groups)
    gpu._begin()
    kept = [_allow_workspace(gpu, forward, library().gpu_group_norm_forward_workspace)]
    gpu._reads(input=input, **given)
    gpu._writes(output=output, stats=stats)
    gpu._end(library().gpu_group_norm_forward(ctypes.byref(forward)))

    shapes = {"input": input.shape, "weight": (channels,), "bias": (channels,)}
    made = {
        f"grad_{name}": empty(
            *shapes.get(name, (samples, channels)), dtype=dtype_of.get(name, input.dtype)
        )
        for name in wanted
    }
    backward = BackwardArgs(
        **common, grad_output=grad_output.data_ptr(), stats=stats.data_ptr(),
        **{name: t.data_ptr() for name, t in made.items()},
    )  # fmt: skip
    gpu._begin()
    kept.append(_allow_workspace(gpu, backward, library().gpu_group_norm_workspace))
    gpu._reads(grad_output=grad_output, input=input, stats=stats, **given)
    gpu._writes(**made)
    gpu._end(library().gpu_group_norm_backward(ctypes.byref(backward)))
    images = {"output": output, **made}
    return {n: t.mT if nhwc and t.dim() == 3 else t for n, t in images.items()}
