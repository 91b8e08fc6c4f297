"""What a small eager call costs on the host: `python -m benchmarks.host --json FILE`.

At 8 x 256 elements the device has nearly nothing to do: the time is that of Python, C++, autograd
and launches. PyTorch's functions and ours take turns in one process, on one thread, because
PyTorch's layer norm would otherwise wake other threads even for 8 rows. Less than a minute.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from . import report
from .cpu import rounded, speedup
from .peers import PEERS
from .run import default_device, run_eager

SHAPE = (8, 256)
OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
DTYPES = ("float32", "bfloat16")
MODES = {
    "forward": "forward without gradients",
    "training_forward": "forward",
    "forward_backward": "forward + backward",
}
ROUNDS = 15


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
    finally:
        torch.set_num_threads(threads)
    return rows


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
    environment = report.environment(default_device(), PEERS[:2], shlex.join(sys.orig_argv))
    result = {"environment": environment, "rows": measure()}
    report.write_json(options.json, result)
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
