"""`fused_op.disabled()`: no kernel runs inside, the numbers are the reference's, and it ends.

A kernel that still ran inside would give the right answer too, so it is made to raise here.
"""

import concurrent.futures
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fused_op
import fused_op_cuda
from fused_op import _disabled, disabled, fused_layer_norm
from tests.calls import arguments, assert_same, loss, outputs
from tests.case import make_case
from tests.contexts.graphs import Graphs
from tests.ops import OPS, subsets

MODULES = ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm"]


class KernelRan(Exception):
    pass


@pytest.fixture
def no_kernel(monkeypatch):
    """Every eager door to a kernel raises, once plain tensors reach it."""

    def refuse(*args):
        raise KernelRan

    real = fused_op_cuda.norm

    def norm(*args):
        result = real(*args)
        return result if type(result) is fused_op_cuda.Route else refuse()

    monkeypatch.setattr(fused_op_cuda, "norm", norm)
    monkeypatch.setattr(fused_op_cuda, "norm_forward", refuse)
    monkeypatch.setattr(fused_op_cuda, "norm_backward", refuse)


def test_no_kernel_and_the_values_of_the_reference(op, device, pair, no_kernel):
    """Catches a route that still ends in a kernel, with and without gradients to record, and an
    argument that gets lost on the way to the reference."""
    for absent in subsets(op.parameters):
        case = make_case(op, (5, 33), pair, device, absent)
        truth = replace(case, op=replace(op, fused=op.reference))
        for wanted in subsets(case.present):
            with disabled():
                results = case.run(wanted)
            torch.testing.assert_close(results, truth.run(wanted), rtol=0, atol=0)
            with pytest.raises(KernelRan):
                case.run(wanted)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "fused_op", "FusedLayerNormFunction"])
def test_the_other_doors(name, no_kernel, device):
    """Catches a public name that does not know the switch."""
    torch.manual_seed(0)
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in [(4, 6), (6,), (6,)]]
    calls = {
        "layer_norm": lambda f, x, w, b: f(x, (6,), w, b),
        "rms_norm": lambda f, x, w, b: f(x, (6,), w) + b,
        "fused_op": lambda f, *args: f(*args),
        "FusedLayerNormFunction": lambda f, *args: getattr(f, "apply", f)(*args, 1e-5),
    }
    twin = getattr(fused_op.reference, name, fused_op.reference.fused_layer_norm)
    expected = calls[name](twin, *leaves)
    with disabled():
        output = calls[name](getattr(fused_op, name), *leaves)
    assert_same(output, expected, rtol=0, atol=0)
    assert_same(  # backward outside: of a graph recorded inside
        torch.autograd.grad(loss(output), leaves), torch.autograd.grad(loss(expected), leaves)
    )
    with pytest.raises(KernelRan):
        calls[name](getattr(fused_op, name), *leaves)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, no_kernel):
    """Catches a module with a way of its own to the kernels."""
    x = torch.randn(4, 6)
    module = getattr(fused_op, name)(6)
    theirs = nn.LayerNorm(6) if isinstance(module, nn.LayerNorm) else nn.RMSNorm(6)
    args = (x, x) if "Add" in name else (x,)
    with disabled():
        assert_same(outputs(module(*args))[0], theirs(sum(args)))
    with pytest.raises(KernelRan):
        module(*args)


def test_backward_of_an_older_graph(op, device, monkeypatch, in_python):
    """Catches a kernel that runs inside because its forward ran before: the doubt may be about
    backward alone. Second derivatives too."""
    args = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    result = loss(op.fused(*args))
    expected = torch.autograd.grad(result, args, retain_graph=True)

    def refuse(*args):
        raise KernelRan

    monkeypatch.setattr(fused_op_cuda, "norm_backward", refuse)
    with pytest.raises(KernelRan):
        torch.autograd.grad(result, args, retain_graph=True)
    with disabled():
        first = torch.autograd.grad(result, args, create_graph=True)
        second = torch.autograd.grad(loss(first), args)
    assert_same(first, expected)
    truth = torch.autograd.grad(loss(op.reference(*args)), args, create_graph=True)
    assert_same(second, torch.autograd.grad(loss(truth), args))


def test_checkpointing_inside(device, no_kernel):
    """Catches a switch that autograd's own threads do not see: they call forward again."""
    args = [torch.randn(s, device=device, requires_grad=True) for s in [(4, 6), (6,)]]
    expected = torch.autograd.grad(loss(fused_op.reference.fused_layer_norm(*args)), args)
    for use_reentrant in (False, True):
        for leaf in args:
            leaf.grad = None
        with disabled():
            loss(checkpoint(fused_layer_norm, *args, use_reentrant=use_reentrant)).backward()
        assert_same(tuple(leaf.grad for leaf in args), expected)


def test_nesting_decorator_and_errors(no_kernel):
    """Catches kernels that come back too early, too late, or never after an exception."""
    x = torch.randn(4, 6)

    @disabled()
    def decorated():
        return fused_layer_norm(x)

    for _ in range(2):  # a context manager that works only once
        decorated()
        with pytest.raises(KernelRan):
            fused_layer_norm(x)
    with disabled():
        with disabled():
            decorated()
        fused_layer_norm(x)
    with pytest.raises(ZeroDivisionError), disabled():
        raise ZeroDivisionError
    with pytest.raises(KernelRan):
        fused_layer_norm(x)


def test_threads_in_any_order(no_kernel):
    """Catches a switch that remembers what it found: blocks of two threads need not be nested."""
    x = torch.randn(4, 6)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        first, second = disabled(), disabled()
        first.__enter__()
        other.submit(second.__enter__).result()
        other.submit(fused_layer_norm, x).result()
        first.__exit__(None, None, None)
        fused_layer_norm(x)  # the second is still open
        other.submit(second.__exit__, None, None, None).result()
    with pytest.raises(KernelRan):
        fused_layer_norm(x)


def test_refuses_what_the_kernels_refuse():
    """Catches wrong calls that pass inside, and turn up as errors when the block is removed."""
    x, w = torch.randn(4, 8), torch.randn(8)
    wrong = {
        "mixed dtype: expect parameter": lambda f: f(x, w.long()),
        "not implemented for 'Long'": lambda f: f(x.long()),
        "must be Tensor, not list": lambda f: f([1.0]),
        r"dense \(strided\) tensor": lambda f: f(x.to_sparse()),
        "eps must be finite, got nan": lambda f: f(x, eps=float("nan")),
        "Expected weight to be of same shape": lambda f: f(x, w[:1], normalized_shape=8),
        "not on the expected device": lambda f: f(x, w.to("meta")),
    }
    for message, call in wrong.items():
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message) as outside:
            call(fused_layer_norm)
        with disabled(), pytest.raises(outside.type, match=message):
            call(fused_layer_norm)
    with torch.autocast("cpu", torch.bfloat16), disabled():
        with pytest.raises(RuntimeError, match=r"dense \(strided\) tensor"):
            fused_layer_norm(x, w.bfloat16().to_sparse())
    with disabled(), pytest.raises(RuntimeError, match="mixed dtype: expect parameter"):
        fused_op.FusedLayerNormFunction.apply(x, w.long())


def test_autocast_and_transforms():
    """Catches a route other than the plain one that the switch breaks."""
    x, w = torch.randn(4, 6), torch.randn(6)
    cases = [lambda: torch.func.vmap(fused_layer_norm)(x)]
    cases += [lambda: torch.func.grad(lambda x: loss(fused_layer_norm(x, w)))(x)]
    cases += [lambda: fused_layer_norm(torch._neg_view(x), w)]
    with torch.autocast("cpu", torch.bfloat16):
        for case in [*cases, lambda: fused_layer_norm(x, w.bfloat16())]:
            expected = case()
            with disabled():
                actual = case()
            assert actual.dtype is expected.dtype
            assert_same(actual, expected)


def test_fake_and_meta_tensors(op):
    """Catches a check of arguments that reads memory, or that a wrapper subclass cannot take."""
    args = arguments(op)
    with disabled():
        for output in outputs(op.fused(*(t.to("meta") for t in args))):
            assert output.shape == args[0].shape
        with FakeTensorMode() as mode:
            for output in outputs(op.fused(*map(mode.from_tensor, args))):
                assert output.shape == args[0].shape
        twins = op.fused(*(TwoTensor(t, 2 * t) for t in args))
    assert_same(tuple(t.a for t in outputs(twins)), outputs(op.reference(*args)))


@pytest.mark.slow
@pytest.mark.parametrize("enter", [False, True], ids=["around", "within"])
def test_compile(op, device, enter):
    """Catches compiled code that goes on with its kernels inside, or without them outside."""
    torch._dynamo.reset()

    def within(*args):
        with disabled():
            return op.fused(*args)

    graphs = Graphs()
    args = arguments(op, requires_grad=True, device=device)
    expected = op.fused(*args)
    compiled = torch.compile(op.fused, fullgraph=True, backend=graphs)
    inside = torch.compile(within, fullgraph=True, backend=graphs)

    torch.autograd.grad(loss(compiled(*args)), args)
    assert graphs.kernels() == 2
    if enter:
        result = inside(*args)
    else:
        with disabled():
            result = compiled(*args)
    # The formula and the kernel round differently, and the loss squares that.
    near = {"rtol": 2e-5, "atol": 2e-5}
    assert_same(result, expected, **near)
    grads = torch.autograd.grad(loss(result), args)
    assert_same(grads, torch.autograd.grad(loss(expected), args), **near)
    assert graphs.names and graphs.kernels() == 0
    assert not _disabled.open_blocks
    torch._dynamo.reset()  # compiled inside first
    with disabled():
        torch.autograd.grad(loss(compiled(*args)), args)
    assert graphs.kernels() == 0
    torch.autograd.grad(loss(compiled(*args)), args)
    assert graphs.kernels() == 2


def test_compile_of_the_function(device):
    """Catches a Function without statistics that dynamo cannot trace."""
    torch._dynamo.reset()
    graphs = Graphs()
    args = arguments(OPS[0], requires_grad=True, device=device)
    apply = fused_op.FusedLayerNormFunction.apply
    compiled = torch.compile(lambda *a: apply(*a, 1e-5), fullgraph=True, backend=graphs)
    with disabled():
        result = compiled(*args)
        grads = torch.autograd.grad(loss(result), args)
    assert graphs.names and graphs.kernels() == 0
    expected = fused_layer_norm(*args)
    assert_same(result, expected)
    assert_same(grads, torch.autograd.grad(loss(expected), args))
