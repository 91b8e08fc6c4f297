"""Draws every picture of README.md and docs/ from committed results: `python -m benchmarks.plot`.

A picture of `PICTURES` shows the newest result of each of its folders, and carries their hash in
its metadata: tests/packaging/test_docs.py compares it, so that no picture outlives its figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import cpu, model_variants
from .block_variants import TORCH
from .peers import OURS, PEERS
from .report import RESULTS, SHORT
from .tables import newest_in

Result = dict[str, Any]

_COLORS = {peer.name: f"C{index}" for index, peer in enumerate(PEERS)}
_NAMES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
# Variants of a result, and the name of their bars.
_BLOCK_LINES = {OURS: OURS, "Liger": "Liger"}
_ADDITIONS = f"{OURS} {model_variants.ADDITIONS}"
_MODEL_LINES = {
    model_variants.CONVERTED: OURS,
    model_variants.ADDITIONS: _ADDITIONS,
    "Liger": "Liger",
}
_LIMITS = {"forward": "device copy", "backward": "device add"}


class Picture(NamedTuple):
    """A PNG, the folders whose newest results it shows, and how it is drawn from them."""

    name: str  # below benchmarks/results
    folders: tuple[str, ...]  # below benchmarks/results
    size: tuple[float, float]  # inches
    draw: Callable[[Any, list[Result]], None]  # on a matplotlib figure
    device_type: str = "cuda"

    def sources(self) -> list[Path]:
        """The newest result of each folder that has one."""
        found = (newest_in(RESULTS / folder, self.device_type) for folder in self.folders)
        return [path for path in found if path is not None]


def source_hash(paths: Sequence[Path]) -> str:
    """The hash of the results that a picture shows."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def source_in(picture: Path) -> str:
    """The same hash of a picture that `write` has drawn, from its metadata."""
    (found,) = re.findall(rb"tEXtSource\0([0-9a-f]{16})", picture.read_bytes())
    return str(found, "ascii")


def points(rows: list[Any], peer: str, op: str, mode: str) -> Iterator[tuple[int, float]]:
    """(hidden size, fraction of the limit) of the largest bf16 tensor of each hidden size."""
    largest: dict[int, dict[str, Any]] = {}
    for row in rows:
        if (row["op"], row["dtype"]) == (op, "bfloat16") and mode in row["modes"]:
            other = largest.get(row["cols"])
            if other is None or row["rows"] > other["rows"]:
                largest[row["cols"]] = row
    for cols in sorted(largest):
        fraction = largest[cols]["peers"].get(peer, {}).get(mode, {}).get("fraction")
        if fraction is not None:
            yield cols, fraction


def _set_widths(axes: Any, powers: range) -> None:
    """A logarithmic axis of hidden sizes, written as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 << power for power in powers])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")


def draw_limit(op: str, figure: Any, results: list[Result]) -> None:
    """Fraction of the limit over the hidden size, a line per implementation."""
    device = results[0]["environment"]["device"]
    same = [result for result in results if result["environment"]["device"] == device]
    rows = [row for result in same for row in result["rows"]]
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (mode, limit) in zip(panels, _LIMITS.items(), strict=True):
        for name, color in _COLORS.items():
            found = list(points(rows, name, op, mode))
            if not found:
                continue
            style: dict[str, Any] = {"color": color, "zorder": 3 if name == OURS else 2}
            even = [point for point in found if point[0] % 8 == 0] or [(math.nan, math.nan)]
            width = 2.5 if name == OURS else 1.2
            axes.plot(*zip(*even, strict=True), marker="o", ms=4, lw=width, label=name, **style)
            odd = [point for point in found if point[0] % 8]
            if odd:
                axes.scatter(*zip(*odd, strict=True), marker="x", **style)
        axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
        _set_widths(axes, range(0, 19, 3))
        axes.set_ylim(0, 1.1)
        axes.set_title(
            f"{_NAMES[op]} {mode}, bf16, {device}\n1 = time of a {limit} of as many bytes"
        )
        axes.grid(alpha=0.3)
        axes.set_xlabel("hidden size (crosses: not a multiple of 8)")
    panels[0].set_ylabel("fraction of memory bandwidth; higher is better")
    panels[1].legend(loc="lower left", fontsize="small")


Steps = Iterator[tuple[str, dict[str, tuple[float, float]]]]


def steps(results: list[Result]) -> Steps:
    """Of each model: (time over PyTorch's, half its spread) by implementation."""
    for result in _of_steps(results):
        if "size" in result:  # examples/train_llama.py
            yield from _steps_of_example(result)
        elif "rows" in result:
            yield from _steps_of(result["rows"], "step_", model_variants.NATIVE, _MODEL_LINES)
        else:
            yield from _steps_of(result["blocks"], "", TORCH, _BLOCK_LINES)


def _of_steps(results: list[Result]) -> list[Result]:
    """Blocks stand in for whole models as long as no result has these."""
    has_models = any("rows" in result for result in results)
    return [result for result in results if "blocks" not in result or not has_models]


def _steps_of_example(result: Result) -> Steps:
    size, native = result["size"], result["variants"]["torch.nn.RMSNorm"]["ms"]
    how = "compiled" if result["compile"] else "eager"
    label = f"small Llama, {size['layers']} layers of {size['width']}, {how}"
    ms = {name: figures["ms"] for name, figures in result["variants"].items()}
    yield label, {name: (ms[name] / native, 0.0) for name in (OURS, "Liger") if name in ms}


def _steps_of(rows: list[Any], prefix: str, native: str, shown: dict[str, str]) -> Steps:
    """Of rows whose variants have a time and a spread under keys that begin with `prefix`."""
    for row in rows:
        cells = {name: cell for name, cell in row["variants"].items() if f"{prefix}us" in cell}
        how = row["mode"].replace("torch.compile", "compiled")
        if "model" in row:
            label = row["model"]
        else:
            label = f"block of width {row['hidden']}, {_NAMES[row['op'].removeprefix('add_')]}"
        yield (
            f"{label}, {how}",
            {
                line: (
                    cells[name][f"{prefix}us"] / cells[native][f"{prefix}us"],
                    cells[name][f"{prefix}spread"],
                )
                for name, line in shown.items()
                if name in cells
            },
        )


def draw_steps(figure: Any, results: list[Result]) -> None:
    """Time of a training step over that with PyTorch's norms, a group of bars per model."""
    axes = figure.subplots()
    groups, labelled = list(steps(results)), set()
    figure.set_figheight(1.2 + 0.4 * len(groups))
    bars = {OURS: _COLORS[OURS], _ADDITIONS: "C9", "Liger": _COLORS["Liger"]}
    for place, (_, times) in enumerate(groups):
        for index, (name, (time, spread)) in enumerate(times.items()):
            height = 0.8 / max(2, len(times))
            y = place + height * (index - (len(times) - 1) / 2)
            label = name if name not in labelled else None
            labelled.add(name)
            error = {"xerr": time * spread, "error_kw": {"lw": 1, "alpha": 0.6}} if spread else {}
            axes.barh(y, time, height=0.95 * height, color=bars[name], label=label, **error)
            axes.text(0.02, y, f"{time:.2f}", va="center", color="white", fontsize="small")
    axes.axvline(1.0, color=_COLORS["PyTorch"], linewidth=2, label="PyTorch")
    axes.set_yticks(range(len(groups)), [label for label, _ in groups])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, 1.8)
    axes.set_xlabel("time of a training step over that with PyTorch's norms; lower is better")
    devices = dict.fromkeys(result["environment"]["device"] for result in _of_steps(results))
    axes.set_title(f"forward and backward, bf16, {' and '.join(devices)}")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")


def draw_cpu(figure: Any, results: list[Result]) -> None:
    """PyTorch's time over ours on a CPU: of all thread counts and sizes the worst."""
    (result,) = results
    panels = figure.subplots(1, 2, sharey=True)
    for axes, op in zip(panels, cpu.OPS, strict=True):
        for index, dtype in enumerate(cpu.DTYPES):
            for mode, line in (("forward", "-"), ("forward_backward", "--")):
                worst: dict[int, float] = {}
                for row in result["rows"]:
                    if (row["op"], row["dtype"], row["mode"]) == (op, dtype, mode):
                        other = worst.get(row["cols"], math.inf)
                        worst[row["cols"]] = min(cpu.speedup(row), other)
                label = f"{SHORT[dtype]} {mode.replace('_', ' + ')}"
                axes.plot(
                    *zip(*sorted(worst.items()), strict=True), line, c=f"C{index}", label=label
                )
        axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
        _set_widths(axes, range(0, 17, 4))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("hidden size")
        axes.set_title(f"{_NAMES[op]}, {result['environment']['device']}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("PyTorch's time / ours; higher is better")
    panels[1].legend(fontsize="x-small", loc="upper right")


PICTURES = (
    Picture("limit.png", (".", "widths"), (11, 4.8), partial(draw_limit, "layer_norm")),
    Picture("limit_rms.png", (".", "widths"), (11, 4.8), partial(draw_limit, "rms_norm")),
    Picture("steps.png", ("llama", "models", "block"), (9, 5.2), draw_steps),
    Picture("cpu.png", ("cpu",), (9, 4.5), draw_cpu, "cpu"),
)


def write(picture: Picture, folder: Path = RESULTS, sources: Sequence[Path] = ()) -> Path:
    """Draws one picture, of the newest results if no others are given, and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sources = sources or picture.sources()
    results = [json.loads(path.read_text()) for path in sources]
    figure = plt.figure(figsize=picture.size, layout="constrained")
    picture.draw(figure, results)
    path = folder / picture.name
    figure.savefig(path, dpi=120, metadata={"Source": source_hash(sources)})
    plt.close(figure)
    return path


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__).parse_args()
    for picture in PICTURES:
        print(write(picture))


if __name__ == "__main__":
    main()
