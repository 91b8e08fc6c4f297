"""`convert` of group norms: PyTorch's class, subclasses of it, and classes that compute one.

Catches one that is left as it is although the op computes it, a report that claims roundings which
are not there, and calls that belong to the original. test_convert_group_norm_rules.py has those
that stay.
"""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_op
from fused_op import FusedGroupNorm, convert, disabled, revert
from fused_op.reference import fused_group_norm as reference
from tests.contexts.graphs import Graphs
from tests.convert.conversion import check_conversion
from tests.norms import changed, only_reason, randomize, rows
from tests.ops import BF16, F16, F32, F64

GROUPS, CHANNELS = 4, 24
OPS = ("fused_op.group_norm_forward.default", "fused_op.group_norm_backward.default")
half = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


# Group norms as other libraries write them
class OneGroup(nn.GroupNorm):
    """As PoolFormer's and timm's GroupNorm1."""

    def __init__(self, channels=CHANNELS):
        super().__init__(1, channels)


class TimmNorm(nn.GroupNorm):
    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class InFloat32(nn.GroupNorm):
    """As the GroupNorm32 of guided diffusion, but with its parameters widened, too."""

    def forward(self, x):
        weight, bias = self.weight.float(), self.bias.float()
        return F.group_norm(x.float(), self.num_groups, weight, bias, self.eps).type(x.dtype)


class WithMask(nn.GroupNorm):
    def forward(self, x, mask=None):
        if mask is not None:
            return super().forward(x * mask)
        return super().forward(x)


class OfImages(nn.Module):
    """Takes images alone, and computes the norm itself."""

    def __init__(self):
        super().__init__()
        self.n_groups, self.epsilon = GROUPS, 1e-6
        self.weight = nn.Parameter(torch.ones(CHANNELS))
        self.bias = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x):
        n, c, h, w = x.shape
        y = x.reshape(n, self.n_groups, -1).to(torch.promote_types(x.dtype, F32))
        var, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
        y = ((y - mean) * torch.rsqrt(var + self.epsilon)).reshape(n, c, h, w)
        return (y * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)).type_as(x)


ALL = (2, 3, 4, 5)
# The module, and the numbers of dimensions of inputs that it takes
MODULES = {
    "torch": (lambda: nn.GroupNorm(GROUPS, CHANNELS), ALL),
    "three groups": (lambda: nn.GroupNorm(3, 15, eps=1e-6), ALL),
    "one group": (lambda: nn.GroupNorm(1, CHANNELS), ALL),
    "one channel": (lambda: nn.GroupNorm(CHANNELS, CHANNELS), (3, 4, 5)),
    "no affine": (lambda: nn.GroupNorm(GROUPS, CHANNELS, affine=False), ALL),
    "large": (lambda: nn.GroupNorm(32, 320), ALL),
    "one group by a subclass": (OneGroup, ALL),
    "timm": (lambda: TimmNorm(GROUPS, CHANNELS), ALL),
    "in float32": (lambda: InFloat32(GROUPS, CHANNELS), ALL),
    "mask": (lambda: WithMask(GROUPS, CHANNELS), ALL),
    "images": (OfImages, (4,)),
}
IN_FLOAT32 = {"in float32"}  # whatever the dtype
WITHOUT_PARAMETERS = {"no affine"}


def make(name, dtype=F32, device="cpu"):
    return randomize(MODULES[name][0]()).to(device, dtype)


def channels_of(module):
    return CHANNELS if module.weight is None else len(module.weight)


def images(dtype=F32, shape=(2, CHANNELS, 5, 7), device="cpu"):
    return rows(shape[-1], dtype, *shape[:-1], device=device)


def innermost(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def close(found, expected, dtype):
    free = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=free, atol=free)


# --- Which modules change -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_changes_its_class_and_nothing_else(name, dtype, device):
    """Catches a result, gradient, layout or copy that is not that of the original."""
    module, dims = make(name, dtype, device), MODULES[name][1]
    if name in IN_FLOAT32 and dtype is F64:
        assert "by more than torch.float64 rounds" in only_reason(convert(module))
        return
    if dtype is not F32 and name in WITHOUT_PARAMETERS:
        module = nn.Sequential(module, nn.Linear(1, 1, dtype=dtype, device=device))
    if name == "no affine" and dtype is F16 and device == "cuda":  # PyTorch's kernel rounds eps
        assert "by more than torch.float16 rounds" in only_reason(convert(module))
        return
    original, state = copy.deepcopy(module), dict(module.__dict__)
    keys, parameters = list(module.state_dict()), list(module.parameters())
    (converted,) = convert(module).converted
    assert all(module.__dict__[key] is value for key, value in state.items())
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    if name in WITHOUT_PARAMETERS and dtype is not F32:
        module, original = module[0], original[0]
    is_torch = type(original) is nn.GroupNorm
    assert isinstance(module, type(original)) and (type(module) is FusedGroupNorm) == is_torch
    if device == "cpu" or dtype.itemsize > 2:  # on a GPU, PyTorch rounds the statistics, too
        assert converted.ulps == 1 and not converted.rounds_statistics
    if dtype.itemsize != 2:
        assert not converted.note()
    elif dtype is BF16 and device == "cpu":
        assert converted.note() == "same roundings"
    for rank in dims:
        x = images(dtype, (2, channels_of(module), 3, 5, 2)[:rank], device)
        for layout in (torch.clone, innermost)[: 1 + (rank > 2)]:
            check_calls(module, original, layout(x), dtype)
    twin = pickle.loads(pickle.dumps(module))
    assert type(twin) is type(module) and torch.equal(twin(x), module(x))
    assert len(revert(module).converted) == 1
    assert type(module) is type(original) and torch.equal(module(x), original(x))


def check_calls(module, original, x, dtype):
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    expected, found = original(leaves[0]), module(leaves[1])
    assert found.dtype is dtype
    assert found.is_contiguous() == x.is_contiguous()
    close(found, expected, dtype)
    grad = images(dtype, tuple(x.shape), x.device).flip(0)  # not x itself, whose gradient is 0
    theirs = torch.autograd.grad(expected, [leaves[0], *original.parameters()], grad)
    ours = torch.autograd.grad(found, [leaves[1], *module.parameters()], grad)
    # PyTorch's backward in 16 bits reads statistics that are rounded to them.
    free = 32 * torch.finfo(dtype).eps
    for mine, its in zip(ours, theirs, strict=True):
        error = (mine.double() - its.double()).abs().max()
        assert error <= free * (1 + its.double().abs().max())


def test_groups_of_one_value(device):
    """Their normalised values are zeros, but for rounding: rstd is large."""
    module = make("one channel", device=device)
    original, x = copy.deepcopy(module), images(shape=(3, CHANNELS), device=device)
    assert convert(module).converted
    torch.testing.assert_close(module(x), module.bias.expand_as(x), rtol=0, atol=0)
    torch.testing.assert_close(module(x), original(x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", MODULES)
def test_takes_the_op(name, device, monkeypatch):
    """Catches a fused class that still calls the original."""
    module = make(name, F32, device)
    convert(module)
    monkeypatch.setattr(type(module).__mro__[1], "forward", None)
    x = images(F32, (2, channels_of(module), 3, 5), device)
    groups = getattr(module, "num_groups", GROUPS)
    eps = getattr(module, "epsilon", None) or module.eps
    expected = fused_op.fused_group_norm(x, groups, module.weight, module.bias, eps)
    assert torch.equal(module(x), expected)


@half
def test_same_roundings_are_counted(dtype):
    """Catches a claim that does not hold."""
    module = randomize(nn.GroupNorm(GROUPS, CHANNELS)).to(dtype)
    original = copy.deepcopy(module)
    (converted,) = convert(module).converted
    x = images(dtype, (16, CHANNELS, 64, 64))
    share = (module(x) != original(x)).double().mean().item()
    assert converted.same_roundings and share < 1e-3


def rounded_statistics(x, groups, weight=None, bias=None, eps=1e-5):
    """F.group_norm as PyTorch's kernels for 16 bits on a GPU: eps, mean and rstd are rounded."""
    dtype = x.dtype
    y = x.reshape(x.shape[0], groups, -1).float()
    var, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + torch.tensor(eps, dtype=dtype)).to(dtype).float()
    y = ((y - mean.to(dtype).float()) * rstd).reshape(x.shape)
    shape = -1, *[1] * (x.dim() - 2)
    return (y * weight.float().view(shape) + bias.float().view(shape)).to(dtype)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@half
def test_rounded_statistics_of_pytorch(dtype, eps, monkeypatch):
    """PyTorch's own roundings are no reason to keep it; the report says that there are some."""
    monkeypatch.setattr(F, "group_norm", rounded_statistics)
    module = randomize(nn.GroupNorm(GROUPS, CHANNELS, eps=eps)).to(dtype)
    original = copy.deepcopy(module)
    report = convert(module)
    (converted,) = report.converted
    assert converted.rounds_statistics and not converted.same_roundings
    assert "the original rounds eps or its statistics too" in str(report)
    x = images(dtype)
    truth = reference(x.double(), GROUPS, *(p.double() for p in module.parameters()), eps)
    ours, theirs = ((m(x) - truth).abs().mean() for m in (module, original))
    assert ours < theirs


def test_twice():
    module = nn.GroupNorm(GROUPS, CHANNELS)
    assert changed(convert(module)) == [("", "GroupNorm", "FusedGroupNorm")]
    assert only_reason(convert(module)) == "is fused already"
    revert(module)
    assert type(module) is nn.GroupNorm
    assert len(convert(module).converted) == 1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_meta(dtype):
    model = nn.Sequential(nn.GroupNorm(GROUPS, CHANNELS), TimmNorm(3, 15)).to(dtype)
    on_meta = copy.deepcopy(model).to("meta")
    before = list(on_meta.parameters())
    assert convert(on_meta) == convert(model)
    assert [type(m) for m in on_meta] == [type(m) for m in model]
    assert all(a is b and a.is_meta for a, b in zip(before, on_meta.parameters(), strict=True))
    assert on_meta[0](torch.empty(2, CHANNELS, 4, 4, dtype=dtype, device="meta")).is_meta


# --- Calls ----------------------------------------------------------------------------------------

CALLS = {
    "two dimensions": lambda: images(shape=(3, CHANNELS)),
    "three dimensions": lambda: images(shape=(3, CHANNELS, 5)),
    "five dimensions": lambda: images(shape=(2, CHANNELS, 3, 5, 2)),
    "six dimensions": lambda: images(shape=(2, CHANNELS, 3, 2, 2, 2)),
    "channels last": lambda: images().to(memory_format=torch.channels_last),
    "float64": lambda: images(F64),
    "bfloat16": lambda: images(BF16),
    "complex": lambda: images().to(torch.complex64),
    "sparse": lambda: images().to_sparse(),
    "other channels": lambda: images(shape=(2, 2 * CHANNELS, 5, 7)),
    "channels that do not fit": lambda: images(shape=(2, CHANNELS + 1, 5, 7)),
    "a vector": lambda: images(shape=(CHANNELS,)),
    "no images": lambda: images(shape=(0, CHANNELS, 5, 7)),
    "one pixel": lambda: images(shape=(2, CHANNELS, 1, 1)),
    "expanded": lambda: images(shape=(1, CHANNELS, 1, 7)).expand(2, CHANNELS, 5, 7),
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
@pytest.mark.parametrize("name", ["torch", "no affine", "timm", "mask", "images"])
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


def test_more_arguments_go_to_the_original():
    original = make("mask")
    module, x, mask = copy.deepcopy(original), images(), images() > 0
    assert convert(module).converted
    assert torch.equal(module(x, mask), original(x, mask))
    assert torch.equal(module(x=x), original(x))


def test_hooks_run():
    module, seen = nn.GroupNorm(GROUPS, CHANNELS).eval(), []
    module.register_forward_hook(lambda m, args, y: seen.append(type(m)))
    convert(module)
    module(images())
    assert seen == [FusedGroupNorm] and not module.training


@pytest.mark.parametrize("name", ["torch", "no affine", "timm"])
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
    assert [graphs.names.count(op) for op in OPS] == [1, 1]


# --- A block of a UNet ----------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.norm, self.conv = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm_out, self.conv_out = (
            nn.GroupNorm(8, channels),
            nn.Conv2d(channels, 3, 3, padding=1),
        )

    def forward(self, x):
        x = self.conv_in(x)
        x = x + self.conv(F.silu(self.norm(x)))
        return self.conv_out(F.silu(self.norm_out(x)))


memory_formats = pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)


@memory_formats
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_model(dtype, memory_format, device):
    model = randomize(ResidualBlock()).to(device, dtype).to(memory_format=memory_format).eval()
    x = images(dtype, (2, 3, 16, 16), device).to(memory_format=memory_format)
    report = check_conversion(model, lambda m: m(x.to(next(m.parameters()).dtype)))
    expected = [(n, "GroupNorm", "FusedGroupNorm") for n in ("norm", "norm_out")]
    assert changed(report) == expected and not report.skipped


@memory_formats
def test_same_loss_curve(memory_format, device):
    torch.manual_seed(0)
    model = ResidualBlock().to(device).to(memory_format=memory_format)
    models = model, copy.deepcopy(model)
    convert(models[1])
    x = images(F32, (4, 3, 16, 16), device).to(memory_format=memory_format)
    curves = []
    for each in models:
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            loss = F.mse_loss(each(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < curves[0][0]


def test_state_dict_loads_both_ways():
    model, other = ResidualBlock(), ResidualBlock()
    convert(other)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    assert model.state_dict().keys() == other.state_dict().keys()


def test_residual_additions_stay_before_it():
    """Catches a block whose addition is given to the op of rows."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(GROUPS, CHANNELS)
            self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)

        def forward(self, x):
            x = self.norm(x + self.conv(x))
            return x

    block, x = Block(), images()
    expected = block(x)
    report = convert(block, residual=True)
    assert len(report.converted) == 1 and not report.blocks
    close(block(x), expected, F32)
