"""The CPU backend beside PyTorch's norms: `python -m benchmarks.cpu --json FILE`.

With one thread and with all, in ordinary calls. `python -m benchmarks.tables` writes the table
into docs/measurements.md.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import report
from .peers import PEERS
from .run import run_eager

OPS = ("layer_norm", "rms_norm")
DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTHS = (1, 3, 17, 64, 100, 255, 768, 1023, 1024, 4096, 8192, 32768, 65536)
ELEMENTS = (1 << 16, 1 << 20)  # of a call; smaller ones measure the host
MOST_ROWS = 100_000
PASSES = 3  # over all calls: another process may slow a call for as long as its rounds take
ROUNDS = 5  # of a pass


def shapes_of(elements: int, widths: tuple[int, ...] = WIDTHS) -> list[tuple[int, int]]:
    return [(max(1, min(MOST_ROWS, elements // cols)), cols) for cols in widths]


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, as it does in a process that has run for a while.

    Otherwise malloc returns outputs of some sizes to the system, ours and PyTorch's alike, and maps
    their pages again in every call. That can take half of the time of a call, for either.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 1 << 30)


def measure(
    elements: tuple[int, ...] = ELEMENTS,
    widths: tuple[int, ...] = WIDTHS,
    rounds: int = ROUNDS,
    threads_of: Sequence[int] = (),
) -> list[Any]:
    """Rows of `run_eager`, for each number of threads: by default one, and all."""
    keep_freed_memory()
    rows = _measure(elements, widths, rounds, threads_of)
    for _ in range(PASSES - 1):
        again = _measure(elements, widths, rounds, threads_of)
        for row, more in zip(rows, again, strict=True):
            for name in (key for key in row if key.endswith("rounds_us")):
                row[name] += more[name]
    return rows


def _measure(
    elements: tuple[int, ...], widths: tuple[int, ...], rounds: int, threads_of: Sequence[int]
) -> list[Any]:
    every = torch.get_num_threads()
    device = torch.device("cpu")
    rows = []
    try:
        for threads in threads_of or sorted({1, every}):
            torch.set_num_threads(threads)
            for op in OPS:
                for dtype in DTYPES:
                    for count in elements:
                        shapes = shapes_of(count, widths)
                        iterations = 5 if count < 1 << 18 else 2
                        found = run_eager(
                            shapes, op, dtype, device, rounds=rounds, iterations=iterations
                        )
                        size = {"threads": threads, "elements": count}
                        rows += [rounded(row) | size for row in found]
    finally:
        torch.set_num_threads(every)
    return rows


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row that the table needs, in hundredths of a microsecond."""
    times = {name: [round(us, 2) for us in row[name]] for name in row if name.endswith("rounds_us")}
    call = {name: row[name] for name in ("op", "dtype", "rows", "cols", "mode")}
    return call | times


def speedup(row: Any) -> float:
    """The fastest round counts, because other processes slow some of them down."""
    return min(row["pytorch_rounds_us"]) / min(row["custom_rounds_us"])


def table(rows: list[Any]) -> str:
    """PyTorch's time over ours by width, for each number of threads."""
    cells: dict[tuple[Any, ...], dict[int, list[str]]] = {}
    for row in rows:
        key = (row["op"], row["dtype"], row["mode"], row["elements"])
        cells.setdefault(key, {}).setdefault(row["cols"], []).append(f"{speedup(row):.1f}")
    widths = sorted({row["cols"] for row in rows})
    lines = [
        f"| call | elements | {' | '.join(map(str, widths))} |",
        "|---|---|" + "---|" * len(widths),
    ]
    for (op, dtype, mode, elements), by_width in cells.items():
        call = f"{op} {report.SHORT[dtype]} {mode.replace('_', ' + ')}"
        ratios = " | ".join(" ".join(by_width[cols]) for cols in widths)
        lines.append(f"| {call} | {elements} | {ratios} |")
    return "\n".join([*lines, "", summary(rows) + "."])


def summary(rows: list[Any]) -> str:
    """The sentence about the result in README.md; tests/packaging/test_docs.py compares them."""
    faster = {op: [speedup(row) > 1 for row in rows if row["op"] == op] for op in OPS}
    counts = [f"{sum(faster[op])} of {len(faster[op])}" for op in OPS]
    return (
        f"fused_op is faster than PyTorch's layer norm in {counts[0]} measured calls, and than its "
        f"RMS norm in {counts[1]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, nargs="*", default=(), help="default: one, and all")
    options = parser.parse_args()
    device = torch.device("cpu")
    result = {
        "environment": report.environment(device, PEERS[:2]),
        "rows": measure(threads_of=options.threads),
    }
    report.write_json(options.json, result)
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
