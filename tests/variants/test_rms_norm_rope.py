"""What norms with rotary embedding have beyond other variants: test_variants.py has the rest.

Catches angles of the wrong token, pairs of the wrong columns, weights of the wrong head, a packed
tensor whose parts differ from what they are alone, roundings that are not those of models, and an
error that is not what it says.
"""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import fused_op
from fused_op import fused_rms_norm, fused_rms_norm_rope, reference
from tests.calls import assert_same
from tests.case import generator
from tests.ops import BF16, F16, F32, F64

DTYPES = [F16, BF16, F32]
ALL = [*DTYPES, F64]
STYLES = ["neox", "gptj"]
ROUNDINGS = ["once", "before_rotation", "before_weight"]


def draw(*shape, dtype=F32, device="cpu", seed=0):
    g = generator(device, shape, dtype, seed)
    return torch.randn(shape, generator=g, device=device).to(dtype)


def angles(*shape, dtype=F32, device="cpu"):
    theta = 3 * draw(*shape, device=device, seed=1)
    return theta.cos().to(dtype), theta.sin().to(dtype)


@pytest.mark.parametrize(
    ("rows", "table", "weight"), list(itertools.product(ALL, ALL, [*DTYPES, None]))
)
@pytest.mark.parametrize("style", STYLES)
def test_any_dtypes_together(rows, table, weight, style, device):
    x = draw(2, 3, 4, 48, dtype=rows, device=device).requires_grad_()
    cos, sin = angles(3, 16, dtype=table, device=device)
    w = None if weight is None else draw(48, dtype=weight, device=device).requires_grad_()
    leaves = [t for t in (x, w) if t is not None]
    y = fused_rms_norm_rope(x, cos, sin, w, 1e-5, style=style)
    truth = reference.fused_rms_norm_rope(
        *(None if t is None else t.double() for t in (x, cos, sin, w)), 1e-5, style=style
    )
    dy = draw(2, 3, 4, 48, dtype=rows, device=device, seed=2)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    expected = [truth, *torch.autograd.grad(truth, leaves, dy.double())]
    for mine, right in zip(found, expected, strict=True):
        tolerance = 2 * torch.finfo(mine.dtype).eps + 1e-5
        assert (mine.double() - right.double()).abs().max() <= tolerance * right.abs().max()
    assert [g.dtype for g in found] == [rows, *(t.dtype for t in leaves)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("cols", "half"),
    [(64, 32), (128, 64), (80, 16), (96, 40), (72, 36), (40, 20), (7, 3), (66, 33)],
)
@pytest.mark.parametrize("style", STYLES)
def test_pairs_turn_by_their_angle(style, cols, half, rounding, device):
    """Against complex numbers, which share nothing with the formula."""
    x = draw(2, 5, 3, cols, dtype=F64, device=device)
    cos, sin = angles(5, half, dtype=F64, device=device)
    y = fused_rms_norm_rope(x, cos, sin, None, 1e-6, style=style, rounding=rounding)
    n = F.rms_norm(x, (cols,), eps=1e-6)

    def pairs(t):
        t = t[..., : 2 * half]
        return t.unflatten(-1, (2, half) if style == "neox" else (half, 2))

    def as_complex(t):
        t = pairs(t).transpose(-1, -2) if style == "neox" else pairs(t)
        return torch.view_as_complex(t.contiguous())

    turn = torch.complex(cos, sin)[:, None]
    assert_same(as_complex(y), as_complex(n) * turn)
    assert_same(y[..., 2 * half :], n[..., 2 * half :])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_turning_back_leaves_the_norm(dtype, device):
    x = draw(4, 6, 128, dtype=dtype, device=device)
    w = draw(128, dtype=dtype, device=device)
    cos, sin = torch.ones(4, 64, device=device), torch.zeros(4, 64, device=device)
    expected, none = fused_rms_norm(x, w, 1e-6), cos[:, :0]
    assert_same(fused_rms_norm_rope(x, cos, sin, w, 1e-6), expected)
    assert_same(fused_rms_norm_rope(x, none, none, w, 1e-6), expected)


@pytest.mark.parametrize("cols", [33, 64])
@pytest.mark.parametrize("style", STYLES)
def test_weights_of_heads_are_those_of_heads_alone(style, cols, device):
    x = draw(2, 5, 3, cols, device=device).requires_grad_()
    w = draw(3, cols, device=device).requires_grad_()
    cos, sin = angles(2, 5, cols // 2, device=device)
    dy = draw(2, 5, 3, cols, device=device, seed=2)
    y = fused_rms_norm_rope(x, cos, sin, w, 1e-6, style=style, zero_centered=True)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    for h in range(3):
        one, one_w = x.detach()[:, :, h : h + 1].requires_grad_(), w.detach()[h].requires_grad_()
        alone = fused_rms_norm_rope(one, cos, sin, one_w, 1e-6, style=style, zero_centered=True)
        grads = torch.autograd.grad(alone, (one, one_w), dy[:, :, h : h + 1])
        assert torch.equal(alone, y[:, :, h : h + 1])
        assert torch.equal(grads[0], dx[:, :, h : h + 1])
        assert_same(grads[1], dw[h])


def test_angles_of_each_shape_that_serves(device):
    """One sequence for a batch, a batch of one, what transformers hands out, and two of these."""
    x, w = draw(3, 5, 2, 32, device=device), draw(32, device=device)
    cos, sin = angles(5, 16, device=device)
    expected = fused_rms_norm_rope(x, cos, sin, w, 1e-6)
    forms = [
        lambda t: t[None],
        lambda t: t[None, None, None],
        lambda t: t.expand(3, 5, 16),
        lambda t: t.repeat(3, 1, 1),
        lambda t: torch.cat((t, t), -1)[..., :16],
        lambda t: torch.cat((t, t), -1)[None, :, :16].expand(3, -1, -1),
        lambda t: t.mT.contiguous().mT,
    ]
    for of in forms:
        assert torch.equal(fused_rms_norm_rope(x, of(cos), of(sin), w, 1e-6), expected)
        assert_same(reference.fused_rms_norm_rope(x, of(cos), of(sin), w, 1e-6), expected)
    dy = draw(3, 5, 2, 32, device=device, seed=2)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(fused_rms_norm_rope(leaf, cos, sin, w, 1e-6), leaf, dy)
    for of_cos, of_sin in itertools.permutations(forms, 2):
        turn = of_cos(cos), of_sin(sin)
        if turn[0].shape == turn[1].shape:
            y = fused_rms_norm_rope(leaf, *turn, w, 1e-6)
            assert torch.equal(y, expected)
            assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], dx)
    token = cos[2], sin[2]
    alone = fused_rms_norm_rope(x[:, 2:3], *token, w, 1e-6)
    assert torch.equal(alone, expected[:, 2:3])
    each = [fused_rms_norm_rope(x[b], cos, sin, w, 1e-6) for b in range(3)]
    assert torch.equal(torch.stack(each), expected)


# --- The roundings of models
def of_transformers(module, name):
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)
    except ImportError as error:
        pytest.skip(f"transformers has no {module}: {error}")


# norm, rotation, columns that are rotated, options
MODELS = {
    "qwen3": ("qwen3.modeling_qwen3", "Qwen3RMSNorm", "qwen3.modeling_qwen3", 128, {}),
    "glm4": (
        "qwen3.modeling_qwen3", "Qwen3RMSNorm", "glm4.modeling_glm4", 64, {"style": "gptj"},
    ),
    "gemma3": (
        "gemma3.modeling_gemma3", "Gemma3RMSNorm", "gemma3.modeling_gemma3", 128,
        {"zero_centered": True, "rounding": "before_rotation"},
    ),
    "olmo3": (
        "olmo3.modeling_olmo3", "Olmo3RMSNorm", "qwen3.modeling_qwen3", 128,
        {"rounding": "before_rotation"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_models(model, dtype, device):
    """All but a few in a hundred thousand, where float32 sums of another order meet a tie."""
    norm_file, norm_name, rope_file, turned, options = MODELS[model]
    norm = of_transformers(norm_file, norm_name)(128, eps=1e-6).to(device, dtype)
    rotate = of_transformers(rope_file, "apply_rotary_pos_emb")
    q, k = (draw(2, 256, h, 128, dtype=dtype, device=device) for h in (8, 2))
    with torch.no_grad():
        norm.weight.copy_(draw(128, device=device) / 3 + (model != "gemma3"))
        theta = angles(1, 256, turned // 2, device=device)
        cos, sin = (torch.cat((t, t), -1).to(dtype) for t in theta)
        expected = rotate(norm(q), norm(k), cos, sin, unsqueeze_dim=2)
        options = {"rounding": "before_weight"} | options
        half = slice(0, turned // 2)
        found = [
            fused_rms_norm_rope(t, cos[..., half], sin[..., half], norm.weight, 1e-6, **options)
            for t in (q, k)
        ]
    for mine, right in zip(found, expected, strict=True):
        off = mine != right
        assert off.float().mean() <= 1e-4
        # Each of them by a unit of the largest, or of a product.
        most = 4 * torch.finfo(dtype).eps * right.abs().max()
        assert (mine.float() - right.float()).abs().max() <= most


def test_the_bits_of_a_rotation_in_float32(device):
    """A norm in 16 bits and complex numbers in float32, as torchtitan and diffusers have it."""
    x, w = draw(2, 256, 4, 128, dtype=BF16, device=device), draw(128, dtype=BF16, device=device)
    cos, sin = angles(256, 64, device=device)
    n = F.rms_norm(x, (128,), w, 1e-6).float().unflatten(-1, (64, 2))
    turned = torch.view_as_complex(n.contiguous()) * torch.complex(cos, sin)[:, None]
    expected = torch.view_as_real(turned).flatten(-2).to(BF16)
    options = {"style": "gptj", "rounding": "before_rotation"}
    found = fused_rms_norm_rope(x, cos, sin, w, 1e-6, **options)
    assert (found != expected).float().mean() <= 1e-4
    once = fused_rms_norm_rope(x, cos, sin, w, 1e-6, style="gptj")
    assert (once != expected).float().mean() > 0.01


# --- Errors
X, ROW = torch.ones(2, 3, 8), torch.ones(2, 4)
CALL_ERRORS = [
    (TypeError, "argument 'cos' must be Tensor, not NoneType", (X, None, ROW), {}),
    (TypeError, "argument 'sin' must be Tensor, not float", (X, ROW, 1.0), {}),
    (TypeError, "argument 'style' must be str, not int", (X, ROW, ROW), {"style": 1}),
    (TypeError, "argument 'rounding' must be str, not int", (X, ROW, ROW), {"rounding": 1}),
    (TypeError, "argument 'zero_centered' must be bool", (X, ROW, ROW), {"zero_centered": 1}),
    (ValueError, "style must be 'neox' or 'gptj', got 'llama'", (X, ROW, ROW), {"style": "llama"}),
    (ValueError, "rounding must be 'once', 'before_rota", (X, ROW, ROW), {"rounding": "twice"}),
    (RuntimeError, r"input must have shape \[\.\.\., heads, head_dim\]", (X[0, 0], ROW, ROW), {}),
    (RuntimeError, "cos must have shape .* in front", (X, ROW[:1].repeat(3, 1), ROW), {}),
    (RuntimeError, "cos must have shape .* in front", (X, ROW.repeat(5, 1, 1), ROW), {}),
    (RuntimeError, "cos rotates twice its last dimension, 10 columns, and a head has 8",
     (X, torch.ones(2, 5), ROW), {}),
    (RuntimeError, "sin must have the shape of cos", (X, ROW, ROW[:, :2]), {}),
    (RuntimeError, "sin must have the dtype of cos", (X, ROW, ROW.double()), {}),
    (NotImplementedError, "not implemented for .*: cos must be", (X, ROW.long(), ROW), {}),
    (RuntimeError, r"Expected weight of shape \[8\] or \[3, 8\]", (X, ROW, ROW, X[0].view(-1)), {}),
    (RuntimeError, "Expected weight of shape", (X, ROW, ROW, torch.ones(2, 8)), {}),
    (RuntimeError, "mixed dtype: expect parameter", (X, ROW, ROW, torch.ones(8).long()), {}),
    (RuntimeError, r"cos gets no gradient here; pass cos.detach\(\)",
     (X, torch.ones(2, 4, requires_grad=True), ROW), {}),
]  # fmt: skip


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("error", "sentence", "tensors", "options"), CALL_ERRORS)
def test_calls_that_are_refused(error, sentence, tensors, options, disabled):
    """By kernels and by the formula with one sentence."""
    with pytest.raises(error, match=f"fused_rms_norm_rope: {sentence}"):
        if disabled:
            with fused_op.disabled():
                fused_rms_norm_rope(*tensors, **options)
        else:
            fused_rms_norm_rope(*tensors, **options)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_heads_longer_than_any_model_has(style, own, device):
    """Of memory of their own on the CPU, and of kernels for long rows on the GPU."""
    x = draw(3, 2, 40000, device=device).requires_grad_()
    w = draw(*([2, 40000] if own else [40000]), device=device).requires_grad_()
    cos, sin = angles(3, 16000, device=device)
    y = fused_rms_norm_rope(x, cos, sin, w, 1e-6, style=style)
    found = [y, *torch.autograd.grad(y, (x, w), x.detach())]
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = reference.fused_rms_norm_rope(
        leaves[0], cos.double(), sin.double(), leaves[1], 1e-6, style=style
    )
    expected = [truth, *torch.autograd.grad(truth, leaves, x.detach().double())]
    for mine, right in zip(found, expected, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()
