"""One seed, one mask: on every route that a call can take, and where two routes meet.

A forward that activation checkpointing runs again may take another route than the first, because a
mode, a compiler or a transform is active in only one of the two. Native dropout is the measure.
"""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fused_op
from fused_op import fused_add_layer_norm, fused_add_rms_norm, fused_layer_norm, fused_rms_norm
from fused_op._philox import keep_mask
from tests.calls import Calls
from tests.case import SEED
from tests.ops import BF16, DEVICES, F16, F32, F64

needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")

# By fused_op or its twin fused_op.reference: a result that is zero where an element was dropped.
CALLS = {
    "layer_norm": lambda of, x, p: of.fused_layer_norm(x, None, x[0] * 0 + 9, dropout_p=p),
    "rms_norm": lambda of, x, p: of.fused_rms_norm(x, dropout_p=p),
    "add_layer_norm": lambda of, x, p: of.fused_add_layer_norm(x, x * 0, dropout_p=p)[1],
    "add_rms_norm": lambda of, x, p: of.fused_add_rms_norm(x, x * 0, dropout_p=p)[1],
}


def under(context, f):
    def call(x):
        with context():
            return f(x)

    return call


def traced(trace):
    """Traced before the seed is set, so that tracing itself may draw."""
    return lambda f: lambda x, traced=[]: traced[0](x) if traced else traced.append(trace(f, x))


def exported(f, x):
    class Model(nn.Module):
        def forward(self, x):
            return f(x)

    return torch.export.export(Model(), (x,)).module()


def compiled(backend):
    return lambda f: torch.compile(f, fullgraph=True, backend=backend)


# How a function of one tensor is called; what traces or compiles does so at the first call.
ROUTES = {
    "plain": lambda f: f,
    "inference_mode": lambda f: under(torch.inference_mode, f),
    "autograd": lambda f: lambda x: f(x.clone().requires_grad_()).detach(),
    "autocast": lambda f: lambda x: under(lambda: torch.autocast(x.device.type, BF16), f)(x),
    "flop_counter": lambda f: under(lambda: FlopCounterMode(display=False), f),
    "own_mode": lambda f: under(Calls, f),
    "logging_mode": lambda f: under(LoggingTensorMode, f),
    "subclass": lambda f: lambda x: f(TwoTensor(x, x.clone())).a,
    "disabled": lambda f: under(fused_op.disabled, f),
    "disabled_mode": lambda f: under(Calls, under(fused_op.disabled, f)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[0],
    "functionalize": lambda f: torch.func.functionalize(f),
    "vmap_same": lambda f: lambda x: torch.vmap(f, randomness="same")(x[None])[0],
    "compiled_eager": compiled("eager"),
    "compiled_aot_eager": compiled("aot_eager"),
    "compiled_inductor": compiled("inductor"),
    "make_fx": traced(lambda f, x: make_fx(f)(x)),
    "make_fx_fake": traced(lambda f, x: make_fx(f, tracing_mode="fake")(x)),
    "jit_trace": traced(lambda f, x: torch.jit.trace(f, x, check_trace=False)),
    "export": traced(exported),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_seed_gives_one_mask(route, name, device):
    """Catches a route that draws the state by another operation: another mask for the seed, or a
    generator that moves on by another step, which the next random operation shows."""
    torch._dynamo.reset()
    draw = random.Random(f"{SEED} {route} {name}")
    rows, cols = draw.randint(1, 9), draw.randint(200, 700)
    dtype = F32 if route == "autocast" else draw.choice([F16, BF16, F32, F64])
    p, seed = draw.uniform(0.2, 0.8), draw.randrange(2**40)
    x = torch.rand(rows, cols, device=device, dtype=dtype) + 1

    def result(f):
        torch.manual_seed(seed)
        return f(x) == 0, torch.rand(8, device=device)

    expected = result(lambda x: CALLS[name](fused_op, x, p))
    assert abs(expected[0].double().mean() - p) < 0.3
    call = ROUTES[route](lambda x: CALLS[name](fused_op, x, p))
    call(x)
    actual = result(call)
    if route == "jit_trace":  # records torch.dropout, whose mask is another
        assert abs(actual[0].double().mean() - p) < 0.3
        assert torch.equal(result(call)[0], actual[0]) and not torch.equal(call(x) == 0, actual[0])
        return
    assert torch.equal(actual[0], expected[0]), f"another mask (FUSED_OP_SEED={SEED})"
    assert torch.equal(actual[1], expected[1]), "the generator is elsewhere"
    twin = result(lambda x: CALLS[name](fused_op.reference, x, p))
    assert torch.equal(twin[0], expected[0]) and torch.equal(twin[1], expected[1])


CONTEXTS = {
    "none": contextlib.nullcontext,
    "flop_counter": lambda: FlopCounterMode(display=False),
    "own_mode": Calls,
    "logging_mode": LoggingTensorMode,
}
COMPILED_AUTOGRAD = {
    f"compiled_autograd_{backend}": lambda backend=backend: compiled_autograd._enable(
        torch.compile(backend=backend)
    )
    for backend in ("eager", "aot_eager")
}


# Every forward with every backward, and each of them with both kinds of checkpoint. These differ in
# when the block is called again, not in how.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "backward", "reentrant"),
    [
        (forward, backward, (i + k) % 2 == 0)
        for i, forward in enumerate(CONTEXTS)
        for k, backward in enumerate({**CONTEXTS, **COMPILED_AUTOGRAD})
    ],
)
def test_recomputation_by_another_route_has_the_mask(forward, backward, reentrant, device):
    """Catches a mode that is active in only one of forward and recomputation and changes the mask:
    the gradients would be those of another function. What follows must stay in step too."""
    if backward in COMPILED_AUTOGRAD and not reentrant and torch.__version__ < "2.8":
        pytest.skip("compiled autograd of PyTorch 2.7 traces the recomputation, which then differs")
    torch._dynamo.reset()
    x = torch.randn(1, 512, device=device, requires_grad=True)
    bias = torch.ones(512, device=device, requires_grad=True)

    def block(x, bias):
        output = fused_layer_norm(x, None, bias, dropout_p=0.5)
        sum = fused_add_rms_norm(bias[None], torch.zeros_like(x), dropout_p=0.5)[1]
        return output, sum, F.dropout(bias, 0.5)

    with CONTEXTS[forward]():
        results = checkpoint(block, x, bias, use_reentrant=reentrant)
    scales = 1.0, 10.0, 100.0
    with {**CONTEXTS, **COMPILED_AUTOGRAD}[backward]():
        total = sum((result * scale).sum() for result, scale in zip(results, scales, strict=True))
        total.backward()
    kept = [2.0 * scale * (r.detach() != 0) for r, scale in zip(results, scales, strict=True)]
    torch.testing.assert_close(bias.grad, kept[0][0] + kept[1][0] + kept[2])


@pytest.mark.slow
def test_compiled_formula_has_the_mask(device):
    """Catches arithmetic that overflows: compiled, it gave another mask for a third of the seeds,
    and not in every part of a row the same."""
    torch._dynamo.reset()
    rows, cols = random.Random(SEED).randint(1, 9), random.Random(SEED).randint(200, 700)

    def mask(state):
        return keep_mask(state, rows, cols, 0.5, torch.device(device))

    compiled = torch.compile(mask, fullgraph=True)
    for _ in range(50):
        state = torch.empty(2, dtype=torch.int64, device=device).random_()
        assert torch.equal(compiled(state), mask(state)), state


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_probability_that_changes(backend, memory_efficient, device):
    """Catches a check that compiled code cannot make of a float that is not a constant to it."""
    torch._dynamo.reset()

    def call(x, p, eps):
        return fused_layer_norm(x, None, None, eps, dropout_p=p, memory_efficient=memory_efficient)

    x = torch.randn(4, 512, device=device, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for p in (0.0,) if memory_efficient else (0.1, 0.5, 0.0, 0.75):
        results = []
        for function in (call, compiled):
            torch.manual_seed(0)
            results.append(function(x, p, 1e-3 + p))
        torch.testing.assert_close(*results)
        first, second = (torch.autograd.grad(y, x, torch.ones_like(x)) for y in results)
        torch.testing.assert_close(second, first)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_calls_of_one_graph_have_masks_of_their_own(backend, device):
    """Catches a compiler that takes two draws for one, and a backward that draws once more."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def block(x, zero):
        return [fused_add_layer_norm(x, zero, dropout_p=0.5)[1] for _ in range(3)]

    x = torch.ones(4, 512, device=device, requires_grad=True)
    masks = []
    for _ in range(2):
        results = block(x, torch.zeros_like(x))
        (gradient,) = torch.autograd.grad(sum(results), x, torch.ones_like(x))
        assert torch.equal(gradient, sum(results))
        masks += [result != 0 for result in results]
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])


def patterns(f, x, weight, randomness):
    """Which samples have equal masks, by the ways that vmap can go over a function of both."""

    def over(dims, f=f):
        return torch.vmap(f, dims, randomness=randomness)

    weights = torch.stack([weight] * 3)
    calls = {
        "rows": lambda: over((0, None))(x, weight),
        "weights": lambda: over((None, 0))(x, weights),
        "both": lambda: over((0, 0))(x, weights),
        "nested": lambda: over((0, None), over((None, 0)))(x, weights).flatten(0, 1),
        "nested_same": lambda: torch.vmap(
            over((None, 0)), (0, None), randomness="same"
        )(x, weights).flatten(0, 1),
        "gradients": lambda: over((0, None), torch.func.grad(lambda x, w: f(x, w).sum(), 1))(
            x, weight
        ),
        "compiled": lambda: torch.compile(over((0, None)), fullgraph=True, backend="aot_eager")(
            x, weight
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            kept = call() != 0
            found[name] = [[torch.equal(a, b) for a in kept] for b in kept]
        except RuntimeError as error:
            found[name] = "random" in str(error)
    return found


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_has_the_randomness_of_native_dropout(randomness, device):
    """Catches a draw that vmap does not see, or that follows the input alone: an input without a
    batch dimension is dropped anew for each sample of the weight too."""
    torch._dynamo.reset()
    # So many columns that two masks are never the same by chance.
    x, weight = torch.rand(3, 5, 960, device=device) + 1, torch.rand(960, device=device) + 1
    ours = patterns(lambda x, w: fused_rms_norm(x, w, dropout_p=0.5), x, weight, randomness)
    native = patterns(
        lambda x, w: F.dropout(F.rms_norm(x, (960,), w), 0.5), x, weight, randomness
    )  # fmt: skip
    assert ours == native
    assert any(pattern is True for pattern in ours.values()) == (randomness == "error")


@pytest.mark.parametrize("on_device", [False, True])
def test_op(on_device, device):
    like = torch.empty(0, device=device)
    torch.library.opcheck(torch.ops.fused_op.dropout_state.default, (like, on_device))
    torch.manual_seed(0)
    expected = torch.ops.fused_op.dropout_state(like, False)
    torch.manual_seed(0)
    actual = torch.ops.fused_op.dropout_state(like, on_device)
    assert actual.device.type == (device if on_device else "cpu")
    assert torch.equal(actual.cpu(), expected)


@needs_cuda
def test_a_replay_draws_as_an_eager_call_does():
    """Catches a graph whose state is made of other numbers than those of its generator."""
    x = torch.randn(64, 256, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        first, second = (fused_layer_norm(x, dropout_p=0.5) for _ in range(2))
    for seed in (0, 1):
        torch.manual_seed(seed)
        graph.replay()
        torch.manual_seed(seed)
        assert torch.equal(first, fused_layer_norm(x, dropout_p=0.5))
        assert torch.equal(second, fused_layer_norm(x, dropout_p=0.5))
