"""Where a result came from, the JSON file that keeps it, and the tables on the console."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .peers import OURS, Peer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def own_command() -> str:
    """The command of this process, to be repeated: without the folder of its interpreter."""
    interpreter, *rest = sys.orig_argv
    return shlex.join([Path(interpreter).name, *rest])


def environment(
    device: torch.device, peers: Sequence[Peer], command: str | None = None
) -> dict[str, Any]:
    """Everything that a figure depends on: machine, versions, commit, date, command."""
    cuda = device.type == "cuda"
    nvcc = _output("nvcc", "--version")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "device_type": device.type,
        "driver": _first_line(
            _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        )
        if cuda
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": (re.findall(r"release ([\d.]+)", nvcc or "") or [None])[0],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "peers": {peer.name: peer.version for peer in peers},
        # A copy of the tree without .git can say which commit it is.
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command or own_command(),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_line(text: str | None) -> str | None:
    return text.splitlines()[0] if text else None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{commit} + local changes" if commit and changed else commit


def _cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes in one step, so that a run that is stopped leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


class Progress:
    """tqdm where it is installed, else one line on stderr; nothing in a pipe or log."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bar = total, 0, None
        self._show = sys.stderr.isatty()
        try:
            from tqdm import tqdm
        except ImportError:
            return
        if self._show:
            self._bar = tqdm(total=total, unit="case", leave=False)

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self._show:
            line = f"[{self._done}/{self._total}] {text}"
            print(f"\r{line[:79]:<79}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Makes room for a line of ordinary output."""
        if self._bar is not None:
            self._bar.clear()
        elif self._show:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        self.clear()
        if self._bar is not None:
            self._bar.close()


def eager_table(rows: Sequence[dict[str, Any]]) -> str:
    """PyTorch µs / Custom µs / Speedup, one line per shape."""
    lines = [f"{'Shape':<14}{'PyTorch (µs)':>14}{'Custom (µs)':>14}{'Speedup':>10}"]
    for row in rows:
        shape = f"({row['rows']}, {row['cols']})"
        lines.append(
            f"{shape:<14}{row['pytorch_us']:>14.2f}{row['custom_us']:>14.2f}{row['speedup']:>9.2f}x"
        )
    return "\n".join(lines)


_MODE_TITLES = {
    "forward": "forward",
    "training_forward": "forward + statistics",
    "backward": "backward",
}


def case_table(row: dict[str, Any]) -> str:
    """One case: its limits, and a line per implementation with µs, spread, TB/s and fraction."""
    head = f"{row['op']} {SHORT[row['dtype']]} {row['rows']} x {row['cols']}"
    for limit in {limit["kind"]: limit for limit in row["limits"].values()}.values():
        head += f"   {limit['kind']} {limit['us']:.2f} µs, {limit['tb_per_s']:.3g} TB/s"
    if "failed" in row:
        return f"{head}\n  not measured: {row['failed']}"
    titles = "".join(f"{_MODE_TITLES[mode]:>36}" for mode in row["modes"])
    units = "".join(f"{'µs':>11}{'±':>8}{'TB/s':>9}{'limit':>8}" for _ in row["modes"])
    lines = [head, f"  {'':<16}{titles}{'fb':>8}", f"  {'':<16}{units}"]
    notes = []
    for name, peer in row["peers"].items():
        if "failed" in peer:
            notes.append(f"  {name}: not measured: {peer['failed']}")
            continue
        cells = ""
        for mode in row["modes"]:
            figures = peer[mode]
            if "failed" in figures:
                cells += f"{'-':>36}"
                notes.append(f"  {name} {mode}: not measured: {figures['failed']}")
            else:
                cells += (
                    f"{figures['us']:>11.2f}{100 * figures['spread']:>7.1f}%"
                    f"{figures['tb_per_s']:>9.3g}{figures['fraction']:>8.3f}"
                )
        total = f"{peer['fb']:>8.3f}" if "fb" in peer else ""
        lines.append(f"  {name:<16}{cells}{total}")
    return "\n".join(lines + notes)


def best_peer(
    row: dict[str, Any], figure: Callable[[dict[str, Any]], float | None], smallest: bool
) -> tuple[str, float] | None:
    """The best of the others by a figure of theirs, with its name."""
    found = [
        (name, value)
        for name, peer in row["peers"].items()
        if name != OURS and (value := figure(peer)) is not None
    ]
    if not found:
        return None
    return (min if smallest else max)(found, key=lambda item: item[1])
