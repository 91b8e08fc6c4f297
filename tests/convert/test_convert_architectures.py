"""convert and revert on the models and norms of transformers, with random weights.

Catches a norm of a well-known model that is no longer found, is converted although it computes
something else, or moves the model's outputs and gradients away from the truth by more than the
roundings of its dtype; and a revert that does not give the original bits back.
"""

import copy
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from fused_op import convert
from fused_op._fused_class import Formula
from fused_op._grouped_class import GroupedFormula
from fused_op._recipe import recipe_of
from tests.case import generator
from tests.convert.conversion import check_conversion
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


BERT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)
MAMBA = dict(hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=64)
LLAMA_LAYER_NORM = LLAMA | dict(hidden_act="gelu")

# Name of the model -> its config, and how many norms it has, all of which are converted
MORE_ARCHITECTURES = {
    "Albert": (BERT | dict(embedding_size=16), 3),  # its layers are one
    "Bert": (BERT, 5),
    "Cohere": (LLAMA, 3),
    "Electra": (BERT | dict(embedding_size=32), 5),
    "FalconMamba": (MAMBA, 9),
    "Gemma2": (LLAMA, 9),
    "Glm": (LLAMA | dict(pad_token_id=0), 5),
    "GPTNeoX": (BERT, 5),
    "Granite": (LLAMA, 5),
    "Mamba": (MAMBA, 3),
    "Nemotron": (LLAMA_LAYER_NORM, 5),
    "Olmo": (LLAMA, 5),
    "Olmo2": (LLAMA, 9),
    "OPT": (
        dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
        | dict(word_embed_proj_dim=32, activation_function="gelu"),
        5,
    ),
    "Phi3": (LLAMA | dict(pad_token_id=0), 5),
    "Roberta": (BERT | dict(max_position_embeddings=32), 5),
    "StableLm": (LLAMA, 5),
    "Starcoder2": (LLAMA_LAYER_NORM, 5),
}


def build(name, device, dtype):
    """A tiny model of random parameters, and its call."""
    transformers = pytest.importorskip("transformers")
    settings = (ARCHITECTURES.get(name) or MORE_ARCHITECTURES[name])[0]
    config = getattr(transformers, f"{name}Config")(**settings)
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
    assert {c.rounding for c in report.converted} == {"before_weight" if twice else "once"}
    assert {c.same_roundings for c in report.converted} == {dtype is BF16}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MORE_ARCHITECTURES)
def test_more_architectures(name, dtype, device):
    report = check_conversion(*build(name, device, dtype))
    assert not report.skipped
    assert len(report.converted) == MORE_ARCHITECTURES[name][1]


# --- Every norm class of transformers -------------------------------------------------------------

# Those that stay as they are, in float32 and bfloat16, and why; all others are converted.
OTHER_ROUNDINGS = r"differs from \w+ .* by roundings to torch.bfloat16 in between, which are not"
MIXED = r"forward of rows .* raises RuntimeError: mixed dtype"
BATCH = "is a batch or instance norm"
KEPT = {
    "BitBatchNorm2d": BATCH,
    "DebertaLayerNorm": OTHER_ROUNDINGS,
    "DoryL2Norm": "differs from rms_norm",  # by the number of columns, and is a norm of vectors
    "GradiumPhononTTSFlowLayerNorm": OTHER_ROUNDINGS,
    "GradiumPhononTTSTimestepNorm": OTHER_ROUNDINGS,
    "ImageGPTLayerNorm": OTHER_ROUNDINGS,
    "VideoPrismLayerNorm": OTHER_ROUNDINGS,
    "EsmFold2LayerNorm": MIXED,
    "EsmFold2AdaptiveLayerNorm": MIXED,
    "HYV4UnweightedRMSNorm": r"forward of torch.\w+\[\d+, 16\] returns torch.\w+\[\d+, 1\]",
    "MuseSparkTextInputScaledRMSNorm": "differs from rms_norm",
    "PocketTTSTimestepNorm": "differs from rms_norm",  # by the variance
    "NoNorm": "is not a norm: its output grows with its input",
    "VitDetLayerNorm": OTHER_ROUNDINGS,
}
KINDS = {"BatchNorm": BATCH}


# A class with its decorators, up to the next line that is not indented.
NORM_CLASS = re.compile(
    r"(?:^@.*\n(?:#.*\n)*)*^class (\w*Norm(?:2d|1P)?)\(.*\n(?:(?:[ \t].*)?\n)*", re.M
)


def norm_classes():
    """The norm classes of all models, each source once: most are copies of Llama's.

    Only the modules of those are imported, which takes most of the time.
    """
    found = {}
    root = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        name = "transformers.models." + ".".join(path.relative_to(root).with_suffix("").parts)
        for match in NORM_CLASS.finditer(path.read_text()):
            source = match[0].replace(match[1], "Norm").rstrip()
            found.setdefault(source, (name, match[1]))
    classes = [getattr(importlib.import_module(module), name) for module, name in found.values()]
    modules = [c for c in classes if inspect.isclass(c) and issubclass(c, torch.nn.Module)]
    return sorted(modules, key=lambda cls: cls.__name__)


def make_norm(cls):
    """One of 32 columns, or None: some take a whole configuration."""
    for arguments in ((32,), (32, 1e-6), (2, 32), (32, 2), (32, 32)):
        try:
            return randomize(cls(*arguments)).eval()
        except Exception:
            continue
    return None


def images_of(module):
    """How many dimensions the images of its fused class have, if it takes images."""
    formula = recipe_of(type(module))
    if isinstance(formula, GroupedFormula):
        return formula.dims[1:]
    return formula.images if isinstance(formula, Formula) else ()


@pytest.mark.slow
def test_every_norm_of_transformers():
    """Catches a class that is no longer converted, a reason that misleads, and another result."""
    pytest.importorskip("transformers")
    converted, unexplained = 0, []
    for cls in norm_classes():
        for dtype in (F32, BF16):
            module = make_norm(cls)
            if module is None or any(module.children()):  # a model of norms, no norm
                continue
            module.to(dtype)
            original = copy.deepcopy(module)
            report = convert(module)
            if report.converted:
                converted += 1
                x = rows(32, dtype, 2, 3)
                if ranks := images_of(module):
                    x = rows(7, dtype, *(2, 32, 5)[: ranks[0] - 1])
                y, truth = module(x), copy.deepcopy(original).float()(x.float())
                theirs = original(x)
                assert y.dtype is theirs.dtype
                error, before = ((t.float() - truth).abs().max() for t in (y, theirs))
                roundings = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(F32).eps
                assert error <= 2 * before + roundings * truth.abs().max(), cls
            for skipped in report.skipped:
                kind = (reason for end, reason in KINDS.items() if end in cls.__name__)
                reason = KEPT.get(cls.__name__) or next(kind, None)
                if reason is None or not re.match(reason, skipped.reason):
                    unexplained.append(f"{cls.__name__} {dtype}: {skipped.reason}")
    assert not unexplained, "\n".join(unexplained)
    assert converted > 90
