"""Beyond 2^31 and 2^32 elements, rows and columns of 2^28, and no memory left.

Needs most of a large GPU, alone: `python -m pytest tests/numerics/test_scale.py`. Where less memory
is free a test is skipped and says how much it needs. FUSED_OP_SCALE=1: 2^28 on the CPU too.
"""

import gc
import os

import pytest
import torch

import fused_op
from tests.case import Case, generator, make_case
from tests.memory import GIB
from tests.ops import BF16, DEVICES, F16, F32, OPS, PAIRS, Op, Pair

PLAIN = [op for op in OPS if not op.zero_centered]
needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")


def large_case(op: Op, shape: tuple[int, int], pair: Pair, device: str, absent=()) -> Case:
    """As make_case, without the memory that its scales and offsets take."""
    g = generator(device, op.name, shape, pair)

    def rows() -> torch.Tensor:
        t = torch.empty(shape, dtype=pair.rows, device=device)
        for part in t.view(-1).split(2**26):  # a random kernel may count in 32 bits itself
            part.normal_(generator=g)
        return t

    params = make_case(op, (1, shape[1]), pair, device, absent).inputs
    given = {name: rows() for name in op.inputs if name not in op.parameters}
    return Case(op, params | given, tuple(rows() for _ in range(1 + op.adds)))


@needs_gpu
@pytest.mark.parametrize("pair", [Pair(BF16, BF16), Pair(F32, F32)], ids=str)
@pytest.mark.parametrize(
    "shape", [(2**19 + 1, 4096), (2**20 + 1, 4096), (2**14 + 1, 262144)], ids=str
)
@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_more_than_32_bits_of_elements(op, shape, pair, need_memory) -> None:
    """Catches an offset, a count or a row stride in 31 or 32 bits: all rows are compared, the last
    ones lie beyond element 2^31 or 2^32. Parameter gradients sum over up to 2^20 rows."""
    tensors = 7 if op.adds else 4  # inputs, outputs, what arrives at those, and one gradient
    need_memory(tensors * shape[0] * shape[1] * pair.rows.itemsize + 6 * GIB)
    case = large_case(op, shape, pair, "cuda")
    case.check(case_without_poison(case))


def case_without_poison(case: Case) -> dict[str, torch.Tensor]:
    """Case.run() fills memory of the size of every input first: here there is none to spare."""
    leaves = case.leaves(case.present)
    outputs = case.op.fused(*leaves.values(), **case.options)
    outputs = outputs if case.op.adds else (outputs,)
    grads = torch.autograd.grad(outputs, list(leaves.values()), case.grads)
    results = dict(zip(("output", "sum"), outputs, strict=False))
    results |= {f"grad_{name}": t for name, t in zip(leaves, grads, strict=True)}
    return {name: t.detach() for name, t in results.items()}


@pytest.mark.parametrize("op", PLAIN[:2], ids=str)
def test_one_row_of_2_to_the_28_columns(op, device, need_memory) -> None:
    """Catches a sum of 2^28 terms that stalls in float32, and a column index that overflows. The
    whole row is compared with the formula in float64, by parts."""
    cols = 2**28
    if device == "cuda":
        need_memory(8 * cols + 30 * GIB)
    else:
        need_time_and_memory()
    g = generator(device, "long row", op.name)
    x, dy = (torch.empty(1, cols, dtype=F16, device=device) for _ in range(2))
    for t in (x, dy):
        t.normal_(generator=g)
    leaf = x.detach().requires_grad_()
    output = op.fused(leaf, eps=1e-5)
    (dx,) = torch.autograd.grad(output, leaf, dy)

    parts = list(zip(*(t[0].split(2**24) for t in (x, dy, output.detach(), dx)), strict=True))
    mean = sum(p.double().sum() for p, *_ in parts) / cols if op.centred else 0.0
    rstd = (sum((p.double() - mean).square().sum() for p, *_ in parts) / cols + 1e-5).rsqrt()
    dot = sum(((p.double() - mean) * rstd * d.double()).sum() for p, d, *_ in parts) / cols
    shift = sum(d.double().sum() for _, d, *_ in parts) / cols if op.centred else 0.0
    for part, d, y, gradient in parts:
        xhat = (part.double() - mean) * rstd
        truth = (d.double() - shift - xhat * dot) * rstd
        for actual, expected in ((y, xhat), (gradient, truth)):
            error = (actual.double() - expected).abs()
            bound = torch.finfo(F16).eps / 2 * expected.abs() + 1e-6 + 2.0**-25
            assert (error <= bound).all(), f"{op}: off by {error.max().item():.3g}"


@pytest.mark.parametrize("op", PLAIN, ids=str)
@pytest.mark.parametrize("cols", [1, 2])
def test_2_to_the_28_rows(op, device, cols, need_memory) -> None:
    """Catches a grid that counts rows in a dimension which has no place for them: sampled rows, the
    last ones among them, are those of a call of their own."""
    rows = 2**28
    if device == "cuda":
        need_memory(rows * cols * 2 * 9 + 8 * rows + 6 * GIB)
    else:
        need_time_and_memory()
    case = large_case(op, (rows, cols), Pair(BF16, BF16), device)
    results = case_without_poison(case)
    sample = torch.tensor([0, 1, 65535, 65536, 2**24 + 1, 2**27 + 3, rows - 2, rows - 1])
    sample = sample.to(device)
    inputs = {n: t if n in op.parameters else t[sample] for n, t in case.inputs.items()}
    alone = case_without_poison(Case(op, inputs, tuple(g[sample] for g in case.grads)))
    for name in ("output", "sum", "grad_input", "grad_residual"):
        if name in results:
            assert torch.equal(results[name][sample], alone[name]), f"{op}: {name}"
    dbias = results.get("grad_bias")
    if dbias is not None:  # 2^28 terms, whose sum is that of parts
        truth = sum(part.double().sum(0) for part in case.grads[0].split(2**22))
        size = sum(part.double().abs().sum(0) for part in case.grads[0].split(2**22))
        error = (dbias.double() - truth).abs()
        bound = torch.finfo(BF16).eps / 2 * truth.abs() + 64 * torch.finfo(F32).eps * size
        assert (error <= bound).all(), f"{op}: grad_bias is off by {error.tolist()}"


def need_time_and_memory() -> None:
    """On the CPU half a minute a test, and gigabytes: for those who ask."""
    if not os.environ.get("FUSED_OP_SCALE"):
        pytest.skip("set FUSED_OP_SCALE=1 to run it on the CPU")
    with open("/proc/meminfo") as file:
        (line,) = (line for line in file if line.startswith("MemAvailable"))
    if int(line.split()[1]) * 1024 < 12 * GIB:
        pytest.skip("needs 12 GiB of memory")


@needs_gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_out_of_memory(op, where) -> None:
    """Catches a half-made call that keeps memory, or a context that is of no use afterwards."""
    case = make_case(op, (4096, 4096), PAIRS[0], "cuda")
    expected = case_without_poison(case)
    torch.cuda.synchronize()
    leaves = case.leaves(case.present)
    outputs = None
    if where == "backward":
        outputs = op.fused(*leaves.values(), **case.options)
        outputs = outputs if op.adds else (outputs,)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                if where == "forward":
                    op.fused(*leaves.values(), **case.options)
                else:
                    torch.autograd.grad(
                        outputs, list(leaves.values()), case.grads, retain_graph=True
                    )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    got = case_without_poison(case)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@needs_gpu
def test_out_of_memory_of_a_module() -> None:
    """The parameters' gradients of a failed step are as they were."""
    norm = fused_op.FusedLayerNorm(4096, device="cuda")
    norm(torch.randn(8, 4096, device="cuda")).sum().backward()
    before = [p.grad.clone() for p in norm.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        norm(torch.zeros(4096, device="cuda").expand(2**30, 4096)).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(norm.parameters(), before, strict=True))
