"""``compile_pass``: the rotary embedding of queries and keys moves into the norm in front of it."""

import random

import pytest
import torch
from torch import Tensor, fx

import fused_op
from fused_op import fused_rms_norm
from fused_op._compiled_rotations import fuse_rotations
from tests.case import SEED
from tests.contexts.test_compile_pass import both, inductor, is_clean

__all__ = ["is_clean"]  # the fixture


def angles(freqs: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cos and sin of ``[batch, seq, rotary_dim]``, as the models of transformers compute them."""
    both_halves = torch.cat((freqs, freqs), dim=-1)
    cos, sin = both_halves.cos() * scale, both_halves.sin() * scale
    return cos.to(dtype), sin.to(dtype=dtype)


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int = 1) -> Tensor:
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    return (x * cos) + (turned(x) * sin)


def partly_rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int = 1) -> Tensor:
    cols = cos.shape[-1]
    return torch.cat([rotated(x[..., :cols], cos, sin, heads), x[..., cols:]], dim=-1)


BATCH, SEQ, HEADS, COLS = 2, 5, 3, 16


def inputs(dtype: torch.dtype, device: str = "cpu", rotary: int = COLS) -> tuple[Tensor, ...]:
    """A projection ``[batch, seq, heads * cols]``, a weight, and the angles of each position."""
    torch.manual_seed(SEED)
    x = torch.randn(BATCH, SEQ, HEADS * COLS, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(COLS, device=device, dtype=dtype, requires_grad=True)
    freqs = torch.randn(1, SEQ, rotary // 2, device=device)
    return x, weight, freqs


def after_the_norm(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    """As in Qwen3."""
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight, rounding="before_weight")
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype))


def before_the_norm(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    """As in Gemma 3: the norm sees heads first."""
    heads = x.view(*x.shape[:-1], -1, COLS).transpose(1, 2)
    heads = fused_rms_norm(heads, weight, zero_centered=True)
    return rotated(heads, *angles(freqs, x.dtype)).contiguous()


def without_transposition(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    """Operands in another order, and angles of a whole batch."""
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    cos, sin = (a.unsqueeze(2) for a in angles(freqs.expand(BATCH, -1, -1), x.dtype, 0.5))
    return torch.add(sin * turned(heads), torch.mul(cos, heads))


def of_some_columns(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    """As in GLM 4.5 and Qwen3-Next."""
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight).transpose(1, 2)
    return partly_rotated(heads, *angles(freqs[..., :4], x.dtype)).contiguous()


def rewritten(function, *given: Tensor):
    """A call without a compiler, the results of its graph after the pass, and what that did."""
    reports = []

    def rewrite(module: fx.GraphModule, _) -> fx.GraphModule:
        count, left = fuse_rotations(module.graph)
        reports.append((count, dict(left)))
        module.recompile()
        return module

    leaves = [t for t in given if t.requires_grad]
    results = []
    for call in (function, torch.compile(function, backend=rewrite, fullgraph=True)):
        outputs = call(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(o.float().cos().sum() for o in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    (report,) = reports
    return *results, report


def assert_close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Sums of a row are taken in another order, and gradients of 16 bits are rounded less often."""
    forward = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2**-9}.get(dtype, 2**-6)
    backward = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-8}.get(dtype, 2**-5)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape and one.dtype is other.dtype is dtype
        bound = (backward if i else forward) * other.abs().max()
        assert (one - other).abs().max() <= bound, f"result {i}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function", [after_the_norm, before_the_norm, without_transposition, of_some_columns]
)
def test_rotation(function, dtype: torch.dtype, device: str) -> None:
    """Catches a rotation that stays, or one that is fused into other numbers."""
    expected, found, report = rewritten(function, *inputs(dtype, device))
    assert report == (1, {})
    assert_close(found, expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_generated_code_and_inference(is_dynamic: bool, device: str) -> None:
    """Catches code that Inductor cannot generate around the fused op, and a need for a gradient."""
    x, weight, freqs = (t.detach() for t in inputs(torch.float32, device))
    if is_dynamic:
        for tensor, dimension in ((x, 0), (x, 1), (freqs, 1)):
            torch._dynamo.mark_dynamic(tensor, dimension)
    with torch.no_grad(), inductor(generates_code=True):
        without, found, report = both(after_the_norm, x, weight, freqs)
    assert report == (0, 0, 1, {}) and "rotations fused into norms: 1" in str(report)
    torch.testing.assert_close(found, without, rtol=1e-6, atol=1e-6)


def used_elsewhere(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype)), heads.sum()


def part_used_elsewhere(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads, *angles(freqs, x.dtype), heads=2) + heads[..., :1]


def angles_from_outside(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *freqs.repeat(2, 1, 2).split(1))


def unequal_halves(x, weight, freqs):
    cos = torch.cat((freqs, freqs * 2), dim=-1).cos()
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, cos)


def halves_that_change(x, weight, freqs):
    cos, sin = angles(freqs, x.dtype)
    cos[..., 0] = 0
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, sin)


def halves_that_change_in_a_view(x, weight, freqs):
    cos, sin = angles(freqs, x.dtype)
    sin[0].narrow(-1, 3, 2).zero_()
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, sin)


def input_that_changes(x, weight, freqs):
    rows = (x.detach() * 2).view(*x.shape[:-1], -1, COLS)
    heads = fused_rms_norm(rows)
    rows.mul_(3)
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype)) + x.mean() * weight.mean()


def halves_swapped_and_changed(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight).transpose(1, 2)
    cos, sin = (a.unsqueeze(1) for a in angles(freqs, x.dtype))
    swapped = turned(heads)
    swapped[..., 0] = 5
    return heads * cos + swapped * sin


def product_that_changes(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight).transpose(1, 2)
    cos, sin = (a.unsqueeze(1) for a in angles(freqs, x.dtype))
    product = heads * cos
    product.add_(1)
    return product + turned(heads) * sin


def constant_heads(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    with torch.no_grad():
        constant = rotated(heads.transpose(1, 2), *angles(freqs, x.dtype))
    return constant + x.mean() * weight.mean()


def angles_that_learn(x, weight, freqs):
    cos, sin = angles(x[..., : COLS // 2], x.dtype)
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, sin)


def wider_angles(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *angles(freqs, torch.float64))


def other_roundings(x, weight, freqs):
    heads = x.view(*x.shape[:-1], -1, COLS)
    heads = fused_rms_norm(heads, weight, zero_centered=True, rounding="before_weight")
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype))


def a_view_of_the_output(x, weight, freqs):
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS).transpose(1, 2), weight)
    return rotated(heads, *angles(freqs, x.dtype)).view(BATCH * HEADS, SEQ, COLS)


def angles_of_more_samples(x, weight, freqs):
    heads = fused_rms_norm(x[:1].view(1, SEQ, -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *angles(freqs.expand(BATCH, -1, -1), x.dtype))


def halves_that_change_in_a_list(x, weight, freqs):
    cos, sin = angles(freqs, x.dtype)
    torch._foreach_mul_([cos[..., :3], sin[..., 5:]], 2.0)
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, sin)


def angles_scaled_by_a_tensor(x, weight, freqs):
    cos, sin = angles(freqs, x.dtype)
    cos = torch.mul(cos, other=weight.detach())
    heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), cos, sin)


def norm_that_saves_its_output(x, weight, freqs):
    rows = x.detach() * 1
    heads = fused_rms_norm(rows.view(*x.shape[:-1], -1, COLS), weight, memory_efficient=True)
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype)) + x.mean()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return fused_rms_norm(x, weight) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum((0, 1, 2))


class WithAnotherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return fused_rms_norm(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100, gradient.sum((0, 1, 2))


def another_function(x, weight, freqs):
    heads = Twice.apply(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype))


def function_with_another_gradient(x, weight, freqs):
    heads = WithAnotherGradient.apply(x.view(*x.shape[:-1], -1, COLS), weight)
    return rotated(heads.transpose(1, 2), *angles(freqs, x.dtype))


HALVES = "the graph does not show that both halves of cos and sin are equal"
PLACE = "something may change in place what a rotation or the norm before it reads"
MODE = "a norm and the rotation behind it are not in the same mode"
USED = "normalised heads are used without rotation, too"
STAYS = {
    used_elsewhere: USED,
    part_used_elsewhere: USED,
    angles_from_outside: HALVES,
    unequal_halves: HALVES,
    halves_that_change: PLACE,
    halves_that_change_in_a_view: PLACE,
    input_that_changes: PLACE,
    halves_swapped_and_changed: PLACE,
    product_that_changes: PLACE,
    constant_heads: MODE,
    angles_that_learn: HALVES,
    wider_angles: "the dtypes of a norm and of the rotation behind it differ",
    a_view_of_the_output: "what uses the output of a rotation may depend on its order in memory",
    angles_of_more_samples: "cos and sin are not those of each position",
    halves_that_change_in_a_list: PLACE,
    angles_scaled_by_a_tensor: HALVES,
    norm_that_saves_its_output: "",
    another_function: "",
    function_with_another_gradient: "",
    other_roundings: "the roundings of a norm and of the rotation behind it do not fit together",
}


@pytest.mark.parametrize("function", STAYS)
def test_what_stays(function) -> None:
    """Catches a rewrite that would change values or gradients.

    Each reason is reported, unless the norm is not known as one of ours.
    """
    x, weight, freqs = inputs(torch.float32)
    expected, found, report = rewritten(function, x, weight, freqs)
    assert report == (0, {STAYS[function]: 1} if STAYS[function] else {})
    assert all(map(torch.equal, expected, found))


NOT_ROTATIONS = {
    "a difference": lambda x, c, s: (x * c.unsqueeze(1)) - (turned(x) * s.unsqueeze(1)),
    "halves in order": lambda x, c, s: (
        x * c.unsqueeze(1) + torch.cat((-x[..., :8], x[..., 8:]), dim=-1) * s.unsqueeze(1)
    ),
    "the other half negated": lambda x, c, s: (
        x * c.unsqueeze(1) + torch.cat((x[..., 8:], -x[..., :8]), -1) * s.unsqueeze(1)
    ),
    "quarters": lambda x, c, s: (
        x * c.unsqueeze(1) + torch.cat((-x[..., 4:], x[..., :4]), -1) * s.unsqueeze(1)
    ),
    "another tensor": lambda x, c, s: x * c.unsqueeze(1) + turned(x + 1) * s.unsqueeze(1),
    "along the sequence": lambda x, c, s: (
        x * c.unsqueeze(1) + torch.cat((-x[:, :, 2:], x[:, :, :2]), 2) * s.unsqueeze(1)
    ),
    "scaled": lambda x, c, s: torch.add(x * c[:, None], turned(x) * s[:, None], alpha=2),
    "the dimension by position": lambda x, c, s: (
        x * c.unsqueeze(1) + torch.cat((-x[..., 8:], x[..., 8:]), -1) * s.unsqueeze(1)
    ),
    "a head each": lambda x, c, s: x * c.unsqueeze(2) + turned(x) * s.unsqueeze(2),
}


@pytest.mark.parametrize("name", NOT_ROTATIONS)
def test_what_only_looks_like_a_rotation(name: str) -> None:
    """Catches a pattern that is too wide."""

    def function(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
        heads = fused_rms_norm(x.view(*x.shape[:-1], -1, COLS)[:, :HEADS], weight)
        return NOT_ROTATIONS[name](heads.transpose(1, 2), *angles(freqs, x.dtype))

    x, weight, freqs = inputs(torch.float32)
    expected, found, report = rewritten(function, x, weight, freqs[:, :HEADS])
    assert report == (0, {}) and all(map(torch.equal, expected, found))


@pytest.mark.parametrize("seed", range(16))
def test_random_attention(seed: int) -> None:
    """Catches a combination of shapes and options that nobody thought of."""
    rng = random.Random(SEED + seed)
    batch, seq, heads = rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 4)
    cols, part = 2 * rng.randint(1, 40), rng.random() < 0.5
    rotary = 2 * rng.randint(1, cols // 2) if part else cols
    first, centred = rng.random() < 0.5, rng.random() < 0.5
    rotate = partly_rotated if rotary < cols else rotated

    def function(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
        rows = x.view(batch, seq, heads, cols)
        rows = rows.transpose(1, 2) if first else rows
        rows = fused_rms_norm(rows, weight, 1e-3, zero_centered=centred)
        rows = rows if first else rows.transpose(1, 2)
        return rotate(rows, *angles(freqs, x.dtype)).contiguous()

    torch.manual_seed(SEED + seed)
    dtype = rng.choice([torch.float64, torch.float32, torch.float16])
    x = torch.randn(batch, seq, heads * cols, dtype=dtype, requires_grad=True)
    weight = torch.randn(cols, dtype=dtype, requires_grad=True)
    freqs = torch.randn(rng.choice([1, batch]), seq, rotary // 2)
    expected, found, report = rewritten(function, x, weight, freqs)
    assert report == (1, {})
    assert_close(found, expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Glm4Moe"])
def test_models_of_transformers(name: str) -> None:
    """Catches a graph of a real model that looks otherwise, and losses that part."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    extra = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    of_experts = extra | {"n_group": 1, "topk_group": 1, "use_qk_norm": True}
    suffix, more = {"Gemma3": ("Text", {}), "Glm4Moe": ("", of_experts)}.get(name, ("", {}))
    config = getattr(transformers, f"{name}{suffix}Config")(**sizes, **more)
    losses = []
    for is_on in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        fused_op.convert(model)
        handle = fused_op.compile_pass() if is_on else None
        ids = torch.arange(64).view(4, 16) % 32
        with inductor(generates_code=False):
            loss = torch.compile(model)(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        losses.append([loss.item(), torch.stack(gradients).norm().item()])
        if handle:
            handle.undo()
            report = handle.report()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert report.rotations == 2, report
