"""Who records a call of a variant: the node in C++, or the Function in Python.

Catches a node that gives other bits than the Function, loses a gradient where only some are wanted
or only some outputs are used, or touches Python where it has no need to.
"""

import itertools
import threading

import pytest
import torch
import torch._dynamo.compiled_autograd

import fused_op_cuda
from fused_op import _variant
from tests.calls import assert_same, loss, outputs
from tests.variants.test_variants_saved import EVERY, gradients

NODE = "VariantNode"


@pytest.fixture(params=EVERY)
def plain(request, device):
    return EVERY[request.param](device)


def by_function(call):
    fused_op_cuda.record_in_cpp(False)
    try:
        return call()
    finally:
        fused_op_cuda.record_in_cpp(True)


def test_the_node_records_plain_calls_and_runs_without_python(plain, monkeypatch):
    function, leaves = plain
    result = function(*leaves)
    assert all(NODE in y.grad_fn.name() for y in outputs(result))
    assert not any(
        NODE in y.grad_fn.name() for y in outputs(by_function(lambda: function(*leaves)))
    )

    def python(*args):
        raise AssertionError("backward went through Python")

    monkeypatch.setattr(_variant, "run_backward", python)
    total = loss(result)
    found = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(total, leaves)))
    thread.start()
    thread.join()
    assert len(found) == len(leaves)


def test_the_same_bits_whichever_gradients_are_wanted(plain):
    function, leaves = plain
    for count in (1, 2, len(leaves)):
        for wanted in itertools.combinations(range(len(leaves)), count):
            tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
            ours = [tensors[i] for i in wanted]

            def run(function=function, tensors=tensors, ours=ours):
                result = outputs(function(*tensors))
                used = [[y] for y in result if y.requires_grad] + [result]
                return [
                    torch.autograd.grad(loss(tuple(ys)), ours, retain_graph=True, allow_unused=True)
                    for ys in used
                ]

            for mine, other in zip(run(), by_function(run), strict=True):
                assert [g is None for g in mine] == [g is None for g in other]
                kept = [(a, b) for a, b in zip(mine, other, strict=True) if a is not None]
                for a, b in kept:
                    assert_same(a, b, rtol=0, atol=0)
                    assert a.stride() == b.stride()


def test_second_derivatives_and_batches_of_gradients(plain):
    function, leaves = plain

    def run():
        result = outputs(function(*leaves))
        first = torch.autograd.grad(loss(result), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        batch = torch.stack([torch.ones_like(result[0]), torch.full_like(result[0], 2)])
        batched = torch.autograd.grad(
            function(*leaves) if len(result) == 1 else function(*leaves)[0],
            leaves, batch, is_grads_batched=True, allow_unused=True,
        )  # fmt: skip
        return *first, *second, *(g for g in batched if g is not None)

    assert_same(run(), by_function(run), rtol=0, atol=0)


def test_what_autograd_refuses(plain):
    function, leaves = plain
    first = torch.ones_like(leaves[0]).requires_grad_()
    result = loss(function(first, *leaves[1:]))
    with torch.no_grad():
        first.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    result = loss(function(*leaves))
    gradients(lambda *_: result, leaves)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(lambda *_: result, leaves)


def test_compiled_autograd_and_anomaly_mode(plain):
    function, leaves = plain
    expected = gradients(function, leaves)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert_same(gradients(function, leaves), expected, rtol=0, atol=0)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_same(gradients(function, leaves), expected, rtol=0, atol=0)


def test_a_profiler_sees_the_ops(plain):
    function, leaves = plain
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(function, leaves)
    ours = [e.name for e in profile.events() if e.name.startswith("fused_op::")]
    assert any("_forward" in name for name in ours) and any("_backward" in name for name in ours)
