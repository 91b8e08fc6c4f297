"""Norms over the channels of images: every layout, dtype and option against the formula in fp64.

Catches a pixel that is normalised with another one's statistics, a tile that loses its last pixels,
a gradient of a parameter that misses a tile or a sample, and a result in another layout.
"""

import warnings

import pytest
import torch
from torch.library import opcheck

import fused_op
import fused_op.reference
from fused_op import _channels_first
from tests.calls import Calls, assert_same, loss, take_kernels_away
from tests.case import generator, uninitialized_is_nan
from tests.contexts.graphs import Graphs
from tests.ops import BF16, F16, F32, F64, TOLERANCE, Pair, steps, subsets
from tests.variants.table import run
from tests.variants.test_variants import Recorded, Seen

OPS = ("fused_op.channels_first_forward.default", "fused_op.channels_first_backward.default")
NORMS = ("layer_norm", "rms_norm")
SHAPES = [
    (0, 3, 4, 4), (2, 0, 3, 3), (2, 3, 0, 4), (3, 5), (2, 7, 1, 1), (1, 1, 5), (3, 1, 4, 4),
    (2, 2, 9), (2, 3, 7, 7), (1, 33, 64), (2, 96, 5, 13), (1, 31, 2, 3, 129), (2, 64, 16),
    (3, 5, 17), (1, 768, 14, 14), (1, 4099, 3), (2, 3, 1000), (70, 6, 3, 3), (1, 65537, 2),
]  # fmt: skip
SMALL = (2, 5, 3, 4)
CASES = [(norm, activation) for norm in NORMS for activation in (None, "silu")]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request):
    """The public function with its activation, and its twin."""
    return Case(*request.param)


class Case:
    def __init__(self, norm, activation):
        self.norm, self.activation = norm, activation
        self.name = f"fused_channels_first_{norm}"
        self.public = getattr(fused_op, self.name)
        self.twin = getattr(fused_op.reference, self.name)

    def fused(self, input, weight=None, bias=None, eps=1e-6):
        return self.public(input, weight, bias, eps, activation=self.activation)

    def reference(self, input, weight=None, bias=None, eps=1e-6):
        return self.twin(input, weight, bias, eps, activation=self.activation)


def arguments(shape, pair, device="cpu", requires_grad=False):
    g = generator(device, shape, str(pair))
    sizes = {"input": shape, "weight": shape[1:2], "bias": shape[1:2]}
    return {
        name: torch.randn(size, generator=g, device=device)
        .to(pair.rows if name == "input" else pair.params)
        .requires_grad_(requires_grad)
        for name, size in sizes.items()
    }


def conditions(case, inputs, grad, eps):
    """What roundings are relative to: each formula in fp64 with all its terms positive."""
    x = inputs["input"].movedim(1, -1)
    size = x.abs().amax(-1, keepdim=True).clamp(min=1) if x.shape[-1] else 1
    x = x / size  # whose squares do not overflow
    weight = inputs.get("weight", torch.ones(x.shape[-1], dtype=F64, device=x.device))
    bias = inputs.get("bias", torch.zeros_like(weight))
    centred = case.norm == "layer_norm"
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps / size / size).rsqrt()
    # What subtracting the mean cancels is rounded as the sum behind the mean is.
    xhat = (x.abs() + (x.abs().mean(-1, keepdim=True) if centred else 0)) * rstd
    n, dn = xhat * weight.abs() + bias.abs(), grad.movedim(1, -1).abs()
    if case.activation:
        dn = dn * (1 + n / 2)  # silu'' is 1/2 at most
    wdn = dn * weight.abs()
    dx = rstd * (wdn + xhat * (wdn * xhat).mean(-1, keepdim=True))
    if centred:
        dx = dx + rstd * wdn.mean(-1, keepdim=True)
    dx = dx / size
    return {
        "output": n.movedim(-1, 1),
        "grad_input": dx.movedim(-1, 1),
        "grad_weight": (dn * xhat).flatten(0, -2).sum(0),
        "grad_bias": dn.flatten(0, -2).sum(0),
    }


def check(case, inputs, grad, eps=1e-6):
    """Each result has its dtype and layout, and is as near to truth as derived."""
    with uninitialized_is_nan():
        found = run(case.fused, inputs, grad, {"eps": eps})
    check_results(case, inputs, grad, found, eps)
    return found


def check_results(case, inputs, grad, found, eps):
    wide = {name: t.to(F64) for name, t in inputs.items()}
    truth = run(case.reference, wide, grad.to(F64), {"eps": eps})
    x = inputs["input"]
    scale = conditions(case, wide, grad.to(F64), eps)
    pixels = x.numel() // max(x.shape[1], 1)
    for name, t in found.items():
        like = inputs.get(name.removeprefix("grad_"), x)
        assert (t.dtype, t.shape, t.device) == (like.dtype, like.shape, like.device), name
        one = TOLERANCE[t.dtype]
        count = steps(x.shape[1]) + (steps(pixels) if like is not x else 0)
        bound = one.rounding * truth[name].abs() + one.smallest
        bound = bound + TOLERANCE[x.dtype].compute * count * scale[name]
        error = (t.to(F64) - truth[name]).abs() / (bound + 1e-300)
        assert not t.numel() or error.max() <= 1, f"{name}: {error.max():.3g} of the tolerance"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numerics(case, pair, shape, device):
    inputs = arguments(shape, pair, device)
    found = check(case, inputs, torch.randn(shape, device=device).to(pair.rows))
    assert found["output"].is_contiguous()
    assert found["grad_input"].is_contiguous()


@pytest.mark.parametrize("given", ["", "weight", "bias"])
@pytest.mark.parametrize("shape", [(2, 9, 5, 5), (2, 9)], ids=str)
def test_absent_parameters(case, given, shape, device):
    inputs = arguments(shape, Pair(F32, F32), device)
    inputs = {name: t for name, t in inputs.items() if name in ("input", given)}
    check(case, inputs, torch.randn(shape, device=device))


@pytest.mark.parametrize("dtypes", [(F64, F32), (BF16, F32), (F16, BF16)], ids=str)
def test_parameters_of_two_dtypes(case, dtypes, device):
    inputs = arguments(SMALL, Pair(F32, F32), device)
    inputs["weight"], inputs["bias"] = (
        inputs[name].to(dtype) for name, dtype in zip(("weight", "bias"), dtypes, strict=True)
    )
    check(case, inputs, torch.randn(SMALL, device=device))


LAYOUTS = {
    "channels last": lambda t: t.new_zeros(t.shape).contiguous(memory_format=torch.channels_last),
    "some channels": lambda t: torch.zeros(2, 6, 7, 20, dtype=t.dtype, device=t.device).movedim(
        -1, 1
    )[:, 3:14],
    "misaligned": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape),
    "every other pixel": lambda t: t.new_zeros(*t.shape[:3], 2 * t.shape[3])[..., ::2],
    "transposed": lambda t: t.new_zeros(2, 11, 7, 6).mT,
    "expanded": lambda t: t.new_zeros(1, 1, *t.shape[2:]).expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_layouts(case, layout, dtype, device):
    shape = (2, 11, 6, 7)
    inputs = arguments(shape, Pair(dtype, dtype), device)
    grad = torch.randn(shape, device=device).to(dtype)
    expected = check(case, inputs, grad)
    other = LAYOUTS[layout](grad)
    if layout == "expanded":
        expected = check(case, inputs, other)
    else:
        other.copy_(grad)
    found = check(case, inputs, other)
    for name, t in found.items():
        assert torch.equal(t, expected[name]), name
    if layout != "expanded":
        inputs["input"] = LAYOUTS[layout](grad).copy_(inputs["input"])
        found = check(case, inputs, grad)
        last = layout in ("channels last", "some channels")
        output = found["output"].movedim(1, -1) if last else found["output"]
        assert output.is_contiguous()


@pytest.mark.parametrize("norm", NORMS)
def test_the_bits_of_rows_where_channels_are_last(norm, device):
    """Without an activation, channels-last input is the norm of its permuted view."""
    x = torch.randn(2, 24, 5, 6, device=device).to(memory_format=torch.channels_last)
    weight = torch.randn(24, device=device)
    rows = getattr(fused_op, f"fused_{norm}")
    found = getattr(fused_op, f"fused_channels_first_{norm}")(x, weight, eps=1e-5)
    assert torch.equal(found, rows(x.movedim(1, -1), weight, eps=1e-5).movedim(-1, 1))
    assert found.is_contiguous(memory_format=torch.channels_last)
    with Calls() as calls:
        getattr(fused_op, f"fused_channels_first_{norm}")(x, weight)
    assert not any("clone" in name or "copy" in name for name in calls.names), calls.names


@pytest.mark.parametrize("shape", [(5, 40, 9, 11), (5, 40, 3, 4), (3, 130, 200)], ids=str)
def test_a_pixel_has_the_same_bits_everywhere(case, shape, pair, device, threads):
    """Catches sums whose order depends on the batch, the number of pixels or where one lies."""
    inputs = arguments(shape, pair, device)
    grad = torch.randn(shape, device=device).to(pair.rows)
    everything = run(case.fused, inputs, grad, {})
    threads(1)
    for name, t in run(case.fused, inputs, grad, {}).items():
        assert torch.equal(t, everything[name]), name
    pixels = (slice(2, 3), slice(None), slice(1, 3))
    for part in ((slice(1, 3),), pixels, (slice(None), slice(None), slice(1, None))):
        some = {n: t[part].contiguous() if n == "input" else t for n, t in inputs.items()}
        found = run(case.fused, some, grad[part].contiguous(), {})
        for name in ("output", "grad_input"):
            assert torch.equal(found[name], everything[name][part]), name


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e18, 1e30])
@pytest.mark.parametrize("offset", [0, 1, 1e4])
def test_extreme_numbers(case, scale, offset, device):
    shape = (2, 40, 5, 5)
    inputs = arguments(shape, Pair(F32, F32), device)
    inputs["input"] = (inputs["input"] + offset) * scale
    found = case.fused(**inputs)
    wide = {name: t.to(F64) for name, t in inputs.items()}
    truth = case.reference(**wide)
    bound = conditions(case, wide, torch.ones_like(truth), 1e-6)["output"]
    assert ((found - truth).abs() <= 1e-5 * bound + 1e-37).all()


@pytest.mark.parametrize("scale", [1e-37, 1e-25])
def test_tiny_numbers_keep_their_mean(case, scale, device):
    """Catches a mean that is lost with the squares, which are all zeros."""
    x = (arguments((2, 40, 5, 5), Pair(F32, F32), device)["input"] + 3) * scale
    check(case, {"input": x}, torch.randn(x.shape, device=device))


def test_a_pixel_far_from_its_first_channels(case, device):
    """Catches a variance that has cancelled where a few channels do not tell where the mean is."""
    inputs = arguments((2, 48, 70), Pair(F32, F32), device)
    inputs["input"][:, ::3] += 1e6  # those that are looked at
    inputs["input"][0, :, 5] = 7  # does not vary
    check(case, inputs, torch.randn(2, 48, 70, device=device))


def test_nan_and_zeros_stay_in_their_pixels(case, device):
    inputs = arguments((2, 6, 70), Pair(F32, F32), device)
    inputs["input"][0, :, 1] = 0
    ones = torch.ones(2, 6, 70, device=device)
    clean = run(case.fused, inputs, ones, {})
    assert all(t.isfinite().all() for t in clean.values())
    inputs["input"][1, 3, 2], inputs["input"][0, 5, 69] = float("nan"), float("inf")
    found = run(case.fused, inputs, ones, {})
    bad = torch.zeros(2, 70, dtype=torch.bool, device=device)
    bad[1, 2] = bad[0, 69] = True
    for name in ("output", "grad_input"):
        good = ~bad[:, None].expand_as(ones)
        assert torch.equal(found[name][good], clean[name][good]), name
        assert found[name].movedim(1, -1)[bad].isnan().any(-1).all(), name


def test_gradcheck_of_every_order_and_mode(case, device):
    for shape in ((2, 3, 2, 2), (2, 3)):
        inputs = list(arguments(shape, Pair(F64, F64), device, requires_grad=True).values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vmap's fallback
            assert torch.autograd.gradcheck(
                case.fused, inputs, check_forward_ad=True, check_batched_grad=True,
                check_batched_forward_grad=True,
            )  # fmt: skip
            assert torch.autograd.gradgradcheck(case.fused, inputs, check_fwd_over_rev=True)


def test_gradients_for_what_requires_them(case):
    inputs = arguments(SMALL, Pair(F32, F32))
    everything = run(case.fused, inputs, torch.ones(SMALL), {})
    for names in subsets(tuple(inputs)):
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
        found = case.fused(**leaves)
        assert found.requires_grad == bool(names)
        if names:
            grads = torch.autograd.grad(found, [leaves[n] for n in names], torch.ones(SMALL))
            expected = [everything[f"grad_{n}"] for n in names]
            assert_same(tuple(grads), tuple(expected), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(case, dynamic, device):
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(case.fused, fullgraph=True, dynamic=dynamic, backend=graphs)
    inputs = list(arguments(SMALL, Pair(F32, F32), device, requires_grad=True).values())
    eager, result = case.fused(*inputs), compiled(*inputs)
    assert_same(result, eager, rtol=0, atol=0)
    expected = torch.autograd.grad(loss(eager), inputs)
    assert_same(torch.autograd.grad(loss(result), inputs), expected, rtol=0, atol=0)
    assert [graphs.names.count(op) for op in OPS] == [1, 1]
    # Another layout, by the norms of rows.
    inputs[0] = inputs[0].detach().to(memory_format=torch.channels_last)
    found = compiled(*inputs)
    assert_same(found, case.fused(*inputs), rtol=0, atol=0)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_opcheck(case, pair, device):
    """The ops with the arguments that the function gives them."""
    for shape in (SMALL, (2, 5, 0, 3)):
        inputs = arguments(shape, pair, device, requires_grad=True)
        with Seen(*OPS) as seen:
            loss(case.fused(**inputs)).backward()
        assert [str(func) for func, _ in seen.calls] == [*OPS]
        for func, args in seen.calls:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(func, detached)


def test_the_op_itself_refuses_to_be_recorded(case):
    """Its derivative is the function's: recorded past it, the gradient would be zeros."""
    x = arguments(SMALL, Pair(F32, F32), requires_grad=True)
    seen = Seen(OPS[0])
    with torch.no_grad(), seen:
        case.fused(**x)
    (func, args), *_ = seen.calls
    with pytest.raises(RuntimeError, match="derivative"):
        func(x["input"], *args[1:])[0].sum().backward()


def test_transforms(case, device):
    inputs = list(arguments((2, 3, 4), Pair(F64, F64), device).values())
    every = tuple(range(len(inputs)))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        found, truth = (transform(f, every)(*inputs) for f in (case.fused, case.reference))
        assert_same(found, truth)
    many = [torch.stack([t, 2 * t, t - 1]) for t in inputs]
    each = [case.fused(*row) for row in zip(*many, strict=True)]
    assert_same(torch.func.vmap(case.fused)(*many), torch.stack(each))
    assert_same(torch.func.functionalize(case.fused)(*inputs), case.fused(*inputs))


@pytest.mark.filterwarnings("ignore")
def test_trace_and_export(case):
    first, second = ([*arguments(SMALL, Pair(F32, F32)).values()] for _ in range(2))
    second[0] = second[0] + 1
    traced = torch.jit.trace(lambda *a: case.fused(*a), tuple(first))
    assert "fused_op::" not in str(traced.graph)
    assert_same(traced(*second), case.fused(*second))

    class Module(torch.nn.Module):
        def forward(self, *a):
            return case.fused(*a)

    program = torch.export.export(Module(), tuple(first))
    assert_same(program.module()(*second), case.fused(*second))


def test_disabled_and_missing_kernels_run_the_formula(case, monkeypatch):
    inputs = arguments(SMALL, Pair(F32, F32))
    expected = run(case.fused, inputs, torch.ones(SMALL), {})
    with fused_op.disabled(), Calls() as calls:
        found = run(case.fused, inputs, torch.ones(SMALL), {})
    assert not any("fused_op" in name for name in calls.names)
    assert_same(tuple(found.values()), tuple(expected.values()))
    take_kernels_away(_channels_first._CHANNELS_FIRST, monkeypatch)
    with pytest.warns(UserWarning, match="a kernel is not available: of this test"):
        found = run(case.fused, inputs, torch.ones(SMALL), {})
    assert_same(tuple(found.values()), tuple(expected.values()))


def test_autocast_and_torch_function(case):
    inputs = arguments(SMALL, Pair(BF16, F32))
    with torch.autocast("cpu", BF16):
        assert case.fused(**inputs).dtype == BF16
        assert case.fused(**arguments(SMALL, Pair(F32, F32))).dtype == F32
    Recorded.seen.clear()
    found = case.fused(inputs["input"].as_subclass(Recorded), inputs["weight"])
    assert case.public in Recorded.seen
    assert type(found) is Recorded
    plain = case.fused(inputs["input"], inputs["weight"])
    assert torch.equal(found.as_subclass(torch.Tensor), plain)


REFUSED = {
    "argument 'input' must be Tensor, not": (TypeError, {"input": [1.0]}),
    "argument 'eps' must be float, not str": (TypeError, {"eps": "1"}),
    "argument 'activation' must be str or None, not int": (TypeError, {"activation": 1}),
    "activation must be 'silu' or None, got 'gelu'": (ValueError, {"activation": "gelu"}),
    "eps must be finite, got": (ValueError, {"eps": float("nan")}),
    "not implemented for": (NotImplementedError, {"input": torch.ones(3, 6).long()}),
    "input must be a dense": (RuntimeError, {"input": torch.ones(3, 6).to_sparse()}),
    r"input must .*two dimensions.*got shape \[\]": (RuntimeError, {"input": torch.ones(())}),
    "input must have at least two dimensions": (RuntimeError, {"input": torch.ones(5)}),
    "Expected weight to be of same shape": (RuntimeError, {"weight": torch.ones(4)}),
    "Expected bias to be of same shape": (RuntimeError, {"bias": torch.ones(5, 1)}),
    "mixed dtype: expect parameter": (RuntimeError, {"bias": torch.ones(5).long()}),
    "weight: Tensor on device meta": (RuntimeError, {"weight": torch.ones(5, device="meta")}),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_refused(norm, sentence):
    error, arguments_ = REFUSED[sentence]
    name = f"fused_channels_first_{norm}"
    given = {"input": torch.ones(SMALL), "weight": torch.ones(5), "bias": torch.ones(5)}
    for last in (False, True):
        if last and "input" not in arguments_:
            given["input"] = given["input"].to(memory_format=torch.channels_last)
        with pytest.raises(error, match=f"{name}: {sentence}"):
            getattr(fused_op, name)(**(given | arguments_))
        with fused_op.disabled(), pytest.raises(error, match=f"{name}: {sentence}"):
            getattr(fused_op, name)(**(given | arguments_))


def test_what_the_ops_refuse():
    x, stats = torch.ones(SMALL), torch.ones(2, 24)
    backward = torch.ops.fused_op.channels_first_backward
    options = "layer_norm", None, (True, True, True)
    for sentence, arguments_ in {
        "grad_output must have the shape of input": (x[:1], x, None, None, stats),
        "grad_output must have the dtype of input": (x.double(), x, None, None, stats),
        "stats must be what norm_forward returned": (x, x, None, None, stats[:1]),
        "input must have at least two dimensions": (x[0, 0, 0], x[0, 0, 0], None, None, stats),
    }.items():
        with pytest.raises(RuntimeError, match=sentence):
            backward(*arguments_, *options)
    with pytest.raises(ValueError, match="activation must be 'silu' or None, got 'tanh'"):
        torch.ops.fused_op.channels_first_forward(x, None, None, "rms_norm", 1e-6, "tanh", False)
