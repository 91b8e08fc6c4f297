"""The same bits: every time, in every batch, at every address, on any number of threads."""

import pytest
import torch
from torch import Tensor

from fused_op import fused_layer_norm, fused_rms_norm
from tests.case import Case, make_case
from tests.numerics.test_views import guarded, strided_rows
from tests.ops import DEVICES, PAIRS, subsets

ROWWISE = ("output", "sum", "grad_input", "grad_residual")
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

WIDTHS = [("cpu", cols) for cols in (1, 3, 31, 64, 255, 1000, 1023, 4096, 5120)]
if "cuda" in DEVICES:
    WIDTHS += [("cuda", cols) for _, cols in WIDTHS]
    more = (2, 4, 5, 6, 7, 8, 16, 24, 40, 127, 130, 300, 387, 641, 768, 1022, 1536, 1537, 2049)
    more += (2050, 2560, 4095, 4098, 5121, 6144, 7168, 8192, 10240, 12287, 12288, 16382)
    more += (16384, 20480, 65536, 131072, 262144)
    more += (48, 72, 96, 144, 200, 448, 1088, 1152, 1800, 3200, 13824)  # compiled at first use
    WIDTHS += [("cuda", cols) for cols in more]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal this tells -0 from 0, and NaN equals itself."""
    return torch.equal(*(t.contiguous().view(INTEGER[t.element_size()]) for t in (a, b)))


def assert_same(case: Case, ours: dict, expected: dict, what: str, rows=slice(None)) -> None:
    different = [n for n in ours if not same_bits(ours[n], expected[n][rows])]
    assert not different, f"{case}: {what}: other bits in {different}"


def take(case: Case, rows) -> Case:
    """The case of some of the rows."""
    inputs = {n: t if n in case.op.parameters else t[rows] for n, t in case.inputs.items()}
    return Case(case.op, inputs, tuple(g[rows] for g in case.grads), case.eps)


def rowwise(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in results.items() if name in ROWWISE}


def test_repetition(op, device, pair) -> None:
    """Catches atomics, races and sums whose order depends on timing, in every output."""
    shapes = [(7, 33), (300, 1000), (65, 4096)]
    if device == "cuda":
        shapes += [(4096, 1024), (2048, 5120), (256, 65536), (3, 262144), (100_000, 64)]
    for shape in shapes:
        case = make_case(op, shape, pair, device)
        first = case.run()
        for i in range(20 if device == "cuda" else 3):
            assert_same(case, case.run(), first, f"repetition {i}")


@pytest.mark.parametrize(("device", "cols"), WIDTHS)
def test_a_row_does_not_depend_on_its_batch(op, device, cols) -> None:
    """Catches a tiling, and so an order of addition, that follows the number of rows or the place
    of a row among them."""
    # On a GPU so many rows that fewer are cut up in another way, and whole CTAs of short ones.
    limits = ((9216, 256), (2500, 2560), (700, 16384))
    many = 37 if device == "cpu" else next((m for m, most in limits if cols <= most), 200)
    for pair in PAIRS:
        case = make_case(op, (many, cols), pair, device)
        whole = rowwise(case.run())
        parts = [slice(5, 6), slice(many - 1, many), slice(1, 3), slice(4, 11), slice(1, many)]
        parts += [slice(0, 133), slice(0, many // 2)] if many > 133 else []
        for part in parts:
            ours = rowwise(take(case, part).run())
            assert_same(case, ours, whole, f"rows {part.start} to {part.stop} alone", part)
        order = torch.arange(many - 1, -1, -1, device=device)
        assert_same(case, rowwise(take(case, order).run()), whole, "rows reversed", order)


@pytest.mark.parametrize("cols", [4, 7, 100, 257, 1023, 1024, 2048])
def test_a_row_of_a_large_tensor_does_not_depend_on_its_batch(op, cols) -> None:
    """Catches smaller tiles of a large fp64 tensor on the CPU that add in another order."""
    pair = next(pair for pair in PAIRS if pair.rows == torch.float64)
    rows = (1 << 18) // cols + 33
    case = make_case(op, (rows, cols), pair, "cpu")
    results = case.run()
    case.check(results)
    for part in (slice(5, 6), slice(4, 41), slice(rows - 2, rows)):
        ours = rowwise(take(case, part).run())
        assert_same(case, ours, rowwise(results), f"rows {part.start} to {part.stop} alone", part)


@pytest.mark.parametrize("rows, cols", [(600, 24600), (2200, 32768), (300, 65600), (80, 147464)])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_a_long_row_does_not_depend_on_its_batch(pair, rows, cols) -> None:
    """Catches a way for many long rows that adds in another order than that for few, or leaves
    something of one row to the next that takes its place."""
    x = torch.randn(rows, cols, device="cuda").to(pair.rows)
    x[rows // 2 + 1] *= 1e4 if pair.rows == torch.float16 else 1e30  # its squares may overflow
    weight, bias = torch.randn(2, cols, device="cuda").to(pair.params)
    layer_norm = fused_layer_norm(x, weight, bias)
    rms_norm = fused_rms_norm(x, weight)
    for part in (slice(0, 1), slice(3, 7), slice(rows // 2, rows // 2 + 3), slice(rows - 2, rows)):
        assert same_bits(fused_layer_norm(x[part], weight, bias), layer_norm[part]), part
        assert same_bits(fused_rms_norm(x[part], weight), rms_norm[part]), part


@pytest.mark.parametrize("dtype", sorted({pair.rows for pair in PAIRS}, key=str), ids=str)
@pytest.mark.parametrize("cols", [7, 16, 64, 130, 250, 256, 768, 1023, 1024, 4096, 8192, 16384])
def test_absent_parameters_are_ones_and_zeros(device, dtype, cols) -> None:
    """Catches a kernel that takes weight and bias for granted, or one for the case that they are
    there that computes something else."""
    rows = 37 if device == "cpu" else 9216 if cols <= 256 else 2432 if cols <= 1024 else 700
    x = torch.randn(rows, cols, dtype=dtype, device=device)
    ones, zeros = torch.ones_like(x[0]), torch.zeros_like(x[0])
    whole = fused_layer_norm(x, ones, zeros)
    for weight in (None, ones):
        assert same_bits(fused_layer_norm(x, weight, normalized_shape=cols), whole)
    assert same_bits(fused_rms_norm(x, normalized_shape=cols), fused_rms_norm(x, ones))


@pytest.mark.parametrize(("device", "cols"), WIDTHS)
def test_a_row_does_not_depend_on_its_address(op, device, cols) -> None:
    """Catches lanes that are dealt out from an aligned address rather than from the first element:
    other bits in a view, or in odd rows of an odd width."""
    for pair in PAIRS:
        case = make_case(op, (5, cols), pair, device)
        dense = rowwise(case.run())
        views = [(f"offset {k}", lambda t, k=k: guarded(t, k)) for k in (1, 2, 3, 4, 5, 7)]
        for what, view in [*views, ("strided rows", strided_rows)]:
            inputs = {name: view(t) for name, t in case.inputs.items()}
            moved = Case(op, inputs, tuple(map(view, case.grads)))
            assert_same(case, rowwise(moved.run()), dense, what)


def test_gradients_do_not_depend_on_what_else_is_wanted(op, device, pair) -> None:
    """Catches a gradient that changes when another input is frozen."""
    for shape in [(40, 33), (130, 1024)]:
        case = make_case(op, shape, pair, device)
        everything = case.run()
        for wanted in subsets(case.present):
            assert_same(case, case.run(wanted), everything, f"gradients of {wanted} alone")


def test_saved_statistics_do_not_change_the_output(op, device, pair) -> None:
    """Catches a path without statistics (no gradient wanted) that computes something else."""
    for cols in (3, 64, 1000, 4096):
        case = make_case(op, (9, cols), pair, device)
        with torch.no_grad():
            plain = case.run(())
        assert_same(case, plain, case.run(), "under no_grad")


@pytest.mark.parametrize("shape", [(2000, 33), (700, 1000), (3, 100_000)], ids=str)
def test_threads(op, pair, shape, threads) -> None:
    """Catches partial sums per thread: the bits would follow the machine."""
    case = make_case(op, shape, pair, "cpu")
    threads(1)
    one = case.run()
    for count in (2, 3, 7):
        threads(count)
        assert_same(case, case.run(), one, f"{count} threads")


def test_deterministic_mode(op, device) -> None:
    """Catches an op that torch.use_deterministic_algorithms refuses."""
    case = make_case(op, (65, 1000), PAIRS[0], device)
    leaves = case.leaves(case.present)
    torch.set_deterministic_debug_mode("error")
    try:
        outputs = op.fused(*leaves.values(), **case.options)
        outputs = outputs if op.adds else (outputs,)
        grads = torch.autograd.grad(outputs, [*leaves.values()], case.grads)
    finally:
        torch.set_deterministic_debug_mode("default")
    names = [f"grad_{name}" for name in leaves]
    assert_same(case, dict(zip(names, grads, strict=True)), case.run(), "deterministic mode")
