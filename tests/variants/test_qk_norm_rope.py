"""Packed projections: their queries and keys are what they are alone, and their gradient is one.

Catches parts that are taken from the wrong columns, a gradient with a part missing or left over
from memory, and a view that is copied.
"""

import math

import pytest
import torch
from torch.library import opcheck

import fused_op
from fused_op import fused_qk_norm_rope, fused_rms_norm_rope, reference
from fused_op._rope_formula import split
from tests.calls import Calls, assert_same
from tests.contexts.graphs import Graphs
from tests.numerics.test_heads import copies
from tests.ops import BF16, F32, F64
from tests.variants.test_rms_norm_rope import ROW, STYLES, angles, draw
from tests.variants.test_variants import Seen

QKV = {"heads": 4, "kv_heads": 2}


def packed(dtype=F32, device="cpu", cols=32, own=False, seed=0):
    """Qkv, cos, sin and weights, of a batch of 2 and 5 tokens."""
    qkv = draw(2, 5, 8 * cols, dtype=dtype, device=device, seed=seed).requires_grad_()
    q_weight = draw(*([4, cols] if own else [cols]), dtype=dtype, device=device).requires_grad_()
    k_weight = draw(cols, dtype=dtype, device=device, seed=1).requires_grad_()
    return qkv, *angles(5, cols // 2, device=device), q_weight, k_weight


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("cols", [6, 64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_packed_tensor_is_its_parts(dtype, cols, own, device):
    qkv, cos, sin, q_weight, k_weight = packed(dtype, device, cols, own)
    found = fused_qk_norm_rope(qkv, cos, sin, q_weight, k_weight, 1e-6, **QKV)
    q, k, v = split(qkv, 4, 2)
    expected = (
        fused_rms_norm_rope(q, cos, sin, q_weight, 1e-6),
        fused_rms_norm_rope(k, cos, sin, k_weight, 1e-6),
        v,
    )
    grads = [torch.randn_like(t) for t in found]
    leaves = qkv, q_weight, k_weight
    mine = torch.autograd.grad(found, leaves, grads)
    theirs = torch.autograd.grad(expected, leaves, grads)
    for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
        assert torch.equal(a, b)
    assert found[0].is_contiguous() and found[1].is_contiguous()


def test_values_are_a_view_and_nothing_else_is_kept(device):
    """Saved for backward: the tensors themselves and a number a head."""
    tensors = packed(device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, _, v = fused_qk_norm_rope(*tensors, 1e-6, **QKV)
    assert v.data_ptr() == tensors[0][..., 6 * 32 :].data_ptr()
    stats = [t for t in saved if t.shape == (1, 60)]
    others = {t.data_ptr() for t in saved} - {t.data_ptr() for t in stats}
    assert len(stats) == 1 and others == {t.data_ptr() for t in tensors}


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_views_are_read_where_they_are(dtype, device):
    """Heads and angles; of the gradients, that of the values alone is copied, into its place."""
    qkv = draw(2, 7, 8 * 64, dtype=dtype, device=device)
    weight = draw(64, dtype=dtype, device=device)
    cos, sin = (torch.cat((t, t), -1)[None] for t in angles(7, 32, device=device))
    turn = cos[..., :32], sin[..., :32]
    _, k, _ = split(qkv, 4, 2)
    dy = split(draw(2, 7, 8 * 64, dtype=dtype, device=device, seed=2), 2, 3)[0]
    leaves = k.detach().requires_grad_(), weight.requires_grad_()
    y = fused_rms_norm_rope(leaves[0], *turn, weight, 1e-6)
    with torch.no_grad():
        assert copies(lambda: fused_rms_norm_rope(k, *turn, weight, 1e-6)) == 0
    assert copies(lambda: torch.autograd.grad(y, leaves, dy)) == 0

    leaves = qkv.detach().requires_grad_(), weight
    found = fused_qk_norm_rope(leaves[0], *turn, weight, weight, 1e-6, **QKV)
    grads = [torch.randn_like(t) for t in found]
    with torch.no_grad():
        call = leaves[0], *turn, weight, weight, 1e-6
        assert copies(lambda: fused_qk_norm_rope(*call, **QKV)) == 0
    assert copies(lambda: torch.autograd.grad(found, leaves, grads)) == 1


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("layout", ["dense", "heads_apart", "columns_apart", "expanded", "shifted"])
@pytest.mark.parametrize("cols", [64, 6])
def test_gradients_of_values_are_copied_from_any_layout(cols, layout, dtype, device):
    qkv, *rest = packed(dtype, device, cols)
    shape = (*qkv.shape[:-1], 2, cols)
    memory = draw(2 * math.prod(shape) + 1, dtype=dtype, device=device)
    grad = {
        "dense": memory[:-1].view(2, *shape)[1],
        "heads_apart": memory[:-1].view(*shape[:-2], 2, *shape[-2:])[..., 1, :, :],
        "columns_apart": memory[:-1].view(*shape, 2)[..., 0],
        "expanded": memory[:cols].expand(shape),
        "shifted": memory[1 : math.prod(shape) + 1].view(shape),
    }[layout]
    _, _, v = fused_qk_norm_rope(qkv, *rest, 1e-6, **QKV)
    (found,) = torch.autograd.grad(v, qkv, grad)
    assert torch.equal(found[..., 6 * cols :], grad.flatten(-2))
    assert not found[..., : 6 * cols].any()


def test_gradients_that_do_not_arrive_are_zero(device):
    tensors = packed(device=device)
    leaves = [tensors[0], *tensors[3:]]
    q, k, v = fused_qk_norm_rope(*tensors, 1e-6, **QKV)
    for output, parts in ((q, slice(0, 4)), (k, slice(4, 6)), (v, slice(6, 8))):
        grads = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        rows = grads[0].unflatten(-1, (8, 32))
        assert (rows[..., parts, :] != 0).any(-1).all()
        zero = torch.ones(8, dtype=torch.bool)
        zero[parts] = False
        assert (rows[..., zero, :] == 0).all()
        assert [bool((g != 0).any()) for g in grads[1:]] == [output is q, output is k]


def packed_call(*tensors, function=fused_qk_norm_rope, **options):
    return function(*tensors, 1e-6, **QKV, **options)


@pytest.mark.parametrize("style", STYLES)
def test_derivatives_of_packed_tensors(style, device):
    qkv, cos, sin, q_weight, k_weight = (t.double() for t in packed(device=device, cols=6))
    leaves = [t.detach()[:1].requires_grad_() if t is qkv else t.detach().requires_grad_()
              for t in (qkv, q_weight, k_weight)]  # fmt: skip

    def call(qkv, q_weight, k_weight):
        return packed_call(qkv, cos, sin, q_weight, k_weight, style=style)

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    wide = torch.func.jacrev(call, (0, 1, 2))(*leaves)
    expected = torch.func.jacfwd(call, (0, 1, 2))(*leaves)
    for mine, right in zip(wide, expected, strict=True):
        assert_same(mine, right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_tensors_compile(dynamic, device):
    torch._dynamo.reset()
    tensors = packed(device=device)
    leaves, graphs = [tensors[0], *tensors[3:]], Graphs()
    compiled = torch.compile(packed_call, fullgraph=True, dynamic=dynamic, backend=graphs)
    eager, result = packed_call(*tensors), compiled(*tensors)
    assert_same(result, eager, rtol=0, atol=0)
    expected = torch.autograd.grad(sum(t.square().sum() for t in eager), leaves)
    found = torch.autograd.grad(sum(t.square().sum() for t in result), leaves)
    assert_same(found, expected, rtol=0, atol=0)
    names = "fused_op.qk_norm_rope_forward.default", "fused_op.qk_norm_rope_backward.default"
    assert [graphs.names.count(name) for name in names] == [1, 1]


@pytest.mark.parametrize("own", [False, True])
def test_packed_ops_are_what_their_schemas_say(own, device):
    tensors = packed(device=device, cols=8, own=own)
    ops = "fused_op.qk_norm_rope_forward.default", "fused_op.qk_norm_rope_backward.default"
    with Seen(*ops) as seen:
        q, _, v = packed_call(*tensors)
        (q.sum() + v.sum()).backward()
        packed_call(*tensors)[1].sum().backward()
    assert [str(func) for func, _ in seen.calls] == [*ops, *ops]
    detach = torch.Tensor.detach
    for func, args in seen.calls:
        opcheck(func, torch.utils._pytree.tree_map_only(torch.Tensor, detach, args))


def test_disabled_runs_the_formula_of_packed_tensors():
    tensors = packed()
    expected = packed_call(*tensors)
    with fused_op.disabled(), Calls() as calls:
        found = packed_call(*tensors)
    assert not any("fused_op" in name for name in calls.names)
    assert_same(found, expected)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), ()])
def test_packed_tensors_of_any_rank(shape, device):
    qkv = draw(*shape, 8 * 16, device=device).requires_grad_()
    cos, sin = angles(*shape, 8, device=device)
    found = fused_qk_norm_rope(qkv, cos, sin, **QKV)
    expected = reference.fused_qk_norm_rope(qkv, cos, sin, **QKV)
    assert_same(found, expected)
    (grad,) = torch.autograd.grad(sum(t.sum() for t in found), qkv)
    (right,) = torch.autograd.grad(sum(t.sum() for t in expected), qkv)
    assert_same(grad, right, rtol=1e-4, atol=1e-5)


# --- Errors
WIDE = torch.ones(2, 64)
PACKED_ERRORS = [
    (TypeError, "argument 'qkv' must be Tensor, not list", {"qkv": [1.0]}),
    (RuntimeError, "qkv must have at least one dimension", {"qkv": WIDE[0, 0]}),
    (TypeError, "argument 'heads' must be int, not float", {"heads": 4.0}),
    (TypeError, "argument 'kv_heads' must be int, not bool", {"kv_heads": True}),
    (ValueError, "heads and kv_heads must be positive, got 4 and 0", {"kv_heads": 0}),
    (ValueError, r"there are more than 2\^31 heads", {"heads": 2, "kv_heads": 2**63 - 1}),
    (RuntimeError, "cos must have at least one dimension", {"cos": ROW[0, 0], "sin": ROW[0, 0]}),
    (RuntimeError, "the last dimension of qkv must be .* a multiple of 8, got 60",
     {"qkv": WIDE[:, :60]}),
    (RuntimeError, r"Expected q_weight of shape \[8\] or \[4, 8\]", {"q_weight": torch.ones(9)}),
    (RuntimeError, r"Expected k_weight of shape \[8\] or \[2, 8\]", {"k_weight": torch.ones(4, 8)}),
    (RuntimeError, "sin must have the dtype of cos", {"sin": ROW.double()}),
    (ValueError, "eps must be finite", {"eps": float("inf")}),
    (RuntimeError, "sin gets no gradient here", {"sin": torch.ones(2, 4, requires_grad=True)}),
]  # fmt: skip


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("error", "sentence", "more"), PACKED_ERRORS)
def test_packed_calls_that_are_refused(error, sentence, more, disabled):
    call = {"qkv": WIDE, "cos": ROW, "sin": ROW} | QKV | more
    with pytest.raises(error, match=f"fused_qk_norm_rope: {sentence}"):
        if disabled:
            with fused_op.disabled():
                fused_qk_norm_rope(**call)
        else:
            fused_qk_norm_rope(**call)


def test_derivatives_by_one_weight_alone(device):
    """Catches queries and values that need no gradient, where a formula takes over."""
    tensors = [t.double() for t in packed(device=device, cols=6)]
    found = []
    for function in (fused_qk_norm_rope, reference.fused_qk_norm_rope):
        weight = tensors[4].detach().requires_grad_()
        outputs = packed_call(*tensors[:4], weight, function=function)
        total = sum(t.square().sum() for t in outputs)
        (first,) = torch.autograd.grad(total, weight, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), weight)))
    assert_same(*found)
