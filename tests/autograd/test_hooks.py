"""Hooks of tensors and modules, and anomaly mode: whoever listens is told, and may interfere.

Catches a shortcut past nn.Module.__call__ or past the autograd graph, and a gradient that a hook
cannot see, replace, or free. test_saved_tensors.py has the hooks of saved tensors.
"""

import pytest
import torch
from torch.autograd.graph import Node, register_multi_grad_hook

import fused_op
from tests.calls import arguments, assert_same, loss, outputs

MODULES = ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm"]

pytestmark = pytest.mark.usefixtures("recorder")
NAMES = {
    "node": "torch::autograd::CppNode<fused_op::NormNode>",
    "function": "_NormFunctionBackward",
}


@pytest.fixture(params=MODULES)
def module(request, device):
    module = getattr(fused_op, request.param)(6, device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def rows(module):
    count = 2 if "Add" in type(module).__name__ else 1
    device = next(module.parameters()).device
    return [torch.randn(4, 6, device=device, requires_grad=True) for _ in range(count)]


def test_forward_hooks_of_modules(module):
    """Catches a module whose hooks do not run, or whose result they cannot replace."""
    args = rows(module)
    expected = outputs(module(*(2 * t for t in args)))
    module.register_forward_pre_hook(lambda module, args: tuple(2 * t for t in args))
    module.register_forward_hook(lambda module, args, result: tuple(-t for t in outputs(result)))
    assert_same(module(*args), tuple(-t for t in expected), rtol=0, atol=0)


def test_backward_hooks_of_modules(module):
    """Catches gradients that go around the module: all of its outputs' and inputs' pass by."""
    args = rows(module)
    expected = torch.autograd.grad(loss(module(*args)), args)
    seen = []
    module.register_full_backward_pre_hook(
        lambda module, grads: seen.append(len(grads)) or tuple(2 * g for g in grads)
    )
    module.register_full_backward_hook(
        lambda module, grad_inputs, grads: seen.append(len(grad_inputs))
    )
    actual = torch.autograd.grad(loss(module(*args)), args)
    assert seen == [len(args), len(args)]
    assert_same(actual, tuple(2 * g for g in expected))


def test_hooks_of_tensors(op, device):
    """Catches a gradient that a hook is not shown, or that is used without its change."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    between = [t * 1 for t in args]
    seen = []
    for tensor in between:
        tensor.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    result = op.fused(*between)
    actual = torch.autograd.grad(loss(result), args)
    assert len(seen) == len(args)
    assert_same(actual, tuple(3 * g for g in expected), rtol=0, atol=0)


def test_hooks_of_outputs(op, device):
    """Catches a backward that reads the gradient from before the hook."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(2 * loss(op.fused(*args)), args)
    result = outputs(op.fused(*args))
    for output in result:
        output.register_hook(lambda grad: 2 * grad)
    assert_same(torch.autograd.grad(loss(result), args), expected, rtol=0, atol=0)


def test_optimizer_in_backward(op, device):
    """Catches parameters that are stepped late, or whose gradient stays: post-accumulate hooks
    step and free it while backward still runs."""
    args = arguments(op, requires_grad=True, device=device)
    start = [t.detach().clone() for t in args]
    grads = torch.autograd.grad(loss(op.fused(*args)), args)

    def step(leaf):
        with torch.no_grad():
            leaf -= 0.5 * leaf.grad
        leaf.grad = None

    for leaf in args:
        leaf.register_post_accumulate_grad_hook(step)
    loss(op.fused(*args)).backward()
    assert all(leaf.grad is None for leaf in args)
    expected = tuple(s - 0.5 * g for s, g in zip(start, grads, strict=True))
    assert_same(tuple(args), expected, rtol=0, atol=0)


def test_hook_of_several_gradients(op, device):
    """Catches a leaf whose gradient never arrives: the hook waits for all of them."""
    args = arguments(op, requires_grad=True, device=device)
    called = []
    handle = register_multi_grad_hook(args, called.append)
    loss(op.fused(*args)).backward()
    handle.remove()
    assert_same(tuple(called[0]), tuple(t.grad for t in args), rtol=0, atol=0)


def test_node_of_the_graph(op, device, recorder):
    """Catches an output that is not a node's: tools walk the graph by grad_fn, and hook nodes."""
    args = arguments(op, requires_grad=True, device=device)
    result = outputs(op.fused(*args))
    node = result[0].grad_fn
    assert node.name() == NAMES[recorder]
    assert isinstance(node, Node) or recorder == "node"  # of no node in C++, says PyTorch
    assert all(output.grad_fn is node for output in result)
    leaves = [edge.variable for edge, _ in node.next_functions if edge is not None]
    assert {id(leaf) for leaf in leaves} == {id(t) for t in args}
    counts = []
    node.register_hook(lambda grad_inputs, grads: counts.append(len(grads)))
    loss(result).backward()
    assert counts == [len(result)]


def test_anomaly_mode(op, device, recorder):
    """Catches a backward that anomaly mode cannot name, or whose forward call it cannot show."""
    args = arguments(op, requires_grad=True, device=device)
    expected = torch.autograd.grad(loss(op.fused(*args)), args)
    with torch.autograd.set_detect_anomaly(True):
        actual = torch.autograd.grad(loss(op.fused(*args)), args)
        assert_same(actual, expected, rtol=0, atol=0)
        with torch.no_grad():
            args[0][0, 0, 0] = float("nan")
        with (
            pytest.warns(
                UserWarning, match=f"(?s)Error detected in {NAMES[recorder]}.*test_anomaly_mode"
            ),
            pytest.raises(RuntimeError, match=f"'{NAMES[recorder]}' returned nan values"),
        ):
            outputs(op.fused(*args))[0].backward(torch.ones_like(args[0]))
