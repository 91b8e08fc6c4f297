"""If a kernel is not available, PyTorch operations take the call, after one warning.

The calls that would launch one raise here what they raise on a GPU without a compiler, so that no
GPU is needed; test_first_use.py has the real thing. Catches a route on which the error
reaches the user, and one whose numbers differ.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fused_op
import fused_op_cuda
from fused_op import _routes
from tests.calls import arguments, assert_same, loss, outputs
from tests.case import make_case
from tests.ops import F32, OPS, PAIRS, subsets

# The node in C++ has no doors that a test could close.
pytestmark = pytest.mark.usefixtures("in_python")
DOCS = Path(__file__).parents[2] / "docs"
DOORS = ("norm", "norm_forward", "norm_backward", "norm_backward_into")


@pytest.fixture
def lose(monkeypatch):
    """A function after which the kernels behind these doors are missing."""
    monkeypatch.delenv("FUSED_OP_JIT", raising=False)
    monkeypatch.setattr(_routes, "warned", [])
    real = fused_op_cuda.norm

    def refuse(*args):
        raise fused_op_cuda.KernelError("a kernel is not available: on purpose")

    def norm(*args):  # says where a call goes, before it needs a kernel
        result = real(*args)
        return result if type(result) is fused_op_cuda.Route else refuse()

    def lose(*doors):
        for door in doors or DOORS:
            monkeypatch.setattr(fused_op_cuda, door, norm if door == "norm" else refuse)

    return lose


def warnings_of(function):
    """Its result, and the warnings about kernels, however often the filters show one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught if "kernel is not available" in str(w.message)]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_values_and_gradients_of_the_reference(op, pair, device, lose):
    lose()
    for absent in subsets(op.parameters):
        case = make_case(op, (5, 33), pair, device, absent)
        truth = replace(case, op=replace(op, fused=op.reference))
        for wanted in subsets(case.present):
            results, _ = warnings_of(lambda: case.run(wanted))  # noqa: B023
            case.check(results)  # gradients are those of a formula, rounded elsewhere
            expected = truth.run(wanted)
            for name in ("output", "sum")[: 1 + op.adds]:
                assert torch.equal(results[name], expected[name])


def test_one_warning(op, device, lose):
    """Catches a warning for each call, and none at all."""
    lose()
    args = arguments(op, requires_grad=True, device=device)

    def calls():
        for _ in range(3):
            with torch.no_grad():
                op.fused(*args)
            loss(op.fused(*args)).backward()

    _, told = warnings_of(calls)
    assert told == [
        "fused_op: slower PyTorch operations replace missing kernels. The first: a kernel is not "
        "available: on purpose"
    ]
    for page in ("first_use.md", "troubleshooting.md"):
        assert told[0].removesuffix("on purpose") in (DOCS / page).read_text()


def test_backward_alone(op, device, lose):
    """Catches a backward that gives up because its forward had a kernel."""
    args = arguments(op, requires_grad=True, dtype=torch.float64, device=device)
    result = loss(op.fused(*args))
    expected = torch.autograd.grad(result, args, retain_graph=True)
    lose("norm_backward")
    found, told = warnings_of(lambda: torch.autograd.grad(result, args))
    assert_same(found, expected)
    assert len(told) == 1


@pytest.mark.parametrize("doors", [DOORS, ("norm", "norm_forward"), ("norm_backward",)])
def test_the_mask_of_dropout_stays(op, device, lose, doors):
    """Catches a second draw of random numbers, and a mask of another generator in backward."""
    shapes = {"input": (64, 40), "residual": (64, 40), "weight": (40,), "bias": (40,)}
    args = [torch.rand(shapes[name], device=device) + 0.5 for name in op.inputs]
    leaves = [arg.requires_grad_() for arg in args]

    def results():
        torch.manual_seed(7)
        result = op.fused(*leaves, dropout_p=0.4)
        after = torch.rand(3, device=device)
        return *outputs(result), *torch.autograd.grad(loss(result), leaves), after

    expected = results()
    lose(*doors)
    found, told = warnings_of(results)
    assert len(told) == 1
    assert torch.equal(found[-1], expected[-1])
    if not op.adds:
        assert torch.equal(found[0] == 0, expected[0] == 0)
        assert 0.3 < (found[0] == 0).float().mean() < 0.5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm"])
def test_main_grad(name, device, lose):
    """Catches gradients that are added twice, or to nothing."""

    def run():
        torch.manual_seed(0)
        norm = getattr(fused_op, name)(24, device=device, fuse_wgrad_accumulation=True)
        for parameter in norm.parameters():
            parameter.main_grad = torch.ones(24, device=device)
        x = torch.randn(6, 24, device=device, requires_grad=True)
        with torch.no_grad():
            norm(x)
        loss(norm(x)).backward()
        return [x.grad, *(parameter.main_grad for parameter in norm.parameters())]

    expected = run()
    lose()
    found, told = warnings_of(run)
    assert len(told) == 1
    assert_same(tuple(found), tuple(expected), rtol=1e-5, atol=1e-5)


def test_memory_efficient(device, lose):
    """Catches a gradient from an input that was not kept."""
    x, w = (torch.rand(s, device=device, requires_grad=True) for s in [(4, 6), (6,)])

    def forward():
        return loss(fused_op.fused_rms_norm(x, w, memory_efficient=True))

    expected = torch.autograd.grad(forward(), (x, w))
    kept = forward()
    lose()
    # Without a kernel in forward the input is kept.
    found, _ = warnings_of(lambda: torch.autograd.grad(forward(), (x, w)))
    assert_same(found, expected)
    with pytest.raises(fused_op_cuda.KernelError, match="on purpose"):
        kept.backward()


@pytest.mark.parametrize("grad", [False, True])
def test_required(op, device, lose, monkeypatch, grad):
    """Catches a silent fallback where the user has ruled it out."""
    args = arguments(op, requires_grad=grad, device=device)
    result = loss(op.fused(*args))
    lose()
    monkeypatch.setenv("FUSED_OP_JIT", "require")
    with pytest.raises(fused_op_cuda.KernelError, match="a kernel is not available: on purpose"):
        op.fused(*args)
    if grad:
        with pytest.raises(fused_op_cuda.KernelError, match="on purpose"):
            result.backward()


def test_the_function_and_autocast(device, lose):
    """Catches another way into the binding."""
    args = arguments(OPS[0], requires_grad=True, device=device)
    apply = fused_op.FusedLayerNormFunction.apply
    expected = apply(*args, 1e-5)
    lose()
    found, _ = warnings_of(lambda: apply(*args, 1e-5))
    assert_same(found, expected)
    half = [arg.detach().bfloat16() for arg in args[:2]]
    with torch.autocast(device, torch.bfloat16):
        other = arguments(OPS[2], dtype=F32, device=device)
        mixed, _ = warnings_of(lambda: fused_op.fused_add_rms_norm(half[0], other[1], half[1]))
    assert [t.shape for t in mixed] == [half[0].shape] * 2
