"""``convert(modulation=True)``: norms that modulate compute what their modules did before."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from fused_op import convert, fused_modulated_layer_norm, revert
from fused_op.convert import Report

COLS = 16


class Condition(nn.Module):
    """A norm whose scale and shift come from an embedding; subclasses modulate by them."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, **options: object) -> None:
        super().__init__()
        self.norm, self.linear = norm(COLS, **options), nn.Linear(COLS, 2 * COLS)

    def entries(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return self.linear(embedding).chunk(2, dim=-1)


class Indexed(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class IndexedSum(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        x = self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]
        return x


class InTwoStatements(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        hidden = self.norm(x)
        hidden = hidden * (scale.unsqueeze(1) + 1) + shift.unsqueeze(dim=1)
        return hidden


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


class Both(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        y = self.norm(x + y)
        return y


MODULES = [Indexed, IndexedSum, InTwoStatements, InAnotherOrder]
MODULES += [ByScaleAlone, Subtracting, Computing]  # without a shift


def modulations(report: Report) -> dict[str, int]:
    return {block.type_name: block.modulations for block in report.blocks}


def fused_modulations(run) -> int:
    """How many norms modulate in their kernel."""
    with profile() as trace:
        run()
    return sum(e.name == "fused_op::modulated_norm_forward" for e in trace.events())


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 5, COLS, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(3, COLS, device=device, dtype=dtype, requires_grad=True)


def results(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    output = module(*inputs)
    leaves = [*inputs, *module.parameters()]
    return [output, *torch.autograd.grad(output.cos().sum(), leaves)]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("cls", MODULES)
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
    torch.testing.assert_close(results(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert fused_modulations(lambda: model(*inputs)) == 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), expected[0], rtol=1e-4, atol=1e-5)


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
    torch.testing.assert_close(model(*inputs), reference(*inputs), rtol=1e-4, atol=1e-5)
    assert fused_modulations(lambda: model(*inputs)) == (device == "cuda")


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLS)

    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift


ROWS = torch.randn(2, 3, COLS)
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
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert fused_modulations(lambda: model(ROWS, scale, shift)) == fused


def test_hooks_of_a_norm_run() -> None:
    """Catches a norm that is no longer called where something waits for its call."""
    model = Indexed()
    convert(model, modulation=True)
    inputs, seen = drawn(), []
    expected = model(*inputs)
    model.norm.register_forward_hook(lambda module, *_: seen.append(module))
    torch.testing.assert_close(model(*inputs), expected, rtol=1e-4, atol=1e-5)
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
    torch.testing.assert_close(model(*inputs), reference(*inputs), rtol=1e-4, atol=1e-5)
    revert(model)
    assert type(model) is Both and type(model.norm) is nn.LayerNorm


def with_buffer(model: nn.Module) -> None:
    weight = model.norm.weight.detach()
    del model.norm.weight
    model.norm.register_buffer("weight", weight)


def with_a_call(model: nn.Module) -> None:
    model.norm = torch.nn.Identity()
    model._modules["norm"] = torch.tanh  # as a user may replace it


CHANGES = {
    "buffer": with_buffer,
    "call": with_a_call,
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
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found is expected


def test_tensors_that_autograd_does_not_save() -> None:
    """Catches an error for a condition from inference mode, which the product does not save."""
    model = Broadcast()
    reference = copy.deepcopy(model)
    convert(model, modulation=True)
    with torch.inference_mode():
        entries = torch.randn(2, 1, COLS), torch.randn(2, 1, COLS)
    x = torch.randn(2, 3, COLS, requires_grad=True)
    found, expected = (torch.autograd.grad(m(x, *entries).sum(), x)[0] for m in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_other_devices_and_missing_shifts() -> None:
    """Catches memory that nothing wrote, and an error that nobody sees any more."""
    model = Broadcast()
    convert(model, modulation=True)
    scale = torch.randn(2, 1, COLS)
    with pytest.raises(TypeError, match="NoneType"):
        model(ROWS, scale, None)
    with pytest.raises(RuntimeError):
        model(ROWS, scale.to("meta"), scale)
    with pytest.raises(RuntimeError, match="all tensors must be on one device, got cpu and meta"):
        fused_modulated_layer_norm(ROWS, scale.to("meta"), scale)
    assert model.to("meta")(*(t.to("meta") for t in (ROWS, scale, scale))).is_meta


def test_a_second_call_sees_other_norms() -> None:
    """Catches a norm whose modulation stays because the first call left it out."""
    model = nn.ModuleDict({"a": Indexed()})
    assert convert(model, exclude="a.norm", modulation=True).blocks == ()
    assert modulations(convert(model, modulation=True)) == {"Indexed": 1}


class OnTheWay(nn.Module):
    """Its input sets the shift, which is read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLS)

    def doubled(self, x: Tensor) -> Tensor:
        self.shift = x[:, :1] * 2
        return x * 2

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(self.doubled(x)) * (1 + scale) + self.shift


class Trying(nn.Module):
    """An error in the second statement leaves what the first one assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLS)

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
    torch.testing.assert_close(model(ROWS, scale), reference(ROWS, scale), rtol=1e-4, atol=1e-5)


def test_an_error_shows_the_line() -> None:
    """Catches a traceback that points to the first line of the file."""
    model = Broadcast()
    convert(model, modulation=True)
    with pytest.raises(RuntimeError) as caught:
        model(ROWS, ROWS[:, :2], ROWS)
    lines = [entry.lineno + 1 for entry in caught.traceback if entry.name == "forward"]
    assert Broadcast.forward.__code__.co_firstlineno + 1 in lines


class OtherSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLS)

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


def flux(diffusers) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


FLUX = {
    "hidden_states": torch.randn(1, 16, 4),
    "encoder_hidden_states": torch.randn(1, 8, 32),
    "pooled_projections": torch.randn(1, 32),
    "timestep": torch.ones(1),
    "img_ids": torch.zeros(16, 3),
    "txt_ids": torch.zeros(8, 3),
}


def stable_diffusion_3(diffusers) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )


SD3 = {
    "hidden_states": torch.randn(2, 4, 8, 8),
    "encoder_hidden_states": torch.randn(2, 8, 32),
    "pooled_projections": torch.randn(2, 64),
    "timestep": torch.ones(2),
}


def wan(diffusers) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


WAN = {
    "hidden_states": torch.randn(1, 4, 2, 8, 8),
    "timestep": torch.ones(1),
    "encoder_hidden_states": torch.randn(1, 8, 16),
}

DIFFUSERS = {  # the modulations of each class
    "Flux": (
        *(flux, FLUX),
        {
            "AdaLayerNormContinuous": 1,
            "AdaLayerNormZero": 1,
            "AdaLayerNormZeroSingle": 1,
            "FluxTransformerBlock": 2,
        },
    ),
    "SD3": (
        *(stable_diffusion_3, SD3),
        {"AdaLayerNormContinuous": 1, "AdaLayerNormZero": 1, "JointTransformerBlock": 1},
    ),
    "Wan": (wan, WAN, {"WanTransformer3DModel": 1, "WanTransformerBlock": 2}),
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_models_of_diffusers(name: str) -> None:
    """Catches a forward of a real model that is read wrong."""
    make, inputs, expected = DIFFUSERS[name]
    reference = make(pytest.importorskip("diffusers")).eval()
    model = copy.deepcopy(reference)
    report = convert(model, modulation=True)
    changed = {block.type_name: block.modulations for block in report.blocks if block.modulations}
    assert changed == expected, report
    with torch.no_grad():
        outputs = [each(**inputs).sample for each in (model, reference)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
