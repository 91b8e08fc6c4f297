"""Results that are not written everywhere show: their memory is filled before each call.

The same call runs over memory full of NaN and of another pattern. A result or a partial
sum that keeps an element of it differs between them. The test looks at where the results lie, so
that it cannot pass by missing their memory. (.ci/sanitize fills all new memory of all CPU tests.)
"""

import torch

from tests.case import Case, make_case
from tests.numerics.test_determinism import same_bits
from tests.ops import F64

PATTERNS = (0xFF, 0x5A)  # NaN in every dtype; about 1.5e16 in float32
SHAPES = [(5, 33), (70, 1000), (300, 64)]
CUDA_SHAPES = [(9, 256), (600, 1024), (17, 8192), (5, 40001), (140, 16392), (3, 262145)]


def fill(device: str, pattern: int, *sizes: int) -> list[tuple[int, int]]:
    """Fill what the allocator will give out next in these sizes of bytes; returns where that is."""
    dirty = []
    for size in (size for size in sizes if size < 2**22 or device == "cuda"):
        for _ in range(3):  # a block before it and behind it may be taken for something else
            dirty.append(torch.full((size,), pattern, dtype=torch.uint8, device=device))
    return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in dirty]


def run_over(case: Case, pattern: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The results, and the names of those that were written over the pattern."""
    op, leaves = case.op, case.leaves(case.present)
    tensors = [leaves[name] for name in case.present]
    compute = 8 if tensors[0].dtype is F64 else 4
    sizes = {t.nbytes for t in tensors} | {2 * case.rows * compute, case.rows * compute}
    # Partial sums of the parameters' gradients, whose count is the kernels' own matter.
    sizes |= {n * case.cols * compute for n in (1, 2, 4, 8, 16, 64, 128, 132, 264)}
    device = case.device.type
    places = fill(device, pattern, *sizes)
    outputs = op.fused(*leaves.values(), **case.options)
    outputs = outputs if op.adds else (outputs,)
    results = dict(zip(("output", "sum"), outputs, strict=False))
    found = [n for n, t in results.items() if lies_in(t, places)]
    places = fill(device, pattern, *sizes)
    grads = torch.autograd.grad(outputs, tensors, case.grads)
    grads = {f"grad_{n}": t for n, t in zip(case.present, grads, strict=True)}
    found += [n for n, t in grads.items() if lies_in(t, places)]
    return {n: t.detach().clone() for n, t in (results | grads).items()}, found


def lies_in(t: torch.Tensor, places: list[tuple[int, int]]) -> bool:
    return any(start <= t.data_ptr() and t.data_ptr() + t.nbytes <= end for start, end in places)


def test_every_element_is_written(op, device, pair):
    """Catches tails that no thread covers, rows that no block takes, and partial sums that are
    added before they are written."""
    seen = set()
    for shape in SHAPES + (CUDA_SHAPES if device == "cuda" else []):
        case = make_case(op, shape, pair, device)
        expected, _ = run_over(case, PATTERNS[0])
        case.check(expected)
        for pattern in PATTERNS[1:]:
            got, found = run_over(case, pattern)
            assert all(same_bits(got[n], expected[n]) for n in expected), f"{case}"
            seen.update(found)
    # malloc takes other blocks at times: there, .ci/sanitize is what misses none.
    wanted = {"output", "grad_input"} if device == "cuda" else seen
    assert seen and wanted <= seen, f"this test looked at {sorted(seen)} alone"
