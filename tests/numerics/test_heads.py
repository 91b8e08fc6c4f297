"""Rows at two strides: the heads of a packed qkv tensor, and the like, read where they lie."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fused_op import fused_layer_norm, fused_rms_norm
from tests.ops import BF16, F32, PAIRS

# [batch, seq, 3, heads, head_dim] and views of it; each is two strides of dense rows.
VIEWS = {
    "q": lambda qkv: qkv[:, :, 0],
    "v": lambda qkv: qkv[:, :, 2],
    "some heads": lambda qkv: qkv[:, :, 1, 1:3],
    "one batch, seq before heads": lambda qkv: qkv[:1, :, 0].transpose(1, 2),
    "every second": lambda qkv: qkv[:, ::2, 0],
    "backwards in seq": lambda qkv: qkv[0, :, 0].unfold(0, 2, 1).permute(0, 3, 1, 2)[..., 0, :],
}


def packed(pair, device, head_dim, heads=5):
    torch.manual_seed(0)
    return torch.randn(2, 7, 3, heads, head_dim, device=device).to(pair.rows)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 1024])
def test_views_have_the_bits_of_copies(device, pair, name, head_dim):
    """Catches a row that is read from another head, and an outer stride that is lost: forward, the
    gradient of the input, and both arguments of backward at two strides."""
    if name == "backwards in seq" and head_dim > 64:
        return
    x = VIEWS[name](packed(pair, device, head_dim))
    if name != "backwards in seq":
        assert not x.is_contiguous()
    w = torch.randn(x.shape[-1], device=device).to(pair.params)
    dy = VIEWS[name](packed(pair, device, head_dim).neg()) + 0
    results = []
    for rows, grads in ((x, dy), (x.clone(memory_format=torch.contiguous_format), dy)):
        leaf, weight = rows.detach().requires_grad_(), w.clone().requires_grad_()
        y = fused_rms_norm(leaf, weight)
        assert y.is_contiguous()
        results.append((y, *torch.autograd.grad(y, (leaf, weight), grads)))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected) or got.shape == w.shape
    torch.testing.assert_close(results[0][2], results[1][2])
    strided = VIEWS[name](packed(pair, device, head_dim).neg())
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(fused_rms_norm(leaf, w), leaf, strided)
    assert torch.equal(gradient, results[0][1])


def test_one_at_two_strides_beside_one_at_any_address(device):
    """Catches vectors that are read at an address which is no multiple of theirs."""
    qkv = torch.randn(2, 7, 3, 4, 64, device=device)
    shifted = torch.randn(2 * 7 * 4 * 64 + 1, device=device)[1:].view(2, 7, 4, 64)
    for x, dy in ((shifted, qkv[:, :, 0]), (qkv[:, :, 0], shifted)):
        results = []
        for rows, grads in ((x, dy), (x.contiguous().clone(), dy.contiguous().clone())):
            leaf = rows.detach().requires_grad_()
            results.append(torch.autograd.grad(fused_rms_norm(leaf), leaf, grads)[0])
        assert torch.equal(*results)


def copies(function):
    with profile(activities=[ProfilerActivity.CPU]) as log:
        function()
    return sum(event.name in ("aten::clone", "aten::copy_") for event in log.events())


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_no_copy(device, dtype):
    """Catches views that are made dense first, in forward or backward."""
    qkv = torch.randn(2, 7, 3, 4, 64, device=device).to(dtype).requires_grad_()
    w = torch.ones(64, device=device, dtype=dtype)
    for view in (qkv[:, :, 0], qkv[:, :, 1, 1:3]):
        with torch.no_grad():
            assert copies(lambda view=view: fused_layer_norm(view, w)) == 0
        rows = view.detach().requires_grad_()
        y = fused_layer_norm(rows, w)
        dy = torch.randn_like(qkv)[:, :, 2, : view.shape[2]]
        assert copies(lambda y=y, rows=rows, dy=dy: torch.autograd.grad(y, rows, dy)) == 0
    # Three strides, and rows that are not dense, are copied once.
    for view in (qkv.transpose(1, 3)[:, :, 0], qkv.transpose(3, 4)[:, :, 0]):
        with torch.no_grad():
            ones = torch.ones(view.shape[-1], device=device, dtype=dtype)
            assert copies(lambda view=view, ones=ones: fused_layer_norm(view, ones)) == 2


def test_any_number_of_inner_rows(device):
    """Catches a wrong division of row numbers: every count of heads up to some, and large ones."""
    for heads in (*range(1, 70), 127, 128, 129, 1000):
        wide = torch.randn(3, heads, 2, 8, device=device)
        view = wide[:, :, 0][:, : max(heads - 1, 1)]
        expected = fused_layer_norm(view.contiguous())
        assert torch.equal(fused_layer_norm(view), expected), heads


def test_all_pairs_are_here():
    assert {pair.rows for pair in PAIRS} >= {BF16, F32}
