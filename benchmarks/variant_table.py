"""The table of a benchmarks.variants result, for docs/."""

from __future__ import annotations

from typing import Any

from .peers import OURS


def table(rows: list[Any]) -> str:
    """A line for each shape of a variant, and of everyone who was timed, a column per direction."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    columns = [
        direction if name == OURS else f"{name}, {direction}"
        for name in names
        for direction in ("forward", "backward")
    ]
    lines = ["| variant | rows x columns | " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * (len(columns) + 2))
    for row in rows:
        cells = [
            f"{figures[direction]:.2f}" if direction in figures else ""
            for figures in (row["peers"].get(name, {}) for name in names)
            for direction in ("forward", "backward")
        ]
        shape = f"{row['rows']} x {row['cols']}"
        lines.append(f"| {row['variant']} | {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
