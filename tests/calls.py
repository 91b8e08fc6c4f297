"""A small call of an op in plain terms: its arguments, one loss over its outputs, a comparison.

The tests that ask by which way a call goes use these; tests/case.py has the calls that are compared
with truth.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fused_op
from fused_op._options import Options
from fused_op_cuda import KernelError

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


def binding_arguments(op, args):
    """(tensors, options), as fused_op_cuda takes them."""
    named = dict(zip(op.inputs, args, strict=True))
    tensors = (named.get(name) for name in ("input", "residual", "weight", "bias", "rng_state"))
    norm = "layer_norm" if op.centred else "rms_norm"
    return tuple(tensors), Options(norm, 1e-5, zero_centered=op.zero_centered)


def take_kernels_away(variant, monkeypatch):
    """As if none of the variant's kernels could be had."""

    class Missing:
        def call(self, *args):
            raise KernelError("a kernel is not available: of this test")

    monkeypatch.setattr(variant, "in_cpp", Missing())
    for op in ("forward_op", "backward_op"):
        monkeypatch.setattr(variant, op, Missing().call)
    monkeypatch.setattr(fused_op._routes, "warned", [])
