"""How accurate: rounded once, no cancellation, no overflow, and bad values stay in their row.

The elementwise tolerance of every comparison here and elsewhere is derived in tests/ops.py.
"""

import math

import pytest
import torch

from tests.case import Case, gradients, make_case, worst
from tests.ops import BF16, F16, F32, F64, OPS, PAIRS, TOLERANCE, Op, Pair, condition, steps

SHORT = [pair for pair in PAIRS if pair.rows in (F16, BF16)]
# A sum over some of them is not exact, nor is 1 / cols; the last is longer than a CTA's registers.
WIDTHS = [4, 7, 31, 255, 1000, 1022, 1023, 2049, 4096, 12288, 40_000]


@pytest.mark.parametrize("pair", SHORT, ids=str)
def test_rounded_once(op, device, pair) -> None:
    """Catches a second rounding: statistics kept in 16 bits, or the normalised value rounded before
    weight and bias (2.25e-3 in bf16, where one rounding of the truth costs 1.66e-3)."""
    case = make_case(op, (512, 2048), pair, device)
    results = case.run()
    case.check(results)
    truth = true_results(case, results)
    for name in ("output", "grad_input"):
        error = relative_l2(results[name], truth[name])
        once = relative_l2(truth[name].to(pair.rows), truth[name])
        assert error <= 1.001 * once, f"{case}: {name} has a relative L2 error of {error:.3g}"


def test_mean_far_from_zero(op, device) -> None:
    """Catches E[x^2] - E[x]^2, and a mean from one pass: at mean = 1e4 sigma, no result may err
    twice as much as a two-pass computation whose mean and rstd are rounded to fp32 once."""
    case = far_from_zero(op, device, mean=1e4, sigma=1.0)
    results = case.run()
    truth, two_pass = true_results(case, results), two_pass_results(case, results)
    floor = centred_condition(case, results)
    for name in truth:
        ours, theirs = (relative_l2(t[name], truth[name]) for t in (results, two_pass))
        # Sums in another order differ though neither is worse: a few roundings are free.
        free = 4 * TOLERANCE[F32].compute * (floor[name].norm() / truth[name].norm()).item()
        message = f"{case}: {name} errs {ours:.3g}, two-pass fp32 {theirs:.3g} (+ {free:.3g})"
        assert ours <= 2 * theirs + free, message


def test_mean_very_far_from_zero(op, device) -> None:
    """Catches a mean whose own rounding shows in the output: at mean = 1e6 sigma the fp32 number
    next to it is 6 % of sigma away, and the output must not notice."""
    case = far_from_zero(op, device, mean=1e4, sigma=1e-2)
    case = Case(op, case.inputs, case.grads, eps=1e-9)
    case.inputs["weight"].detach()[0] = 0  # now and then one is: without a bias, nothing may err
    results = case.run()
    truth, two_pass = true_results(case, results), two_pass_results(case, results)
    bound = TOLERANCE[F32].compute * steps(case.cols) * centred_condition(case, results)["output"]
    error = worst(results["output"], truth["output"], bound).item()
    assert error <= 1, f"{case}: output is off by {error:.3g} times the tolerance"
    for name in ("grad_input", "grad_weight"):  # from saved moments: as good as two passes
        ours, theirs = (relative_l2(t[name], truth[name]) for t in (results, two_pass))
        assert ours <= 2 * theirs + 1e-5, f"{case}: {name} errs {ours:.3g}, two-pass {theirs:.3g}"


@pytest.mark.parametrize("cols", WIDTHS)
def test_outliers_lead(op, device, pair, cols) -> None:
    """Catches sums about a pivot, the first element or the mean of the first part, that cancel:
    there it is far from the rest of the row."""
    case = make_case(op, (6, cols), pair, device, note="outliers lead")
    x = case.inputs["input"].detach().clone()
    x[0, 0] += 1e4
    x[1, :8] += 1e3
    x[2, : cols // 3] += 300.0
    x[3, ::512] -= 1e4
    x[4, ::1024] = 0.0
    x[4] += 1e3
    case = case.with_inputs(input=x.requires_grad_(case.inputs["input"].requires_grad))
    if op.adds:
        case = case.with_inputs(residual=torch.zeros_like(case.inputs["residual"]))
    case.check(case.run())


@pytest.mark.parametrize("cols", WIDTHS)
def test_constant_row_gives_bias(device, cols) -> None:
    """Catches x * rstd - mean * rstd, and a mean that is one rounding off: 1 / sqrt(eps) makes
    it visible (0.71 in place of 0). A row that does not vary is exactly bias."""
    for op in (op for op in OPS if op.centred):
        for pair in PAIRS:
            big = 65504.0 if pair.rows is F16 else 1e30
            values = torch.tensor([big, -big, 1e4, 1 / 3, 1e-3, 0.0, 65504.0, 7.0])
            rows = values.to(device, pair.rows)[:, None].expand(-1, cols).contiguous()
            case = make_case(op, (len(values), cols), pair, device, note="constant rows")
            case = case.with_inputs(input=rows)
            if op.adds:
                case = case.with_inputs(residual=torch.zeros_like(rows))
            got = case.run(())["output"]
            expected = case.inputs["bias"].to(pair.rows).expand_as(got)
            wrong = values[(got != expected).any(1).cpu()].tolist()
            assert not wrong, f"{case}: not bias at {wrong}"


@pytest.mark.parametrize("op", [op for op in OPS if op.centred], ids=str)
def test_one_column_is_bias(op, device, pair) -> None:
    """Catches a variance of one value that is not zero: the output is bias, the gradient zero."""
    case = make_case(op, (9, 1), pair, device)
    results = case.run()
    expected = case.inputs["bias"].to(pair.rows).expand(9, 1)
    assert torch.equal(results["output"], expected), f"{case}"
    through_the_sum = case.grads[1] if op.adds else torch.zeros_like(case.grads[0])
    assert torch.equal(results["grad_input"], through_the_sum), f"{case}"


@pytest.mark.parametrize("cols", [64, 255, 1000, 4095, 40_000])
def test_huge_and_tiny_rows(op, device, cols) -> None:
    """Catches squares that overflow (or vanish) though the result is an ordinary number."""
    sizes = {F32: [1e30, 3e38, 1e19, 1e-19, 1e-30], BF16: [3e38, 1e30], F16: [6e4], F64: [1e100]}
    for pair in PAIRS:
        for largest in sizes[pair.rows]:
            case = make_case(op, (6, cols), pair, device, note=f"rows of {largest:g}")
            size = largest / (1 + op.adds)  # the sum must not overflow
            if op.adds:
                residual = case.inputs["residual"]
                case = case.with_inputs(residual=uniform_rows(residual, size))
            case = case.with_inputs(input=uniform_rows(case.inputs["input"], size))
            # Ordinary neighbours: a row is scaled alone.
            case.inputs["input"][::2] = make_case(op, (3, cols), pair, device).inputs["input"]
            if op.adds:
                case.inputs["residual"][::2] = 0
            case.check(case.run())


@pytest.mark.parametrize("cols", [3, 8, 17, 64, 255, 1000, 4096, 70_000])
@pytest.mark.parametrize("pair", [Pair(F32, F32), Pair(BF16, F32), Pair(F64, F64)], ids=str)
def test_the_mean_of_rows_whose_squares_are_zeros(op, device, pair, cols):
    """Catches a mean that is lost with the squares: the output would be x instead of x - mean."""
    for size in (1e-180, 1e-220) if pair.rows == F64 else (1e-21, 1e-25, 1e-37):
        x = ((torch.rand(5, cols, dtype=F64, device=device) + 1) * size).to(pair.rows)
        tensors = (x, torch.zeros_like(x)) if op.adds else (x,)
        output = op.fused(*tensors, eps=0.25)
        output = (output[0] if op.adds else output).to(F64)
        wide = x.to(F64)
        expected = (wide - wide.mean(1, keepdim=True) if op.centred else wide) / 0.5
        one = TOLERANCE[pair.rows]
        bound = expected.abs().max() * (one.rounding + steps(cols) * one.compute) + one.smallest
        assert (output - expected).abs().max() <= bound


def uniform_rows(like: torch.Tensor, size: float) -> torch.Tensor:
    """Values between -size and size, each with its opposite: x - mean is no larger than x."""
    rows = torch.special.erf(like.to(F64)) * size
    half = rows.shape[1] // 2
    rows[:, :half] = -rows[:, -half:]
    return rows.to(like.dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_stay_in_their_row(op, device, bad) -> None:
    """Catches reductions that mix rows, and a rescue of overflowing rows that touches others: the
    rows without a bad value keep every bit, and the row with it does not hide it."""
    for pair in PAIRS:
        for shape in [(9, 33), (9, 255), (6, 4096)]:
            case = make_case(op, shape, pair, device, note=f"{bad} in row 3")
            clean = case.run()
            for place in ("input", "dy"):
                rows = (case.inputs["input"] if place == "input" else case.grads[0]).clone()
                rows[3, 17] = bad
                if place == "input":
                    got = case.with_inputs(input=rows).run()
                else:
                    got = Case(op, case.inputs, (rows, *case.grads[1:])).run()
                others = torch.arange(shape[0], device=device) != 3
                for name in ("output", "grad_input"):
                    same = torch.equal(got[name][others], clean[name][others])
                    assert same, f"{case}: {bad} in {place} changed other rows of {name}"
                shown = "output" if place == "input" else "grad_input"
                assert not got[shown][3].isfinite().all(), f"{case}: {bad} in {place} is hidden"
                if place == "input" and math.isnan(bad):
                    assert got["output"][3].isnan().all(), f"{case}: part of a NaN row is a number"


def far_from_zero(op: Op, device: str, mean: float, sigma: float) -> Case:
    case = make_case(op, (512, 1000), Pair(F32, F32), device, note=f"mean {mean}, sigma {sigma}")
    rows = case.inputs["input"]
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True) * sigma
    # Another mean in each row: one that is an fp32 number would need no rounding.
    means = torch.linspace(mean, 1.3 * mean, len(rows), dtype=F64, device=device)
    case = case.with_inputs(input=(rows.to(F64) + means[:, None]).to(F32))
    return case.with_inputs(residual=torch.zeros_like(rows)) if op.adds else case


def true_results(case: Case, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference in fp64, at the sum that the op stored."""
    wide = {name: t.to(F64) for name, t in case.inputs.items()}
    if case.op.adds:
        wide["input"] = results["sum"].to(F64) - wide["residual"]
    leaves = {name: t.requires_grad_() for name, t in wide.items()}
    outputs = case.op.reference(*leaves.values(), eps=case.eps)
    outputs = outputs if case.op.adds else (outputs,)
    found = gradients(outputs, [*leaves.values()], [g.to(F64) for g in case.grads])
    return {"output": outputs[0].detach()} | {
        f"grad_{name}": grad for name, grad in zip(leaves, found, strict=True)
    }


def two_pass_results(case: Case, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything in fp32, from a mean that is taken in fp64 and rounded."""
    x = results["sum"] if case.op.adds else case.inputs["input"]
    weight, bias = case.op.factor(case.inputs["weight"]), case.inputs.get("bias")
    dy = case.grads[0]
    mean = x.to(F64).mean(1, keepdim=True).to(F32) if case.op.centred else 0.0
    centred = x - mean
    rstd = (centred.square().mean(1, keepdim=True) + case.eps).rsqrt()
    xhat = centred * rstd
    wdy = dy * weight
    dx = wdy - xhat * (wdy * xhat).mean(1, keepdim=True)
    if case.op.centred:
        dx = dx - wdy.mean(1, keepdim=True)
    dx = dx * rstd + (case.grads[1] if case.op.adds else 0)
    return {
        "output": xhat * weight + (0 if bias is None else bias),
        "grad_input": dx,
        "grad_residual": dx,
        "grad_weight": (dy * xhat).sum(0),
        "grad_bias": dy.sum(0),
    }


def centred_condition(case: Case, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Condition of the results once the mean is gone: what even the best mean leaves."""
    x, weight, bias, dy = (
        None if t is None else t.to(F64)
        for t in (
            results["sum"] if case.op.adds else case.inputs["input"],
            case.inputs["weight"],
            case.inputs.get("bias"),
            case.grads[0],
        )
    )
    if case.op.centred:
        x = x - x.mean(1, keepdim=True)
    scale = condition(case.op, case.eps, x, weight, bias, dy)
    both = scale["grad_x"] + (case.grads[1].abs() if case.op.adds else 0)
    return scale | {"grad_input": both, "grad_residual": both}


def relative_l2(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return ((actual.to(F64) - truth).norm() / truth.norm()).item()
