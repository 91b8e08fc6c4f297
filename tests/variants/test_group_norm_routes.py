"""The ways to the group norm: autograd, compilers, transforms, subclasses, and what it refuses.

Catches a way around the kernels that computes something else, a gradient that is lost or computed
for nobody, and a mistake of a user that is computed with.
"""

import warnings

import pytest
import torch
from torch.library import opcheck

import fused_op
from fused_op import _group_norm, fused_group_norm
from tests.calls import Calls, assert_same, loss, take_kernels_away
from tests.contexts.graphs import Graphs
from tests.ops import BF16, F32, F64, Pair
from tests.variants.group_norm import GROUPS, NAMES, SMALL, arguments, fused, reference
from tests.variants.table import run
from tests.variants.test_variants import Recorded, Seen

OPS = ("fused_op.group_norm_forward.default", "fused_op.group_norm_backward.default")


@pytest.fixture(params=[None, "silu"], ids=str)
def activation(request):
    return request.param


def test_gradcheck_of_every_order_and_mode(activation, device):
    for shape in ((2, 4, 3), (2, 4)):
        inputs = list(arguments(shape, Pair(F64, F64), device, requires_grad=True).values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vmap's fallback
            assert torch.autograd.gradcheck(
                fused(2, activation), inputs, check_forward_ad=True, check_batched_grad=True,
                check_batched_forward_grad=True,
            )  # fmt: skip
            assert torch.autograd.gradgradcheck(
                fused(2, activation), inputs, check_fwd_over_rev=True
            )


def test_gradients_for_what_requires_them(activation):
    """Each alone, and all but each."""
    inputs = arguments(SMALL, Pair(F32, F32))
    everything = run(fused(GROUPS, activation), inputs, torch.ones(SMALL), {})
    for name in NAMES:
        for names in ([name], [other for other in NAMES if other != name]):
            leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
            found = fused(GROUPS, activation)(**leaves)
            grads = torch.autograd.grad(found, [leaves[n] for n in names], torch.ones(SMALL))
            expected = [everything[f"grad_{n}"] for n in names]
            assert_same(tuple(grads), tuple(expected), rtol=0, atol=0)
    assert not fused(GROUPS, activation)(**inputs).requires_grad


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(activation, dynamic, device):
    torch._dynamo.reset()
    graphs = Graphs()
    call = fused(GROUPS, activation)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=graphs)
    inputs = list(arguments(SMALL, Pair(F32, F32), device, requires_grad=True).values())
    eager, result = call(*inputs), compiled(*inputs)
    assert_same(result, eager, rtol=0, atol=0)
    expected = torch.autograd.grad(loss(eager), inputs)
    assert_same(torch.autograd.grad(loss(result), inputs), expected, rtol=0, atol=0)
    assert [graphs.names.count(op) for op in OPS] == [1, 1]
    inputs[0] = inputs[0].detach().to(memory_format=torch.channels_last)
    found = compiled(*inputs)
    assert_same(found, call(*inputs), rtol=0, atol=0)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_compiled_entries_with_ones(device):
    """Catches entries that are compared with what the op is given, and not with the input."""
    torch._dynamo.reset()
    call = torch.compile(fused_op.fused_group_norm, backend="aot_eager", fullgraph=True)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 5, 3, device=device).contiguous(memory_format=memory_format)
        x, scale = x.requires_grad_(), torch.randn(2, 4, 1, 1, device=device, requires_grad=True)
        results = [f(x, 2, scale=scale) for f in (fused_op.fused_group_norm, call)]
        assert_same(*results, rtol=0, atol=0)
        grads = [torch.autograd.grad(loss(result), (x, scale)) for result in results]
        assert_same(*grads, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"scale.* must have shape|ExceptionVar"):  # torch 2.7
        call(x, 2, scale=scale.detach().flatten(2))


def test_opcheck(activation, pair, device):
    """The ops with the arguments that the function gives them."""
    for shape in (SMALL, (2, 6, 0, 3)):
        inputs = arguments(shape, pair, device, requires_grad=True)
        with Seen(*OPS) as seen:
            loss(fused(GROUPS, activation)(**inputs)).backward()
        assert [str(func) for func, _ in seen.calls] == [*OPS]
        for func, args in seen.calls:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(func, detached)


def test_the_op_itself_refuses_to_be_recorded():
    """Its derivative is the function's: recorded past it, the gradient would be zeros."""
    x = torch.ones(SMALL, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative"):
        none = (None,) * 4
        output, _ = torch.ops.fused_op.group_norm_forward(x, *none, GROUPS, 1e-5, None, True)
        output.sum().backward()


def test_transforms(activation, device):
    inputs = list(arguments((2, 4, 3), Pair(F64, F64), device).values())
    every = tuple(range(len(inputs)))
    calls = fused(2, activation), reference(2, activation)
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        found, truth = (transform(f, every)(*inputs) for f in calls)
        assert_same(found, truth)
    many = [torch.stack([t, 2 * t, t - 1]) for t in inputs]
    each = [calls[0](*row) for row in zip(*many, strict=True)]
    assert_same(torch.func.vmap(calls[0])(*many), torch.stack(each))
    assert_same(torch.func.functionalize(calls[0])(*inputs), calls[0](*inputs))


@pytest.mark.filterwarnings("ignore")
def test_trace_and_export(activation):
    first, second = ([*arguments(SMALL, Pair(F32, F32)).values()] for _ in range(2))
    second[0] = second[0] + 1
    call = fused(GROUPS, activation)
    traced = torch.jit.trace(lambda *a: call(*a), tuple(first))
    assert "fused_op::" not in str(traced.graph)
    assert_same(traced(*second), call(*second))

    class Module(torch.nn.Module):
        def forward(self, *a):
            return call(*a)

    program = torch.export.export(Module(), tuple(first))
    assert_same(program.module()(*second), call(*second))


def test_disabled_and_missing_kernels_run_the_formula(activation, monkeypatch):
    inputs = arguments(SMALL, Pair(F32, F32))
    expected = run(fused(GROUPS, activation), inputs, torch.ones(SMALL), {})
    with fused_op.disabled(), Calls() as calls:
        found = run(fused(GROUPS, activation), inputs, torch.ones(SMALL), {})
    assert not any("fused_op" in name for name in calls.names)
    assert_same(tuple(found.values()), tuple(expected.values()))
    take_kernels_away(_group_norm._GROUP_NORM, monkeypatch)
    with pytest.warns(UserWarning, match="a kernel is not available: of this test"):
        found = run(fused(GROUPS, activation), inputs, torch.ones(SMALL), {})
    assert_same(tuple(found.values()), tuple(expected.values()))


def test_autocast_and_torch_function():
    inputs = arguments(SMALL, Pair(BF16, F32))
    with torch.autocast("cpu", BF16):
        assert fused(GROUPS)(**inputs).dtype == BF16
        assert fused(GROUPS)(**arguments(SMALL, Pair(F32, F32))).dtype == F32
    for name in NAMES:
        Recorded.seen.clear()
        found = fused(GROUPS)(**(inputs | {name: inputs[name].as_subclass(Recorded)}))
        assert fused_group_norm in Recorded.seen
        assert type(found) is Recorded
        assert torch.equal(found.as_subclass(torch.Tensor), fused(GROUPS)(**inputs))


REFUSED = {
    "argument 'input' must be Tensor, not": (TypeError, {"input": [1.0]}),
    "argument 'eps' must be float, not str": (TypeError, {"eps": "1"}),
    "argument 'num_groups' must be int, not float": (TypeError, {"num_groups": 2.0}),
    "argument 'num_groups' must be int, not bool": (TypeError, {"num_groups": True}),
    "argument 'weight' must be Tensor, not float": (TypeError, {"weight": 1.0}),
    "argument 'scale' must be Tensor, not float": (TypeError, {"scale": 1.0}),
    "argument 'activation' must be str or None, not int": (TypeError, {"activation": 1}),
    "activation must be 'silu' or None, got 'gelu'": (ValueError, {"activation": "gelu"}),
    "eps must be finite, got": (ValueError, {"eps": float("inf")}),
    "Expected num groups to be greater than 0, got 0": (RuntimeError, {"num_groups": 0}),
    "Expected number of channels in input to be divisible by num_groups": (
        RuntimeError, {"num_groups": 4},
    ),
    "not implemented for": (NotImplementedError, {"input": torch.ones(2, 6).long()}),
    "input must be a dense": (RuntimeError, {"input": torch.ones(2, 6).to_sparse()}),
    r"input must .*two dimensions.*got shape \[\]": (RuntimeError, {"input": torch.ones(())}),
    "input must have at least two dimensions": (RuntimeError, {"input": torch.ones(6)}),
    "Expected weight to be of same shape": (RuntimeError, {"weight": torch.ones(4)}),
    "Expected bias to be of same shape": (RuntimeError, {"bias": torch.ones(6, 1)}),
    "mixed dtype: expect parameter": (RuntimeError, {"bias": torch.ones(6).long()}),
    "weight: Tensor on device meta": (RuntimeError, {"weight": torch.ones(6, device="meta")}),
    "shift: Tensor on device meta": (RuntimeError, {"shift": torch.ones(2, 6, device="meta")}),
    "scale of .* does not fit": (RuntimeError, {"scale": torch.ones(2, 6).double()}),
    r"scale must have shape \[2, 6\]": (RuntimeError, {"scale": torch.ones(1, 6)}),
    r"shift must have shape \[2, 6\]": (RuntimeError, {"shift": torch.ones(2, 6, 1)}),
    r"shift must have shape .* got \[2, 6, 3, 4\]": (RuntimeError, {"shift": torch.ones(SMALL)}),
    "not implemented for '.*': scale": (
        NotImplementedError, {"scale": torch.ones(2, 6).long()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_refused(sentence):
    error, changed = REFUSED[sentence]
    given = {
        "input": torch.ones(SMALL), "num_groups": GROUPS, "weight": torch.ones(6),
        "bias": torch.ones(6), "scale": torch.ones(2, 6), "shift": torch.ones(2, 6),
    }  # fmt: skip
    for last in (False, True):
        if last and "input" not in changed:
            given["input"] = given["input"].to(memory_format=torch.channels_last)
        with pytest.raises(error, match=f"fused_group_norm: {sentence}"):
            fused_group_norm(**(given | changed))
        with fused_op.disabled(), pytest.raises(error, match=f"fused_group_norm: {sentence}"):
            fused_group_norm(**(given | changed))


def test_what_the_ops_refuse():
    x, stats, none = torch.ones(SMALL), torch.ones(2, 6), (None,) * 4
    backward = torch.ops.fused_op.group_norm_backward
    forward = torch.ops.fused_op.group_norm_forward
    wanted = (True,) * 5
    scale, wide = torch.ones(2, 6), torch.ones(2, 6).double()
    for sentence, call in {
        "grad_output must have the shape of input": (backward, x[:1], x, *none, stats, 3),
        "grad_output must have the dtype of input": (backward, x.double(), x, *none, stats, 3),
        "stats must be what norm_forward returned": (backward, x, x, *none, stats[:1], 3),
        "input must have at least two dimensions": (forward, x[0, 0, 0], *none, 3),
        "Expected num groups to be greater than 0, got -1": (forward, x, *none, -1),
        "to be divisible by num_groups": (forward, x, *none, 5),
        "scale must have shape": (forward, x, None, None, scale[:1], None, 3),
        "shift must have shape": (forward, x, None, None, scale, x, 3),
        "scale of Double does not fit input of Float": (forward, x, None, None, wide, None, 3),
        "Expected weight to be of same shape": (forward, x, scale, None, None, None, 3),
    }.items():
        op, *arguments_ = call
        options = (None, wanted) if op is backward else (1e-5, None, False)
        with pytest.raises(RuntimeError, match=sentence):
            op(*arguments_, *options)
    with pytest.raises(ValueError, match="activation must be 'silu' or None, got 'tanh'"):
        forward(x, *none, 3, 1e-5, "tanh", False)
    with pytest.raises(ValueError, match="eps must be finite"):
        forward(x, *none, 3, float("nan"), None, False)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("spatial", [(5,), (3, 5), (2, 3, 2)], ids=str)
def test_transforms_of_every_layout(spatial, last, device):
    """Catches a question about layout that no tensor of a transform answers."""
    x = torch.randn(2, 3, 4, *spatial, device=device)
    x = x.movedim(2, -1).contiguous().movedim(-1, 2) if last else x

    def call(image):
        return fused_op.fused_group_norm(image, 2, activation="silu")

    def total(image):
        return loss(call(image))

    expected = torch.stack([call(image) for image in x])
    assert_same(torch.func.vmap(call)(x), expected)
    gradients = torch.stack([torch.func.grad(total)(image) for image in x])
    assert_same(torch.func.vmap(torch.func.grad(total))(x), gradients, rtol=1e-4, atol=1e-5)
    found, _ = torch.func.jvp(call, (x[0],), (x[1],))
    assert_same(found, expected[0], rtol=1e-4, atol=1e-5)
