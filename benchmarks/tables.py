"""Writes every measured figure into README.md, docs/ and examples/: `python -m benchmarks.tables`.

Each table of `TABLES` shows the newest result of its folder, where there is one; a FILE takes the
place of the newest result of `benchmarks.run`. Nothing between the markers of a page is written by
hand: `--check` fails if the text there was not what the results say.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import block_table, cpu, gpu_tables, host, model_table, options, profile, variant_table
from .peers import OURS
from .report import RESULTS, ROOT

Result = dict[str, Any]


class Table(NamedTuple):
    """A place between markers, and what it shows of a result."""

    page: str  # from the root of the repository
    name: str  # of the markers
    folder: Path  # of the results
    text: Callable[[Result, str], str]  # of a result and its origin
    device_type: str = "cuda"


def below(text: Callable[[Result], str]) -> Callable[[Result, str], str]:
    """The text as a paragraph of its own below the origin."""
    return lambda result, origin: f"{origin}\n\n{text(result)}"


def rows_below(text: Callable[[list[Any]], str]) -> Callable[[Result, str], str]:
    """The same of a text that needs the rows alone."""
    return below(lambda result: text(result["rows"]))


def training_table(result: Result, origin: str) -> str:
    """Of examples/train_llama.py and of benchmarks.sharded."""
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
    return f"{origin} {result['steps']} steps; {size}.\n\n" + "\n".join(lines)


def printed(result: Result) -> str:
    """What the examples printed, each under its name."""
    texts = result["printed"].items()
    return "\n\n".join(f"`{name}`:\n\n```text\n{text}\n```" for name, text in texts)


PERFORMANCE, MEASUREMENTS = "docs/performance.md", "docs/measurements.md"
# In place of a table that no run has filled.
NOT_MEASURED = "Not measured yet."

TABLES = (
    Table("README.md", "headline", RESULTS, below(gpu_tables.headline)),
    Table(
        PERFORMANCE,
        "benchmark",
        RESULTS,
        lambda result, origin: (
            f"{origin} {gpu_tables.FRACTIONS}\n\n{gpu_tables.target_table(result)}"
        ),
    ),
    Table(PERFORMANCE, "losses", RESULTS, lambda result, _: gpu_tables.losses(result)),
    Table(
        PERFORMANCE,
        "block",
        RESULTS / "block",
        lambda result, origin: f"{origin} {block_table.times(result)}",
    ),
    Table(PERFORMANCE, "models", RESULTS / "models", below(model_table.steps)),
    Table(PERFORMANCE, "training", RESULTS / "llama", training_table),
    Table("docs/distributed.md", "sharded", RESULTS / "sharded", training_table),
    Table(PERFORMANCE, "options", RESULTS / "options", rows_below(options.table)),
    Table(PERFORMANCE, "variants", RESULTS / "variants", rows_below(variant_table.table)),
    Table(MEASUREMENTS, "shapes", RESULTS, below(gpu_tables.all_shapes)),
    Table(
        MEASUREMENTS,
        "block_memory",
        RESULTS / "block",
        lambda result, origin: f"{origin} {block_table.memory(result)}",
    ),
    Table(
        MEASUREMENTS,
        "few_odd_rows",
        RESULTS / "few_odd_rows",
        below(gpu_tables.all_shapes),
    ),
    Table(MEASUREMENTS, "widths", RESULTS / "widths", below(gpu_tables.by_width)),
    Table(
        MEASUREMENTS,
        "models_memory",
        RESULTS / "models",
        below(model_table.forwards_and_memory),
    ),
    Table(MEASUREMENTS, "host", RESULTS / "host", rows_below(host.table)),
    Table(MEASUREMENTS, "host_cpu", RESULTS / "host", rows_below(host.table), "cpu"),
    Table(MEASUREMENTS, "cpu", RESULTS / "cpu", rows_below(cpu.table), "cpu"),
    Table(MEASUREMENTS, "profile", RESULTS / "profile", rows_below(profile.table)),
    Table("docs/add_your_own_op.md", "compiler", RESULTS, below(gpu_tables.against_compiler)),
    Table("examples/README.md", "examples", RESULTS / "examples", below(printed)),
)


def origin(result: Result, path: Path, folder: Path) -> str:
    """One sentence: on what, with what and when the figures were measured.

    Its link to the result is that of a page in `folder`.
    """
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
        f"{at['date'][:10]}{note}; all figures in [`{path.name}`]({os.path.relpath(path, folder)})."
    )


def replace_between(page: Path, name: str, text: str) -> bool:
    """Puts text between the markers `<!-- name:begin -->` and `<!-- name:end -->`.

    Returns:
        Whether the page had another text there.
    Raises:
        ValueError: the markers are not there.
    """
    old = page.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in old or end not in old:
        raise ValueError(f"{page} has no {begin} … {end}")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    new = pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", old)
    if new != old:
        page.write_text(new)
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


def write(table: Table, path: Path | None = None, pages: Path = ROOT) -> bool:
    """Writes a table, of the newest result of its folder if no path is given.

    Args:
        table: which.
        path: a result.
        pages: where the pages are; links stay those of the repository.

    Returns:
        Whether the page had another text.
    """
    path = path or newest_in(table.folder, table.device_type)
    if path is None:
        return replace_between(pages / table.page, table.name, NOT_MEASURED)
    result = json.loads(path.read_text())
    source = origin(result, path.resolve(), (ROOT / table.page).parent)
    return replace_between(pages / table.page, table.name, table.text(result, source))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="default: the newest result")
    parser.add_argument("--check", action="store_true", help="fail if a page had another text")
    arguments = parser.parse_args()
    path = arguments.file or newest()
    changed = [t for t in TABLES if write(t, path if t.folder == RESULTS else None)]
    for table in changed:
        print(f"{table.page}: {table.name}")
    if changed and arguments.check:
        sys.exit("the pages did not show the figures of the results; they do now")


if __name__ == "__main__":
    main()
