"""Runs grids and writes one JSON file: `python -m benchmarks.run --json FILE` measures everything.

The file is rewritten after every case, so that a run that is stopped keeps what it has measured;
`--append` then goes on where it stopped. test_benchmark.py uses the functions of this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import report
from .grids import EAGER_SHAPES, GRIDS, Case
from .measure import measure_case, reason
from .peers import PEERS, Peer, select, torch_run
from .timing import GraphTimer, HostTimer, Timer, eager_us, tensors_in

# A file may hold rows of several runs only where these agree.
_SAME = ("device", "torch", "commit")

# Forward without gradients, and a step; there is also "training_forward", which keeps its graph.
EAGER_MODES = ("forward", "forward_backward")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_timer(device: torch.device, rounds: int = 7) -> Timer:
    return GraphTimer(device, rounds) if device.type == "cuda" else HostTimer(rounds)


def run_cases(
    cases: Sequence[Case],
    timer: Timer,
    peers: Sequence[Peer],
    device: torch.device,
    after: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measures the cases with a progress bar; `after` is given each row as it is done."""
    limits: dict[tuple[str, int, str], dict[str, Any]] = {}
    rows = []
    progress = report.Progress(len(cases))
    for case in cases:
        try:
            row = measure_case(case, timer, peers, device, limits, progress.note)
        except torch.cuda.OutOfMemoryError as error:
            row = {
                "op": case.op,
                "dtype": case.dtype,
                "rows": case.rows,
                "cols": case.cols,
                "modes": [],
                "limits": {},
                "peers": {},
                "failed": reason(error),
            }
        rows.append(row)
        progress.clear()
        after(row)
        progress.step()
    progress.close()
    return rows


def run_eager(
    shapes: Sequence[tuple[int, int]],
    op: str,
    dtype: str,
    device: torch.device,
    ours: Peer = PEERS[0],
    rounds: int = 5,
    iterations: int = 100,
    modes: Sequence[str] = EAGER_MODES,
) -> list[dict[str, Any]]:
    """PyTorch and ours called one after the other, host included, in the given modes.

    The two take turns, so that a slow moment of the machine hits both; the median round counts.
    """
    functions = {"pytorch": torch_run(op), "custom": ours.load(op)}
    rows = []
    for mode in modes:
        for shape in shapes:
            calls = {
                name: _eager_call(function, op, shape, dtype, device, mode)
                for name, function in functions.items()
            }
            rows.append(
                {"op": op, "dtype": dtype, "rows": shape[0], "cols": shape[1], "mode": mode}
                | take_turns(calls, device, rounds, iterations, mode)
            )
    return rows


def take_turns(
    calls: dict[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    iterations: int,
    mode: str,
) -> dict[str, Any]:
    """The times of `pytorch` and `custom`, each round and their median."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.set_grad_enabled(mode != "forward"):
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(eager_us(call, device, iterations=iterations))
    median = {name: statistics.median(values) for name, values in taken.items()}
    return (
        {f"{name}_us": value for name, value in median.items()}
        | {f"{name}_rounds_us": values for name, values in taken.items()}
        | {"speedup": median["pytorch"] / median["custom"]}
    )


def _eager_call(
    function: Callable[..., Any],
    op: str,
    shape: tuple[int, int],
    dtype: str,
    device: torch.device,
    mode: str,
) -> Callable[[], Any]:
    gradients = mode != "forward"

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, dtype=getattr(torch, dtype), device=device)
        return drawn.requires_grad_(gradients)

    case = Case(op, dtype, *shape)
    given = (
        draw(*shape),
        draw(*shape) if case.has_residual else None,
        draw(shape[1]),
        draw(shape[1]) if case.has_bias else None,
    )
    if mode != "forward_backward":
        return lambda: function(*given)
    wanted = [tensor for tensor in given if tensor is not None]
    grads = [torch.randn_like(output) for output in tensors_in(function(*given))]

    def forward_backward() -> Any:
        return torch.autograd.grad(tuple(tensors_in(function(*given))), wanted, grads)

    return forward_backward


def load_rows(path: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same machine, torch and commit.

    Raises:
        SystemExit: the file's run had another; the sentence names what differs.
    """
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    for name in _SAME:
        if earlier["environment"][name] != environment[name]:
            sys.exit(
                f"{path} was measured with {name} {earlier['environment'][name]}, this run "
                f"has {environment[name]}; write another file"
            )
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--grid", action="append", choices=sorted(GRIDS), help="default: all")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append", action="store_true", help="keep FILE's rows, add the missing")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="default: every peer that can be imported",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts")
    options = parser.parse_args()
    try:
        peers = select(options.peers)
    except ValueError as error:
        parser.error(str(error))

    device = default_device()
    environment = report.environment(device, peers)
    rows = load_rows(options.json, environment) if options.append else []
    measured = {(row["op"], row["dtype"], row["rows"], row["cols"]) for row in rows}
    cases = dict.fromkeys(case for name in options.grid or ["all"] for case in GRIDS[name])
    missing = [c for c in cases if (c.op, c.dtype, c.rows, c.cols) not in measured]
    result: dict[str, Any] = {"environment": environment, "eager": [], "rows": rows}
    try:
        result["eager"] = run_eager(EAGER_SHAPES, "layer_norm", "float32", device)
    except Exception as error:
        result["eager_failed"] = reason(error)

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        report.write_json(options.json, result)
        print(report.case_table(row) + "\n", flush=True)

    run_cases(missing, default_timer(device, options.rounds), peers, device, keep)
    report.write_json(options.json, result)
    print(f"{len(rows)} cases in {options.json}")


if __name__ == "__main__":
    main()
