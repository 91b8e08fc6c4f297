"""The kernels of the gated RMS norm on the interpreted GPU, against the formula in float64.

What this catches beside wrong numbers: what tests/kernels/test_run_kernels.py lists, of these
kernels. Groups are whole vectors: the op takes others one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.case import generator
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.run_gated import Gating, grouped, run
from tests.kernels.test_run_kernels import needs_interpreter
from tests.ops import BF16, F16, F32, F64

# Of the largest value: roundings of the output, and of float32 sums.
BOUNDS = {F64: 1e-13, F32: 6e-6, BF16: 1.2e-2, F16: 2e-3}


@dataclass(frozen=True)
class Call:
    rows: int
    cols: int
    gating: Gating = Gating()  # noqa: RUF009  (a tuple)
    dtype: torch.dtype = BF16
    gate: torch.dtype | None = None  # both those of the input unless said
    params: torch.dtype | None = None
    has_weight: bool = True
    padding: int = 0  # elements behind each row of input, gate and gradient
    shift: int = 0  # elements from a multiple of 16 bytes to the first row
    wanted: tuple[bool, bool, bool] = (True, True, True)
    sms: int = 132

    def __str__(self) -> str:
        default = Call(0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("torch.", "").replace(" ", "")


SIGMOID, FIRST = Gating(sigmoid=True), Gating(first=True)
CALLS = [
    Call(5, 128),
    Call(700, 128, SIGMOID, sms=2),
    Call(5, 128, FIRST, F16, gate=F32),
    Call(9, 96, Gating(True, False, 2, "before_weight")),
    Call(9, 96, Gating(False, True, 2, "before_weight"), F16),
    Call(23, 144, Gating(True, False, 1, "before_weight")),
    Call(7, 33, dtype=F32),
    Call(7, 33, Gating(False, True, 1, "before_weight"), F16, has_weight=False),
    Call(6, 128, Gating(groups=4, rounding="before_weight"), gate=F32, params=F32),
    Call(6, 160, Gating(first=True, groups=4), params=F32, padding=16),
    Call(6, 160, Gating(groups=4), padding=8),
    Call(38, 2592, Gating(groups=3), params=F32, shift=8, sms=2),
    Call(40, 64, dtype=F64),
    Call(40, 128, Gating(True, True, 2), F64),
    Call(4, 1000, has_weight=False, shift=1),
    Call(3, 1001, FIRST, params=F32, padding=3),
    Call(3, 1000, FIRST, F32, gate=BF16),
    Call(4, 2560, Gating(False, True, 2, "before_weight")),
    Call(300, 4096, SIGMOID, wanted=(True, False, True), sms=8),
    Call(3, 8192, FIRST, wanted=(False, True, False)),
    Call(2, 40000, SIGMOID, F16),
    Call(2, 40000, FIRST, F32),
    Call(2, 12001, Gating(rounding="before_weight"), params=F32),
]


def rows_for(call: Call, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    stride = call.cols + call.padding
    held = empty(call.rows * stride + call.shift, dtype=dtype)
    held.zero_()
    rows = held[call.shift :].view(call.rows, stride)[:, : call.cols]
    return rows.copy_(torch.randn(rows.shape, generator=g))


def inputs(call: Call) -> list[Tensor | None]:
    """input, gate, weight, grad_output."""
    g = generator("cpu", str(call))
    x, z, dy = (rows_for(call, t or call.dtype, g) for t in (None, call.gate, None))
    weight = None
    if call.has_weight:
        weight = empty(call.cols, dtype=call.params or call.dtype)
        weight.copy_(torch.randn(call.cols, generator=g))
    return [x, z, weight, dy]


def formula(
    call: Call, input: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """In float64, rounded where the contract rounds; a rounding has the gradient 1."""
    sigmoid, first, groups, rounding = call.gating

    def rounded(t: Tensor) -> Tensor:
        is_on = rounding == "before_weight" and call.dtype.itemsize == 2
        return t + (t.detach().to(call.dtype).double() - t.detach()) if is_on else t

    factor = torch.sigmoid(gate) * (1 if sigmoid else gate)
    rows = grouped(input * factor if first else input, groups)
    rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalized = rounded(rows.flatten(1))
    if weight is not None:
        normalized = normalized * weight
        if (call.params or call.dtype).itemsize == 2:
            normalized = rounded(normalized)
    return normalized if first else normalized * factor


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(call: Call) -> None:
    x, z, weight, dy = inputs(call)
    found = run(Gpu(call.sms), call.gating, x, z, weight, dy, wanted=call.wanted)
    rounds = call.gating.rounding == "before_weight"
    leaves = [t.double().requires_grad_() for t in (x, z, weight) if t is not None]
    truth = formula(call, *leaves, *[None] * (weight is None))
    grads = torch.autograd.grad(truth, leaves, dy.double())
    for name, actual, expected in zip(
        ("output", "input", "gate", "weight"), found, (truth.detach(), *grads), strict=False
    ):
        if actual is not None:
            error = (actual.double() - expected).abs().max() / expected.abs().max()
            # A value next to a tie of the input's dtype may go either way.
            bound = max(BOUNDS[actual.dtype], BOUNDS[call.dtype if rounds else actual.dtype])
            assert error <= bound, f"{name}: {error:.3g} of the largest"


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[0], CALLS[4], CALLS[9], CALLS[12]], ids=str)
def test_rows_do_not_depend_on_others(call: Call) -> None:
    """Catches a row's bits that follow from the number of rows, or from where they lie."""
    tensors = inputs(call)
    whole = run(Gpu(call.sms), call.gating, *tensors)
    last = [t if t is None or t.dim() == 1 else t[-1:] for t in tensors]
    alone = run(Gpu(call.sms), call.gating, *last)
    dense = [
        t if t is None or t.dim() == 1 else empty(*t.shape, dtype=t.dtype).copy_(t) for t in last
    ]
    elsewhere = run(Gpu(call.sms), replace(call, padding=0, shift=0).gating, *dense)
    for a, b, c in zip(whole[:3], alone, elsewhere, strict=False):
        assert torch.equal(a[-1:], b) and torch.equal(b, c)
