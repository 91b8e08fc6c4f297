"""What the gated RMS norm has beyond other variants: tests/variants/test_variants.py has the rest.

Catches a gate of another dtype or without its own strides, groups that mix, what is saved for
backward beyond the inputs, and a module or an error that is not what it says.
"""

import itertools

import pytest
import torch
from torch import nn

import fused_op
from fused_op import FusedGatedRMSNorm, fused_gated_rms_norm, fused_rms_norm, reference
from tests.calls import assert_same
from tests.case import generator
from tests.ops import BF16, F16, F32, F64

DTYPES = [F16, BF16, F32]


def draw(*shape, dtype=F32, device="cpu"):
    return torch.randn(shape, generator=generator(device, shape, dtype), device=device).to(dtype)


@pytest.mark.parametrize(
    ("rows", "gate", "weight"), list(itertools.product(DTYPES, DTYPES, [*DTYPES, F64, None]))
)
@pytest.mark.parametrize("gate_first", [False, True])
def test_any_dtypes_together(rows, gate, weight, gate_first, device):
    cols = 48
    x, z = draw(6, cols, dtype=rows, device=device), draw(6, cols, dtype=gate, device=device)
    w = None if weight is None else draw(cols, dtype=weight, device=device)
    leaves = [t.requires_grad_() for t in (x, z, w) if t is not None]
    y = fused_gated_rms_norm(x, z, w, 1e-5, gate_first=gate_first)
    truth = reference.fused_gated_rms_norm(
        x.double(), z.double(), None if w is None else w.double(), 1e-5, gate_first=gate_first
    )
    dy = draw(6, cols, dtype=rows, device=device)
    assert y.dtype is rows
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    expected = [truth, *torch.autograd.grad(truth, leaves, dy.double())]
    for mine, right in zip(found, expected, strict=True):
        tolerance = 2 * torch.finfo(mine.dtype).eps + 1e-5
        assert (mine.double() - right.double()).abs().max() <= tolerance * right.abs().max()
    assert [g.dtype for g in found[1:]] == [t.dtype for t in leaves]


def test_groups_are_norms_of_their_own(device):
    x, z, w = (
        draw(4, 5, 96, device=device),
        draw(4, 5, 96, device=device),
        draw(96, device=device),
    )
    y = fused_gated_rms_norm(x, z, w, 1e-6, group_size=32)
    for part in (slice(0, 32), slice(32, 64), slice(64, 96)):
        alone = fused_gated_rms_norm(x[..., part], z[..., part], w[part], 1e-6)
        assert torch.equal(y[..., part], alone)


def test_an_open_gate_leaves_the_norm(device):
    x, w = draw(7, 200, device=device), draw(200, device=device)
    open_gate = torch.full_like(x, 200.0)
    found = fused_gated_rms_norm(x, open_gate, w, 1e-6, activation="sigmoid")
    assert_same(found, fused_rms_norm(x, w, 1e-6))
    closed = fused_gated_rms_norm(x, -open_gate, w, 1e-6)
    assert (closed.abs() < 1e-30).all()


@pytest.mark.parametrize("gate_first", [False, True])
def test_extreme_gates(gate_first, device):
    """Neither a large gate nor a small one gives NaN in forward, or in backward where it is 0."""
    z = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 80, -80, 200, -200, 3e38, -3e38]], device=device)
    x = torch.ones_like(z).requires_grad_()
    z.requires_grad_()
    for activation in ("silu", "sigmoid"):
        keep = slice(0, 8) if activation == "silu" else slice(None)
        y = fused_gated_rms_norm(
            x[:, keep], z[:, keep], None, 1e-6, activation=activation, gate_first=gate_first
        )
        grads = torch.autograd.grad(y.sum(), (x, z))
        truth = reference.fused_gated_rms_norm(
            x[:, keep].double(), z[:, keep].double(), None, 1e-6, activation=activation,
            gate_first=gate_first,
        )  # fmt: skip
        assert_same(y.double(), truth, rtol=1e-5, atol=1e-30)
        assert all(g.isfinite().all() for g in grads)


def test_no_eps_is_the_machine_epsilon():
    x, z = draw(3, 8) * 1e-4, draw(3, 8)
    eps = torch.finfo(F32).eps
    assert torch.equal(fused_gated_rms_norm(x, z), fused_gated_rms_norm(x, z, eps=eps))
    half = fused_gated_rms_norm(x.to(BF16), z.to(BF16))
    assert torch.equal(half, fused_gated_rms_norm(x.to(BF16), z.to(BF16), eps=eps))


def test_saved_are_the_inputs_and_a_number_a_group(device):
    x, w = draw(6, 32, device=device).requires_grad_(), draw(32, device=device).requires_grad_()
    wide = draw(6, 96, device=device).requires_grad_()
    z = wide[:, 32:64]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused_gated_rms_norm(x, z, w, 1e-6, group_size=8)
    stats = [t for t in saved if t.shape == (1, 24)]
    others = {t.data_ptr() for t in saved} - {t.data_ptr() for t in stats}
    assert len(saved) == 4 and others == {x.data_ptr(), z.data_ptr(), w.data_ptr()}


def test_module():
    x, z = draw(2, 3, 24), draw(2, 3, 24)
    norm = FusedGatedRMSNorm(24, 1e-6, group_size=8, activation="sigmoid", gate_first=True)
    nn.init.normal_(norm.weight)
    expected = fused_gated_rms_norm(
        x, z, norm.weight, 1e-6, group_size=8, activation="sigmoid", gate_first=True
    )
    assert torch.equal(norm(x, z), expected)
    assert repr(norm) == (
        "FusedGatedRMSNorm(24, eps=1e-06, group_size=8, activation='sigmoid', gate_first=True)"
    )
    fresh = FusedGatedRMSNorm(24, zero_centered=True)
    assert (fresh.weight == 0).all() and fresh.eps is None
    assert torch.equal(fresh(x, z), FusedGatedRMSNorm(24)(x, z))
    assert FusedGatedRMSNorm(24, elementwise_affine=False).weight is None
    assert FusedGatedRMSNorm(24, device="meta", dtype=BF16).weight.dtype is BF16
    copy = FusedGatedRMSNorm(24, 1e-6, group_size=8, activation="sigmoid", gate_first=True)
    copy.load_state_dict(norm.state_dict())
    assert torch.equal(copy(x, z), expected)


MODULE_ERRORS = [
    (TypeError, "argument 'activation' must be str, not int", {"activation": 1}),
    (ValueError, "activation must be 'silu' or 'sigmoid', got 'gelu'", {"activation": "gelu"}),
    (ValueError, "rounding must be 'once' or 'before_weight'", {"rounding": "twice"}),
    (TypeError, "argument 'gate_first' must be bool, not int", {"gate_first": 1}),
    (TypeError, "argument 'zero_centered' must be bool, not NoneType", {"zero_centered": None}),
    (TypeError, "argument 'group_size' must be int, not float", {"group_size": 4.0}),
    (TypeError, "argument 'group_size' must be int, not bool", {"group_size": True}),
]


@pytest.mark.parametrize(("error", "sentence", "options"), MODULE_ERRORS)
def test_options_that_are_refused(error, sentence, options):
    x = draw(2, 8)
    with pytest.raises(error, match=f"fused_gated_rms_norm: {sentence}"):
        fused_gated_rms_norm(x, x, **options)
    with pytest.raises(error, match=f"FusedGatedRMSNorm: {sentence}"):
        FusedGatedRMSNorm(8, **options)


def test_a_module_of_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="group_size must divide hidden_size, 8, got 3"):
        FusedGatedRMSNorm(8, group_size=3)


X = torch.ones(2, 8)
CALL_ERRORS = [
    (RuntimeError, "gate must have the shape of input", (X, X[:1]), {}),
    (
        RuntimeError,
        "gate of .* does not fit input of .*: both or none must be",
        (X, X.double()),
        {},
    ),
    (NotImplementedError, "not implemented for .*: gate must be", (X, X.long()), {}),
    (RuntimeError, "Expected weight to be of same shape", (X, X, X[0, :4]), {}),
    (RuntimeError, "mixed dtype: expect parameter", (X, X, X[0].long()), {}),
    (RuntimeError, "group_size must divide the last dim.*, 8, got 3", (X, X), {"group_size": 3}),
    (RuntimeError, "group_size must divide the last dim.*, 8, got 0", (X, X), {"group_size": 0}),
    (RuntimeError, "gate must be a dense", (X, X.to_sparse()), {}),
]


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("error", "sentence", "tensors", "options"), CALL_ERRORS)
def test_calls_that_are_refused(error, sentence, tensors, options, disabled):
    """By kernels and by the formula with one sentence."""

    def call():
        return fused_gated_rms_norm(*tensors, **options)

    with pytest.raises(error, match=f"fused_gated_rms_norm: {sentence}"):
        if disabled:
            with fused_op.disabled():
                call()
        else:
            call()


def test_the_gate_is_a_tensor():
    with pytest.raises(TypeError, match="argument 'gate' must be Tensor, not NoneType"):
        fused_gated_rms_norm(X, None)


def test_rows_longer_than_a_part(device):
    """Of many parts on the CPU, and of several CTAs' registers on the GPU; groups of such, too."""
    x, z, w = (
        draw(2, 80000, device=device),
        draw(2, 80000, device=device),
        draw(80000, device=device),
    )
    for options in (
        {},
        {"gate_first": True},
        {"group_size": 40000},
        {"group_size": 40000, "gate_first": True},
    ):
        leaves = [t.clone().requires_grad_() for t in (x, z, w)]
        y = fused_gated_rms_norm(*leaves, 1e-6, **options)
        found = [y, *torch.autograd.grad(y, leaves, x)]
        leaves = [t.double().requires_grad_() for t in (x, z, w)]
        truth = reference.fused_gated_rms_norm(*leaves, 1e-6, **options)
        expected = [truth, *torch.autograd.grad(truth, leaves, x.double())]
        for mine, right in zip(found, expected, strict=True):
            assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()
