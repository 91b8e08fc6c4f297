"""Gradients that are wanted without the others, beside dtypes of their own.

Catches a gradient that nobody writes, or that changes with what else is wanted: which kernel takes
a call depends on the dtypes of the gradients that leave.
"""

import itertools

import pytest
import torch

import fused_op
from tests.case import generator
from tests.ops import BF16, F16, F32

ADD_OPS = [fused_op.fused_add_layer_norm, fused_op.fused_add_rms_norm]
RESIDUALS = {BF16: (BF16, F32), F16: (F16, F32), F32: (F32,)}
OUTPUTS = {BF16: (None, F32), F16: (None, F32), F32: (None, BF16, F16)}
DTYPES = [(a, r, o) for a in RESIDUALS for r in RESIDUALS[a] for o in OUTPUTS[a]]
COLS = (64, 96, 129)


def arguments(op, dtypes, cols, device):
    g = generator(device, op.__name__, str(dtypes), cols)
    names = ["input", "residual", "weight"] + ["bias"] * (op is fused_op.fused_add_layer_norm)
    of = {"input": ((5, cols), dtypes[0]), "residual": ((5, cols), dtypes[1])}
    drawn = {}
    for name in names:
        shape, dtype = of.get(name, ((cols,), F32))
        drawn[name] = torch.randn(shape, generator=g, device=device).to(dtype)
    return drawn


def gradients(op, values, wanted, out_dtype, p, with_sum):
    """{name: gradient} of what is wanted, with the same mask each time."""
    torch.manual_seed(1)
    leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in values.items()}
    output, total = op(**leaves, out_dtype=out_dtype, dropout_p=p)
    g = generator(output.device, "gradients")
    results = [output, total] if with_sum else [output]
    grads = [torch.randn(r.shape, generator=g, device=r.device).to(r.dtype) for r in results]
    found = torch.autograd.grad(results, [leaves[n] for n in wanted], grads)
    return dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("op", ADD_OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t)[6:] for t in d))
def test_subsets(op, dtypes, device):
    for cols, p, with_sum in itertools.product(COLS, (0.0, 0.5), (False, True)):
        values = arguments(op, dtypes, cols, device)
        every = gradients(op, values, tuple(values), dtypes[2], p, with_sum)
        for count in range(1, len(values)):
            for wanted in itertools.combinations(values, count):
                found = gradients(op, values, wanted, dtypes[2], p, with_sum)
                for name in wanted:
                    a, b = found[name].double(), every[name].double()
                    bound = 2 * torch.finfo(found[name].dtype).eps * (b.abs() + 1)
                    assert ((a - b).abs() <= bound).all(), (name, wanted, cols, p, with_sum)


@pytest.mark.parametrize("saved", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_saved_in_another_dtype(dtype, saved, device):
    """A hook on saved tensors may give back rows of another dtype."""
    x = torch.randn(7, 96, generator=generator(device, "x"), device=device).to(dtype)
    right = x.clone().requires_grad_()
    fused_op.fused_layer_norm(right).float().pow(3).sum().backward()
    leaf = x.clone().requires_grad_()

    def pack(tensor):
        return tensor.to(saved) if tensor.shape == x.shape else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = fused_op.fused_layer_norm(leaf)
    output.float().pow(3).sum().backward()
    coarse = max(torch.finfo(saved).eps, torch.finfo(dtype).eps)
    torch.testing.assert_close(leaf.grad, right.grad, rtol=0, atol=60 * coarse)
