"""`convert` of the classes and models of transformers that normalise the channels of images."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from fused_op import convert
from fused_op._recipe import recipe_of
from tests.convert.conversion import check_conversion
from tests.convert.test_convert_images import images, memory_of
from tests.norms import COLS, only_reason, randomize
from tests.ops import BF16, F32


def image_norms():
    """The classes of its models that take images, each source once: most are copies."""
    spec = importlib.util.find_spec("transformers")
    found = {}
    for path in (
        sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")) if spec else ()
    ):
        for name in re.findall(r"^class (\w*LayerNorm(?:2d)?)\(", path.read_text(), re.M):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            source = inspect.getsource(getattr(module, name))
            if "channels_first" in source or "permute(0, 2" in source or "mean(1, " in source:
                found.setdefault(source.replace(name, "Norm"), getattr(module, name))
    return sorted(found.values(), key=lambda cls: cls.__name__)


@pytest.mark.slow
def test_every_image_norm_of_transformers():
    pytest.importorskip("transformers")
    classes = image_norms()
    assert len(classes) >= 5
    for cls in classes:
        options = (
            {"data_format": "channels_first"} if "channels_first" in inspect.getsource(cls) else {}
        )
        for dtype in (F32, BF16):
            module = randomize(cls(COLS, **options)).to(dtype)
            report = convert(module)
            if cls.__name__ == "VitDetLayerNorm" and dtype is BF16:
                assert "by roundings to torch.bfloat16 in between" in only_reason(report)
                continue
            assert [c.same_roundings for c in report.converted] == [dtype is BF16], (cls, report)
            assert recipe_of(type(module)).images == ((3,) if "Squeeze" in cls.__name__ else (4,))


STAGES = dict(num_stages=2, hidden_sizes=[8, 16], depths=[1, 2])
SAM = dict(
    hidden_size=32,
    output_channels=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
    mlp_dim=48,
    window_size=2,
    global_attn_indexes=[1],
)
# The model -> its configuration, and how many norms of which class it has
MODELS = {
    "ConvNextModel": ("ConvNextConfig", STAGES, {"ConvNextLayerNorm": 5, "LayerNorm": 1}),
    "ConvNextV2Model": ("ConvNextV2Config", STAGES, {"ConvNextV2LayerNorm": 5, "LayerNorm": 1}),
    "SamVisionModel": ("SamVisionConfig", SAM, {"LayerNorm": 4, "SamLayerNorm": 2}),
}


def build(name, dtype, device):
    transformers = pytest.importorskip("transformers")
    config, settings, norms = MODELS[name]
    config = getattr(transformers, config)(**settings)
    config._attn_implementation = "eager"
    model = randomize(getattr(transformers, name)(config)).to(device, dtype).eval()
    return model, norms


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, dtype, memory_format, device):
    model, norms = build(name, dtype, device)
    model.to(memory_format=memory_format)
    x = images(dtype, (2, 3, 32, 32), device).to(memory_format=memory_format)

    def call(model):
        result = model(x.to(next(model.parameters()).dtype))
        return result.last_hidden_state if name.startswith("Sam") else result.pooler_output

    report = check_conversion(model, call)
    assert not report.skipped
    counts = {n: sum(c.before == n for c in report.converted) for n in norms}
    assert counts == norms and len(report.converted) == sum(norms.values())
    assert all(c.same_roundings == (dtype is BF16) for c in report.converted)


@pytest.mark.parametrize("name", MODELS)
def test_convolutions_run_in_the_same_format(name, device):
    """Catches a norm that hands an image on in another format, in which they may be far slower."""
    model, _ = build(name, F32, device)
    formats = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, args: formats.append(memory_of(args[0])))
    x = images(shape=(2, 3, 32, 32), device=device)
    model(x)
    expected = formats.copy()
    formats.clear()
    convert(model)
    model(x)
    assert formats == expected and (False, True) in expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ConvNextModel", "SamVisionModel"])
def test_compiled_model(name, device):
    """Catches a converted norm that breaks the graph of a model, or has other bits in it."""
    torch._dynamo.reset()
    model, _ = build(name, F32, device)
    convert(model)
    x = images(shape=(2, 3, 32, 32), device=device)
    expected = model(x).last_hidden_state
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).last_hidden_state, expected)
