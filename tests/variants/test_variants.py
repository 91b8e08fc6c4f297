"""What every variant has to answer, each with each of its options: tests/variants/table.py.

Catches a kernel that is wrong for a shape, a layout or a dtype, and a way around the kernels
(transforms, compilation, a second derivative, `disabled()`) that computes something else.
"""

import warnings
from typing import ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op
from fused_op_cuda import KernelError
from tests.calls import Calls, assert_same, loss, outputs, take_kernels_away
from tests.contexts.graphs import Graphs, opchecks
from tests.ops import BF16, F32, F64, Pair, subsets
from tests.variants.table import CALLS, bound, check, grads_of, run

SHAPES = [
    (0, 8), (3, 0), (1, 1), (5, 1), (7, 2), (9, 3), (3, 5), (2, 31), (17, 33), (6, 128),
    (3, 4, 256), (2, 1000), (2, 4096), (3, 4999), (1, 40000),
]  # fmt: skip
WIDE = Pair(F64, F64)
SMALL = (3, 4, 6)


def named(call):
    variant, options = call
    return "-".join([variant.name, *(f"{k}={v}" for k, v in options.items())])


def test_compiled_beside_meta():
    """Catches memory that nothing wrote."""
    x, gate = torch.randn(2, 8), torch.randn(2, 8, device="meta")
    for one, other in ((x, gate), (gate, x)):
        with pytest.raises(RuntimeError, match="gate: Tensor on device"):
            torch.compile(fused_op.fused_gated_rms_norm, backend="eager")(one, other)


@pytest.fixture(params=CALLS, ids=named)
def call(request):
    return request.param


class Seen(TorchDispatchMode):
    """The calls of some ops, with their arguments."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.calls = names, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in self.names:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numerics(call, pair, shape, device):
    variant, options = call
    inputs = variant.arguments(shape, pair, device)
    check(variant, inputs, torch.randn(shape, device=device).to(pair.rows), options)


def test_gradcheck_of_every_order_and_mode(call, device):
    variant, options = call
    inputs = list(variant.arguments((3, 6), WIDE, device, requires_grad=True).values())
    fused = bound(variant, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap's fallback
        assert torch.autograd.gradcheck(
            fused, inputs, check_forward_ad=True, check_batched_grad=True,
            check_batched_forward_grad=True,
        )  # fmt: skip
        assert torch.autograd.gradgradcheck(fused, inputs, check_fwd_over_rev=True)


def test_third_derivative(call):
    variant, options = call
    inputs = list(variant.arguments((2, 5), WIDE, requires_grad=True).values())

    def third(function):
        y = function(*inputs)
        for _ in range(3):
            (y,) = torch.autograd.grad(loss(y), inputs[0], create_graph=True)
        return y

    assert_same(third(bound(variant, options)), third(bound(variant, options, "reference")))


def test_one_tensor_as_every_row_argument(call):
    """Catches a second derivative that counts a tensor twice, once for each argument."""
    variant, options = call
    inputs = variant.arguments((3, 6), WIDE, requires_grad=True)
    x = inputs["input"]
    same = [x if name in variant.rows else t for name, t in inputs.items()]
    assert torch.autograd.gradgradcheck(
        lambda x: bound(variant, options)(*[x if t is same[0] else t for t in same]), [x]
    )


@pytest.mark.parametrize("wanted", ["some", "none"])
def test_gradients_for_what_requires_them(call, wanted):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32))
    everything = run(variant.fused, inputs, torch.ones(SMALL), options)
    for names in subsets(variant.inputs):
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
        found = outputs(variant.fused(**leaves, **options))
        assert all(y.requires_grad == bool(names) for y in found)
        if names:
            given = grads_of(found, torch.ones(SMALL))
            grads = torch.autograd.grad(found, [leaves[n] for n in names], given)
            expected = [everything[f"grad_{n}"] for n in names]
            assert_same(tuple(grads), tuple(expected), rtol=0, atol=0)


LAYOUTS = {
    "rows apart": lambda t: t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])[..., : t.shape[-1]],
    "misaligned": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape),
    "heads": lambda t: t.new_zeros(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1),
    "columns": lambda t: t.new_zeros(*t.shape[:-2], t.shape[-1], t.shape[-2]).mT,
    "packed": lambda t: t.new_zeros(t.shape[0], t.shape[1] * 3, t.shape[2])[:, 1::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [5, 64])
@pytest.mark.parametrize("rows_dtype", [BF16, F32], ids=["bf16", "f32"])
def test_layouts_give_the_same_bits(call, layout, cols, rows_dtype, device):
    variant, options = call
    shape = (4, 6, cols)
    inputs = variant.arguments(shape, Pair(rows_dtype, rows_dtype), device)
    grad = torch.randn(shape, device=device).to(rows_dtype)
    expected = run(variant.fused, inputs, grad, options)
    for name in (*variant.rows, "grad"):
        args = inputs | {"grad": grad}
        args[name] = LAYOUTS[layout](args[name]).copy_(args[name])
        found = run(
            variant.fused, {n: t for n, t in args.items() if n != "grad"}, args["grad"], options
        )
        for result, t in found.items():
            assert torch.equal(t, expected[result]), f"{result} of a strided {name}"


@pytest.mark.parametrize("cols", [33, 128, 1000])
def test_a_row_has_the_same_bits_in_every_batch(call, cols, pair, device):
    variant, options = call
    inputs = variant.arguments((200, cols), pair, device)
    grad = torch.randn(200, cols, device=device).to(pair.rows)
    everything = run(variant.fused, inputs, grad, options)
    again = run(variant.fused, inputs, grad, options)
    for name, t in everything.items():
        assert torch.equal(t, again[name]), name
    for part in (slice(0, 1), slice(3, 50), slice(199, 200)):
        rows = {n: t[part] if n in variant.rows else t for n, t in inputs.items()}
        found = run(variant.fused, rows, grad[part], options)
        for name in (*variant.outputs, *(f"grad_{n}" for n in variant.rows)):
            assert torch.equal(found[name], everything[name][part]), name


@pytest.mark.parametrize("shape", [(600, 130), (3, 40_000)], ids=str)
def test_threads_change_no_bit(call, shape, threads):
    """Catches partial sums per thread, and rows or columns that no thread takes."""
    variant, options = call
    inputs = variant.arguments(shape, Pair(F32, F32))
    grad = torch.randn(shape)
    threads(1)
    expected = run(variant.fused, inputs, grad, options)
    for count in (2, 3):
        threads(count)
        for name, t in run(variant.fused, inputs, grad, options).items():
            assert torch.equal(t, expected[name]), f"{name} of {count} threads"


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e18, 1e30])
def test_extreme_numbers(call, scale, device):
    variant, options = call
    inputs = variant.arguments((4, 40), Pair(F32, F32), device)
    inputs["input"] = inputs["input"] * scale
    found = [y.to(F64) for y in outputs(variant.fused(**inputs, **options))]
    wide = {n: t.to(F64) for n, t in inputs.items()}
    truth = outputs(variant.reference(**wide, **options))
    scales = variant.condition(wide, torch.ones_like(truth[0]), options)
    for name, y, true in zip(variant.outputs, found, truth, strict=True):
        assert ((y - true).abs() <= 1e-5 * scales[name] + 1e-37).all(), name


def test_nan_and_zeros_stay_in_their_rows(call, device):
    variant, options = call
    inputs = variant.arguments((6, 40), Pair(F32, F32), device)
    inputs["input"][0] = 0
    clean = run(variant.fused, inputs, torch.ones(6, 40, device=device), options)
    assert all(t.isfinite().all() for t in clean.values())
    inputs["input"][2, 3], inputs["input"][4, 5] = float("nan"), float("inf")
    found = run(variant.fused, inputs, torch.ones(6, 40, device=device), options)
    for name in (*variant.outputs, *(f"grad_{n}" for n in variant.rows)):
        good = [0, 1, 3, 5]
        assert torch.equal(found[name][good], clean[name][good]), name
        assert found[name][2].isnan().any() != (name in variant.of_grad), name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(call, dynamic, device):
    variant, options = call
    torch._dynamo.reset()
    graphs, fused = Graphs(), bound(variant, options)
    compiled = torch.compile(fused, fullgraph=True, dynamic=dynamic, backend=graphs)
    inputs = list(variant.arguments(SMALL, Pair(F32, F32), device, requires_grad=True).values())
    eager, result = fused(*inputs), compiled(*inputs)
    assert_same(result, eager, rtol=0, atol=0)
    expected = torch.autograd.grad(loss(eager), inputs)
    assert_same(torch.autograd.grad(loss(result), inputs), expected, rtol=0, atol=0)
    assert [graphs.names.count(op) for op in variant.ops] == [1, 1]
    with torch.no_grad():
        assert_same(compiled(*inputs), eager, rtol=0, atol=0)


def test_one_program_for_every_width(call, device):
    """Catches an option that holds the number of columns: torch.compile makes code for each."""
    variant, options = call
    if "groups" in options:
        pytest.skip("its group_size, which is such a number, changes as well")
    torch._dynamo.reset()
    programs, fused = CompileCounter(), bound(variant, options)
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=programs)
    for cols in (8, 16, 24):
        inputs = variant.arguments((3, 4, cols), Pair(F32, F32), device, requires_grad=True)
        assert_same(compiled(*inputs.values()), fused(*inputs.values()), rtol=0, atol=0)
    assert programs.frame_count == 1


def test_opcheck(call, pair, device):
    """The ops with the arguments that the function gives them."""
    variant, options = call
    checks = opchecks(pair)
    for shape in ((2, 3, 6), (0, 4)):
        inputs = variant.arguments(shape, pair, device, requires_grad=True)
        with Seen(*variant.ops) as seen:
            loss(variant.fused(**inputs, **options)).backward()
        assert [str(func) for func, _ in seen.calls] == [*variant.ops]
        for func, args in seen.calls:
            # Without gradients, which are the function's.
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(func, detached, test_utils=checks)


def test_transforms(call, device):
    variant, options = call
    fused, truth = bound(variant, options), bound(variant, options, "reference")
    inputs = list(variant.arguments((3, 6), WIDE, device).values())
    every = tuple(range(len(inputs)))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_same(transform(fused, every)(*inputs), transform(truth, every)(*inputs))
    many = [torch.stack([t, 2 * t, t - 1]) for t in inputs]
    each = [outputs(fused(*row)) for row in zip(*many, strict=True)]
    assert_same(torch.func.vmap(fused)(*many), tuple(map(torch.stack, zip(*each, strict=True))))
    assert_same(torch.func.functionalize(fused)(*inputs), fused(*inputs))


def test_disabled_runs_the_formula(call):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32), requires_grad=True)
    leaves = list(inputs.values())
    outside = variant.fused(**inputs, **options)
    expected = torch.autograd.grad(loss(outside), leaves, retain_graph=True)
    with fused_op.disabled(), Calls() as calls:
        inside = variant.fused(**inputs, **options)
        found = torch.autograd.grad(loss(inside), leaves)
        late = torch.autograd.grad(loss(outside), leaves)
    assert not any("fused_op" in name for name in calls.names)
    expected = (*outputs(outside), *expected, *expected)
    assert_same((*outputs(inside), *found, *late), expected, rtol=1e-5, atol=1e-4)
    for name in variant.rows:
        rows = {n: t.mT.contiguous().mT if n == name else t for n, t in inputs.items()}
        with fused_op.disabled():
            results = outputs(variant.fused(**rows, **options))
        assert all(t.is_contiguous() for t in results), f"strided {name}"


def test_a_missing_kernel_is_said_once(call, monkeypatch):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32), requires_grad=True)
    expected = run(variant.fused, inputs, torch.ones(SMALL), options)

    take_kernels_away(variant.variant, monkeypatch)
    with pytest.warns(UserWarning, match="a kernel is not available: of this test"):
        found = run(variant.fused, inputs, torch.ones(SMALL), options)
    for name, t in found.items():
        assert_same(t, expected[name])
    monkeypatch.setenv("FUSED_OP_JIT", "require")
    with pytest.raises(KernelError, match="of this test"):
        variant.fused(**inputs, **options)


def test_autocast_changes_nothing(call):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32))
    with torch.autocast("cpu", BF16):
        assert {y.dtype for y in outputs(variant.fused(**inputs, **options))} == {F32}
        half = {n: t.to(BF16) if n in variant.rows else t for n, t in inputs.items()}
        assert {y.dtype for y in outputs(variant.fused(**half, **options))} == {BF16}


class Recorded(torch.Tensor):
    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_torch_function_gets_the_call(call):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32))
    Recorded.seen.clear()
    marked = inputs | {"input": inputs["input"].as_subclass(Recorded)}
    found = variant.fused(**marked, **options)
    assert variant.public in Recorded.seen
    assert all(type(y) is Recorded for y in outputs(found))
    plain = tuple(y.as_subclass(torch.Tensor) for y in outputs(found))
    assert_same(plain, outputs(variant.fused(**inputs, **options)))


@pytest.mark.filterwarnings("ignore")
def test_trace_and_export(call):
    variant, options = call
    first, second = ([*variant.arguments(SMALL, Pair(F32, F32)).values()] for _ in range(2))
    fused = bound(variant, options)
    traced = torch.jit.trace(lambda *a: fused(*a), tuple(first))
    assert "fused_op::" not in str(traced.graph)
    assert_same(traced(*second), fused(*second))

    class Module(torch.nn.Module):
        def forward(self, *a):
            return fused(*a)

    program = torch.export.export(Module(), tuple(first))
    assert_same(program.module()(*second), fused(*second))


def test_what_every_variant_refuses(call):
    variant, options = call
    inputs = variant.arguments(SMALL, Pair(F32, F32))
    name = f"fused_{variant.name}"
    wrong = {
        "argument 'input' must be Tensor, not": (TypeError, {"input": [1.0]}, {}),
        "argument 'eps' must be float, not str": (TypeError, {}, {"eps": "1"}),
        "eps must be finite, got": (ValueError, {}, {"eps": float("nan")}),
        "not implemented for": (NotImplementedError, {"input": torch.ones(3, 6).long()}, {}),
        "input must be a dense": (RuntimeError, {"input": torch.ones(3, 6).to_sparse()}, {}),
        "input must have at least one dimension": (RuntimeError, {"input": torch.ones(())}, {}),
    }
    for sentence, (error, tensors, more) in wrong.items():
        with pytest.raises(error, match=f"{name}: {sentence}"):
            variant.fused(**(inputs | tensors), **(options | more))
        with fused_op.disabled(), pytest.raises(error, match=f"{name}: {sentence}"):
            variant.fused(**(inputs | tensors), **(options | more))
    for argument in inputs:
        for value in (3, [1.0]):
            with pytest.raises(TypeError, match=f"{name}: argument '{argument}' must be Tensor"):
                variant.fused(**(inputs | {argument: value}), **options)


def test_the_op_itself_refuses_to_be_recorded(call):
    """Its derivative is the function's: recorded past it, the gradient would be zeros."""
    variant, options = call
    x = variant.arguments(SMALL, Pair(F32, F32), requires_grad=True)
    seen = Seen(variant.ops[0])
    with torch.no_grad(), seen:
        variant.fused(**x, **options)
    (func, args), *_ = seen.calls
    with pytest.raises(RuntimeError, match="derivative"):
        func(x["input"], *args[1:])[0].sum().backward()
