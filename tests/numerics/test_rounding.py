"""``rounding="before_weight"``: the normalised values are rounded to 16 bits, then multiplied.

Outputs are compared with the operations that a model has, bit by bit. Where the arithmetic of those
differs, a value next to a tie may round the other way: no more than SAME_SHARE of the elements do,
each by one spacing of the normalised value. Rounding once would change a quarter of them.

The rounding counts as the identity in backward, so all gradients but the weight's have the bits
that they have with rounding once; the weight's is compared with its formula in fp64.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import fused_op
from fused_op import FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm, reference
from fused_op._philox import keep_mask
from fused_op._proof import SAME_SHARE
from tests.calls import assert_same, outputs
from tests.case import SEED, generator
from tests.numerics.test_options import Drawn
from tests.ops import BF16, F16, F32, F64, OPS, TOLERANCE, Pair, condition, steps

PAIRS = [Pair(F16, F16), Pair(F16, F32), Pair(BF16, BF16), Pair(BF16, F32), Pair(BF16, F16)]
PLAIN = [op for op in OPS if not op.zero_centered]
RMS = [op for op in PLAIN if not op.centred]
SHAPES = [(400, 1), (300, 3), (90, 17), (64, 127), (64, 129), (33, 1000), (9, 4099), (3, 20_000)]
CUDA_SHAPES = [(3000, 128), (600, 4096), (70, 8192), (300, 768), (2, 200_000), (300, 40_000)]
EPS = 1e-6

pairs = pytest.mark.parametrize("pair", PAIRS, ids=str)
every_op = pytest.mark.parametrize("op", PLAIN, ids=str)


def shapes(device):
    return SHAPES + (CUDA_SHAPES if device == "cuda" else [])


def drawn(op, pair, shape, device, residual_dtype=None):
    """Arguments of the op by name."""
    g = generator(device, op.name, str(pair), shape)

    def normal(*size, dtype):
        return torch.randn(size, generator=g, device=device).to(dtype)

    dtypes = {"input": pair.rows, "residual": residual_dtype or pair.rows}
    inputs = {name: normal(*shape, dtype=dtypes[name]) for name in op.inputs if name in dtypes}
    return inputs | {name: normal(shape[-1], dtype=pair.params) for name in op.parameters}


def composed(op, x, weight, bias, dtype, out_dtype, zero_centered=False):
    """What a model has in the place of the op, of a stored sum x.

    A product of two 16-bit values is exact in float32, and rounded once to their dtype.
    """
    wide = x.float()
    if op.centred:
        normalized = F.layer_norm(wide, wide.shape[-1:], eps=EPS)
    else:
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    y = normalized.to(dtype).float()
    if weight is not None:
        y = y * (weight.float() + zero_centered)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def assert_rounds_the_same(op, actual, expected, weight, dtype, what):
    """Equal bits but for the share that a tie may change, by one spacing of x̂ times the weight."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    differ = actual != expected
    if op.centred and actual.dtype is F32:  # the GPU adds the bias without rounding the product
        near = torch.finfo(F32).eps * (expected.abs() + 8)
        differ &= (actual - expected).abs() > near
    # F.layer_norm of float32 has errors of its own, of some spacings: more values cross a tie. The
    # values of rows of one column are much alike, and all next to a tie if one is; equal values of
    # a long row are, too, which the 64 allow for.
    share = 0.03 if actual.shape[-1] < 4 else 16 * SAME_SHARE if op.centred else SAME_SHARE
    allowed = share * actual.numel()
    count = int(differ.sum())
    assert count <= allowed + 64, f"{what}: {count} (FUSED_OP_SEED={SEED})"
    factor = torch.ones((), device=actual.device) if weight is None else weight.double().abs()
    eps = torch.finfo(dtype).eps
    reach = actual.double().abs() * torch.finfo(actual.dtype).eps
    reach = reach + factor * eps * math.sqrt(actual.shape[-1]) * (actual == actual)
    assert bool(((actual.double() - expected.double()).abs() <= reach)[differ].all()), what


@every_op
@pairs
def test_output_has_the_bits_of_the_composition(op, pair, device):
    """Catches a rounding in another place, to another dtype, or in some kernels alone; and a twin
    that is another function."""
    draw = random.Random(str((op.name, pair)))
    for shape in shapes(device):
        absent = draw.choice([(), (), ("weight",), ("bias",), op.parameters])
        residual_dtype = draw.choice([None, F32]) if op.adds else None
        options = {"zero_centered": draw.random() < 0.3, "out_dtype": draw.choice([None, F32])}
        inputs = drawn(op, pair, shape, device, residual_dtype) | dict.fromkeys(absent)
        inputs = {name: t for name, t in inputs.items() if name in op.inputs}
        options |= {"normalized_shape": shape[-1], "rounding": "before_weight"}
        found = outputs(op.fused(*inputs.values(), eps=EPS, **options))
        x = found[1] if op.adds else inputs["input"]
        weight, bias = inputs["weight"], inputs.get("bias")
        out_dtype = options["out_dtype"] or pair.rows
        zero_centered = options["zero_centered"]
        expected = composed(op, x, weight, bias, pair.rows, out_dtype, zero_centered)
        factor = weight if weight is None or not zero_centered else 1 + weight.float()
        what = f"{op} {pair} {shape} {options} {absent}"
        assert_rounds_the_same(op, found[0], expected, factor, pair.rows, what)
        twin = outputs(op.reference(*inputs.values(), eps=EPS, **options))
        assert_rounds_the_same(op, twin[0], expected, factor, pair.rows, what)
        if shape[1] > 3 and (weight is not None or options["out_dtype"]):
            once = outputs(op.fused(*inputs.values(), eps=EPS, **options | {"rounding": "once"}))
            assert (once[0] != found[0]).double().mean() > 0.02, what  # or nothing is tested


@every_op
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_nothing_to_round(op, dtype, device):
    """Catches a rounding to the dtype of the output or of the weight, and another kernel."""
    inputs = drawn(op, Pair(dtype, dtype), (7, 130), device)
    for out_dtype in [dtype] if dtype is F64 else [F32, BF16]:
        leaves = [t.requires_grad_() for t in inputs.values()]
        found = []
        for rounding in ("once", "before_weight"):
            y = outputs(op.fused(*leaves, rounding=rounding, out_dtype=out_dtype))
            found.append([*y, *torch.autograd.grad(y, leaves, [t.detach() for t in y])])
        assert all(map(torch.equal, *found))


def gradients(op, inputs, grads, **options):
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    given = [leaves.get(name) for name in op.inputs]
    results = outputs(op.fused(*given, eps=EPS, **options))
    found = torch.autograd.grad(results, list(leaves.values()), grads[: len(results)])
    return results, dict(zip(leaves, found, strict=True))


def grad_weight_of(op, x, dy, dtype):
    """Its formula in fp64, and how far a sum of float32 may be from it: by the roundings of the
    arithmetic, and by a spacing of each x̂ that is within them of a tie."""
    x, dy = x.double(), dy.double()
    centred = x - x.mean(-1, keepdim=True) if op.centred else x
    xhat = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    rounded = xhat.to(dtype).double()
    compute = TOLERANCE[dtype].compute
    scale = condition(op, EPS, x, None, None, dy)
    noise = compute * steps(x.shape[-1]) * scale["output"]
    is_near_tie = (xhat + noise).to(dtype) != (xhat - noise).to(dtype)
    spacing = xhat.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    flips = (dy.abs() * spacing * is_near_tie).sum(0)
    arithmetic = compute * (steps(x.shape[-1]) + steps(len(x))) * (dy * rounded).abs().sum(0)
    return (dy * rounded).sum(0), arithmetic + flips, ((dy * (xhat - rounded)).sum(0)).abs()


@every_op
@pairs
def test_gradients(op, pair, device, monkeypatch, recorder):
    """Catches the gradient of a weight that is that of the exact normalised values, and a gradient
    of rows that the rounding changed."""
    draw, tells = random.Random(str((op.name, pair))), 0
    for shape in shapes(device):
        residual_dtype = draw.choice([None, F32]) if op.adds else None
        inputs = drawn(op, pair, shape, device, residual_dtype)
        inputs |= dict.fromkeys(draw.choice([(), (), (), ("bias",)] if op.centred else [()]))
        p, zero_centered = draw.choice([0.0, 0.0, 0.4]), draw.random() < 0.3
        options = {"zero_centered": zero_centered, "dropout_p": p}
        options["out_dtype"] = draw.choice([None, F32])
        state = Drawn(monkeypatch, device, on_device=False).state
        grads = [torch.randn(shape, generator=generator(device, i), device=device) for i in (0, 1)]
        grads[0] = grads[0].to(options["out_dtype"] or pair.rows)
        grads[1] = grads[1].to(residual_dtype or pair.rows)
        results, got = gradients(op, inputs, grads, rounding="before_weight", **options)
        _, once = gradients(op, inputs, grads, **options)
        what = f"{op} {pair} {shape} {options} (FUSED_OP_SEED={SEED})"
        for name in set(got) - {"weight"}:
            assert torch.equal(got[name], once[name]), f"{name} {what}"
        x, dy = results[1].detach() if op.adds else inputs["input"], grads[0].double()
        if p > 0 and not op.adds:
            keep = keep_mask(state, *shape, p, torch.device(device))
            dy = dy * keep * (65536 / (65536 - round(p * 65536)))
        truth, bound, unrounded = grad_weight_of(op, x, dy, pair.rows)
        t = TOLERANCE[pair.params]
        bound = bound + t.rounding * truth.abs() + t.smallest
        error = (got["weight"].double() - truth).abs()
        assert got["weight"].dtype == pair.params and bool((error <= bound).all()), what
        tells += bool((unrounded > 2 * bound).any())
    assert tells > 2, "the bounds do not tell the two roundings apart"


@pairs
def test_frozen_weight_and_frozen_rows(pair, device):
    """Catches a kernel for some wanted gradients that gives others than the one for all."""
    for op in RMS:
        inputs = drawn(op, pair, (40, 1000), device)
        grads = [t.detach() for t in list(inputs.values())[:2]]
        _, every = gradients(op, inputs, grads, rounding="before_weight")
        for wanted in inputs:
            leaves = {n: t.detach().requires_grad_(n == wanted) for n, t in inputs.items()}
            y = outputs(op.fused(*leaves.values(), eps=EPS, rounding="before_weight"))
            y = [t for t in y if t.requires_grad]
            (found,) = torch.autograd.grad(y, leaves[wanted], grads[: len(y)])
            assert torch.equal(found, every[wanted]), wanted


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_memory_efficient(dtype, device):
    """The normalised values that backward recovers are rounded again: those that forward had."""
    x = torch.randn(64, 300, device=device).to(dtype)
    weight = (1 + torch.rand(300, device=device)).to(dtype).requires_grad_()
    y = fused_op.fused_rms_norm(x, weight, EPS, rounding="before_weight", memory_efficient=True)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, weight, dy)
    truth, bound, _ = grad_weight_of(RMS[0], x, dy, dtype)
    # y has half a spacing of error, and the quotient rounds to the same value or to its neighbour.
    spacing = torch.finfo(dtype).eps
    bound = bound + spacing * (truth.abs() + (dy.double() * x.double()).abs().sum(0))
    assert bool(((found.double() - truth).abs() <= bound).all())


def test_rows_do_not_depend_on_others(device):
    """Catches a plan of another rounding, and strides that are not followed."""
    x = torch.randn(300, 1200, device=device).to(BF16)[:, 100:1124]
    weight = torch.randn(1024, device=device).to(BF16)
    norm = partial(fused_op.fused_rms_norm, weight=weight, rounding="before_weight")
    every = norm(x)
    assert torch.equal(norm(x.contiguous()), every)
    for row in (0, 17, 299):
        assert torch.equal(norm(x[row : row + 1]), every[row : row + 1])


def test_special_rows(device):
    """NaN and infinities stay in their rows; rows whose squares overflow are exact as ever."""
    x = torch.randn(6, 40, device=device).to(BF16)
    x[1, 3], x[2, 5], x[3] = math.nan, math.inf, 0
    x[4] = x[5] * 2.0**100
    y = fused_op.fused_rms_norm(x, eps=0.0, rounding="before_weight", out_dtype=F32)
    assert y[1].isnan().all() and not y[2].isfinite().all() and y[[0, 4, 5]].isfinite().all()
    assert torch.equal(y[4], y[5]) and torch.equal(y[5], y[5].to(BF16).float())


# --- Every way that a call may take ---------------------------------------------------------------


def call(op, device="cpu", shape=(4, 3, 24), dtype=BF16):
    inputs = drawn(op, Pair(dtype, dtype), shape, device)
    function = partial(op.fused, eps=EPS, rounding="before_weight")
    return function, [t.requires_grad_() for t in inputs.values()]


def with_gradients(function, args):
    y = outputs(function(*args))
    return [*y, *torch.autograd.grad(y, args, [t.detach() for t in y])]


def close(actual, expected, dtype=BF16):
    """But for a value beside a tie, and gradients that one way sums in float32."""
    eps = torch.finfo(dtype).eps
    assert_same(actual, expected, rtol=2 * eps, atol=4 * eps)


@every_op
def test_other_ways(op, device, in_python):
    """Catches a way on which the option is lost: the Function in Python, the formulas, the
    dispatcher under a mode, a trace, a transform and a compiler."""
    function, args = call(op, device)
    expected = with_gradients(function, args)
    with fused_op.disabled():
        close(with_gradients(function, args), expected)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(with_gradients(compiled, args), expected, rtol=0, atol=0)
    traced = torch.jit.trace(lambda *given: function(*given), args, check_trace=False)
    close(with_gradients(traced, args), expected)
    mapped = torch.vmap(function, in_dims=tuple(0 if t.dim() > 1 else None for t in args))
    close(outputs(mapped(*args)), outputs(function(*args)))


@every_op
def test_derivatives_of_derivatives(op, device):
    """Catches another formula for those than for the first. Forward mode has the same one."""
    function, args = call(op, device)
    twin = partial(op.reference, eps=EPS, rounding="before_weight")
    grads = [
        torch.autograd.grad(sum(t.float().square().sum() for t in outputs(f(*args))), args,
                            create_graph=True)
        for f in (function, twin)
    ]  # fmt: skip
    second = [torch.autograd.grad(sum(t.float().square().sum() for t in g), args) for g in grads]
    for ours, theirs in zip(second[0], second[1], strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.05
    primals = tuple(t.detach() for t in args)
    tangents = tuple(torch.randn_like(t) for t in primals)
    _, found = torch.func.jvp(function, primals, tangents)
    _, expected = torch.func.jvp(twin, primals, tangents)
    close(found, expected)


def test_autocast(device):
    """The normalised values are rounded to the dtype of the input, whatever autocast's."""
    function, args = call(RMS[0], device)
    expected = function(*args)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(function(*args), expected)


# --- Modules --------------------------------------------------------------------------------------


def test_module(device):
    """Catches a module that forgets the option, in a copy, a pickle or its text."""
    options = {"rounding": "before_weight", "device": device, "dtype": BF16}
    norm, add = FusedRMSNorm(96, EPS, **options), FusedAddRMSNorm(96, EPS, **options)
    assert repr(norm) == "FusedRMSNorm((96,), eps=1e-06, elementwise_affine=True, " + (
        "rounding='before_weight')"
    )
    assert list(norm.state_dict()) == ["weight"]
    x, weight = torch.randn(7, 96, device=device).to(BF16), torch.randn(96, device=device).to(BF16)
    norm.weight.data = add.weight.data = weight
    expected = fused_op.fused_rms_norm(x, weight, EPS, rounding="before_weight")
    for module in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert module.rounding == "before_weight" and torch.equal(module(x), expected)
    assert not torch.equal(fused_op.fused_rms_norm(x, weight, EPS), expected)
    sums = fused_op.fused_add_rms_norm(x, x, weight, EPS, rounding="before_weight")
    assert all(map(torch.equal, add(x, x), sums))


def test_main_grad(device):
    """Catches a sum for main_grad that is that of the exact normalised values."""
    x = torch.randn(50, 96, device=device).to(BF16).requires_grad_()
    norm = FusedRMSNorm(96, EPS, dtype=BF16, device=device, rounding="before_weight")
    norm(x).backward(x.detach())
    fused = copy.deepcopy(norm)
    fused.fuse_wgrad_accumulation = True
    fused.weight.main_grad = torch.zeros(96, device=device)
    fused(x).backward(x.detach())
    assert torch.equal(fused.weight.main_grad.to(BF16), norm.weight.grad)


def test_transformer_layer_calls_the_norm(device):
    """Its fast path reads the weight past forward, and would round once."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=device).eval()
    layer.norm1 = FusedLayerNorm(16, rounding="before_weight", device=device)
    calls = []
    layer.norm1.register_forward_hook(lambda *given: calls.append(given[0]))
    with torch.inference_mode():
        layer(torch.randn(2, 3, 16, device=device))
    assert calls == [layer.norm1]


@pytest.mark.parametrize("op", [*PLAIN], ids=str)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("first", ValueError, "rounding must be 'once' or 'before_weight', got 'first'"),
        ("", ValueError, "rounding must be 'once' or 'before_weight', got ''"),
        (None, TypeError, "argument 'rounding' must be str, not NoneType"),
        (True, TypeError, "argument 'rounding' must be str, not bool"),
    ],
)
def test_bad_value(op, value, error, message):
    args = [torch.ones(2, 4) for _ in op.inputs[: 1 + op.adds]]
    with pytest.raises(error, match=f"{op.name}: {message}"):
        op.fused(*args, rounding=value)


def test_reference_has_no_rounded_gradient():
    """Catches a rounding of what passes through the rounding, as `to` alone has it."""
    x = torch.randn(3, 40).to(BF16).requires_grad_()
    weight = torch.randn(40).requires_grad_()
    y = reference.fused_rms_norm(x, weight, EPS, rounding="before_weight", out_dtype=F32)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(
        reference.fused_rms_norm(x, weight, EPS, out_dtype=F32), x, dy
    )
    assert torch.equal(found, expected)
