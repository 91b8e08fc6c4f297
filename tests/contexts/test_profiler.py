"""What torch.profiler shows of a call: the op's name and shapes, on every route.

An eager call goes past the dispatcher, which is what names operators for profilers. Without a name
of its own, its time would be charged to whoever called it.
"""

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.calls import SHAPE, arguments, loss

FORWARD, BACKWARD = "fused_op::norm_forward", "fused_op::norm_backward"


def ours(trace: profile) -> list:
    events = [e for e in trace.events() if e.device_type == DeviceType.CPU]
    return [e for e in events if e.name in (FORWARD, BACKWARD)]


def ancestors(event) -> list[str]:
    parent = event.cpu_parent
    return [] if parent is None else [parent.name, *ancestors(parent)]


def test_a_call_without_gradient_is_one_named_event(op):
    """Catches a kernel that runs unnamed, is named twice, or copies on the way to it."""
    args = arguments(op)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        op.fused(*args)
    (event,) = ours(trace)
    assert event.name == FORWARD
    assert event.input_shapes[1] == list(SHAPE)  # in the order of the schema, norm before input
    others = [e for e in trace.events() if e is not event]
    assert all(FORWARD in ancestors(e) for e in others), others
    assert op.zero_centered or others == []  # 1 + weight is made by operations of PyTorch


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward_is_named_too(op, compiled):
    """Catches a backward that is missing from a trace, and compiled code under other names."""
    torch._dynamo.reset()
    function = torch.compile(op.fused, backend="aot_eager") if compiled else op.fused
    args = arguments(op, requires_grad=True)
    loss(function(*args)).backward()  # compiles
    with profile(record_shapes=True) as trace:
        loss(function(*args)).backward()
    forward, backward = ours(trace)
    assert (forward.name, backward.name) == (FORWARD, BACKWARD)
    assert list(SHAPE) in forward.input_shapes and list(SHAPE) in backward.input_shapes
    if not compiled:
        assert "torch::autograd::CppNode<fused_op::NormNode>" in ancestors(backward)


def test_long_calls_are_named_too():
    """Catches a name that is lost where the call releases the interpreter lock."""
    from fused_op import fused_layer_norm

    with profile() as trace:
        fused_layer_norm(torch.randn(300, 300))
    assert [e.name for e in ours(trace)] == [FORWARD]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_charged_to_the_op(op):
    """Catches a launch outside of the named range: its GPU time would belong to no operator."""
    args = arguments(op, requires_grad=True, device="cuda")
    loss(op.fused(*args)).backward()
    with profile() as trace:
        loss(op.fused(*args)).backward()
        torch.cuda.synchronize()
    if not any(e.device_type == DeviceType.CUDA for e in trace.events()):
        pytest.skip("this machine lets nobody trace kernels")
    assert {event.name for event in ours(trace)} == {FORWARD, BACKWARD}
    for event in ours(trace):
        assert event.device_time_total > 0, event.name
