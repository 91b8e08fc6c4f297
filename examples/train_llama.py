"""Trains one small Llama with the norms of torch, of fused_op and, if installed, of Liger.

    python examples/train_llama.py

A decoder as Llama's, RMSNorm, rotary embedding, SwiGLU and causal attention, with float32
parameters under bf16 autocast, so that the norms read bf16 rows and float32 weights. It learns the
bytes of Python's own standard library. All variants begin with the same weights and see the same
batches, taking turns at every step, so that all meet the same clocks. Prints the losses, the step
times and, on a GPU, the memory of a step; plots the curves; fails if those of torch and fused_op
differ by more than the bound.

The bound is the loss's own step-to-step spread: the root mean square of its changes from one step
to the next, over the later half of the run. It comes from the batches, and two runs that see theirs
in another order differ by about as much at every step; what only rounds differently must not. How
far roundings alone drive two runs apart, a second run of torch's norms shows, with the sequences of
every batch in reverse: the same loss, and the gradients summed in another order.

The optimizer is Llama's (Touvron et al. 2023, section 2.2): AdamW of betas 0.9 and 0.95, gradients
clipped to a norm of 1. Without clipping, and with a second beta of 0.999, roundings grew too fast
at a batch of 128: on an H200 they drove two runs of torch's norms apart by 0.047 from step 54 on,
where the bound was 0.056 and 0.065, and fused_op kept to it in one run and not in the next.

The default model is so small that a large GPU waits for Python most of the time: step times are the
host's then. `--batch 128` or `--width 1024` leave it more to do, `--compile` fewer kernels.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import SMALL, Llama, Size, read_source
from torch import Tensor, nn

from fused_op import convert

NATIVE, REVERSED, FUSED, LIGER = "torch.nn.RMSNorm", "batches reversed", "fused_op", "Liger"
LEARNING_RATE, WARMUP, BETAS, MOST_NORM = 1e-3, 20, (0.9, 0.95), 1.0


def use_liger(model: nn.Module) -> None:
    """Replaces the norms by LigerRMSNorm, which keep the weights; raises where Liger cannot run."""
    from liger_kernel.transformers import LigerRMSNorm

    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, nn.RMSNorm):
                replacement = LigerRMSNorm(norm.weight.numel(), eps=norm.eps)
                replacement.weight = norm.weight
                replacement(torch.ones(2, norm.weight.numel(), device=norm.weight.device))
                setattr(module, name, replacement)


@dataclass
class Run:
    """A model in training, with what has been seen of it so far."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    reverse: bool = False
    losses: list[Tensor] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    peak_bytes: int | None = None

    def step(self, batch: Tensor, rate: float) -> None:
        device = batch.device
        begin = mark(device)
        (group,) = self.optimizer.param_groups
        group["lr"] = rate
        batch = batch.flip(0) if self.reverse else batch
        with torch.autocast(device.type, torch.bfloat16):
            logits = self.forward(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(group["params"], MOST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.marks.append((begin, mark(device)))
        self.losses.append(loss.detach())

    def report(self) -> dict[str, Any]:
        later = self.marks[len(self.marks) // 2 :]
        times = [
            (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)
            for begin, end in later
        ]
        losses = torch.stack(self.losses).tolist()
        return {"losses": losses, "ms": statistics.median(times), "peak_bytes": self.peak_bytes}


def mark(device: torch.device) -> Any:
    """This moment: of the GPU's work, or of the clock on the wall."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def make_runs(size: Size, device: torch.device, options: argparse.Namespace) -> dict[str, Run]:
    torch.manual_seed(options.seed)
    start = Llama(size).to(device)
    print(f"{sum(p.numel() for p in start.parameters()):,} parameters, {size}")
    models = {name: copy.deepcopy(start) for name in (NATIVE, REVERSED, FUSED)}
    print(convert(models[FUSED]))
    if device.type == "cuda":
        models[LIGER] = copy.deepcopy(start)
        try:
            use_liger(models[LIGER])
        except Exception as error:  # not installed, or whatever keeps it from running here
            print(f"without Liger: {error}")
            del models[LIGER]
    return {
        name: Run(
            torch.compile(model, dynamic=False) if options.compile else model,
            torch.optim.AdamW(model.parameters(), betas=BETAS, fused=True),
            reverse=name == REVERSED,
        )
        for name, model in models.items()
    }


def train(runs: dict[str, Run], text: Tensor, size: Size, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, size.batch, 1)
    starts = torch.randint(len(text) - size.context, shape, generator=generator).to(text.device)
    window = torch.arange(size.context + 1, device=text.device)
    for step in range(steps):
        batch = text[starts[step] + window].long()
        rate = LEARNING_RATE * min(1, (step + 1) / WARMUP)
        for run in runs.values():
            before = 0
            if step == steps - 1 and text.is_cuda:  # the allocator's books need no waiting
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            run.step(batch, rate)
            if before:
                run.peak_bytes = torch.cuda.max_memory_allocated() - before
    if text.is_cuda:
        torch.cuda.synchronize()


def compare(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The bound, and the largest difference of each curve from that of torch.nn.RMSNorm."""
    native = reports[NATIVE]["losses"]
    later = native[len(native) // 2 :]
    changes = [(b - a) ** 2 for a, b in itertools.pairwise(later)]
    differences = {
        name: max(abs(a - b) for a, b in zip(report["losses"], native, strict=True))
        for name, report in reports.items()
        if name != NATIVE
    }
    return {"bound": statistics.mean(changes) ** 0.5, "differences": differences}


def plot(reports: dict[str, dict[str, Any]], bound: float, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot is drawn")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
    )
    native = reports[NATIVE]["losses"]
    for i, (name, report) in enumerate(reports.items()):
        label = f"{name}, {report['ms']:.2f} ms a step"
        above.plot(report["losses"], label=label, color=f"C{i}", linewidth=1)
        if name != NATIVE:
            apart = [abs(a - b) for a, b in zip(report["losses"], native, strict=True)]
            below.semilogy(apart, color=f"C{i}", linewidth=1)
    below.axhline(bound, color="black", linestyle="--", label="bound")
    above.set_ylabel("loss (nats per byte)")
    above.legend()
    below.set_ylabel(f"apart from {NATIVE}")
    below.legend()
    below.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"The loss curves are in {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a quick trial")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}")
    parser.add_argument("--compile", action="store_true", help="torch.compile every variant")
    parser.add_argument("--output", type=Path, default=Path("train_llama.png"), metavar="PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error("--steps must be at least 10: the bound comes from the changes of the loss")
    return options


def main() -> None:
    options = parse_options()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    given = {name: getattr(options, name) for name in asdict(Size())}
    base = asdict(SMALL if options.small else Size())
    size = Size(**base | {name: value for name, value in given.items() if value is not None})
    text = read_source().to(device)
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(f"{len(text):,} bytes of source; {environment}")
    runs = make_runs(size, device, options)
    train(runs, text, size, options.steps, options.seed)

    reports = {name: run.report() for name, run in runs.items()}
    compared = compare(reports)
    bound, differences = compared["bound"], compared["differences"]
    print(
        f"{'':<20}{'first loss':>12}{'last loss':>12}{'difference':>12}{'ms a step':>12}{'MiB':>9}"
    )
    for name, report in reports.items():
        first, *_, last = report["losses"]
        peak = f"{report['peak_bytes'] / 2**20:9.1f}" if report["peak_bytes"] else ""
        difference = f"{differences[name]:12.2e}" if name in differences else f"{'':12}"
        print(f"{name:<20}{first:12.4f}{last:12.4f}{difference}{report['ms']:12.3f}{peak}")
    print(
        f"Largest difference of fused_op's curve from torch's: {differences[FUSED]:.2e}; by the "
        f"order of summation alone: {differences[REVERSED]:.2e}; bound: {bound:.2e}"
    )
    plot(reports, bound, options.output)
    if options.json:
        asked = {name: getattr(options, name) for name in ("steps", "seed", "compile")}
        result = {"environment": environment, "size": asdict(size), **asked, **compared}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result | {"variants": reports}, indent=1) + "\n")
    if not differences[FUSED] <= bound:  # also a NaN
        sys.exit("The loss curves differ by more than the bound.")


if __name__ == "__main__":
    main()
