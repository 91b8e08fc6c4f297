"""benchmarks/sharded.py measures what it says, on CPUs at a tiny size."""

import pytest
import torch

from benchmarks import sharded, tables
from benchmarks.model_variants import ADDITIONS, CONVERTED, NATIVE
from tests.contexts.ranks import ranks_fixture

pytest.importorskip("transformers")
ranks_2 = ranks_fixture(2)


def measured(device: str) -> None:
    """Catches a variant that is left out or not converted, and a loss that does not fall."""
    place = torch.device(device, torch.distributed.get_rank()) if device == "cuda" else "cpu"
    result = sharded.measure(sharded.LLAMA.small(), torch.device(place), None, 4, 2, 1)
    variants = result["variants"]
    assert list(variants) == [NATIVE, CONVERTED, ADDITIONS] and result["size"]["ranks"] == 2
    assert variants[CONVERTED]["note"] == "5 norms"
    for found in variants.values():
        losses = found["losses"]
        assert len(losses) == 4 and losses == sorted(losses, reverse=True)
        assert found["ms"] > 0 and len(found["rounds_us"]) == 2
    for found in variants.values():
        found["peak_bytes"] = 0
    text = tables.training_table(result, "Here.")
    assert "ranks 2" in text and text.count("\n| ") == 4


def another_computation(device: str) -> None:
    """Catches a comparison of loss curves that lets everything pass."""
    place = torch.device(device, torch.distributed.get_rank()) if device == "cuda" else "cpu"
    tolerance, sharded.TOLERANCE = sharded.TOLERANCE, -1.0
    try:
        with pytest.raises(ValueError, match="its losses are not the native ones"):
            sharded.measure(sharded.LLAMA.small(), torch.device(place), None, 1, 1, 1)
    finally:
        sharded.TOLERANCE = tolerance


@pytest.mark.skipif(torch.__version__ < "2.8", reason="FSDP2 with gloo has wrong gradients there")
@pytest.mark.parametrize("check", [measured, another_computation], ids=lambda f: f.__name__)
def test_two_ranks(ranks_2, check):
    ranks_2.run(check)
