"""Trains a transformer block sequence-parallel, and the same block in one process beside it.

    torchrun --nproc-per-node 2 examples/distributed_sequence_parallel.py

Between the parallel linears every rank keeps its part of the sequence, so that the norms and the
residual stream cost each rank a part of the time and of the memory. The norms communicate nothing,
forward or backward; only the gradients of their parameters are summed over the ranks, where the
optimizer reads them. Runs on GPUs with NCCL if there is one for each rank, else on the CPU with
gloo. Prints both losses of each step, and fails if the parameters differ at the end by more than
rounding explains.
"""

from __future__ import annotations

import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fused_op import FusedLayerNorm, FusedRMSNorm

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 8, 32
STEPS, LEARNING_RATE = 20, 0.1
SEQUENCE = Shard(1)  # of [batch, sequence, width]


class Block(nn.Module):
    """Pre-norm attention and MLP. It does not know that it is parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = FusedLayerNorm(WIDTH), FusedRMSNorm(WIDTH)
        self.q, self.k, self.v, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (self.split_heads(part(h)) for part in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def split_heads(self, x: Tensor) -> Tensor:
        """To [batch, head, sequence, width of a head], with as many heads as there are here."""
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def parallelize(block: Block, mesh: DeviceMesh) -> nn.Module:
    """Norms by sequence, attention by heads, the MLP by its features."""
    gather = ColwiseParallel(input_layouts=SEQUENCE)
    scatter = RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False)
    plan = {name: gather for name in ("q", "k", "v", "up")}
    plan |= {name: scatter for name in ("project", "down")}
    # Its output stays a DTensor: the linears gather it, and the sum of it and a branch is one too.
    plan |= {n: SequenceParallel(use_local_output=False) for n in ("attention_norm", "mlp_norm")}
    return parallelize_module(block, mesh, plan)


def train_step(block: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, to: Tensor) -> float:
    loss = (block(x) - to).square().sum() / to.numel()  # gloo sums over ranks, and has no mean
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return gather(loss.detach()).item()


def gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (size,))

    torch.manual_seed(0)  # the same block and data on every rank
    alone = Block().to(device)
    together = parallelize(copy.deepcopy(alone), mesh)
    optimizers = [torch.optim.SGD(m.parameters(), LEARNING_RATE) for m in (alone, together)]
    for step in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
        to = x.roll(1, dims=1)  # each position learns what was before it
        loss = train_step(alone, optimizers[0], x, to)
        x, to = (distribute_tensor(t, mesh, [SEQUENCE]) for t in (x, to))
        parallel_loss = train_step(together, optimizers[1], x, to)
        if rank == 0:
            print(f"step {step + 1:2}: loss {loss:.6f} alone, {parallel_loss:.6f} on {size} ranks")

    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    difference = max((p - gather(q)).abs().max().item() for p, q in pairs)
    time.sleep(0.5)  # gloo's threads still free tensors: they may hang or abort a process that ends
    dist.destroy_process_group()
    # Parameters are about 1; each step may move them apart by some roundings of the gradients.
    limit = STEPS * 16 * torch.finfo(torch.float32).eps
    if difference > limit:
        raise SystemExit(f"the parameters differ by {difference:.2g}, more than {limit:.2g}")
    if rank == 0:
        print(f"equal to one process: no parameter differs by more than {difference:.2g}")


if __name__ == "__main__":
    main()
