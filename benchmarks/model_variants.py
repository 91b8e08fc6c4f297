"""What benchmarks.models compares: models with the norms of several libraries.

Weights are random, so nothing is downloaded. transformers is imported where a model is built.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_op import compile_pass, convert

from . import image_models

MODES = ("eager", "torch.compile")


@dataclass(frozen=True)
class Model:
    """One model and its batch; `length` counts tokens, or for images pixels of a side."""

    name: str
    kind: str  # a key of _BUILDERS
    layers: int
    width: int
    heads: int
    mlp: int
    batch: int
    length: int
    vocabulary: int
    kv_heads: int = 0  # of Llama's kind; 0: as many as heads

    def small(self) -> Model:
        """The same classes at sizes for a test."""
        sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "mlp": 64, "vocabulary": 64}
        length = 32 if self.kind in image_models.CHANNELS else 16
        if self.kind == "convnext":
            sizes["layers"] = 4
        return dataclasses.replace(self, **sizes, kv_heads=0, batch=2, length=length)

    def build(self, device: torch.device) -> nn.Module:
        """Random weights, always the same ones; in bf16 and ready to train, without dropout."""
        torch.manual_seed(0)
        with device:  # a billion weights take one core of the host too long
            model: nn.Module = _BUILDERS[self.kind](self)
        return model.to(device, torch.bfloat16).train()

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of the model; with labels, so that it returns a loss."""
        generator = torch.Generator(device).manual_seed(1)
        channels = image_models.CHANNELS.get(self.kind)
        if channels is not None:
            size = (self.batch, channels, self.length, self.length)
            pixels = torch.randn(size, generator=generator, device=device).bfloat16()
            labels = torch.arange(self.batch, device=device) % self.vocabulary
            return {"pixel_values": pixels, "labels": labels}
        size = (self.batch, self.length)
        ids = torch.randint(self.vocabulary, size, generator=generator, device=device)
        return {"input_ids": ids, "labels": ids}


def _llama(model: Model) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(model)))


def _qwen3(model: Model) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    head_dim = 128 if model.width >= 1024 else model.width // model.heads
    return Qwen3ForCausalLM(Qwen3Config(**_decoder(model), head_dim=head_dim))


def _decoder(model: Model) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "intermediate_size": model.mlp,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.length,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,  # the default ones lie outside of a small vocabulary
        "eos_token_id": None,
    }


def _gpt2(model: Model) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=model.layers,
        n_embd=model.width,
        n_head=model.heads,
        n_inner=model.mlp,
        n_positions=model.length,
        vocab_size=model.vocabulary,
        resid_pdrop=0.0,  # random masks would differ from one variant to the next
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def _vit(model: Model) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=model.layers,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        intermediate_size=model.mlp,
        image_size=model.length,
        num_labels=model.vocabulary,
    )
    return ViTForImageClassification(config)


_BUILDERS: dict[str, Callable[[Model], nn.Module]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "vit": _vit,
    "sd3": image_models.sd3,
    "unet": image_models.unet,
    "convnext": image_models.convnext,
}

# Sizes of Llama 3.2 1B, Qwen3 0.6B, GPT-2 and ViT-L/16, a sixth of the layers of Stable Diffusion
# 3, and the widths of ConvNeXt-S. In the first two the host counts.
MODELS = (
    Model("tiny Llama", "llama", 8, 256, 4, 688, 8, 128, 1024),
    Model("GPT-2 of 12 x 512", "gpt2", 12, 512, 8, 2048, 4, 256, 50257),
    Model("Llama 1B", "llama", 16, 2048, 32, 8192, 4, 2048, 128256, kv_heads=8),
    Model("GPT-2 small", "gpt2", 12, 768, 12, 3072, 8, 1024, 50257),
    Model("ViT-L", "vit", 24, 1024, 16, 4096, 32, 224, 1000),
    Model("Qwen3 0.6B", "qwen3", 28, 1024, 16, 3072, 4, 2048, 151936, kv_heads=8),
    Model("GPT-2 medium", "gpt2", 24, 1024, 16, 4096, 8, 1024, 50257),
    Model("SD3 of 4 blocks", "sd3", 4, 1536, 24, 6144, 8, 64, 1000),
    Model("ConvNeXt", "convnext", 12, 96, 1, 0, 64, 224, 1000),
    Model("UNet", "unet", 1, 256, 4, 0, 32, 64, 1000),
)


class NothingToMeasure(Exception):
    """Raised if a variant would be the native model under another name."""


@dataclass
class Built:
    """A variant of a model; `during_first_step` is left once its graphs are compiled."""

    model: nn.Module
    note: Callable[[], str] = str  # what was changed, once the first step is over; may raise
    during_first_step: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


def share(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same parameters: one more variant costs no memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _native(model: nn.Module, mode: str) -> Built:
    return Built(model)


def _converted(model: nn.Module, mode: str) -> Built:
    count = _convert(model)
    return Built(model, note=lambda: f"{count} norms")


def _with_additions(model: nn.Module, mode: str) -> Built:
    is_eager = mode == "eager"  # compiled, compile_pass moves the additions
    blocks = convert(model, residual=is_eager, modulation=True, activation=True).blocks
    forms = {"additions": 0, "modulations": 0, "activations": 0}
    for block in blocks:
        forms = {form: count + getattr(block, form) for form, count in forms.items()}
    if not is_eager:
        return _with_compile_pass(model, forms["modulations"], forms["activations"])
    if not any(forms.values()):
        raise NothingToMeasure("nothing beside the norms of its blocks can move into them")
    return Built(model, note=lambda: ", ".join(f"{n} {form}" for form, n in forms.items()))


def _with_compile_pass(model: nn.Module, modulations: int, activations: int) -> Built:
    during = contextlib.ExitStack()
    fusing = during.enter_context(compile_pass())
    # A graph out of a cache would not be counted.
    during.enter_context(torch._inductor.config.patch(force_disable_caches=True))

    def note() -> str:
        if fusing.report().forward + modulations + activations == 0:
            raise NothingToMeasure(str(fusing.report()))
        return f"{fusing.report()}; {modulations} modulations, {activations} activations"

    return Built(model, note, during)


def _convert(model: nn.Module) -> int:
    report = convert(model)
    if not report.converted:
        raise NothingToMeasure(str(report))
    return len(report.converted)


def _liger(model: nn.Module, mode: str) -> Built:
    """Only its norms, as for us: its other kernels would hide what the norms cost."""
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm

    replaced = 0
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            size = tuple(getattr(norm, "weight", torch.empty(0)).shape)
            if isinstance(norm, nn.LayerNorm):
                ours: nn.Module = LigerLayerNorm(size[0], eps=norm.eps)
                ours.weight, ours.bias = norm.weight, norm.bias
            elif type(norm).__name__.endswith("RMSNorm"):
                ours = LigerRMSNorm(size[0], eps=norm.variance_epsilon)
                ours.weight = norm.weight
            else:
                continue
            setattr(module, name, ours)
            replaced += 1
    return Built(model, note=lambda: f"{replaced} norms")


@dataclass(frozen=True)
class Variant:
    """`change(model, mode)` gives a copy of the native model its norms, or raises."""

    name: str
    change: Callable[[nn.Module, str], Built]


NATIVE = "native"
CONVERTED = "converted"
ADDITIONS = "with additions"
VARIANTS = (
    Variant(NATIVE, _native),
    Variant(CONVERTED, _converted),
    Variant(ADDITIONS, _with_additions),
    Variant("Liger", _liger),
)
