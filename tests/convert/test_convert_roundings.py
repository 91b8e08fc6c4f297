"""A converted norm in 16 bits has the roundings of the original, and so nearly all of its bits.

Catches a conversion that takes the wrong contract, or whose report claims the right one: a quarter
of the outputs would have another last bit, and a language model would soon say something else.
"""

import inspect

import pytest
import torch
from torch import nn

from fused_op import convert, revert
from fused_op._fused_class import Formula, fused_class
from fused_op._proof import SAME_SHARE
from fused_op._recipe import RECIPE, recipe_of
from tests.case import generator
from tests.convert.test_convert_architectures import LLAMA, norm_classes
from tests.norms import GatedNorm, LlamaNorm, ZeroCentredNorm, randomize
from tests.ops import BF16, F16

WIDTHS = (128, 1000, 4096, 8192)
ELEMENTS = 1 << 18
half = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)

# RMS norms of transformers that round in a place of their own: 1 / rms to 16 bits.
OTHERS = {"DeepseekV4UnweightedRMSNorm"}


class RoundedSum(LlamaNorm):
    """As MuseSpark's: 1 + weight is rounded to 16 bits, and the product once."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1 + self.weight).float()).type_as(x)


class RoundedRstd(nn.Module):
    """As DeepSeek V4's."""

    def __init__(self, cols):
        super().__init__()
        self.normalized_shape, self.eps = (cols,), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)


class WithoutBias(nn.Module):
    """A layer norm with Llama's roundings."""

    def __init__(self, cols):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(cols)), 1e-5

    def forward(self, x):
        y = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return self.weight * y.to(x.dtype)


def share_of_others(module, cols, dtype, what, device="cpu"):
    """Of the outputs, once the module is converted, that have other bits than before."""
    g = generator(device, what, cols, dtype)
    x = torch.randn(-(-ELEMENTS // cols), cols, generator=g, device=device).to(dtype)
    with torch.no_grad():
        before = module(x)
        (converted,) = convert(nn.ModuleList([module, nn.Linear(1, 1, dtype=dtype)])).converted
        after = module(x)
        revert(module)
        assert torch.equal(module(x), before)
    # One spacing of the normalised value is one or two of its product with the weight.
    distance = (before.double() - after.double()).abs() / before.double().abs().clamp(min=1e-3)
    assert not converted.same_roundings or distance.max() <= 2 * torch.finfo(dtype).eps, what
    return (before != after).double().mean().item(), converted


@half
@pytest.mark.parametrize(
    ("cls", "factor", "rounding"),
    [
        (LlamaNorm, "weight", "before_weight"),
        (GatedNorm, "weight", "before_weight"),
        (ZeroCentredNorm, "1 + weight", "once"),
        (RoundedSum, "rounded 1 + weight", "once"),
        (nn.RMSNorm, "weight", "once"),
    ],
)
def test_contract(cls, factor, rounding, dtype, device):
    module = randomize(cls(1000)).to(device, dtype)
    share, converted = share_of_others(module, 1000, dtype, cls.__name__, device)
    assert converted.rounding == rounding and converted.same_roundings
    assert converted.note() == "same roundings"
    assert share <= SAME_SHARE
    convert(module)
    if cls is not nn.RMSNorm:
        formula = Formula("rms_norm", factor, "variance_epsilon", rounding)
        assert recipe_of(type(module)) == formula


def test_layer_norm_with_the_same_contract(device):
    module = randomize(WithoutBias(200)).to(device, BF16)
    share, converted = share_of_others(module, 200, BF16, "WithoutBias", device)
    assert converted.rounding == "before_weight" and share < 1e-3


@half
def test_contract_of_another_kind(dtype, device):
    """It stays within two spacings, and the report does not say that the roundings are the same."""
    module = randomize(RoundedRstd(300)).to(device, dtype)
    share, converted = share_of_others(module, 300, dtype, "RoundedRstd", device)
    assert share > 0.05 and not converted.same_roundings and converted.ulps == 2
    assert converted.note().startswith("up to 2 ulp apart")


def test_nothing_to_say_in_float32(device):
    (converted,) = convert(LlamaNorm(64).to(device)).converted
    assert (converted.ulps, converted.rounding, converted.same_roundings) == (1, "once", False)
    assert converted.note() == ""


def make(cls, cols):
    names = list(inspect.signature(cls).parameters)
    for arguments in ((),) if names[:1] == ["eps"] else ((cols,), (cols, 1e-6)):
        try:
            return randomize(cls(*arguments)).eval()
        except Exception:
            continue
    return None


@pytest.mark.slow
@half
def test_every_rms_norm_of_transformers(dtype):
    pytest.importorskip("transformers")
    shares, seen = [], set()
    for cls in norm_classes():
        module = make(cls, 32)
        if "RMSNorm" not in cls.__name__ or module is None or any(module.children()):
            continue
        if not convert(module.to(dtype)).converted:
            continue
        for cols in WIDTHS:
            module = make(cls, cols).to(dtype)
            share, converted = share_of_others(module, cols, dtype, cls.__name__)
            if cls.__name__ in OTHERS:
                assert not converted.same_roundings and share > 0.1, cls
                continue
            assert converted.same_roundings, (cls, cols, converted)
            assert share <= SAME_SHARE, (cls, cols, share)
            shares.append(share)
            seen.add(converted.rounding)
    assert sum(shares) / len(shares) <= 5e-5
    assert len(shares) > 25 * len(WIDTHS) and seen == {"once", "before_weight"}


@half
def test_greedy_decoding(dtype):
    """256 tokens of a small Llama, each of which depends on all before it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | size))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.2)
    model.to(dtype).eval()
    prompt = torch.randint(3, 256, (1, 8))
    length = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
    before = model.generate(prompt, **length)
    report = convert(model)
    assert len(report.converted) == 5 and all(c.same_roundings for c in report.converted)
    assert torch.equal(model.generate(prompt, **length), before)
    if dtype is F16:  # whose last bits decide less
        return
    for converted in report.converted:  # or the tokens do not show the rounding
        module = model.get_submodule(converted.name)
        original, formula, _ = getattr(type(module), RECIPE)
        module.__class__ = fused_class(original, formula._replace(rounding="once"))
    assert not torch.equal(model.generate(prompt, **length), before)
