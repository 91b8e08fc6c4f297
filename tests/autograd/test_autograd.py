"""Derivatives of every order, and the promises that autograd makes about gradients and memory."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.case import Case, make_case
from tests.ops import BF16, F32, F64, OPS, TOLERANCE, Pair, subsets

DOUBLE = Pair(F64, F64)
ADDS = pytest.mark.parametrize("op", [op for op in OPS if op.adds], ids=str)

pytestmark = pytest.mark.usefixtures("recorder")


def small_case(op, device, absent=()) -> Case:
    """Rows of unit scale: the k-th derivative grows like scale^-k, and finite differences err."""
    case = make_case(op, (3, 5), DOUBLE, device, absent)
    rows = case.inputs["input"]
    return case.with_inputs(input=rows / rows.std(-1, keepdim=True))


def call(case: Case, wanted: tuple[str, ...], function=None):
    """(f, arguments): the op as a function of the wanted inputs only, the others held fixed."""
    leaves = case.leaves(wanted)

    def f(*values):
        inputs = leaves | dict(zip(wanted, values, strict=True))
        return (function or case.op.fused)(*inputs.values(), **case.options)

    return f, [leaves[name] for name in wanted]


def truth(case: Case, wanted: tuple[str, ...]):
    """The same call on the reference, with leaves of its own."""
    return call(case, wanted, case.op.reference)


def as_tuple(outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_first_and_second_derivative(op, device) -> None:
    """Catches a wrong gradient, and a backward whose own derivative is wrong or cut, for each
    absent argument and each subset of inputs that require grad."""
    for absent in subsets(op.parameters):
        case = small_case(op, device, absent)
        for wanted in subsets(case.present)[1:]:
            f, args = call(case, wanted)
            what = f"{case}, derivative by {wanted}"
            assert gradcheck(f, args, eps=1e-6, atol=1e-7), what
            # All by all is the whole Hessian; each alone is what routing might get wrong.
            if len(wanted) in (1, len(case.present)):
                assert gradgradcheck(f, args, eps=1e-6, atol=1e-6), what


def test_third_derivative(op, device) -> None:
    """Catches a double backward that is right once and cannot be differentiated again: numerically
    and beside plain PyTorch. (aten's own third derivative of layer_norm is wrong.)"""
    case = small_case(op, device)
    f, args = call(case, case.present)

    def first(*values):
        outputs = as_tuple(f(*values))
        return torch.autograd.grad(outputs, values, case.grads, create_graph=True)

    assert gradgradcheck(first, args, eps=1e-6, atol=1e-5)

    thirds = []
    for function, values in (call(case, case.present), truth(case, case.present)):
        scalar = sum(out.pow(3).sum() for out in as_tuple(function(*values)))
        for _ in range(3):
            grads = torch.autograd.grad(scalar, values, create_graph=True)
            weights = [torch.arange(1.0, g.numel() + 1).cos().view_as(g).to(g) for g in grads]
            scalar = sum((g * w).sum() for g, w in zip(grads, weights, strict=True))
        thirds.append(grads)
    # Sums of large terms of both signs: an element errs like the largest of its tensor.
    for ours, theirs in zip(*thirds, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def test_batched_gradients(op, device) -> None:
    """Catches a backward that vmap cannot batch: is_grads_batched, jacobian(vectorize=True)."""
    f, args = call(small_case(op, device), op.inputs)
    assert gradcheck(f, args, eps=1e-6, atol=1e-7, check_batched_grad=True)


@ADDS
def test_gradients_of_one_output(op, device) -> None:
    """Catches a backward that assumes a gradient for both outputs: an unused one arrives as None,
    and what has no gradient then has none."""
    case = small_case(op, device)
    for used in (0, 1):
        for create_graph in (False, True):
            grads = []
            for function, values in (call(case, case.present), truth(case, case.present)):
                out = as_tuple(function(*values))[used]
                grads.append(
                    torch.autograd.grad(
                        out, values, case.grads[used], allow_unused=True, create_graph=create_graph
                    )
                )
            for name, ours, theirs in zip(case.present, *grads, strict=True):
                what = f"{case}: output {used} alone, create_graph={create_graph}, {name}"
                theirs = torch.zeros_like(case.inputs[name]) if theirs is None else theirs
                ours = torch.zeros_like(theirs) if ours is None else ours
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9), what


@ADDS
def test_grads_of_input_and_residual_are_separate(op, device) -> None:
    """Catches two .grad over one memory: gradient clipping in place would then clip both."""
    case = small_case(op, device)
    for used in ((0,), (1,), (0, 1)):
        leaves = case.leaves(case.present)
        outputs = op.fused(*leaves.values(), **case.options)
        given = [case.grads[i].clone() for i in used]
        torch.autograd.backward([outputs[i] for i in used], given)
        before = leaves["residual"].grad.clone()
        assert torch.equal(leaves["input"].grad, before), f"{case}: outputs {used}"
        leaves["input"].grad.mul_(-3)
        assert torch.equal(leaves["residual"].grad, before), f"{case}: outputs {used}"
        for i, g in zip(used, given, strict=True):
            assert torch.equal(g, case.grads[i]), f"{case}: the caller's gradient {i} has changed"


def test_grads_accumulate(op, device) -> None:
    """Catches a .grad that a second backward writes over instead of adding to."""
    case = small_case(op, device)
    leaves = case.leaves(case.present)
    for _ in range(2):
        outputs = as_tuple(op.fused(*leaves.values(), **case.options))
        torch.autograd.backward(outputs, case.grads)
    for name, once in case.run().items():
        if name.startswith("grad_"):
            twice = leaves[name.removeprefix("grad_")].grad
            assert torch.equal(twice, 2 * once), f"{case}: {name}"


def test_changed_in_place_after_forward(op, device) -> None:
    """Catches a backward from tensors that were changed after forward: it has to raise, or to be
    right because it did not need them. What it must read, it must notice."""
    case = small_case(op, device)
    must_notice = {"weight", "sum" if op.adds else "input"}
    expected = case.run()
    for name in (*case.present, "output", *(["sum"] if op.adds else [])):
        leaves = case.leaves(case.present)
        tensors = {n: t.clone() for n, t in leaves.items()}  # not leaves: they may change
        outputs = as_tuple(op.fused(*tensors.values(), **case.options))
        tensors |= dict(zip(("output", "sum"), outputs, strict=False))
        with torch.no_grad():
            tensors[name].add_(1)
        try:
            torch.autograd.backward(outputs, case.grads)
        except RuntimeError as error:
            assert "inplace" in str(error), f"{case}: {name}: {error}"
            continue
        assert name not in must_notice, f"{case}: a change of {name} went unnoticed"
        for other in case.present:
            same = torch.equal(leaves[other].grad, expected[f"grad_{other}"])
            assert same, f"{case}: a change of {name} gave a wrong gradient of {other}"


def test_backward_twice(op, device) -> None:
    """Catches state that the first backward uses up though the graph is retained, or that lets a
    second one through though it is not."""
    case = small_case(op, device)
    f, args = call(case, case.present)
    outputs = as_tuple(f(*args))
    first = torch.autograd.grad(outputs, args, case.grads, retain_graph=True)
    again = torch.autograd.grad(outputs, args, case.grads)
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, args, case.grads)


def test_create_graph_beside_plain_backward(op, device) -> None:
    """Catches first and second order gradients that disagree or do not add up when one loss uses
    both: a gradient penalty."""
    case = small_case(op, device)
    grads = []
    for function, values in (call(case, case.present), truth(case, case.present)):
        outputs = as_tuple(function(*values))
        loss = sum((out * g).sum() for out, g in zip(outputs, case.grads, strict=True))
        plain = torch.autograd.grad(loss, values, retain_graph=True)
        graph = torch.autograd.grad(loss, values, create_graph=True)
        for a, b in zip(plain, graph, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), f"{case}: plain against create_graph"
        penalty = sum(g.pow(2).sum() for g in graph)
        (loss + penalty).backward()
        grads.append([t.grad for t in values])
    for name, ours, theirs in zip(case.present, *grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9), f"{case}: {name}"


@pytest.mark.parametrize("pair", [Pair(F32, F32), Pair(BF16, BF16), Pair(BF16, F32)], ids=str)
def test_create_graph_in_short_types(op, device, pair) -> None:
    """Catches a differentiable backward that computes in the input's short type, or returns a
    gradient of another dtype: it is held to the tolerance of the kernels."""
    case = make_case(op, (7, 40), pair, device)
    f, args = call(case, case.present)
    outputs = as_tuple(f(*args))
    grads = torch.autograd.grad(outputs, args, case.grads, create_graph=True)
    names = [f"grad_{name}" for name in case.present]
    results = dict(zip(("output", "sum"), outputs, strict=False))
    results |= dict(zip(names, (g.contiguous() for g in grads), strict=True))
    case.check({name: t.detach() for name, t in results.items()})
    second = torch.autograd.grad(squares(grads), args, allow_unused=True)
    u = TOLERANCE[pair.rows].rounding
    expected = second_of_truth(case)
    for name, ours, theirs in zip(case.present, second, expected, strict=True):
        if name == "bias":  # nothing depends on it
            assert ours is None or not ours.any(), f"{case}: second derivative by {name}"
            continue
        assert ours.dtype == case.inputs[name].dtype, f"{case}: second derivative by {name}"
        # Rounded first gradients go through products and sums: a few tens of roundings at most.
        error = (ours.to(F64) - theirs).norm() / theirs.norm()
        assert error <= 32 * u, f"{case}: second derivative by {name} is off by {error:.3g}"


def second_of_truth(case: Case) -> tuple[torch.Tensor, ...]:
    wide = Case(
        case.op,
        {name: t.to(F64) for name, t in case.inputs.items()},
        tuple(g.to(F64) for g in case.grads),
        case.eps,
    )
    f, args = truth(wide, wide.present)
    grads = torch.autograd.grad(as_tuple(f(*args)), args, wide.grads, create_graph=True)
    return torch.autograd.grad(squares(grads), args, allow_unused=True)


def squares(grads) -> torch.Tensor:
    """A scalar of which the gradients' gradients do not cancel."""
    return sum(g.to(torch.promote_types(g.dtype, F32)).pow(2).sum() for g in grads)
