"""The kernels of the modulated norms on the interpreted GPU, against the formula in float64.

What this catches beside wrong numbers: what tests/kernels/test_run_kernels.py lists, of these
kernels; a row that meets another entry than its own, and sums that mix entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.case import generator
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.run_modulated import Entries, Sums, backward, forward
from tests.kernels.test_run_kernels import needs_interpreter
from tests.ops import BF16, F16, F32, F64

# Of the largest value: roundings of the output, and of float32 sums.
BOUNDS = {F64: 1e-13, F32: 6e-6, BF16: 1.2e-2, F16: 2e-3}


@dataclass(frozen=True)
class Call:
    entries: int
    each: int  # rows that share one
    cols: int
    norm: str = "layer_norm"
    dtype: torch.dtype = BF16
    of_entries: torch.dtype | None = None
    shift: bool = True
    weight: bool = False
    bias: bool = False
    gated: bool = False
    residual: torch.dtype | None = None  # that of the input unless said
    first: int = 0  # element of the projection that scale begins at
    sms: int = 132
    shares: bool = False  # entries of one row are computed as those of several

    @property
    def are_shared(self) -> bool:
        return self.each > 1 or self.shares

    def __str__(self) -> str:
        default = Call(0, 0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("torch.", "")


CALLS = [
    Call(2, 5, 128),
    Call(3, 40, 64, "rms_norm", sms=8),
    Call(3, 300, 40, "rms_norm", F16, sms=9),
    Call(1, 30, 256, sms=4),
    Call(200, 2, 16, sms=4),
    Call(7, 1, 128),
    Call(7, 1, 128, "rms_norm", weight=True),
    Call(7, 1, 96, dtype=F16, weight=True, bias=True),
    Call(5, 11, 72, weight=True, bias=True),
    Call(5, 11, 72, "rms_norm", weight=True, shift=False),
    Call(3, 4, 64, dtype=F64, weight=True),
    Call(3, 9, 128, gated=True),
    Call(3, 9, 128, "rms_norm", of_entries=F32, gated=True),
    Call(9, 1, 128, shift=False, gated=True),
    Call(3, 5, 1152),
    Call(2, 3, 3072),
    Call(2, 3, 5120, of_entries=F32),
    Call(12, 40, 384, sms=2),
    Call(3, 4, 33, dtype=F32),
    Call(4, 1, 33, dtype=F16),
    Call(1, 300, 33, dtype=F32, sms=4),  # partial sums that are not whole vectors
    Call(3, 300, 35, dtype=F32, sms=9),
    Call(3, 7, 34, first=2),
    Call(3, 7, 160, first=1, of_entries=F32),
    Call(2, 1, 20000),
    Call(2, 1, 9001, "rms_norm", F32, weight=True),
    Call(7, 1, 128, shares=True),
    Call(3, 1, 96, "rms_norm", F16, of_entries=F32, weight=True, shares=True),
    Call(3, 9, 128, gated=True, residual=F32),
    Call(4, 90, 64, "rms_norm", F16, of_entries=F32, gated=True, residual=F32, sms=8),
    Call(9, 1, 40, "rms_norm", weight=True, gated=True, residual=F32),
    Call(2, 7, 3072, gated=True, residual=F32),
]


class Tensors(NamedTuple):
    input: Tensor
    entries: Entries
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    grad_output: Tensor


def draw(call: Call) -> Tensors:
    g = generator("cpu", str(call))

    def made(*shape: int, dtype: torch.dtype = call.dtype) -> Tensor:
        return empty(*shape, dtype=dtype).copy_(torch.randn(*shape, generator=g))

    rows, cols = call.entries * call.each, call.cols
    projection = made(call.entries, 3 * cols + 16, dtype=call.of_entries or call.dtype)
    chunks = [projection[:, call.first + i * cols :][:, :cols] for i in range(3)]
    shift, gate = chunks[1] if call.shift else None, chunks[2] if call.gated else None
    return Tensors(
        made(rows, cols),
        Entries(chunks[0], shift, gate, call.each, call.shares),
        made(cols) if call.weight else None,
        made(cols) if call.bias else None,
        made(rows, cols, dtype=call.residual or call.dtype) if call.gated else None,
        made(rows, cols),
    )


class Truth(NamedTuple):
    output: Tensor
    sum: Tensor
    sums: Sums


def truth(call: Call, of: Tensors, sum: Tensor | None) -> Truth:
    """In float64, of the sum as it was stored."""

    def each(entries: Tensor) -> Tensor:
        return entries.double().repeat_interleave(call.each, 0)

    def total(t: Tensor) -> Tensor:
        return t.view(call.entries, call.each, -1).sum(1) if call.are_shared else t.sum(0, True)

    x = of.input.double()
    added = x if sum is None else of.residual.double() + each(of.entries.gate) * x
    x = x if sum is None else sum.double()
    centred = call.norm == "layer_norm"
    x = x - x.mean(-1, keepdim=True) if centred else x
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    xhat, dy = x * rstd, of.grad_output.double()
    weight = 1 if of.weight is None else of.weight.double()
    n = xhat * weight + (0 if of.bias is None else of.bias.double())
    factor = 1 + each(of.entries.scale)
    output = n * factor + (each(of.entries.shift) if call.shift else 0)
    wdn = dy * factor * weight
    dx = wdn - xhat * (wdn * xhat).mean(-1, keepdim=True)
    dx = rstd * (dx - wdn.mean(-1, keepdim=True) if centred else dx)
    grad = dy if call.are_shared else dy * factor  # sums of an entry, or of the parameters
    return Truth(output, added, Sums(dx, dy * n, total(grad * xhat), total(grad)))


def run(call: Call, of: Tensors, gpu: Gpu) -> tuple[Tensor, Tensor | None, Sums]:
    output, sum, stats = forward(gpu, call.norm, *of[:5])
    # A shift is a bias, of which the sum is the gradient.
    is_biased = call.norm == "rms_norm" and call.shift and call.are_shared
    norm = "biased_rms_norm" if is_biased else call.norm
    x = of.input if sum is None else sum
    return output, sum, backward(gpu, norm, x, of.entries, of.grad_output, stats, *of[2:4])


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(call: Call) -> None:
    of = draw(call)
    output, sum, sums = run(call, of, Gpu(call.sms))
    right = truth(call, of, sum)
    found = {"output": output, "sum": sum, **sums._asdict()}
    expected = {"output": right.output, "sum": right.sum, **right.sums._asdict()}
    for name, actual in found.items():
        if actual is not None:
            error = (actual.double() - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= BOUNDS[actual.dtype], f"{name}: {error:.3g} of the largest"


# The op computes backward of these otherwise: entry by entry, or with entries in float32.
FORWARD = [
    Call(2, 3, 20000),
    Call(2, 2, 17001, "rms_norm", F32, weight=True),
    Call(3, 7, 33),
    Call(3, 7, 160, first=1),  # entries that begin in the middle of a word
    Call(3, 7, 160, first=2),  # and at a word, but not at a pack
    Call(3, 7, 34, "rms_norm", F16, first=1, weight=True, gated=True),
    Call(3, 7, 33, weight=True, bias=True, gated=True, residual=F32),
    Call(2, 3, 17001, gated=True, residual=F32),
    Call(40, 8, 1000, sms=2),
    Call(2, 9, 1152, weight=True, bias=True, sms=1),
]


@needs_interpreter
@pytest.mark.parametrize("call", FORWARD, ids=str)
def test_numbers_of_forward(call: Call) -> None:
    of = draw(call)
    output, sum, _ = forward(Gpu(call.sms), call.norm, *of[:5])
    right = truth(call, of, sum)
    error = (output.double() - right.output).abs().max() / right.output.abs().max()
    assert error <= BOUNDS[output.dtype]
    if sum is not None:
        assert (sum.double() - right.sum).abs().max() <= BOUNDS[sum.dtype] * right.sum.abs().max()


GATED = [call for call in CALLS if call.gated and call.each > 1]
GATED += [Call(5, 6, 33, dtype=F32, gated=True), Call(2, 50, 1536, gated=True, sms=3)]


@needs_interpreter
@pytest.mark.parametrize("call", GATED, ids=str)
def test_backward_of_the_gated_residual(call: Call) -> None:
    """What arrives at the sum, and the gradients of what the gate multiplied and of the gate."""
    of = draw(call)
    g = generator("cpu", "what arrives", str(call))
    arriving = empty(*of.input.shape, dtype=of.residual.dtype)
    arriving.copy_(torch.randn(of.input.shape, generator=g))
    gpu = Gpu(call.sms)
    _, sum, stats = forward(gpu, call.norm, *of[:5])
    norm = "layer_norm" if call.norm == "layer_norm" else "biased_rms_norm"
    dr = backward(
        gpu, norm, sum, of.entries, of.grad_output, stats, grad_sum=arriving
    ).x  # fmt: skip
    right = truth(call, of, sum).sums.x + arriving.double()
    assert (dr.double() - right).abs().max() <= BOUNDS[dr.dtype] * right.abs().max()

    gate = of.entries.gate
    found = backward(
        gpu, "identity", of.input, Entries(gate, None, None, call.each), dr, stats
    )  # fmt: skip
    each = gate.double().repeat_interleave(call.each, 0)
    product = (dr.double() * of.input.double()).view(call.entries, call.each, -1).sum(1)
    for mine, expected in ((found.x, each * dr.double()), (found.weight, product)):
        error = (mine.double() - expected).abs().max() / expected.abs().max()
        assert error <= BOUNDS[mine.dtype]
    assert found.bias is None


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[0], CALLS[5], CALLS[11], CALLS[14]], ids=str)
def test_rows_do_not_depend_on_others(call: Call) -> None:
    """Catches a row's bits that follow from the number of rows or of entries."""
    of = draw(call)
    whole = run(call, of, Gpu(call.sms))
    last = slice(-call.each, None)
    entries = Entries(*(None if t is None else t[-1:] for t in of.entries[:3]), call.each)
    part = Tensors(
        of.input[last], entries, of.weight, of.bias,
        None if of.residual is None else of.residual[last], of.grad_output[last],
    )  # fmt: skip
    alone = run(call, part, Gpu(call.sms))
    assert torch.equal(whole[0][last], alone[0])
    assert torch.equal(whole[2].x[last], alone[2].x)


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[1], CALLS[4], CALLS[17]], ids=str)
def test_sums_have_the_same_bits_in_any_order_of_ctas(call: Call) -> None:
    of = draw(call)
    *_, expected = run(call, of, Gpu(call.sms))
    *_, found = run(call, of, Gpu(call.sms, backwards=True))
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.bias, expected.bias)
