"""A model under FSDP2, native beside converted, on as many GPUs as there are ranks:

    torchrun --nproc-per-node 2 -m benchmarks.sharded --json FILE

A Llama of transformers with random weights, converted before it is sharded by layers: float32
parameters, gathered in bf16; gradients are reduced in float32. A step is forward, loss, backward
and AdamW. Each variant first trains for `STEPS` steps from the same weights on the same tokens,
which gives its loss curve; then the variants take turns, so that all see the same clocks. `--small`
takes a tiny size, to try the program on CPUs with gloo; its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from . import report
from .block import CudaMeter, Meter, time_steps
from .model_variants import MODELS, NATIVE, VARIANTS, Model, Variant
from .run import default_device

LLAMA = next(model for model in MODELS if model.name == "Llama 1B")
STEPS, LEARNING_RATE = 20, 1e-4
ROUNDS, ITERATIONS = 7, 5
# Of a loss, in bf16: a curve that differs by more is that of another computation.
TOLERANCE = 0.01


class Training:
    """A variant's model, sharded, with its optimizer; a call is a step and returns its loss."""

    def __init__(self, variant: Variant, size: Model, device: torch.device) -> None:
        built = variant.change(size.build(device).float(), "eager")
        self.model = shard(built.model, device)
        self.note = built.note()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        ids = size.inputs(device)["input_ids"]
        ids = (ids + dist.get_rank()) % size.vocabulary  # every rank has tokens of its own
        self.inputs = {"input_ids": ids, "labels": ids}

    def __call__(self) -> Tensor:
        loss: Tensor = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def curve(self, steps: int) -> list[float]:
        """The losses of the next steps, each the mean over the ranks."""
        losses = torch.stack([self() for _ in range(steps)]).float()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def measure(
    size: Model, device: torch.device, meter: Meter | None, steps: int, rounds: int, iterations: int
) -> dict[str, Any]:
    """Loss curve, time of a step and peak of memory of every variant but Liger's.

    Raises:
        ValueError: a loss differs from the native one.
    """
    trainings = {v.name: Training(v, size, device) for v in VARIANTS if v.name != "Liger"}
    figures: dict[str, dict[str, Any]] = {}
    for name, training in trainings.items():
        figures[name] = {"note": training.note, "losses": training.curve(steps)}
        if meter is not None:
            meter.start()
            training()
            figures[name]["peak_bytes"] = meter.peak()
    differences = {}
    native = figures[NATIVE]["losses"]
    for name, found in figures.items():
        pairs = list(zip(found["losses"], native, strict=True))
        if not all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs):  # also a NaN
            raise ValueError(f"{name}: its losses are not the native ones: {pairs}")
        if name != NATIVE:
            differences[name] = max(abs(a - b) for a, b in pairs)
    for name, timing in time_steps(trainings, device, rounds, iterations).items():
        figures[name] |= {
            "ms": timing.us / 1e3,
            "spread": timing.spread,
            "rounds_us": list(timing.rounds_us),
        }
    shape = {"ranks": dist.get_world_size()} | dataclasses.asdict(size)
    return {"size": shape, "steps": steps, "variants": figures, "differences": differences}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.sharded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="a tiny size, to try the program")
    options = parser.parse_args()
    cuda = default_device().type == "cuda"
    if not cuda and not options.small:
        sys.exit("benchmarks.sharded needs GPUs, or --small: PyTorch sees no CUDA device here")
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    size = LLAMA.small() if options.small else LLAMA
    steps, rounds, iterations = (3, 2, 1) if options.small else (STEPS, ROUNDS, ITERATIONS)
    result = measure(size, device, CudaMeter() if cuda else None, steps, rounds, iterations)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        command = f"torchrun --nproc-per-node {ranks} -m benchmarks.sharded --json {options.json}"
        environment = report.environment(device, (), command)
        environment["peers"] = {"transformers": importlib.metadata.version("transformers")}
        report.write_json(options.json, {"environment": environment, **result})
        for name, found in result["variants"].items():
            print(f"{name}: {found['ms']:.2f} ms ± {100 * found['spread']:.1f} %, {found['note']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
