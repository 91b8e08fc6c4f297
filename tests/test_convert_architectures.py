"""convert and revert on the models of transformers, with random weights.

Catches a norm of a well-known model that is no longer found, is converted although it computes
something else, or moves the model's outputs and gradients away from the truth by more than the
roundings of its dtype; and a revert that does not give the original bits back.
"""

import copy

import pytest
import torch

from fused_op import convert, revert
from tests.case import SEED, generator
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


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """A tiny model of random parameters, its call, and what to expect of convert."""
    transformers = pytest.importorskip("transformers")
    name = request.param
    arguments, norm_class, names = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**arguments)
    config._attn_implementation = "eager"
    model = randomize(getattr(transformers, f"{name}Model")(config)).eval()
    if name == "ViT":
        call = {"pixel_values": rows(16, F32, 2, 3, 16)}
    else:
        call = {"input_ids": torch.randint(64, (2, 6), generator=generator("cpu", "ids"))}
    if name == "T5":
        call["decoder_input_ids"] = call["input_ids"].flip(-1)
    return name, model, call, norm_class, names


def run(model, call):
    """Output and the gradient of every parameter that has one."""
    dtype = next(model.parameters()).dtype
    call = {k: v.to(dtype) if v.is_floating_point() else v for k, v in call.items()}
    model.zero_grad()
    y = model(**call).last_hidden_state
    y.backward(torch.randn(y.shape, generator=generator("cpu", "dy")).to(dtype))
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach().double()} | grads


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_architecture(architecture, dtype):
    name, model, call, norm_class, names = architecture
    model.to(dtype)
    model.requires_grad_()
    # The truth begins with the parameters as the dtype has them.
    truth = run(copy.deepcopy(model).double(), call)
    before, state = run(model, call), copy.deepcopy(model.state_dict())
    bits = model(**cast(call, dtype)).last_hidden_state

    report = convert(model)
    found = [c.name for c in report.converted]
    if names is not None:
        assert sorted(found) == sorted(names)
    assert len(found) == {"T5": 12, "Qwen3": 9}.get(name, 5)
    assert not report.skipped
    assert {c[1:3] for c in report.converted} == {(norm_class, f"Fused{norm_class}")}
    twice = dtype is BF16 and norm_class not in ("LayerNorm", "GemmaRMSNorm")
    assert {c.ulps for c in report.converted} == {2 if twice else 1}

    after = run(model, call)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert after.keys() == before.keys() == truth.keys()
    # As near to the truth as the original: twice its error, since two draws of rounding errors
    # differ, and some roundings. Some gradients are zero but for rounding (a bias of the keys):
    # for them, roundings of the largest gradient.
    eps, largest = torch.finfo(dtype).eps, max(t.norm() for t in truth.values())
    for what, true in truth.items():
        bound = 2 * (before[what] - true).norm() + 8 * eps * true.norm() + eps * largest
        error = (after[what] - true).norm()
        assert error <= bound, f"{what}: {error:.3g} > {bound:.3g} (FUSED_OP_SEED={SEED})"

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    model.load_state_dict(state)

    assert len(revert(model).converted) == len(report.converted)
    assert torch.equal(model(**cast(call, dtype)).last_hidden_state, bits)


def cast(call, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in call.items()}
