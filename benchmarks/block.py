"""The norms in use, in a transformer block: `python -m benchmarks.block --json FILE`.

A pre-norm block, 8192 bf16 tokens, forward and backward: the time of a step by CUDA events, and the
memory of a step, with the norms of PyTorch, of this library and of Liger. Also the memory of each
norm alone. There are two figures of memory, both counted from the start: `held` at the end of
forward, outputs included, which a deep model multiplies by its layers, and the `peak` of forward
and backward. Inputs are created and released as in a model, so a norm that need not keep its input
does not hold it. The gradients of the outputs exist before, and are not counted.

Needs a GPU. The file is rewritten after every row, so that a run that is stopped keeps its rows.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from . import report
from .block_table import tables
from .block_variants import VARIANTS, Block, Variant
from .measure import reason
from .peers import select
from .timing import Timing, eager_us, tensors_in

HIDDEN = (1024, 2048, 4096)
SEQUENCES = (4, 2048)
BLOCK_OPS = ("add_layer_norm", "add_rms_norm")
MEMORY_OPS = (
    *("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    *("dropout_add_layer_norm", "dropout_add_rms_norm"),
)
MODES = ("eager", "torch.compile")


class Meter(Protocol):
    """Bytes of memory, counted from `start`."""

    def start(self) -> None: ...

    def now(self) -> int: ...

    def peak(self) -> int: ...


class CudaMeter:
    """The counters of PyTorch's allocator, which are on the host, so nothing has to be awaited."""

    def start(self) -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


def measure_memory(
    module: nn.Module, sources: Sequence[Tensor], grads: Sequence[Tensor], meter: Meter
) -> dict[str, int]:
    """The memory of one forward and backward of a module on copies of the sources.

    Args:
        module: called with one tensor for each source.
        sources: leaves that require a gradient.
        grads: the gradients of the outputs; a module may write over them.
        meter: counts.
    """
    parameters = list(module.parameters())
    for _ in range(2):  # what is allocated once, such as workspaces, is so in the first round
        meter.start()
        inputs = [source.clone() for source in sources]
        wanted: list[Any] = [*(get_gradient_edge(input) for input in inputs), *parameters]
        outputs = tuple(tensors_in(module(*inputs)))
        del inputs
        held = meter.now()
        found = torch.autograd.grad(outputs, wanted, grads)
        peak = meter.peak()
        del outputs, found, wanted
    return {"held_bytes": held, "peak_bytes": peak}


def time_steps(
    steps: dict[str, Callable[[], Any]], device: torch.device, rounds: int, iterations: int
) -> dict[str, Timing]:
    """Time the variants in turns, so that all see the same clocks; the median round counts.

    Every other round runs in reverse, since clocks drift. A single iteration has no warm-up.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    warmups = min(iterations - 1, 1)
    for index in range(rounds):
        for name in list(steps)[:: 1 if index % 2 == 0 else -1]:
            taken[name].append(eager_us(steps[name], device, warmups, iterations))
    return {name: Timing.of(us, 1, False) for name, us in taken.items()}


def compiled_alone(module: nn.Module) -> Any:
    """The module compiled by Inductor, under a backend that no other one has.

    Variants have the classes of one model, and share what dynamo keeps of each `forward`, unless
    their backends differ. They slowed one another: GPT-2's forward took 10.7 ms with its own norms
    beside variants of the same backend, and 6.0 ms like this (H200).
    """
    from torch._inductor.compile_fx import compile_fx

    def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        return compile_fx(graph, inputs)

    return torch.compile(module, backend=inductor, dynamic=False)


def _builds(mode: str, make: Callable[[Variant], nn.Module]) -> Iterator[tuple[str, Any]]:
    """Each variant's module, or the error that it raised."""
    torch.compiler.reset()  # beyond 8 variants of one function it would run eagerly
    for variant in VARIANTS:
        if mode == "eager" or variant.compiled:
            try:
                module = make(variant)
                yield variant.name, module if mode == "eager" else compiled_alone(module)
            except Exception as error:
                yield variant.name, error


def measure_block(
    op: str,
    hidden: int,
    mode: str,
    device: torch.device,
    meter: Meter,
    sequences: tuple[int, int] = SEQUENCES,
    rounds: int = 11,
    iterations: int = 5,
) -> dict[str, Any]:
    """One row of the block: time and memory of every variant that can be measured."""
    sources, grads = (_draw(2, (*sequences, hidden), device) for _ in range(2))
    sources = [source.requires_grad_() for source in sources]
    figures: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}

    def make(variant: Variant) -> nn.Module:
        block = Block(hidden, lambda: variant.build(op, hidden))
        return block.to(device, torch.bfloat16)

    for name, block in _builds(mode, make):
        try:
            if isinstance(block, Exception):
                raise block
            figures[name] = measure_memory(block, sources, grads, meter)
        except Exception as error:  # the others are still of interest
            figures[name] = {"failed": reason(error)}
            continue
        wanted = [*sources, *block.parameters()]

        def step(block: nn.Module = block, wanted: Sequence[Tensor] = wanted) -> Any:
            return torch.autograd.grad(tuple(tensors_in(block(*sources))), wanted, grads)

        steps[name] = step
    for name, timing in time_steps(steps, device, rounds, iterations).items():
        figures[name] |= {
            "us": timing.us,
            "spread": timing.spread,
            "rounds_us": list(timing.rounds_us),
        }
    return _row(op, hidden, mode, sequences) | {"variants": figures}


def measure_norm(
    op: str,
    hidden: int,
    mode: str,
    device: torch.device,
    meter: Meter,
    sequences: tuple[int, int] = SEQUENCES,
) -> dict[str, Any]:
    """One row of a norm alone: the memory of every variant that has it."""
    count = 1 + ("add_" in op)
    sources = [s.requires_grad_() for s in _draw(count, (*sequences, hidden), device)]
    figures: dict[str, dict[str, Any]] = {}
    for name, norm in _builds(mode, lambda v: v.build(op, hidden).to(device, torch.bfloat16)):
        try:
            if isinstance(norm, Exception):
                raise norm
            grads = _draw(count, (*sequences, hidden), device)
            figures[name] = measure_memory(norm, sources, grads, meter)
        except Exception as error:
            figures[name] = {"failed": reason(error)}
    return _row(op, hidden, mode, sequences) | {"variants": figures}


def _row(op: str, hidden: int, mode: str, sequences: tuple[int, int]) -> dict[str, Any]:
    return {"op": op, "hidden": hidden, "mode": mode, "rows": sequences[0] * sequences[1]}


def _draw(count: int, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--hidden", type=int, action="append", help=f"default: {HIDDEN}")
    parser.add_argument("--no-compile", action="store_true", help="only eager: much faster")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.block needs a GPU: PyTorch sees no CUDA device here")
    device, meter = torch.device("cuda"), CudaMeter()
    peers = select(["PyTorch", "torch.compile", "Liger"])
    result: dict[str, Any] = {
        "environment": report.environment(device, peers),
        "blocks": [],
        "norms": [],
    }

    def keep(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        report.write_json(options.json, result)
        for name, figures in row["variants"].items():
            if "failed" in figures:
                print(f"  {name}: not measured: {figures['failed']}", file=sys.stderr)

    sizes = options.hidden or HIDDEN
    for mode in MODES[:1] if options.no_compile else MODES:  # the quick rows first
        for op in MEMORY_OPS:  # at one size: it is in proportion to the size
            print(f"{mode}: {op} alone, hidden {max(sizes)}", file=sys.stderr, flush=True)
            keep("norms", measure_norm(op, max(sizes), mode, device, meter))
        for op, hidden in itertools.product(BLOCK_OPS, sizes):
            print(f"{mode}: block with {op}, hidden {hidden}", file=sys.stderr, flush=True)
            keep("blocks", measure_block(op, hidden, mode, device, meter))
    print(tables(result))


if __name__ == "__main__":
    main()
