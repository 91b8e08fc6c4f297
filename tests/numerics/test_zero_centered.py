"""Weights that are kept minus one: what goes further than a zero-centred op in the table of ops.

Where the caller adds the 1, in the precision of the arithmetic, the kernels must give the same
bits. No tolerance then hides a 1 that is added elsewhere, twice, or past a row's end.
"""

from dataclasses import replace

import pytest
import torch

from fused_op import fused_layer_norm
from tests.case import make_case
from tests.numerics.test_determinism import assert_same, rowwise
from tests.ops import BF16, F16, F32, F64, OPS, PAIRS, Pair, zero_centered

# Every tile of the kernels, rows in a cluster, streamed rows, and the backward of the longest.
SHAPES = [(5, cols) for cols in (1, 3, 8, 31, 33, 64, 100, 255, 512, 1000, 1024, 2050, 4096)]
SHAPES += [(300, 768), (40, 5120), (3, 16384), (2, 65537)]
CUDA_SHAPES = [(70, 8192), (5, 12288), (140, 16391), (140, 32768), (2, 262144)]

functions = pytest.mark.parametrize("op", [op for op in OPS if not op.zero_centered], ids=str)


@functions
def test_bits_are_those_of_the_sum(op, device, pair) -> None:
    """Catches a 1 that is added in 16 bits, not at all, in one of forward and backward alone, or
    in one of the kernels for rows of some length."""
    wide = F64 if pair.params is F64 else F32
    for shape in SHAPES + (CUDA_SHAPES if device == "cuda" else []):
        case = make_case(op, shape, pair, device)
        params = {name: case.inputs[name].to(wide) for name in op.parameters}
        params["weight"] = 1 + params["weight"]
        summed = case.with_inputs(**params).run()
        results = replace(case, op=zero_centered(op)).run()
        if pair.params is not wide:  # gradients of parameters are rounded to another dtype there,
            results = rowwise(results)
            if case.cols > 5120:  # and backward of long rows is cut up by the size of parameters
                results = {name: results[name] for name in results if "grad" not in name}
        assert_same(case, results, summed, "of the sum")


@functions
def test_reference_adds_in_the_precision_of_the_arithmetic(op, device, pair) -> None:
    """Catches a twin that forgets the argument, or adds in the dtype of the weight: the fp64 truth
    of the other tests would not show it."""
    case = make_case(op, (7, 33), pair, device)
    wide = case.inputs["weight"].to(F64 if pair.params is F64 else F32)
    reference = replace(op, fused=op.reference)
    summed = replace(case.with_inputs(weight=1 + wide), op=reference).run()
    twin = zero_centered(op)
    results = replace(case, op=replace(twin, fused=twin.reference)).run()
    assert_same(case, rowwise(results), summed, "of the sum")


@functions
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_small_weights_are_not_rounded_away(op, device, dtype) -> None:
    """Catches 1 + weight in the 16 bits of the weight, where each of these sums is 1; and shows
    that the tolerance of the other tests is narrow enough to catch it too."""
    case = make_case(zero_centered(op), (16, 1000), Pair(dtype, dtype), device)
    weight = torch.full_like(case.inputs["weight"], torch.finfo(dtype).eps / 2)
    assert (1 + weight == 1).all()
    case = case.with_inputs(weight=weight)
    case.check(case.run())
    rounded = replace(case.with_inputs(weight=1 + weight), op=op).run()
    with pytest.raises(AssertionError, match=r"multiple of the tolerance.*'output'"):
        case.check(rounded)


@functions
def test_without_a_weight_the_factor_is_one(op, device, pair) -> None:
    """Catches an absent weight that is taken for 1, and so doubles the output, or for 0 in one of
    forward and backward."""
    for absent in (("weight",), op.parameters):
        for shape in [(5, 33), (6, 64), (3, 4096)]:
            case = make_case(op, shape, pair, device, absent)
            results = replace(case, op=zero_centered(op)).run()
            assert_same(case, results, case.run(), "of no weight")


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_plain_weights_keep_the_sign_of_zero(device, dtype) -> None:
    """Catches a runtime 0 that is added where the weight is not zero-centred: -0 + 0 is 0."""
    for cols in (3, 64, 4096):
        x = make_case(OPS[0], (5, cols), Pair(dtype, dtype), device).inputs["input"]
        minus_zero = -torch.zeros_like(x[0])
        output = fused_layer_norm(x, minus_zero, minus_zero)
        assert torch.equal(output.signbit(), ~fused_layer_norm(x).signbit())  # 0 is there too


@functions
def test_bad_weights_stay_in_their_columns(op, device) -> None:
    """Catches a factor past a row's end that is multiplied with something else than zero, and
    infinite weights that reach other columns in forward."""
    for pair in PAIRS:
        for cols in (33, 1023, 4096):
            case = make_case(zero_centered(op), (4, cols), pair, device)
            clean = case.run(())["output"]
            weight = case.inputs["weight"].clone()
            weight[-1], weight[0] = torch.nan, torch.inf
            output = case.with_inputs(weight=weight).run(())["output"]
            assert torch.equal(output[:, 1:-1], clean[:, 1:-1]), f"{case}"
            assert not output[:, [0, -1]].isfinite().any(), f"{case}"
