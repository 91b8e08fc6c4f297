"""torch.func and forward-mode AD inside of compiled code, and around it.

Catches derivatives that are zeros: compiled, a transform looks past an autograd.Function at the op
in its forward, and an op without a derivative counts as a constant. test_transforms.py has
the same without a compiler.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import fused_op
from tests.calls import arguments, assert_same, loss, outputs
from tests.contexts.graphs import Graphs
from tests.ops import F64, OPS

TRANSFORMS = {
    "grad": lambda f, args: torch.func.grad(lambda *a: loss(f(*a)), every(args))(*args),
    "per_sample": lambda f, args: torch.func.vmap(
        torch.func.grad(lambda *a: loss(f(*a)), every(args)), (0, *[None] * (len(args) - 1))
    )(*args),
    "jvp": lambda f, args: torch.func.jvp(f, tuple(args), tuple(t.cos() for t in args))[1],
    "hessian": lambda f, args: torch.func.hessian(lambda *a: loss(f(*a)))(*args),
}


def every(args):
    return tuple(range(len(args)))


@pytest.fixture(autouse=True)
def compiled_afresh():
    torch._dynamo.reset()


def flat(result):
    return tuple(torch.utils._pytree.tree_leaves(result))


def arguments_of(op, name, device):
    """Of which the first has a dimension to map over, that the residual lacks."""
    args = dict(zip(op.inputs, arguments(op, dtype=F64, device=device), strict=True))
    if name == "per_sample" and op.adds:
        args["residual"] = args["residual"][0]
    return [*args.values()]


@pytest.mark.parametrize("name", ["per_sample", "jvp", "hessian"])
def test_transforms_inside(op, device, name):
    transform, args = TRANSFORMS[name], arguments_of(op, name, device)
    compiled = torch.compile(lambda *a: transform(op.fused, a), fullgraph=True, backend="aot_eager")
    assert_same(flat(compiled(*args)), flat(transform(op.reference, args)))


@pytest.mark.parametrize("name", ["per_sample", "jvp"])
def test_transforms_around(op, device, name):
    transform, args = TRANSFORMS[name], arguments_of(op, name, device)
    compiled = torch.compile(op.fused, backend="aot_eager")
    assert_same(flat(transform(compiled, args)), flat(transform(op.reference, args)))


@pytest.mark.parametrize("name", ["grad", "jvp"])
def test_transforms_of_the_function(device, name):
    """Not compiled, PyTorch refuses it there: it has no setup_context."""
    args = arguments(OPS[0], dtype=F64, device=device)
    expected = TRANSFORMS[name](fused_op.reference.fused_layer_norm, args)

    def apply(*args):
        return fused_op.FusedLayerNormFunction.apply(*args, 1e-5)

    compiled = torch.compile(
        lambda *a: TRANSFORMS[name](apply, a), fullgraph=True, backend="aot_eager"
    )
    assert_same(flat(compiled(*args)), flat(expected))


@pytest.mark.parametrize("where", ["inside", "around"])
def test_forward_ad(op, device, where):
    args = arguments(op, dtype=F64, device=device)

    def tangents(function):
        def run(*args):
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(t, t.cos()) for t in args]
                return tuple(forward_ad.unpack_dual(o).tangent for o in outputs(function(*duals)))

        return run

    if where == "inside":
        actual = torch.compile(tangents(op.fused), backend="aot_eager")(*args)
    else:
        actual = tangents(torch.compile(op.fused, backend="aot_eager"))(*args)
    assert_same(actual, tangents(op.reference)(*args))


def test_kernels_come_back_after_a_transform(op, device):
    """Catches code that was compiled under a transform and stays in use without one."""
    graphs = Graphs()
    compiled = torch.compile(op.fused, fullgraph=True, backend=graphs)
    args = arguments(op, dtype=F64, device=device)
    with forward_ad.dual_level():
        compiled(*args)
        assert graphs.names and graphs.kernels() == 0
    compiled(*args)
    assert graphs.kernels() == 1
