"""``convert(residual=True)``: blocks whose norms add the residual compute what they did before."""

import copy
import functools
import pickle
import re

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from fused_op import _block, convert, revert
from fused_op.convert import Report


def relay(function):
    """A decorator as libraries have them."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.calls += 1
        return function(self, *args, **kwargs)

    return wrapper


class PreNorm(nn.Module):
    """The middle of a decoder layer."""

    calls = 0

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.first, self.second = norm(16), norm(16)
        self.attention, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    @relay
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """With a docstring, whose indentation is a constant of the bytecode."""
        residual = x
        x = self.first(x)
        x = residual + self.attention(x) * scale
        residual = x
        x = self.second(x)
        return residual + self.mlp(x)


class PostNorm(nn.Module):
    """As in BERT; both operands draw random numbers, in the order of the source."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.drop = norm(16), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.numel() > 0:
            x = self.norm(self.drop(x) + self.drop(y))
        return x


class BothNorm(nn.Module):
    """The middle of a layer that has norms behind its blocks, too."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.behind, self.before = norm(16), norm(16)
        self.attention, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.behind(self.attention(x))
        x = residual + x
        residual = x
        x = self.before(x)
        return residual + self.mlp(x)


def additions(report: Report) -> dict[str, int]:
    return {r.type_name: r.additions for r in report.blocks}


def fused_additions(run) -> int:
    """How many norms add a residual in their kernel."""
    with profile(record_shapes=True) as trace:
        run()
    events = [e for e in trace.events() if e.name == "fused_op::norm_forward"]
    both = sum(e.name == "fused_op::post_add_pre_rms_norm_forward" for e in trace.events())
    return both + sum(bool(e.input_shapes[2]) for e in events)


@pytest.mark.parametrize("block", [PreNorm, PostNorm, BothNorm])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_values_are_those_of_converted_norms(block, norm, monkeypatch, device: str) -> None:
    """Catches other values, gradients or random numbers, and an addition that is not fused."""
    monkeypatch.setattr(_block, "MANY", 0)
    reference = block(norm).to(device)
    model = copy.deepcopy(reference)
    convert(reference)
    report = convert(model, residual=True)
    assert additions(report) == {block.__name__: 1} and report.blocks[0].reason == ""
    assert "done by its norms: additions 1" in str(report)
    x = torch.randn(3, 16, device=device, requires_grad=True)
    runs = []
    for each in (reference, model):
        torch.manual_seed(0)
        output = each(*[x] * (2 if block is PostNorm else 1))
        leaves = [x, *each.parameters()]
        runs.append([output, *torch.autograd.grad(output.cos().sum(), leaves)])
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)
    assert fused_additions(lambda: model(*[x] * (2 if block is PostNorm else 1))) == 1
    compiled = torch.compile(model.eval(), fullgraph=True, backend="aot_eager")
    inputs = [x] * (2 if block is PostNorm else 1)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


def both_in_one(run) -> int:
    with profile() as trace:
        run()
    return sum(e.name == "fused_op::post_add_pre_rms_norm_forward" for e in trace.events())


def test_two_norms_and_their_addition_are_one_call(monkeypatch) -> None:
    """Catches norms that differ, are hooked or of another kind, taken together nevertheless."""
    x = torch.randn(3, 16)
    model = BothNorm()
    convert(model, residual=True)
    assert both_in_one(lambda: model(x)) == 0  # of so few elements
    monkeypatch.setattr(_block, "MANY", 48)

    def of(change) -> nn.Module:
        torch.manual_seed(0)
        reference = BothNorm(lambda size: nn.RMSNorm(size, 1e-5))
        change(reference)
        model = copy.deepcopy(reference)
        convert(reference)
        assert additions(convert(model, residual=True)) == {"BothNorm": 1}
        assert torch.equal(model(x), reference(x))
        return model

    model = of(lambda model: None)
    assert both_in_one(lambda: model(x)) == 1
    for change in (
        lambda model: setattr(model.behind, "eps", 1e-6),
        lambda model: setattr(model, "behind", nn.RMSNorm((16,), 1e-6)),
        lambda model: setattr(model, "behind", nn.LayerNorm(16)),
        lambda model: setattr(model, "before", nn.LayerNorm(16)),
        lambda model: model.behind.register_forward_hook(lambda *_: None),
        lambda model: model.before.register_forward_pre_hook(lambda *_: None),
    ):
        model = of(change)
        assert both_in_one(lambda model=model: model(x)) == 0


def test_arguments_and_wrappers_stay() -> None:
    """Catches a decorator, a default or a keyword that the new forward has lost."""
    model = PreNorm()
    original = PreNorm.forward
    convert(model, residual=True)
    x = torch.randn(2, 16)
    expected = copy.deepcopy(model)
    revert(expected)
    torch.testing.assert_close(model(x, scale=0.5), expected(x, scale=0.5), rtol=1e-5, atol=1e-5)
    assert model.calls == 1 and PreNorm.forward is original
    assert type(model).__name__ == "PreNorm" and isinstance(model, PreNorm)
    assert type(model).forward.__doc__ == original.__doc__


def test_revert_copy_and_pickle() -> None:
    """Catches a block that cannot go back, or into another process."""
    model = nn.ModuleList([PreNorm(), PostNorm()])
    before = [type(m) for m in model.modules()]
    convert(model, residual=True)
    x = torch.randn(2, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other[0](x), model[0](x))
        assert len(revert(other).converted) == 5
        assert [type(m) for m in other.modules()] == before
    assert convert(model, residual=True).blocks == ()  # nothing is left to do


def patched(self: PostNorm, x: Tensor, y: Tensor) -> Tensor:
    x = self.norm(x + y)
    return 2 * x


def test_forward_that_the_class_got_later(monkeypatch) -> None:
    """Catches a block that runs what its class was before another forward was put into it."""
    convert(before := PostNorm(), residual=True)
    monkeypatch.setattr(PostNorm, "forward", patched)
    assert type(copy.deepcopy(before)) is type(before)
    model, x = PostNorm(), torch.randn(2, 2, 16)
    expected = model(*x)
    assert additions(convert(model, residual=True)) == {"PostNorm": 1}
    torch.testing.assert_close(model(*x), expected)


def test_norm_of_two_names() -> None:
    """Catches an addition that stays because the block calls its norm by another name."""
    model = PreNorm()
    model.second = model.first
    assert additions(convert(model, residual=True)) == {"PreNorm": 1}


def test_class_that_was_changed_since() -> None:
    """Catches a wrapper, such as that of fully_shard, which a second conversion takes away."""
    model = PreNorm()
    convert(model, residual=True)
    model.__class__ = wrapped = type("Wrapped", (type(model),), {})
    report = convert(model, residual=True, modulation=True)
    assert type(model) is wrapped
    assert report.blocks[0].reason == "its class was changed after convert: undo that first"


def test_instance_made_by_the_class_of_a_converted_block() -> None:
    """Catches a KeyError: models make layers of the class that other layers have."""
    first = PreNorm()
    convert(first, residual=True)
    second = type(first)()
    assert convert(second, residual=True).blocks == ()
    convert(second, residual=True, modulation=True)
    revert(second)
    assert [type(m) for m in second.modules()] == [type(m) for m in PreNorm().modules()]


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "global"])
def test_hooks_of_a_norm_run(kind: str) -> None:
    """Catches a norm that is no longer called where something waits for its call."""
    model = PreNorm()
    convert(model, residual=True)
    seen = []

    def hook(*args) -> None:
        seen.append(args[0])

    register = {
        "forward": model.second.register_forward_hook,
        "pre": model.second.register_forward_pre_hook,
        "backward": model.second.register_full_backward_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind]
    x = torch.randn(2, 16, requires_grad=True)
    expected = model(x)
    handle = register(hook)
    found = model(x)
    found.sum().backward()
    handle.remove()
    assert model.second in seen
    torch.testing.assert_close(found, expected)


OTHERS = {"broadcast": torch.ones(16), "dtype": torch.ones(3, 16).double(), "number": 1.0}


@pytest.mark.parametrize("case", OTHERS)
def test_operands_that_no_kernel_adds(case: str) -> None:
    """Catches a broadcast or a conversion that the original does and the kernel does not."""
    other = OTHERS[case]
    model = PostNorm().eval()
    model.drop = nn.Identity()
    x = torch.randn(3, 16)
    reference = copy.deepcopy(model)
    convert(model, residual=True)
    if case == "dtype":
        model.norm.double(), reference.norm.double()
    torch.testing.assert_close(model(x, other), reference(x, other), rtol=1e-5, atol=1e-5)


class NormOfSum(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.norm(residual + x)
        return y


@pytest.mark.parametrize("kind", ["nested", "complex"])
def test_inputs_that_no_kernel_takes(kind: str) -> None:
    """Catches the fused addition of what the original forward adds."""
    if kind == "nested":
        x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
        model = NormOfSum(nn.LayerNorm(8))
    else:
        x = torch.randn(3, 8, dtype=torch.complex64)
        model = NormOfSum(nn.RMSNorm(8, elementwise_affine=False))
    expected = model(x, x)
    report = convert(model, residual=True)
    assert report.blocks[0].additions == 1
    for mine, right in zip(model(x, x).unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(mine, right)


class LaterNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = residual + self.attention(x)
        if x.is_cuda:
            x = x * 1
        residual = x
        x = self.second(x)
        return x + residual


class OtherVariable(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = residual + self.attention(x)
        residual = self.mlp(x)
        x = self.second(x)
        return x + residual


class Assigning(PostNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x + (z := y * 2))
        return x + z


class Subtracting(PostNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x - y)
        return x


class Closure(PostNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x + y)
        return super().__call__(x, y) if x is None else x


def without_source() -> nn.Module:
    names = {"PostNorm": PostNorm}
    code = "class NoSource(PostNorm):\n    def forward(self, x, y):\n        x = self.norm(x + y)"
    exec(code + "\n        return x", names)
    return names["NoSource"]()


def replaced() -> nn.Module:
    model = PostNorm()
    model.forward = lambda x, y: x
    return model


NO_ADDITION = "no addition comes right before a norm in its forward"
LEFT = {
    "later": (LaterNorm, NO_ADDITION),
    "other": (OtherVariable, NO_ADDITION),
    "assigning": (Assigning, NO_ADDITION),
    "subtracting": (Subtracting, NO_ADDITION),
    "closure": (Closure, "its forward is a closure"),
    "source": (without_source, "its forward is not what its source says, or that is not there"),
    "instance": (replaced, "its forward is replaced on the instance"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_with_a_reason(case: str) -> None:
    """Catches a rewrite of statements that mean something else."""
    make, reason = LEFT[case]
    model = make()
    before = type(model)
    report = convert(model, residual=True)
    assert [r.reason for r in report.blocks] == [reason]
    assert type(model) is before and re.search(reason, str(report))


def test_source_that_changed(monkeypatch) -> None:
    """Catches a file that was edited after its import: the old code runs, and counts."""
    import linecache

    file = PostNorm.forward.__code__.co_filename
    lines = [line.replace("self.drop(x) + ", "x + ") for line in linecache.getlines(file)]
    monkeypatch.setitem(linecache.cache, file, (1, None, lines, file))

    class_of = type("Edited", (PostNorm,), {})
    report = convert(class_of(), residual=True)
    assert report.blocks[0].reason.startswith("its forward is not what its source says")


MODELS = {  # of transformers: the additions that its blocks fuse
    "Llama": {"LlamaDecoderLayer": 1},
    "Qwen3": {"Qwen3DecoderLayer": 1},
    "Gemma2": {"Gemma2DecoderLayer": 1},
    "Gemma3Text": {"Gemma3DecoderLayer": 1},
    "Bert": {"BertSelfOutput": 1, "BertOutput": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    """Catches a forward of a real model that is read wrong."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        **({} if name == "Bert" else {"num_key_value_heads": 2, "head_dim": 8}),
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{name}Model")(config).eval()
    model = copy.deepcopy(reference)
    convert(reference)
    report = convert(model, residual=True)
    changed = {r.type_name: r.additions for r in report.blocks if r.additions}
    assert changed == MODELS[name], report
    ids = torch.arange(32).view(2, 16)
    outputs = [each(ids).last_hidden_state for each in (reference, model)]
    assert torch.equal(*outputs)
    assert fused_additions(lambda: model(ids)) == 2 * len(changed)
