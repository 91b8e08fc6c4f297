"""DDP, FSDP and sequence parallelism: training in several processes equals that in one.

On GPUs as test_distributed.py. Catches a parameter whose gradient is summed twice or not at
all, and a block whose norms see another shard than its matrices.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.distributed.is_available() or sys.platform == "win32":
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from fused_op import FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm
from tests.case import SEED
from tests.contexts.ranks import ranks_fixture

ROOT = Path(__file__).parents[2]
SHAPE = (5, 3, 7)  # no dimension is a multiple of two: shards differ in size
BATCH, SEQUENCE, HIDDEN, WHOLE, PARTIAL = Shard(0), Shard(1), Shard(2), Replicate(), Partial()

two_ranks, four_ranks = ranks_fixture(2), ranks_fixture(4)

WIDTH, HEADS, STEPS = 16, 4, 3


class Block(nn.Module):
    """A pre-norm transformer block; its last norm adds the residual itself."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = FusedLayerNorm(WIDTH), FusedRMSNorm(WIDTH)
        self.q, self.k, self.v, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.final_norm = FusedAddRMSNorm(WIDTH)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (  # as many heads as this rank has
            part(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(-2))
        return self.final_norm(self.down(self.up(self.mlp_norm(x)).relu()), x)[0]


def sequence_parallel(block, mesh):
    """The residual stream is sharded along the sequence, heads and the MLP by their features."""
    whole = {"input_layouts": SEQUENCE}
    parts = {"output_layouts": SEQUENCE, "use_local_output": False}
    plan = {
        "attention_norm": SequenceParallel(use_local_output=False),
        "mlp_norm": SequenceParallel(use_local_output=False),
        "q": ColwiseParallel(**whole),
        "k": ColwiseParallel(**whole),
        "v": ColwiseParallel(**whole),
        "project": RowwiseParallel(**parts),
        "up": ColwiseParallel(**whole),
        "down": RowwiseParallel(**parts),
    }
    distribute_module(block.final_norm, mesh)  # SequenceParallel is for one input
    return parallelize_module(block, mesh, plan)


def train(model, batch, place=lambda t: t):
    """The parameters and their gradients after some steps, gathered."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(place(batch))
        loss = (output * place(batch.roll(1, -1))).sum() / (batch.shape[1] * WIDTH)
        (loss / output.shape[0]).backward()
        optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad)]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def check_training(device, mesh_shape, names, parallelize, place, rows):
    """`rows`: the mesh dimensions along which each rank has a part of the batch."""
    if "fsdp" in parallelize.__name__ and device == "cpu" and torch.__version__ < "2.8":
        return  # its gradients are wrong with gloo there, whatever the norm
    torch.manual_seed(SEED)
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=names)
    block, batch = Block().to(device), torch.randn(4, 6, WIDTH, device=device)
    alone = train(copy.deepcopy(block), batch)
    for name in rows:
        batch = batch.chunk(mesh[name].size())[mesh[name].get_local_rank()]
    together = train(parallelize(block, mesh), batch, lambda t: place(t, mesh))
    for ours, theirs in zip(together, alone, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def as_it_is(tensor, mesh):
    return tensor


def by_sequence(tensor, mesh):
    return distribute_tensor(tensor, mesh["tp"], (SEQUENCE,))


def ddp(block, mesh):
    return DistributedDataParallel(block)


def fsdp(block, mesh):
    for norm in (block.attention_norm, block.mlp_norm):  # gathered on their own, and with the rest
        fully_shard(norm, mesh=mesh["dp"])
    return fully_shard(block, mesh=mesh["dp"])


def tensor_parallel(block, mesh):
    return sequence_parallel(block, mesh["tp"])


def fsdp_and_tensor_parallel(block, mesh):
    return fsdp(tensor_parallel(block, mesh), mesh)


@pytest.mark.parametrize("parallelize", [ddp, fsdp], ids=lambda f: f.__name__)
def test_data_parallel_training(parallelize, ranks_2):
    ranks_2.run(check_training, (2,), ("dp",), parallelize, as_it_is, ("dp",))


def test_sequence_parallel_training(ranks_2):
    ranks_2.run(check_training, (2,), ("tp",), tensor_parallel, by_sequence, ())


class Branches(nn.Module):
    """Two norms before one matrix, of which a call may leave out the second."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = FusedLayerNorm(WIDTH, **options), FusedRMSNorm(WIDTH, **options)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, both=True):
        return self.linear(self.first(x) + (self.second(x) if both else 0))


def gradients(model, batch, both, name="grad"):
    """Of every parameter, 0 where it has none; `name` is the attribute of the norms' gradients."""
    model(batch, both).square().mean().backward()
    found = {}
    for key, parameter in getattr(model, "module", model).named_parameters():
        gradient = getattr(parameter, "grad" if key.startswith("linear") else name)
        found[key] = torch.zeros_like(parameter) if gradient is None else gradient
    return found


def check_unused_parameters(device, ranks_without):
    """Some ranks leave out a norm: its gradient is the mean over all, with 0 of those ranks."""
    torch.manual_seed(SEED)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = Branches().to(device)
    batches = torch.randn(size, 4, 6, WIDTH, device=device)
    alone = [
        gradients(copy.deepcopy(model), batch, i not in ranks_without)
        for i, batch in enumerate(batches)
    ]
    ids = [rank] if device == "cuda" else None
    together = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True)
    found = gradients(together, batches[rank], rank not in ranks_without)
    for key, gradient in found.items():
        assert_close(gradient, sum(one[key] for one in alone) / size, rtol=1e-4, atol=1e-6)


def check_main_grads(device):
    """DDP leaves the norms alone: their hooks sum main_grad over the ranks, as in Megatron-LM."""
    torch.manual_seed(SEED)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = Branches(fuse_wgrad_accumulation=True).to(device)
    norms = {k: p for k, p in model.named_parameters() if not k.startswith("linear")}
    for parameter in norms.values():
        parameter.main_grad = torch.zeros_like(parameter)
    batches = torch.randn(size, 4, 6, WIDTH, device=device)
    plain = Branches().to(device)
    plain.load_state_dict(model.state_dict())
    alone = [gradients(copy.deepcopy(plain), batch, True) for batch in batches]

    def reduce(parameter):
        assert parameter.grad_added_to_main_grad
        torch.distributed.all_reduce(parameter.main_grad)

    for parameter in norms.values():
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(reduce)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(norms))
    together = DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)
    found = gradients(together, batches[rank], True, "main_grad")
    for key, gradient in found.items():
        scale = 1 if key in norms else size  # DDP takes the mean, the hook the sum
        assert_close(gradient, sum(one[key] for one in alone) / scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks_without", [(), (1,), (0, 1)], ids=str)
def test_unused_parameters(ranks_without, ranks_2):
    """Catches a norm whose node DDP waits for, or whose gradient comes twice."""
    ranks_2.run(check_unused_parameters, ranks_without)


def test_main_grads(ranks_2):
    """Catches a hook that runs before the sums are in main_grad."""
    ranks_2.run(check_main_grads)


@pytest.mark.slow
def test_fsdp_with_sequence_parallel_training(ranks_4):
    names = ("dp", "tp")
    ranks_4.run(check_training, (2, 2), names, fsdp_and_tensor_parallel, by_sequence, ("dp",))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_example(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *torchrun, "examples/distributed_sequence_parallel.py"],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **hidden},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "equal to one process: " in result.stdout
