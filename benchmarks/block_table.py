"""The tables of a benchmarks.block result, for the console and for docs/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .block_variants import TORCH, VARIANTS

Cell = Callable[[dict[str, Any], dict[str, Any]], str]

BLOCK = "A pre-norm block, forward and backward, in bf16."
TIMES = (
    "Times in ms, ± half the distance from the fastest to the slowest round, and in parentheses "
    "the part of PyTorch's time in that line."
)
MEMORY = "MiB held at the end of forward / at the peak of forward and backward."


def times(result: dict[str, Any]) -> str:
    """Time of the block."""
    return f"{BLOCK} {TIMES}\n\n{_table('step of a block with', result['blocks'], _time)}"


def memory(result: dict[str, Any]) -> str:
    """Memory of the block, and of each norm alone."""
    parts = [
        _table("memory of a block with", result["blocks"], _memory),
        _table("memory of a norm alone", result["norms"], _memory),
    ]
    return "\n\n".join([f"{BLOCK} {MEMORY}", *(part for part in parts if part)])


def tables(result: dict[str, Any]) -> str:
    return f"{times(result)}\n\n{memory(result)}"


def _table(title: str, rows: Sequence[dict[str, Any]], cell: Cell) -> str:
    """A line for each row and a column for each variant that has a figure in one of them."""
    names = [
        variant.name
        for variant in VARIANTS
        if any("held_bytes" in row["variants"].get(variant.name, {}) for row in rows)
    ]
    if not names:
        return ""
    lines = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in sorted(rows, key=lambda row: (row["op"], row["hidden"])):
        cells = []
        for name in names:
            figures = row["variants"].get(name, {})
            cells.append(cell(figures, row) if "held_bytes" in figures else "")
        if not any(cells):
            cells[0] = "not measured"
        problem = f"{row['op']}, {row['rows']} x {row['hidden']}, {row['mode']}"
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _time(figures: dict[str, Any], row: dict[str, Any]) -> str:
    text = f"{figures['us'] / 1e3:.3f} ± {100 * figures['spread']:.1f} %"
    baseline = row["variants"].get(TORCH, {})
    if figures is baseline or "us" not in baseline:
        return text
    return f"{text} ({figures['us'] / baseline['us']:.3f})"


def _memory(figures: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{figures['held_bytes'] / 2**20:.1f} / {figures['peak_bytes'] / 2**20:.1f}"
