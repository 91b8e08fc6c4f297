"""`convert` of gated RMS norms: every class of transformers, and what only looks like one.

Catches a class that is no longer converted, or to another order, activation or grouping than its
own: the outputs would have other bits.
"""

import copy
import importlib
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_op import convert, fused_gated_rms_norm, revert
from tests.norms import GatedNorm, LlamaNorm, only_reason, randomize, rows
from tests.ops import BF16, F16, F32

COLS = 64


def gated_classes():
    """Of all models, each source once: most are copies of each other."""
    spec = importlib.util.find_spec("transformers")
    found = {}
    for path in (
        sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")) if spec else ()
    ):
        for name in re.findall(r"^class (\w*RMSNormGated)\(", path.read_text(), re.M):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            cls = getattr(module, name)
            found.setdefault(inspect.getsource(cls).replace(name, "Norm"), cls)
    return sorted(found.values(), key=lambda cls: cls.__name__)


def variants_of(cls):
    """The class with each of the options that its constructor has."""
    names = inspect.signature(cls).parameters
    if "group_size" in names:
        return [cls(COLS, group_size=size) for size in (COLS, 16)]
    if "n_groups" in names:
        return [cls(COLS, n_groups=n, norm_before_gate=b) for n in (1, 4) for b in (True, False)]
    if "activation" in names:
        return [cls(COLS, activation=a) for a in ("silu", "sigmoid")]
    return [cls(COLS)]


MODULES = [module for cls in gated_classes() for module in variants_of(cls)] or [
    pytest.param(None, marks=pytest.mark.skip(reason="transformers is not installed"))
]


def test_there_are_some():
    assert len(MODULES) >= 8 or not importlib.util.find_spec("transformers")


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("module", MODULES, ids=lambda m: f"{type(m).__name__}")
def test_every_gated_norm_of_transformers(module, dtype, device):
    module = randomize(copy.deepcopy(module)).to(device, dtype)
    original = copy.deepcopy(module)
    (converted,) = convert(module).converted
    assert converted.same_roundings == (dtype is not F32)
    x, gate = (t.to(device) for t in (rows(COLS, dtype, 300, 5), rows(COLS, dtype, 5, 300)))
    gate = gate.transpose(0, 1)  # strided
    leaves = [t.detach().requires_grad_() for t in (x, gate)]
    found = module(*leaves)
    expected = original(*leaves)
    assert found.dtype is expected.dtype
    if dtype is F32:
        torch.testing.assert_close(found, expected)
    else:
        assert (found != expected).double().mean() <= 2e-4
    grad = rows(COLS, dtype, 300, 5).to(device)
    theirs = torch.autograd.grad(expected, [*leaves, original.weight], grad)
    ours = torch.autograd.grad(found, [*leaves, module.weight], grad)
    for mine, other in zip(ours, theirs, strict=True):
        error = (mine.double() - other.double()).abs().max() / other.double().abs().max()
        assert error <= 16 * torch.finfo(dtype).eps
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is type(module) and torch.equal(again(x, gate), found)
    revert(module)
    assert type(module) is type(original) and torch.equal(module(x, gate), expected)


def test_calls_without_a_gate_keep_working(device):
    module = randomize(GatedNorm()).to(device)
    original, x = copy.deepcopy(module), rows(device=device)
    convert(module)
    torch.testing.assert_close(module(x), original(x))
    torch.testing.assert_close(module(x, x), original(x, x))
    torch.testing.assert_close(module(x, gate=x), original(x, gate=x))
    broadcast = x[:, :1]  # is not proved
    assert torch.equal(module(x, broadcast), original(x, broadcast))
    assert torch.equal(module(x, x.double()), original(x, x.double()))


def test_an_optional_gate_of_other_roundings_stays():
    """In 16 bits its gate is rounded: what has the same roundings is the call without one."""
    module = randomize(GatedNorm()).to(BF16)
    original, x = copy.deepcopy(module), rows(dtype=BF16)
    (converted,) = convert(module).converted
    assert converted.same_roundings
    assert torch.equal(module(x, x), original(x, x))


class Scales(LlamaNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * F.silu(2 * gate)


class Detaches(LlamaNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * F.silu(gate.detach())


class HidesNan(LlamaNorm):
    def forward(self, hidden_states, gate):
        return torch.nan_to_num(super().forward(hidden_states) * F.silu(gate))


class Counts(LlamaNorm):
    calls = 0

    def forward(self, hidden_states, gate):
        self.calls += 1
        return super().forward(hidden_states) * F.silu(gate)


class WithoutWeight(nn.Module):
    eps = 1e-6

    def forward(self, hidden_states, gate):
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], None, self.eps) * F.silu(gate)


REFUSED = {
    Scales: "its forward takes more than the input",
    Detaches: "gives no gradient|is another|takes more than the input",
    HidesNan: "hides NaN",
    Counts: "its forward changes its attribute calls",
    WithoutWeight: "has no weight",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda c: c.__name__)
def test_refused(cls):
    module = cls()
    assert re.match(REFUSED[cls], only_reason(convert(nn.ModuleDict({"norm": module}))))


def test_a_converted_block_trains_as_before():
    """A layer like Qwen3-Next's output: projections around a gated norm, and its gradients."""
    pytest.importorskip("transformers")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(32, 2 * COLS)
            self.norm, self.out = MODULES[0], nn.Linear(COLS, 32)

        def forward(self, x):
            value, gate = self.inner(x).chunk(2, -1)
            return self.out(self.norm(value, gate))

    block = randomize(copy.deepcopy(Block()))
    other, x = copy.deepcopy(block), rows(32)
    assert convert(other).converted
    losses = [b(x).square().mean() for b in (block, other)]
    torch.testing.assert_close(*losses)
    grads = [
        torch.autograd.grad(loss, b.parameters())
        for loss, b in zip(losses, (block, other), strict=True)
    ]
    torch.testing.assert_close(*grads)


def test_the_twin_of_mamba():
    """Its own formula, which transformers' classes follow: norm_before_gate both ways, groups."""
    x, z, w = rows(COLS), rows(COLS, F32, 5, 3).transpose(0, 1), rows(COLS)[0, 0]

    def reference(before, groups):
        v = x if before else x * F.silu(z)
        split = v.unflatten(-1, (groups, -1))
        y = (split * torch.rsqrt(split.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * w
        return y * F.silu(z) if before else y

    for before in (True, False):
        for groups in (1, 4):
            found = fused_gated_rms_norm(
                x, z, w, 1e-5, group_size=COLS // groups, gate_first=not before
            )
            torch.testing.assert_close(found, reference(before, groups))
