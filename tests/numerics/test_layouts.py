"""Views that are read in place, copied, or empty, beside the reference on the same view.

Catches a stride, an offset or an odd address that is read as if dense, and a shape without rows or
columns that fails. test_views.py asks the same of views that keep the shape.
"""

import pytest
import torch

from fused_op import fused_layer_norm
from tests.calls import assert_same, loss, outputs

BASE = torch.randn(6, 8, 10, dtype=torch.float64)
LAYOUTS = {
    "row stride": lambda x: x[:, :, :7],
    "offset": lambda x: x[:, 1:, 3:],
    "every second row": lambda x: x[:, ::2],
    "two row strides": lambda x: x[:, :5],
    "transposed": lambda x: x.mT,
    "permuted rows": lambda x: x.transpose(0, 1),
    "column stride": lambda x: x[..., ::2],
    "expanded rows": lambda x: x[:1, :1].expand(6, 8, 10),
    "expanded columns": lambda x: x[..., :1].expand(6, 8, 10),
    "overlapping": lambda x: x.as_strided((5, 8), (3, 1)),
    "one row": lambda x: x[:1, :1, ::3],
    "one column": lambda x: x[..., :1],
    "one dimension": lambda x: x[0, 0],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
}


def test_bytes_at_an_odd_address(op):
    # On CUDA torch itself cannot make such a tensor.
    buffer = bytearray(bytes(3) + BASE[0].numpy().tobytes())
    x = torch.frombuffer(buffer, dtype=torch.float64, offset=3).view(8, 10)
    assert x.data_ptr() % 8 != 0
    args = [x if name in ("input", "residual") else x[1] for name in op.inputs]
    assert_same(op.fused(*args), op.reference(*(t.clone() for t in args)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(op, device, layout):
    x = LAYOUTS[layout](BASE.to(device))
    parameter = torch.randn(2 * x.shape[-1], dtype=torch.float64, device=device)
    results = []
    for function in (op.fused, op.reference):
        named = {
            "input": x,
            "residual": x.flip(0),
            "weight": parameter[::2],
            "bias": parameter[1::2],
        }
        leaves = [named[name].detach().requires_grad_() for name in op.inputs]
        result = outputs(function(*leaves))
        assert all(output.is_contiguous() for output in result) or function is op.reference
        # a sum's gradient is expanded: stride 0
        grads = torch.autograd.grad(
            sum(output.mul(i + 1).sum() for i, output in enumerate(result)), leaves
        )
        results.append((*result, *grads))
    assert_same(*results)


def test_several_normalized_dimensions(op, device):
    x = torch.randn(3, 4, 6, dtype=torch.float64, device=device)
    parameter = torch.randn(4, 6, dtype=torch.float64, device=device)
    for rows in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.expand(2, 3, 4, 6)):
        leaves = [
            (rows if name in ("input", "residual") else parameter).detach().requires_grad_()
            for name in op.inputs
        ]
        results = []
        for function in (op.fused, op.reference):
            result = outputs(function(*leaves))
            results.append((*result, *torch.autograd.grad(loss(result), leaves)))
        assert_same(*results)


def test_copy_on_write_stays_lazy():
    x = torch.randn(4, 6)
    lazy = torch._lazy_clone(x)
    fused_layer_norm(lazy, lazy[0])
    assert torch._C._is_cow_tensor(lazy)
