"""Every width and number of rows: where vectors, warps, blocks, clusters and 32-bit offsets end."""

import os
import random

import pytest
import torch

from tests.case import SEED, make_case
from tests.memory import GIB
from tests.ops import DEVICES, OPS, PAIRS

COLS = [1, 2, 3, 31, 33, 255, 1000, 1023, 2050, 4095, 4096, 5120, 5121]
COLS += [8192, 12288, 16382, 16384, 65536, 131072, 262144]
ROWS = [0, 1, 7, 4096]


def table() -> list[tuple]:
    """(device, cols, rows, pair): all of them on CUDA, on the CPU what takes little time."""
    everything = [(cols, rows, pair) for cols in COLS for rows in ROWS for pair in PAIRS]
    small = [(c, r, p) for c, r, p in everything if c * r <= 2**15]
    # Wider ones with one pair each, so that every pair comes up.
    wide = [(c, r) for c in COLS for r in ROWS if 2**15 < c * r <= 2**20]
    small += [(c, r, PAIRS[i % len(PAIRS)]) for i, (c, r) in enumerate(wide)]
    return [("cpu", *row) for row in small] + [
        ("cuda", *row) for row in everything if "cuda" in DEVICES
    ]


@pytest.mark.parametrize(("device", "cols", "rows", "pair"), table(), ids=str)
def test_shape(device, cols, rows, pair, need_memory) -> None:
    """Catches wrong tails, tiles that do not cover a row, offsets that overflow and launches that
    fail, in each op."""
    if device == "cuda":
        # Ten tensors of this size, fp32 noise that they are made of, and the truth of a chunk.
        need_memory(rows * cols * (10 * pair.rows.itemsize + 16) + 6 * GIB)
    for op in OPS:
        case = make_case(op, (rows, cols), pair, device)
        case.check(case.run())


def test_every_width(op, device) -> None:
    """Catches what goes wrong only at one remainder: all widths up to 130, then around powers."""
    around = [2**k + d for k in range(8, 15) for d in (-1, 0, 1)]
    for i, cols in enumerate([*range(1, 131), *around]):
        pair = PAIRS[i % len(PAIRS)]
        case = make_case(op, (3, cols), pair, device)
        case.check(case.run())


@pytest.mark.parametrize("rows", [65535, 65536, 131073])
def test_many_rows(op, device, rows) -> None:
    """Catches a grid whose second dimension (at most 65535) counts rows."""
    case = make_case(op, (rows, 3), PAIRS[rows % len(PAIRS)], device)
    case.check(case.run())


@pytest.mark.skipif("cuda" not in DEVICES, reason="fills a GPU")
@pytest.mark.parametrize("vectors", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("missing", [0, 1])
def test_many_rows_in_turn(op, pair, vectors, missing) -> None:
    """Catches what the backward does only where each thread takes many rows, one after another:
    fewer threads, more rows in flight, the place of a row that is free again."""
    cols = vectors * 16 // pair.rows.itemsize - missing
    rows = 17 * 8 * torch.cuda.get_device_properties("cuda").multi_processor_count + 3
    case = make_case(op, (rows, cols), pair, "cuda")
    case.check(case.run())


# Few of them are laid over clusters that are larger than the row needs: one of each kind.
SPREAD = [(24, 32768), (38, 21504), (29, 46080), (20, 65536), (19, 66560), (55, 25600)]
DRAWS = int(os.environ.get("FUSED_OP_DRAWS", "2"))  # random shapes of each op and pair


@pytest.mark.skipif("cuda" not in DEVICES, reason="the CPU has one loop for rows of any length")
def test_long_rows(op, pair, need_memory) -> None:
    """Catches a cluster that is laid out wrong for one number of rows and columns: a launch that
    fails, a CTA without a part of the row, a part that two CTAs take."""
    drawn = random.Random(f"{SEED} {op} {pair}")
    shapes = [(drawn.randint(1, 200), drawn.randint(16385, 300_000)) for _ in range(DRAWS)]
    largest = max(rows * cols for rows, cols in SPREAD + shapes)
    need_memory(largest * (10 * pair.rows.itemsize + 16) + 6 * GIB)
    for rows, cols in SPREAD + shapes:
        case = make_case(op, (rows, cols), pair, "cuda")
        case.check(case.run())


@pytest.mark.skipif("cuda" not in DEVICES, reason="reads memory past a tensor, on a GPU")
@pytest.mark.parametrize("cols", [1, 3, 33, 255, 1023, 2050])
def test_nothing_is_written_past_a_result(op, pair, cols) -> None:
    """Catches a vector store over the end of a row: the allocator rounds blocks up to 512 bytes,
    and the rest of each result's block has to keep what was in it."""
    if op.zero_centered:
        pytest.skip("1 + weight is made in these blocks too")
    mark, block = 0x5A, 512
    case = make_case(op, (5, cols), pair, "cuda")
    # All free blocks of the results' sizes, until the allocator has to ask for more: small tensors
    # come from them now.
    marked = []
    for size in {-(-t.nbytes // block) * block for t in case.inputs.values() if t is not None}:
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:
            marked.append(torch.full((size,), mark, dtype=torch.uint8, device="cuda"))
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in marked]
    del marked
    leaves = case.leaves(case.present)
    outputs = op.fused(*leaves.values(), **case.options)
    outputs = outputs if op.adds else (outputs,)
    # Not backward(): it copies the one gradient of input and residual into a block used before.
    grads = torch.autograd.grad(outputs, list(leaves.values()), case.grads)
    looked = 0
    for t in (*outputs, *grads):
        start, end = t.data_ptr() + t.nbytes, t.data_ptr() + -(-t.nbytes // block) * block
        if start == end or not any(low <= start < high for low, high in places):
            continue
        rest = torch.as_tensor(Memory(start, end - start), device="cuda")
        assert (rest == mark).all(), f"{case}: written past a result of {list(t.shape)}"
        looked += 1
    assert looked, f"{case}: no result lies where this test looks"


class Memory:
    """Bytes on the GPU, for torch.as_tensor to read."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
