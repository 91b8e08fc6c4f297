"""Runs every CUDA kernel on small inputs, for tools that watch memory and threads.

    compute-sanitizer --tool memcheck python -m tests.every_kernel
    compute-sanitizer --tool racecheck python -m tests.every_kernel --dtype bfloat16

It checks no values (the tests do): each call has a shape that another tile of the kernels takes,
and rows that begin at multiples of 16 bytes or do not. The options that have kernels of their own
come on top: dropout, other dtypes, a saved output, rows at two strides, sums added to main_grad.
"""

from __future__ import annotations

import argparse

import torch

from fused_op import FusedLayerNorm, FusedRMSNorm
from tests.ops import OPS, PAIRS, Op, Pair

# Rows, and 16-byte vectors of a row: the tiles of csrc/cuda/row_tile.h from one lane a row to a
# CTA, with few rows and many, then rows over a cluster, one or several in turn, and those too long
# for one. Kernels read whole aligned blocks of 16 bytes that hold an element of a tensor, and these
# tools would complain where the memory of a tensor ends inside of one: here none does.
SHAPES = (
    *((rows, vectors) for rows in (8, 600) for vectors in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((rows, vectors) for rows in (8, 304) for vectors in (320, 512, 640)),
    *((rows, vectors) for rows in (8, 272) for vectors in (1024, 1280, 1536, 2048)),
    *((8, vectors) for vectors in (4096, 32769)),
    (144, 2049),
    (40, 16385),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", help="of the input; default: all")
    chosen = parser.parse_args(argv).dtype
    calls = 0
    for pair in PAIRS:
        if chosen is not None and pair.rows != getattr(torch, chosen):
            continue
        for op, rows, cols, shift in cases(pair):
            inputs = make_inputs(op, pair, rows, cols, shift)
            outputs = op.fused(**inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            calls += 1
        calls += call_options(pair)
        torch.cuda.synchronize()
        print(f"{pair}: {calls} calls forward and backward", flush=True)


def cases(pair: Pair) -> list[tuple[Op, int, int, int]]:
    """Op, rows, columns, and how many elements past a multiple of 16 bytes the rows begin."""
    vector = 16 // pair.rows.itemsize
    # 1 + weight is made by PyTorch, and its memory ends with it.
    unpadded = [op for op in OPS if op.zero_centered]
    less_than_one = [
        (op, 304, cols, 0) for cols in range(1, vector) for op in OPS if op not in unpadded
    ]
    return less_than_one + [
        (op, rows, vectors * vector - shift, shift)
        for rows, vectors in SHAPES
        for shift in (0, 1)
        for op in OPS
        if shift == 0 or op not in unpadded
    ]


OPTIONS = (
    {"dropout_p": 0.5},
    {"out_dtype": torch.float32},
    {"memory_efficient": True},
    {"residual_dtype": torch.float32},
    {"zero_centered": True},
)


def call_options(pair: Pair) -> int:
    """Forward and backward with each option that the op has; returns how many calls."""
    if pair.rows == torch.float64:
        return 0
    calls = 0
    vector = 16 // pair.rows.itemsize
    for op in OPS:
        if op.zero_centered:
            continue
        for options in OPTIONS:
            if op.adds is ("memory_efficient" in options) or (
                "residual_dtype" in options and not op.adds
            ):
                continue
            for rows, vectors in SHAPES:
                for shift in (0,) if "zero_centered" in options else (0, 1):
                    inputs = make_inputs(op, pair, rows, vectors * vector - shift, shift)
                    outputs = op.fused(**inputs, **options)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
                    calls += 1
    for cls in (FusedLayerNorm, FusedRMSNorm):  # heads of a packed tensor, and main_grad
        for cols in (64, 256, 2048):
            packed = torch.rand(2, 9, 3, 4, cols, dtype=pair.rows, device="cuda")
            norm = cls(cols, dtype=pair.params, device="cuda", fuse_wgrad_accumulation=True)
            for parameter in norm.parameters():
                parameter.main_grad = torch.zeros(cols, device="cuda")
            y = norm(packed[:, :, 1].requires_grad_())
            y.backward(packed[:, :, 2])
            calls += 1
    return calls


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
