"""What the modulated norms and the gated residual have beyond other variants.

Catches an entry that meets rows of another one, a gradient that is not summed over its rows (or
in an order that depends on threads), a chunk of a projection that is copied, and an error that is
not what it says. tests/variants/test_variants.py has the rest.
"""

import contextlib
import itertools

import pytest
import torch
from torch.library import opcheck

import fused_op
from fused_op import (
    fused_gated_add_layer_norm,
    fused_gated_add_rms_norm,
    fused_modulated_layer_norm,
    fused_modulated_rms_norm,
    reference,
)
from tests.calls import assert_same
from tests.case import generator, uninitialized_is_nan
from tests.contexts.graphs import Graphs
from tests.ops import BF16, F16, F32, F64
from tests.variants.test_variants import Seen

FUNCTIONS = [
    fused_modulated_layer_norm,
    fused_modulated_rms_norm,
    fused_gated_add_layer_norm,
    fused_gated_add_rms_norm,
]
BOUNDS = {F64: 1e-12, F32: 1e-5, BF16: 1.2e-2, F16: 2e-3}  # of the largest


@pytest.fixture(params=FUNCTIONS, ids=lambda f: f.__name__.removeprefix("fused_"))
def function(request):
    return request.param


def twin(function):
    return getattr(reference, function.__name__)


def draw(*shape, dtype=F32, device="cpu", what=""):
    g = generator(device, shape, dtype, what)
    return torch.randn(shape, generator=g, device=device).to(dtype)


def arguments(
    function, shape, entries, rows=F32, of_entries=None, params=None, device="cpu", residual=None
):
    """All of them, in call order."""
    names = ["input", "scale", "shift", "weight"]
    if "gated" in function.__name__:
        names[1:1] = ["residual", "gate"]
    if "layer" in function.__name__:
        names.append("bias")
    kinds = {"input": (shape, rows), "residual": (shape, residual or rows)}
    kinds |= dict.fromkeys(("weight", "bias"), (shape[-1:], params or rows))
    other = (entries, of_entries or rows)
    sizes = {name: kinds.get(name, other) for name in names}
    return {n: draw(*s, dtype=d, device=device, what=n) for n, (s, d) in sizes.items()}


def tuple_of(result):
    return result if isinstance(result, tuple) else (result,)


def run(function, inputs, grads, eps=1e-5):
    """Outputs and gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    outputs = tuple_of(function(**leaves, eps=eps))
    found = torch.autograd.grad(outputs, list(leaves.values()), grads[: len(outputs)])
    names = ["output", "sum"][: len(outputs)] + [f"grad_{n}" for n in leaves]
    return dict(zip(names, [*(t.detach() for t in outputs), *found], strict=True))


def check(function, inputs, grads):
    with uninitialized_is_nan():
        found = run(function, inputs, grads)
    wide = {n: t.double() for n, t in inputs.items()}
    truth = run(twin(function), wide, [g.double() for g in grads])
    for name, t in found.items():
        like = {"output": "input", "sum": "residual"}
        of = inputs[like.get(name, name.removeprefix("grad_"))]
        assert (t.dtype, t.shape) == (of.dtype, of.shape), name
        error = (t.double() - truth[name]).abs().max() if t.numel() else 0
        largest = truth[name].abs().max() if t.numel() else 0
        bound = BOUNDS[t.dtype]
        if "gated" in function.__name__:  # the sum is rounded, and so is its gradient
            bound = 2 * max(bound, BOUNDS[inputs["input"].dtype])
        assert error <= bound * largest + 1e-30, f"{name}: {error / largest:.3g} of the largest"


SHAPES = {
    (6, 40): [(40,), (6, 40), (1, 40)],
    (2, 5, 33): [(33,), (2, 33), (2, 1, 33), (1, 33), (2, 5, 33)],
    (2, 3, 7, 16): [(16,), (2, 16), (2, 1, 1, 16), (2, 3, 16), (2, 3, 1, 16), (2, 3, 7, 16)],
    (3, 200, 64): [(64,), (3, 64), (3, 200, 64)],
    (150, 2, 8): [(150, 8)],
    (1, 9, 24): [(1, 24), (1, 1, 24), (1, 9, 24)],
    (4, 1, 24): [(4, 24), (4, 1, 24)],
    (2, 3, 5000): [(5000,), (2, 5000), (2, 3, 5000)],
    (2, 3, 20000): [(2, 20000), (2, 3, 20000)],
    (0, 5, 8): [(8,), (0, 8)],
    (2, 0, 8): [(8,), (2, 8), (2, 0, 8)],
    (2, 3, 0): [(0,), (2, 0)],
}


@pytest.mark.parametrize(
    ("shape", "entries"), [(s, e) for s, all in SHAPES.items() for e in all], ids=str
)
def test_every_shape_of_entries(function, shape, entries, device):
    for dtype in (F32, BF16):
        inputs = arguments(function, shape, entries, dtype, device=device)
        check(function, inputs, [draw(*shape, dtype=dtype, device=device, what=i) for i in (0, 1)])


@pytest.mark.parametrize(
    ("rows", "entries", "params"), list(itertools.product((F16, BF16, F32), repeat=3))
)
def test_any_dtypes_together(function, rows, entries, params, device):
    shape = (2, 7, 48)
    for of in ((2, 48), shape):
        inputs = arguments(function, shape, of, rows, entries, params, device)
        check(function, inputs, [draw(*shape, dtype=rows, device=device, what=i) for i in (0, 1)])


@pytest.mark.parametrize("rows", [F16, BF16])
@pytest.mark.parametrize("function", FUNCTIONS[2:], ids=lambda f: f.__name__)
def test_a_residual_of_float32_beside_16_bits(function, rows, device):
    """As under autocast, where the residual stream stays in float32."""
    for shape, entries in SHAPES.items():
        for of in entries:
            for params in (F32, rows):
                inputs = arguments(function, shape, of, rows, params, params, device, F32)
                grads = [
                    draw(*shape, dtype=t, device=device, what=i) for i, t in enumerate((rows, F32))
                ]
                check(function, inputs, grads)


def test_shift_of_another_dtype(device):
    inputs = arguments(fused_modulated_layer_norm, (2, 7, 48), (2, 48), BF16, device=device)
    inputs["shift"] = inputs["shift"].float() + 1e-4
    check(fused_modulated_layer_norm, inputs, [draw(2, 7, 48, dtype=BF16, device=device)])


@pytest.mark.parametrize("absent", [{"shift"}, {"weight"}, {"bias"}, {"shift", "weight", "bias"}])
@pytest.mark.parametrize("entries", [(8,), (2, 8), (2, 5, 8)], ids=str)
def test_absent_arguments(function, absent, entries, device):
    inputs = arguments(function, (2, 5, 8), entries, F64, device=device)
    inputs = {n: t for n, t in inputs.items() if n not in absent}
    check(function, inputs, [draw(2, 5, 8, dtype=F64, device=device, what=i) for i in (0, 1)])


def test_it_is_the_norm_and_then_the_modulation(device):
    """Where nothing is rounded in between, that of a model's own operations."""
    x, scale, shift = (draw(2, 7, 48, dtype=F64), draw(2, 48, dtype=F64), draw(2, 48, dtype=F64))
    found = fused_modulated_layer_norm(x, scale, shift, eps=1e-6)
    expected = torch.nn.functional.layer_norm(x, (48,), eps=1e-6)
    assert_same(found, expected * (1 + scale[:, None]) + shift[:, None])


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gated_residual_is_a_sum_that_is_normalised(norm, device):
    gated = getattr(fused_op, f"fused_gated_add_{norm}")
    alone = getattr(fused_op, f"fused_modulated_{norm}")
    for entries in ((40,), (3, 40), (3, 5, 40)):
        inputs = arguments(gated, (3, 5, 40), entries, BF16, device=device)
        output, sum = gated(**inputs, eps=1e-6)
        assert torch.equal(
            sum, reference.gated_sum(*[inputs[n] for n in ("input", "residual", "gate")])
        )
        rest = {n: t for n, t in inputs.items() if n not in ("input", "residual", "gate")}
        assert torch.equal(output, alone(sum, **rest, eps=1e-6))


PROJECTIONS = {
    "sample": ((2, 6 * 64), lambda t: t.chunk(6, -1)),
    "token": ((2, 5, 6 * 64), lambda t: t.chunk(6, -1)),
    "of a stack": ((2, 5, 6, 64), lambda t: t.unbind(2)),
    "frame": ((2, 6, 64), lambda t: t.chunk(6, 1)),
}


def copies(call):
    with torch.profiler.profile() as profile:
        call()
    return {e.key for e in profile.key_averages()} & {
        "aten::clone",
        "aten::copy_",
        "aten::contiguous",
    }


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_chunks_of_a_projection_are_read_where_they_are(function, kind):
    size, cut = PROJECTIONS[kind]
    projection = draw(*size)
    chunks = cut(projection)
    inputs = arguments(function, (2, 5, 64), tuple(chunks[0].shape))
    names = [n for n in ("gate", "scale", "shift") if n in inputs]
    dense = run(function, inputs | dict(zip(names, [c.clone() for c in chunks], strict=False)),
                [draw(2, 5, 64)] * 2)  # fmt: skip
    inputs |= dict(zip(names, chunks, strict=False))
    assert chunks[1].data_ptr() == projection.data_ptr() + 64 * 4
    assert copies(lambda: function(**inputs)) == set()
    found = run(function, inputs, [draw(2, 5, 64)] * 2)
    for name, t in found.items():
        assert torch.equal(t, dense[name]), name
    assert copies(lambda: function(**inputs | {"scale": inputs["scale"].mT.contiguous().mT}))


@pytest.mark.parametrize("shape", [(3, 300, 40), (700, 2, 40), (1, 900, 40)], ids=str)
def test_bits_do_not_depend_on_threads(function, shape, threads):
    for entries in ((40,), (shape[0], 40), shape):
        inputs = arguments(function, shape, entries)
        grads = [draw(*shape, what=i) for i in (0, 1)]
        threads(1)
        expected = run(function, inputs, grads)
        for count in (2, 5):
            threads(count)
            for name, t in run(function, inputs, grads).items():
                assert torch.equal(t, expected[name]), name


@pytest.mark.parametrize("entries", [(5,), (2, 5), (2, 3, 5)], ids=str)
def test_gradients_of_two_orders(function, entries, device):
    inputs = arguments(function, (2, 3, 5), entries, F64, device=device)
    leaves = [t.requires_grad_() for t in inputs.values()]

    def call(*tensors):
        return function(**dict(zip(inputs, tensors, strict=True)), eps=1e-2)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("entries", [(8,), (2, 8), (2, 5, 8)], ids=str)
def test_gradients_for_what_requires_them(function, entries, device):
    inputs = arguments(function, (2, 5, 8), entries, device=device)
    grads = [draw(2, 5, 8, device=device, what=i) for i in (0, 1)]
    everything = run(function, inputs, grads)
    for count in (1, 2):
        for names in itertools.combinations(inputs, count):
            leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
            outputs = [t for t in tuple_of(function(**leaves, eps=1e-5)) if t.requires_grad]
            # A sum that nothing of it requires a gradient for is none of autograd's.
            found = torch.autograd.grad(
                outputs, [leaves[n] for n in names], grads[: len(outputs)], allow_unused=True
            )
            for name, t in zip(names, found, strict=True):
                assert_same(t, everything[f"grad_{name}"], rtol=0, atol=0)


@pytest.mark.parametrize("of_entries", [BF16, F32], ids=str)
def test_rows_have_the_same_bits_where_entries_have_one_row_each(function, of_entries, device):
    """Catches another way of computing for entries of one row: alone, and one for each sample."""
    together = arguments(function, (3, 40, 1000), (3, 1000), BF16, of_entries, F32, device)
    grads = [draw(3, 40, 1000, dtype=BF16, device=device, what=f"grad{i}") for i in range(2)]
    of_rows = ("output", "sum", "grad_input", "grad_residual")
    expected = run(function, together, grads)
    for token in range(40):
        rows = {n: t[:, token : token + 1] if t.dim() == 3 else t for n, t in together.items()}
        found = run(function, rows, [g[:, token : token + 1] for g in grads])
        for name in of_rows:
            if name in found:
                same = torch.equal(found[name], expected[name][:, token : token + 1])
                assert same, f"{name} of token {token}"
        one = {n: t[:1] if t.dim() > 1 else t for n, t in rows.items()}
        alone = run(function, one, [g[:1, token : token + 1] for g in grads])
        for name in of_rows:
            assert name not in found or torch.equal(alone[name], found[name][:1]), name


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs(used, device):
    for entries in ((2, 8), (2, 5, 8)):
        inputs = arguments(fused_gated_add_layer_norm, (2, 5, 8), entries, F64, device=device)
        leaves = [t.requires_grad_() for t in inputs.values()]
        functions = fused_gated_add_layer_norm, reference.fused_gated_add_layer_norm
        outputs = [f(**inputs)[used].square().sum() for f in functions]
        found, truth = (torch.autograd.grad(y, leaves, allow_unused=True) for y in outputs)
        for mine, right in zip(found, truth, strict=True):
            assert_same(mine, torch.zeros_like(mine) if right is None else right)


@pytest.mark.parametrize("rows", [F32, BF16])
def test_gated_ops(rows, device):
    for entries in ((2, 8), (2, 5, 8)):
        inputs = arguments(
            fused_gated_add_layer_norm, (2, 5, 8), entries, rows, device=device, residual=F32
        )
        leaves = {n: t.requires_grad_() for n, t in inputs.items()}
        ops = [f"fused_op.gated_add_norm_{way}.default" for way in ("forward", "backward")]
        with Seen(*ops) as seen:
            sum(t.sum() for t in fused_gated_add_layer_norm(**leaves)).backward()
        assert [str(func) for func, _ in seen.calls] == ops
        for func, args in seen.calls:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(func, detached)


@pytest.mark.parametrize("rows", [F32, BF16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gated_compiles(dynamic, rows, device):
    torch._dynamo.reset()
    graphs = Graphs()
    inputs = arguments(
        fused_gated_add_rms_norm, (2, 5, 8), (2, 8), rows, device=device, residual=F32
    )
    leaves = [t.requires_grad_() for t in inputs.values()]
    compiled = torch.compile(
        fused_gated_add_rms_norm, fullgraph=True, dynamic=dynamic, backend=graphs
    )
    eager, result = fused_gated_add_rms_norm(*leaves), compiled(*leaves)
    assert_same(result, eager, rtol=0, atol=0)
    losses = [sum(t.square().sum() for t in outputs) for outputs in (eager, result)]
    expected, found = (torch.autograd.grad(loss, leaves) for loss in losses)
    assert_same(found, expected, rtol=0, atol=0)
    ops = [f"fused_op.gated_add_norm_{way}.default" for way in ("forward", "backward")]
    assert [graphs.names.count(op) for op in ops] == [1, 1]


def test_gated_by_the_formula(device):
    inputs = arguments(fused_gated_add_layer_norm, (2, 5, 8), (2, 8), device=device)
    leaves = [t.requires_grad_() for t in inputs.values()]
    outputs = fused_gated_add_layer_norm(*leaves)
    with fused_op.disabled():
        assert_same(fused_gated_add_layer_norm(*leaves), outputs)
    many = [torch.stack([t, 2 * t]).detach() for t in leaves]
    each = [fused_gated_add_layer_norm(*row) for row in zip(*many, strict=True)]
    found = torch.func.vmap(fused_gated_add_layer_norm)(*many)
    assert_same(found, tuple(torch.stack(t) for t in zip(*each, strict=True)))


X = torch.ones(2, 3, 8)
S = torch.ones(2, 8)
WRONG_ENTRIES = [
    (torch.ones(3, 8), "the shape of scale must be the first dimensions of input"),
    (torch.ones(1, 3, 8), "the shape of scale must be the first dimensions of input"),
    (torch.ones(2, 7), "then ones, then the last dimension, got"),
    (torch.ones(2, 1, 1, 8), "expand or reshape it"),
    (torch.ones(2, 8).double(), "both or none must be float64"),
    (torch.ones(2, 8).long(), "not implemented for"),
    (torch.ones(()), "scale must have at least one dimension"),
]


@pytest.mark.parametrize(("scale", "sentence"), WRONG_ENTRIES, ids=lambda v: str(v)[:20])
def test_entries_that_are_refused(scale, sentence):
    name = "fused_modulated_layer_norm"
    error = NotImplementedError if scale.dtype == torch.long else RuntimeError
    with pytest.raises(error, match=f"{name}: .*{sentence}"):
        fused_modulated_layer_norm(X, scale)
    with fused_op.disabled(), pytest.raises(error, match=f"{name}: .*{sentence}"):
        fused_modulated_layer_norm(X, scale)


CALL_ERRORS = [
    (RuntimeError, "residual must have the shape of input", (X, X[:1], S, S)),
    (RuntimeError, "residual must have the dtype of input, .*, got", (X, X.half(), S, S)),
    (RuntimeError, "residual must .*, or .*, got", (X.half(), X.bfloat16(), S, S)),
    (RuntimeError, "gate must have entries for the same rows as scale", (X, X, S[0], S)),
    (RuntimeError, "shift must have entries for the same rows as scale", (X, X, S, S, S[0])),
    (RuntimeError, "Expected weight to be of same shape", (X, X, S, S, S, S)),
    (RuntimeError, "mixed dtype: expect parameter", (X, X, S, S, S, S[0].long())),
    (TypeError, "argument 'gate' must be Tensor, not NoneType", (X, X, None, S)),
    (TypeError, "argument 'residual' must be Tensor, not int", (X, 1, S, S)),
]


@pytest.mark.parametrize(("error", "sentence", "tensors"), CALL_ERRORS, ids=lambda v: str(v)[:20])
def test_calls_that_are_refused(error, sentence, tensors):
    name = "fused_gated_add_layer_norm"
    with pytest.raises(error, match=f"{name}: {sentence}"):
        fused_gated_add_layer_norm(*tensors)
    with fused_op.disabled(), pytest.raises(error, match=f"{name}: {sentence}"):
        fused_gated_add_layer_norm(*tensors)


def test_backward_refuses_other_gradients():
    stats = torch.ones(2, 6)
    op = torch.ops.fused_op.modulated_norm_backward
    with pytest.raises(RuntimeError, match="grad_output must have the dtype of input"):
        op(X.half(), X, S, None, None, None, stats, "layer_norm", [True] * 5)
    with pytest.raises(RuntimeError, match="rms_norm has no bias"):
        op(X, X, S, None, None, S[0], stats, "rms_norm", [True] * 5)


def test_backward_of_a_shift_that_is_absent():
    """Catches a crash where a caller of the op wants every gradient."""
    op = torch.ops.fused_op
    _, stats = op.modulated_norm_forward(X, S, None, None, None, "layer_norm", 1e-5, True)
    of_zeros = op.modulated_norm_backward(
        X, X, S, torch.zeros_like(S), None, None, stats, "layer_norm", [True] * 5
    )
    found = op.modulated_norm_backward(X, X, S, None, None, None, stats, "layer_norm", [True] * 5)
    assert_same(found, of_zeros)


@pytest.mark.parametrize("entries", [(2, 8), (2, 5, 8)], ids=str)
def test_derivatives_by_one_argument_alone(function, entries, device):
    """Catches an output that depends on no tensor with a gradient, where a formula takes over."""

    def derivatives(function, inputs, name, late):
        leaf = inputs[name].detach().requires_grad_()
        total = sum(t.square().sum() for t in tuple_of(function(**inputs | {name: leaf})))
        with fused_op.disabled() if late else contextlib.nullcontext():
            (first,) = torch.autograd.grad(total, leaf, create_graph=not late)
        return (first,) if late else (first, *torch.autograd.grad(first.square().sum(), leaf))

    inputs = arguments(function, (2, 5, 8), entries, F64, device=device)
    for name, late in itertools.product(inputs, (False, True)):
        found, right = (derivatives(f, inputs, name, late) for f in (function, twin(function)))
        assert_same(found, right)
