"""What post-norm, addition and pre-norm have beyond other variants: the bits of the two ops.

So has post-norm and addition alone. Catches a call that is not, bit by bit, fused_rms_norm and then
fused_add_rms_norm, or an addition: for any dtypes,
shapes, layouts and options, forward and backward; and what is saved for backward beyond the input
and the sum. tests/variants/test_variants.py has the rest.
"""

import itertools
import random

import pytest
import torch

import fused_op
from fused_op import (
    FusedPostAddPreRMSNorm,
    fused_add_rms_norm,
    fused_post_add_pre_rms_norm,
    fused_rms_norm,
    fused_rms_norm_add,
)
from tests.case import generator
from tests.ops import BF16, F16, F32, F64

LAYOUTS = {
    "dense": lambda *shape: torch.empty(shape),
    "apart": lambda rows, cols: torch.empty(rows, cols + 3)[:, :cols],
    "misaligned": lambda rows, cols: torch.empty(rows * cols + 1)[1:].view(rows, cols),
    "columns": lambda rows, cols: torch.empty(cols, rows).t(),
}


def two_ops(input, residual, post_weight, pre_weight, eps=None, residual_dtype=None, **options):
    branch = fused_rms_norm(input, post_weight, eps, **options)
    return fused_add_rms_norm(
        branch, residual, pre_weight, eps, residual_dtype=residual_dtype, **options
    )


def assert_equal(found, expected):
    """NaN is equal to NaN."""
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


def draw(*shape, dtype=F32, device="cpu", layout="dense", scale=1.0):
    values = torch.randn(shape, generator=generator("cpu", shape, dtype, layout)) * scale
    return LAYOUTS[layout](*shape).copy_(values).to(device, dtype)


class Drawn:
    """The call of one seed, made of everything that two ops may get."""

    def __init__(self, seed, device):
        pick = random.Random(seed).choice
        self.dtype = pick([F16, BF16, F32, F64])
        wide = F32 if self.dtype.itemsize == 2 else self.dtype
        residual_dtype = pick([self.dtype, wide])
        self.shape = (
            pick([1, 2, 7, 33, 130]),
            pick([1, 2, 3, 8, 31, 64, 100, 333, 1000, 1024, 2048, 4096, 4097, 5000]),
        )
        self.options = {
            "eps": pick([None, 1e-6, 1e-5, 0.0]),
            "zero_centered": pick([False, True]),
            "rounding": pick(["once", "before_weight"]),
            "residual_dtype": pick([None, residual_dtype, wide]),
        }

        def rows(dtype):
            scale = pick([1.0, 1.0, 1e-3, 30.0, *([1e30, 1e-30] if dtype == F32 else [])])
            layout = pick(list(LAYOUTS))
            return draw(*self.shape, dtype=dtype, device=device, layout=layout, scale=scale)

        def weight():
            dtype = pick([None, self.dtype, self.dtype, wide, F16, BF16, F32, F64])
            return None if dtype is None else draw(self.shape[1], dtype=dtype, device=device)

        self.tensors = [rows(self.dtype), rows(residual_dtype), weight(), weight()]
        self.wanted = [pick([False, True, True]) for _ in self.tensors]
        self.used = pick([(0,), (0, 1), (0, 1)])

    def run(self, function):
        """Outputs, and gradients of what wants one."""
        leaves = [
            None if t is None else t.detach().requires_grad_(w)
            for t, w in zip(self.tensors, self.wanted, strict=True)
        ]
        outputs = function(*leaves, **self.options)
        sought = [t for t in leaves if t is not None and t.requires_grad]
        if not sought:
            return *outputs, None
        grads = [draw(*y.shape, dtype=y.dtype, device=y.device) for y in outputs]
        found = torch.autograd.grad(
            [outputs[i] for i in self.used], sought, [grads[i] for i in self.used]
        )
        return *(y.detach() for y in outputs), *found


@pytest.mark.parametrize("seed", range(150))
def test_bits_of_the_two_ops(seed, device):
    call = Drawn(seed, device)
    assert_equal(call.run(fused_post_add_pre_rms_norm), call.run(two_ops))


@pytest.mark.parametrize("seed", range(1000, 1080))
def test_bits_of_norm_and_addition(seed, device):
    call = Drawn(seed, device)
    del call.tensors[3], call.wanted[3]
    call.used = (0,)

    def one_by_one(input, residual, weight, eps, residual_dtype, **options):
        branch = fused_rms_norm(input, weight, eps, **options)
        return (residual.to(residual_dtype or residual.dtype) + branch,)

    found = call.run(lambda *tensors, **options: (fused_rms_norm_add(*tensors, **options),))
    assert_equal(found, call.run(one_by_one))


@pytest.mark.parametrize("residual", [BF16, F32])
def test_only_the_sum_is_used(residual, device):
    """As behind the last block that has a norm at its end."""
    h, w = draw(6, 40, dtype=BF16, device=device), draw(40, dtype=BF16, device=device)
    r, grad = (draw(6, 40, dtype=residual, device=device) for _ in range(2))
    results = []
    for function in (fused_post_add_pre_rms_norm, two_ops):
        leaves = [t.clone().requires_grad_() for t in (h, r, w, w)]
        _, sum = function(*leaves)
        results.append(torch.autograd.grad(sum, leaves[:3], grad))
    assert_equal(*results)


def test_extreme_rows_keep_to_themselves(device):
    """Rows whose squares overflow or vanish, in the branch or in the sum, beside usual ones."""
    h, r = draw(9, 256, device=device), draw(9, 256, device=device)
    w = draw(256, device=device)
    usual = fused_post_add_pre_rms_norm(h, r, w, w, 1e-6)
    scales = torch.tensor([1, 1e-30, 1, 1e30, 1, 1e19, 1, 1e38, 1], device=device)[:, None]
    for rows in itertools.product((h, h * scales), (r, r * scales, r * scales.flip(0))):
        found = fused_post_add_pre_rms_norm(*rows, w, w, 1e-6)
        assert_equal(found, two_ops(*rows, w, w, 1e-6))
        for row in (0, 2, 4, 6, 8):
            assert torch.equal(found[0][row], usual[0][row])
    for value in (float("nan"), float("inf")):
        bad = h.clone()
        bad[3, 5] = value
        found = fused_post_add_pre_rms_norm(bad, r, w, w, 1e-6)
        assert found[0][3].isnan().any()
        assert_equal([y[4:] for y in found], [y[4:] for y in usual])


def test_saved_are_the_input_the_sum_and_two_numbers_a_row(device):
    h, r = (draw(6, 32, device=device).requires_grad_() for _ in range(2))
    w1, w2 = (draw(32, device=device).requires_grad_() for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, sum = fused_post_add_pre_rms_norm(h, r, w1, w2, 1e-6)
    assert [tuple(t.shape) for t in saved] == [(6, 32), (6, 32), (32,), (32,), (2, 6)]
    assert [t.data_ptr() for t in saved[:4]] == [t.data_ptr() for t in (h, sum, w1, w2)]


def test_a_residual_alone_saves_nothing(device):
    """Its gradient is that of the sum. Catches rows kept for it, and an error if they change."""
    h, w = draw(6, 32, device=device), draw(32, device=device)
    r = draw(6, 32, device=device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sum = fused_rms_norm_add(h, r, w, 1e-6)
    assert not saved
    h.zero_()
    for create_graph in (False, True):
        g = draw(6, 32, device=device).requires_grad_()
        (grad,) = torch.autograd.grad(sum, r, g, retain_graph=True, create_graph=create_graph)
        assert torch.equal(grad, g) and (grad.requires_grad or not create_graph)
    with fused_op.disabled():
        (grad,) = torch.autograd.grad(sum, r, g)
    assert torch.equal(grad, g)


def test_the_formula_has_the_same_gradients():
    """What `disabled()` and second derivatives take: all four, and with the sum alone."""
    tensors = [draw(5, 24, dtype=F64), draw(5, 24, dtype=F64), draw(24, dtype=F64)]
    leaves = [t.requires_grad_() for t in (*tensors, tensors[2].clone())]
    y, sum = fused_post_add_pre_rms_norm(*leaves, 1e-6)
    for total in ((y * y).sum() + (3 * sum * sum).sum(), (sum * sum).sum()):
        used = leaves if total.grad_fn is not None else leaves[:3]
        found = torch.autograd.grad(total, used, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(total, used, create_graph=True, allow_unused=True)
        for a, b in zip(found, again, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_rows_longer_than_a_part(device):
    """Of many parts on the CPU, and of several CTAs' registers on the GPU."""
    tensors = [draw(2, 80001, device=device) for _ in range(2)]
    weights = [draw(80001, device=device) for _ in range(2)]
    results = []
    for function in (fused_post_add_pre_rms_norm, two_ops):
        leaves = [t.clone().requires_grad_() for t in (*tensors, *weights)]
        outputs = function(*leaves, 1e-6)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, tensors)])
    assert_equal(*results)


def test_module():
    h, r = draw(3, 24), draw(3, 24)
    norm = FusedPostAddPreRMSNorm(24, 1e-6, rounding="before_weight", residual_dtype=F32)
    for weight in norm.parameters():
        torch.nn.init.normal_(weight)
    weights = norm.post_weight, norm.pre_weight
    assert_equal(norm(h, r), two_ops(h, r, *weights, 1e-6, rounding="before_weight"))
    assert repr(norm) == (
        "FusedPostAddPreRMSNorm(24, eps=1e-06, rounding='before_weight', "
        "residual_dtype=torch.float32)"
    )
    assert list(norm.state_dict()) == ["post_weight", "pre_weight"]
    fresh = FusedPostAddPreRMSNorm(24, zero_centered=True)
    assert (fresh.pre_weight == 0).all() and fresh.eps is None
    assert_equal(fresh(h, r), FusedPostAddPreRMSNorm(24)(h, r))
    bare = FusedPostAddPreRMSNorm(24, elementwise_affine=False)
    assert list(bare.parameters()) == [] and "elementwise_affine=False" in repr(bare)
    assert_equal(bare(h, r), fresh(h, r))
    assert FusedPostAddPreRMSNorm(24, device="meta", dtype=BF16).post_weight.dtype is BF16


OPTION_ERRORS = [
    (ValueError, "rounding must be 'once' or 'before_weight'", {"rounding": "twice"}),
    (TypeError, "argument 'zero_centered' must be bool, not NoneType", {"zero_centered": None}),
    (TypeError, "argument 'residual_dtype' must be torch.dtype, not str", {"residual_dtype": "x"}),
    (ValueError, "eps must be finite, got", {"eps": float("inf")}),
]


@pytest.mark.parametrize(("error", "sentence", "options"), OPTION_ERRORS)
def test_options_that_are_refused(error, sentence, options):
    with pytest.raises(error, match=f"fused_post_add_pre_rms_norm: {sentence}"):
        fused_post_add_pre_rms_norm(X, X, **options)
    with pytest.raises(error, match=f"FusedPostAddPreRMSNorm: {sentence}"):
        FusedPostAddPreRMSNorm(8, **options)


X = torch.ones(2, 8)
CALL_ERRORS = [
    (RuntimeError, "residual must have the shape of input", (X, X[:1]), {}),
    (RuntimeError, "residual must have the dtype of input, .*, got", (X, X.double()), {}),
    (RuntimeError, "residual must have the dtype of input, .*, or", (X.half(), X.bfloat16()), {}),
    (RuntimeError, "residual_dtype must be the dtype of residual", (X, X), {"residual_dtype": F16}),
    (NotImplementedError, "not implemented for .*: residual must be", (X, X.long()), {}),
    (RuntimeError, "Expected post_weight to be of same shape", (X, X, X[0, :4]), {}),
    (RuntimeError, "Expected pre_weight to be of same shape", (X, X, None, X), {}),
    (RuntimeError, "mixed dtype: expect .* got pre_weight", (X, X, None, X[0].long()), {}),
    (RuntimeError, "residual must be a dense", (X, X.to_sparse()), {}),
]


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("error", "sentence", "tensors", "options"), CALL_ERRORS)
def test_calls_that_are_refused(error, sentence, tensors, options, disabled):
    """By kernels and by the formula with one sentence."""

    def call():
        return fused_post_add_pre_rms_norm(*tensors, **options)

    with pytest.raises(error, match=f"fused_post_add_pre_rms_norm: {sentence}"):
        if disabled:
            with fused_op.disabled():
                call()
        else:
            call()


def test_rms_norm_add_refuses_the_same():
    """With its own name in the sentence."""
    for error, sentence, tensors, options in CALL_ERRORS:
        if "weight" in sentence:
            continue
        with pytest.raises(error, match=f"fused_rms_norm_add: {sentence}"):
            fused_rms_norm_add(*tensors, **options)
    with pytest.raises(RuntimeError, match="fused_rms_norm_add: Expected weight to be of same"):
        fused_rms_norm_add(X, X, X[0, :4])


def test_the_residual_is_a_tensor():
    with pytest.raises(TypeError, match="argument 'residual' must be Tensor, not NoneType"):
        fused_post_add_pre_rms_norm(X, None)
