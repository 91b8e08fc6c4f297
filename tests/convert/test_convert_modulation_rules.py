"""Forwards and norms for which ``convert(modulation=True)`` must leave something as it is."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fused_op import convert
from tests.convert.modulated import CLOSE, COLS, ROWS, Both, Broadcast, Condition, Indexed, drawn


def with_buffer(model: nn.Module) -> None:
    weight = model.norm.weight.detach()
    del model.norm.weight
    model.norm.register_buffer("weight", weight)


def with_a_function(model: nn.Module) -> None:
    del model.norm
    model.norm = torch.tanh


CHANGES = {
    "buffer": with_buffer,
    "function": with_a_function,
    "dtype": lambda model: model.norm.double(),
    "dropout": lambda model: setattr(model.norm, "dropout_p", 0.5),
    "norm": lambda model: setattr(model, "norm", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("cls", [Indexed, Both])
def test_a_norm_that_changed(cls, change) -> None:
    """Catches parameters, options or a norm that the op does not ask for."""
    reference = cls()
    nn.init.normal_(reference.norm.weight)
    model = copy.deepcopy(reference)
    convert(reference)
    convert(model, residual=True, modulation=True)
    for each in (reference, model):
        change(each)

    def run(each: nn.Module) -> object:
        torch.manual_seed(1)
        try:
            return each(*inputs)
        except (RuntimeError, TypeError) as error:
            return type(error)

    inputs = drawn()
    found, expected = run(model), run(reference)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, **CLOSE)
    else:
        assert found is expected


class OnTheWay(Broadcast):
    """Its input sets the shift, which is read after it."""

    def doubled(self, x: Tensor) -> Tensor:
        self.shift = x[:, :1] * 2
        return x * 2

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(self.doubled(x)) * (1 + scale) + self.shift


class Trying(Broadcast):
    """An error in the second statement leaves what the first one assigned."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = x
        try:
            h = self.norm(x)
            h = h * (1 + scale) + scale[..., :3]
        except RuntimeError:
            pass
        return h


@pytest.mark.parametrize("cls", [OnTheWay, Trying])
def test_the_order_of_evaluation_stays(cls) -> None:
    """Catches an operand that is evaluated before what it depends on."""
    model = cls()
    reference = copy.deepcopy(model)
    convert(model, modulation=True)
    scale = torch.randn(2, 1, COLS)
    torch.testing.assert_close(model(ROWS, scale), reference(ROWS, scale), **CLOSE)


def test_an_error_shows_the_line() -> None:
    """Catches a traceback that points to the first line of the file."""
    model = Broadcast()
    convert(model, modulation=True)
    with pytest.raises(RuntimeError) as caught:
        model(ROWS, ROWS[:, :2], ROWS)
    lines = [entry.lineno + 1 for entry in caught.traceback if entry.name == "forward"]
    assert Broadcast.forward.__code__.co_firstlineno + 1 in lines


class OtherSelf(Broadcast):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self = self.to(x.device)
        return self.norm(x) * (1 + scale)


class InsideFunction(OtherSelf):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        modulate = lambda self: self.norm(x) * (1 + scale)  # noqa: E731
        return modulate(self)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OtherSelf, "its forward has another self"),
        (InsideFunction, "no modulation comes right after a norm in its forward"),
    ],
)
def test_self_is_the_module(cls, reason: str) -> None:
    """Catches a call of something else than the module."""
    model = cls()
    assert [block.reason for block in convert(model, modulation=True).blocks] == [reason]
    model(ROWS, ROWS)


class OtherFactor(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x) * (2 + scale[:, None]) + shift[:, None]


class KeptNorm(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        hidden = self.norm(x)
        modulated = hidden * (1 + scale[:, None]) + shift[:, None]
        return modulated + hidden


class ReadTwice(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = hidden * (1 + embedding[:, None]) + hidden
        return hidden


class Later(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        hidden = self.norm(x)
        scale = scale * 2
        hidden = hidden * (1 + scale[:, None]) + shift[:, None]
        return hidden


@pytest.mark.parametrize("cls", [OtherFactor, KeptNorm, ReadTwice, Later])
def test_left_with_a_reason(cls) -> None:
    """Catches a rewrite of statements that mean something else."""
    model = cls()
    report = convert(model, modulation=True)
    (block,) = report.blocks
    assert block.reason == "no modulation comes right after a norm in its forward"
    assert type(model) is cls and block.reason in str(report)


class ScaleFirst(Broadcast):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (1 + scale) * self.norm(x + scale.mul_(2.0)) + shift


def test_scale_that_the_argument_changes() -> None:
    """Catches `1 + scale` after what came after it, and changes it in place."""
    model = ScaleFirst()
    reference = copy.deepcopy(model)
    (block,) = convert(model, modulation=True).blocks
    assert block.modulations == 0 and block.reason
    entries = torch.randn(2, 2, 1, COLS)
    found, expected = (m(ROWS, *entries.clone()) for m in (model, reference))
    torch.testing.assert_close(found, expected, **CLOSE)
