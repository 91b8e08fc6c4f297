"""Post-norm, addition and pre-norm by one CUDA kernel, run without a GPU.

Catches a kernel whose results are not, bit by bit, those of the kernels of the two ops: sums of
another order, a branch or a sum that is not rounded, an untrusted row that leaves the common way in
either norm, in the same warp as rows that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.case import generator
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.run_post_add_pre import run, two_ops
from tests.kernels.test_run_kernels import needs_interpreter

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Call:
    rows: int
    cols: int
    dtype: torch.dtype = BF16
    post: torch.dtype | None = BF16  # of the weights
    pre: torch.dtype | None = BF16
    rounding: str = "once"
    padding: int = 0  # elements behind each row of input and residual
    shift: int = 0  # elements from a multiple of 16 bytes to the first row
    scales: tuple[float, float] = (1.0, 1.0)  # of every third row of input and residual
    sms: int = 132
    backwards: bool = False  # the order in which threads run

    def __str__(self) -> str:
        default = Call(0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("torch.", "").replace(" ", "")


CALLS = [
    Call(5, 128),
    Call(300, 128, sms=2),
    Call(23, 144),
    Call(40, 72, F32, F32, F32, scales=(1e30, 1.0)),  # six lanes a row; squares that overflow
    Call(7, 8, F32, F32, F32),  # a row of one lane
    Call(9, 3, post=None, pre=F32),
    Call(6, 96, F16, F16, F32, rounding="before_weight"),
    Call(7, 33, F32, F32, None),
    Call(40, 64, F64, F64, F64),
    Call(4, 1000, post=None, shift=1),
    Call(3, 1001, post=F32, pre=F32, padding=3),
    Call(5, 640, padding=8),
    Call(4, 2560, post=F32, rounding="before_weight"),
    Call(300, 4096, sms=2),
    Call(3, 4096, F32, F32, F32),
    Call(2, 12001, F16, F16, F16),
    Call(2, 16384),
    # Squares that overflow or vanish: in the branch, in the sum, in both.
    Call(40, 64, F32, F32, F32, scales=(1e30, 1.0)),
    Call(40, 64, F32, F32, F32, scales=(1.0, 1e30), sms=1),
    Call(7, 33, F32, F32, F32, scales=(1e-30, 1e25)),
    Call(5, 1000, F32, F32, F32, scales=(1e30, 1e30)),
    Call(5, 5001, F32, F32, F32, scales=(1e22, 1e38), padding=2),
    Call(9, 96, BF16, F32, F32, scales=(1e30, 1e-30), shift=1),
    Call(6, 640, F32, F32, F32, scales=(float("nan"), 1e30)),
    Call(33, 107, scales=(1e30, 1.0), backwards=True),  # beside rows that are not written yet
]


def tensors_of(call: Call) -> list[torch.Tensor | None]:
    """input, residual, post_weight, pre_weight."""
    g = generator("cpu", str(call))
    stride = call.cols + call.padding
    made: list[torch.Tensor | None] = []
    for scale in call.scales:
        held = empty(call.rows * stride + call.shift, dtype=call.dtype)
        held.zero_()
        rows = held[call.shift :].view(call.rows, stride)[:, : call.cols]
        rows.copy_(torch.randn(rows.shape, generator=g))
        rows[::3] *= scale
        made.append(rows)
    for dtype in (call.post, call.pre):
        weight = None if dtype is None else empty(call.cols, dtype=dtype)
        made.append(weight if weight is None else weight.copy_(torch.randn(call.cols, generator=g)))
    return made


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_bits_of_the_two_ops(call: Call) -> None:
    tensors = tensors_of(call)
    gpu = Gpu(call.sms, backwards=call.backwards)
    found = run(gpu, *tensors, rounding=call.rounding)
    assert found is not None and len(gpu.launches) == 1
    expected = two_ops(Gpu(call.sms), *tensors, rounding=call.rounding)
    for name, mine, right in zip(("y", "sum", "post", "pre"), found, expected, strict=True):
        torch.testing.assert_close(
            mine, right, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[i] for i in (0, 4, 7, 8, 12, 15, 19)], ids=str)
def test_bits_of_norm_and_addition(call: Call) -> None:
    input, residual, weight, _ = tensors_of(call)
    gpu = Gpu(call.sms)
    total, stats = run(gpu, input, residual, weight, None, rounding=call.rounding, only_sum=True)
    assert len(gpu.launches) == 1
    expected = two_ops(Gpu(call.sms), input, residual, weight, None, rounding=call.rounding)
    torch.testing.assert_close(total, expected[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stats, expected[2], rtol=0, atol=0, equal_nan=True)


@needs_interpreter
@pytest.mark.parametrize("call", [Call(2, 16392), Call(2, 8196, F32, F32, F32)], ids=str)
def test_rows_that_are_too_long_have_no_kernel(call: Call) -> None:
    assert run(Gpu(), *tensors_of(call)) is None


@needs_interpreter
def test_a_wider_residual_has_no_kernel() -> None:
    """Its rows would be dealt to lanes in other packs than those of the first norm."""
    input, residual, *weights = tensors_of(Call(3, 64))
    assert run(Gpu(), input, residual.float(), *weights) is None
