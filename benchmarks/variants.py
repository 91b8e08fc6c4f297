"""How fast the variants are on a GPU: `python -m benchmarks.variants --json FILE`.

Each is measured beside `torch.compile` of its formula, the ops that it replaces and, where it
can be imported, Flash Linear Attention, as a fraction of the limit of its own bytes: a device
copy for forward, a device add for backward.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_op import (
    fused_add_rms_norm,
    fused_channels_first_layer_norm,
    fused_gated_add_layer_norm,
    fused_gated_rms_norm,
    fused_group_norm,
    fused_l2_norm,
    fused_modulated_layer_norm,
    fused_post_add_pre_rms_norm,
    fused_qk_norm_rope,
    fused_rms_norm,
    fused_rms_norm_quantized,
    fused_rms_norm_rope,
    reference,
)

from .measure import measure_limit, reason
from .report import environment, write_json
from .timing import GraphTimer, Timer, tensors_in

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
SAMPLES = 8
GROUPS = 8  # of a gated norm with groups
SHAPES = ((1048576, 128), (131072, 1024), (32768, 4096), (16384, 8192))


@dataclass(frozen=True)
class Variant:
    """One call; bytes are those of one element that no implementation can avoid."""

    name: str
    functions: dict[str, Callable[..., Any]]  # by who has it; fused_op first
    rows: int  # tensors of the shape of the input
    weights: int
    forward_bytes: float
    backward_bytes: float  # 0: no backward of its own
    shapes: tuple[tuple[int, int], ...] = SHAPES
    weight_cols: int = 0  # 0: those of the input
    entries: int = 0  # chunks of a projection, a row for each of SAMPLES
    residual: torch.dtype = BF16  # of the second of the rows


def _fla_gated(activation: str, x: Tensor, gate: Tensor, weight: Tensor) -> Any:
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, weight, None, activation, eps=1e-6)


def _fla_l2(x: Tensor) -> Any:
    from fla.modules.l2norm import l2norm

    return l2norm(x, eps=1e-6)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def _gated(name: str, fla: Callable[..., Any] | None, **options: Any) -> Variant:
    ours = partial(fused_gated_rms_norm, eps=1e-6, **options)
    twin = partial(reference.fused_gated_rms_norm, eps=1e-6, **options)
    functions = {"fused_op": ours, "torch.compile": _compiled(twin)}
    return Variant(name, functions | ({"FLA": fla} if fla else {}), 2, 1, 6, 10)


def _in_groups(
    function: Callable[..., Any], x: Tensor, gate: Tensor, weight: Tensor, **options: Any
) -> Any:
    """In GROUPS groups, as models of Mamba-2 have them."""
    return function(x, gate, weight, 1e-6, group_size=x.shape[-1] // GROUPS, **options)


def _gated_in_groups(name: str, **options: Any) -> Variant:
    ours = partial(_in_groups, fused_gated_rms_norm, **options)
    twin = partial(_in_groups, reference.fused_gated_rms_norm, **options)
    functions = {"fused_op": ours, "torch.compile": _compiled(twin)}
    return Variant(name, functions, 2, 1, 6, 10, SHAPES[1:])


def _two_ops(input: Tensor, residual: Tensor, post_weight: Tensor, pre_weight: Tensor) -> Any:
    branch = fused_rms_norm(input, post_weight, 1e-6)
    return fused_add_rms_norm(branch, residual, pre_weight, 1e-6)


def _quantized(x: Tensor, weight: Tensor, cols: int) -> Any:
    """Torchao's rule, of blocks of `cols` columns."""
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6).float()
    blocks = y.unflatten(-1, (-1, cols))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.finfo(FP8).max / amax.double().clamp(min=1e-12)
    scaled = (blocks * scale.float()).clamp(-448, 448).to(FP8)
    return scaled.flatten(-2), scale.float().reciprocal()


def _quantizing(scheme: Any) -> Variant:
    ours = partial(fused_rms_norm_quantized, eps=1e-6, scheme=scheme, dtype=FP8)

    def by_formula(x: Tensor, weight: Tensor) -> Any:
        return _quantized(x, weight, 128 if scheme == "block128" else x.shape[-1])

    functions = {"fused_op": ours, "torch.compile": _compiled(by_formula)}
    return Variant(f"rms_norm_quantized, {scheme}", functions, 1, 1, 3, 0)


HEAD, HEADS, KV_HEADS = 128, 32, 8  # of Qwen3 8B
TOKENS = (32768, 4096, 512)


@cache
def _angles(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    position = torch.arange(tokens, device=device)[:, None]
    theta = position / 1e6 ** (torch.arange(HEAD // 2, device=device) / (HEAD // 2))
    return theta.cos().to(BF16), theta.sin().to(BF16)


def _heads(function: Callable[..., Any], x: Tensor, weight: Tensor) -> Any:
    rows = x.view(-1, HEADS, HEAD)
    return function(rows, *_angles(len(rows), x.device), weight, 1e-6, rounding="before_weight")


def _packed(function: Callable[..., Any], qkv: Tensor, *weights: Tensor) -> Any:
    options: Any = {"heads": HEADS, "kv_heads": KV_HEADS, "rounding": "before_weight"}
    return function(qkv, *_angles(len(qkv), qkv.device), *weights, 1e-6, **options)


def _liger_packed(qkv: Tensor, *weights: Tensor) -> Any:
    """Norms and rotation, each of which copies heads that are not dense."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    rows = qkv.view(1, len(qkv), -1, HEAD)
    q, k, v = rows.split((HEADS, KV_HEADS, KV_HEADS), 2)
    q, k = (
        LigerRMSNormFunction.apply(x, weight, 1e-6).transpose(1, 2)
        for x, weight in zip((q, k), weights, strict=True)
    )
    cos, sin = (torch.cat((t, t), -1)[None] for t in _angles(len(qkv), qkv.device))
    return *LigerRopeFunction.apply(q, k, cos, sin), v


def _rope(
    name: str, form: Callable[..., Any], twin: Callable[..., Any], ours: Callable[..., Any],
    cols: int, share: float, weights: int, **more: Callable[..., Any],
) -> Variant:  # fmt: skip
    """Share: of queries and keys in the input; backward also copies the gradient of the rest."""
    functions = {
        "fused_op": partial(form, ours),
        "torch.compile": _compiled(partial(form, twin)),
        "eager": partial(form, twin),
    }
    shapes = tuple((tokens, cols) for tokens in TOKENS)
    size = 4 * share, 6 * share + 4 * (1 - share)
    return Variant(name, functions | more, 1, weights, *size, shapes, HEAD)


def _images(function: Callable[..., Any], samples: int, x: Tensor, *parameters: Tensor) -> Any:
    """Of so many images: the memory of the rows, as planes."""
    return function(x.view(samples, x.shape[1], -1), *parameters)


def _permuted(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    rows = x.movedim(1, -1)
    y = torch.nn.functional.layer_norm(rows, weight.shape, weight, bias, 1e-6)
    return y.movedim(-1, 1).contiguous()


def _channels_first(name: str, samples: int, shapes: tuple[tuple[int, int], ...]) -> Variant:
    twin = reference.fused_channels_first_layer_norm
    functions = {
        "fused_op": partial(_images, fused_channels_first_layer_norm, samples),
        "torch.compile": _compiled(partial(_images, twin, samples)),
        "permuted": partial(_images, _permuted, samples),
    }
    return Variant(name, functions, 1, 2, 4, 6, shapes)


def _grouped(function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Of SAMPLES images in 32 groups, with silu: a block of a diffusion model."""
    return function(x.view(SAMPLES, x.shape[1], -1), 32, weight, bias, activation="silu")


def _grouped_nhwc(function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The same of square images in torch.channels_last."""
    side = math.isqrt(x.shape[0] // SAMPLES)
    images = x.view(SAMPLES, side, side, x.shape[1]).permute(0, 3, 1, 2)
    return function(images, 32, weight, bias, activation="silu")


def _two_passes(x: Tensor, groups: int, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, groups, weight, bias))


def _group_norms(name: str, call: Callable[..., Any]) -> Variant:
    functions = {
        "fused_op": partial(call, fused_group_norm),
        "torch.compile": _compiled(partial(call, reference.fused_group_norm)),
        "eager": partial(call, _two_passes),
    }
    shapes = ((524288, 128), (131072, 256), (32768, 320), (8192, 640), (2048, 1280))
    return Variant(name, functions, 1, 2, 4, 6, shapes)


VARIANTS = (
    _gated("gated_rms_norm, silu", partial(_fla_gated, "swish")),
    _gated("gated_rms_norm, sigmoid", partial(_fla_gated, "sigmoid"), activation="sigmoid"),
    _gated("gated_rms_norm, gate first", None, gate_first=True),
    _gated_in_groups("gated_rms_norm, 8 groups"),
    _gated_in_groups("gated_rms_norm, 8 groups, gate first", gate_first=True),
    Variant(
        "l2_norm",
        {
            "fused_op": fused_l2_norm,
            "torch.compile": _compiled(reference.fused_l2_norm),
            "FLA": _fla_l2,
        },
        rows=1, weights=0, forward_bytes=4, backward_bytes=6,
    ),
    _quantizing("token"),
    _quantizing("block128"),
    Variant(
        "post_add_pre_rms_norm",
        {
            "fused_op": partial(fused_post_add_pre_rms_norm, eps=1e-6),
            "two ops": _two_ops,
            "torch.compile": _compiled(partial(reference.fused_post_add_pre_rms_norm, eps=1e-6)),
        },
        rows=2, weights=2, forward_bytes=8, backward_bytes=12,
    ),
    Variant(
        "modulated_layer_norm",
        {
            "fused_op": fused_modulated_layer_norm,
            "torch.compile": _compiled(reference.fused_modulated_layer_norm),
        },
        rows=1, weights=0, forward_bytes=4, backward_bytes=6, entries=2,
    ),
    Variant(
        "gated_add_layer_norm",
        {
            "fused_op": fused_gated_add_layer_norm,
            "torch.compile": _compiled(reference.fused_gated_add_layer_norm),
        },
        rows=2, weights=0, forward_bytes=8, backward_bytes=12, entries=3,
    ),
    Variant(
        "gated_add_layer_norm, float32 residual",
        {
            "fused_op": fused_gated_add_layer_norm,
            "torch.compile": _compiled(reference.fused_gated_add_layer_norm),
        },
        rows=2, weights=0, forward_bytes=12, backward_bytes=18, entries=3, residual=F32,
    ),
    _channels_first(
        "channels_first_layer_norm",
        SAMPLES, ((802816, 96), (200704, 192), (50176, 384), (12544, 768)),
    ),
    # The stages of a ConvNeXt: 56x56, 28x28, 14x14 and 7x7 pixels.
    _channels_first(
        "channels_first_layer_norm, 64 images",
        64, ((200704, 96), (50176, 192), (12544, 384), (3136, 768)),
    ),
    _group_norms("group_norm, silu", _grouped),
    _group_norms("group_norm, silu, channels last", _grouped_nhwc),
    _rope(
        "rms_norm_rope", _heads, reference.fused_rms_norm_rope, fused_rms_norm_rope,
        HEADS * HEAD, 1, 1,
    ),
    _rope(
        "qk_norm_rope", _packed, reference.fused_qk_norm_rope, fused_qk_norm_rope,
        (HEADS + 2 * KV_HEADS) * HEAD, (HEADS + KV_HEADS) / (HEADS + 2 * KV_HEADS), 2,
        Liger=_liger_packed,
    ),
)  # fmt: skip


def measure(
    variant: Variant,
    rows: int,
    cols: int,
    timer: Timer,
    device: torch.device,
    limits: Any,
    peers: Collection[str] | None = None,
) -> dict[str, Any]:
    """Forward without gradients and backward at one shape, in bf16; peers: None means all."""

    def limit(kind: str, total: int) -> float:
        if (kind, total) not in limits:
            limits[kind, total] = measure_limit(kind, total, "bfloat16", timer, device)["us"]
        return limits[kind, total]

    # After a few shapes of one function, the compiler would run it uncompiled.
    torch.compiler.reset()
    sizes = variant.forward_bytes, variant.backward_bytes
    forward, backward = (round(rows * cols * size) for size in sizes)
    row: dict[str, Any] = {"variant": variant.name, "rows": rows, "cols": cols, "peers": {}}
    dtypes = (BF16, variant.residual)[: variant.rows]
    with timer.context():
        count = variant.weight_cols or cols
        weights = [torch.rand(count, device=device).to(BF16) for _ in range(variant.weights)]
        shape = (SAMPLES, rows // SAMPLES, cols) if variant.entries else (rows, cols)
        projection = torch.randn(SAMPLES, 6 * cols, device=device).to(BF16)
        entries = list(projection.chunk(6, -1)[: variant.entries])
        sets = [
            [torch.randn(shape, device=device).to(dtype) for dtype in dtypes] + entries + weights
            for _ in range(timer.sets_for(forward))
        ]
        for who, function in variant.functions.items():
            if peers is not None and who not in peers:
                continue
            try:
                us = _forward_us(function, sets, timer, forward)
                row["peers"][who] = {"forward": limit("copy", forward) / us}
                if backward:
                    us = _backward_us(function, sets, timer, backward)
                    row["peers"][who]["backward"] = limit("add", backward) / us
            except Exception as error:
                row["peers"][who] = {"problem": reason(error)}
    return row


def _forward_us(function: Callable[..., Any], sets: Any, timer: Timer, total: int) -> float:
    def written(*given: Tensor) -> list[Tensor]:
        """The outputs but for views of the input, which a call leaves as they are."""
        inputs = {t.untyped_storage().data_ptr() for t in given}
        outputs = tensors_in(function(*given))
        return [y for y in outputs if y.untyped_storage().data_ptr() not in inputs]

    with torch.no_grad():
        return timer([partial(written, *given) for given in sets], total).us


def _backward_us(function: Callable[..., Any], sets: Any, timer: Timer, total: int) -> float:
    calls = []
    for given in sets:
        leaves = [t.detach().requires_grad_() for t in given]
        output = function(*leaves)
        outputs = output if isinstance(output, tuple) else (output,)
        grads = [torch.randn_like(y) for y in outputs]
        calls.append(partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True))
    return timer(calls, total).us


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variant", action="append", choices=names, help="default: all")
    parser.add_argument("--rows", action="append", type=int, help="shapes of so many; default: all")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="fused_op is one; default: all, of which torch.compile takes up to a minute a shape",
    )
    options = parser.parse_args()
    known = {who for variant in VARIANTS for who in variant.functions}
    if unknown := set(options.peers or ()) - known:
        parser.error(f"no peers: {sorted(unknown)}; there are {sorted(known)}")
    shapes = [(v, *shape) for v in VARIANTS for shape in v.shapes]
    chosen = [
        (variant, rows, cols)
        for variant, rows, cols in shapes
        if variant.name in (options.variant or names) and rows in (options.rows or [rows])
    ]
    if not chosen:
        parser.error(f"no shape of these variants has {options.rows} rows")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.variants measures on a GPU, and there is none")
    timer = GraphTimer("cuda")
    result: dict[str, Any] = {
        "environment": environment(timer.device, ()),
        "rows": [],
    }
    limits: dict[tuple[str, int], float] = {}
    for variant, rows, cols in chosen:
        row = measure(variant, rows, cols, timer, timer.device, limits, options.peers)
        result["rows"].append(row)
        write_json(options.json, result)
        print(f"{variant.name:28} {rows:7} x {cols:5}")
        for who, found in row["peers"].items():
            figures = found.get("problem") or " ".join(f"{v:.3f}" for v in found.values())
            print(f"    {who:14} {figures}")


if __name__ == "__main__":
    main()
