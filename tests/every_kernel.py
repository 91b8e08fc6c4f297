"""Runs every CUDA kernel on small inputs, for tools that watch memory and threads.

    compute-sanitizer --tool memcheck python -m tests.every_kernel
    compute-sanitizer --tool racecheck python -m tests.every_kernel --dtype bfloat16 --share 1/4

It checks no values (the tests do): each call has a shape that another tile of the kernels takes,
and rows that begin at multiples of 16 bytes or do not. The options that have kernels of their own
come on top: dropout, other dtypes, a saved output, rows at two strides, sums added to main_grad.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product

import torch

from fused_op import FusedLayerNorm, FusedRMSNorm
from tests.ops import OPS, PAIRS, Op, Pair

# Rows, and 16-byte vectors of a row: the tiles of csrc/cuda/row_tile.h from one lane a row to a
# CTA, with few rows and many, then rows over a cluster, one, many or several in turn, and those too
# long for one. Kernels read whole aligned blocks of 16 bytes that hold an element of a tensor, and
# these tools would complain where the memory of a tensor ends inside of one: here none does.
SHAPES = (
    *((rows, vectors) for rows in (8, 600) for vectors in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((rows, vectors) for rows in (8, 304) for vectors in (320, 512, 640)),
    *((rows, vectors) for rows in (8, 272) for vectors in (1024, 1280, 1536, 2048)),
    *((8, vectors) for vectors in (4096, 32769)),
    (144, 2049),
    (304, 2049),
    (8, 24577),
)
# More than sixteen rows for each of 150 multiprocessors: backward has three in flight, not two.
MANY_ROWS = (2432, 1024)
MANY_WIDE_ROWS = (2432, 1536)  # the same with three vectors a lane
IN_TURN = (64, 16385)  # large clusters that take many rows in turn
LARGE_CLUSTERS = (16385, 24577)  # vectors of rows that take clusters of more than eight CTAs
# Few long rows, over more CTAs than hold them.
SPREAD = ((24, 4096), (38, 2688), (29, 5760), (20, 8192), (19, 8320), (55, 3200))
# Words of 4 bytes, of rows that are not whole vectors.
WORDS = (100, 250, 350, 511, 1101, 2501, 2502, 6250)
# Forward takes few rows in other tiles than many, and one warp's rows several to a CTA.
MANY_WORDS = (1101, 1700, 2501, 2502)
# Words of the rows of an odd number of elements, and how many of such rows are many: they share a
# warp, or have one or three.
ODD_WORDS = ((64, 9704), (128, 4904), (256, 2432), (322, 2432), (512, 2432), (1026, 904))
THREE_A_LANE = ((8, 96), (1000, 96), (2432, 96))
# Many rows that fill their tile: short ones a whole number of CTAs, others too many for EagerTile.
FULL = (
    *((768, vectors) for vectors in (2, 4, 8, 16)),
    *((2432, vectors) for vectors in (128, 256, 640)),
    (272, 2048),
    (304, 4096),
    (136, 16384),
)
UNFILLED = (2432, 320)  # as many that do not


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", help="of the input; default: all")
    parser.add_argument(
        "--share", default="1/1", metavar="I/N", help="the calls I, I + N, ... from 1 on"
    )
    parser.add_argument(
        "--portable-clusters",
        action="store_true",
        help="no clusters of more than eight CTAs: synccheck (2025.3) makes false reports of them "
        "and illegal accesses of its own, also with a kernel that does nothing else",
    )
    parser.add_argument("--forward", action="store_true", help="without backward")
    options = parser.parse_args(argv)
    first, shares = map(int, options.share.split("/"))
    done = 0
    for pair in PAIRS:
        if options.dtype is not None and pair.rows != getattr(torch, options.dtype):
            continue
        every = calls(pair, options.portable_clusters)
        with torch.set_grad_enabled(not options.forward):
            for call in islice(every, first - 1, None, shares):
                call()
                done += 1
        torch.cuda.synchronize()
        print(f"{pair}: {done} calls{' forward' if options.forward else ''}", flush=True)


def calls(pair: Pair, portable: bool = False) -> Iterator[Callable[[], None]]:
    """Every call of the pair, forward and backward; `portable`: without large clusters."""
    vector = 16 // pair.rows.itemsize
    for op, rows, cols, shift in cases(pair):
        if not portable or -(-cols // vector) not in LARGE_CLUSTERS:
            yield partial(call_op, op, pair, rows, cols, shift)
    if pair.rows == torch.float64:
        return
    for op in OPS:
        for options in options_of(op):
            shifts = (0,) if "zero_centered" in options else (0, 1)
            shapes = [(*shape, shift) for shape, shift in product(SHAPES, shifts)]
            if "dropout_p" in options:
                shapes.append((*MANY_ROWS, 0))
            for rows, vectors, shift in shapes:
                if not portable or vectors not in LARGE_CLUSTERS:
                    cols = vectors * vector - shift
                    yield partial(call_op, op, pair, rows, cols, shift, **options)
        for (rows, vectors), shift in product(SHAPES, () if op.zero_centered else (0, 1)):
            if not portable or vectors not in LARGE_CLUSTERS:
                yield partial(call_constant, op, pair, rows, vectors * vector - shift, shift)
    for cls in (FusedLayerNorm, FusedRMSNorm):
        for cols in (64, 256, 2048):
            yield partial(call_heads, cls, pair, cols)


def cases(pair: Pair) -> list[tuple[Op, int, int, int]]:
    """Op, rows, columns, and how many elements past a multiple of 16 bytes the rows begin."""
    vector = 16 // pair.rows.itemsize
    word = max(1, 4 // pair.rows.itemsize)
    aligned, odd = [], []  # rows that begin and end at multiples of 16 bytes, and others
    for rows, vectors in (*SHAPES, MANY_ROWS):
        aligned.append((rows, vectors * vector, 0))
        odd.append((rows, vectors * vector - 1, 1))
        odd.append((rows, vectors * vector, 1))  # by vectors, shifted
    odd += [(304, cols, 0) for cols in range(1, vector)]
    odd += [(272, words * word, shift) for words in WORDS for shift in (1, 2)]
    odd += [(MANY_ROWS[0], words * word, 2) for words in MANY_WORDS]
    for words, many in ODD_WORDS:
        odd += [(rows, words * word - 1, shift) for rows, shift in ((40, 1), (40, 2), (many, 1))]
    found = [(op, *shape) for shape in aligned for op in OPS]
    # Not of 1 + weight, which PyTorch makes: its memory ends with it.
    found += [(op, *shape) for shape in odd for op in OPS if not op.zero_centered]
    for rows, vectors in (IN_TURN, *SPREAD, MANY_WIDE_ROWS, *THREE_A_LANE, *FULL, UNFILLED):
        found += [(op, rows, vectors * vector, 0) for op in OPS if not op.adds]
    return found


OPTIONS = (
    {"dropout_p": 0.5},
    {"out_dtype": torch.float32},
    {"memory_efficient": True},
    {"residual_dtype": torch.float32},
    {"zero_centered": True},
)


def options_of(op: Op) -> list[dict[str, object]]:
    """The options that the op has."""
    if op.zero_centered:
        return []
    missing = "memory_efficient" if op.adds else "residual_dtype"
    return [options for options in OPTIONS if missing not in options]


def call_op(op: Op, pair: Pair, rows: int, cols: int, shift: int, **options) -> None:
    outputs = op.fused(**make_inputs(op, pair, rows, cols, shift), **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if torch.is_grad_enabled():
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


@torch.no_grad()
def call_constant(op: Op, pair: Pair, rows: int, cols: int, shift: int) -> None:
    """Rows that do not vary (RMSNorm: that overflow), which kernels take again from memory."""
    inputs = make_inputs(op, pair, rows, cols, shift)
    inputs["input"].fill_(3 if op.centred else torch.finfo(pair.rows).max)
    if op.adds:
        inputs["residual"].zero_()
    op.fused(**inputs)


def call_heads(cls, pair: Pair, cols: int) -> None:
    """Heads of a packed tensor, and main_grad."""
    packed = torch.rand(2, 9, 3, 4, cols, dtype=pair.rows, device="cuda")
    norm = cls(cols, dtype=pair.params, device="cuda", fuse_wgrad_accumulation=True)
    for parameter in norm.parameters():
        parameter.main_grad = torch.zeros(cols, device="cuda")
    y = norm(packed[:, :, 1].requires_grad_())
    if torch.is_grad_enabled():
        y.backward(packed[:, :, 2])


def make_inputs(op, pair, rows: int, cols: int, shift: int) -> dict[str, torch.Tensor]:
    """Each input of the op; rows `shift` elements past a multiple of 16 bytes."""
    inputs = {}
    for name in op.inputs:
        is_row = name in ("input", "residual")
        dtype = pair.rows if is_row else pair.params
        first, size = (shift, rows * cols) if is_row else (0, cols)
        block = 16 // dtype.itemsize
        whole = -(-(first + size) // block) * block
        values = torch.rand(whole, dtype=dtype, device="cuda")[first : first + size]
        inputs[name] = (values.view(rows, cols) if is_row else values).requires_grad_()
    return inputs


if __name__ == "__main__":
    main()
