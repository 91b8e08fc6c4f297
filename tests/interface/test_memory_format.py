"""The strides of results: contiguous, but for the RMS norm of channels-last images, as PyTorch's.

Catches a route whose strides are not those of the others: a model that calls view() would work by
one of them only, and compiled code relies on what was foretold.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import fused_op
from tests.calls import Calls, assert_same
from tests.ops import F64


def view_at_random(draw, device):
    """Any order of dimensions in memory, with gaps or without; channels-last more often."""
    order = list(range(draw.choice([1, 2, 3, 4, 4, 5])))
    draw.shuffle(order)
    if len(order) > 3 and draw.random() < 0.5:
        order = [0, *range(2, len(order)), 1]
    sizes = [draw.randint(1, 4) for _ in order]
    memory = torch.randn([size * draw.choice([1, 1, 2]) for size in sizes], device=device)
    return memory[tuple(map(slice, sizes))].permute([order.index(i) for i in range(len(order))])


def strides(x):
    """Of dimensions with more than one element: no other stride means anything."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def forward_mode(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.detach()))).primal


def under(context, function, *args):
    with context:
        return function(*args)


ROUTES = {
    "kernel": lambda f, x: under(torch.no_grad(), f, x),
    "gradient": lambda f, x: f(x.detach().requires_grad_()).detach(),
    "inference": lambda f, x: under(torch.inference_mode(), f, x),
    "dispatcher": lambda f, x: under(Calls(), f, x),
    "disabled": lambda f, x: under(fused_op.disabled(), f, x),
    "forward mode": forward_mode,
    "vmap": lambda f, x: torch.vmap(f)(x[None])[0],
    "trace": lambda f, x: torch.jit.trace(f, x, check_trace=False)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("seed", range(100))
def test_every_route_has_the_strides_of_pytorch(seed, device):
    draw = random.Random(seed)
    x = view_at_random(draw, device)
    shape = x.shape[-draw.randint(1, x.dim()) :]
    weight = torch.randn(shape, device=device)
    norms = [(fused_op.layer_norm, F.layer_norm)]
    if hasattr(torch.ops.aten, "_fused_rms_norm"):  # older ones keep the order of x
        norms.append((fused_op.rms_norm, F.rms_norm))
    for fused, native in norms:
        expected = native(x, shape, weight)
        for name, route in ROUTES.items():
            result = route(lambda x, fused=fused: fused(x, shape, weight), x)
            assert strides(result) == strides(expected), f"{name}: {x.shape}, {x.stride()}"
            assert_same(result, expected, rtol=1e-4, atol=1e-5)
        real = fused(x, shape, weight)
        mode = FakeTensorMode()
        for copies in (
            (mode.from_tensor(x), mode.from_tensor(weight)),
            (x.to("meta"), weight.to("meta")),
        ):
            assert fused(copies[0], shape, copies[1]).stride() == real.stride()


@pytest.mark.parametrize("seed", range(30))
def test_with_a_residual_all_is_contiguous(seed, device):
    x = view_at_random(random.Random(seed), device)
    for function in (fused_op.fused_add_rms_norm, fused_op.fused_add_layer_norm):
        for name in ("kernel", "gradient", "dispatcher", "disabled"):
            for i in range(2):
                result = ROUTES[name](lambda x, i=i, f=function: f(x, x.flip(0))[i], x)
                assert result.is_contiguous(), name


@pytest.mark.parametrize("seed", range(30))
def test_dropout_changes_no_strides(seed, device):
    """Catches a mask whose layout becomes that of the output."""
    x = view_at_random(random.Random(seed), device)
    for function in (fused_op.fused_rms_norm, fused_op.fused_layer_norm):
        expected = function(x)
        for name in ROUTES.keys() - {"vmap"}:
            result = ROUTES[name](lambda x, f=function: f(x, dropout_p=0.5), x)
            assert strides(result) == strides(expected), f"{name}: {x.shape}, {x.stride()}"


@pytest.mark.parametrize("dimensions", [4, 5])
def test_channels_last(device, dimensions):
    """Catches a layout that is right and values, statistics or gradients that are in another."""
    memory_format = torch.channels_last if dimensions == 4 else torch.channels_last_3d
    x = torch.randn([2, 3, 4, 5, 6][:dimensions], dtype=F64, device=device)
    x = x.to(memory_format=memory_format).requires_grad_()
    weight = torch.randn(x.shape[-1], dtype=F64, device=device, requires_grad=True)
    for options in ({}, {"memory_efficient": True}, {"out_dtype": torch.float64}):
        y = fused_op.fused_rms_norm(x, weight, 1e-5, **options)
        expected = F.rms_norm(x, weight.shape, weight, 1e-5)
        assert y.is_contiguous(memory_format=memory_format) and not y.is_contiguous()
        dy = torch.randn_like(y)
        assert_same(y, expected)
        assert_same(
            torch.autograd.grad(y, (x, weight), dy),
            torch.autograd.grad(expected, (x, weight), dy),
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, backend, dynamic):
    """Catches strides that were foretold wrongly: inductor's code relies on them."""
    torch._dynamo.reset()

    def block(x, weight):
        return fused_op.rms_norm(x.sin(), weight.shape, weight).cos()

    x = torch.randn(2, 3, 4, 6, device=device).to(memory_format=torch.channels_last)
    args = (x.requires_grad_(), torch.randn(6, device=device, requires_grad=True))
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=backend)
    result, expected = compiled(*args), block(*args)
    assert result.stride() == expected.stride() == x.stride()
    assert_same(result, expected)
    assert_same(torch.autograd.grad(result.sum(), args), torch.autograd.grad(expected.sum(), args))
