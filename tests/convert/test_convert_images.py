"""`convert` of norms over the channels of images, dimension 1: small classes.

Those of models are in test_convert_image_models.py.

Catches one that is left as it is although the op computes it, one that is converted although it
computes something else for some layout or number of dimensions, and calls of the fused class that
belong to the original.
"""

import copy
import functools
import inspect
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_op
from fused_op import convert, disabled, revert
from fused_op._channels_first_formula import channels_are_last
from fused_op._recipe import recipe_of
from tests.contexts.graphs import Graphs
from tests.norms import (
    COLS,
    DataFormatNorm,
    GatedNorm,
    ImageNorm,
    ImageOrRowsNorm,
    ImageRmsNorm,
    LlamaImageNorm,
    PlaneNorm,
    RowsNorm,
    VideoNorm,
    WaveNorm,
    WideImageNorm,
    only_reason,
    randomize,
    rows,
)
from tests.ops import BF16, F16, F32, F64

PLANES = ("fused_op.channels_first_forward.default", "fused_op.channels_first_backward.default")
PIXELS = ("fused_op.norm_forward.default", "fused_op.norm_backward.default")
half = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


def images(dtype=F32, shape=(2, COLS, 5, 7), device="cpu"):
    return rows(shape[-1], dtype, *shape[:-1], device=device)


def formula_of(module):
    return recipe_of(type(module))


def memory_of(image):
    return image.is_contiguous(), channels_are_last(image)


def close(found, expected, dtype):
    free = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=free, atol=free)


# --- Which classes change -------------------------------------------------------------------------

# The class, its norm, and the numbers of dimensions of the images that were proved
CONVERTED = {
    "timm": (ImageNorm, "layer_norm", (4,)),
    "transformers": (DataFormatNorm, "layer_norm", (4,)),
    "in float32": (WideImageNorm, "layer_norm", (4,)),
    "planes": (PlaneNorm, "layer_norm", (4,)),
    "waves": (WaveNorm, "layer_norm", (3,)),
    "any": (VideoNorm, "rms_norm", (3, 4, 5)),
    "rms norm with a bias": (ImageRmsNorm, "rms_norm", (4,)),
    "llama": (LlamaImageNorm, "rms_norm", (4,)),
    "images or rows": (ImageOrRowsNorm, "layer_norm", (4, 5)),
    "no weight": (lambda: ImageNorm(COLS, elementwise_affine=False), "layer_norm", (4,)),
    "no bias": (lambda: ImageNorm(COLS, bias=False), "layer_norm", (4,)),
    "no weight, any": (lambda: VideoNorm(affine=False), "rms_norm", (3, 4, 5)),
}
IN_16_BITS = {"planes"}  # rounds in between
IN_FLOAT32 = {"in float32", "rms norm with a bias", "llama"}  # whatever the dtype


def make(name, dtype=F32, device="cpu"):
    cls = CONVERTED[name][0]
    takes_cols = inspect.isclass(cls) and issubclass(cls, nn.LayerNorm)
    return randomize(cls(COLS) if takes_cols else cls()).to(device, dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("name", CONVERTED)
def test_changes_its_class_and_nothing_else(name, dtype, device):
    """Catches a result, gradient, layout or copy that is not that of the original."""
    module, (_, norm, ranks) = make(name, dtype, device), CONVERTED[name]
    if (name in IN_16_BITS and dtype.itemsize == 2) or (name in IN_FLOAT32 and dtype is F64):
        return  # test_what_computes_in_16_bits_stays
    original, state = copy.deepcopy(module), dict(module.__dict__)
    (converted,) = convert(module).converted
    assert all(module.__dict__[key] is value for key, value in state.items())
    assert (formula_of(module).norm, formula_of(module).images) == (norm, ranks)
    rounds_twice = name == "llama" and dtype is not F32
    assert converted.ulps == 1 + rounds_twice
    is_16_bit = dtype.itemsize == 2 and len(state["_parameters"]) > 0 and "no weight" not in name
    same = is_16_bit and not rounds_twice
    # PyTorch's kernels on a GPU add up in another order. In float16, more results than the same
    # roundings allow may then differ in the last bit.
    may_differ = same and dtype is F16 and device == "cuda"
    assert converted.same_roundings == same or may_differ
    for rank in ranks:
        x = images(dtype, (2, COLS, 3, 5, 2)[:rank], device)
        wanted = original.state_dict(keep_vars=True).values(), module.state_dict(keep_vars=True)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        expected, found = original(leaves[0]), module(leaves[1])
        assert found.dtype is dtype
        # What follows, such as a convolution, runs as fast as behind the original.
        assert memory_of(found) == memory_of(expected)
        close(found, expected, dtype)
        grad = images(dtype, x.shape, device)
        truth = torch.autograd.grad(expected, [leaves[0], *wanted[0]], grad)
        for ours, theirs in zip(
            torch.autograd.grad(found, [leaves[1], *wanted[1].values()], grad), truth, strict=True
        ):
            # PyTorch's RMS norm is of many operations on a CPU.
            if norm == "layer_norm" and ours.shape == x.shape:
                assert memory_of(ours) == memory_of(theirs)
            error = (ours.double() - theirs.double()).abs().max()
            assert error <= 32 * torch.finfo(dtype).eps * (1 + theirs.double().abs().max())
    twin = pickle.loads(pickle.dumps(module))
    assert type(twin) is type(module) and torch.equal(twin(x), found)
    assert len(revert(module).converted) == 1
    assert type(module) is type(original) and torch.equal(module(x), expected)


@pytest.mark.parametrize("name", CONVERTED)
def test_takes_the_op_of_images(name, device, monkeypatch):
    """Catches a fused class that still calls the original."""
    module, norm = make(name, F32, device), CONVERTED[name][1]
    convert(module)
    monkeypatch.setattr(type(module).__mro__[1], "forward", None)
    x = images(F32, (2, COLS, 3, 5, 2)[: formula_of(module).images[0]], device)
    function = getattr(fused_op, f"fused_channels_first_{norm}")
    parameters = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", None) or module.eps
    if formula_of(module).innermost:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    assert torch.equal(module(x), function(x, *parameters, eps))


@half
def test_what_computes_in_16_bits_stays(dtype):
    reason = only_reason(convert(randomize(PlaneNorm()).to(dtype)))
    assert re.match("differs from layer_norm over the channels, dimension 1, by ", reason)


@half
def test_roundings_before_the_weight(dtype, device):
    """The op rounds once. The report does not claim the same roundings, and they are two ulp."""
    module = randomize(LlamaImageNorm()).to(device, dtype)
    original, x = copy.deepcopy(module), images(dtype, device=device)
    (converted,) = convert(module).converted
    assert converted.note().startswith("up to 2 ulp apart")
    found, expected = module(x), original(x)
    assert not torch.equal(found, expected)
    assert ((found - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()).all()


def test_channels_last_stays_channels_last(device):
    module = randomize(DataFormatNorm()).to(device)
    original = copy.deepcopy(module)
    convert(module)
    x = images(device=device).to(memory_format=torch.channels_last)
    found = module(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    close(found, original(x), F32)


# --- What is refused ------------------------------------------------------------------------------


class OtherForward(DataFormatNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Residual(DataFormatNorm):
    def forward(self, x):
        return x + super().forward(x)


class OverHeight(RowsNorm):
    def forward(self, x):
        return super().forward(x.movedim(2, -1)).movedim(-1, 2)


class OtherInMemory(ImageNorm):
    """Looks at the layout, as timm's LayerNormExp2d does."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.is_contiguous() else y + 1


class OtherGradientInMemory(ImageNorm):
    def forward(self, x):
        return super().forward(x if x.is_contiguous() else 2 * x.detach() - x)


class OtherOfLarge(ImageNorm):
    def forward(self, x):
        return x if x.shape[0] > 64 else super().forward(x)


class HidesNan(ImageNorm):
    def forward(self, x):
        return torch.nan_to_num(super().forward(x))


class Counts(ImageNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class UnitNorm(nn.Module):
    """As that of Wan's autoencoder: its eps is a lower bound of the root, and not added."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLS))

    def forward(self, x):
        return F.normalize(x, dim=1) * COLS**0.5 * self.weight.view(-1, 1, 1)


class GammaNorm(UnitNorm):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(COLS, 1, 1))


class VarianceNorm(ImageRmsNorm):
    """As timm's SimpleNorm2d."""

    def forward(self, x):
        return self.weight.view(-1, 1, 1) * x * torch.rsqrt(
            x.var(1, keepdim=True) + self.eps
        ) + self.bias.view(-1, 1, 1)


class ResponseNorm(PlaneNorm):
    """As the GlobalResponseNorm of ConvNeXt V2."""

    def forward(self, x):
        size = x.norm(dim=(2, 3), keepdim=True)
        ratio = size / (size.mean(1, keepdim=True) + self.eps)
        weight, bias = self.weight.view(-1, 1, 1), self.bias.view(-1, 1, 1)
        return x + torch.addcmul(bias, weight, x * ratio)


def with_eps_of(kind):
    module = DataFormatNorm()
    eps = torch.tensor(module.eps)
    if kind == "buffer":
        del module.eps
        module.register_buffer("eps", eps)
    else:
        module.eps = eps
    return module


def in_two_dtypes():
    module = DataFormatNorm()
    module.bias.data = module.bias.data.to(BF16)
    return module


OTHER = r"differs from \w+ over the channels, dimension 1, by more than torch.float32 rounds"
REFUSED = {
    "subclass": (OtherForward, OTHER),
    "residual": (Residual, OTHER),
    "height": (lambda: OverHeight(COLS), "forward of rows .* raises IndexError"),
    "layout": (lambda: OtherInMemory(COLS), OTHER),
    "gradient of a layout": (
        lambda: OtherGradientInMemory(COLS),
        "the gradient of its input is another than that of layer_norm",
    ),
    "many images": (lambda: OtherOfLarge(COLS), OTHER),
    "NaN": (lambda: HidesNan(COLS), "hides NaN or infinities of its input"),
    "counts": (lambda: Counts(COLS), "its forward changes its attribute calls"),
    "unit": (UnitNorm, OTHER),
    "gamma": (GammaNorm, r"has parameters other than weight and bias \(gamma\)"),
    "variance": (VarianceNorm, OTHER),
    "response": (ResponseNorm, OTHER),
    "instance": (lambda: nn.InstanceNorm2d(COLS, affine=True), "is a batch or instance norm"),
    "eps in a buffer": (lambda: with_eps_of("buffer"), r"has buffers \(eps\)"),
    "eps in a tensor": (lambda: with_eps_of("tensor"), "its eps is a Tensor, not a number"),
    "two dtypes": (in_two_dtypes, "its weight and bias differ in dtype or device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_left_as_it_was(case, device):
    make, reason = REFUSED[case]
    module = make().to(device)
    kept, before = dict(module.__dict__), type(module)
    assert re.match(reason, only_reason(convert(module))), only_reason(convert(module))
    assert type(module) is before and module.__dict__ == kept


def test_one_class_name_has_several_verdicts():
    """Catches one proof for modules of a class, or of a name, that compute different things."""
    other = type("DataFormatNorm", (OtherForward,), {})
    last, moved = DataFormatNorm(data_format="channels_last"), DataFormatNorm()
    moved.data_format = "channels_last"  # before convert
    model = nn.ModuleList([DataFormatNorm(), last, other(), moved, DataFormatNorm()])
    report = convert(model)
    assert [c.name for c in report.converted] == ["0", "1", "3", "4"]
    assert [formula_of(model[i]).images for i in (0, 1, 3, 4)] == [(4,), (), (), (4,)]
    x = images()
    close(model[3](x.movedim(1, -1)).movedim(-1, 1), model[0](x), F32)


def test_modules_of_this_package_are_fused_already():
    for module in (
        fused_op.FusedChannelsFirstLayerNorm(COLS),
        fused_op.FusedChannelsFirstRMSNorm(COLS),
        fused_op.FusedGatedRMSNorm(COLS),
    ):
        assert only_reason(convert(module)) == "is fused already"


def test_one_channel(device):
    """Its normalised values are zeros."""
    module = randomize(ImageNorm(1)).to(device)
    assert len(convert(module).converted) == 1
    x = images(shape=(2, 1, 5, 7), device=device)
    assert torch.equal(module(x), module.bias.view(1, 1, 1, 1).expand_as(x))


# --- Calls ----------------------------------------------------------------------------------------

CALLS = {
    "three dimensions": lambda: images(shape=(COLS, COLS, 5)),
    "five dimensions": lambda: images(shape=(2, COLS, 3, 5, 2)),
    "rows": lambda: rows(),
    "a vector": lambda: rows()[0, 0],
    "float64": lambda: images(F64),
    "bfloat16": lambda: images(BF16),
    "complex": lambda: images().to(torch.complex64),
    "sparse": lambda: images().to_sparse(),
    "other channels": lambda: images(shape=(2, COLS + 1, 5, 7)),
    "one channel": lambda: images(shape=(2, 1, 5, 7)),
    "no images": lambda: images(shape=(0, COLS, 5, 7)),
    "one pixel": lambda: images(shape=(2, COLS, 1, 1)),
    "expanded": lambda: images(shape=(1, COLS, 1, 7)).expand(2, COLS, 5, 7),
    "meta": lambda: images(device="meta"),
}


@functools.cache
def both(name):
    original = make(name)
    module = copy.deepcopy(original)
    assert convert(module).converted
    return original, module


def attempt(module, x):
    try:
        return module(x)
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", CONVERTED)
def test_runs_where_the_original_ran(name, kind):
    """Catches a call whose number of dimensions, dtype or layout was not proved."""
    (original, module), x = both(name), CALLS[kind]()
    for mode in (torch.no_grad, torch.enable_grad, disabled):
        with mode():
            expected, found = attempt(original, x), attempt(module, x)
        if isinstance(expected, Exception):
            continue  # the op may take more than the original
        assert isinstance(found, torch.Tensor), found
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if not found.is_meta:
            free = 2 * torch.finfo(found.dtype).eps + 1e-5
            torch.testing.assert_close(found, expected, rtol=free, atol=free)


@pytest.mark.parametrize("name", ["transformers", "planes", "rms norm with a bias", "no weight"])
def test_compiles_without_graph_break(name, device):
    torch._dynamo.reset()
    module, x = make(name, device=device), images(device=device).requires_grad_()
    convert(module)
    graphs = Graphs()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    found, expected = compiled(x), module(x)
    assert torch.equal(found, expected)
    grads = [
        torch.autograd.grad(y.square().sum(), [x, *module.parameters()]) for y in (found, expected)
    ]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)
    ops = PIXELS if formula_of(module).innermost else PLANES
    assert [graphs.names.count(op) for op in ops] == [1, 1]
    if name == "planes":  # broadcast over images of one channel
        one = images(shape=(2, 1, 5, 7), device=device)
        torch.testing.assert_close(compiled(one), attempt(module, one))


class Block(nn.Module):
    def __init__(self, norm, inner):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x):
        x = self.norm(x + self.inner(x))
        return x


@pytest.mark.parametrize("make", [DataFormatNorm, GatedNorm])
def test_residual_additions_stay_before_other_norms(make):
    """Catches a block whose addition is given to the op of rows, for a norm that is another."""
    is_image = make is DataFormatNorm
    x = images() if is_image else rows()
    block = Block(
        randomize(make()), nn.Conv2d(COLS, COLS, 1) if is_image else nn.Linear(COLS, COLS)
    )
    expected = block(x)
    report = convert(block, residual=True)
    assert len(report.converted) == 1 and not any(r.additions for r in report.blocks)
    close(block(x), expected, F32)
