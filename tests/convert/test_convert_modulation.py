"""``convert(modulation=True)``: norms that modulate compute what their modules did before."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fused_op import convert, fused_modulated_layer_norm, revert
from tests.convert.modulated import (
    CLOSE,
    COLS,
    ROWS,
    Both,
    Broadcast,
    Condition,
    Indexed,
    InTwoStatements,
    drawn,
    fused_modulations,
    modulations,
    results,
)


class IndexedSum(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        x = self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]
        return x


class InAnotherOrder(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        if x.numel() > 0:
            x = (shift.unsqueeze(1) + (1 + scale).unsqueeze(1) * self.norm(x.float())).type_as(x)
        return x


class ByScaleAlone(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x * 2) * (1 + scale)[:, None] * shift[:, None]


class Subtracting(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x) * (1 + scale[:, None]) - shift[:, None]


class Computing(Condition):
    """A shift that may do anything, and must not do it before the norm."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x) * (1 + scale[:, None]) + nn.functional.tanh(shift[:, None])


class ForEachToken(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding[:, None].expand_as(x))
        return self.norm(x) * (1 + scale) + shift


MODULES = [Indexed, IndexedSum, InTwoStatements, InAnotherOrder]
MODULES += [ByScaleAlone, Subtracting, Computing]  # without a shift


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.filterwarnings("error:Dynamo detected")  # of what it would rather not trace
def test_values_are_those_of_the_original(cls, norm, affine: bool, device: str) -> None:
    """Catches another formula, a lost gradient, and a modulation that is not fused."""
    reference = cls(norm, eps=1e-6, elementwise_affine=affine).to(device)
    for parameter in reference.norm.parameters():
        nn.init.normal_(parameter)
    model = copy.deepcopy(reference)
    report = convert(model, modulation=True)
    assert modulations(report) == {cls.__name__: 1} and report.blocks[0].reason == ""
    assert "done by its norms: modulations 1" in str(report)
    inputs = drawn(device)
    expected = results(reference, inputs)
    torch.testing.assert_close(results(model, inputs), expected, **CLOSE)
    assert fused_modulations(lambda: model(*inputs)) == 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), expected[0], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    """Catches a result farther from the exact one than that of the original."""
    reference = Indexed(elementwise_affine=False).to(device, dtype)
    model = copy.deepcopy(reference)
    convert(model, modulation=True)
    inputs = drawn(device, dtype)
    assert fused_modulations(lambda: model(*inputs)) == 1
    found, original = model(*inputs), reference(*inputs)
    shift, scale = reference.entries(inputs[1])
    n = nn.functional.layer_norm(inputs[0].double(), (COLS,))
    exact = n * (1 + scale.double()[:, None]) + shift.double()[:, None]
    assert torch.equal(found, exact.to(dtype)) or (
        (found - exact).abs().max() <= (original - exact).abs().max()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_as_before(dtype: torch.dtype, device: str) -> None:
    """Catches a result of another dtype: autocast runs a norm in float32."""
    reference = Indexed().to(device)
    model = copy.deepcopy(reference)
    convert(model, modulation=True)
    x, embedding = drawn(device)
    with torch.autocast(device, dtype):
        found, expected = model(x, embedding), reference(x, embedding)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_an_entry_for_each_row(device: str) -> None:
    """Catches the op where it is slower: on the CPU, if each row has an entry."""
    reference = ForEachToken().to(device)
    model = copy.deepcopy(reference)
    assert modulations(convert(model, modulation=True)) == {"ForEachToken": 1}
    inputs = drawn(device)
    torch.testing.assert_close(model(*inputs), reference(*inputs), **CLOSE)
    assert fused_modulations(lambda: model(*inputs)) == (device == "cuda")


OPERANDS = {  # of a broadcast that the op does not do, or means otherwise; and of one it does
    "one sample's rows": (torch.randn(1, 3, COLS), torch.randn(1, 3, COLS), 0),
    "two dimensions": (torch.randn(3, COLS), torch.randn(3, COLS), 0),
    "no columns": (torch.randn(2, 1, 1), torch.randn(2, 1, 1), 0),
    "more dimensions": (torch.randn(2, 1, 1, COLS), torch.randn(2, 1, 1, COLS), 0),
    "other entries": (torch.randn(2, 1, COLS), torch.randn(COLS), 1),  # the product alone
    "a shift of another dtype": (torch.randn(2, 1, COLS), torch.randn(2, 1, COLS).double(), 1),
    "a scale of another dtype": (torch.randn(2, 1, COLS).double(), torch.randn(2, 1, COLS), 0),
    "numbers": (0.5, 0.25, 0),
    "all rows": (torch.randn(COLS), torch.randn(COLS), 1),
    "all rows, with ones": (torch.randn(1, 1, COLS), torch.randn(1, 1, COLS), 1),
    "samples": (torch.randn(2, 1, COLS), torch.randn(2, 1, COLS), 1),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_operands(case: str) -> None:
    """Catches a broadcast or a conversion that the original does and the kernel does not."""
    scale, shift, fused = OPERANDS[case]
    reference = Broadcast()
    model = copy.deepcopy(reference)
    convert(model, modulation=True)
    found, expected = model(ROWS, scale, shift), reference(ROWS, scale, shift)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert fused_modulations(lambda: model(ROWS, scale, shift)) == fused


def test_hooks_of_a_norm_run() -> None:
    """Catches a norm that is no longer called where something waits for its call."""
    model = Indexed()
    convert(model, modulation=True)
    inputs, seen = drawn(), []
    expected = model(*inputs)
    model.norm.register_forward_hook(lambda module, *_: seen.append(module))
    torch.testing.assert_close(model(*inputs), expected, **CLOSE)
    assert seen == [model.norm]


def test_revert_copy_and_pickle() -> None:
    """Catches a module that cannot go back, or into another process."""
    model = nn.ModuleList([Indexed(), InTwoStatements()])
    before = [type(m) for m in model.modules()]
    convert(model, modulation=True)
    inputs = drawn()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other[0](*inputs), model[0](*inputs))
        assert len(revert(other).converted) == 4
        assert [type(m) for m in other.modules()] == before
    assert convert(model, modulation=True).blocks == ()  # nothing is left to do


@pytest.mark.parametrize("options", [{"residual": True}, {"modulation": True}, {}])
def test_one_after_the_other(options: dict[str, bool]) -> None:
    """Catches a second call of convert that is not heard, or that undoes the first."""
    reference = Both()
    model = copy.deepcopy(reference)
    convert(model, **options)
    found = convert(model, residual=True, modulation=True).blocks
    assert [(block.additions, block.modulations) for block in found] == [(1, 1)]
    inputs = drawn()
    torch.testing.assert_close(model(*inputs), reference(*inputs), **CLOSE)
    revert(model)
    assert type(model) is Both and type(model.norm) is nn.LayerNorm


def test_tensors_that_autograd_does_not_save() -> None:
    """Catches an error for a condition from inference mode, which the product does not save."""
    model = Broadcast()
    reference = copy.deepcopy(model)
    convert(model, modulation=True)
    with torch.inference_mode():
        entries = torch.randn(2, 1, COLS), torch.randn(2, 1, COLS)
    x = torch.randn(2, 3, COLS, requires_grad=True)
    found, expected = (torch.autograd.grad(m(x, *entries).sum(), x)[0] for m in (model, reference))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_other_devices_and_missing_shifts() -> None:
    """Catches memory that nothing wrote, and an error that nobody sees any more."""
    model = Broadcast()
    convert(model, modulation=True)
    scale = torch.randn(2, 1, COLS)
    with pytest.raises(TypeError, match="NoneType"):
        model(ROWS, scale, None)
    with pytest.raises(RuntimeError):
        model(ROWS, scale.to("meta"), scale)
    with pytest.raises(RuntimeError, match="scale: Tensor on device meta is not on the"):
        fused_modulated_layer_norm(ROWS, scale.to("meta"), scale)
    assert model.to("meta")(*(t.to("meta") for t in (ROWS, scale, scale))).is_meta


def test_a_second_call_sees_other_norms() -> None:
    """Catches a norm whose modulation stays because the first call left it out."""
    model = nn.ModuleDict({"a": Indexed()})
    assert convert(model, exclude="a.norm", modulation=True).blocks == ()
    assert modulations(convert(model, modulation=True)) == {"Indexed": 1}
