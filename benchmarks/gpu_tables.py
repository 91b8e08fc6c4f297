"""The tables of a result of `benchmarks.run`; tables.py puts them into README.md and docs/."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from .grids import EAGER_TARGET, GRIDS, TARGETS, Target
from .peers import OURS, PEERS
from .report import SHORT, best_peer

FRACTIONS = (
    "Fractions are of a device copy (forward), add (backward) or both of the same bytes: 1 is as "
    "fast as these."
)
# The rows of README.md: (op, rows, columns, mode), in bf16.
HEADLINE = (
    ("layer_norm", 32768, 4096, "forward"),
    ("layer_norm", 32768, 4096, "backward"),
    ("add_rms_norm", 32768, 4096, "forward"),
    ("add_rms_norm", 32768, 4096, "backward"),
    ("layer_norm", 64, 1024, "forward"),
)
COMPILER = "torch.compile"
_SHOWN = 8  # of the calls at which the compiler wins
_NAMES = {
    "f": "forward",
    "b": "backward",
    "fb": "forward + backward",
    "forward_us": "forward, µs",
    "backward_us": "backward, µs",
}


def problem(row: dict[str, Any]) -> str:
    return f"{row['op']} {SHORT[row['dtype']]} {row['rows']} x {row['cols']}"


def named(mode: str) -> str:
    return mode.replace("training_forward", "forward, keeping statistics")


def figure_of(peer: dict[str, Any], figure: str) -> float | None:
    """A peer's `f`, `b`, `fb`, `forward_us` or `backward_us`; None where it was not measured."""
    if figure == "fb":
        return peer.get("fb")
    mode = "forward" if figure in ("f", "forward_us") else "backward"
    return peer.get(mode, {}).get("us" if figure.endswith("_us") else "fraction")


def headline(result: dict[str, Any]) -> str:
    """A few calls in microseconds, by every implementation that ran."""
    rows = {(row["op"], row["rows"], row["cols"], row["dtype"]): row for row in result["rows"]}
    chosen = [(rows[(*problem, "bfloat16")], mode) for *problem, mode in HEADLINE]
    names = [
        peer.name
        for peer in PEERS
        if any("us" in row["peers"].get(peer.name, {}).get(mode, {}) for row, mode in chosen)
    ]
    lines = [
        f"| µs | {' | '.join(names)} | fused_op, of the limit |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for row, mode in chosen:
        peers = [row["peers"].get(name, {}).get(mode, {}) for name in names]
        cells = [f"{peer['us']:.1f}" if "us" in peer else "" for peer in peers]
        fraction = row["peers"][OURS][mode]["fraction"]
        call = f"{row['op']} {mode}, {row['rows']} x {row['cols']}"
        lines.append(f"| {call} | {' | '.join(cells)} | {fraction:.2f} |")
    return "\n".join(lines)


def target_table(result: dict[str, Any]) -> str:
    """A line for each line of the target table, at the shape where we do worst."""
    rows = {(row["op"], row["dtype"], row["rows"], row["cols"]): row for row in result["rows"]}
    groups: dict[tuple[Any, ...], list[Target]] = {}
    for target in sorted(TARGETS, key=lambda target: list(_NAMES).index(target.figure)):
        key = (target.group, target.op, target.dtype, target.figure, target.value)
        # Tiny and training shapes have a target each; others share one for several widths.
        groups.setdefault(key, []).append(target)
    lines = [
        "| call | shapes | target | fused_op at its worst shape | best peer there | reached at |",
        "|---|---|---|---|---|---|",
    ]
    for (group, op, dtype, figure, value), targets in groups.items():
        what = f"{op} {_NAMES[figure]}, {SHORT[dtype]}"
        sign = "≤" if figure.endswith("_us") else "≥"
        lines.append(f"| {what} | {group} | {sign} {value:g} | " + _worst(rows, targets) + " |")
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
            f"| layer_norm forward, fp32, host included, over PyTorch's time | small eager calls | "
            f"≤ {EAGER_TARGET} | {worst:.2f} at {row['rows']} x {row['cols']} | 1.00 PyTorch | "
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
                lines.append(f"| {problem(row)} | {named(mode)} | not measured | |")
            elif peer is not None and peer[1] < ours:
                us = row["peers"][peer[0]][mode]["us"]
                lines.append(
                    f"| {problem(row)} | {named(mode)} | {ours:.2f} µs | {us:.2f} µs {peer[0]} |"
                )
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


class Pair(NamedTuple):
    """One call, by us and by the compiler, in µs; `spread` is the compiler's."""

    call: str
    mode: str
    ours: float
    theirs: float
    spread: float

    @property
    def is_loss(self) -> bool:
        """Whether the compiler is faster by more than its own spread."""
        return self.theirs * (1 + self.spread) < self.ours

    @property
    def is_win(self) -> bool:
        """Whether we are faster by more than the compiler's spread."""
        return self.ours * (1 + self.spread) < self.theirs


def pairs(result: dict[str, Any]) -> Iterator[Pair]:
    """Every call that was measured both ways."""
    for row in result["rows"]:
        for mode in row["modes"]:
            ours = row["peers"].get(OURS, {}).get(mode, {})
            theirs = row["peers"].get(COMPILER, {}).get(mode, {})
            if "us" in ours and "us" in theirs:
                yield Pair(problem(row), mode, ours["us"], theirs["us"], theirs["spread"])


def against_compiler(result: dict[str, Any]) -> str:
    """How often the compiler wins, and where it wins by most."""
    found = list(pairs(result))
    lines = [
        f"| direction | calls | {COMPILER} faster | fused_op faster | median of its time / ours |",
        "|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(pair.mode for pair in found):
        of_mode = [pair for pair in found if pair.mode == mode]
        ratio = statistics.median(pair.theirs / pair.ours for pair in of_mode)
        losses, wins = sum(p.is_loss for p in of_mode), sum(p.is_win for p in of_mode)
        lines.append(f"| {named(mode)} | {len(of_mode)} | {losses} | {wins} | {ratio:.2f} |")
    nearest = sorted(found, key=lambda pair: pair.theirs / pair.ours)[:_SHOWN]
    lines += ["", f"| where it is nearest, or ahead | direction | fused_op | {COMPILER} |"]
    lines += ["|---|---|---|---|"]
    for pair in nearest:
        times = f"{pair.ours:.2f} µs | {pair.theirs:.2f} µs"
        lines.append(f"| {pair.call} | {named(pair.mode)} | {times} |")
    return "\n".join(lines)


def all_shapes(result: dict[str, Any]) -> str:
    """A line per call: our time and fraction of the limit, and the best peer's."""
    lines = [
        "| call | direction | fused_op | of the limit | best peer | of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        for mode in row["modes"]:
            ours = row["peers"].get(OURS, {}).get(mode, {})
            if "us" not in ours:
                continue
            line = f"| {problem(row)} | {named(mode)} | {ours['us']:.2f} µs | "
            line += f"{ours['fraction']:.3f} | "
            best = best_peer(row, lambda peer, mode=mode: peer.get(mode, {}).get("us"), True)
            if best is not None:
                fraction = row["peers"][best[0]][mode]["fraction"]
                line += f"{best[1]:.2f} µs {best[0]} | {fraction:.3f} |"
            else:
                line += "none ran | |"
            lines.append(line)
    return "\n".join(lines)


def by_width(result: dict[str, Any]) -> str:
    """A line per width, a column per op: our fraction of the limit, forward and backward, and in
    parentheses the peer's that is ahead by more than its own spread."""
    shapes = dict.fromkeys((row["rows"], row["cols"]) for row in result["rows"])
    ops = list(dict.fromkeys(row["op"] for row in result["rows"]))
    rows = {(row["op"], row["rows"], row["cols"]): row for row in result["rows"]}
    lines = [
        "| rows x columns | " + " | ".join(ops) + " |",
        "|---" * (len(ops) + 1) + "|",
    ]
    for shape in sorted(shapes, key=lambda shape: shape[1]):
        found = [rows.get((op, *shape)) for op in ops]
        cells = ["" if row is None else _both_ways(row) for row in found]
        lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both_ways(row: dict[str, Any]) -> str:
    return ", ".join(
        _fraction_beside_faster(row, mode)
        for mode in ("forward", "backward")
        if "us" in row["peers"].get(OURS, {}).get(mode, {})
    )


def _fraction_beside_faster(row: dict[str, Any], mode: str) -> str:
    ours = row["peers"][OURS][mode]
    peer = best_peer(row, lambda figures: _slowest_likely(figures, mode), True)
    if peer is None or peer[1] >= ours["us"]:
        return f"{ours['fraction']:.2f}"
    return f"{ours['fraction']:.2f} ({row['peers'][peer[0]][mode]['fraction']:.2f} {peer[0]})"
