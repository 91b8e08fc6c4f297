"""What a small eager call costs on the host: `python -m benchmarks.host --json FILE`.

At 8 x 256 elements the device has nearly nothing to do: the time is that of Python, C++, autograd
and launches. PyTorch's functions and ours take turns in one process, on one thread, because
PyTorch's layer norm would otherwise wake other threads even for 8 rows. Less than a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fused_op

from . import report
from .cpu import rounded, speedup
from .peers import PEERS
from .run import default_device, run_eager, take_turns

SHAPE = (8, 256)
OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
DTYPES = ("float32", "bfloat16")
MODES = {
    "forward": "forward without gradients",
    "training_forward": "forward",
    "forward_backward": "forward + backward",
}
ROUNDS = 15


def _permuted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = x.movedim(1, -1)
    return F.layer_norm(rows, weight.shape, weight, bias).movedim(-1, 1).contiguous()


def _gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(gate)


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


IMAGES, ROWS, TOKENS = (2, 32, 4, 8), SHAPE, (2, 4, 256)
# The calls of variants, ours and in PyTorch's operations, with the shapes of their tensors.
VARIANTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]]] = {
    "group_norm": (
        lambda x, *parameters: fused_op.fused_group_norm(x, 8, *parameters),
        lambda x, *parameters: F.group_norm(x, 8, *parameters),
        (IMAGES, (32,), (32,)),
    ),
    "channels_first_layer_norm": (
        fused_op.fused_channels_first_layer_norm, _permuted, (IMAGES, (32,), (32,)),
    ),
    "gated_rms_norm": (fused_op.fused_gated_rms_norm, _gated, (ROWS, ROWS, (256,))),
    "modulated_layer_norm": (
        fused_op.fused_modulated_layer_norm, _modulated, (TOKENS, (2, 256), (2, 256)),
    ),
    "l2_norm": (fused_op.fused_l2_norm, partial(F.normalize, dim=-1), (ROWS,)),
}  # fmt: skip


def measure(rounds: int = ROUNDS, iterations: int = 100) -> list[dict[str, Any]]:
    """Rows of `run_eager`."""
    device, threads = default_device(), torch.get_num_threads()
    rows = []
    try:
        torch.set_num_threads(1)
        for op in OPS:
            for dtype in DTYPES:
                found = run_eager(
                    *([SHAPE], op, dtype, device),
                    rounds=rounds,
                    iterations=iterations,
                    modes=tuple(MODES),
                )
                rows += [rounded(row) for row in found]
        for op in VARIANTS:
            for dtype in DTYPES:
                rows += [
                    rounded(_run_variant(op, dtype, device, mode, rounds, iterations))
                    for mode in MODES
                ]
    finally:
        torch.set_num_threads(threads)
    return rows


def _run_variant(
    op: str, dtype: str, device: torch.device, mode: str, rounds: int, iterations: int
) -> dict[str, Any]:
    """A row as of `run_eager`."""
    ours, theirs, shapes = VARIANTS[op]
    given = [torch.randn(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
    for tensor in given:
        tensor.requires_grad_(mode != "forward")

    grad = torch.ones_like(given[0])

    def step(function: Callable[..., Tensor]) -> None:
        torch.autograd.grad(function(*given), given, grad)

    calls: dict[str, Callable[[], Any]] = {
        name: partial(step, function) if mode == "forward_backward" else partial(function, *given)
        for name, function in (("pytorch", theirs), ("custom", ours))
    }
    return {
        "op": op, "dtype": dtype, "rows": SHAPE[0], "cols": SHAPE[1], "mode": mode,
    } | take_turns(calls, device, rounds, iterations, mode)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Our µs, PyTorch's, and the ratio, of the fastest round each."""
    lines = [
        "| call | " + " | ".join(MODES.values()) + " |",
        "|---|" + "---|" * len(MODES),
    ]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        ours, theirs = (min(row[f"{name}_rounds_us"]) for name in ("custom", "pytorch"))
        text = f"{ours:.1f} / {theirs:.1f} ({1 / speedup(row):.2f})"
        cells.setdefault((row["op"], row["dtype"]), {})[row["mode"]] = text
    for (op, dtype), by_mode in cells.items():
        shown = " | ".join(by_mode[mode] for mode in MODES)
        lines.append(f"| {op} {report.SHORT[dtype]} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    environment = report.environment(default_device(), PEERS[:2])
    result = {"environment": environment, "rows": measure()}
    report.write_json(options.json, result)
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
