"""Fraction of the limit over the hidden size, a line per implementation, from a result file.

`python -m benchmarks.plot [FILE]` writes one PNG for forward and one for backward beside the file.
At each hidden size the largest measured tensor counts. Sizes that are no multiple of 8, where rows
are misaligned, are crosses beside the lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .grids import DTYPES, OPS
from .peers import OURS
from .readme_table import newest
from .report import SHORT

_MODES = {"forward": "device copy", "backward": "device add"}


def points(
    result: dict[str, Any], peer: str, op: str, dtype: str, mode: str
) -> Iterator[tuple[int, float]]:
    """(hidden size, fraction of the limit) of one peer, ordered by hidden size."""
    largest: dict[int, dict[str, Any]] = {}
    for row in result["rows"]:
        if (row["op"], row["dtype"]) == (op, dtype) and mode in row["modes"]:
            other = largest.get(row["cols"])
            if other is None or row["rows"] > other["rows"]:
                largest[row["cols"]] = row
    for cols in sorted(largest):
        fraction = largest[cols]["peers"].get(peer, {}).get(mode, {}).get("fraction")
        if fraction is not None:
            yield cols, fraction


def draw(result: dict[str, Any], folder: Path, op: str, dtype: str) -> list[Path]:
    """Writes the PNGs into the folder and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = dict.fromkeys(name for row in result["rows"] for name in row["peers"])
    paths = []
    for mode, limit in _MODES.items():
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        for index, name in enumerate(names):
            found = list(points(result, name, op, dtype, mode))
            if not found:
                continue
            style: dict[str, Any] = {"color": f"C{index}", "zorder": 3 if name == OURS else 2}
            axes.plot(
                *zip(
                    *[point for point in found if point[0] % 8 == 0] or [(None, None)], strict=True
                ),
                marker="o",
                label=name,
                linewidth=2.5 if name == OURS else 1.2,
                **style,
            )
            odd = [point for point in found if point[0] % 8]
            if odd:
                axes.scatter(*zip(*odd, strict=True), marker="x", **style)
        axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("hidden size (x: no multiple of 8)")
        axes.set_ylabel(f"fraction of a {limit} of the same bytes")
        axes.set_title(f"{op} {mode}, {SHORT[dtype]}, {result['environment']['device']}")
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(folder / f"{op}_{SHORT[dtype]}_{mode}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="default: the newest result")
    parser.add_argument("--op", choices=OPS, default="layer_norm")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    path = options.file or newest()
    for png in draw(json.loads(path.read_text()), path.parent, options.op, options.dtype):
        print(png)


if __name__ == "__main__":
    main()
