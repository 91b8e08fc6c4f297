"""The table of a benchmarks.variants result, for docs/."""

from __future__ import annotations

from typing import Any

from .peers import OURS

DIRECTIONS = ("forward", "backward")


def table(rows: list[Any]) -> str:
    """A line for each shape of a variant: fused_op, and the fastest of the others that ran."""
    others = any(name != OURS for row in rows for name in row["peers"])
    columns = [name for direction in DIRECTIONS for name in [direction, *["best other"] * others]]
    lines = ["| variant | rows x columns | " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * (len(columns) + 2))
    for row in rows:
        cells = []
        for direction in DIRECTIONS:
            cells.append(_share(row["peers"][OURS].get(direction)))
            if others:
                cells.append(best_other(row, direction))
        shape = f"{row['rows']} x {row['cols']}"
        lines.append(f"| {row['variant']} | {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best_other(row: Any, direction: str) -> str:
    """The largest fraction of a peer in a row, and its name; empty if none ran."""
    found = [
        (figures[direction], name)
        for name, figures in row["peers"].items()
        if name != OURS and direction in figures
    ]
    if not found:
        return ""
    fraction, name = max(found)
    return f"{_share(fraction)} {name}"


def _share(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.2f}"
