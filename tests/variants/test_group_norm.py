"""The numbers of the group norm: every shape, layout and dtype against the formula in fp64.

Catches a group that is normalised with another one's statistics, a chunk or a piece that loses its
last pixels, scale and shift of another sample, a sum whose order depends on threads or the batch,
and a gradient that misses a sample.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fused_op import fused_group_norm
from tests.calls import Calls, assert_same, loss
from tests.ops import BF16, F16, F32, F64, Pair
from tests.variants.group_norm import (
    GROUPS,
    SMALL,
    arguments,
    check,
    conditions,
    fused,
    innermost,
    reference,
)
from tests.variants.table import run

# A shape, and the number of groups.
CASES = [
    ((0, 4, 3, 3), 2), ((2, 0, 3, 3), 2), ((2, 4, 0, 3), 2), ((1, 4), 4), ((3, 12), 3),
    ((70, 64), 8), ((2, 6, 1, 1), 2), ((1, 1, 5), 1), ((3, 1, 4, 4), 1), ((2, 4, 9), 4),
    ((2, 6, 7, 7), 3), ((2, 66, 31), 2), ((2, 40, 5, 13), 8), ((1, 6, 2, 3, 129), 3),
    ((3, 5, 17), 5), ((1, 4096), 2), ((2, 3, 1000), 1), ((2, 2500, 9), 1), ((1, 2, 33, 1025), 1),
    ((1, 3, 40001), 3), ((2, 4, 1025), 2), ((1, 2048, 33), 2), ((40, 6, 3, 3), 6),
]  # fmt: skip


@pytest.fixture(params=[None, "silu"], ids=str)
def activation(request):
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(activation, pair, case, device):
    shape, groups = case
    found = check(
        arguments(shape, pair, device), torch.randn(shape, device=device).to(pair.rows), groups,
        activation,
    )  # fmt: skip
    assert found["output"].is_contiguous() and found["grad_input"].is_contiguous()


@pytest.mark.parametrize("given", [
    (), ("weight",), ("bias",), ("scale",), ("shift",), ("weight", "scale"), ("bias", "scale"),
    ("bias", "shift"), ("weight", "bias"), ("scale", "shift"),
], ids="+".join)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (2, 6)], ids=str)
def test_absent_arguments(activation, given, shape, device):
    inputs = arguments(shape, Pair(F32, F32), device)
    inputs = {name: t for name, t in inputs.items() if name == "input" or name in given}
    check(inputs, torch.randn(shape, device=device), GROUPS, activation)


@pytest.mark.parametrize("dtypes", [
    (F32, F64, F32, F32, BF16), (BF16, F32, BF16, F32, BF16), (F16, BF16, BF16, BF16, F16),
    (BF16, BF16, BF16, F32, F32), (F64, F32, F32, F64, F64),
], ids=str)  # fmt: skip
def test_arguments_of_other_dtypes(activation, dtypes, device):
    inputs = arguments(SMALL, Pair(F32, F32), device)
    inputs = {name: t.to(dtype) for (name, t), dtype in zip(inputs.items(), dtypes, strict=True)}
    check(inputs, torch.randn(SMALL, device=device).to(dtypes[0]), GROUPS, activation)


ENTRIES = {
    "two tensors": lambda a, b: (a.clone(), b.clone()),
    "ones behind": lambda a, b: (a[..., None, None], b[..., None, None]),
    "chunks of an image": lambda a, b: torch.cat([a, b], 1)[..., None, None].chunk(2, 1),
    "other strides": lambda a, b: (torch.cat([a, b], 1)[:, : a.shape[1]], b.clone()),
    "other channels": lambda a, b: (a.mT.contiguous().mT, torch.stack([b, b], -1)[..., 0]),
}


@pytest.mark.parametrize("entries", ENTRIES)
def test_where_scale_and_shift_lie(entries, device):
    """Catches an entry that is read at the stride of another sample or channel."""
    inputs = arguments(SMALL, Pair(F32, F32), device)
    grad = torch.randn(SMALL, device=device)
    expected = check(inputs, grad, GROUPS, "silu")
    inputs["scale"], inputs["shift"] = ENTRIES[entries](inputs["scale"], inputs["shift"])
    for name, t in check(inputs, grad, GROUPS, "silu").items():
        assert torch.equal(t.reshape(expected[name].shape), expected[name]), name


def test_chunks_of_a_projection_are_not_copied(device):
    inputs = arguments(SMALL, Pair(F32, F32), device)
    with Calls() as calls:
        fused(GROUPS)(**inputs)
    copies = [name for name in calls.names if "clone" in name or "copy" in name]
    assert not copies, calls.names
    one = inputs["shift"][:1].expand(2, -1)
    found = fused(GROUPS)(inputs["input"], shift=one)
    assert torch.equal(found, fused(GROUPS)(inputs["input"], shift=one.contiguous()))


LAYOUTS = {
    "channels last": lambda t: t.new_zeros(t.shape).contiguous(memory_format=torch.channels_last),
    "some channels": lambda t: torch.zeros(2, 6, 7, 20, dtype=t.dtype, device=t.device).movedim(
        -1, 1
    )[:, 3:15],
    "misaligned": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape),
    "every other pixel": lambda t: t.new_zeros(*t.shape[:3], 2 * t.shape[3])[..., ::2],
    "transposed": lambda t: t.new_zeros(2, 12, 7, 6).mT,
    "expanded": lambda t: t.new_zeros(1, 1, *t.shape[2:]).expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_layouts(activation, layout, dtype, device):
    shape = (2, 12, 6, 7)
    inputs = arguments(shape, Pair(dtype, dtype), device)
    grad = torch.randn(shape, device=device).to(dtype)
    expected = check(inputs, grad, 4, activation)
    other = LAYOUTS[layout](grad)
    if layout == "expanded":
        expected = check(inputs, other, 4, activation)
    else:
        other.copy_(grad)
    found = check(inputs, other, 4, activation)
    assert all(torch.equal(t, expected[name]) for name, t in found.items())
    if layout != "expanded":
        inputs["input"] = LAYOUTS[layout](grad).copy_(inputs["input"])
        found = check(inputs, grad, 4, activation)
        last = layout in ("channels last", "some channels")
        if device == "cpu" or not last:  # a GPU has kernels of their own for them
            assert all(torch.equal(t, expected[name]) for name, t in found.items())
        output = found["output"].movedim(1, -1) if last else found["output"]
        assert output.is_contiguous()


@pytest.mark.parametrize(
    "case",
    [((5, 40, 9, 11), 8), ((5, 8, 2), 4), ((3, 4, 130, 200), 1), ((3, 2, 40000), 2)],
    ids=str,
)
def test_a_group_has_the_same_bits_everywhere(activation, case, pair, device, threads):
    """Catches sums whose order depends on the batch, on other groups or on the threads."""
    shape, groups = case
    inputs = arguments(shape, pair, device)
    grad = torch.randn(shape, device=device).to(pair.rows)
    everything = run(fused(groups, activation), inputs, grad, {})
    for count in (1, 3, 16):  # fewer groups than threads are computed in parts
        threads(count)
        for name, t in run(fused(groups, activation), inputs, grad, {}).items():
            assert torch.equal(t, everything[name]), name
    some = {n: t[1:2] if n in ("input", "scale", "shift") else t for n, t in inputs.items()}
    found = run(fused(groups, activation), some, grad[1:2], {})
    for name in ("output", "grad_input", "grad_scale", "grad_shift"):
        assert torch.equal(found[name], everything[name][1:2]), name
    each = shape[1] // groups
    last = {n: t[-each:] if n in ("weight", "bias") else t[:, -each:] for n, t in inputs.items()}
    found = run(fused(1, activation), last, grad[:, -each:], {})
    for name, t in found.items():
        dim = 0 if name in ("grad_weight", "grad_bias") else 1
        assert torch.equal(t, everything[name].narrow(dim, -each + shape[1], each)), name


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e18, 1e25, 1e30])
@pytest.mark.parametrize("offset", [0, 1, 1e4])
def test_extreme_numbers(activation, scale, offset, device):
    shape = (2, 12, 5, 5)
    inputs = arguments(shape, Pair(F32, F32), device)
    inputs["input"] = (inputs["input"] + offset) * scale
    found = fused(4, activation)(**inputs)
    wide = {name: t.to(F64) for name, t in inputs.items()}
    truth = reference(4, activation)(**wide)
    bound = conditions(wide, torch.ones_like(truth), 4, activation, 1e-5)["output"]
    assert ((found - truth).abs() <= 1e-5 * bound + 1e-37).all()


@pytest.mark.parametrize("scale", [1e-37, 1e-25])
def test_tiny_numbers_keep_their_mean(activation, scale, device):
    """Catches a mean that is lost with the squares, which are all zeros."""
    x = arguments((2, 12, 5, 5), Pair(F32, F32), device)["input"] * scale
    check({"input": x}, torch.randn(x.shape, device=device), 4, activation)


@pytest.mark.parametrize("shape", [(2, 12, 70), (2, 4, 9000)], ids=str)
def test_a_group_far_from_the_elements_that_are_looked_at(activation, shape, device):
    """Catches a variance that has cancelled where a few elements do not tell where the mean is."""
    inputs = arguments(shape, Pair(F32, F32), device)
    rows = inputs["input"].view(2, 4, -1)
    rows[:, 1, :: rows.shape[-1] // 16] += 1e6
    rows[:, 2] = 7  # does not vary
    rows[:, 3] += 1e4
    found = check(inputs, torch.randn(shape, device=device), 4, activation)
    constant = found["output"].view(2, 4, -1, shape[-1])[:, 2]
    assert (constant == constant[..., :1]).all()


def test_nan_and_zeros_stay_in_their_groups(activation, device):
    shape = (2, 6, 70)
    inputs = arguments(shape, Pair(F32, F32), device)
    inputs["input"][0, 2:4] = 0
    ones = torch.ones(shape, device=device)
    clean = run(fused(3, activation), inputs, ones, {})
    assert all(t.isfinite().all() for t in clean.values())
    inputs["input"][1, 3, 2], inputs["input"][0, 5, 69] = float("nan"), float("inf")
    found = run(fused(3, activation), inputs, ones, {})
    bad = torch.zeros(2, 3, 1, dtype=torch.bool, device=device)
    bad[1, 1] = bad[0, 2] = True
    for name in ("output", "grad_input"):
        good = ~bad.expand(2, 3, 140).reshape(shape)
        assert torch.equal(found[name][good], clean[name][good]), name
        assert found[name][~good].isnan().any(), name


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 7, 7), (3, 64), (2, 8, 3, 5, 4)], ids=str)
def test_the_same_as_pytorch(dtype, shape, device):
    x, weight, bias, *_ = (t.to(dtype) for t in arguments(shape, Pair(F32, F32), device).values())
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    ours, theirs = (f(leaves[0], 4, *leaves[1:], 1e-5) for f in (fused_group_norm, F.group_norm))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = torch.randn(shape, device=device, dtype=dtype)
    grads = (torch.autograd.grad(y, leaves, grad) for y in (ours, theirs))
    assert_same(*grads, rtol=1e-4, atol=1e-4)
    empty = torch.ones(0, 8, 7, 7, device=device, dtype=dtype)
    assert fused_group_norm(empty, 4).shape == F.group_norm(empty, 4).shape


@pytest.mark.parametrize("last", [False, True])
def test_the_time_embedding_of_a_residual_block(last, device):
    """As in ResnetBlock2D of diffusers with time_embedding_norm="scale_shift"."""
    x, weight, bias, *_ = arguments((2, 16, 6, 6), Pair(F32, F32), device).values()
    x = x.to(memory_format=torch.channels_last) if last else x
    embedding = torch.randn(2, 32, device=device)[:, :, None, None]
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, embedding)]
    results = []
    for kind in ("fused", "eager"):
        x, weight, bias, embedding = leaves
        scale, shift = embedding.chunk(2, dim=1)
        if kind == "fused":
            y = fused_group_norm(x, 4, weight, bias, activation="silu", scale=scale, shift=shift)
            assert y.is_contiguous(memory_format=torch.channels_last) == last
        else:
            y = F.silu(F.group_norm(x, 4, weight, bias) * (1 + scale) + shift)
        results.append((y, *torch.autograd.grad(loss(y), leaves)))
    assert_same(*results, rtol=1e-4, atol=1e-4)


LAST = [  # packs of one element and of more; groups within them and astride; tiles; slabs
    ((2, 6, 3, 4), 3), ((2, 320, 7, 9), 32), ((1, 40, 65, 33), 4), ((2, 96, 5, 5), 96),
    ((2, 512, 30, 31), 32), ((1, 8, 300, 301), 2), ((2, 6, 3, 4, 5), 3), ((5, 64, 700), 4),
    ((3, 7, 5, 4), 7), ((1, 1100, 3, 5), 1), ((1, 74, 3, 5), 37),  # some of them in other kernels
]  # fmt: skip


@pytest.mark.parametrize("case", LAST, ids=str)
def test_channels_innermost(activation, case, pair, device):
    """Catches what kernels of images whose channels are neighbours leave out or read twice, and
    sums whose order depends on the batch."""
    shape, groups = case
    inputs = arguments(shape, pair, device)
    inputs["input"] = innermost(inputs["input"])
    grad = innermost(torch.randn(shape, device=device).to(pair.rows))
    found = check(inputs, grad, groups, activation)
    assert found["output"].stride() == found["grad_input"].stride() == grad.stride()
    again = check(inputs, grad, groups, activation)
    last = {n: t[-1:] if t.dim() > 1 else t for n, t in inputs.items()}
    alone = check(last, grad[-1:], groups, activation)
    for name, t in found.items():
        assert torch.equal(again[name], t), name
        if t.dim() > 1:
            assert torch.equal(alone[name], t[-1:]), name


PLACES = {  # of the same values
    "planes": lambda images: images.contiguous(),
    "channels innermost": innermost,
    "channels of wider pixels": lambda images: innermost(torch.cat((images, images), 1))[
        :, : images.shape[1]
    ],
    "every other row": lambda images: images.repeat_interleave(2, 2)[:, :, ::2],
}
PLACED = [(2, 6, 3, 5), (1, 8, 65, 2), (2, 4, 3, 2, 5), (3, 4, 70), (2, 6, 1, 1), (2, 1, 3, 4)]


@pytest.mark.parametrize("shape", PLACED, ids=str)
def test_layouts_change_no_bit(shape, pair, device):
    """Catches elements that a copy moves to another place, and a result of another layout. (A GPU
    has kernels of their own for channels that are neighbours.)"""
    given = arguments(shape, pair, device)
    grad = torch.randn(shape, device=device, dtype=pair.rows)
    results = {}
    for name, of_grad in itertools.product(PLACES, PLACES):
        x = PLACES[name](given["input"]).detach().requires_grad_()
        leaves = [x, *(given[p].detach().requires_grad_() for p in ("weight", "bias"))]
        y = fused_group_norm(x, 1, *leaves[1:], activation="silu")
        results[name, of_grad] = y, *torch.autograd.grad(y, leaves, PLACES[of_grad](grad))
        is_innermost = "channels" in name and math.prod(shape[2:]) > 1 and shape[1] > 1
        expected = innermost(y) if is_innermost else y.contiguous()
        assert y.stride() == expected.stride(), name
    for name, found in results.items():
        like = "channels innermost" if "channels" in name[0] and device == "cuda" else "planes"
        for tensor, expected in zip(found, results[like, "planes"], strict=True):
            assert torch.equal(tensor, expected), name


def test_backward_keeps_the_input_itself(device):
    """Catches a copy of an image that stays in memory until backward."""
    x = innermost(torch.randn(2, 4, 3, 5, device=device)).requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = fused_group_norm(x, 2)
    assert [t.data_ptr() for t in seen if t.shape == x.shape] == [x.data_ptr()]
    y.sum().backward()
    assert x.grad.stride() == x.stride()
