"""The kernels of norms over channels on the interpreted GPU, against the formula in fp64.

What this catches: what tests/kernels/test_run_kernels.py lists, of these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.case import generator
from tests.kernels import run_channels_first
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.test_run_kernels import needs_interpreter
from tests.ops import BF16, F16, F32, F64
from tests.variants.test_channels_first import Case, check_results

LN, RMS = "layer_norm", "rms_norm"
NAMES = ("output", "grad_input", "grad_weight", "grad_bias")


@dataclass(frozen=True)
class Call:
    norm: str
    shape: tuple[int, int, int]
    dtype: torch.dtype = BF16
    params: torch.dtype | None = None  # that of the input unless said
    silu: bool = False
    given: str = "weight, bias"
    wanted: tuple[bool, bool, bool] = (True, True, True)
    rare: bool = False  # pixels that do not vary, are huge, zero, or far from zero or channel 0
    shift: int = 0  # elements from a multiple of 16 bytes to the first
    sms: int = 132
    backwards: bool = False

    def __str__(self) -> str:
        default = Call("", (0, 0, 0))
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("norm=", "").replace("torch.", "")


CALLS = [
    # Warps of a group from one to sixteen, packs from one element to 16 bytes.
    Call(LN, (2, 1, 5)),
    Call(RMS, (1, 3, 7), F32),
    Call(LN, (2, 16, 264), sms=1),
    Call(LN, (3, 17, 49), F16, F32, silu=True),
    Call(RMS, (1, 33, 140), F32, silu=True, sms=1),
    Call(LN, (2, 64, 66), F64),
    Call(RMS, (2, 65, 130), params=F32),
    Call(LN, (1, 96, 520), sms=1),
    Call(LN, (2, 100, 33), F32, silu=True),
    Call(RMS, (1, 193, 72), F16, silu=True),
    Call(LN, (1, 200, 36), F64, silu=True),
    Call(LN, (1, 768, 34)),
    # Channels that forward reads again, and of which backward has some at a time.
    Call(LN, (1, 2051, 9)),
    Call(RMS, (2, 1030, 12), F64, silu=True),
    Call(LN, (1, 2048, 40), F16, silu=True, sms=1),
    Call(LN, (1, 20000, 2), F32),
    # Absent parameters, and gradients that nobody wants.
    Call(LN, (2, 24, 40), given=""),
    Call(RMS, (2, 24, 40), F32, given="weight", wanted=(True, True, False)),
    Call(LN, (2, 24, 40), F32, given="bias", silu=True, wanted=(False, False, True)),
    Call(LN, (2, 24, 40), wanted=(True, False, False)),
    # Many tiles of a group, groups without any, and another order.
    Call(LN, (5, 40, 72), F32, sms=1),
    Call(RMS, (40, 8, 6), sms=1, silu=True),
    Call(LN, (9, 12, 50), F32, sms=1, backwards=True),
    # Tiles that end in another sample than they begin in, or a few samples on.
    Call(LN, (5, 384, 28)),
    Call(RMS, (70, 24, 1), F32, silu=True),
    Call(LN, (30, 130, 4), F64, sms=1),
    Call(LN, (13, 65, 6), F16, shift=1, backwards=True),
    # Other addresses.
    Call(LN, (2, 48, 64), shift=1),
    Call(RMS, (2, 48, 64), F32, shift=2, sms=1),
    Call(LN, (1, 48, 64), shift=4, sms=1),
    # Pixels some of whose moments are taken again.
    Call(LN, (2, 40, 70), F32, rare=True),
    Call(RMS, (1, 9, 40), F32, rare=True, silu=True),
    Call(LN, (1, 300, 36), F32, rare=True),
    Call(LN, (1, 1200, 34), F64, rare=True),
    Call(LN, (2, 4, 2056), sms=1),
]


def place(values: Tensor, shift: int) -> Tensor:
    memory = empty(values.numel() + 16, dtype=values.dtype)
    placed = memory[shift : shift + values.numel()].view(values.shape)
    return placed.copy_(values)


def make_inputs(call: Call) -> tuple[dict[str, Tensor], Tensor]:
    g = generator("cpu", str(call))
    x = torch.randn(call.shape, generator=g, dtype=F64)
    if call.rare:
        x[0, :, 1], x[0, :, 2], x[-1, :, 4] = 0, 7, x[-1, :, 4] + 1e6
        x[0, :, 33] *= 1e30 if call.dtype != F64 else 1e200
        x[-1, :, 3] = 1e30
        x[-1, :, 5] = 2e36 if call.dtype != F64 else 1e306  # times rstd, its mean is infinite
        x[0, :, 6] += 1e4
        x[0, 0, 6] = 0
        # The squares of the deviations from channel 0 add up to nearly the largest number.
        most = 1e38 if call.dtype != F64 else 1e308
        x[-1, :, 7] = (1 + 1e-4 * x[-1, :, 7]) * (most / call.shape[1]) ** 0.5
        x[-1, 0, 7] = 0
    inputs = {"input": place(x.to(call.dtype), call.shift)}
    for name in ("weight", "bias"):
        t = torch.randn(call.shape[1], generator=g).to(call.params or call.dtype)
        if name in call.given:
            inputs[name] = place(t, 0)
    grad = torch.randn(call.shape, generator=g).to(call.dtype)
    return inputs, place(grad, call.shift)


def run(call: Call, inputs: dict[str, Tensor], grad: Tensor) -> tuple[dict[str, Tensor], Gpu]:
    gpu = Gpu(call.sms, backwards=call.backwards)
    found = run_channels_first.run(
        gpu, call.norm, inputs["input"], inputs.get("weight"), inputs.get("bias"), grad,
        silu=call.silu, eps=1e-5, wanted=call.wanted,
    )  # fmt: skip
    return {n: t for n, t in zip(NAMES, found, strict=True) if t is not None}, gpu


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(call):
    inputs, grad = make_inputs(call)
    found, _ = run(call, inputs, grad)
    case = Case(call.norm, "silu" if call.silu else None)
    found = {n: t for n, t in found.items() if n.removeprefix("grad_") in (*inputs, "output")}
    check_results(case, inputs, grad, found, eps=1e-5)


@needs_interpreter
@pytest.mark.parametrize(
    "call",
    [
        *(CALLS[i] for i in (3, 4, 7, 11, 14)),
        *(call for call in CALLS if call.rare and call.shape[0] > 1),
        *(call for call in CALLS if call.shape[0] > 4 and call.shape[2] > 3),
    ],
    ids=str,
)
def test_a_pixel_has_the_same_bits_everywhere(call):
    """Catches sums whose order depends on the pack, on the width of a tile, on where in a tile a
    sample begins, or on what is kept."""
    inputs, grad = make_inputs(call)
    whole, _ = run(call, inputs, grad)
    samples, channels, pixels = call.shape
    for sample, (count, shift) in product(
        {0, samples - 1}, ((pixels - 1, 0), (pixels - 1, 1), (3, 0))
    ):
        where = slice(sample, sample + 1), slice(None), slice(1, 1 + count)
        some = inputs | {"input": place(inputs["input"][where].contiguous(), shift)}
        part = place(grad[where].contiguous(), shift)
        smaller = replace(call, shape=(1, channels, count), sms=132)
        found, _ = run(smaller, some, part)
        for name in ("output", "grad_input"):
            assert torch.equal(found[name], whole[name][where]), name


@needs_interpreter
@pytest.mark.parametrize("why", ["nan", "overflow", "far from channel 0"])
@pytest.mark.parametrize("call", [CALLS[2], CALLS[4], CALLS[10], CALLS[11]], ids=str)
def test_a_pixel_beside_one_that_is_taken_again(call, why):
    """Catches moments that a neighbour changes, or that one warp of a group takes without the
    others; and other bits of channels that are kept than of the same that are read again."""
    inputs, grad = make_inputs(call)
    alone, _ = run(call, inputs, grad)
    inputs["input"] = place(inputs["input"], 0)
    pixel = inputs["input"][0, :, 1]
    if why == "nan":
        pixel[-1] = torch.nan
    elif why == "overflow":
        pixel *= 1e30 if call.dtype != F64 else 1e200
    else:
        pixel += 1e4
        pixel[0] = 0
    beside, _ = run(call, inputs, grad)
    for name in ("output", "grad_input"):
        assert beside[name][0, :, 1].isnan().all() == (why == "nan")
        beside[name][0, :, 1] = alone[name][0, :, 1]
        assert torch.equal(beside[name], alone[name]), name


@needs_interpreter
def test_every_kind_of_plan_runs():
    """Catches calls of which none comes to a pack, a number of warps or slices, a width of tiles,
    or channels read again."""
    calls = [*CALLS[:16], CALLS[-1]]
    launches = [launch for call in calls for launch in run(call, *make_inputs(call))[1].launches]
    forward, backward = (
        [launch.kernel.split(f"ChannelsFirst{way}Op<")[1].split(", ") for launch in launches
         if f"ChannelsFirst{way}Op<" in launch.kernel]
        for way in ("Forward", "Backward")
    )  # fmt: skip
    assert {int(op[3]) for op in forward} == {1, 2, 4}  # packs
    assert {int(op[3]) for op in backward} == {1, 2, 4, 8}
    assert {int(op[4]) for op in forward} == {1, 2, 4, 8, 16}  # warps
    assert any(op[6] == "0" for op in forward)
    assert {int(op[4]) for op in backward} == {2, 4, 8, 16}  # lanes
    assert {int(op[5]) for op in backward} == {8, 16, 32, 64, 128}  # slices
    assert {op[6].split("::")[-1] for op in backward} == {"AllChannels", "SomeChannels"}
