"""``convert`` of a model that has no memory yet, as large ones are built: sharded, filled, trained.

What is proved of it on the CPU has to be what is proved of the same model with memory.
"""

import pytest
import torch
from torch import nn

from fused_op import convert, revert
from tests.contexts.ranks import ranks_fixture
from tests.norms import LlamaNorm

transformers = pytest.importorskip("transformers")
two_ranks = ranks_fixture(2)


def llama(device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    } | sizes
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(dtype)


class OverChannels(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Centred(nn.Module):
    """Refused: it is a norm of neither kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


def norms() -> nn.Module:
    without_parameters = nn.LayerNorm(16, elementwise_affine=False)
    planes = nn.LayerNorm((2, 8), dtype=torch.bfloat16)
    others = nn.RMSNorm(16), LlamaNorm(), Centred(), nn.GroupNorm(2, 16)
    return nn.ModuleList([nn.LayerNorm(16), without_parameters, planes, *others])


def test_verdicts_are_those_of_a_model_with_memory() -> None:
    """Catches a norm that is converted or refused for what the device alone has done to it."""
    model = norms().to("meta")
    before = list(model.parameters())
    report = convert(model)
    assert report == convert(norms())
    assert len(report.converted) == 6 and len(report.skipped) == 1
    assert all(a is b and a.is_meta for a, b in zip(before, model.parameters(), strict=True))
    assert len(revert(model).converted) == 6


def test_values_after_it_has_memory() -> None:
    """Catches a stand-in of the comparison that is left in the model."""
    reference, model = llama("cpu"), llama("meta")
    assert len(convert(model).converted) == 5
    model.load_state_dict(reference.state_dict(), assign=True)
    ids = torch.arange(32).view(2, 16)
    model.model.rotary_emb = reference.model.rotary_emb  # its buffers are in no state_dict
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5)
    convert(reference)
    assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_large_model() -> None:
    """Catches a conversion that gives a model memory: this one would take 16 GB."""
    model = llama(
        "meta",
        torch.bfloat16,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    report = convert(model)
    assert len(report.converted) == 65 and not report.skipped
    assert all(p.is_meta for p in model.parameters())


def sharded_training(device: str) -> None:
    """Built on meta, converted, sharded, filled, trained: as the original in one process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(device, (ranks,))  # not that of a GPU beside the CPU
    reference, model = llama("cpu").to(device), llama("meta")
    assert len(convert(model).converted) == 5
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    model.model.rotary_emb = reference.model.rotary_emb
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, reference.state_dict(), options=options)
    ids = torch.arange(64, device=device).view(4, 16) % 32
    losses = []
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(3):
            loss = each(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4)
    assert losses[2] < losses[0]


@pytest.mark.skipif(torch.__version__ < "2.8", reason="FSDP2 with gloo has wrong gradients there")
def test_fsdp2(ranks_2) -> None:
    """Catches a class that fully_shard cannot take over, and parameters that it loses."""
    ranks_2.run(sharded_training)


def test_convert_where_meta_is_the_default_device() -> None:
    """Catches a tensor of the proof that lands on the default device."""
    for device in ("meta", "cpu"):
        model = nn.ModuleList([norms(), OverChannels(8)]).to(device)
        with torch.device("meta"):
            report = convert(model)
        assert len(report.converted) == 7 and len(report.skipped) == 1
