"""The mask of dropout: which generator it follows, how many elements it keeps, where it is made."""

import math
from functools import cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fused_op
import fused_op_cuda
from fused_op import fused_add_layer_norm, fused_layer_norm, fused_rms_norm, reference
from fused_op._options import Options
from fused_op._philox import keep_mask
from tests.calls import assert_same
from tests.ops import BF16, DEVICES, F16, F32, F64

needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")


def mask_of(rows, cols, p, state, device, dtype=F32, adds=False, misaligned=False):
    """What the raw op keeps: of ones where it adds, else of its output, which is the bias."""
    bias = torch.ones(cols, dtype=dtype, device=device)
    x = torch.ones(rows * cols + misaligned, dtype=dtype, device=device)[misaligned:]
    x = x.view(rows, cols)
    options = Options("layer_norm", 1e-5, dropout_p=p)
    zero = torch.zeros_like(x)
    if adds:
        return fused_op_cuda.norm_forward((x, zero, None, None, state), options, False)[1] != 0
    return fused_op_cuda.norm_forward((zero, None, None, bias, state), options, False)[0] != 0


STATES = [(0, 0), (42, 4), (-1, 2**62), (2**63 - 1, -4)]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_mask_is_a_function_of_state_row_and_column(device, dtype, adds):
    """Catches a mask that depends on dtype, tiling, alignment or device: every kernel must keep
    exactly what the twin in PyTorch's operations keeps."""
    shapes = [(3, 1), (4, 7), (5, 64), (2, 1000), (3, 1023), (7, 4096), (2, 9001), (2, 40000)]
    for i, (rows, cols) in enumerate(shapes):
        state = torch.tensor(STATES[i % len(STATES)])
        p = (0.1, 0.5, 0.9)[i % 3]
        expected = keep_mask(state, rows, cols, p, torch.device(device))
        for there in {"cpu", device}:
            for misaligned in (False, True):
                given = dtype, adds, misaligned
                kept = mask_of(rows, cols, p, state.to(there), device, *given)
                assert torch.equal(kept, expected), (rows, cols, p, misaligned)


def test_one_row_is_the_same_in_any_number_of_rows(device):
    state = torch.tensor([5, 8])
    many = mask_of(300, 96, 0.5, state, device)
    assert torch.equal(mask_of(7, 96, 0.5, state, device), many[:7])
    assert torch.equal(mask_of(300, 40, 0.5, state, device), many[:, :40])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.75, 0.999])
def test_keep_rate_and_independence(device, p):
    """Catches a wrong threshold, and bits that are used for two elements: neighbours in a row, in a
    column, and of two offsets must be as alike as chance has it."""
    rows, cols = 512, 1024
    kept = mask_of(rows, cols, p, torch.tensor([1, 0]), device).double()
    other = mask_of(rows, cols, p, torch.tensor([1, 4]), device).double()
    n, q = rows * cols, 1 - p
    six_sigma = 6 * math.sqrt(p * q / n)
    assert abs(kept.mean().item() - q) < six_sigma + 2**-17
    for axis in (0, 1):  # along columns and rows
        each = kept.mean(axis)
        assert (each - q).abs().max() < 7 * math.sqrt(p * q / (rows, cols)[axis]) + 2**-17
    pairs = [(kept[:, k:], kept[:, :-k]) for k in (1, 2, 4, 8, 16)]
    pairs += [(kept[k:], kept[:-k]) for k in (1, 2, 32)] + [(kept, other)]
    for a, b in pairs:
        covariance = ((a - q) * (b - q)).mean().item()
        assert abs(covariance) < 7 * p * q / math.sqrt(a.numel()) + 2**-16


@cache
def formula(offset, rows, cols, p, device):
    """The mask of a large tensor, which its four calls share."""
    return keep_mask(torch.tensor([7, offset]), rows, cols, p, torch.device(device))


@pytest.mark.slow
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_mean_stays(device, dtype, adds):
    """Catches a scale that is not the inverse of the probability that keeps an element: near 1, a p
    that is rounded for the mask alone is off by half, and drops everything from 1 - 2^-17 on."""
    rows, cols = 1024, 4096
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(6, generator=g, dtype=F64).tolist()
    for p in (1e-9, 2**-17, 0.1, 0.5, 0.999, 0.99999, 0.999995, 1 - 2**-40, *drawn):
        state = torch.tensor([7, round(p * 1000)])
        x = torch.ones(rows, cols, dtype=dtype, device=device)
        options = Options("rms_norm" if adds else "layer_norm", 1e-5, dropout_p=p)
        zero = torch.zeros_like(x)
        if adds:
            tensors = x, zero, None, None, state
        else:
            tensors = zero, None, None, torch.ones(cols, dtype=dtype, device=device), state
        raw = fused_op_cuda.norm_forward(tensors, options, False)[int(adds)]
        kept = raw != 0
        q = max(65536 - math.floor(p * 65536 + 0.5), 1) / 65536
        least, most = raw[kept].aminmax()  # refuses no elements at all
        assert least == most
        assert most.item() == pytest.approx(1 / q, rel=2 * torch.finfo(dtype).eps)
        assert abs(kept.double().mean().item() - q) <= 6 * math.sqrt(q * (1 - q) / kept.numel())
        assert_same(kept, formula(round(p * 1000), rows, cols, p, device), rtol=0, atol=0)


def test_zero_and_one(device):
    """p = 0 is no dropout at all, to the bit; p = 1 drops everything, infinities and NaN too."""
    x = torch.randn(6, 96, device=device, requires_grad=True)
    w = torch.randn(96, device=device, requires_grad=True)
    for p, training in ((0.0, True), (0, True), (0.5, False), (1, False)):
        y = fused_layer_norm(x, w, dropout_p=p, training=training)
        expected = fused_layer_norm(x, w)
        assert_same(y, expected, rtol=0, atol=0)
        grads = torch.autograd.grad(y.sum(), (x, w))
        assert_same(grads, torch.autograd.grad(expected.sum(), (x, w)), rtol=0, atol=0)
    bad = torch.full((2, 96), math.inf, device=device)
    assert not fused_layer_norm(bad, w, dropout_p=1.0).any()
    output, sum = fused_add_layer_norm(bad, x[:2], w, dropout_p=1.0)
    assert_same((output, sum), (fused_layer_norm(x[:2], w), x[:2]), rtol=0, atol=0)
    gx, gw = torch.autograd.grad(fused_layer_norm(x, w, dropout_p=1.0).sum(), (x, w))
    assert not gx.any() and not gw.any()


def test_follows_manual_seed(device):
    """Catches a generator of our own, or one that does not move on."""
    x = torch.randn(8, 64, device=device)
    torch.manual_seed(3)
    first = [fused_rms_norm(x, dropout_p=0.5) for _ in range(3)]
    torch.manual_seed(3)
    again = [fused_rms_norm(x, dropout_p=0.5) for _ in range(3)]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    torch.manual_seed(4)
    assert not torch.equal(fused_rms_norm(x, dropout_p=0.5), first[0])
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    once = fused_rms_norm(x, dropout_p=0.5)
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)
    assert torch.equal(fused_rms_norm(x, dropout_p=0.5), once)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_mask(device, reentrant):
    """Catches a mask that is drawn anew when forward is run again for backward."""
    x = torch.randn(8, 64, device=device, requires_grad=True)

    def block(x):
        return fused_add_layer_norm(x, x * 2, dropout_p=0.5)[1] ** 2

    results = []
    for call in (
        block,
        lambda x: checkpoint(block, x, use_reentrant=reentrant),
    ):
        torch.manual_seed(0)
        x.grad = None
        y = call(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert_same(*results, rtol=0, atol=0)


def test_derivatives_keep_the_mask(device, monkeypatch):
    """Second derivatives, forward mode, and vmap with one mask for all."""
    state = torch.tensor([9, 4])
    monkeypatch.setattr(fused_op._routes, "dropout_state", lambda input: state)
    x = torch.randn(3, 6, dtype=F64, device=device, requires_grad=True)
    r = torch.randn(3, 6, dtype=F64, device=device, requires_grad=True)
    w = torch.randn(6, dtype=F64, device=device, requires_grad=True)
    fast = {"check_forward_ad": True, "check_batched_grad": True}
    for function, args in (
        (lambda x, w: fused_layer_norm(x, w, dropout_p=0.4), (x, w)),
        (lambda x, r, w: fused_add_layer_norm(x, r, w, dropout_p=0.4), (x, r, w)),
    ):
        assert torch.autograd.gradcheck(function, args, **fast)
        assert torch.autograd.gradgradcheck(function, args)
    rows = torch.func.vmap(lambda row: fused_layer_norm(row, dropout_p=0.4))(x)
    one = fused_layer_norm(x[:1], dropout_p=0.4)
    assert torch.equal(rows[0] == 0, one[0] == 0) and torch.equal(rows[1] == 0, one[0] == 0)


def test_vmap_asks_how_random_it_should_be(device):
    x = torch.randn(64, 32, device=device)
    f = torch.func.vmap(lambda row: fused_layer_norm(row, dropout_p=0.5), randomness="error")
    with pytest.raises(RuntimeError, match="random"):
        f(x)
    same, different = (
        torch.func.vmap(lambda row: fused_layer_norm(row, dropout_p=0.5), randomness=mode)(x) == 0
        for mode in ("same", "different")
    )
    assert (same == same[0]).all() and not (different == different[0]).all()


def test_compiled(device):
    """Catches a mask that is constant in compiled code, or differs between its two passes."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, r: fused_add_layer_norm(x, r, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    x, r = torch.ones(2, 16, 64, device=device).requires_grad_().unbind()
    masks = []
    for _ in range(2):
        _, sum = compiled(x, torch.zeros_like(r))
        kept = sum != 0
        assert 0.3 < kept.float().mean() < 0.7
        (gradient,) = torch.autograd.grad(sum.sum(), x)
        assert_same(gradient, kept * 2.0)
        masks.append(kept)
    assert not torch.equal(*masks)


def test_twin_draws_too(device):
    x = torch.randn(64, 64, device=device)
    a, b = (reference.fused_layer_norm(x, dropout_p=0.5) for _ in range(2))
    assert 0.4 < (a == 0).float().mean() < 0.6 and not torch.equal(a == 0, b == 0)
    assert torch.equal(reference.fused_layer_norm(x, dropout_p=0.5, training=False) == 0, x == 0)
    _, sum = reference.fused_add_rms_norm(x, torch.zeros_like(x), dropout_p=0.5)
    assert 0.4 < (sum == 0).float().mean() < 0.6


def test_disabled_draws_too(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    torch.manual_seed(0)
    expected = fused_layer_norm(x, dropout_p=0.5)
    torch.manual_seed(0)
    with fused_op.disabled():
        actual = fused_layer_norm(x, dropout_p=0.5)
    assert_same(actual, expected)
    assert_same(*(torch.autograd.grad(y.square().sum(), x) for y in (actual, expected)))


@needs_cuda
def test_every_replay_of_a_graph_draws_anew():
    """Catches a seed that was captured as a number; forward and backward of one replay must still
    agree."""
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    zero = torch.zeros_like(x)

    def step():
        output, sum = fused_add_layer_norm(x, zero, dropout_p=0.5)
        return sum, *torch.autograd.grad(sum.sum() + output.sum() * 0, x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sum, gradient = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(sum != 0)
        assert 0.4 < masks[-1].float().mean() < 0.6
        assert torch.equal(gradient != 0, masks[-1])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    torch.manual_seed(1)
    graph.replay()
    first = (sum != 0).clone()
    torch.manual_seed(1)
    graph.replay()
    assert torch.equal(first, sum != 0)


@needs_cuda
def test_no_synchronisation():
    x = torch.randn(64, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_layer_norm(x, dropout_p=0.5)
        fused_add_layer_norm(x, x, dropout_p=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
