"""``convert(modulation=True)`` on models of diffusers, with random weights."""

import copy

import pytest
import torch
from torch import nn

from fused_op import convert
from tests.convert.modulated import CLOSE


def flux(diffusers) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


FLUX = {
    "hidden_states": torch.randn(1, 16, 4),
    "encoder_hidden_states": torch.randn(1, 8, 32),
    "pooled_projections": torch.randn(1, 32),
    "timestep": torch.ones(1),
    "img_ids": torch.zeros(16, 3),
    "txt_ids": torch.zeros(8, 3),
}


def stable_diffusion_3(diffusers) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )


SD3 = {
    "hidden_states": torch.randn(2, 4, 8, 8),
    "encoder_hidden_states": torch.randn(2, 8, 32),
    "pooled_projections": torch.randn(2, 64),
    "timestep": torch.ones(2),
}


def wan(diffusers) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


WAN = {
    "hidden_states": torch.randn(1, 4, 2, 8, 8),
    "timestep": torch.ones(1),
    "encoder_hidden_states": torch.randn(1, 8, 16),
}

DIFFUSERS = {  # the modulations of each class
    "Flux": (
        *(flux, FLUX),
        {
            "AdaLayerNormContinuous": 1,
            "AdaLayerNormZero": 1,
            "AdaLayerNormZeroSingle": 1,
            "FluxTransformerBlock": 2,
        },
    ),
    "SD3": (
        *(stable_diffusion_3, SD3),
        {"AdaLayerNormContinuous": 1, "AdaLayerNormZero": 1, "JointTransformerBlock": 1},
    ),
    "Wan": (wan, WAN, {"WanTransformer3DModel": 1, "WanTransformerBlock": 2}),
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_models_of_diffusers(name: str) -> None:
    """Catches a forward of a real model that is read wrong."""
    make, inputs, expected = DIFFUSERS[name]
    reference = make(pytest.importorskip("diffusers")).eval()
    model = copy.deepcopy(reference)
    report = convert(model, modulation=True)
    changed = {block.type_name: block.modulations for block in report.blocks if block.modulations}
    assert changed == expected, report
    with torch.no_grad():
        outputs = [each(**inputs).sample for each in (model, reference)]
    torch.testing.assert_close(*outputs, **CLOSE)
