"""compute-sanitizer over every CUDA kernel: one process for each share of every_kernel.py.

    python -m tests.kernels.sanitize_gpu                      # every tool
    python -m tests.kernels.sanitize_gpu --tool memcheck --tool initcheck --logs /tmp/logs

One tool after the other, since memcheck of everything takes seconds, but minutes beside racecheck.
Of one tool as many processes run beside each other as the GPUs have memory for. Prints a line a
process, what a failed one printed, and a line a tool; status 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

GIB = 2**30
PROCESS_BYTES = 16 * GIB  # of a GPU: 13 under racecheck, most of it the tool's own
SHOWN_LINES = 60  # of what a failed process printed
# Tool -> dtype -> processes. All dtypes are instances of the same templates: the slow tools look at
# one, memcheck, which takes seconds, at each. Float16 takes kernels that know no width.
SHARES = {
    "memcheck": {"bfloat16": 40, "float16": 8, "float32": 8, "float64": 4},
    "initcheck": {"bfloat16": 8},
    "synccheck": {"bfloat16": 8},
    "racecheck": {"bfloat16": 20, "float16": 4},
}
MOST_KERNELS = {"float16": "1"}  # FUSED_OP_MAX_KERNELS
# How threads share memory does not depend on the dtype of the parameters.
OPTIONS = {"synccheck": ("--portable-clusters",), "racecheck": ("--parameters-as-rows",)}


class Job(NamedTuple):
    tool: str
    dtype: str
    share: str

    def __str__(self) -> str:
        return f"{self.tool} {self.dtype} {self.share}"


class Outcome(NamedTuple):
    job: Job
    status: int
    seconds: float
    printed: str

    @property
    def calls(self) -> int:
        """Those that ran to the end; every_kernel.py counts up."""
        return max(map(int, re.findall(r"(\d+) calls", self.printed)), default=0)

    @property
    def failed(self) -> bool:
        return self.status != 0 or self.calls == 0

    def __str__(self) -> str:
        summary = re.findall(r"SUMMARY: (.*)", self.printed)
        end = f"status {self.status}; " if self.failed else ""
        return f"{self.job}: {end}{self.calls} calls, {self.seconds:.0f} s; {', '.join(summary)}"


def jobs_of(tool: str) -> Iterator[Job]:
    for dtype, shares in SHARES[tool].items():
        for share in range(1, shares + 1):
            yield Job(tool, dtype, f"{share}/{shares}")


def run(job: Job, gpus: queue.Queue[str]) -> Outcome:
    """Runs one process on the next GPU that has a place."""
    gpu = gpus.get()
    command = ["compute-sanitizer", "--tool", job.tool, "--error-exitcode", "1", sys.executable]
    command += ["-m", "tests.kernels.every_kernel", "--dtype", job.dtype, "--share", job.share]
    command += OPTIONS.get(job.tool, ())
    # Each tensor in memory of its own, so that an access past its end is seen.
    own = {"CUDA_VISIBLE_DEVICES": gpu, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    own["FUSED_OP_FAST_MEMORY"] = "1"  # with it, long rows have one kernel more
    own["FUSED_OP_MAX_KERNELS"] = MOST_KERNELS.get(job.dtype, "100000")
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    finally:
        gpus.put(gpu)
    return Outcome(job, done.returncode, time.monotonic() - start, done.stdout)


def places(processes: int | None) -> list[str]:
    """For each process that may run at once, its GPU, as CUDA_VISIBLE_DEVICES names it."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    found = []
    for gpu, name in zip(range(count), names.split(","), strict=False):  # it may name others too
        memory = torch.cuda.get_device_properties(gpu).total_memory
        found += [name] * (processes or max(1, memory // PROCESS_BYTES))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=SHARES, help="default: all")
    parser.add_argument("--processes", type=int, help="on a GPU at once; default: by its memory")
    parser.add_argument("--logs", type=Path, help="a folder for what each process printed")
    options = parser.parse_args(argv)
    gpus: queue.Queue[str] = queue.Queue()
    for gpu in places(options.processes):
        gpus.put(gpu)
    if gpus.empty():
        parser.error("no GPU")
    failures = 0
    for tool in options.tool or SHARES:
        start = time.monotonic()
        outcomes = []
        with ThreadPoolExecutor(gpus.qsize()) as pool:
            for outcome in pool.map(lambda job: run(job, gpus), jobs_of(tool)):
                outcomes.append(outcome)
                print(outcome, flush=True)
                if options.logs is not None:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    name = str(outcome.job).replace(" ", "-").replace("/", "of")
                    (options.logs / f"{name}.log").write_text(outcome.printed)
                if outcome.failed:
                    print(*outcome.printed.splitlines()[:SHOWN_LINES], sep="\n", flush=True)
        bad = sum(outcome.failed for outcome in outcomes)
        failures += bad
        calls = sum(outcome.calls for outcome in outcomes)
        print(
            f"{tool}: {calls} calls in {len(outcomes)} processes, {bad} failed, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
