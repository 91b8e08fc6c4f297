"""Calls of the variants for every_kernel.py: every op, option and kind of plan, both directions.

Plans of variants are those of the norms, whose traits every_kernel.py enumerates. Here each variant
runs with each of its options at rows that share a warp, that a warp or a CTA has, and that clusters
share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

import fused_op
from tests.calls import outputs
from tests.numerics.test_quantized import OPS, RULES, tensors_of
from tests.ops import F64, Pair
from tests.variants.group_norm import innermost
from tests.variants.table import CALLS, Variant
from tests.variants.test_channels_first import CASES, Case
from tests.variants.test_channels_first import arguments as image_arguments
from tests.variants.test_modulated_norm import FUNCTIONS, arguments
from tests.variants.test_rms_norm_rope import angles

SHAPES = [(5, 2), (7, 24), (9, 33), (40, 128), (6, 1000), (300, 1024), (3, 4999), (2, 40000)]
MODULATED = [  # shape of the input, of the entries
    ((3, 5, 64), (3, 1, 64)), ((2, 40, 1024), (1024,)), ((2, 3, 7, 200), (2, 3, 1, 200)),
    ((4, 9, 33), (4, 9, 33)), ((2, 3, 20000), (2, 1, 20000)),
]  # fmt: skip

IMAGES = [  # of each number of warps and size of packs, and of channels that are read again
    (2, 1, 5), (3, 16, 49), (1, 24, 4096), (2, 96, 3136), (1, 200, 1000), (2, 768, 196),
    (1, 2051, 130), (70, 48, 6),
]  # fmt: skip
GROUPS = [  # one CTA and clusters; all that a CTA keeps, and more; packs of one element and of more
    ((2, 4, 5), 2), ((3, 8, 49), 4), ((1, 32, 4096), 2), ((2, 320, 1024), 32), ((1, 6, 300_000), 2),
    ((70, 6, 12), 3), ((2, 96, 1), 8),
]  # fmt: skip


def calls(pair: Pair) -> Iterator[Callable[[], None]]:
    """Every one with rows and parameters of the dtypes of the pair."""
    for (variant, options), shape in itertools.product(CALLS, SHAPES):
        yield partial(_run_variant, variant, options, shape, pair)
    for function, (shape, entries) in itertools.product(FUNCTIONS, MODULATED):
        yield partial(_run_modulated, function, shape, entries, pair)
    for cols, style in itertools.product((64, 80, 128, 256), ("neox", "gptj")):
        yield partial(_run_packed, cols, style, pair)
    for case, shape in itertools.product(CASES, IMAGES):
        yield partial(_run_images, Case(*case), shape, pair)
    for (shape, groups), activation, modulated, last in itertools.product(
        GROUPS, (None, "silu"), (False, True), (False, True)
    ):
        yield partial(_run_group_norm, shape, groups, activation, modulated, last, pair)
    if pair.rows != F64:
        for op, rule, cols in itertools.product(OPS, RULES, (8, 129, 1024, 5000, 40000)):
            yield partial(_run_quantized, op, rule, cols, pair)


def _backward(found: object) -> None:
    results = [y for y in outputs(found) if y.requires_grad]
    if torch.is_grad_enabled():
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])


def _run_variant(variant: Variant, options: dict, shape: tuple[int, ...], pair: Pair) -> None:
    given = variant.arguments(shape, pair, "cuda", requires_grad=True)
    _backward(variant.fused(**given, **options))


def _run_modulated(function: Callable, shape: tuple, entries: tuple, pair: Pair) -> None:
    others = {"params": pair.params, "residual": pair.params}
    given = arguments(function, shape, entries, pair.rows, device="cuda", **others)
    _backward(function(*(given[name].requires_grad_() for name in given)))


def _run_images(case: Case, shape: tuple[int, ...], pair: Pair) -> None:
    _backward(case.fused(**image_arguments(shape, pair, "cuda", requires_grad=True)))


def _run_group_norm(
    shape: tuple[int, ...],
    groups: int,
    activation: str | None,
    modulated: bool,
    last: bool,  # the channels are innermost
    pair: Pair,
) -> None:
    input = torch.randn(shape, device="cuda").to(pair.rows)
    input = (innermost(input) if last else input).requires_grad_()
    weight, bias = (
        torch.randn(shape[1], device="cuda").to(pair.params).requires_grad_() for _ in range(2)
    )
    projection = torch.randn(shape[0], 2 * shape[1], device="cuda").to(pair.rows).requires_grad_()
    scale, shift = projection.chunk(2, 1) if modulated else (None, None)
    _backward(
        fused_op.fused_group_norm(
            input, groups, weight, bias, activation=activation, scale=scale, shift=shift
        )
    )


def _run_packed(cols: int, style: str, pair: Pair) -> None:
    heads, kv_heads = 4, 2
    qkv = torch.randn(2, 5, 8 * cols, device="cuda").to(pair.rows).requires_grad_()
    weight = torch.randn(cols, device="cuda").to(pair.params).requires_grad_()
    turn = angles(5, cols // 2, device="cuda")
    options = {"heads": heads, "kv_heads": kv_heads, "style": style}
    _backward(fused_op.fused_qk_norm_rope(qkv, *turn, weight, weight, 1e-6, **options))


def _run_quantized(op: str, rule: object, cols: int, pair: Pair) -> None:
    given = tensors_of(op, (5, cols), "cuda", pair.rows, pair.params)
    getattr(fused_op, f"fused_{op}_quantized")(*given, **rule.arguments)
