"""convert and revert on the models of transformers, with random weights.

Catches a norm of a well-known model that is no longer found, is converted although it computes
something else, or moves the model's outputs and gradients away from the truth by more than the
roundings of its dtype; and a revert that does not give the original bits back.
"""

import pytest
import torch

from tests.case import generator
from tests.conversion import check_conversion
from tests.norms import randomize, rows
from tests.ops import BF16, F32

LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA_NORMS = [f"layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
LLAMA_NORMS.append("norm")
QWEN3_NORMS = [f"layers.{i}.self_attn.{n}_norm" for i in (0, 1) for n in ("q", "k")]
T5_NORMS = [f"encoder.block.{i}.layer.{j}.layer_norm" for i in (0, 1) for j in (0, 1)]
T5_NORMS += [f"decoder.block.{i}.layer.{j}.layer_norm" for i in (0, 1) for j in (0, 1, 2)]
T5_NORMS += ["encoder.final_layer_norm", "decoder.final_layer_norm"]

# Name of the model -> its config, the class of its norms, their names
ARCHITECTURES = {
    "GPT2": (
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
        "LayerNorm",
        [f"h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)] + ["ln_f"],
    ),
    "Llama": (LLAMA, "LlamaRMSNorm", LLAMA_NORMS),
    "Mistral": (LLAMA, "MistralRMSNorm", LLAMA_NORMS),
    "Qwen2": (LLAMA, "Qwen2RMSNorm", LLAMA_NORMS),
    "Qwen3": (LLAMA, "Qwen3RMSNorm", LLAMA_NORMS + QWEN3_NORMS),
    "Gemma": (LLAMA, "GemmaRMSNorm", LLAMA_NORMS),
    "T5": (
        # A relu would tip over at some rounding, and that error is no matter of the norms.
        dict(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=64,
            feed_forward_proj="gated-gelu",
        ),
        "T5LayerNorm",
        T5_NORMS,
    ),
    "ViT": (
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        ),
        "LayerNorm",
        None,  # two a layer and the last: their names are transformers' affair
    ),
}


def build(name, device, dtype):
    """A tiny model of random parameters, and its call."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name][0])
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}Model")(config)
    model = randomize(model).to(device, dtype).eval()
    images = rows(16, dtype, 2, 3, 16, device=device)
    tokens = torch.randint(64, (2, 6), generator=generator("cpu", "ids")).to(device)

    def call(model):
        if name == "ViT":
            y = model(pixel_values=images.to(next(model.parameters()).dtype))
        elif name == "T5":
            y = model(input_ids=tokens, decoder_input_ids=tokens.flip(-1))
        else:
            y = model(input_ids=tokens)
        return y.last_hidden_state

    return model, call


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, dtype, device):
    _, norm_class, names = ARCHITECTURES[name]
    report = check_conversion(*build(name, device, dtype))
    found = [c.name for c in report.converted]
    if names is not None:
        assert sorted(found) == sorted(names)
    assert len(found) == {"T5": 12, "Qwen3": 9}.get(name, 5)
    assert not report.skipped
    assert {c[1:3] for c in report.converted} == {(norm_class, f"Fused{norm_class}")}
    twice = dtype is BF16 and norm_class not in ("LayerNorm", "GemmaRMSNorm")
    assert {c.ulps for c in report.converted} == {2 if twice else 1}
