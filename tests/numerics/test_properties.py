"""Random calls against truth: shapes, layouts, dtypes, absent arguments, values, options at once.

Hypothesis draws a description of a call, which a failure prints in its shortest form; its numbers
follow from the description's seed. Some hundred calls, always the same, run with the other tests;

    FUSED_OP_EXAMPLES=20000 python -m pytest -q tests/numerics/test_properties.py

runs that many new ones of each property, and prints a line that repeats a failure.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fused_op import fused_layer_norm
from tests.case import Case, generator
from tests.numerics import test_options
from tests.numerics.test_determinism import same_bits
from tests.numerics.test_views import (
    every_second_column,
    expanded_columns,
    expanded_rows,
    guarded,
    negated_lazily,
    strided_rows,
    transposed,
)
from tests.ops import BF16, F16, F32, F64, OPS, PAIRS, Op, Pair, subsets

EXAMPLES = os.environ.get("FUSED_OP_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 200),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    print_blob=True,
    # The device is a parameter of the test, not state that an example could leave behind.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# The largest numbers; of fp64, what its own reference can take to the third power.
HUGE = {F16: 65504.0, BF16: 3e38, F32: 3e38, F64: 1e100}


def normal_row(row, dtype):
    return row


def constant_row(row, dtype):
    return torch.full_like(row, row[0].item() if len(row) else 0.0)


def alternating_row(row, dtype):
    return torch.ones_like(row).cumsum(0).remainder(2) * 2 - 1


def subnormal_row(row, dtype):
    return row * torch.finfo(dtype).smallest_normal / 4


def f16_limit_row(row, dtype):
    return row.sign() * 65504.0 / 2


def large_row(row, dtype):
    return row.clamp(-3, 3) * (1e30 if HUGE[dtype] > 1e30 else 1e4)


def largest_row(row, dtype):
    # A distance from the mean is at most twice a value, and the sum of them must not overflow.
    return row.sign() * HUGE[dtype] / 4


def offset_row(row, dtype):
    return row + 1000.0


def zero_row(row, dtype):
    return torch.zeros_like(row)


ROWS = [normal_row, constant_row, alternating_row, subnormal_row, f16_limit_row, large_row]
ROWS += [largest_row, offset_row, zero_row]
LAYOUTS = [torch.clone, strided_rows, transposed, every_second_column, negated_lazily]
LAYOUTS += [expanded_rows, expanded_columns]


class Call(NamedTuple):
    """What Hypothesis draws, and prints."""

    op: Op
    pair: Pair
    shape: tuple[int, ...]
    normalized_ndim: int
    absent: tuple[str, ...]
    wanted: tuple[str, ...]
    layouts: list[str]  # of the tensors with rows, in call order, then of the gradients
    offsets: list[int]  # elements past an aligned address, where the layout is dense
    rows: list[str]  # one after another, repeated
    eps: float
    seed: int


@st.composite
def calls(draw) -> Call:
    op, pair = draw(st.sampled_from(OPS)), draw(st.sampled_from(PAIRS))
    leading = draw(st.lists(st.integers(0, 6), max_size=3))
    width = st.one_of(st.integers(0, 40), st.integers(41, 300), st.sampled_from([1023, 1025, 4096]))
    cols = draw(width)
    ndim = draw(st.integers(1, 2))
    shape = (*leading, cols) if ndim == 1 else (*leading, draw(st.integers(1, 4)), cols)
    absent = draw(st.sampled_from(subsets(op.parameters)))
    present = tuple(name for name in op.inputs if name not in absent)
    tensors = 2 * (1 + op.adds)
    layouts = st.sampled_from([f.__name__ for f in LAYOUTS])
    return Call(
        op=op,
        pair=pair,
        shape=shape,
        normalized_ndim=ndim,
        absent=absent,
        wanted=draw(st.sampled_from(subsets(present))),
        layouts=draw(st.lists(layouts, min_size=tensors, max_size=tensors)),
        offsets=draw(st.lists(st.integers(0, 9), min_size=6, max_size=6)),
        rows=draw(st.lists(st.sampled_from([f.__name__ for f in ROWS]), min_size=1, max_size=5)),
        eps=draw(st.sampled_from([1e-5, 1e-6, 1e-3, 1.0])),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def make(call: Call, device: str) -> Case:
    """The call's tensors; made on the CPU, so that every device gets the same numbers."""
    g = torch.Generator().manual_seed(call.seed)
    op, pair, shape = call.op, call.pair, call.shape
    kinds = {f.__name__: f for f in ROWS}
    if pair.rows == F64 and "expanded_columns" in call.layouts:
        # Rows of one value. The fp64 truth knows their mean to rounding alone, as much as 1e14 of
        # 1e30, and takes that for their deviation; test_huge_constant_rows has its own truth.
        kinds |= dict.fromkeys(("large_row", "largest_row"), normal_row)
    layouts = iter(call.layouts)
    offsets = iter(call.offsets)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=F64)

    def placed(t: torch.Tensor, layout: str) -> torch.Tensor:
        t = t.to(device)
        if layout == "clone" or t.dim() < 2 or t.numel() == 0:
            return guarded(t, next(offsets))
        return next(f for f in LAYOUTS if f.__name__ == layout)(t)

    normalized = shape[len(shape) - call.normalized_ndim :]
    cols = math.prod(normalized)
    inputs: dict[str, torch.Tensor | None] = {}
    for name in op.inputs:
        if name in op.parameters:
            parameter = placed(normal(*normalized).to(pair.params), "clone")
            inputs[name] = None if name in call.absent else parameter
            continue
        rows = normal(math.prod(shape) // max(cols, 1), cols)
        for i, row in enumerate(rows):
            rows[i] = kinds[call.rows[i % len(call.rows)]](row, pair.rows) / (1 + op.adds)
        inputs[name] = placed(rows.to(pair.rows).reshape(shape), next(layouts))
    grads = tuple(placed(normal(*shape).to(pair.rows), next(layouts)) for _ in range(1 + op.adds))
    return Case(op, inputs, grads, call.eps, normalized, note=f"{call}")


SUBNORMAL_SUMS = Call(  # a column's gradient is a sum of subnormal products
    op=OPS[1],
    pair=PAIRS[0],
    shape=(5, 300),
    normalized_ndim=1,
    absent=(),
    wanted=("weight",),
    layouts=["clone", "expanded_rows"],
    offsets=[0] * 6,
    rows=["subnormal_row"],
    eps=1e-3,
    seed=0,
)
# On a GPU, a row that ends inside of a vector, whose mean times rstd overflows.
ONE_LARGEST = SUBNORMAL_SUMS._replace(
    op=OPS[0], shape=(1,), wanted=("input",), layouts=["clone"] * 2, rows=["largest_row"], eps=1e-5
)


@SETTINGS
@given(call=calls())
@example(call=SUBNORMAL_SUMS)
@example(call=ONE_LARGEST)
def test_random_calls(device, call) -> None:
    """Catches what goes wrong at one meeting of a shape, a layout, a subset of gradients and values
    only: every result is as near to the fp64 reference as derived."""
    case = make(call, device)
    results = case.run(call.wanted)
    case.check(results)


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("cols", [1, 64, 255, 1001, 4097, 20001])
@pytest.mark.parametrize(
    ("dtype", "value", "options"),
    [
        (F64, 1e30, {}),
        (F64, -1.25e99, {}),
        (F64, 1e303, {}),
        (F64, -1.7e308, {}),  # the sum overflows too
        (F32, -1e33, {}),
        (F32, 3.4e38, {}),
        (F32, 1e33, {"out_dtype": BF16}),
        (BF16, -1e33, {}),
        (BF16, -3.3e38, {}),
        (BF16, 1e33, {"out_dtype": F32}),
    ],
)
def test_huge_constant_rows(device, dtype, value, options, cols, rows) -> None:
    """Catches a mean of equal fp64 values that is not that value: its error, 1e83 of 1e99, would be
    taken for the row's deviation; PyTorch's own mean has it, so the truth is written down. And a
    place past the row's end whose x is 0: less the mean and times rstd it is infinite, and times
    its dy of 0 the NaN of all the row's gradients."""
    x = torch.full((rows, cols), value, dtype=dtype, device=device, requires_grad=True)
    g = generator(device, value, cols)
    weight, bias, dy = (
        torch.randn(n, cols, generator=g, dtype=F64, device=device).to(dtype) for n in (1, 1, rows)
    )
    y = fused_layer_norm(x, weight[0], bias[0], eps=1e-12, **options)
    assert torch.equal(y, bias.to(y.dtype).expand(rows, cols))
    dy = dy.to(y.dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    wdy = dy.double() * weight.double()
    truth = (wdy - wdy.mean(-1, keepdim=True)) * 1e6
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(dx.double(), truth, rtol=2 * unit, atol=16e6 * unit)


@SETTINGS
@given(call=calls(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_random_bad_values_stay_in_their_row(device, call, bad, data) -> None:
    """Catches a row that another one reaches: where one row of the input has a NaN or an inf, the
    others keep every bit, and the row shows it."""
    case = make(call, device)
    if case.rows == 0 or case.cols == 0:
        return
    row = data.draw(st.integers(0, case.rows - 1))
    col = data.draw(st.integers(0, case.cols - 1))
    clean, dense = (c.run(()) for c in (case, replaced(case, None, 0, 0)))
    assert all(same_bits(clean[name], dense[name]) for name in clean), f"{case}"
    wanted = tuple(n for n in call.wanted if n not in case.op.parameters)
    expected, got = (replaced(case, value, row, col).run(wanted) for value in (None, bad))
    others = torch.arange(case.rows, device=device) != row
    for name in got:
        flat, like = (r[name].reshape(case.rows, case.cols) for r in (got, expected))
        assert same_bits(flat[others], like[others]), f"{case}: {bad} in row {row} changed {name}"
    output = got["output"].reshape(case.rows, case.cols)[row]
    shown = output.isnan().all() if math.isnan(bad) else not output.isfinite().all()
    assert shown, f"{case}: {bad} in row {row} is hidden"


def replaced(case: Case, value: float | None, row: int, col: int) -> Case:
    """The case with dense rows, and with that value at one place of the input."""
    x = case.inputs["input"].clone(memory_format=torch.contiguous_format)
    if value is not None:
        x.view(case.rows, case.cols)[row, col] = value
    return case.with_inputs(input=x)


@st.composite
def option_calls(draw) -> tuple:
    """An op, and what test_options.py needs to know of a call with options."""
    op, pair = draw(st.sampled_from(test_options.PLAIN_OPS)), draw(st.sampled_from(PAIRS))
    short = pair.rows in (F16, BF16) and op.adds
    residual = draw(st.sampled_from([pair.rows, F32])) if short else pair.rows
    return op, (
        pair,
        residual,
        draw(st.sampled_from([None, F32] if short and residual != F32 else [None])),
        draw(st.sampled_from(test_options.dtypes_of_output(pair.rows))),
        draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        draw(st.booleans()),  # zero_centered
        draw(st.sampled_from([(), ("weight",), op.parameters])),  # absent
        (draw(st.integers(1, 40)), draw(st.integers(1, 600))),
        draw(st.booleans()),  # where the state of dropout is
    )


@SETTINGS
@given(call=option_calls())
def test_random_options(device, call) -> None:
    """Catches a meeting of dropout, dtypes of output and sum, and shapes that no list has."""
    op, combination = call
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_options.check_combination(op, device, monkeypatch, *combination)
