"""``override_torch`` around whole models: every norm runs our kernels, and nothing else does."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

import fused_op
from tests.contexts.override import NORMS, RMS_IS_AN_OP

pytestmark = [
    pytest.mark.filterwarnings("error:fused_op"),
    pytest.mark.usefixtures("override_ends"),
]


def test_transformer_encoder_by_its_fast_path(device: str) -> None:
    """Catches a C++ caller that still runs PyTorch's kernel, in inference and in training."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 16, device=device)
    for mode in (model.eval(), model.train()):
        with torch.set_grad_enabled(mode.training):
            before = mode(x)
            with fused_op.override_torch() as override, profile() as trace:
                inside = mode(x)
        names = [event.name for event in trace.events()]
        is_fast = any("_transformer_encoder_layer_fwd" in name for name in names)
        assert is_fast is not mode.training
        assert override.report().ours["native_layer_norm"] == 4
        torch.testing.assert_close(inside, before, rtol=1e-5, atol=1e-5)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {  # of transformers: its configuration, and its inputs
    "Bert": (SIZES | {"vocab_size": 32, "intermediate_size": 32}, {"input_ids": (2, 8)}),
    "ViT": (
        SIZES | {"intermediate_size": 32, "image_size": 16, "patch_size": 8},
        {"pixel_values": (2, 3, 16, 16)},
    ),
    "Whisper": (
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        | {"vocab_size": 32, "num_mel_bins": 8, "max_source_positions": 8, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        {"input_features": (2, 8, 16), "decoder_input_ids": (2, 8)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, device: str) -> None:
    """Catches a norm of a real model that still runs PyTorch's kernel, in either direction."""
    transformers = pytest.importorskip("transformers")
    values, shapes = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).to(device).eval()
    inputs = {
        key: torch.arange(16, device=device).view(shape) % 32
        if key.endswith("ids")
        else torch.randn(shape, device=device)
        for key, shape in shapes.items()
    }

    def step() -> list[Tensor]:
        model.zero_grad()
        output = model(**inputs)[0]
        output.square().mean().backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    before = step()
    with fused_op.override_torch() as override, profile() as trace:
        inside = step()
    torch.testing.assert_close(inside, before, rtol=1e-3, atol=1e-4)
    assert all(map(torch.equal, step(), before))
    events = [event.name for event in trace.events()]
    calls = events.count("aten::native_layer_norm")
    assert calls >= 4 and events.count("fused_op::norm_forward") == calls
    assert override.report().ours == {
        "native_layer_norm": calls,
        "native_layer_norm_backward": events.count("aten::native_layer_norm_backward"),
    }


def test_profiler_shows_our_ops_alone(device: str) -> None:
    """Catches a norm that runs by other operations than ours."""
    model = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)) if RMS_IS_AN_OP else nn.LayerNorm(8)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    model = model.to(device)
    with fused_op.override_torch(), profile() as trace:
        model(x).sum().backward()

    def is_below(event: FunctionEvent, name: str) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name == name or is_below(parent, name))

    forwards = [e for e in trace.events() if e.name == "fused_op::norm_forward"]
    backwards = [e for e in trace.events() if e.name == "fused_op::norm_backward"]
    assert len(forwards) == len(backwards) == len(NORMS)
    assert all(is_below(e, "aten::native_layer_norm") for e in forwards[:1])
    elementary = {"aten::pow", "aten::mean", "aten::rsqrt", "aten::mul"}
    assert not elementary & {e.name for e in trace.events()}
