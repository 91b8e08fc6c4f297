"""Asks for the kernels of very many calls: `python -m tests.kernels.every_key`.

The interpreted GPU throws if two kernels have one key (check_key in ptx/gpu.cpp). All calls have
one of a few widths, so that their plans differ in little else than the types and options. A kernel
that does nothing stands in for all, so a call takes no time; but the process is of no further use.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import torch

from fused_op._kernel_plan import Call
from tests.kernels import (
    every_kernel,
    interpreter,
    run_channels_first,
    run_gated,
    run_group_norm,
    run_modulated,
    run_quantized,
    run_rope,
)
from tests.kernels.interpreter import ROUNDINGS, Gpu, KernelFault, empty
from tests.kernels.run_call import place_heads
from tests.kernels.run_gated import Gating
from tests.numerics.test_quantized import RULES
from tests.ops import F32, F64, PAIRS

WIDTHS = (1, 3, 24, 40, 41, 128, 1025, 9216, 20_000)
ROWS = (3, 66)  # with one SM the latter are not few
NOTHING = ctypes.c_char_p(
    b".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry nothing()\n{\nret;\n}\n"
)
ADDRESS = ctypes.cast(NOTHING, ctypes.c_void_p).value


class AskedGpu(Gpu):
    """Launches without checking what is written."""

    def _reads(self, **tensors: torch.Tensor | None) -> None:
        pass

    _writes = _reads

    def _end(self, problem: bytes) -> None:
        if problem:
            raise KernelFault(problem.decode())


def ask(gpu: Gpu, call: Call, heads: int = 0) -> None:
    """Forward and backward; `heads`: rows at two strides."""
    types = every_kernel.DTYPES
    dtype, params = types[call.dtype], types[call.param_dtype]
    residual, out = types.get(call.residual), types[call.out_dtype or call.dtype]

    def rows(of: torch.dtype) -> torch.Tensor:
        made = empty(call.rows, call.cols + call.misaligned, dtype=of)[:, call.misaligned :]
        return place_heads(made, heads) if heads else made

    weight, bias = (empty(call.cols, dtype=params) for _ in range(2))
    options = {"norm": call.op, "rounding": call.rounding, "dropout_p": 0.1 * call.dropout}
    options["rng_state"] = torch.zeros(2, dtype=torch.int64)
    more = None if residual is None else rows(residual)
    parameters = {"weight": weight, "bias": bias if call.op == "layer_norm" else None}
    _, _, stats = gpu.forward(
        input=rows(dtype), residual=more, output_dtype=out, **parameters, **options
    )
    x = rows(out if call.memory_efficient else residual or dtype)
    gpu.backward(
        grad_output=rows(out), grad_sum=more, x=x, stats=stats, x_is_output=call.memory_efficient,
        input_dtype=dtype, residual_dtype=residual, **parameters, **options,
    )  # fmt: skip


def norms(gpu: Gpu) -> int:
    """Every legal combination of op, dtypes and options; plain calls also with rows as heads."""
    asked = 0
    for pair, cols in itertools.product(PAIRS, WIDTHS):
        for call, rows in itertools.product(every_kernel.variants(pair), ROWS):
            call = replace(call, cols=cols, rows=rows)
            ask(gpu, call)
            plain = not (call.residual or call.memory_efficient or call.misaligned)
            if plain and cols * pair.rows.itemsize % 16 == 0:
                ask(gpu, call, heads=3)
            asked += 1
    return asked


def quantized(gpu: Gpu) -> int:
    asked = 0
    for pair, cols, norm, adds, rule in itertools.product(
        PAIRS, WIDTHS, every_kernel.NORMS, (False, True), RULES
    ):
        if pair.rows != F64:
            rows, weight = empty(3, cols, dtype=pair.rows), empty(cols, dtype=pair.params)
            run_quantized.forward(
                gpu, rule.arguments, norm=norm, input=rows, residual=rows if adds else None,
                weight=weight,
            )  # fmt: skip
            asked += 1
    return asked


def gated(gpu: Gpu) -> int:
    asked = 0
    flags = itertools.product((False, True), (False, True), ROUNDINGS, (1, 2))
    gatings = [
        Gating(sigmoid, first, groups, rounding) for sigmoid, first, rounding, groups in flags
    ]
    for pair, cols, gating in itertools.product(PAIRS, WIDTHS, gatings):
        groups_fit_a_cta = cols * pair.rows.itemsize <= 1 << 15
        for gate in {pair.rows, pair.params} if groups_fit_a_cta else ():
            rows, beside = (empty(4, gating.groups * cols, dtype=t) for t in (pair.rows, gate))
            weight = empty(gating.groups * cols, dtype=pair.params)
            run_gated.run(gpu, gating, rows, beside, weight, rows)
            asked += 1
    return asked


def rope(gpu: Gpu) -> int:
    """Whole and partly rotated heads, with weights of their own, of all, and without."""
    asked = 0
    roundings = ("once", "before_rotation", "before_weight")
    for pair, cols, style, rounding, own, part in itertools.product(
        PAIRS, (24, 64, 128, 512, 2048), ("neox", "gptj"), roundings, (True, False), (1, 2)
    ):
        for angles in {pair.rows, F32} - ({F32} if pair.rows == F64 else set()):
            heads, place = (empty(3, 2, cols, dtype=pair.rows) for _ in range(2))
            cos = empty(3, cols // 2 // part, dtype=angles)
            weight = empty(*([2] if own else []), cols, dtype=pair.params)
            options = run_rope.Options(style, rounding)
            run_rope.run(gpu, options, heads, cos, cos, weight, heads, place)
            asked += 1
    return asked


def modulated(gpu: Gpu) -> int:
    """Entries of one row and of several, with and without parameters and a residual."""
    asked = 0
    norms = ("layer_norm", "rms_norm")
    for pair, cols, norm, each, own, gates in itertools.product(
        PAIRS, WIDTHS, norms, (1, 2), (True, False), (True, False)
    ):
        for entry in {pair.rows, pair.params} if cols * pair.rows.itemsize <= 1 << 15 else ():
            rows, table = empty(4, cols, dtype=pair.rows), empty(4 // each, cols, dtype=entry)
            weight = empty(cols, dtype=pair.params) if own else None
            entries = run_modulated.Entries(table, table, table if gates else None, each)
            sums = [empty(4, cols, dtype=dtype) for dtype in {pair.rows, pair.params}]
            for more in sums if gates else [None]:
                x = rows if more is None else more
                _, _, stats = run_modulated.forward(gpu, norm, rows, entries, weight, residual=more)
                run_modulated.backward(gpu, norm, x, entries, rows, stats, weight, grad_sum=more)
                asked += 1
    return asked


def images(gpu: Gpu) -> int:
    """Norms over channels and group norms."""
    asked = 0
    shapes = [(2, 3, 7), (2, 24, 8), (1, 48, 66), (1, 96, 196), (1, 768, 49), (1, 2052, 12)]
    for pair, shape, silu in itertools.product(PAIRS, shapes, (True, False)):
        x = empty(*shape, dtype=pair.rows)
        weight, bias = (empty(shape[1], dtype=pair.params) for _ in range(2))
        for norm in run_channels_first.KINDS:
            run_channels_first.run(gpu, norm, x, weight, bias, x, silu)
        inputs = {"input": x, "weight": weight, "bias": bias}
        for groups, nhwc in ((1, False), (3, False), (3, True)):
            if not nhwc or run_group_norm.reads_nhwc(x, groups):
                run_group_norm.run(gpu, groups, inputs, x, silu, nhwc=nhwc)
                asked += 1
        asked += len(run_channels_first.KINDS)
    return asked


def main() -> None:
    interpreter.compile_kernel = interpreter.Compile(lambda header, name: ADDRESS)
    gpu = AskedGpu(multiprocessors=1)
    for family in (norms, quantized, gated, rope, modulated, images):
        print(family.__name__, family(gpu))


if __name__ == "__main__":
    main()
