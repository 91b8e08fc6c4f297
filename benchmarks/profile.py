"""What the hardware did in each kernel: bytes, instructions, and why warps waited.

    python -m benchmarks.profile --json profile.json
    python -m benchmarks.profile --table profile.json

Runs every shape once under Nsight Compute (ncu), with the clocks and caches as they are, and keeps
a line a kernel, but for the sum of partial gradients at the end of backward. A kernel takes longer
there than in a benchmark: the times are for comparing with each other alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .report import environment, write_json

# Op, dtype, rows, columns, mode.
SHAPES = (
    *(("layer_norm", "bfloat16", *shape, mode) for mode in ("forward", "backward") for shape in (
        (1048576, 64), (174762, 768), (131072, 1024), (16384, 8192), (10922, 12288),
        (8192, 16384), (4096, 32768), (512, 262144), (263172, 255), (131200, 1023),
        (32776, 4095), (65472, 2050), (8192, 4096), (4096, 768), (1, 262144),
    )),
    *(("layer_norm", "float32", *shape, "forward") for shape in (
        (32768, 4096), (263172, 255), (26838, 5001),
    )),
    ("rms_norm", "bfloat16", 512, 262144, "forward"),
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory, shuffles",
    "barrier": "a barrier",
    "wait": "a fixed latency",
    "lg_throttle": "the queue of global memory",
    "mio_throttle": "the queue of shared memory",
    "math_pipe_throttle": "an arithmetic unit",
    "not_selected": "its turn",
    "no_instruction": "instructions",
}
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "smsp__inst_executed.sum": "warp_instructions",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "schedulers_busy_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_resident_percent",
    "launch__registers_per_thread": "registers",
    **{STALL.format(name): name for name in STALLS},
}


def run_shapes() -> None:
    """Every shape once; what ncu watches."""
    from fused_op import fused_layer_norm, fused_rms_norm

    for op, dtype, rows, cols, mode in SHAPES:
        like = {"dtype": getattr(torch, dtype), "device": "cuda"}
        backward = mode == "backward"
        x, dy = (torch.randn(rows, cols, **like) for _ in range(2))
        weight = torch.ones(cols, **like, requires_grad=backward)
        bias = torch.zeros(cols, **like, requires_grad=backward)
        x.requires_grad_(backward)
        norm = (x, weight, bias) if op == "layer_norm" else (x, weight)
        y = (fused_layer_norm if op == "layer_norm" else fused_rms_norm)(*norm)
        if backward:
            y.backward(dy)
        torch.cuda.synchronize()
        print(f"{op},{dtype},{rows},{cols},{mode}", flush=True)
        del x, dy, y, weight, bias, norm


def kernels(log: str, shapes: list[list[str]]) -> list[dict[str, Any]]:
    """A row for each kernel that ncu saw; a forward in front of a backward is left out.

    Raises:
        ValueError: the log has more or fewer forwards than there are shapes.
    """
    lines = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    head, _, *lines = lines
    found: list[dict[str, Any]] = []
    at = -1
    for line in lines:
        values = dict(zip(head, line, strict=True))
        name = re.sub(r"fused_op::|cuda::|^void |\((?!bool|int).*", "", values["Kernel Name"])
        forward = name.startswith("forward")
        at += forward  # each shape begins with one
        if not 0 <= at < len(shapes):
            raise ValueError(f"{name} belongs to none of {len(shapes)} shapes")
        op, dtype, rows, cols, mode = shapes[at]
        if forward and mode == "backward":
            continue
        row: dict[str, Any] = {"op": op, "dtype": dtype, "rows": int(rows), "cols": int(cols)}
        row |= {"mode": mode, "kernel": name}
        found.append(row | {k: float(values[m].replace(",", "")) for m, k in METRICS.items()})
    if at + 1 != len(shapes):
        raise ValueError(f"{at + 1} forwards for {len(shapes)} shapes")
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a line a kernel, with the two things that warps waited for most."""
    lines = [
        "| shape | kernel | TB/s | million instructions | schedulers busy | warps resident "
        "| warps waited for |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        speed = (row["bytes_read"] + row["bytes_written"]) / row["ns"] / 1e3
        waits = sorted(STALLS, key=lambda name: -row[name])[:2]
        what = ", ".join(f"{STALLS[name]} {row[name]:.1f}" for name in waits)
        kernel = re.sub(r"_kernel<.*", "", row["kernel"])
        lines.append(
            f"| {row['op']} {row['mode']} {row['dtype']} {row['rows']}x{row['cols']} "
            f"| {kernel} | {speed:.2f} | {row['warp_instructions'] / 1e6:.1f} "
            f"| {row['schedulers_busy_percent']:.0f} % | {row['warps_resident_percent']:.0f} % "
            f"| {what} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="profile, and write")
    what.add_argument("--table", type=Path, metavar="FILE", help="print what was written")
    what.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_shapes()
        return
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = ["ncu", "-k", "regex:^(forward|backward)_", "--metrics", ",".join(METRICS)]
        command += ["--clock-control", "none", "--cache-control", "none"]
        command += ["--csv", "--page", "raw", "--log-file", str(log)]
        command += [sys.executable, "-m", "benchmarks.profile", "--run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        shapes = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 4]
        found = kernels(log.read_text(), shapes)
    where = environment(torch.device("cuda"), ())
    write_json(options.json, {"environment": where, "rows": found})
    print(table(found))


if __name__ == "__main__":
    main()
