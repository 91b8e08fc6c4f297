"""The kernels of group norms on the interpreted GPU, against the formula in fp64.

What this catches: what tests/kernels/test_run_kernels.py lists, of these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.case import generator
from tests.kernels import run_group_norm
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.test_run_kernels import needs_interpreter
from tests.ops import BF16, F16, F32, F64, TOLERANCE, steps

ALL = ("weight", "bias", "scale", "shift")


@dataclass(frozen=True)
class Call:
    shape: tuple[int, int, int]
    groups: int
    dtype: torch.dtype = BF16
    params: torch.dtype | None = None  # that of the input unless said
    entries: torch.dtype | None = None  # likewise
    silu: bool = False
    nhwc: bool = False
    given: tuple[str, ...] = ALL
    wanted: tuple[str, ...] = ("input", *ALL)
    rare: bool = False  # groups that do not vary, are huge, zero, or far from zero
    sms: int = 132
    clusters: bool = True
    backwards: bool = False

    def __str__(self) -> str:
        default = Call((0, 0, 0), 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("torch.", "")


OF_BOTH = [  # of planes, and of images whose channels are neighbours
    # Absent parameters, and gradients that nobody wants.
    Call((2, 4, 40), 2, given=()),
    Call((2, 4, 40), 2, F32, given=("weight", "shift"), silu=True),
    Call((2, 4, 40), 2, F32, given=("bias", "scale"), wanted=("scale", "bias")),
    Call((2, 4, 40), 2, wanted=("input",)),
    Call((2, 4, 40), 2, F32, wanted=("shift",), silu=True),
    # Groups whose moments are taken again.
    Call((4, 4, 72), 2, F32, rare=True),
    Call((4, 4, 72), 2, F64, rare=True),
    Call((4, 4, 72), 2, BF16, rare=True),
]
CALLS = [
    # Packs from one element to 16 bytes; slots of one plane, of several, and of a part of one.
    Call((2, 4, 5), 2),
    Call((1, 3, 7), 1, F32),
    Call((3, 6, 12), 3, F16, F32, silu=True),
    Call((2, 8, 64), 4, F32, silu=True),
    Call((1, 30, 49), 2, F32, BF16, F16),
    Call((2, 4, 520), 2, BF16, F32, BF16, silu=True),
    Call((1, 2, 4098), 1, F16),
    Call((1, 7, 264), 1, F64, silu=True),
    Call((2, 80, 16), 2, BF16, silu=True),
    # Many slots: one CTA with several for each warp, and clusters.
    Call((1, 6, 4096), 2, sms=1),
    Call((1, 6, 4096), 2, sms=132),
    Call((1, 6, 4096), 2, sms=132, clusters=False),
    Call((1, 2, 16384), 1, F32, silu=True, backwards=True),
    Call((1, 320, 65), 1, F32),
    # More than a CTA keeps.
    Call((1, 3, 30000), 1, F32, silu=True, sms=1),
    Call((1, 2, 12500), 1, F64),
    # A pixel, and a channel, for each group.
    Call((3, 6, 1), 2, F32),
    Call((2, 3, 40), 3),
    Call((70, 4, 9), 2, F32, silu=True),  # many samples
    Call((4, 4, 2048), 2, F32, rare=True, silu=True),
    *OF_BOTH,
]
# Of images whose channels are neighbours.
NHWC = [
    replace(call, nhwc=True)
    for call in [
        # Packs from one element to 16 bytes; groups within a pack, of several, and astride.
        Call((2, 4, 5), 2),
        Call((1, 3, 7), 1, F32),
        Call((3, 6, 12), 3, F16, F32, silu=True),
        Call((2, 8, 64), 4, F32, silu=True),
        Call((1, 30, 49), 2, F32, BF16, F16),
        Call((2, 320, 40), 32, BF16, F32, silu=True),
        Call((1, 40, 264), 4, F16),
        Call((1, 14, 64), 7, F64, silu=True),
        Call((2, 96, 3), 96, F32),  # a group for each channel
        Call((1, 1000, 9), 1, F32, silu=True),  # the largest tiles
        # Several tiles, and slabs: the last one may have fewer pixels.
        Call((2, 512, 70), 32, BF16, silu=True),
        Call((1, 8, 40_001), 2, BF16, silu=True, backwards=True),
        Call((1, 4, 30_000), 1, F64),
        Call((70, 4, 9), 2, F32, silu=True),
        Call((4, 4, 9000), 2, F32, rare=True, silu=True),
        *OF_BOTH,
    ]
]


def place(values: Tensor) -> Tensor:
    return empty(*values.shape, dtype=values.dtype).copy_(values)


def make_inputs(call: Call) -> tuple[dict[str, Tensor], Tensor]:
    g = generator("cpu", str(call))
    samples, channels, _ = call.shape
    x = torch.randn(call.shape, generator=g, dtype=F64)
    if call.rare:
        group = channels // call.groups
        x[0, :group], x[1, :group], x[1, group:] = 0, 7, x[1, group:] + 1e6
        x[2, :group] *= 1e30 if call.dtype != F64 else 1e200
        x[2, -1, 3] = 1e30
        x[3, 0, 0] = 1e5  # far from the others, and the first
    inputs = {"input": place(x.to(call.dtype))}
    sizes = {"weight": (channels,), "bias": (channels,)}
    chunks = torch.randn(samples, 2 * channels, generator=g).to(call.entries or call.dtype)
    for name, t in zip(("scale", "shift"), place(chunks).chunk(2, dim=1), strict=True):
        if name in call.given:
            inputs[name] = t
    for name, size in sizes.items():
        t = torch.randn(size, generator=g).to(call.params or call.dtype)
        if name in call.given:
            inputs[name] = place(t)
    grad = torch.randn(call.shape, generator=g).to(call.dtype)
    return inputs, place(grad)


def run(call: Call, inputs: dict[str, Tensor], grad: Tensor) -> tuple[dict[str, Tensor], Gpu]:
    gpu = Gpu(call.sms, clusters=call.clusters, backwards=call.backwards)
    options = {"silu": call.silu, "wanted": call.wanted, "nhwc": call.nhwc}
    found = run_group_norm.run(gpu, call.groups, inputs, grad, **options)
    return found, gpu


def rstd_of(rows: Tensor) -> Tensor:
    """Of rows whose squares may overflow."""
    unit = rows.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    small = rows / unit
    variance = (small - small.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    return (variance + 1e-5 / unit / unit).rsqrt() / unit


def formula(call: Call, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor):
    rows = x.reshape(call.shape[0], call.groups, -1)
    xhat = ((rows - rows.mean(-1, keepdim=True)) * rstd_of(rows)).view_as(x)
    n = (xhat * weight[:, None] + bias[:, None]) * (1 + scale[..., None]) + shift[..., None]
    return n * n.sigmoid() if call.silu else n


def truth_of(call: Call, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients in fp64."""
    samples, channels, _ = call.shape
    ones = {
        "weight": torch.ones(channels), "bias": torch.zeros(channels),
        "scale": torch.zeros(samples, channels), "shift": torch.zeros(samples, channels),
    }  # fmt: skip
    wide = {n: t.to(F64).requires_grad_() for n, t in (ones | inputs).items()}
    output = formula(call, *(wide[n] for n in ("input", "weight", "bias", "scale", "shift")))
    grads = torch.autograd.grad(output, [wide[n] for n in call.wanted], grad.to(F64))
    found = {f"grad_{n}": g for n, g in zip(call.wanted, grads, strict=True)}
    return {"output": output.detach(), **found}


def conditions(call: Call, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """How large the terms are whose sum each result is, per element."""
    samples, channels, _ = call.shape
    w = {n: t.to(F64) for n, t in inputs.items()}
    x, g = w["input"], grad.to(F64).abs()
    rows = x.reshape(samples, call.groups, -1)
    mean = rows.abs().mean(-1, keepdim=True)
    rstd = rstd_of(rows)
    xhat = ((rows.abs() + mean) * rstd).view_as(x)
    factor = w.get("weight", x.new_ones(channels)).abs()
    bias = w.get("bias", x.new_zeros(channels)).abs()
    scale = 1 + w.get("scale", x.new_zeros(samples, channels)).abs()
    shift = w.get("shift", x.new_zeros(samples, channels)).abs()
    n = (xhat * factor[:, None] + bias[:, None]) * scale[..., None] + shift[..., None]
    dn = g * (1 + n) if call.silu else g
    h = dn * (factor * scale)[..., None]
    sums = (h * (1 + xhat)).reshape(rows.shape).mean(-1, keepdim=True)
    dx = ((h.reshape(rows.shape) + sums * (1 + xhat.reshape(rows.shape))) * rstd).view_as(x)
    by_entry = (dn * (1 + xhat)).sum(-1)
    by_channel = (by_entry * scale).sum(0)
    return {
        "output": n, "grad_input": dx, "grad_weight": by_channel, "grad_bias": by_channel,
        "grad_scale": by_entry * (factor + bias), "grad_shift": by_entry,
    }  # fmt: skip


def check_results(call: Call, inputs, grad, found) -> None:
    truth, scale = truth_of(call, inputs, grad), conditions(call, inputs, grad)
    count = steps(call.shape[1] // call.groups * call.shape[2]) + steps(call.shape[0])
    for name, t in found.items():
        bound = TOLERANCE[t.dtype].rounding * truth[name].abs() + TOLERANCE[t.dtype].smallest
        bound = bound + TOLERANCE[call.dtype].compute * count * scale[name]
        error = (t.to(F64) - truth[name]).abs() / (bound + 1e-300)
        assert error.max() <= 1, f"{name}: {error.max():.3g} of the tolerance"


@needs_interpreter
@pytest.mark.parametrize("call", CALLS + NHWC, ids=str)
def test_numbers(call):
    inputs, grad = make_inputs(call)
    found, _ = run(call, inputs, grad)
    check_results(call, inputs, grad, found)


@needs_interpreter
@pytest.mark.parametrize(
    "call", [CALLS[3], CALLS[5], CALLS[10], CALLS[14], CALLS[19], NHWC[5], NHWC[14]], ids=str
)
def test_a_group_has_the_same_bits_everywhere(call):
    """Catches sums whose order depends on the batch, on the GPU, on clusters, or on what a CTA
    keeps."""
    inputs, grad = make_inputs(call)
    whole, _ = run(call, inputs, grad)
    names = ("output", "grad_input", "grad_scale", "grad_shift")
    others = [replace(call, sms=1), replace(call, sms=132), replace(call, clusters=False)]
    for other in others:
        found, _ = run(other, inputs, grad)
        for name, t in found.items():
            assert torch.equal(t, whole[name]), (name, str(other))
    if call.shape[0] > 1:
        alone = {n: place(t[1:2]) if t.dim() > 1 else t for n, t in inputs.items()}
        smaller = replace(call, shape=(1, *call.shape[1:]))
        found, _ = run(smaller, alone, place(grad[1:2]))
        for name in names:
            assert torch.equal(found[name], whole[name][1:2]), name


@needs_interpreter
@pytest.mark.parametrize("call", [CALLS[25], NHWC[20]], ids=str)
def test_a_group_beside_one_that_is_not_finite(call):
    inputs, grad = make_inputs(replace(call, rare=False))
    alone, _ = run(call, inputs, grad)
    inputs["input"][0, 0, 3] = torch.nan
    beside, _ = run(call, inputs, grad)
    for name in ("output", "grad_input"):
        assert beside[name][0, :2].isnan().all()
        assert torch.equal(beside[name][0, 2:], alone[name][0, 2:])
        assert torch.equal(beside[name][1:], alone[name][1:])


@needs_interpreter
def test_every_kind_of_plan_runs():
    """Catches calls of which none comes to a pack, or to clusters of some size."""
    launches = [
        launch for call in CALLS[:19] for launch in run(call, *make_inputs(call))[1].launches
    ]
    for way in ("forward", "backward"):
        some = [one for one in launches if f"group_norm_{way}" in one.kernel]
        packs = {int(one.kernel.split("GroupNormOp<")[1].split(", ")[1]) for one in some}
        assert packs == {1, 2, 4, 8}
        assert {1, 2, 8} <= {one.cluster for one in some}
