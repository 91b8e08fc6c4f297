"""Forwards and calls for which ``convert(activation=True)`` must leave something as it is."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fused_op import convert, fused_group_norm, revert
from tests.convert.activated import (
    CHANNELS,
    CLOSE,
    Activated,
    ByFunction,
    InASequence,
    InTwoStatements,
    activations,
    drawn,
    operations,
)


class OtherVariable(Activated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        output = self.act(hidden)
        return output + hidden


class OtherArgument(Activated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = self.act(x)
        return hidden


class LocalName(Activated):
    def forward(self, x: Tensor, F=nn.functional) -> Tensor:
        return F.silu(self.norm(x))


class LocalNameOfAnInnerFunction(Activated):
    def forward(self, x: Tensor) -> Tensor:
        F = nn.functional
        return (lambda: F.silu(x))() + F.silu(self.norm(x))


class Keyword(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x), inplace=True)


class Assigned(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(y := x + 1)) + y


class Starred(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(*[self.norm(x)])


class InsideFunction(Activated):
    def forward(self, x: Tensor) -> Tensor:
        def run(h: Tensor) -> Tensor:
            return self.act(self.norm(h))

        return run(x)


class InATry(Activated):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.norm(x)
            x = self.act(x)
        except ValueError:
            x = -x
        return x


class OtherActivation(Activated):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class DerivedActivation(Activated):
    def __init__(self) -> None:
        super().__init__()
        self.act = type(
            "Swish", (nn.SiLU,), {"forward": lambda self, x: x * torch.sigmoid(2 * x)}
        )()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


LEFT = (
    *(OtherVariable, OtherArgument, LocalName, LocalNameOfAnInnerFunction, Keyword, Assigned),
    *(Starred, InsideFunction, InATry, OtherActivation, DerivedActivation),
)


@pytest.mark.parametrize("cls", LEFT)
def test_what_stays(cls) -> None:
    """Catches a form that only looks like SiLU behind a group norm."""
    reference = cls()
    model = copy.deepcopy(reference)
    (block,) = convert(model, activation=True).blocks
    assert block.activations == 0
    assert block.reason == "no SiLU comes right after a group norm in its forward"
    x = drawn()
    torch.testing.assert_close(model(x), reference(x), **CLOSE)


def test_sequences_without_the_form() -> None:
    """Catches an activation that does not follow the norm."""
    model = nn.Sequential(
        nn.SiLU(), nn.GroupNorm(2, CHANNELS), nn.GELU(), nn.GroupNorm(2, CHANNELS)
    )
    reference = copy.deepcopy(model)
    assert convert(model, activation=True).blocks == ()
    x = drawn()
    torch.testing.assert_close(model(x), reference(x), **CLOSE)


@pytest.mark.parametrize("cls", [InTwoStatements, InASequence])
@pytest.mark.parametrize("hooked", ["norm", "act", "all"])
def test_hooks_run(cls, hooked: str) -> None:
    """Catches a module that is no longer called where something waits for its call."""
    model = cls()
    convert(model, activation=True)
    x, seen = drawn(), []
    expected = model(x)
    norm, act = (model.norm, model.act) if cls is InTwoStatements else model.layers[:2]
    hook = lambda module, *_: seen.append(module)  # noqa: E731
    handle = {
        "norm": norm.register_forward_hook,
        "act": act.register_forward_hook,
        "all": register_module_forward_hook,
    }[hooked](hook)
    try:
        torch.testing.assert_close(model(x), expected, **CLOSE)
    finally:
        handle.remove()
    assert {"norm": norm, "act": act, "all": norm}[hooked] in seen
    assert operations(lambda: model(x))[0] == 1


def test_modules_that_change_after_convert() -> None:
    """Catches SiLU that is applied though the module has another activation, or norm, by now."""
    model = InTwoStatements()
    convert(model, activation=True)
    x = drawn()
    model.act = nn.ReLU()
    torch.testing.assert_close(model(x), F.relu(F.group_norm(x, 2)), **CLOSE)
    model.act, model.norm = nn.SiLU(), nn.Identity()
    torch.testing.assert_close(model(x), F.silu(x), **CLOSE)
    model.norm = nn.GroupNorm(4, CHANNELS)
    torch.testing.assert_close(model(x), F.silu(F.group_norm(x, 4)), **CLOSE)
    convert(model)
    model.norm.activation = "silu"
    torch.testing.assert_close(model(x), F.silu(F.silu(F.group_norm(x, 4))), **CLOSE)


def test_a_function_that_is_replaced(monkeypatch) -> None:
    """Catches F.silu itself where the program has put another function in its place."""
    model = ByFunction()
    convert(model, activation=True)
    monkeypatch.setattr(F, "silu", torch.relu)
    x = drawn()
    torch.testing.assert_close(model(x), torch.relu(F.group_norm(x, 2)), **CLOSE)


def test_sequences_that_change_after_convert() -> None:
    """Catches a sequence that runs what it had when it was converted."""
    model = InASequence().layers
    convert(model, activation=True)
    model.append(nn.GroupNorm(4, CHANNELS))
    model.append(nn.SiLU())
    x = drawn()
    expected = F.silu(F.group_norm(F.silu(F.silu(F.group_norm(x, 2))), 4))
    torch.testing.assert_close(model(x), expected, **CLOSE)
    torch.testing.assert_close(model[:2](x), F.silu(F.group_norm(x, 2)), **CLOSE)
    del model[1]
    torch.testing.assert_close(model[:2](x), F.silu(F.group_norm(x, 2)), **CLOSE)
    assert len(model) == 5


INPUTS = {
    "no spatial dimension": torch.randn(3, CHANNELS),
    "volumes": torch.randn(2, CHANNELS, 2, 3, 4),
    "no samples": torch.randn(0, CHANNELS, 4),
    "no pixels": torch.randn(2, CHANNELS, 0),
    "not contiguous": torch.randn(2, 4, CHANNELS).mT,
    "infinite and NaN": torch.tensor([torch.inf, torch.nan, 1, 0]).repeat(2, CHANNELS, 1),
    "other channels": torch.randn(2, CHANNELS + 2, 4),
    "one dimension": torch.randn(CHANNELS),
    "float64": torch.randn(2, CHANNELS, 4, dtype=torch.float64),
    "integers": torch.ones(2, CHANNELS, 4, dtype=torch.int64),
    "complex": torch.randn(2, CHANNELS, 4, dtype=torch.complex64),
    "bfloat16": torch.randn(2, CHANNELS, 4, dtype=torch.bfloat16),
    "meta": torch.randn(2, CHANNELS, 4, device="meta"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    """Catches an input for which the two forwards disagree, or only one of them raises."""
    plain, model = InTwoStatements(), InTwoStatements()
    convert(plain)
    convert(model, activation=True)
    outcomes = []
    for each in (plain, model):
        try:
            outcomes.append(each(INPUTS[name]))
        except (RuntimeError, ValueError, TypeError) as error:
            outcomes.append(type(error))
    if isinstance(outcomes[0], Tensor) and not outcomes[0].is_meta:
        close = CLOSE if outcomes[0].dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(*outcomes, **close, equal_nan=True)
    else:
        assert type(outcomes[0]) is type(outcomes[1])


def test_tensors_from_inference_mode() -> None:
    """Catches an error for tensors that autograd does not save, which the original takes."""
    reference = InTwoStatements()
    model = copy.deepcopy(reference)
    convert(model, activation=True)
    with torch.inference_mode():
        x = torch.randn(2, CHANNELS, 4)
        torch.testing.assert_close(model(x), reference(x), **CLOSE)
    for each in (reference, model):
        each.requires_grad_(False)
    torch.testing.assert_close(model(x), reference(x), **CLOSE)


def test_transforms() -> None:
    """Catches vmap, and a second derivative, that the two modules have and the block has not."""
    reference = InTwoStatements()
    model = copy.deepcopy(reference)
    convert(model, activation=True)
    x = torch.randn(2, 3, CHANNELS, 4)
    found, expected = (torch.vmap(m)(x) for m in (model, reference))
    torch.testing.assert_close(found, expected, **CLOSE)
    hessians = [
        torch.autograd.functional.hessian(lambda x, m=m: m(x).pow(3).sum(), x[0, :1])
        for m in (model, reference)
    ]
    torch.testing.assert_close(*hessians, rtol=1e-3, atol=1e-4)


def test_every_norm_and_channel_check(device: str) -> None:
    """Catches another eps, number of groups or weight than those of the norm in question."""
    model = nn.Sequential(nn.GroupNorm(4, CHANNELS, eps=0.5), nn.SiLU()).to(device)
    nn.init.normal_(model[0].weight)
    assert activations(convert(model, activation=True)) == {"Sequential": 1}
    x = drawn(device)
    expected = fused_group_norm(x, 4, *model[0].parameters(), 0.5, activation="silu")
    assert torch.equal(model(x), expected)


class ChangesItself(Activated):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.prepared(x))
        h = self.act(h)
        return h

    def prepared(self, x: Tensor) -> Tensor:
        self.act = nn.ReLU()
        return x


class BindsSelf(Activated):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(x))
        try:
            raise ValueError
        except ValueError as self:
            return x


def test_the_order_of_evaluation() -> None:
    """Catches an activation that is looked up before the norm's input is computed."""
    model = ChangesItself()
    assert activations(convert(model, activation=True)) == {"ChangesItself": 1}
    x = drawn()
    torch.testing.assert_close(model(x), F.relu(F.group_norm(x, 2)), **CLOSE)


def test_another_self() -> None:
    """Catches a helper that is looked up on what ``self`` means by then."""
    model = BindsSelf()
    (block,) = convert(model, activation=True).blocks
    assert block.reason == "its forward has another self"


@pytest.mark.parametrize("option", ["residual", "modulation", "activation"])
def test_other_modules_of_a_model(option: str) -> None:
    """Catches an error for a scripted module, and a sequence that is changed for nothing."""
    script = torch.jit.script(nn.Identity())
    rows = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))
    model = nn.ModuleList([nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU(), script), rows])
    report = convert(model, **{option: True})
    done = [(b.additions, b.modulations, b.activations) for b in report.blocks if not b.reason]
    assert done == ([(0, 0, 1)] if option == "activation" else [])
    assert type(rows) is nn.Sequential
    x = drawn()
    expected = nn.functional.group_norm(x, 2)
    torch.testing.assert_close(model[0](x), F.silu(expected), **CLOSE)


def test_slices_go_back() -> None:
    """Catches a slice that keeps the class of what it was cut from."""
    model = InASequence().layers
    convert(model, activation=True)
    part = model[:2]
    x = drawn()
    torch.testing.assert_close(part(x), F.silu(F.group_norm(x, 2)), **CLOSE)
    revert(part)
    assert type(part) is nn.Sequential and type(part[0]) is nn.GroupNorm
    assert b"fused_op" not in pickle.dumps(part)


class Doubled(nn.Sequential):
    def __iter__(self):
        for module in super().__iter__():
            yield lambda x, module=module: 2 * module(x)


def test_a_sequence_with_its_own_iteration() -> None:
    """Catches modules that are called without what a subclass does around them."""
    model = Doubled(nn.GroupNorm(2, CHANNELS), nn.SiLU())
    reference = copy.deepcopy(model)
    (block,) = convert(model, activation=True).blocks
    assert block.reason == "it iterates over its modules in a way of its own"
    x = drawn()
    torch.testing.assert_close(model(x), reference(x), **CLOSE)


def test_a_missing_entry() -> None:
    """Catches a sequence that goes on where the original raises."""
    model = nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU())
    model.register_module("2", None)
    convert(model, activation=True)
    with pytest.raises(TypeError, match="NoneType"):
        model(drawn())


@pytest.mark.parametrize("where", ["module", "function", "sequence"])
def test_programs_that_replace_functions_of_pytorch(monkeypatch, where: str) -> None:
    """Catches SiLU, or a sequence, that no longer does what the program makes it do."""
    model = nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU())
    if where == "module":
        monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: torch.relu(x))
    elif where == "function":
        monkeypatch.setattr(F, "silu", lambda x, inplace: torch.relu(x))
    else:
        monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: torch.relu(self[0](x)))
    convert(model, activation=True)
    x = drawn()
    torch.testing.assert_close(model(x), torch.relu(F.group_norm(x, 2)), **CLOSE)
