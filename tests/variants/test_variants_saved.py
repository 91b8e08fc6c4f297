"""What backward of a variant keeps, and who may take it away in between.

Catches a tensor that backward unpacks twice, which checkpointing refuses and offloading pays for,
and a second forward that saves other tensors, or gives other bits, than the first.
"""

import contextlib
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.calls import assert_same, loss
from tests.ops import F32, Pair
from tests.variants import group_norm
from tests.variants.table import CALLS, bound
from tests.variants.test_channels_first import CASES, Case
from tests.variants.test_channels_first import arguments as image_arguments

PAIR = Pair(F32, F32)


def of_rows(variant, options, device):
    inputs = variant.arguments((3, 4, 6), PAIR, device, requires_grad=True)
    return bound(variant, options), list(inputs.values())


def of_pixels(case, device):
    return Case(*case).fused, list(image_arguments((2, 6, 3), PAIR, device, True).values())


def of_groups(activation, device):
    inputs = group_norm.arguments((2, 6, 5), PAIR, device, requires_grad=True)
    return group_norm.fused(3, activation), list(inputs.values())


EVERY = {
    **{f"{v.name}-{list(o.values())}": partial(of_rows, v, o) for v, o in CALLS},
    **{f"channels_first-{case}": partial(of_pixels, case) for case in CASES},
    **{f"group_norm-{a}": partial(of_groups, a) for a in (None, "silu")},
}


@pytest.fixture(params=EVERY)
def call(request, device, recorder):
    return EVERY[request.param](device)


def gradients(function, leaves):
    return torch.autograd.grad(loss(function(*leaves)), leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(call, use_reentrant):
    function, leaves = call
    again = partial(checkpoint, function, use_reentrant=use_reentrant)
    if use_reentrant:  # which knows backward() alone
        loss(again(*leaves)).backward()
        found = tuple(t.grad for t in leaves)
    else:
        found = gradients(again, leaves)
    assert_same(found, gradients(function, leaves), rtol=0, atol=0)


@pytest.mark.parametrize("counted", ["forward", "backward"])
def test_checkpointing_under_a_mode_in_one_of_both_passes(call, counted):
    """Catches another set of saved tensors under a dispatch mode: recomputation would fail."""
    function, leaves = call

    def mode_in(name):
        return FlopCounterMode(display=False) if name == counted else contextlib.nullcontext()

    with mode_in("forward"):
        result = loss(checkpoint(function, *leaves, use_reentrant=False))
    with mode_in("backward"):
        found = torch.autograd.grad(result, leaves)
    assert_same(found, gradients(function, leaves), rtol=0, atol=0)


def test_each_saved_tensor_is_unpacked_once(call):
    function, leaves = call
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number):
        unpacked.append(number)
        return packed[number]

    with saved_tensors_hooks(pack, unpack):
        result = function(*leaves)
    gradients(lambda *_: result, leaves)
    assert packed and sorted(unpacked) == list(range(len(packed)))


def test_hooks_replace_what_is_saved(call):
    """Catches a backward that reads another tensor than the one that the hooks give back."""
    function, leaves = call
    expected = gradients(function, leaves)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        result = function(*leaves)
    assert_same(gradients(lambda *_: result, leaves), expected, rtol=0, atol=0)
    with save_on_cpu():
        result = function(*leaves)
    assert_same(gradients(lambda *_: result, leaves), expected, rtol=0, atol=0)
