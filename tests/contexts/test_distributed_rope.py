"""DTensors that are normalised and rotated: several processes give the numbers of one.

Catches heads that are rotated by the angles of another rank's tokens, and a gradient of weights
that is summed over too many ranks or too few.
"""

import sys

import pytest
import torch

if not torch.distributed.is_available() or sys.platform == "win32":
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from fused_op import fused_rms_norm_rope
from tests.case import generator
from tests.contexts.ranks import mesh_of, ranks_fixture

two_ranks = ranks_fixture(2)
SHAPE = BATCH, SEQUENCE, HEADS, COLS = 3, 6, 4, 16


def call_on_shards(device, dim, own, distributes_angles):
    """Shards along one dimension; angles of the whole sequence, or of this rank's tokens."""
    mesh = mesh_of(device, (2,))
    g = generator("cpu", SHAPE)
    x, dy = (torch.randn(SHAPE, generator=g).to(device) for _ in range(2))
    weight = torch.randn((HEADS, COLS) if own else (COLS,), generator=g).to(device)
    theta = torch.randn(SEQUENCE, COLS // 2, generator=g).to(device)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    y = fused_rms_norm_rope(leaves[0], theta.cos(), theta.sin(), leaves[1], 1e-6)
    expected = [y, *torch.autograd.grad(y, leaves, dy)]

    x, dy = (distribute_tensor(t, mesh, [Shard(dim)]) for t in (x, dy))
    weight = distribute_tensor(weight, mesh, [Replicate()])
    angles = [theta.cos(), theta.sin()]
    if distributes_angles:
        angles = [distribute_tensor(t, mesh, [Shard(0)]) for t in angles]
    elif dim == 1:
        angles = [t.chunk(2)[mesh.get_rank()] for t in angles]
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = fused_rms_norm_rope(leaves[0], *angles, leaves[1], 1e-6)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    for mine, right in zip(found, expected, strict=True):
        assert_close(mine.full_tensor(), right)


@pytest.mark.parametrize("distributes_angles", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards(ranks_2, dim, own, distributes_angles):
    if dim == 1 and distributes_angles:  # of all tokens, on each rank
        with pytest.raises(AssertionError, match="cos must have shape"):
            ranks_2.run(call_on_shards, dim, own, distributes_angles)
    else:
        ranks_2.run(call_on_shards, dim, own, distributes_angles)
