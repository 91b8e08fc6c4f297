"""The kernels of norm and rotary embedding on the interpreted GPU, against the formula.

What this catches beside wrong numbers: what tests/kernels/test_run_kernels.py lists, of these
kernels, and a gradient that is written beside the rows of its part of a packed tensor. Weights of
heads are whole vectors: the op takes others one by one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fused_op import reference
from tests.case import SEED, generator
from tests.kernels.interpreter import Gpu, empty
from tests.kernels.run_rope import Options, run
from tests.kernels.test_run_gated import BOUNDS
from tests.kernels.test_run_kernels import needs_interpreter
from tests.ops import BF16, F16, F32, F64


@dataclass(frozen=True)
class Call:
    tokens: int
    heads: int
    cols: int
    half: int
    options: Options = Options()  # noqa: RUF009  (a tuple)
    dtype: torch.dtype = BF16
    angles: torch.dtype = F32
    params: torch.dtype | None = None  # that of the input unless said
    weights: str = "shared"  # by all heads, "own", or "none"
    period: int = 0  # of the angles; 0: the tokens
    others: int = 0  # heads of another tensor behind those of each token
    shift: int = 0  # elements from a multiple of 16 bytes to the first row
    wide_angles: bool = False  # rows of angles that have other numbers behind them
    wanted: tuple[bool, bool] = (True, True)
    sms: int = 132

    def __str__(self) -> str:
        default = Call(0, 0, 0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("torch.", "").replace(" ", "")


GPTJ = Options("gptj")
LLAMA = Options(rounding="before_weight")
NORM = Options(rounding="before_rotation")
ROUNDINGS = ("once", "before_rotation", "before_weight")
CALLS = [
    Call(5, 3, 128, 64),
    Call(5, 3, 128, 64, GPTJ, angles=BF16, others=2),
    Call(40, 6, 128, 64, LLAMA, angles=BF16, others=4, period=10, wide_angles=True, sms=2),
    Call(9, 4, 64, 32, Options("gptj", "before_weight"), F16, angles=F16, weights="own"),
    Call(30, 4, 128, 32, NORM, angles=F32, weights="own", others=1, params=F32, sms=4),
    Call(6, 2, 256, 128, NORM, F32),
    # Rows in halves, with both elements of each pair in one lane or not: rows that share a warp and
    # that do not, the last of them without a neighbour, and several rows of each lane.
    Call(39, 3, 64, 32, LLAMA, angles=BF16, weights="own", sms=3),
    Call(41, 5, 256, 128, NORM, F16, angles=F16, period=7, others=2, sms=2),
    Call(83, 1, 128, 64, LLAMA, weights="none", sms=1),
    Call(21, 3, 128, 64, dtype=F64, angles=F64, weights="own", others=1, sms=1),
    Call(33, 3, 32, 16, NORM, angles=BF16, sms=1),
    Call(5, 3, 512, 256, LLAMA, angles=BF16, sms=1),
    Call(5, 3, 1024, 512, LLAMA, angles=BF16, sms=1),
    Call(9, 2, 16, 8, dtype=F32, weights="own"),
    Call(9, 2, 62, 31, NORM, angles=BF16),
    Call(6, 2, 256, 128, LLAMA, angles=BF16, others=1),
    Call(4, 3, 80, 16, LLAMA, angles=BF16, others=2),
    Call(4, 3, 96, 48, GPTJ, F16, others=1),
    Call(7, 2, 72, 36, angles=BF16),
    Call(7, 2, 72, 36),
    Call(5, 3, 40, 20, LLAMA),
    Call(3, 3, 64, 12, NORM, F16),
    Call(2, 2, 8, 4),
    Call(7, 2, 128, 20, GPTJ, angles=BF16, weights="none"),
    Call(3, 2, 66, 33, LLAMA, angles=BF16),
    Call(3, 5, 33, 16, Options("gptj", "before_rotation"), F16, angles=F32),
    Call(4, 2, 7, 3, dtype=F32, shift=1),
    Call(4, 2, 7, 3, GPTJ, F32, weights="none"),
    Call(3, 2, 128, 64, LLAMA, shift=1, angles=BF16),
    Call(3, 2, 64, 32, shift=2, dtype=F32, weights="none"),
    Call(4, 2, 64, 32, dtype=F64, angles=F64, weights="own"),
    Call(4, 2, 48, 16, GPTJ, F64, angles=F32),
    Call(5, 2, 64, 32, dtype=F64, angles=BF16),
    Call(3, 2, 48, 8, GPTJ, F64, angles=F16, weights="own"),
    Call(4, 2, 1, 0),
    Call(5, 2, 128, 0, LLAMA),
    Call(300, 2, 128, 64, wanted=(True, False), others=1, sms=2),
    Call(300, 2, 128, 64, GPTJ, wanted=(False, True), others=1, sms=2),
    Call(2, 2, 5000, 2000, LLAMA, angles=BF16),
    Call(1, 2, 40000, 20000, weights="shared"),
    Call(1, 1, 12001, 6000, GPTJ, params=F32),
]


def rows_for(call: Call, g: torch.Generator | None) -> Tensor:
    """[tokens, heads, head_dim]; without numbers if there is no generator."""
    heads = call.heads + call.others
    held = empty(call.tokens * heads * call.cols + call.shift, dtype=call.dtype)
    rows = held[call.shift :].view(call.tokens, heads, call.cols)[:, : call.heads]
    return rows if g is None else rows.copy_(torch.randn(rows.shape, generator=g))


def inputs(call: Call) -> list[Tensor | None]:
    """input, cos, sin, weight, grad_output."""
    g = generator("cpu", str(call))
    x, dy = rows_for(call, g), rows_for(call, g)
    theta = 3 * torch.randn(call.period or call.tokens, call.half, generator=g)
    tables = []
    for values in (theta.cos(), theta.sin()):
        width = 2 * call.half if call.wide_angles else call.half
        table = empty(len(theta), width, dtype=call.angles)[:, : call.half]
        tables.append(table.copy_(values))
    weight = None
    if call.weights != "none":
        shape = (call.heads, call.cols) if call.weights == "own" else (call.cols,)
        weight = empty(*shape, dtype=call.params or call.dtype)
        weight.copy_(torch.randn(shape, generator=g))
    return [x, *tables, weight, dy]


def truth_of(call: Call, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, dy: Tensor):
    """Output and gradients of x and weight: in float64, unless roundings between are asked for."""
    is_exact = call.options.rounding == "once" or call.dtype.itemsize > 2
    leaves = [
        None if t is None else (t.double() if is_exact else t.clone()).requires_grad_()
        for t in (x, weight)
    ]
    repeats = -(-call.tokens // len(cos))
    cos, sin = (t.repeat(repeats, 1)[: call.tokens] for t in (cos, sin))
    cos, sin = (t.double() if is_exact else t for t in (cos, sin))
    y = reference.fused_rms_norm_rope(
        leaves[0], cos, sin, leaves[1], 1e-5, style=call.options.style,
        rounding=call.options.rounding,
    )  # fmt: skip
    grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))
    return [t.detach().double() for t in (y, *grads)]


def random_call(g: random.Random) -> Call:
    """Heads of any width, of which any part is rotated, and any dtypes together."""
    dtype = g.choice([F16, BF16, F32, F64])
    cols = g.choice([8 * g.randint(1, 40), g.randint(8, 300)])  # of fewer, dx is a small difference
    is_whole = cols * dtype.itemsize % 16 == 0  # vectors, where rows lie at two strides
    weights = g.choice(["shared", "none", *["own"] * is_whole])
    tokens = g.choice([1, g.randint(2, 8), g.randint(9, 80)])
    return Call(
        tokens, g.randint(1, 5), cols,
        half=g.choice([cols // 2, g.randint(0, cols // 2)]),
        options=Options(g.choice(["neox", "gptj"]), g.choice(ROUNDINGS)),
        dtype=dtype,
        angles=g.choice([F16, BF16, F32, F64]),
        params=F32 if weights != "none" and dtype.itemsize == 2 and g.random() < 0.3 else None,
        weights=weights,
        period=g.choice([0, g.randint(1, tokens)]),
        others=g.choice([0, 1]) * is_whole,
        shift=0 if is_whole else g.randint(0, 2),
        wide_angles=g.random() < 0.3,
        sms=g.choice([1, 2, 132]),
    )  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(call: Call) -> None:
    check(call)


@needs_interpreter
@pytest.mark.parametrize("number", range(16))
def test_numbers_of_random_calls(number: int) -> None:
    """Catches widths, parts and dtypes that nobody thought of together."""
    call = random_call(random.Random(f"{SEED} {number}"))
    print(f"{call} (FUSED_OP_SEED={SEED})")  # of a call that fails
    check(call)


def check(call: Call) -> None:
    x, cos, sin, weight, dy = inputs(call)
    grad_rows = rows_for(call, None) if call.wanted[0] else None
    y, grad_weight = run(
        Gpu(call.sms), call.options, x, cos, sin, weight, dy, grad_rows,
        wants_weight=call.wanted[1],
    )  # fmt: skip
    rounds = call.options.rounding != "once"
    found = (y, grad_rows, grad_weight)
    for name, actual, expected in zip(
        ("output", "input", "weight"), found, truth_of(call, x, cos, sin, weight, dy), strict=False
    ):
        if actual is not None:
            error = (actual.double() - expected).abs().max() / expected.abs().max()
            # A value next to a tie of the input's dtype may go either way.
            bound = max(BOUNDS[actual.dtype], BOUNDS[call.dtype if rounds else actual.dtype])
            assert error <= bound, f"{name}: {error:.3g} of the largest"


@needs_interpreter
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_pairs_of_elements_have_the_bits_of_each_alone(dtype: torch.dtype, rounding: str) -> None:
    """Catches pairs where not every step is rounded, other roundings, and signs of zeros.

    Rows that do not begin at multiples of 16 bytes are rotated one element at a time.
    """
    call = Call(9, 3, 128, 64, Options(rounding=rounding), dtype, angles=dtype)
    x, cos, sin, weight, dy = inputs(call)
    x[::3, :, ::5], sin[::2, ::3], cos[::2, 1::3] = -0.0, 0.0, -0.0
    found = []
    for shift in (0, 1):
        rows = rows_for(replace(call, shift=shift), None).copy_(x)
        y, _ = run(Gpu(call.sms), call.options, rows, cos, sin, weight, dy, None)
        found.append(y.view(torch.int16))
    assert torch.equal(*found)


@needs_interpreter
@pytest.mark.parametrize("call", [c for c in CALLS if c.tokens > 1 and c.cols <= 512], ids=str)
def test_heads_do_not_depend_on_others(call: Call) -> None:
    """Catches bits that follow from the number of tokens, or from where heads lie."""
    x, cos, sin, weight, dy = inputs(call)
    whole = rows_for(call, None)
    y, _ = run(Gpu(call.sms), call.options, x, cos, sin, weight, dy, whole)
    last = (call.tokens - 1) % len(cos)
    angles = [empty(1, call.half, dtype=t.dtype).copy_(t[last]) for t in (cos, sin)]
    dense = [empty(1, *t.shape[1:], dtype=t.dtype).copy_(t[-1]) for t in (x, dy)]
    alone = empty(*dense[0].shape, dtype=call.dtype)
    y_alone, _ = run(Gpu(call.sms), call.options, dense[0], *angles, weight, dense[1], alone)
    assert torch.equal(y[-1:], y_alone) and torch.equal(whole[-1:], alone)
