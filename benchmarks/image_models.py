"""Models of images for benchmarks.models: a diffusion transformer, a UNet and a ConvNeXt.

transformers and diffusers are imported where a model is built.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .model_variants import Model

# Of pixel_values, by the kind of model: colours, or the channels of an autoencoder.
CHANNELS = {"vit": 3, "convnext": 3, "sd3": 16, "unet": 4}


def convnext(model: Model) -> nn.Module:
    """Of a quarter of the layers in each of four stages, each twice as wide as the one before."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        depths=[model.layers // 4] * 4,
        hidden_sizes=[model.width << stage for stage in range(4)],
        image_size=model.length,
        num_labels=model.vocabulary,
    )
    return ConvNextForImageClassification(config)


def sd3(model: Model) -> nn.Module:
    """The transformer of Stable Diffusion 3, on patches of 2 x 2 pixels and 154 tokens of text."""
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel(
        sample_size=model.length,
        patch_size=2,
        num_layers=model.layers,
        attention_head_dim=model.width // model.heads,
        num_attention_heads=model.heads,
        caption_projection_dim=model.width,
        joint_attention_dim=model.width,
        pooled_projection_dim=model.width,
        pos_embed_max_size=model.length // 2,
    )
    return _WithLoss(
        transformer, encoder_hidden_states=(154, model.width), pooled_projections=(model.width,)
    )


def unet(model: Model) -> nn.Module:
    """Three resolutions with attention in the lowest, as in the UNets of diffusion."""
    from diffusers import UNet2DModel

    network = UNet2DModel(
        sample_size=model.length,
        in_channels=CHANNELS["unet"],
        out_channels=CHANNELS["unet"],
        layers_per_block=model.layers,
        block_out_channels=(model.width, 2 * model.width, 4 * model.width),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=model.width // model.heads,
    )
    return _WithLoss(network)


class _WithLoss(nn.Module):
    """A model of diffusers, whose steps of time are the labels; the loss is the mean square."""

    def __init__(self, model: nn.Module, **conditions: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.conditions = model, tuple(conditions)
        for name, shape in conditions.items():
            self.register_buffer(name, torch.randn(shape))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        batch = len(pixel_values)
        buffers = {name: getattr(self, name) for name in self.conditions}
        given = {name: b.expand(batch, *b.shape) for name, b in buffers.items()}
        sample = self.model(pixel_values, timestep=labels, **given, return_dict=False)[0]
        return SimpleNamespace(loss=sample.float().square().mean())
