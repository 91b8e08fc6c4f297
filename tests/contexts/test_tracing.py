"""torch.jit.trace: what it records is saved, loaded, run and trained where this package is unknown.

Catches a trace that fails, warns, or holds what TorchScript can neither save nor differentiate;
numbers or gradients other than the eager ones; sizes that are burnt in.
"""

import contextlib
import io
import random
import warnings

import pytest
import torch
from torch import nn
from torch.jit import TracerWarning

import fused_op
from tests.calls import arguments, assert_same, outputs
from tests.norms import LlamaNorm, small_model
from tests.ops import OPS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "disabled": fused_op.disabled,
}


class Call(nn.Module):
    """A function, with the arguments of one dimension as its parameters."""

    def __init__(self, function, args, **options):
        super().__init__()
        self.function, self.options = function, options
        self.parameters_in_order = nn.ParameterList(t for t in args if t.dim() == 1)

    def forward(self, *rows):
        return self.function(*rows, *self.parameters_in_order, **self.options)


def traced(module, *inputs, mode=contextlib.nullcontext, **options):
    """The trace of a module, saved and loaded, of PyTorch's operators alone."""
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("error", TracerWarning)
        trace = torch.jit.trace(module, inputs, **options)
    assert "fused_op::" not in str(trace.inlined_graph)
    assert "PythonOp" not in str(trace.inlined_graph)
    buffer = io.BytesIO()
    torch.jit.save(trace, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def loss(result):
    """Not of squares: those of normalised rows hardly depend on the rows."""
    return sum((output.double() * ramp(output)).sum() for output in outputs(result))


def ramp(like):
    values = torch.linspace(-1, 2, like.numel(), dtype=torch.float64, device=like.device)
    return values.view(like.shape)


def assert_same_training(trace, module, *inputs):
    """Values and gradients, of inputs and parameters; those of a loaded trace are copies.

    To 32 roundings of the largest: gradients are sums that cancel, of terms in another order.
    """
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    result, expected = trace(*inputs), module(*inputs)
    for output, wanted in zip(outputs(result), outputs(expected), strict=True):
        assert output.dtype == wanted.dtype and output.stride() == wanted.stride()
    pairs = list(zip(trace.parameters(), module.parameters(), strict=True))
    found = torch.autograd.grad(loss(result), inputs + [t for t, _ in pairs])
    wanted = torch.autograd.grad(loss(expected), inputs + [t for _, t in pairs])
    for actual, right in zip(
        (*outputs(result), *found), (*outputs(expected), *wanted), strict=True
    ):
        atol = 32 * torch.finfo(right.dtype).eps * right.abs().max().item()
        torch.testing.assert_close(actual, right, rtol=0, atol=atol)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_trace_is_saved_loaded_and_trained(op, device, mode):
    """Whatever the mode is that a trace is recorded in: a loaded one has no memory of it."""
    args = arguments(op, requires_grad=True, device=device)
    module = Call(op.fused, args)
    rows = [t.detach() for t in args if t.dim() > 1]
    trace = traced(module, *rows, mode=mode)
    assert_same_training(trace, module, *rows)
    assert_same_training(trace, module, *(torch.cat([t, t])[:5, :1] for t in rows))


@pytest.mark.parametrize("seed", range(40))
def test_options_at_random(seed, pair, device):
    """Catches an option that a trace forgets, and a second rounding."""
    draw = random.Random(f"{seed} {pair}")
    op = draw.choice(OPS[:4])
    args = arguments(op, dtype=pair.rows, device=device)
    options = {"zero_centered": draw.random() < 0.5}
    options["rounding"] = draw.choice(["once", "before_weight"])
    if draw.random() < 0.5:
        options["normalized_shape"] = args[0].shape[-1:]
        if draw.random() < 0.5:
            args = [t for t in args if t.dim() > 1]  # no parameters
    if draw.random() < 0.5:
        is_double = pair.rows is torch.float64
        options["out_dtype"] = torch.float64 if is_double else torch.float32
    if op.adds and draw.random() < 0.5:
        options["residual_dtype"] = torch.float64 if pair.rows is torch.float64 else torch.float32
    if not op.adds and draw.random() < 0.5:
        options["memory_efficient"] = True
    args = [t.to(pair.params) if t.dim() == 1 else t for t in args]
    module, rows = Call(op.fused, args, **options), [t for t in args if t.dim() > 1]
    # That keeps less for a backward of its own, with less precise results: no matter for a trace.
    options.pop("memory_efficient", None)
    assert_same_training(traced(module, *rows), Call(op.fused, args, **options), *rows)


@pytest.mark.parametrize("norm", [fused_op.FusedLayerNorm, fused_op.FusedRMSNorm])
def test_trace_holds_the_operator_of_pytorch(norm):
    """It is what other tools recognise in a trace, and one kernel instead of ten."""
    graph = str(torch.jit.trace(norm(6), torch.randn(2, 6)).inlined_graph)
    names = {line.split("aten::")[1].split("(")[0] for line in graph.splitlines() if "aten" in line}
    assert names == {"layer_norm" if norm is fused_op.FusedLayerNorm else "rms_norm"}


@pytest.mark.parametrize("function", [fused_op.layer_norm, fused_op.rms_norm])
@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x.shape[-1],
        lambda x: x.size(-1),
        lambda x: x.shape[-1:],
        lambda x: (x.shape[-2], x.shape[-1]),
        lambda x: list(x.shape[1:]),
    ],
)
def test_sizes_of_the_input(function, shape):
    """Catches a size that the trace takes for a constant, or that is refused since it is traced."""
    trace = traced(Call(lambda x: function(x, shape(x)), []), torch.randn(3, 4, 6))
    x = torch.randn(2, 5, 8)
    assert_same(trace(x), function(x, shape(x)))


def test_wrong_shapes_are_refused_as_ever():
    for function, message in (
        (lambda x: fused_op.layer_norm(x, (5,)), "Given normalized_shape"),
        (lambda x: fused_op.layer_norm(x, x.shape[:1]), "Given normalized_shape"),
        (lambda x: fused_op.fused_rms_norm(x, torch.ones(5)), "normalized_shape"),
        (lambda x: fused_op.fused_add_rms_norm(x, x[:1]), "residual must have the shape of input"),
        (lambda x: fused_op.layer_norm(x, 1.5), "must be tuple of ints"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=message):
            torch.jit.trace(function, torch.randn(3, 6), check_trace=False)


@pytest.mark.parametrize("adds", [False, True])
def test_dropout_draws_in_every_run(adds):
    """Catches a mask that is a constant of the trace, or of a fixed number of rows."""
    cls = fused_op.FusedAddRMSNorm if adds else fused_op.FusedLayerNorm
    module, rows = cls(64, dropout_p=0.25), [torch.randn(8, 64)] * (1 + adds)
    trace = traced(module, *rows, check_trace=False)
    more = [torch.ones(500, 64), torch.zeros(500, 64)] if adds else [torch.randn(500, 64)]
    first, second = (outputs(trace(*more))[-1] for _ in range(2))
    assert not torch.equal(first, second)
    assert abs((first == 0).float().mean() - 0.25) < 0.02  # 32000 draws: 8 standard deviations
    assert_same_training(traced(module.eval(), *rows), module, *rows)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropped_elements_are_zeros(p):
    """Catches a product with zero: infinity and NaN would stay."""
    x = torch.full((8, 64), torch.inf)
    trace = traced(
        fused_op.FusedAddLayerNorm(64, dropout_p=p), x, torch.ones(8, 64), check_trace=False
    )
    total = trace(x, torch.zeros(8, 64))[1]
    assert ((total == 0) | (total == torch.inf)).all()
    assert (total == 0).any() and (total == 0).all() == (p == 1)


def test_converted_model():
    """Classes of other libraries, which convert has given a forward, too."""
    for model in (small_model()["a"], LlamaNorm(8), small_model()["c"][0]):
        original = traced(model, torch.randn(4, 8))
        assert fused_op.convert(model).converted
        trace, x = traced(model, torch.randn(4, 8)), torch.randn(7, 8)
        assert_same(trace(x), original(x))
        assert_same_training(trace, model, x)


def test_autocast(device):
    linear, norm = nn.Linear(8, 8, device=device), fused_op.FusedLayerNorm(8, device=device)
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        trace = torch.jit.trace(nn.Sequential(linear, norm), x)
        result, expected = trace(x), norm(linear(x))
    assert result.dtype == expected.dtype == torch.bfloat16
    assert_same(result, expected)


def test_second_derivative():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    trace = traced(fused_op.FusedRMSNorm(6, dtype=torch.float64), x.detach())
    assert torch.autograd.gradgradcheck(trace, x)


@torch.library.custom_op("fused_op_tests::norm_inside", mutates_args=())
def norm_inside(x: torch.Tensor) -> torch.Tensor:
    return fused_op.layer_norm(x, x.shape[-1:])


def test_inside_of_an_operator():
    """Catches a pause of the trace where it is paused already: there PyTorch fails an assertion."""
    x = torch.randn(3, 6)
    assert_same(torch.jit.trace(lambda x: norm_inside(x), x)(x), fused_op.fused_layer_norm(x))


def test_main_grad_is_refused():
    """Catches a trace whose gradients go elsewhere, unnoticed."""
    module, x = fused_op.FusedLayerNorm(6, fuse_wgrad_accumulation=True), torch.randn(3, 6)
    with pytest.raises(RuntimeError, match="does not record that gradients are added to main_grad"):
        torch.jit.trace(module, x)
    assert_same(traced(module, x, mode=torch.no_grad)(x), module(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shape", [lambda x: x.shape[-1], lambda x: x.shape[1:]])
def test_export_with_the_sizes_of_the_input(strict, shape):
    """Catches a symbolic size that is not taken for one."""

    class Norm(nn.Module):
        def forward(self, x):
            return fused_op.layer_norm(x, shape(x))

    module, dynamic = Norm(), ({1: torch.export.Dim("cols")},)
    program = torch.export.export(
        module, (torch.randn(3, 8),), dynamic_shapes=dynamic, strict=strict
    )
    x = torch.randn(3, 12)
    assert_same(program.module()(x), module(x))


@pytest.mark.parametrize("native", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("affine", [False, True])
def test_more_dimensions_than_when_traced(native, affine, device):
    """Catches sizes that are counted from the front."""
    fused = {nn.LayerNorm: fused_op.FusedLayerNorm, nn.RMSNorm: fused_op.FusedRMSNorm}[native]
    x, other = torch.randn(3, 6, device=device), torch.randn(2, 4, 5, 6, device=device)
    results = [
        traced(kind(6, elementwise_affine=affine, device=device), x)(other)
        for kind in (native, fused)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dims", [(0, None), (0, 0), (None, 0)])
def test_vmap_in_a_trace(dims, device):
    """Catches sizes that are asked of a batched tensor: a trace cannot hold them."""
    x, weight = torch.randn(3, 6, device=device), torch.randn(3, 6, device=device)
    args = [t if d == 0 else t[0] for t, d in zip((x, weight), dims, strict=True)]
    for function in (fused_op.fused_layer_norm, fused_op.fused_rms_norm):
        batched = torch.vmap(function, dims)
        trace = torch.jit.trace(batched, args, check_trace=False)
        torch.testing.assert_close(trace(*args), batched(*args))
