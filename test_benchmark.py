"""How fast the fused norms are: `python test_benchmark.py` prints two kinds of table.

First, ordinary calls with the host's part included, against PyTorch. Then the GPU alone, in CUDA
graphs whose input sets leave the L2 cache: µs, TB/s, and the fraction of the limit, which is a
device copy (forward) or add (backward) of the same bytes, beside every peer that can be imported.
Without a GPU the first table is made on the CPU.

pytest runs the checks at the end of the file. They test that a run has every part it promises,
on numbers that a fake timer gives; none of them depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu, gpu_tables, options, plot, report, tables
from benchmarks.grids import (
    ALL_MODES,
    DTYPES,
    EAGER_SHAPES,
    GRIDS,
    OPS,
    TARGETS,
    Case,
    cases_of,
    parse_shape,
)
from benchmarks.measure import failure, reason
from benchmarks.peers import OURS, PEERS, Peer, select
from benchmarks.run import default_device, default_timer, run_cases, run_eager
from benchmarks.timing import GraphTimer, HostTimer, Timing


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        default=[],
        metavar="R,C",
        help="measure this shape, not a grid; repeatable",
    )
    parser.add_argument("--grid", choices=sorted(GRIDS), help="default: quick")
    parser.add_argument("--op", action="append", choices=OPS, default=[], help="repeatable")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, or the grid's")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help=f"default: all of {', '.join(peer.name for peer in PEERS)}; "
        "leaving out torch.compile saves most of the time",
    )
    parser.add_argument("--no-peers", action="store_true", help="only fused_op and PyTorch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    try:
        options.peers = select(["PyTorch"] if options.no_peers else options.peers)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse_options()
    device = default_device()
    environment = report.environment(device, options.peers)
    result: dict[str, Any] = {"environment": environment, "eager": [], "rows": []}
    print(f"{environment['device']}, torch {environment['torch']}")
    if device.type == "cpu":
        print(
            "PyTorch sees no CUDA device here: the times below are those of the CPU "
            f"({environment['threads']} threads). docs/measurements.md has those of many shapes."
        )

    for op in options.op or OPS[:1]:
        try:
            rows = run_eager(EAGER_SHAPES, op, "float32", device)
        except Exception as error:  # e.g. a build without CUDA: the peers are still of interest
            print(f"\n{op} cannot be measured: {reason(error)}")
            continue
        result["eager"] += rows
        for mode, title in (
            ("forward", "forward without gradients"),
            ("forward_backward", "forward + backward"),
        ):
            print(f"\n{op} fp32, {title}: eager, host included, 10 warm-ups, 100 iterations")
            print(report.eager_table([row for row in rows if row["mode"] == mode]))

    # On a CPU the first tables are the answer, unless a shape or a grid is asked for.
    if device.type == "cuda" or options.shape or options.grid:
        cases = cases_of(GRIDS[options.grid or "quick"], options.shape, options.op, options.dtype)
        kind = "GPU time in CUDA graphs" if device.type == "cuda" else "wall time"
        print(f"\n{kind}, median of the rounds; limit = copy or add of the same bytes / time\n")
        result["rows"] = run_cases(
            cases,
            default_timer(device),
            options.peers,
            device,
            lambda row: print(report.case_table(row) + "\n", flush=True),
        )
    if options.json:
        report.write_json(options.json, result)
        print(f"All figures are in {options.json}")


class FakeTimer(HostTimer):
    """Calls every function once and claims a microsecond per million bytes."""

    def __call__(self, calls: Sequence[Callable[[], Any]], bytes_per_call: int) -> Timing:
        for call in calls:
            call()
        us = bytes_per_call / 1e6
        return Timing.of([us, us * 0.9, us * 1.1], len(calls), False)


def _broken(op: str) -> Any:
    raise ImportError("no module named broken")


def _wrong(op: str) -> Any:
    return lambda x, residual, weight, bias: x * weight + bias


@functools.cache
def tiny_run() -> dict[str, Any]:
    """All ops at a tiny shape, with a peer that is missing and one that is wrong."""
    device = torch.device("cpu")
    peers = (*select(["PyTorch"]), Peer("broken", "no", _broken), Peer("wrong", "no", _wrong))
    cases = [Case(op, "float32", 3, 8) for op in OPS]
    result = {
        "environment": report.environment(device, peers, "pytest"),
        "eager": run_eager([(2, 8)], "layer_norm", "float32", device, rounds=1, iterations=2),
        "rows": run_cases(cases, FakeTimer(), peers, device),
    }
    return json.loads(json.dumps(result))


def test_a_run_has_every_part_it_promises() -> None:
    """Catches a mode, peer or figure that silently drops out of the JSON file."""
    result = tiny_run()
    assert {row["mode"] for row in result["eager"]} == {"forward", "forward_backward"}
    assert {"device", "driver", "torch", "cuda", "nvcc", "commit", "date", "command"} <= set(
        result["environment"]
    )
    for row in result["rows"]:
        for name in (OURS, "PyTorch"):
            for mode in ALL_MODES:
                # The fake timer takes a time in proportion to the bytes, as the limit does.
                assert math.isclose(row["peers"][name][mode]["fraction"], 1.0), row["peers"][name]
            assert math.isclose(row["peers"][name]["fb"], 1.0)
        assert "no module named broken" in row["peers"]["broken"]["failed"]
        text = report.case_table(row)
        assert OURS in text and "not measured" in text


def test_wrong_values_are_refused() -> None:
    """Catches a peer that is fast because it computes something else."""
    plain = {row["op"]: row for row in tiny_run()["rows"]}["layer_norm"]
    assert "wrong values" in plain["peers"]["wrong"]["failed"]


def test_a_lost_gpu_ends_the_run(monkeypatch: Any) -> None:
    """Catches a peer that is blamed for what the one before it did to the GPU."""
    import pytest  # which the script above does without

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    case, peer = Case("layer_norm", "float32", 3, 8), Peer("broken", "no", _broken)
    with pytest.raises(RuntimeError, match="the GPU failed in layer_norm float32 3x8 of broken"):
        failure(ValueError("asked for too much"), case, peer, torch.device("cuda"))


def test_host_timer_times_calls() -> None:
    """Catches a broken mean or median; how long the calls take is not asserted."""
    timing = HostTimer(rounds=3, round_s=0.001)([lambda: None, lambda: None], 8)
    assert 0 < timing.min_us <= timing.us <= timing.max_us and len(timing.rounds_us) == 3


def test_grids_cover_the_targets() -> None:
    """Catches a target whose shape no grid measures."""
    measured = {(c.op, c.dtype, c.rows, c.cols) for c in GRIDS["all"]}
    assert measured >= {(t.op, t.dtype, t.rows, t.cols) for t in TARGETS}
    assert all(len(set(cases)) == len(cases) for cases in GRIDS.values())
    assert cases_of(GRIDS["quick"], [(3, 5)], [], None) == [Case("layer_norm", "bfloat16", 3, 5)]


def test_tables_come_from_the_json(tmp_path: Path) -> None:
    """Catches a table script that no longer reads what a run writes."""
    result = tiny_run()
    assert "| layer_norm forward, bf16 | 64 to 1024 columns | ≥ 0.99 | not measured" in (
        gpu_tables.target_table(result)
    )
    reached = [row | {"rows": 4096, "cols": 768, "dtype": "bfloat16"} for row in result["rows"]]
    assert "1.000 at 4096 x 768 | 1.000 PyTorch | 1 of 1" in (
        gpu_tables.target_table(result | {"rows": reached})
    )
    assert "At none of the 6 measured shapes" in gpu_tables.losses(result)
    slow = json.loads(json.dumps(result))
    slow["rows"][0]["peers"][OURS]["forward"]["us"] *= 2
    assert "| layer_norm fp32 3 x 8 | forward |" in gpu_tables.losses(slow)
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- losses:begin -->\nold\n<!-- losses:end -->\nz\n")
    assert tables.replace_between(readme, "losses", "new")
    assert readme.read_text() == "a\n<!-- losses:begin -->\n\nnew\n\n<!-- losses:end -->\nz\n"


def test_plots_come_from_the_json(tmp_path: Path) -> None:
    """Catches a plot script that no longer reads what a run writes."""
    import pytest  # not at the top: the script itself does without it

    pytest.importorskip("matplotlib")
    result = tmp_path / "result.json"
    run = tiny_run()
    rows = [row | {"dtype": "bfloat16"} for row in run["rows"]]  # what the picture shows
    result.write_text(json.dumps(run | {"rows": rows}))
    for picture in plot.PICTURES:
        if picture.name.startswith("limit"):
            drawn = plot.write(picture, tmp_path, [result])
            assert plot.source_in(drawn) == plot.source_hash([result])


def test_every_option_is_measured() -> None:
    """Catches an option whose call has gone, or that has no figure in one direction."""
    limits: dict[Any, float] = {}
    for option in options.OPTIONS:
        timer = HostTimer(rounds=1, round_s=0.0)
        row = options.measure(option, 64, 16, timer, torch.device("cpu"), limits)
        assert row["forward"]["us"] > 0 and row["backward"]["us"] > 0, option.name


def test_cpu_backend_is_measured_with_one_thread_and_all() -> None:
    """Catches a line that is missing, and a number of threads that stays changed."""
    threads = torch.get_num_threads()
    rows = cpu.measure((24,), (8,), rounds=1)
    assert torch.get_num_threads() == threads
    counts = {1, threads}
    assert {row["threads"] for row in rows} == counts
    for mode in ("forward", "forward + backward"):
        ratio = r"\d+\.\d" + r" \d+\.\d" * (len(counts) - 1)
        pattern = re.escape(f"| layer_norm bf16 {mode} | 24 | ") + ratio + r" \|"
        assert re.search(pattern, cpu.table(rows))


def test_graph_timer_captures_every_mode() -> None:
    """Catches a capture that fails or misses work; how long the work takes is not asserted."""
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    cases = [Case(op, "float32", 1000, 1000) for op in OPS]
    for row in run_cases(cases, GraphTimer(device, rounds=2), select(["PyTorch"]), device):
        for name in (OURS, "PyTorch"):
            for mode in ALL_MODES:
                assert row["peers"][name][mode]["us"] > 0, row["peers"][name]


if __name__ == "__main__":
    main()
