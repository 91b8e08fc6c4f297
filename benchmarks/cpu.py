"""The CPU backend beside PyTorch's layer norm: `python -m benchmarks.cpu --json FILE`.

With one thread and with all, in ordinary calls. `python -m benchmarks.docs_table` writes the table
into docs/performance.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from . import report
from .peers import PEERS
from .run import run_eager

OPS = ("layer_norm",)
DTYPES = ("float32", "bfloat16")
SHAPES = ((64, 1024), (4096, 768), (1024, 4096))
ROUNDS = 9


def measure(shapes: tuple[tuple[int, int], ...] = SHAPES, rounds: int = ROUNDS) -> list[Any]:
    """Rows of `run_eager`, for each number of threads."""
    every = torch.get_num_threads()
    rows = []
    try:
        for threads in sorted({1, every}):
            torch.set_num_threads(threads)
            for op in OPS:
                for dtype in DTYPES:
                    found = run_eager(
                        shapes, op, dtype, torch.device("cpu"), rounds=rounds, iterations=10
                    )
                    rows += [row | {"threads": threads} for row in found]
    finally:
        torch.set_num_threads(every)
    return rows


def table(rows: list[Any]) -> str:
    """One line per call. Of the rounds the fastest counts, as other processes slow some of them."""
    lines = [
        "| call | direction | threads | fused_op | PyTorch | its time / ours |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = min(row["custom_rounds_us"]), min(row["pytorch_rounds_us"])
        call = f"{row['op']} {report.SHORT[row['dtype']]} {row['rows']} x {row['cols']}"
        mode = row["mode"].replace("_", " + ")
        lines.append(
            f"| {call} | {mode} | {row['threads']} | {ours:.0f} µs | {theirs:.0f} µs "
            f"| {theirs / ours:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    device = torch.device("cpu")
    result = {
        "environment": report.environment(device, PEERS[:2], shlex.join(sys.orig_argv)),
        "rows": measure(),
    }
    report.write_json(options.json, result)
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
