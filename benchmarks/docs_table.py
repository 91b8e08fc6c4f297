"""Writes the measured figures into the pages of docs/: `python -m benchmarks.docs_table [FILE]`.

As `readme_table` does for README.md, from the newest GPU result if no FILE is given: all shapes
into docs/performance.md, and into docs/add_your_own_op.md what the compiler does as well or
better. What few odd rows cost, how the CPU backend compares and what the profiler saw goes to
docs/performance.md too, and what the examples printed to examples/README.md, if there is a result
of `benchmarks.run --grid few_odd_rows`, `benchmarks.cpu`, `benchmarks.profile` or
`benchmarks.examples`. `--check` fails if a page had another text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import cpu, profile
from .peers import OURS
from .readme_table import newest, newest_in, origin, problem, replace_between
from .report import RESULTS, ROOT, best_peer

COMPILER = "torch.compile"
CPU = RESULTS / "cpu"
EXAMPLES = RESULTS / "examples"
FEW_ODD_ROWS = RESULTS / "few_odd_rows"
PROFILES = RESULTS / "profile"
_SHOWN = 8  # of the calls at which the compiler wins


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
        name = mode.replace("training_forward", "forward, keeping statistics")
        lines.append(f"| {name} | {len(of_mode)} | {losses} | {wins} | {ratio:.2f} |")
    nearest = sorted(found, key=lambda pair: pair.theirs / pair.ours)[:_SHOWN]
    lines += ["", f"| where it is nearest, or ahead | direction | fused_op | {COMPILER} |"]
    lines += ["|---|---|---|---|"]
    for pair in nearest:
        times = f"{pair.ours:.2f} µs | {pair.theirs:.2f} µs"
        lines.append(f"| {pair.call} | {pair.mode} | {times} |")
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
            line = f"| {problem(row)} | {mode} | {ours['us']:.2f} µs | {ours['fraction']:.3f} | "
            best = best_peer(row, lambda peer, mode=mode: peer.get(mode, {}).get("us"), True)
            if best is not None:
                fraction = row["peers"][best[0]][mode]["fraction"]
                line += f"{best[1]:.2f} µs {best[0]} | {fraction:.3f} |"
            else:
                line += "none ran | |"
            lines.append(line)
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path, docs: Path = ROOT / "docs") -> bool:
    """Write both pages; whether one of them had another text."""
    source = origin(result, path).replace("](", "](../")  # a link from docs/
    texts = {
        ("performance.md", "shapes"): all_shapes(result),
        ("add_your_own_op.md", "compiler"): against_compiler(result),
    }
    changed = [
        replace_between(docs / page, name, f"{source}\n\n{text}")
        for (page, name), text in texts.items()
    ]
    return any(changed)


def write_newest(
    page: Path,
    name: str,
    folder: Path,
    text_of: Callable[[Any], str],
    device_type: str = "cuda",
) -> bool:
    """Write the folder's newest result between the markers; whether the page had another text."""
    path = newest_in(folder, device_type)
    if path is None:
        return False
    result = json.loads(path.read_text())
    source = origin(result, path.resolve()).replace("](", "](../")
    return replace_between(page, name, f"{source}\n\n{text_of(result)}")


def write_examples(page: Path = ROOT / "examples/README.md", folder: Path = EXAMPLES) -> bool:
    """Write what the examples printed; whether the page had another text."""

    def text_of(result: dict[str, Any]) -> str:
        printed = result["printed"].items()
        return "\n\n".join(f"`{name}`:\n\n```text\n{text}\n```" for name, text in printed)

    return write_newest(page, "examples", folder, text_of)


def write_profile(page: Path = ROOT / "docs/performance.md", folder: Path = PROFILES) -> bool:
    """Write what the profiler saw; whether the page had another text."""
    return write_newest(page, "profile", folder, lambda result: profile.table(result["rows"]))


def write_few_odd_rows(
    page: Path = ROOT / "docs/performance.md", folder: Path = FEW_ODD_ROWS
) -> bool:
    """Write what few rows of odd lengths cost; whether the page had another text."""
    return write_newest(page, "few_odd_rows", folder, all_shapes)


def write_cpu(page: Path = ROOT / "docs/performance.md", folder: Path = CPU) -> bool:
    """Write how the CPU backend compares; whether the page had another text."""
    return write_newest(page, "cpu", folder, lambda result: cpu.table(result["rows"]), "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.docs_table", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="default: the newest result")
    parser.add_argument("--check", action="store_true", help="fail if a page had another text")
    options = parser.parse_args()
    path = (options.file or newest()).resolve()
    changed = write(json.loads(path.read_text()), path)
    changed = write_profile() or changed
    changed = write_few_odd_rows() or changed
    changed = write_cpu() or changed
    if (write_examples() or changed) and options.check:
        sys.exit("docs/ did not show the figures of the result file; it does now")


if __name__ == "__main__":
    main()
