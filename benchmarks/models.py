"""The norms in whole models: `python -m benchmarks.models --json FILE`.

Llama, Qwen3, GPT-2, ViT and ConvNeXt of transformers, a diffusion transformer and a UNet of
diffusers, with random bf16 weights, eager and by torch.compile: native, converted, converted with
the residual additions, the modulations, the activations and, compiled, the rotary embedding in the
norms (by options of `convert`, and `compile_pass`), and with Liger's norms where it is installed. A
step is forward, loss and backward; the optimizer, which is the same for all, is left out. Variants
share their parameters and take turns, so that all see the same clocks. A variant whose loss or
gradients differ from the native ones gets no figure.

The file is rewritten after every row, which is a model in a mode. `--append` goes on where a run
stopped, and no row begins after `--minutes`. `--small` takes tiny sizes, to try the program without
a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import report
from .block import CudaMeter, Meter, compiled_alone, time_steps
from .measure import reason
from .model_table import tables
from .model_variants import (
    MODELS,
    MODES,
    NATIVE,
    VARIANTS,
    Model,
    NothingToMeasure,
    Variant,
    share,
)
from .peers import select
from .run import default_device, load_rows
from .timing import eager_us

ROUNDS = 13
CELL_SECONDS = 8.0  # the rounds of all variants in a row; compilation comes on top
MOST_ITERATIONS = 20
# Of the loss and of the norm of all gradients, in bf16: those that differ compute something else.
TOLERANCES = {"loss": 0.01, "gradient_norm": 0.05}


class Step:
    """A variant after its first steps: what is timed, and what it computed."""

    def __init__(
        self, variant: Variant, native: nn.Module, inputs: dict[str, Any], mode: str
    ) -> None:
        model = native if variant.name == NATIVE else share(native)
        built = variant.change(model, mode)
        self.inputs, self.parameters = inputs, list(model.parameters())
        self.model: Callable[..., Any] = built.model
        if mode == "torch.compile":
            self.model = compiled_alone(built.model)
        with built.during_first_step:
            loss = self.forward()
            loss.backward()
        self.note = built.note()
        norms = [p.grad.float().norm() for p in self.parameters if p.grad is not None]
        self.found = {"loss": loss.item(), "gradient_norm": torch.stack(norms).norm().item()}
        self.clear()

    def forward(self) -> Any:
        """The forward of training, which keeps what backward needs."""
        return self.model(**self.inputs).loss

    def __call__(self) -> None:
        self.forward().backward()
        self.clear()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def check(found: dict[str, float], native: dict[str, float]) -> None:
    """Raises if a variant computed something else than the native model, or that did not run."""
    if not native:
        raise NothingToMeasure("the native model did not run")
    for name, tolerance in TOLERANCES.items():
        if not abs(found[name] - native[name]) <= tolerance * abs(native[name]):  # also a NaN
            raise ValueError(f"its {name} is {found[name]:.5g}, not {native[name]:.5g}")


def prepare(
    model: Model, mode: str, device: torch.device, variants: Sequence[Variant]
) -> Iterator[tuple[str, Step | Exception]]:
    """Each variant after its first step, or what kept it from one."""
    torch.compiler.reset()
    native, inputs = model.build(device), model.inputs(device)
    expected: dict[str, float] = {}
    for variant in variants:
        try:
            step = Step(variant, native, inputs, mode)
            if variant.name == NATIVE:
                expected = step.found
            check(step.found, expected)
            yield variant.name, step
        except Exception as error:  # the others are still of interest
            native.zero_grad()
            yield variant.name, error


def measure(
    model: Model,
    mode: str,
    device: torch.device,
    meter: Meter | None,
    seconds: float = CELL_SECONDS,
    rounds: int = ROUNDS,
    variants: Sequence[Variant] = VARIANTS,
) -> dict[str, Any]:
    """One row: time of a step and of its forward, and memory, of every variant that runs."""
    figures: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, step in prepare(model, mode, device, variants):
        if isinstance(step, Exception):
            figures[name] = {"failed": reason(step)}
            continue
        steps[name] = step
        step()  # lets the allocator find its sizes
        figures[name] = {**step.found, "note": step.note, **memory(step, meter)}
    for what in ("step", "forward"):
        calls: dict[str, Callable[[], Any]] = {
            name: step if what == "step" else step.forward for name, step in steps.items()
        }
        count = iterations(calls, device, seconds * (2 / 3 if what == "step" else 1 / 3), rounds)
        for name, timing in time_steps(calls, device, rounds, count).items():
            figures[name] |= {
                f"{what}_us": timing.us,
                f"{what}_spread": timing.spread,
                f"{what}_rounds_us": list(timing.rounds_us),
            }
    return {"model": model.name, "mode": mode, "size": asdict(model), "variants": figures}


def memory(step: Step, meter: Meter | None) -> dict[str, int]:
    """The peak of a step above the parameters."""
    if meter is None:
        return {}
    meter.start()
    step()
    return {"peak_bytes": meter.peak()}


def iterations(
    calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float, rounds: int
) -> int:
    """How many calls make a round, if every variant makes one more to warm up."""
    if not calls:
        return 1
    a_turn = sum(eager_us(call, device, warmups=0, iterations=1) for call in calls.values())
    return min(max(1, math.floor(seconds * 1e6 / rounds / a_turn) - 1), MOST_ITERATIONS)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(model.name for model in MODELS)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append", action="store_true", help="keep FILE's rows, add the missing")
    parser.add_argument("--model", action="append", help=f"repeatable; default: {names}")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no row after; default: 6")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the program")
    options = parser.parse_args()
    unknown = set(options.model or ()) - {model.name for model in MODELS}
    if unknown:
        parser.error(f"no model is called {unknown.pop()!r}; there are {names}")
    return options


def main() -> None:
    begin = time.monotonic()
    options = parse_options()
    device = default_device()
    if device.type != "cuda" and not options.small:
        sys.exit("benchmarks.models needs a GPU, or --small: PyTorch sees no CUDA device here")
    meter = CudaMeter() if device.type == "cuda" else None
    peers = select(["PyTorch", "torch.compile", "Liger"])
    environment = report.environment(device, peers)
    for name in ("transformers", "diffusers"):
        # Only some models need the second.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            environment["peers"][name] = importlib.metadata.version(name)
    rows = load_rows(options.json, environment) if options.append else []
    result: dict[str, Any] = {"environment": environment, "rows": rows}
    measured = {(row["model"], row["mode"]) for row in rows}
    late = []
    for mode, model in itertools.product(options.mode or MODES, MODELS):
        if (model.name, mode) in measured or model.name not in (options.model or model.name):
            continue
        if time.monotonic() - begin > 60 * options.minutes:
            late.append(f"{model.name}, {mode}")
            continue
        print(f"{model.name}, {mode}", file=sys.stderr, flush=True)
        size, seconds = (model.small(), 0.1) if options.small else (model, CELL_SECONDS)
        rows.append(measure(size, mode, device, meter, seconds=seconds))
        report.write_json(options.json, result)
        for name, figures in rows[-1]["variants"].items():
            note = figures.get("failed") or figures["note"]
            print(f"  {name}: {note}", file=sys.stderr)
        gc.collect()  # models are in cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(tables(result))
    if late:
        print(f"\nNo time was left for {'; '.join(late)}: --append measures them")


if __name__ == "__main__":
    main()
