"""convert and revert on the norms and models of timm, with random weights.

Catches a norm that timm applies to the rows of a model, or to the channels of images, and convert
no longer finds; one that is converted although it computes something else; and whatever
conversion.py catches of a model.
"""

import inspect
import re
from collections import Counter
from functools import partial

import pytest

from fused_op import convert
from tests.convert.conversion import check_conversion
from tests.norms import changed, only_reason, randomize, rows
from tests.ops import BF16, F32

# It is no requirement of the tests, since the torchvision that it imports fits one build of one
# torch only: .ci/run says where this file has to run.
timm = pytest.importorskip("timm", reason="timm, or the torchvision it imports, is not installed")

# How the report explains each class that is left as it is
OTHER_NORM = r"differs from \w+ over (the last 1 dimension|the channels, dimension 1)"
REASONS = {
    "BatchNorm2d": "is a batch or instance norm",
    "GlobalResponseNorm": OTHER_NORM,
    "SimpleNorm": OTHER_NORM,
    "SimpleNormFp32": OTHER_NORM,
    "SimpleNorm2d": OTHER_NORM,
    "SimpleNorm2dFp32": OTHER_NORM,
}
# These compute in the dtype of the image, LayerNormExp2d where its channels are last.
IN_16_BITS = {name: OTHER_NORM + ".* by roundings" for name in ("LayerNormExp2d", "RmsNorm2d")}
WIDTH = 32  # the default number of groups of GroupNorm divides it
LAYERS = dict(inspect.getmembers(timm.layers.norm, inspect.isclass))
LAYERS = {name: cls for name, cls in LAYERS.items() if cls.__module__ == timm.layers.norm.__name__}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, dtype, device):
    module = randomize(LAYERS[name](WIDTH)).to(device, dtype)
    report = convert(module)
    reasons = REASONS | (IN_16_BITS if dtype is BF16 else {})
    if name in reasons:
        assert re.match(reasons[name], only_reason(report)), report
        assert type(module) is LAYERS[name]
    else:
        assert changed(report) == [("", name, f"Fused{name}")]


VIT = dict(img_size=32, embed_dim=32, depth=2, num_heads=2)
CONVNEXT = dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))

# How to make a tiny model -> how many norms of which class convert changes, and leaves as they are
MODELS = {
    "vit": (partial(timm.create_model, "vit_tiny_patch16_224", **VIT), {"LayerNorm": 5}, {}),
    "vit-rms": (
        partial(
            timm.create_model, "vit_tiny_patch16_224", **VIT, qk_norm=True, norm_layer="rmsnorm"
        ),
        {"RmsNorm": 9},
        {},
    ),
    "deit3": (partial(timm.create_model, "deit3_small_patch16_224", **VIT), {"LayerNorm": 5}, {}),
    "eva02": (partial(timm.create_model, "eva02_tiny_patch14_224", **VIT), {"LayerNorm": 5}, {}),
    "swin": (
        partial(
            timm.create_model,
            "swin_tiny_patch4_window7_224",
            **dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
            drop_path_rate=0.0,  # else a block may be dropped, and its norms with it, in training
        ),
        {"LayerNorm": 11},
        {},
    ),
    # Its blocks normalise images with the channels moved last; its stages, as they are.
    "convnext": (
        partial(timm.create_model, "convnext_tiny", **CONVNEXT),
        {"LayerNorm": 5, "LayerNorm2d": 5},
        {},
    ),
    "convnextv2": (
        partial(timm.create_model, "convnextv2_atto", **CONVNEXT),
        {"LayerNorm2d": 10},
        {"GlobalResponseNorm": 5},
    ),
    "mixer": (
        partial(timm.models.MlpMixer, img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
        {"LayerNorm": 5},
        {},
    ),
    "xcit": (
        partial(timm.create_model, "xcit_nano_12_p16_224", **VIT),
        {"LayerNorm": 11},
        {"BatchNorm2d": 6},
    ),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, dtype, device):
    make, fused, kept = MODELS[name]
    model = randomize(make(num_classes=8)).to(device, dtype).eval()
    images = rows(32, dtype, 2, 3, 32, device=device)
    report = check_conversion(model, lambda m: m(images.to(next(m.parameters()).dtype)))
    assert Counter(c.before for c in report.converted) == fused
    assert {c.after for c in report.converted} == {f"Fused{name}" for name in fused}
    assert Counter(s.type_name for s in report.skipped) == kept
    for skipped in report.skipped:
        assert re.match(REASONS[skipped.type_name], skipped.reason), skipped
