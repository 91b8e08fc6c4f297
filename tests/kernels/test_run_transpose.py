"""The kernel that exchanges rows and columns, on the interpreted GPU."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import pytest
import torch

from tests.case import generator
from tests.kernels.interpreter import Gpu, empty, library
from tests.kernels.test_run_kernels import needs_interpreter


class TransposeArgs(ctypes.Structure):  # of csrc/core/transpose.h
    _fields_ = [
        ("from", c_void_p), ("to", c_void_p), ("element_bytes", c_int), ("matrices", c_int64),
        ("rows", c_int64), ("cols", c_int64),
    ]  # fmt: skip


SHAPES = [(1, 1, 1), (3, 1, 65), (2, 65, 1), (2, 64, 64), (2, 63, 130), (1, 129, 66), (5, 7, 3)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@needs_interpreter
def test_every_element_is_at_its_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Catches an element at another place, one that is not written, and one past an end."""
    matrices, rows, cols = shape
    gpu = Gpu(multiprocessors=4)
    given = empty(*shape, dtype=dtype)
    given.copy_(torch.randint(-(2**15), 2**15, shape, generator=generator("cpu", shape, dtype)))
    made = empty(matrices, cols, rows, dtype=dtype)
    args = TransposeArgs(given.data_ptr(), made.data_ptr(), dtype.itemsize, *shape)
    run = library().gpu_transpose
    run.restype = ctypes.c_char_p
    gpu._begin()
    gpu._reads(given=given)
    gpu._writes(made=made)
    gpu._end(run(ctypes.byref(args)))
    assert torch.equal(made, given.mT)
