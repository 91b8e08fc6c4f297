"""Runs every CUDA kernel on small inputs, for tools that watch memory and threads.

    compute-sanitizer --tool memcheck python -m tests.kernels.every_kernel
    compute-sanitizer python -m tests.kernels.every_kernel --dtype bfloat16 --share 1/4

It checks no values (the tests do). The plans of a grid of calls, of every op, option, width, number
of rows and alignment, say which kernels there are; the smallest call with each of their traits
(`traits`) is run, forward and backward. What plans do not show comes on top: rows at two strides,
sums added to main_grad, rows whose moments are taken a second time, and variants
(every_variant.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product
from typing import NamedTuple

import torch

from fused_op import FusedLayerNorm, FusedRMSNorm
from fused_op._kernel_plan import NORMS, ROUNDINGS, Call, Gpu, gpu_of
from tests.kernels import every_variant
from tests.ops import BF16, F16, F32, F64, OPS, PAIRS, Op, Pair

NAMES = {F16: "f16", BF16: "bf16", F32: "f32", F64: "f64"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
FEW = 5  # rows; a prime, so that some CTA is not full
FEW_A_THREAD = (41, 199)  # of which a thread of backward_few_kernel takes two and four at once
MANY = 1 << 20
SHORT = 66  # columns, from which on a tile has more than one width
PORTABLE_CLUSTER = 8
LONG_ROWS = (40, 300, 1100)  # not few, and so many that clusters take several in turn


class Trait(NamedTuple):
    """What a kernel shares with others; each trait is run once."""

    kind: str
    kernel: str
    values: tuple[str, ...]


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
    parser.add_argument(
        "--parameters-as-rows", action="store_true", help="without parameters of another dtype"
    )
    parser.add_argument("--forward", action="store_true", help="without backward")
    options = parser.parse_args(argv)
    first, shares = map(int, options.share.split("/"))
    done = 0
    for pair in PAIRS:
        if options.dtype is not None and pair.rows != getattr(torch, options.dtype):
            continue
        if options.parameters_as_rows and pair.params != pair.rows:
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
    for call in planned(pair, gpu_of(None, None), portable):
        yield partial(run, call)
        if call.misaligned and pair.rows.itemsize == 2:
            yield partial(run, call, shift=2)  # rows that begin at words
    for norm, rows, cols in product(NORMS, FEW_A_THREAD, (24, 150, 1024)):
        name = NAMES[pair.rows]
        call = Call(norm, rows, cols, name, param_dtype=NAMES[pair.params], out_dtype=name)
        yield partial(run, call)
    for op in OPS:
        for cols in (3, 24, 144, 1152, 4096, 20_000, 70_000):
            yield partial(run_constant, op, pair, cols)
    for cls in (FusedLayerNorm, FusedRMSNorm):
        for cols in (64, 144, 150, 256, 1152, 2048):
            yield partial(run_heads, cls, pair, cols)
    yield from every_variant.calls(pair)


# --- The calls that plans are asked of -----------------------------------------------------------


@cache
def variants(pair: Pair) -> list[Call]:
    """Every combination of op, dtypes and options that is legal beside the pair."""
    rows = NAMES[pair.rows]
    wider = [rows] if pair.rows in (F32, F64) else [rows, "f32"]
    found = []
    for norm, residual, out, rounding, dropout, efficient, misaligned in product(
        NORMS,
        ["", *wider],
        [*wider, *(["bf16"] if rows == "f32" else [])],
        ["once"] if rows in ("f32", "f64") else ROUNDINGS,
        *[(False, True)] * 3,
    ):
        call = Call(
            *(norm, FEW, 8, rows),
            residual=residual,
            param_dtype=NAMES[pair.params],
            out_dtype=out,
            rounding=rounding,
            dropout=dropout,
            memory_efficient=efficient,
            misaligned=misaligned,
        )
        found += [call] if not call.mistake() else []
    return found


def widths(pair: Pair) -> list[int]:
    """All short ones, then steps of a few percent, of whole vectors and of words; long rows."""
    vector = 32 // pair.rows.itemsize  # of 16 bytes, also beside a stream half as wide
    # A CTA has it in registers, also beside a stream half as wide.
    longest = (1 << 15) // (8 if pair.rows == torch.float64 else 2)
    found = set(range(1, max(6 * vector, SHORT)))
    count = 1.0
    while count * vector <= longest:
        even = int(count) * vector
        # A word more, half a word more, and what is a whole number of vectors of wider streams.
        found |= {even, even + 1, even - 2, even + vector // 2}
        count = max(count + 1, count * 1.02)
    # Whole tiles of the core table.
    found |= {2**n - 1 for n in range(5, 13)}  # an odd row whose units fill its lanes
    found |= {
        warps * 32 * per_lane * vector // 2 for warps in range(1, 17) for per_lane in (2, 3, 4)
    }
    for times in (0.5, 0.65, 1, 1.3, 2, 2.6, 3.6, 4, 6, 9, 16):
        even = int(longest * times) // vector * vector + 8 * vector
        found |= {even, even + 1, even + vector // 2}
    return sorted(found)


def row_counts(call: Call, gpu: Gpu) -> set[int]:
    """Numbers of rows that plans tell apart: few, more than the GPU holds at once, many steps."""
    plan, _ = replace(call, rows=FEW, backward=False).kernels(gpu)
    counts = {FEW}
    if "lanes" in plan:
        warp_cols = plan["lanes"] * plan["vectors"] * plan["pack"]
        warps = -(-call.cols // warp_cols) if plan["lanes"] == 32 else 1
        resident = gpu.multiprocessors * 512 // (plan["lanes"] * warps)
        counts.add(max(resident, 256) + 1)
    else:
        counts.update(LONG_ROWS)
    plan, _ = replace(call, rows=16 * MANY, backward=False).kernels(gpu)
    if flat_rows := plan.get("flat_rows", 0):  # of a thread, fewer if there are few CTAs
        cta_rows = 4 * gpu.multiprocessors * 256 // plan["flat_threads"]
        counts.update(cta_rows * 2**n - 1 for n in range(flat_rows.bit_length()))
    plan, _ = replace(call, rows=MANY, backward=True).kernels(gpu)
    if "side_by_side" in plan and plan["stages"] > 2 and plan["most_threads"] == 512:
        counts.add(16 * plan["ctas"] * (plan["most_threads"] // plan["row_threads"]) + 1)
    return counts


Smallest = dict[Trait, tuple[int, Call]]


@cache
def candidates(pair: Pair, gpu: Gpu) -> tuple[Smallest, Smallest]:
    """Of each trait the smallest call that has it, behind its number of elements.

    The second ones have no large clusters.
    """
    smallest: Smallest = {}
    portable: Smallest = {}
    for cols in widths(pair):
        counts: set[int] = set()
        types = None
        for variant in variants(pair):
            # Both norms have the same tiles, but for some of short rows and of the core table's.
            one = cols % 7 % 2 == NORMS.index(variant.op)
            if one and cols >= SHORT and cols % 32 not in (0, 31):
                continue
            if types != (types := (variant.residual, variant.out_dtype)):  # options change little
                counts = row_counts(replace(variant, cols=cols), gpu)
            for rows in counts:
                call = replace(variant, rows=rows, cols=cols)
                found, cluster = traits_of(call, gpu)
                size = rows * cols
                for trait in found:
                    if trait not in smallest or size < smallest[trait][0]:
                        smallest[trait] = (size, call)
                    if cluster > PORTABLE_CLUSTER:
                        continue
                    if trait not in portable or size < portable[trait][0]:
                        portable[trait] = (size, call)
    return smallest, portable


@cache
def planned(pair: Pair, gpu: Gpu, portable: bool = False) -> list[Call]:
    """Calls that have every trait: the largest that are needed, then what they leave out."""
    smallest = candidates(pair, gpu)[portable]
    chosen = []
    covered: set[Trait] = set()
    for trait, (_, call) in sorted(smallest.items(), key=lambda item: -item[1][0]):
        if trait not in covered:
            chosen.append(call)
            covered |= traits_of(call, gpu)[0]
    return chosen[::-1]


# --- What tells kernels apart --------------------------------------------------------------------

KERNEL = re.compile(r"fused_op::cuda::(\w+)<(?:fused_op::cuda::\w+Op<(.*)>, .*Tile<(.*)>|(.*))>$")
TYPE = re.compile(r"fused_op::B?Float16|float|double")
# Of the arguments of a tile, those that only bound registers, a tail (which takes many rows), and
# the width, or the parts of a row.
BOUNDS = {
    "forward_kernel": (5, 6, 7),
    "forward_flat_kernel": (5, 6),
    "backward_kernel": (3, 4, 8, 9),
}
BOUNDS |= {f"forward_{form}_kernel": (4, 5) for form in ("cluster", "streamed")}
BOUNDS |= {"forward_in_turn_kernel": (4, 5, 6), "backward_few_kernel": (3, 4, 9)}


def traits(name: str, cols: int) -> frozenset[Trait]:
    """Those of a kernel, by its name.

    A kernel is a template with an op and a tile. Types and tiles multiply without meeting in the
    code: every tile is run with some types, every combination of types in some tile. How rows share
    warps and what the op does meet in barriers and masks: all combinations are run.
    """
    lanes, warp_cols = shares(name)
    scope = "lanes" if lanes < 32 else "warp" if cols <= warp_cols else "warps"
    return traits_in(name, scope if lanes else "")


@cache
def shares(name: str) -> tuple[int, int]:
    """Lanes of a row and columns of a warp; zeros of a kernel that has no warps for a row."""
    kernel, _, tile, _ = KERNEL.match(name).groups()
    if kernel not in ("forward_kernel", "backward_kernel", "backward_few_kernel"):
        return 0, 0
    pack, lanes, vectors = map(int, tile.split(", ")[:3])
    return lanes, 32 * vectors * pack


@cache
def traits_in(name: str, scope: str) -> frozenset[Trait]:
    kernel, op, tile, types = KERNEL.match(name).groups()
    if op is None:
        return frozenset({Trait("types", kernel, (types,))})
    left = BOUNDS.get(kernel, ())
    told = tuple(v for i, v in enumerate(tile.split(", ")) if i not in left)
    return frozenset(
        {
            Trait("tile", kernel, (op.rpartition("::")[2], *told)),
            Trait("op", kernel, (TYPE.sub("T", op), scope)),
            Trait("types", kernel, tuple(TYPE.findall(op))),
        }
    )


def traits_of(call: Call, gpu: Gpu) -> tuple[set[Trait], int]:
    """Of all kernels of the call, forward and backward; and its largest cluster."""
    found: set[Trait] = set()
    cluster = 0
    for backward in (False, True):
        one = call if call.backward == backward else replace(call, backward=backward)
        plan, kernels = one.kernels(gpu)
        cluster = max(cluster, own := plan.get("cluster", 0))
        for _, name, _ in kernels:
            found |= traits(name, call.cols)
        if own > 0:
            kernel = KERNEL.match(kernels[0][1])[1]
            found.add(Trait("cluster", kernel, ("large" if own > PORTABLE_CLUSTER else "",)))
    return found, cluster


# --- Running them --------------------------------------------------------------------------------


def rows_at(rows: int, cols: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Random rows, `shift` elements past a multiple of 16 bytes.

    Kernels read whole aligned blocks of 16 bytes that hold an element of a tensor, and tools would
    complain where the memory of a tensor ends inside of one: here none does.
    """
    block = 16 // dtype.itemsize
    whole = -(-(shift + rows * cols) // block) * block
    memory = torch.rand(whole, dtype=dtype, device="cuda")
    return memory[shift : shift + rows * cols].view(rows, cols)


def run(call: Call, shift: int = 1) -> None:
    """The call, and its backward where gradients are recorded."""
    op = next(
        op
        for op in OPS
        if not op.zero_centered
        and op.centred == (call.op == "layer_norm")
        and op.adds == bool(call.residual)
    )
    dtype, out_dtype = DTYPES[call.dtype], DTYPES[call.out_dtype]
    shift = shift if call.misaligned else 0
    inputs = {"input": rows_at(call.rows, call.cols, dtype, shift)}
    if op.adds:
        inputs["residual"] = rows_at(call.rows, call.cols, DTYPES[call.residual])
    for name in op.parameters:
        inputs[name] = rows_at(1, call.cols, DTYPES[call.param_dtype]).view(-1)
    for tensor in inputs.values():
        tensor.requires_grad_()
    options = {"rounding": call.rounding}
    options |= {"out_dtype": out_dtype} if out_dtype != dtype else {}
    options |= {"dropout_p": 0.5} if call.dropout else {}
    options |= {"memory_efficient": True} if call.memory_efficient else {}
    outputs = op.fused(**inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if torch.is_grad_enabled():
        # What is not the call's input is misaligned in backward by the gradient that arrives last.
        last = shift if op.adds or call.memory_efficient else 0
        shifts = [0] * (len(outputs) - 1) + [last]
        grads = [
            rows_at(call.rows, call.cols, output.dtype, shift)
            for output, shift in zip(outputs, shifts, strict=True)
        ]
        torch.autograd.backward(outputs, grads)


@torch.no_grad()
def run_constant(op: Op, pair: Pair, cols: int, rows: int = 8) -> None:
    """Rows that do not vary (RMSNorm: that overflow), whose moments kernels take again."""
    inputs = {name: rows_at(rows, cols, pair.rows) for name in op.inputs[: 1 + op.adds]}
    inputs |= {name: rows_at(1, cols, pair.params).view(-1) for name in op.parameters}
    inputs["input"].fill_(3 if op.centred else torch.finfo(pair.rows).max)
    if op.adds:
        inputs["residual"].zero_()
    if not op.zero_centered:  # PyTorch makes 1 + weight, whose memory ends with it
        op.fused(**inputs)


def run_heads(cls: type, pair: Pair, cols: int) -> None:
    """Heads of a packed tensor, and main_grad."""
    packed = rows_at(2 * 9 * 3 * 4, cols, pair.rows).view(2, 9, 3, 4, cols)
    adds = pair.rows != F64  # to a main_grad, which is float32
    norm = cls(cols, dtype=pair.params, device="cuda", fuse_wgrad_accumulation=adds)
    for parameter in norm.parameters():
        block = 16 // parameter.dtype.itemsize
        parameter.data = rows_at(1, -(-cols // block) * block, parameter.dtype).view(-1)[:cols]
        parameter.main_grad = torch.zeros(cols, device="cuda")
    y = norm(packed[:, :, 1].requires_grad_())
    if torch.is_grad_enabled():
        y.backward(packed[:, :, 2])


if __name__ == "__main__":
    main()
