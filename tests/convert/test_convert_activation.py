"""``convert(activation=True)``: group norms that apply SiLU compute what their modules did."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fused_op import convert, revert
from tests.convert.activated import (
    CHANNELS,
    CLOSE,
    AfterABranch,
    AfterBranches,
    ByAnyOfItsNames,
    ByFunction,
    GroupNorm32,
    InASequence,
    InOneStatement,
    InTwoStatements,
    activations,
    drawn,
    operations,
    results,
)

# With what the report calls the module, and how many activations are left.
MODULES = {
    InOneStatement: ("InOneStatement", 0),
    InTwoStatements: ("InTwoStatements", 0),
    ByFunction: ("ByFunction", 0),
    ByAnyOfItsNames: ("ByAnyOfItsNames", 1),
    AfterBranches: ("AfterBranches", 0),
    InASequence: ("Sequential", 1),
}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", [nn.GroupNorm, GroupNorm32])
@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.filterwarnings("error:Dynamo detected")  # of what it would rather not trace
def test_values_are_those_of_the_original(cls, norm, affine: bool, device: str) -> None:
    """Catches another formula, a lost gradient, and an activation that is not fused."""
    reference = cls(norm, affine).to(device)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    model = copy.deepcopy(reference)
    report = convert(model, activation=True)
    name, left = MODULES[cls]
    assert activations(report) == {name: 1}
    assert "done by its norms: activations 1" in str(report)
    x = drawn(device)
    expected = results(reference, x)
    torch.testing.assert_close(results(model, x), expected, **CLOSE)
    assert operations(lambda: model(x)) == (1, left)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected[0], **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "double", "none", "else"])
def test_every_branch(kind: str) -> None:
    """Catches an activation that is lost, or done twice, in a branch with or without a norm."""
    reference = AfterBranches()
    model = copy.deepcopy(reference)
    convert(model, activation=True)
    x = drawn()
    torch.testing.assert_close(model(x, kind), reference(x, kind), **CLOSE)
    fused = {"plain": (1, 0), "double": (1, 1), "none": (0, 0), "else": (1, 0)}
    assert operations(lambda: model(x, kind)) == fused[kind]


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_branch_alone(normalizes: bool) -> None:
    """Catches an activation that only those calls keep which reach the norm."""
    reference = AfterABranch()
    model = copy.deepcopy(reference)
    assert activations(convert(model, activation=True)) == {"AfterABranch": 1}
    x = drawn()
    torch.testing.assert_close(model(x, normalizes), reference(x, normalizes), **CLOSE)
    assert operations(lambda: model(x, normalizes)) == ((2, 0) if normalizes else (0, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    """Catches a result farther from the exact one than that of the original."""
    reference = InTwoStatements(affine=False).to(device, dtype)
    model = copy.deepcopy(reference)
    convert(model, activation=True)
    x = drawn(device, dtype)
    assert operations(lambda: model(x)) == (1, 0)
    exact = reference.double()(x.double())
    original = nn.functional.silu(nn.functional.group_norm(x, 2))
    error = (model(x) - exact).abs()
    assert error.max() <= (original - exact).abs().max()
    assert (error <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_layouts(dtype: torch.dtype, layout, device: str) -> None:
    """Catches another dtype or order in memory than the converted norm and SiLU have."""
    plain, model = (InOneStatement().to(device) for _ in range(2))
    convert(plain)
    convert(model, activation=True)
    x = drawn(device, dtype).detach().contiguous(memory_format=layout)
    with torch.autocast(device, dtype):
        found, expected = model(x), plain(x)
        assert operations(lambda: model(x)) == (1, 0)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_revert_copy_and_pickle() -> None:
    """Catches a module that cannot go back, or into another process."""
    model = nn.ModuleList([InTwoStatements(), InASequence()])
    before = [type(m) for m in model.modules()]
    convert(model, activation=True)
    x = drawn()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert all(torch.equal(a(x), b(x)) for a, b in zip(other, model, strict=True))
        assert operations(lambda other=other: other[1](x)) == (1, 1)
        assert len(revert(other).converted) == 4
        assert [type(m) for m in other.modules()] == before
    assert convert(model, activation=True).blocks == ()  # nothing is left to do
    assert convert(model, residual=True).blocks == ()  # it has no norms over rows


class WithRows(nn.Module):
    """A norm over rows as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, CHANNELS), nn.SiLU()
        self.rows = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.act(self.norm(x))
        x = self.rows(x + x.sin())
        return x


@pytest.mark.parametrize("options", [{"residual": True}, {"activation": True}, {}])
def test_one_after_the_other(options: dict[str, bool]) -> None:
    """Catches a second call of convert that is not heard, or that undoes the first."""
    reference = WithRows()
    model = copy.deepcopy(reference)
    convert(model, **options)
    (block,) = convert(model, residual=True, activation=True).blocks
    assert (block.additions, block.modulations, block.activations) == (1, 0, 1)
    x = drawn()
    torch.testing.assert_close(results(model, x), results(reference, x), **CLOSE)
    revert(model)
    assert type(model) is WithRows and type(model.norm) is nn.GroupNorm


def test_blocks_of_diffusers() -> None:
    """Catches a forward of a real model that is read wrong."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    reference = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
    ).eval()
    model = copy.deepcopy(reference)
    report = convert(model, activation=True)
    assert report.skipped == ()
    done = {b.type_name: b.activations for b in report.blocks if b.activations}
    assert done == {"ResnetBlock2D": 2, "UNet2DModel": 1}
    x = torch.randn(2, 3, 8, 8)
    found, expected = (m(x, 3).sample for m in (model, reference))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert operations(lambda: model(x, 3))[0] == len(report.converted)
