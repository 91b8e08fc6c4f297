"""Calls that are traced instead of run: torch.compile, export, fake and meta tensors.

Catches a graph break, a kernel call that is missing from a graph or doubled in it, a traced result
or error that is not the eager one, and a shape, dtype or stride that tracing foretells wrongly.
"""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import fused_op
import fused_op_cuda
from fused_op import fused_add_layer_norm, fused_layer_norm
from fused_op._options import Options
from tests.calls import arguments, assert_same, loss, outputs
from tests.contexts.graphs import Graphs, opchecks


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_jit_script_is_refused():
    # rather than turned, silently, into the forward of the class that it is derived from
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(fused_op.FusedLayerNorm(6))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_opcheck(norm, pair, device):
    x, residual = torch.randn(2, 4, 6, dtype=pair.rows, device=device)
    w = torch.randn(6, dtype=pair.params, device=device)
    wide = torch.float64 if pair.rows is torch.float64 else torch.float32
    state = torch.tensor([1, 2])
    checks = opchecks(pair)
    for args in (
        (x, residual, w, w if norm == "layer_norm" else None, None, 0, 1e-5, False, "once", 0.0),
        (x, None, None, None, None, 2, 1e-5, True, "before_weight", 0.0),
        (x.t(), None, w[:4], None, None, 0, 1e-5, True, "once", 0.0),
        (x[:0], None, w, None, None, 1, 1e-5, False, "before_weight", 0.0),
        (x, residual, w, None, state, 0, 1e-5, False, "before_weight", 0.5),
    ):
        for dtypes, save_stats in (
            ((None, None), True),
            ((wide, wide if args[1] is not None else None), False),
        ):
            every = norm, *args, *dtypes, save_stats
            opcheck(torch.ops.fused_op.norm_forward.default, every, test_utils=checks)
    stats = fused_op_cuda.norm_forward((x, None, None, None, None), Options(norm, 1e-5), True)[2]
    is_layer_norm = norm == "layer_norm"
    first = "before_weight"
    for grad_sum, weight, zero_centered, rounding, p, from_output, residual_dtype, wanted in (
        (residual, w, True, "once", 0.0, False, pair.rows, [True, True, True, is_layer_norm]),
        (None, None, False, first, 0.0, False, None, [True, False, False, False]),
        (None, w, False, first, 0.0, True, None, [False, False, True, False]),
        (residual, w, True, first, 0.5, False, wide, [True, True, True, is_layer_norm]),
        (None, w, True, "once", 0.5, False, None, [True, False, True, False]),
    ):
        opcheck(
            torch.ops.fused_op.norm_backward.default,
            (
                *(norm, residual, grad_sum, x, weight, None, stats, state, 1, zero_centered),
                *(rounding, p, from_output, pair.rows, residual_dtype, pair.params, wanted),
            ),
            test_utils=checks,
        )


def test_the_function_has_no_jvp_or_setup_context():
    # A jvp breaks torch.compile(fullgraph=True); setup_context costs 45 us a call.
    for function in (fused_op.FusedLayerNormFunction, fused_op.functional._NormFunction):
        assert function.jvp is torch.autograd.Function.jvp
        assert function.setup_context is torch.autograd.Function.setup_context


@pytest.mark.parametrize(
    "same", [(0, 0), (0, 0, 1, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2, 2), (0, 0, 0, 0)]
)
def test_one_tensor_as_several_arguments(same, device):
    """Catches a Function that gets a tensor twice, which dynamo cannot trace."""
    torch._dynamo.reset()

    def call(*tensors):
        return fused_op.fused_add_layer_norm(*[tensors[i] for i in same])[0]

    tensors = [torch.randn(6, device=device, requires_grad=True) for _ in range(max(same) + 1)]
    if max(same) == 1 and same[1] == 0 and len(same) > 2:
        tensors[0] = torch.randn(3, 6, device=device, requires_grad=True)
    result, expected = (
        torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors),
        call(*tensors),
    )
    assert_same(result, expected)
    assert_same(
        torch.autograd.grad(result.cos().sum(), tensors),
        torch.autograd.grad(expected.cos().sum(), tensors),
    )


def permuted(x, norm):
    """The gradient arrives as attention leaves it: head by head."""
    return norm(x).transpose(1, 2).contiguous()


def beside_its_input(x, norm):
    """The gradient is a slice of a larger one, and the kernel can read its rows where they are."""
    return torch.cat((norm(x), x), 1)


def norm_of_images(x):
    """Rows in front, so that it can be called like the others."""
    image = x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    return fused_op.fused_channels_first_rms_norm(image).permute(0, 2, 3, 1)


ORDERS = [
    (permuted, fused_op.fused_rms_norm),
    (permuted, fused_op.fused_l2_norm),
    (beside_its_input, fused_op.fused_rms_norm),
    (beside_its_input, fused_op.fused_l2_norm),
    (beside_its_input, norm_of_images),
]


@pytest.mark.parametrize(("function", "norm"), ORDERS)
def test_order_of_gradients(function, norm):
    """Catches a copy of permuted gradients in the op, and one of gradients that need none."""
    found = []

    def keep(graph, example):
        for node in graph.graph.nodes:
            if "_backward" in str(node.target) and "fused_op" in str(node.target):
                of_norm = node.target is torch.ops.fused_op.norm_backward.default
                found.append(node.args[1 if of_norm else 0])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    results = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        results.append(torch.autograd.grad(call(x, norm).cos().sum(), x))
    assert_same(results[0], results[1], rtol=0, atol=0)
    (gradient,) = found
    assert gradient.meta["val"].is_contiguous() is (function is permuted)


def rows_of_images(x):
    """In eager mode, the channels of a pixel lie apart in the result of the convolution."""
    weight = torch.linspace(-1, 1, x.shape[1] ** 2 * 9).view(x.shape[1], -1, 3, 3)
    return torch.nn.functional.conv2d(x, weight, padding=1).permute(0, 2, 3, 1)


def head_by_head(x):
    """Rows that lie in another order than they are counted in, but in one piece each."""
    return x.cos().transpose(1, 2)


@pytest.mark.parametrize(("rows", "is_copied"), [(rows_of_images, True), (head_by_head, False)])
@pytest.mark.parametrize("norm", [fused_op.fused_layer_norm, fused_op.fused_rms_norm])
def test_order_of_rows(norm, rows, is_copied):
    """Catches a copy of permuted rows in the op, and one in the graph of rows that need none."""
    found = []

    def keep(graph, example):
        for node in graph.graph.nodes:
            if node.target is torch.ops.fused_op.norm_forward.default:
                found.append(node.args[1])
        return make_boxed_func(graph.forward)

    def function(x):
        return norm(rows(x)).cos()

    torch._dynamo.reset()
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    results = [call(x) for call in (function, compiled)]
    gradients = [torch.autograd.grad(result.sum(), x) for result in results]
    assert_same(results[0], results[1], rtol=0, atol=0)
    assert_same(gradients[0], gradients[1], rtol=0, atol=0)
    (given,) = found
    assert (given.target is torch.ops.aten.clone.default) is is_copied
    assert given.meta["val"].stride(-1) == 1


def test_format_of_images_under_rms_norm():
    """As in PyTorch, the output keeps it, in a compiled graph, too."""
    x = torch.randn(2, 5, 3, 8).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(fused_op.fused_rms_norm, backend="aot_eager", fullgraph=True)
    results = fused_op.fused_rms_norm(x), compiled(x)
    assert_same(results[0], results[1], rtol=0, atol=0)
    assert results[0].stride() == results[1].stride() == x.stride()


class NextToConvolution(torch.nn.Module):
    """As in ConvNeXt: the norm's input is the permuted result of a convolution."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, torch.nn.Linear(8, 8)
        self.first, self.last = (torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x):
        rows = self.first(x).permute(0, 2, 3, 1)
        return self.last(self.linear(self.norm(rows)).permute(0, 3, 1, 2) + x)


class OfImages(torch.nn.Module):
    """A norm of contiguous planes between convolutions."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.first, self.last = (torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("block", "memory_format"),
    [
        (NextToConvolution(fused_op.FusedLayerNorm(8)), torch.channels_last),
        (NextToConvolution(fused_op.FusedLayerNorm(8)), torch.contiguous_format),
        (NextToConvolution(fused_op.FusedRMSNorm(8)), torch.channels_last),
        (OfImages(fused_op.FusedChannelsFirstLayerNorm(8)), torch.contiguous_format),
        (OfImages(fused_op.FusedGroupNorm(2, 8)), torch.contiguous_format),
    ],
)
def test_images_that_are_saved(block, memory_format):
    """Catches a tensor of four dimensions for backward, which Inductor may lay out as an image."""
    found = []

    def keep(graph, example):
        for node in graph.graph.nodes:
            if "fused_op" in str(node.target) and "_backward" in str(node.target):
                found.extend(a for a in node.args if getattr(a, "op", "") == "placeholder")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    x = torch.randn(2, 8, 5, 4).contiguous(memory_format=memory_format).requires_grad_()
    block.to(memory_format=memory_format)
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    leaves = [x, *block.parameters()]
    results = [call(x) for call in (block, compiled)]
    gradients = [torch.autograd.grad(result.cos().sum(), leaves) for result in results]
    assert_same(results[0], results[1], rtol=0, atol=0)
    for eager, traced in zip(*gradients, strict=True):
        assert_same(eager, traced)
    assert found
    assert all(node.meta["val"].dim() != 4 for node in found)
