"""The tables of a benchmarks.models result, for the console and docs/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .model_variants import ADDITIONS, CONVERTED, NATIVE, VARIANTS

NOTE = (
    "bf16 weights, forward, loss and backward; the optimizer is left out. Times in ms, ± half the "
    "distance from the fastest to the slowest round, and in parentheses the part of the native "
    "time in that line. The column "
    f"`{ADDITIONS}` has the residual additions in the norms, eager by `convert(residual=True)`, "
    "compiled by `compile_pass`, which moves rotary embedding, too, and modulations and SiLU by "
    "`convert(modulation=True, activation=True)`; it is empty where none can move. Of Liger only "
    "its norms."
)


def steps(result: dict[str, Any]) -> str:
    """Time of a step, and which cells are slower than native beyond the spread."""
    table = _table("step of", result, lambda cell, row: _time(cell, row, "step"))
    return "\n\n".join((NOTE, table, slower(result)))


def forwards_and_memory(result: dict[str, Any]) -> str:
    """Time of the forward in training, and the peak of memory in a step."""
    return "\n\n".join(
        (
            _table("forward of", result, lambda cell, row: _time(cell, row, "forward")),
            _table("peak of a step above the parameters, MiB", result, _peak),
        )
    )


def tables(result: dict[str, Any]) -> str:
    return f"{steps(result)}\n\n{forwards_and_memory(result)}"


def slower(result: dict[str, Any]) -> str:
    """Whether anybody loses by switching: the spreads of both cells count."""
    found = []
    for row in result["rows"]:
        native = row["variants"][NATIVE]
        for name in (CONVERTED, ADDITIONS):
            cell = row["variants"].get(name, {})
            if "step_us" not in cell or "step_us" not in native:
                continue
            least = cell["step_us"] * (1 - cell["step_spread"])
            if least > native["step_us"] * (1 + native["step_spread"]):
                found.append(f"{row['model']}, {row['mode']}, {name}")
    if found:
        return f"Slower than native beyond the spread: {'; '.join(found)}."
    return "No step of a converted model is slower than native beyond the spread."


Cell = Callable[[dict[str, Any], dict[str, Any]], str]


def _table(title: str, result: dict[str, Any], cell: Cell) -> str:
    """A line for each row, and a column for each variant that was measured in one of them."""
    rows = result["rows"]
    names = [
        variant.name
        for variant in VARIANTS
        if any("step_us" in row["variants"].get(variant.name, {}) for row in rows)
    ]
    lines = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in rows:
        size = row["size"]
        cells = [row["variants"].get(name, {}) for name in names]
        shown = [cell(figures, row) if "step_us" in figures else "" for figures in cells]
        batch = f"{size['batch']} x {size['length']}"
        lines.append(f"| {row['model']}, {batch}, {row['mode']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _time(cell: dict[str, Any], row: dict[str, Any], what: str) -> str:
    text = f"{cell[f'{what}_us'] / 1e3:.2f} ± {100 * cell[f'{what}_spread']:.1f} %"
    native = row["variants"].get(NATIVE, {})
    if cell is native or f"{what}_us" not in native:
        return text
    return f"{text} ({cell[f'{what}_us'] / native[f'{what}_us']:.3f})"


def _peak(cell: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{cell['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in cell else ""
