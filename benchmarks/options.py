"""What the options cost on a GPU: `python -m benchmarks.options --json FILE`.

Dropout, dtypes of their own for output and residual, a saved output, zero-centred weights, and
heads of a packed tensor, each as a fraction of the limit of its own bytes: a device copy for
forward, a device add for backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_op import fused_add_layer_norm, fused_add_rms_norm, fused_layer_norm, fused_rms_norm

from .measure import measure_limit
from .report import environment, write_json
from .timing import GraphTimer, Timer

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Option:
    """One call. The bytes are those of an element that no implementation can avoid."""

    name: str
    function: Callable[..., Any]
    forward_bytes: int
    backward_bytes: int
    residual: torch.dtype | None = None
    bias: bool = False
    head_dims: bool = False  # rows are the heads of a packed qkv tensor


OPTIONS = (
    Option(
        "add_layer_norm, dropout", partial(fused_add_layer_norm, dropout_p=0.1), 8, 10, BF16, True
    ),
    Option("add_rms_norm, dropout", partial(fused_add_rms_norm, dropout_p=0.1), 8, 10, BF16),
    Option("add_rms_norm, float32 residual", fused_add_rms_norm, 12, 16, F32),
    Option("layer_norm, dropout", partial(fused_layer_norm, dropout_p=0.1), 4, 6, bias=True),
    Option("layer_norm, float32 output", partial(fused_layer_norm, out_dtype=F32), 6, 8, bias=True),
    Option("rms_norm, memory_efficient", partial(fused_rms_norm, memory_efficient=True), 4, 6),
    Option("rms_norm, zero_centered", partial(fused_rms_norm, zero_centered=True), 4, 6),
    Option("rms_norm of heads", fused_rms_norm, 4, 6, head_dims=True),
)
SHAPES = ((131072, 1024), (32768, 4096), (16384, 8192))
HEAD_SHAPES = ((524288, 64), (524288, 128))


def measure(
    option: Option, rows: int, cols: int, timer: Timer, device: torch.device, limits: Any
) -> dict[str, Any]:
    """Forward without gradients and backward of one option at one shape, in bf16."""

    def limit(kind: str, total: int) -> float:
        if (kind, total) not in limits:
            limits[kind, total] = measure_limit(kind, total, "bfloat16", timer, device)["us"]
        return limits[kind, total]

    def draw() -> Tensor:
        if option.head_dims:
            return torch.randn(rows // 32, 3, 32, cols, device=device).to(BF16)[:, 0]
        return torch.randn(rows, cols, device=device).to(BF16)

    forward, backward = (rows * cols * n for n in (option.forward_bytes, option.backward_bytes))
    row: dict[str, Any] = {"option": option.name, "rows": rows, "cols": cols}
    with timer.context():
        parameters = [torch.rand(cols, device=device).to(BF16) for _ in range(1 + option.bias)]
        sets = []
        for _ in range(timer.sets_for(forward)):
            x = draw()
            residual = (
                None if option.residual is None else torch.randn_like(x, dtype=option.residual)
            )
            sets.append([x] if residual is None else [x, residual])
        with torch.no_grad():
            us = timer(
                [partial(option.function, *given, *parameters) for given in sets], forward
            ).us
        row["forward"] = {"us": us, "fraction": limit("copy", forward) / us}
        calls = []
        for given in sets:
            leaves = [t.detach().requires_grad_() for t in (*given, *parameters)]
            outputs = option.function(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            grads = tuple(torch.randn_like(output) for output in outputs)
            calls.append(partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True))
        us = timer(calls, backward).us
        row["backward"] = {"us": us, "fraction": limit("add", backward) / us}
    return row


def table(measured: list[dict[str, Any]]) -> str:
    """Markdown: a line a call."""
    lines = ["| call, bf16 | rows x columns | forward | backward |", "|---|---|---|---|"]
    for row in sorted(measured, key=lambda row: (row["option"], row["cols"], -row["rows"])):
        shape = f"{row['rows']} x {row['cols']}"
        both = " | ".join(f"{row[mode]['fraction']:.3f}" for mode in ("forward", "backward"))
        lines.append(f"| {row['option']} | {shape} | {both} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.options", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.options measures on a GPU, and there is none")
    timer = GraphTimer("cuda")
    result: dict[str, Any] = {
        "environment": environment(timer.device, (), "python -m benchmarks.options"),
        "rows": [],
    }
    limits: dict[tuple[str, int], float] = {}
    for option in OPTIONS:
        for rows, cols in HEAD_SHAPES if option.head_dims else SHAPES:
            row = measure(option, rows, cols, timer, timer.device, limits)
            print(f"{option.name:32} {rows:7} x {cols:5}", end="")
            print(*(f"  {m} {row[m]['fraction']:.3f}" for m in ("forward", "backward")))
            result["rows"].append(row)
            write_json(options.json, result)


if __name__ == "__main__":
    main()
