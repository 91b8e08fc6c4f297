"""Which way a call goes, and that every way gives the same answer.

A kernel reads raw pointers. A tensor whose pointer is missing or means something else (fake,
sharded, transformed, lazily negated) must be caught before; else wrong numbers follow, or a crash.
"""

import copy
import multiprocessing
import pickle
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op
import fused_op_cuda
from fused_op import fused_add_layer_norm, fused_layer_norm, reference
from tests.ops import OPS

SHAPE = (3, 4, 6)


def arguments(op, requires_grad=False, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    shapes = [SHAPE if name in ("input", "residual") else SHAPE[-1:] for name in op.inputs]
    return [
        torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad)
        for shape in shapes
    ]


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def loss(result):
    """Uses each output differently, so that no gradient is missed or swapped."""
    return sum((output * (i + 2)).square().sum() for i, output in enumerate(outputs(result)))


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(outputs(actual), outputs(expected), **tolerance)


class Calls(TorchDispatchMode):
    """The names of the operators that the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


# What reaches the kernels directly


def test_no_gradient_no_function_and_no_statistics(op):
    args = arguments(op)
    result = fused_op_cuda.norm(*binding_arguments(op, args))
    assert isinstance(result, tuple if op.adds else torch.Tensor)
    with torch.no_grad():
        for output in outputs(op.fused(*arguments(op, requires_grad=True))):
            assert output.grad_fn is None and not output.requires_grad


def binding_arguments(op, args):
    named = dict(zip(op.inputs, args, strict=True))
    tensors = [named.get(name) for name in ("input", "residual", "weight", "bias")]
    return ["layer_norm" if op.centred else "rms_norm", *tensors, 0, 1e-5]


def route(*tensors):
    x, weight = (*tensors, None)[:2]
    return fused_op_cuda.norm("layer_norm", x, None, weight, None, 0, 1e-5)


def test_routes():
    x, w = torch.randn(2, 4, 6)
    dispatch, autograd = fused_op_cuda.DISPATCH, fused_op_cuda.AUTOGRAD
    assert isinstance(route(x), torch.Tensor)
    assert isinstance(route(torch.nn.Parameter(x, requires_grad=False)), torch.Tensor)
    assert route(torch.nn.Parameter(x)) == autograd
    assert route(x, w[0].clone().requires_grad_()) == autograd
    with torch.inference_mode():
        assert isinstance(route(x.clone().requires_grad_()), torch.Tensor)
    with torch.autograd.graph.save_on_cpu(), torch.profiler.profile():
        assert isinstance(route(x), torch.Tensor)
        assert route(torch.nn.Parameter(x)) == autograd

    assert route(torch._neg_view(x)) == dispatch
    assert route(x.to("meta")) == dispatch
    assert route(x.to(torch.complex64).conj().imag) == dispatch
    assert route(TwoTensor(x, x)) == dispatch
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert route(fake) == dispatch
    assert route(fake) == dispatch
    with Calls():
        assert route(x) == dispatch

    seen = []
    torch.func.vmap(lambda row: (seen.append(route(row)), row)[1])(x)
    torch.func.grad(lambda row: (seen.append(route(row)), row.sum())[1])(x)
    torch.func.jvp(lambda row: (seen.append(route(row)), row)[1], (x,), (x,))
    torch.func.functionalize(lambda row: (seen.append(route(row)), row)[1])(x)
    torch.func.vmap(lambda row: (seen.append(route(w)), row)[1])(x)  # w is not batched
    with forward_ad.dual_level():
        seen.append(route(forward_ad.make_dual(x, x)))
        seen.append(route(x, forward_ad.make_dual(w[0], w[0])))
    assert seen == [fused_op_cuda.COMPOSITE] * 7


def test_autocast_takes_supported_dtypes_as_they_are_and_casts_others():
    x, w = torch.randn(4, 6), torch.randn(6)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(route(x.bfloat16(), w), torch.Tensor)
        assert isinstance(route(x), torch.Tensor)
        assert route(x, w.bfloat16()) == fused_op_cuda.CAST
        assert_same(fused_layer_norm(x, w.bfloat16()), fused_layer_norm(x, w.bfloat16().float()))
        mixed = fused_add_layer_norm(x.bfloat16(), x, w.double(), w.half())
        expected = fused_add_layer_norm(x.bfloat16().float(), x, w, w.half().float())
        assert_same(mixed, expected)
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            fused_layer_norm(x.long(), w)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        fused_layer_norm(x, w.bfloat16())
    assert x.dtype == torch.float32


def test_autocast_gradients_have_the_dtypes_of_the_leaves():
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(6, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        fused_layer_norm(x, w).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float16


# Everything else


def test_negated_views(op, device):
    def negated(t):
        return torch._neg_view(t) if t.dim() > 1 else t

    args = arguments(op, requires_grad=True, device=device)
    lazy = op.fused(*map(negated, args))
    real = op.fused(*(-t if t.dim() > 1 else t for t in args))
    assert_same(lazy, real)
    assert_same(torch.autograd.grad(loss(lazy), args), torch.autograd.grad(loss(real), args))


def test_meta_and_fake_tensors_have_the_shapes_of_real_ones(op, pair):
    args = arguments(op, dtype=pair.rows)
    args = [t.to(pair.params) if t.dim() == 1 else t.mT.contiguous().mT for t in args]
    expected = outputs(op.fused(*args))
    fake_mode = FakeTensorMode()
    for copies in ([t.to("meta") for t in args], [fake_mode.from_tensor(t) for t in args]):
        for output, real in zip(outputs(op.fused(*copies)), expected, strict=True):
            assert output.shape == real.shape and output.dtype == real.dtype
            assert output.stride() == real.stride()


def test_fake_tensors_with_gradients(op):
    with FakeTensorMode():
        args = arguments(op, requires_grad=True)
        loss(op.fused(*args)).backward()
        assert [t.grad.shape for t in args] == [t.shape for t in args]


def test_wrapper_subclass(op):
    args = arguments(op, requires_grad=True)
    twins = [TwoTensor(t.detach().clone(), 2 * t.detach()).requires_grad_() for t in args]
    loss(op.fused(*twins)).backward()
    loss(op.fused(*args)).backward()
    assert_same(tuple(t.grad.a for t in twins), tuple(t.grad for t in args))


def test_dispatch_mode_sees_the_ops(op):
    args = arguments(op, requires_grad=True)
    with Calls() as calls:
        loss(op.fused(*args)).backward()
    assert calls.names.count("fused_op::norm_forward") == 1
    assert calls.names.count("fused_op::norm_backward") == 1


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_torch_function(op):
    args = arguments(op)
    for i in range(len(args)):
        with_one = [t.as_subclass(Subclass) if i == j else t for j, t in enumerate(args)]
        result = op.fused(*with_one)
        assert all(type(output) is Subclass for output in outputs(result))
    with Functions() as functions:
        op.fused(*args, normalized_shape=6)
    assert functions.seen[0] is op.fused


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_torch_function_of_the_twins(name):
    twin = getattr(fused_op, name)
    x = torch.randn(4, 6)
    assert type(twin(x.as_subclass(Subclass), (6,))) is Subclass
    with Functions() as functions:
        twin(x, [6])
    assert functions.seen[0] is twin


def test_function_transforms(op, device):
    args = arguments(op, dtype=torch.float64, device=device)
    all_args = tuple(range(len(args)))

    def fused(*a):
        return loss(op.fused(*a))

    def truth(*a):
        return loss(op.reference(*a))

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_same(transform(fused, all_args)(*args), transform(truth, all_args)(*args))
    batched = [
        t.expand(5, *t.shape) * torch.arange(1, 6, device=device).view(5, *[1] * t.dim())
        for t in args
    ]
    each = [op.fused(*row) for row in zip(*batched, strict=True)]
    expected = tuple(map(torch.stack, zip(*map(outputs, each), strict=True)))
    assert_same(outputs(torch.func.vmap(op.fused)(*batched)), expected)
    per_sample = torch.func.vmap(torch.func.grad(fused, all_args))(*batched)
    assert_same(per_sample, torch.func.vmap(torch.func.grad(truth, all_args))(*batched))
    assert_same(torch.func.functionalize(op.fused)(*args), op.fused(*args))
    # the gradient of a recorded graph, for several grad_outputs at once
    leaves = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    output = outputs(op.fused(*leaves))[0]
    grads = torch.randn(7, *SHAPE, dtype=torch.float64, device=device)
    at_once = torch.autograd.grad(output, leaves, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(output, leaves, g, retain_graph=True) for g in grads]
    assert_same(at_once, tuple(map(torch.stack, zip(*one_by_one, strict=True))))


def test_transforms_check_like_kernels():
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        torch.func.vmap(lambda x: fused_layer_norm(x, torch.ones(1), normalized_shape=6))(
            torch.randn(4, 6)
        )
    with pytest.raises(RuntimeError, match="residual must have the shape of input"):
        torch.func.vmap(lambda x: fused_add_layer_norm(x, x[:1]))(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        torch.func.vmap(lambda x: fused_layer_norm(x, torch.ones(6).double()))(torch.randn(4, 6))


def test_forward_ad(op, device):
    args = arguments(op, dtype=torch.float64, device=device)
    tangents = [torch.randn_like(t) for t in args]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(args, tangents, strict=True)]
        actual = tuple(forward_ad.unpack_dual(o).tangent for o in outputs(op.fused(*duals)))
        expected = tuple(forward_ad.unpack_dual(o).tangent for o in outputs(op.reference(*duals)))
    assert_same(actual, expected)


# torch.compile, export, registration


class Graphs:
    """A backend that runs what it is given and keeps the operators' names, backward included."""

    def __init__(self):
        self.names = []

    def __call__(self, module, example):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)(module, example)

    def keep(self, graph, example):
        self.names += [str(node.target) for node in graph.graph.nodes]
        return graph.forward


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(op, device, dynamic):
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(op.fused, fullgraph=True, dynamic=dynamic, backend=graphs)
    args = arguments(op, requires_grad=True, device=device)
    eager_result, result = op.fused(*args), compiled(*args)
    assert_same(result, eager_result, rtol=0, atol=0)
    assert_same(
        torch.autograd.grad(loss(result), args),
        torch.autograd.grad(loss(eager_result), args),
    )
    assert graphs.names.count("fused_op.norm_forward.default") == 1
    assert graphs.names.count("fused_op.norm_backward.default") == 1
    with torch.no_grad():
        assert_same(compiled(*args), eager_result, rtol=0, atol=0)


def test_compile_of_the_other_doors():
    torch._dynamo.reset()
    x, w, b = (t.requires_grad_() for t in (torch.randn(4, 6), torch.randn(6), torch.randn(6)))
    calls = [
        lambda x: fused_op.FusedLayerNormFunction.apply(x, w, b, 1e-5),
        lambda x: fused_op.layer_norm(x, x.shape[-1:], w, b),
        lambda x: fused_op.layer_norm(x, [x.size(-1)], w, b),
        lambda x: fused_op.rms_norm(x, x.shape),
        lambda x: fused_layer_norm(x.bfloat16(), w, b),
        lambda x: fused_layer_norm(x, None, b, 1),
        lambda x: fused_add_layer_norm(x, x, w)[1],
    ]
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        assert_same(compiled(x), call(x))
        assert_same(
            torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(call(x).sum(), x)
        )
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(fused_add_layer_norm, fullgraph=True, backend="aot_eager")
        expected = fused_add_layer_norm(x.bfloat16(), x, w.half())
        assert_same(compiled(x.bfloat16(), x, w.half()), expected)


def test_compiled_errors_are_the_same_sentences():
    torch._dynamo.reset()
    compiled = torch.compile(fused_layer_norm, backend="eager")
    with pytest.raises(Exception, match="Expected weight to be of same shape as normalized_shape"):
        compiled(torch.randn(4, 6), torch.randn(5))


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6))

    def forward(self, x, residual):
        return fused_op.fused_add_rms_norm(x, residual, self.weight)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x = Norm(), torch.randn(2, 4, 6)
    program = torch.export.export(module, (x, x), strict=strict)
    assert_same(program.module()(x, x), module(x, x))


def test_make_fx_and_jit_trace():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, other = torch.randn(2, 4, 6)
    graph = make_fx(lambda x: fused_layer_norm(x))(x)
    assert "fused_op.norm_forward" in graph.code
    assert_same(graph(other), fused_layer_norm(other))
    assert_same(torch.jit.trace(fused_layer_norm, x)(other), fused_layer_norm(other))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(norm, dtype, device):
    x, residual = torch.randn(2, 4, 6, dtype=dtype, device=device)
    w = torch.randn(6, device=device)
    grad_x = x.clone().requires_grad_()
    for args in (
        (x, residual, w, w if norm == "layer_norm" else None, 0, 1e-5, True),
        (grad_x, None, None, None, 2, 1e-5, True),
        (x.t(), None, w[:4], None, 0, 1e-5, False),
        (x[:0], None, w, None, 1, 1e-5, True),
    ):
        opcheck(torch.ops.fused_op.norm_forward.default, (norm, *args))
    stats = fused_op_cuda.norm_forward(norm, x, None, None, None, 1, 1e-5, True)[2]
    for grad_sum, weight, wanted in (
        (residual, w, [True, True, norm == "layer_norm"]),
        (None, None, [True, False, False]),
        (None, w, [False, True, False]),
    ):
        opcheck(
            torch.ops.fused_op.norm_backward.default,
            (norm, residual, grad_sum, x, weight, stats, 1, torch.float32, wanted),
        )


def test_the_function_has_no_jvp_or_setup_context():
    # A jvp breaks torch.compile(fullgraph=True); setup_context costs 45 us a call.
    for function in (fused_op.FusedLayerNormFunction, fused_op.functional._NormFunction):
        assert function.jvp is torch.autograd.Function.jvp
        assert function.setup_context is torch.autograd.Function.setup_context


def test_short_apply_is_the_whole_apply(op):
    norm, *tensors, ndim, eps = binding_arguments(op, arguments(op, requires_grad=True))
    results = []
    for apply in (fused_op.functional._apply, fused_op.functional._NormFunction.apply):
        result = apply(*tensors, norm, ndim, eps)
        leaves = [t for t in tensors if t is not None]
        results.append((*outputs(result), *torch.autograd.grad(loss(result), leaves)))
    assert_same(*results, rtol=0, atol=0)


# Autograd's rules, as far as the Function could break them


def test_one_gradient_tensor_for_two_leaves_is_stored_twice():
    # backward returns one tensor for input and residual; .grad of one must not be .grad of both
    for use in (lambda out, sum: out, lambda out, sum: sum, lambda out, sum: out + sum):
        x, r = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
        for _ in range(2):  # the second one accumulates in place
            use(*fused_add_layer_norm(x, r)).square().sum().backward()
            before = r.grad.clone()
            x.grad.mul_(2)
            assert torch.equal(r.grad, before)
            x.grad.div_(2)
            assert torch.equal(x.grad, before)


def test_intermediate_gradients_do_not_leak_either():
    x, r = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    a, b = x * 1, r * 1
    a.retain_grad()
    b.retain_grad()
    fused_add_layer_norm(a, b)[0].square().sum().backward()
    before = b.grad.clone()
    a.grad.zero_()
    x.grad.zero_()
    assert torch.equal(b.grad, before) and torch.equal(r.grad, before)


def test_only_one_output_used():
    x, r, w = (torch.randn(s, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    output, sum = fused_add_layer_norm(x, r, w)
    gx, gr, gw = torch.autograd.grad(sum.sum(), (x, r, w), allow_unused=True, retain_graph=True)
    assert gw is None and torch.equal(gx, torch.ones(4, 6)) and torch.equal(gr, gx)
    gx, gr, gw = torch.autograd.grad(output.square().sum(), (x, r, w))
    expected = torch.autograd.grad(F.layer_norm(x + r, (6,), w).square().sum(), (x, r, w))
    assert_same((gx, gr, gw), expected)


def test_saved_tensors_are_guarded():
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    y = x * 1
    out = fused_layer_norm(y, w)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    output, sum = fused_add_layer_norm(x, x, w)
    sum.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    out = fused_layer_norm(x, w)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    with torch.inference_mode():
        inference = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fused_layer_norm(inference, w)


def test_frozen_inputs_get_no_gradient(op):
    for chosen in range(len(op.inputs)):
        args = arguments(op)
        args[chosen].requires_grad_()
        with Calls() as calls:
            loss(op.fused(*args)).backward()
        assert "fused_op::norm_backward" in calls.names
        assert [t.grad is not None for t in args] == [i == chosen for i in range(len(args))]


def test_third_derivatives(op, device):
    def third(function, args):
        total = loss(function(*args))
        for _ in range(3):
            grads = torch.autograd.grad(total, args, create_graph=True)
            total = sum(
                (g * torch.linspace(-1, 1, g.numel(), device=device).view_as(g)).sum()
                for g in grads
            )
        return torch.autograd.grad(total, args)

    args = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    assert_same(third(op.fused, args), third(op.reference, args))


def test_double_backward_where_parameters_depend_on_the_input():
    # the gradient's own history reaches the input on more ways than one
    def second(norm):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
        w = x.sin().sum(0)
        (g,) = torch.autograd.grad(norm(x * x, w, w.exp()).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)

    assert_same(second(fused_layer_norm), second(reference.fused_layer_norm))


# Layouts that are read in place, copied, or empty


BASE = torch.randn(6, 8, 10, dtype=torch.float64)
LAYOUTS = {
    "row stride": lambda x: x[:, :, :7],
    "offset": lambda x: x[:, 1:, 3:],
    "every second row": lambda x: x[:, ::2],
    "two row strides": lambda x: x[:, :5],
    "transposed": lambda x: x.mT,
    "permuted rows": lambda x: x.transpose(0, 1),
    "column stride": lambda x: x[..., ::2],
    "expanded rows": lambda x: x[:1, :1].expand(6, 8, 10),
    "expanded columns": lambda x: x[..., :1].expand(6, 8, 10),
    "overlapping": lambda x: x.as_strided((5, 8), (3, 1)),
    "one row": lambda x: x[:1, :1, ::3],
    "one column": lambda x: x[..., :1],
    "one dimension": lambda x: x[0, 0],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
}


def test_bytes_at_an_odd_address(op):
    # On CUDA torch itself cannot make such a tensor.
    buffer = bytearray(bytes(3) + BASE[0].numpy().tobytes())
    x = torch.frombuffer(buffer, dtype=torch.float64, offset=3).view(8, 10)
    assert x.data_ptr() % 8 != 0
    args = [x if name in ("input", "residual") else x[1] for name in op.inputs]
    assert_same(op.fused(*args), op.reference(*(t.clone() for t in args)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(op, device, layout):
    x = LAYOUTS[layout](BASE.to(device))
    parameter = torch.randn(2 * x.shape[-1], dtype=torch.float64, device=device)
    results = []
    for function in (op.fused, op.reference):
        named = {
            "input": x,
            "residual": x.flip(0),
            "weight": parameter[::2],
            "bias": parameter[1::2],
        }
        leaves = [named[name].detach().requires_grad_() for name in op.inputs]
        result = outputs(function(*leaves))
        assert all(output.is_contiguous() for output in result) or function is op.reference
        # a sum's gradient is expanded: stride 0
        grads = torch.autograd.grad(
            sum(output.mul(i + 1).sum() for i, output in enumerate(result)), leaves
        )
        results.append((*result, *grads))
    assert_same(*results)


def test_several_normalized_dimensions(op, device):
    x = torch.randn(3, 4, 6, dtype=torch.float64, device=device)
    parameter = torch.randn(4, 6, dtype=torch.float64, device=device)
    for rows in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.expand(2, 3, 4, 6)):
        leaves = [
            (rows if name in ("input", "residual") else parameter).detach().requires_grad_()
            for name in op.inputs
        ]
        results = []
        for function in (op.fused, op.reference):
            result = outputs(function(*leaves))
            results.append((*result, *torch.autograd.grad(loss(result), leaves)))
        assert_same(*results)


def test_copy_on_write_stays_lazy():
    x = torch.randn(4, 6)
    lazy = torch._lazy_clone(x)
    fused_layer_norm(lazy, lazy[0])
    assert torch._C._is_cow_tensor(lazy)


# Processes and threads


def test_pickle_and_deepcopy(op):
    assert pickle.loads(pickle.dumps(op.fused)) is op.fused
    assert copy.deepcopy(op.fused) is op.fused
    assert pickle.loads(pickle.dumps(fused_op.FusedLayerNormFunction)) is (
        fused_op.FusedLayerNormFunction
    )


def in_child(x, queue):
    queue.put(fused_layer_norm(x)[-1, -1].item())  # torch.sum would hang


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_hang(threads):
    threads(2)
    x = torch.randn(1024, 4096)
    expected = fused_layer_norm(x)[
        -1, -1
    ].item()  # OpenMP's threads exist now, but not in the child
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(x, queue))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked child hangs")
    assert child.exitcode == 0 and queue.get() == expected


def test_bits_do_not_depend_on_threads(op, threads):
    for shape in ((300, 700), (3, 100_003), (20_000, 8)):
        torch.manual_seed(0)
        args = [
            torch.randn(shape if name in ("input", "residual") else shape[-1:], requires_grad=True)
            for name in op.inputs
        ]
        results = []
        for count in (1, 2, 3):
            threads(count)
            result = op.fused(*args)
            results.append((*outputs(result), *torch.autograd.grad(loss(result), args)))
        assert_same(results[0], results[1], rtol=0, atol=0)
        assert_same(results[0], results[2], rtol=0, atol=0)


def test_threads_share_tensors():
    x, w = torch.randn(300, 300, requires_grad=True), torch.randn(300, requires_grad=True)
    expected = torch.autograd.grad(fused_layer_norm(x, w).square().sum(), (x, w))
    wrong = []

    def work():
        for _ in range(50):
            actual = torch.autograd.grad(fused_layer_norm(x, w).square().sum(), (x, w))
            if not all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)):
                wrong.append(actual)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_every_public_function_has_a_twin():
    import inspect

    functions = [
        n for n in fused_op.__all__ if n.startswith(("fused_layer", "fused_rms", "fused_a"))
    ]
    for name in [*functions, "layer_norm", "rms_norm"]:
        signature = inspect.signature(getattr(fused_op, name))
        assert signature == inspect.signature(getattr(reference, name))
    assert {op.name for op in OPS} == set(functions)
    assert fused_op.fused_op is fused_layer_norm
    for name in ("layer_norm", "rms_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (fused_op, F))
        assert list(ours) == list(theirs)
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
