"""Writes the measured figures into README.md: `python -m benchmarks.readme_table [FILE]`.

Without a FILE the newest GPU result of benchmarks/results/ is taken; of benchmarks/results/block/
always the newest, where there is one. Nothing between the markers of the README is written by hand:
`--check` fails if the text there is not what the files say.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import block_table
from .grids import EAGER_TARGET, GRIDS, TARGETS, Target
from .peers import OURS
from .report import RESULTS, ROOT, SHORT, best_peer

BLOCK_RESULTS = RESULTS / "block"

_FRACTIONS = (
    "Fractions are of a device copy (forward), add (backward) or both of the same bytes: 1 is as "
    "fast as these."
)
_NAMES = {
    "f": "forward",
    "b": "backward",
    "fb": "forward + backward",
    "forward_us": "forward, µs",
    "backward_us": "backward, µs",
}


def figure_of(peer: dict[str, Any], figure: str) -> float | None:
    """A peer's `f`, `b`, `fb`, `forward_us` or `backward_us`; None where it was not measured."""
    if figure == "fb":
        return peer.get("fb")
    mode = "forward" if figure in ("f", "forward_us") else "backward"
    return peer.get(mode, {}).get("us" if figure.endswith("_us") else "fraction")


def target_table(result: dict[str, Any]) -> str:
    """One line per line of the target table, at the shape where we do worst."""
    rows = {(row["op"], row["dtype"], row["rows"], row["cols"]): row for row in result["rows"]}
    groups: dict[tuple[Any, ...], list[Target]] = {}
    for target in sorted(TARGETS, key=lambda target: target.id):
        key = (target.id, target.op, target.dtype, target.figure, target.value)
        # Tiny and training shapes have a target each; others share one for several widths.
        groups.setdefault(key, []).append(target)
    lines = [
        "| # | what | target | fused_op at its worst shape | best peer there | shapes reached |",
        "|---|---|---|---|---|---|",
    ]
    for (id, op, dtype, figure, value), targets in groups.items():
        what = f"{op} {_NAMES[figure]}, {SHORT[dtype]}"
        sign = "≤" if figure.endswith("_us") else "≥"
        lines.append(f"| {id} | {what} | {sign} {value:g} | " + _worst(rows, targets) + " |")
    return "\n".join(lines + list(_eager_lines(result)))


def _worst(rows: dict[Any, dict[str, Any]], targets: list[Target]) -> str:
    measured = []
    for target in targets:
        row = rows.get((target.op, target.dtype, target.rows, target.cols))
        ours = row and figure_of(row["peers"].get(OURS, {}), target.figure)
        if row and ours:
            measured.append((ours, target, row))
    if not measured:
        return f"not measured | | 0 of {len(targets)}"
    smallest = targets[0].figure.endswith("_us")
    ours, worst, row = (max if smallest else min)(measured, key=lambda item: item[0])
    peer = best_peer(row, lambda figures: figure_of(figures, worst.figure), smallest)
    reached = sum(target.met_by(value) for value, target, _ in measured)
    return (
        f"{_digits(ours, smallest)} at {worst.rows} x {worst.cols} | "
        + (f"{_digits(peer[1], smallest)} {peer[0]}" if peer else "-")
        + f" | {reached} of {len(targets)}"
    )


def _digits(value: float, is_us: bool) -> str:
    return f"{value:.2f} µs" if is_us else f"{value:.3f}"


def _eager_lines(result: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in result["eager"] if row["mode"] == "forward"]
    if rows and result["environment"]["device_type"] == "cuda":
        ratios = [row["custom_us"] / row["pytorch_us"] for row in rows]
        worst = max(ratios)
        row = rows[ratios.index(worst)]
        reached = sum(ratio <= EAGER_TARGET for ratio in ratios)
        yield (
            f"| E1 | eager forward, host included, time over PyTorch's, fp32 | ≤ {EAGER_TARGET} | "
            f"{worst:.2f} at {row['rows']} x {row['cols']} | 1.00 PyTorch | "
            f"{reached} of {len(rows)} |"
        )


def losses(result: dict[str, Any]) -> str:
    """Every measured shape at which a peer is faster than us by more than its own spread, and which
    shapes of the grids were not measured."""
    lines = []
    for row in result["rows"]:
        for mode in row["modes"]:
            ours = row["peers"].get(OURS, {}).get(mode, {}).get("us")
            peer = best_peer(row, lambda figures, mode=mode: _slowest_likely(figures, mode), True)
            if ours is None:
                lines.append(f"| {problem(row)} | {mode} | not measured | |")
            elif peer is not None and peer[1] < ours:
                us = row["peers"][peer[0]][mode]["us"]
                lines.append(f"| {problem(row)} | {mode} | {ours:.2f} µs | {us:.2f} µs {peer[0]} |")
    if lines:
        lines = ["| shape | direction | fused_op | faster |", "|---|---|---|---|", *lines]
    else:
        lines = [
            f"At none of the {len(result['rows'])} measured shapes is a peer of the same run "
            "faster than fused_op by more than its own spread."
        ]
    measured = {problem(row) for row in result["rows"]}
    cases = dict.fromkeys(problem(vars(case)) for case in GRIDS["all"])
    missing = [case for case in cases if case not in measured]
    if missing:
        lines += ["", f"Not measured in this run: {', '.join(missing)}."]
    return "\n".join(lines)


def _slowest_likely(peer: dict[str, Any], mode: str) -> float | None:
    figures = peer.get(mode, {})
    return figures["us"] * (1 + figures["spread"]) if "us" in figures else None


def problem(row: dict[str, Any]) -> str:
    return f"{row['op']} {SHORT[row['dtype']]} {row['rows']} x {row['cols']}"


def origin(result: dict[str, Any], path: Path) -> str:
    """One sentence: on what, with what and when the figures were measured."""
    at = result["environment"]
    peers = ", ".join(
        f"{name} {version}"
        for name, version in at["peers"].items()
        if version and name not in (OURS, "PyTorch", "torch.compile")
    )
    commit = (at["commit"] or "unknown")[:12]
    note = f"; {at['note']}" if "note" in at else ""  # by hand, in the file
    cuda = f"driver {at['driver']}, torch {at['torch']}, CUDA {at['cuda']}, nvcc {at['nvcc']}"
    versions = cuda if at["device_type"] == "cuda" else f"torch {at['torch']}"
    return (
        f"{at['device']}, {versions}{', ' + peers if peers else ''}; commit {commit}, "
        f"{at['date'][:10]}{note}; all figures in [`{path.name}`]({os.path.relpath(path, ROOT)})."
    )


def replace_between(readme: Path, name: str, text: str) -> bool:
    """Puts text between the markers `<!-- name:begin -->` and `<!-- name:end -->`.

    Returns:
        Whether the file had another text there.
    Raises:
        ValueError: the markers are not there.
    """
    old = readme.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in old or end not in old:
        raise ValueError(f"{readme} has no {begin} … {end}")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    new = pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", old)
    if new != old:
        readme.write_text(new)
    return new != old


def newest_in(folder: Path, device_type: str = "cuda") -> Path | None:
    """The GPU result, or that of another type of device, with the latest date; None if none is."""
    dated = []
    for path in folder.glob("*.json"):
        at = json.loads(path.read_text())["environment"]
        if at["device_type"] == device_type:
            dated.append((at["date"], path))
    return max(dated)[1] if dated else None


def newest(folder: Path = RESULTS) -> Path:
    """The same.

    Raises:
        SystemExit: there is none.
    """
    path = newest_in(folder)
    if path is None:
        sys.exit(f"{folder} holds no GPU result; python -m benchmarks.run --json FILE makes one")
    return path


def put_block(readme: Path, folder: Path = BLOCK_RESULTS) -> bool:
    """Puts the newest result of benchmarks.block between its markers; whether that was new.

    Raises:
        ValueError: there is a result, and the markers are not there.
    """
    path = newest_in(folder)
    if path is None:
        return False
    result = json.loads(path.read_text())
    text = f"{origin(result, path.resolve())} {block_table.tables(result)}"
    return replace_between(readme, "block", text)


def put_options(readme: Path, folder: Path = RESULTS / "options") -> bool:
    """The same for benchmarks.options."""
    path = newest_in(folder)
    if path is None:
        return False
    result = json.loads(path.read_text())
    lines = ["| call, bf16 | rows x columns | forward | backward |", "|---|---|---|---|"]
    for row in sorted(result["rows"], key=lambda row: (row["option"], row["cols"], -row["rows"])):
        shape = f"{row['rows']} x {row['cols']}"
        both = " | ".join(f"{row[mode]['fraction']:.3f}" for mode in ("forward", "backward"))
        lines.append(f"| {row['option']} | {shape} | {both} |")
    table = "\n".join(lines)
    return replace_between(readme, "options", f"{origin(result, path.resolve())}\n\n{table}")


def put_training(readme: Path, folder: Path = RESULTS / "llama") -> bool:
    """The same for examples/train_llama.py."""
    path = newest_in(folder)
    if path is None:
        return False
    result = json.loads(path.read_text())
    lines = [
        "| norms | ms a step | peak MiB | largest difference of its loss curve from native |",
        "|---|---|---|---|",
    ]
    for name, figures in result["variants"].items():
        difference = result["differences"].get(name)
        shown = "" if difference is None else f"{difference:.3f}"
        mib = figures["peak_bytes"] / 2**20
        lines.append(f"| {name} | {figures['ms']:.2f} | {mib:.0f} | {shown} |")
    size = ", ".join(f"{name} {value}" for name, value in result["size"].items())
    text = f"{origin(result | {'rows': []}, path.resolve())} {result['steps']} steps; {size}.\n\n"
    return replace_between(readme, "training", text + "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="default: the newest result")
    parser.add_argument("--check", action="store_true", help="fail if the README had another text")
    options = parser.parse_args()
    path = (options.file or newest()).resolve()
    result = json.loads(path.read_text())
    table = f"{origin(result, path)} {_FRACTIONS}\n\n{target_table(result)}"
    readme = ROOT / "README.md"
    changed = replace_between(readme, "benchmark", table)
    changed |= replace_between(readme, "losses", losses(result))
    changed |= put_block(readme)
    changed |= put_options(readme)
    changed |= put_training(readme)
    if changed and options.check:
        sys.exit("README.md did not show the figures of the result file; it does now")


if __name__ == "__main__":
    main()
