"""Which way a call goes, and that every way gives the same answer.

A kernel reads raw pointers. A tensor whose pointer is missing or means something else (fake,
sharded, transformed, lazily negated) must be caught before; else wrong numbers follow, or a crash.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import fused_op
import fused_op_cuda
from fused_op import fused_add_layer_norm, fused_layer_norm, reference
from fused_op._options import BackwardOptions, Options, shares_gradient
from fused_op_cuda import Route
from tests.calls import Calls, arguments, assert_same, binding_arguments, loss, outputs
from tests.ops import OPS
from tests.variants.table import VARIANTS

# What reaches the kernels directly


def test_no_gradient_no_function_and_no_statistics(op):
    args = arguments(op)
    result = fused_op_cuda.norm(*binding_arguments(op, args))
    assert isinstance(result, tuple if op.adds else torch.Tensor)
    with torch.no_grad():
        for output in outputs(op.fused(*arguments(op, requires_grad=True))):
            assert output.grad_fn is None and not output.requires_grad


def route(*tensors):
    x, weight = (*tensors, None)[:2]
    options = Options("layer_norm", 1e-5, is_checked=True)  # else subclasses would get CHECK
    return fused_op_cuda.norm((x, None, weight, None, None), options)


def test_routes(in_python):
    x, w = torch.randn(2, 4, 6)
    dispatch, autograd = Route.DISPATCH, Route.AUTOGRAD
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
    assert seen == [Route.COMPOSITE] * 7


def test_what_is_unusual_is_checked_in_python_first():
    """Catches a kernel that runs on an option that nobody has checked."""
    x = torch.randn(4, 6)

    def result(tensor=x, **options):
        given = {"norm": "rms_norm", "eps": 1e-5} | options
        return fused_op_cuda.norm((tensor, None, None, None, None), Options(**given))

    for usual in (
        *({}, {"eps": None}, {"eps": 0}, {"training": False}, {"out_dtype": torch.bfloat16}),
        *({"normalized_shape": shape} for shape in (6, (6,), [6], x.shape)),
    ):
        assert isinstance(result(**usual), torch.Tensor), usual
    for usual in ({"dropout_p": 0.5}, {"dropout_p": 1.0, "training": False}):
        assert result(**usual) is Route.DROPOUT, usual
    for unusual in (
        *(
            {"eps": True},
            {"eps": 10**400},
            {"eps": None, "norm": "layer_norm"},
            {"zero_centered": 1},
            {"training": 1},
        ),
        *({"dropout_p": 0}, {"dropout_p": -0.5}, {"dropout_p": 1.5}, {"dropout_p": float("nan")}),
        *({"dropout_p": 0.5, "memory_efficient": True}, {"memory_efficient": None}),
        *({"out_dtype": "f16"}, {"residual_dtype": 0}),
        *({"normalized_shape": s} for s in ((), [], 5, (5,), (6.0,), True, (2**70,), (1, 4, 6))),
        *({"tensor": x.as_subclass(Subclass)}, {"tensor": [1.0]}),
    ):
        assert result(**unusual) is Route.CHECK, unusual
    with Functions():
        assert result() is Route.CHECK
    assert isinstance(result(x.as_subclass(Subclass), is_checked=True), torch.Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        assert isinstance(result(x.as_subclass(Subclass)), torch.Tensor)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("residual_dtype", [None, torch.bfloat16, torch.float32])
def test_python_and_cpp_agree_who_shares_a_gradient(p, residual_dtype):
    """Catches a gradient of the residual that is that of the input, or is dropped."""
    dtype = torch.bfloat16
    x, state = torch.randn(4, 6).to(residual_dtype or dtype), torch.ones(2, dtype=torch.int64)
    options = BackwardOptions(
        *(
            "layer_norm",
            1,
            1e-5,
            False,
            "once",
            p,
            False,
            dtype,
            residual_dtype,
            dtype,
            dtype,
            False,
        )
    )
    tensors = x, None, x, None, None, torch.ones(2, 4), state
    wanted = True, residual_dtype is not None, False, False
    grad_input, grad_residual, *_ = fused_op_cuda.norm_backward(tensors, options, wanted)
    shared = shares_gradient(p, dtype, residual_dtype)
    assert grad_input is not None
    assert (grad_residual is None) == (shared or residual_dtype is None)


def test_autocast_takes_supported_dtypes_as_they_are_and_casts_others():
    x, w = torch.randn(4, 6), torch.randn(6)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(route(x.bfloat16(), w), torch.Tensor)
        assert isinstance(route(x), torch.Tensor)
        assert isinstance(route(x, w.bfloat16()), torch.Tensor)
        rows = x, x.bfloat16(), None, None, None
        assert fused_op_cuda.norm(rows, Options("layer_norm", 1e-5)) is Route.CAST
        mixed = fused_add_layer_norm(x, x.bfloat16(), w.double(), w.half())
        expected = fused_add_layer_norm(x, x.bfloat16().float(), w, w.half().float())
        assert_same(mixed, expected)
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            fused_layer_norm(x.long(), w)
    with pytest.raises(RuntimeError, match="residual must have the dtype of input"):
        fused_add_layer_norm(x, x.bfloat16())
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
    assert functions.seen[0] is getattr(fused_op, op.name)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_torch_function_of_the_twins(name):
    twin = getattr(fused_op, name)
    x = torch.randn(4, 6)
    assert type(twin(x.as_subclass(Subclass), (6,))) is Subclass
    with Functions() as functions:
        twin(x, [6])
    assert functions.seen[0] is twin


def test_every_public_function_has_a_twin():
    import inspect

    functions = [n for n in fused_op.__all__ if n.startswith("fused_") and n != "fused_op"]
    for name in [*functions, "layer_norm", "rms_norm"]:
        signature = inspect.signature(getattr(fused_op, name))
        assert signature == inspect.signature(getattr(reference, name))
    variants = {f"fused_{variant.name}" for variant in VARIANTS}
    others = ("_quantized", "qk_norm_rope", "gated_add_layer_norm", "gated_add_rms_norm")
    others += "channels_first_layer_norm", "channels_first_rms_norm", "group_norm"
    plain = {name for name in functions if not name.endswith(others)} - variants
    assert {op.name for op in OPS} == plain
    assert fused_op.fused_op is fused_layer_norm
    for name in ("layer_norm", "rms_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (fused_op, F))
        assert list(ours) == list(theirs)
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
