"""Variants on DTensors: two processes give the numbers of one.

Catches a shard that is normalised with another shard's statistics, arguments that are sharded in
different ways, and a gradient of a weight that is summed twice or not at all. A variant without
rules for DTensors refuses them.
"""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fused_op import fused_channels_first_layer_norm, fused_group_norm
from tests.calls import loss, outputs
from tests.contexts.ranks import mesh_of, ranks_fixture
from tests.ops import F32, Pair
from tests.variants.table import VARIANTS

two_ranks = ranks_fixture(2)
PLACEMENTS = {"batch": Shard(0), "sequence": Shard(1), "hidden": Shard(2), "whole": Replicate()}


def check_variant(device, number, first, others):
    variant = VARIANTS[number]
    options = variant.options[0]
    mesh = mesh_of(device, (2,))
    inputs = variant.arguments((5, 3, 8), Pair(F32, F32), device)
    placed = {}
    for name, t in inputs.items():
        how = Replicate() if name in variant.parameters else first if name == "input" else others
        placed[name] = distribute_tensor(t, mesh, [how]).requires_grad_()
    alone = {name: t.requires_grad_() for name, t in inputs.items()}
    results = []
    for leaves in (alone, placed):
        found = variant.fused(**leaves, **options)
        grads = torch.autograd.grad(loss(found), list(leaves.values()))
        results.append((*outputs(found), *grads))
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine.full_tensor(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("first", PLACEMENTS)
@pytest.mark.parametrize("others", PLACEMENTS)
def test_variants_on_shards(first, others, ranks_2):
    for number, variant in enumerate(VARIANTS):
        if "turned" in variant.options[0]:
            continue  # each rank has angles of its own: tests/contexts/test_distributed_rope.py
        if first == others or len(variant.rows) > 1:
            ranks_2.run(check_variant, number, PLACEMENTS[first], PLACEMENTS[others])


def check_images(device):
    mesh = mesh_of(device, (2,))
    images = distribute_tensor(torch.randn(2, 3, 4, 4, device=device), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        fused_channels_first_layer_norm(images)
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        fused_group_norm(images, 3)


def test_images_have_no_rules(ranks_2):
    ranks_2.run(check_images)
