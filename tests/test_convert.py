"""convert and revert: which norms change, that nothing else does, and that a proof is one."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import fused_op
from fused_op import convert, revert
from fused_op._fused_class import fused_class
from fused_op.modules import FusedLayerNorm, FusedRMSNorm
from tests.case import SEED, generator
from tests.ops import BF16, F16, F32, F64

README = Path(__file__).parents[1] / "README.md"
COLS = 24


# Norms as other libraries write them.
class LlamaNorm(nn.Module):
    """Statistics in float32, and a rounding before the weight."""

    def __init__(self, cols=COLS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class ZeroCentredNorm(LlamaNorm):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1 + self.weight.float())).type_as(x)


class BiaslessLayerNorm(nn.Module):
    def __init__(self, cols=COLS):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(cols)), 1e-5

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class RowsNorm(nn.LayerNorm):
    """As timm's LayerNorm."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ImageNorm(RowsNorm):
    """As timm's LayerNorm2d: the channels are dimension 1."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ImageOrRowsNorm(RowsNorm):
    """Tells images by four dimensions, and takes rows otherwise."""

    def forward(self, x):
        if x.dim() < 4:
            return super().forward(x)
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class ShapedRmsNorm(nn.Module):
    """As timm's RmsNorm; without a weight on demand."""

    def __init__(self, cols=COLS, affine=True):
        super().__init__()
        self.normalized_shape, self.eps = (cols,), 1e-6
        self.weight = nn.Parameter(torch.ones(cols)) if affine else None

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states, gate=None):
        y = super().forward(hidden_states)
        return y if gate is None else y * F.silu(gate)


def rows(module_or_cols=COLS, dtype=F32, *batch):
    shape = (*(batch or (3, 5)), module_or_cols)
    return torch.randn(shape, generator=generator("cpu", "rows", shape)).to(dtype)


def randomize(model):
    """Random parameters: those of a fresh norm, ones and zeros, hide mistakes.

    Matrices are small enough for a softmax that does not amplify roundings: T5 has no scale in it.
    """
    g = generator("cpu", "parameters")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.1 if p.dim() > 1 else 1))
    return model


def changed(report):
    return [(c.name, c.before, c.after) for c in report.converted]


def only_reason(report):
    assert not report.converted
    (skipped,) = report.skipped
    return skipped.reason


# --- Architectures --------------------------------------------------------------------------------

LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA_NORMS = [f"layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
LLAMA_NORMS.append("norm")
QWEN3_NORMS = [f"layers.{i}.self_attn.{n}_norm" for i in (0, 1) for n in ("q", "k")]
T5_NORMS = [f"encoder.block.{i}.layer.{j}.layer_norm" for i in (0, 1) for j in (0, 1)]
T5_NORMS += [f"decoder.block.{i}.layer.{j}.layer_norm" for i in (0, 1) for j in (0, 1, 2)]
T5_NORMS += ["encoder.final_layer_norm", "decoder.final_layer_norm"]

# Name of the model -> its config, the class of its norms, their names
ARCHITECTURES = {
    "GPT2": (
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
        "LayerNorm",
        [f"h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)] + ["ln_f"],
    ),
    "Llama": (LLAMA, "LlamaRMSNorm", LLAMA_NORMS),
    "Mistral": (LLAMA, "MistralRMSNorm", LLAMA_NORMS),
    "Qwen2": (LLAMA, "Qwen2RMSNorm", LLAMA_NORMS),
    "Qwen3": (LLAMA, "Qwen3RMSNorm", LLAMA_NORMS + QWEN3_NORMS),
    "Gemma": (LLAMA, "GemmaRMSNorm", LLAMA_NORMS),
    "T5": (
        # A relu would tip over at some rounding, and that error is no matter of the norms.
        dict(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=64,
            feed_forward_proj="gated-gelu",
        ),
        "T5LayerNorm",
        T5_NORMS,
    ),
    "ViT": (
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        ),
        "LayerNorm",
        None,  # two a layer and the last: their names are transformers' affair
    ),
}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """A tiny model of random parameters, its call, and what to expect of convert."""
    transformers = pytest.importorskip("transformers")
    name = request.param
    arguments, norm_class, names = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**arguments)
    config._attn_implementation = "eager"
    model = randomize(getattr(transformers, f"{name}Model")(config)).eval()
    if name == "ViT":
        call = {"pixel_values": rows(16, F32, 2, 3, 16)}
    else:
        call = {"input_ids": torch.randint(64, (2, 6), generator=generator("cpu", "ids"))}
    if name == "T5":
        call["decoder_input_ids"] = call["input_ids"].flip(-1)
    return name, model, call, norm_class, names


def run(model, call):
    """Output and the gradient of every parameter that has one."""
    dtype = next(model.parameters()).dtype
    call = {k: v.to(dtype) if v.is_floating_point() else v for k, v in call.items()}
    model.zero_grad()
    y = model(**call).last_hidden_state
    y.backward(torch.randn(y.shape, generator=generator("cpu", "dy")).to(dtype))
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach().double()} | grads


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_architecture(architecture, dtype):
    name, model, call, norm_class, names = architecture
    model.to(dtype)
    model.requires_grad_()
    # The truth begins with the parameters as the dtype has them.
    truth = run(copy.deepcopy(model).double(), call)
    before, state = run(model, call), copy.deepcopy(model.state_dict())
    bits = model(**cast(call, dtype)).last_hidden_state

    report = convert(model)
    found = [s.name for s in report.skipped] or [c.name for c in report.converted]
    if names is not None:
        assert sorted(found) == sorted(names)
    assert len(found) == {"T5": 12, "Qwen3": 9}.get(name, 5)
    if name == "Gemma":
        reason = "multiplies by 1 + weight, for which there is no kernel yet"
        assert {s.reason for s in report.skipped} == {reason} and not report.converted
    else:
        assert not report.skipped
        assert {c[1:3] for c in report.converted} == {(norm_class, f"Fused{norm_class}")}
        twice = dtype is BF16 and norm_class != "LayerNorm"
        assert {c.ulps for c in report.converted} == {2 if twice else 1}

    after = run(model, call)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert after.keys() == before.keys() == truth.keys()
    # As near to the truth as the original: twice its error, since two draws of rounding errors
    # differ, and some roundings. Some gradients are zero but for rounding (a bias of the keys):
    # for them, roundings of the largest gradient.
    eps, largest = torch.finfo(dtype).eps, max(t.norm() for t in truth.values())
    for what, true in truth.items():
        bound = 2 * (before[what] - true).norm() + 8 * eps * true.norm() + eps * largest
        error = (after[what] - true).norm()
        assert error <= bound, f"{what}: {error:.3g} > {bound:.3g} (FUSED_OP_SEED={SEED})"

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    model.load_state_dict(state)

    assert len(revert(model).converted) == len(report.converted)
    assert torch.equal(model(**cast(call, dtype)).last_hidden_state, bits)


def cast(call, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in call.items()}


# --- Which modules change -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda: nn.LayerNorm(COLS), FusedLayerNorm),
        (lambda: nn.LayerNorm(COLS, bias=False), FusedLayerNorm),
        (lambda: nn.LayerNorm((4, COLS), eps=1e-12), FusedLayerNorm),
        (lambda: nn.LayerNorm(COLS, elementwise_affine=False), FusedLayerNorm),
        (lambda: nn.LayerNorm(1), FusedLayerNorm),
        (lambda: nn.LayerNorm(2048), FusedLayerNorm),
        (lambda: nn.RMSNorm(COLS), FusedRMSNorm),
        (lambda: nn.RMSNorm((4, COLS), eps=0.1), FusedRMSNorm),
        (lambda: nn.RMSNorm(COLS, elementwise_affine=False), FusedRMSNorm),
        (lambda: RowsNorm(COLS), None),
        (lambda: BiaslessLayerNorm(), None),
        (lambda: ShapedRmsNorm(), None),
        (lambda: ShapedRmsNorm(affine=False), None),
        (lambda: LlamaNorm(), None),
        (lambda: GatedNorm(), None),
    ],
)
def test_norm_changes_its_class_and_nothing_else(make, fused, dtype):
    module = randomize(make()).to(dtype)
    if dtype is F64 and isinstance(module, LlamaNorm):
        pytest.skip("computes in float32: refused, below")
    original, kept = type(module), dict(module.__dict__)
    report = convert(module)
    assert changed(report) == [("", original.__name__, f"Fused{original.__name__}")]
    assert type(module) is (fused or fused_class(original, *type(module)._fused_recipe[1:]))
    assert isinstance(module, original)
    assert all(module.__dict__[key] is value for key, value in kept.items())
    assert report.converted[0].ulps == 1 + (isinstance(module, LlamaNorm) and dtype is not F32)
    assert len(revert(module).converted) == 1
    assert type(module) is original and module.__dict__ == kept


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, LlamaNorm, BiaslessLayerNorm])
def test_proof_succeeds_at_every_width(make, dtype):
    """A bound that is too tight would refuse some right norms, by chance of their widths."""
    if make is LlamaNorm and dtype is F64:
        pytest.skip("computes in float32")
    model = nn.Sequential(*(make(cols).to(dtype) for cols in (*range(1, 70, 4), 255, 4096)))
    assert not convert(model).skipped


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("cls", [LlamaNorm, BiaslessLayerNorm, RowsNorm, ShapedRmsNorm])
def test_fused_class_computes_by_the_kernel(cls, dtype, monkeypatch):
    """A class of another library becomes a fused one, with the weight, bias and eps it had."""
    module, x = randomize(cls(COLS)).to(dtype), rows(COLS, dtype)
    if cls is LlamaNorm and dtype is F64:
        pytest.skip("computes in float32")
    convert(module)
    norm = type(module)._fused_recipe[1]
    eps = getattr(module, "variance_epsilon", None) or module.eps
    if norm == "layer_norm":
        expected = fused_op.fused_layer_norm(x, module.weight, getattr(module, "bias", None), eps)
    else:
        expected = fused_op.fused_rms_norm(x, module.weight, eps)
    monkeypatch.setattr(cls, "forward", None)
    assert torch.equal(module(x), expected)


def test_call_that_was_not_proved_takes_the_original_forward():
    module, gate = randomize(GatedNorm()), rows()
    original = copy.deepcopy(module)
    assert convert(module).converted
    x = rows().to(BF16)
    assert module(x).dtype == F32  # as the original, whose weight promotes
    for args, kwargs in [((x,), {}), ((rows(), gate), {}), ((), {"hidden_states": rows()})]:
        assert torch.equal(module(*args, **kwargs), original(*args, **kwargs))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_model_without_norms_has_an_empty_report(module):
    assert convert(module) == revert(module) == fused_op.convert(module)
    assert str(convert(module)) == "norms changed: 0, left as they are: 0"


# --- What is refused, and with which words --------------------------------------------------------


def with_forward(module):
    module.forward = module.forward
    return module


def with_attribute(name, value):
    module = LlamaNorm()
    setattr(module, name, value)
    return module


class TwoEpsilons(LlamaNorm):
    """Normalises by the root mean square plus eps, which differs for small rows alone."""

    def forward(self, x):
        rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (x.float() / (rms + self.variance_epsilon)).to(x.dtype)


class IgnoresWeight(LlamaNorm):
    """Right for a fresh module, whose weights are ones."""

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, None, self.variance_epsilon)


class DetachedStatistics(LlamaNorm):
    """The right output, but another gradient."""

    def forward(self, x):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd.detach())


class NoGradient(LlamaNorm):
    def forward(self, x):
        return super().forward(x).detach()


class WithDropout(LlamaNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


class WiderOutput(LlamaNorm):
    def forward(self, x):
        return super().forward(x).double()


class WithScale(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class ChildNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(COLS)
        self.dropout = nn.Dropout()


class HiddenEpsNorm(nn.Module):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:])


class SubclassedParameter(nn.Parameter):
    pass


def mixed_dtypes():
    module = nn.LayerNorm(COLS)
    module.bias.data = module.bias.data.to(BF16)
    return module


OTHER = r"differs from {} over the last 1 dimension\(s\) by more than torch.float32 rounds"
REFUSED = {
    "gemma": (ZeroCentredNorm, "multiplies by 1 \\+ weight, for which there is no kernel yet"),
    "float64 in float32": (
        lambda: LlamaNorm().double(),
        r"differs from rms_norm .* by more than torch.float64 rounds",
    ),
    "other eps": (TwoEpsilons, OTHER.format("rms_norm")),
    "no weight": (IgnoresWeight, OTHER.format("rms_norm")),
    "dropout": (WithDropout, OTHER.format("rms_norm")),
    "gradient": (DetachedStatistics, "the gradient of its input is another than that of rms_norm"),
    "no gradient": (NoGradient, "gives no gradient"),
    "group": (lambda: nn.GroupNorm(2, COLS), "forward of rows .* raises |differs from layer_norm"),
    "batch": (lambda: nn.BatchNorm1d(COLS), r"has buffers \(running_mean, .*\)"),
    "images": (lambda: ImageNorm(COLS), r"forward of rows \[7, 24\] raises RuntimeError: permute"),
    "images or rows": (lambda: ImageOrRowsNorm(3), OTHER.format("layer_norm")),
    "dtype of result": (WiderOutput, r"forward of torch.float32\[7, 24\] returns torch.float64\["),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.LayerNorm((2, COLS))),
        r"is parametrized \(torch.nn.utils.parametrize\), by a class of its own",
    ),
    "pruned": (lambda: prune.identity(nn.LayerNorm(COLS), "weight"), r"has buffers \(weight_mask"),
    "scale": (WithScale, r"has parameters other than weight and bias \(scale\)"),
    "tensor": (lambda: tensor_weight(), "its weight is not a parameter"),
    "subclass": (lambda: subclass_weight(), "its bias is a SubclassedParameter, not a plain param"),
    "scripted": (lambda: torch.jit.script(nn.LayerNorm(COLS)), "is compiled by TorchScript"),
    "instance": (lambda: with_forward(LlamaNorm()), "its forward is replaced on the instance"),
    "children": (ChildNorm, "contains other modules"),
    "no eps": (HiddenEpsNorm, "has no eps"),
    "eps": (
        lambda: with_attribute("variance_epsilon", torch.tensor(1e-6)),
        "its variance_epsilon is a Tensor, not a number",
    ),
    "meta": (lambda: nn.LayerNorm(COLS, device="meta"), "is on the meta device, where nothing can"),
    "dtype": (
        lambda: nn.LayerNorm(COLS, dtype=torch.float8_e4m3fn, elementwise_affine=True),
        "is of torch.float8_e4m3fn, for which there is no kernel",
    ),
    "mixed": (mixed_dtypes, "its weight and bias differ in dtype or device"),
}


def tensor_weight():
    module = LlamaNorm()
    del module.weight
    module.weight = torch.ones(COLS)
    return module


def subclass_weight():
    module = nn.LayerNorm(COLS)
    module.bias = SubclassedParameter(torch.zeros(COLS))
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_left_as_it_was(case):
    make, reason = REFUSED[case]
    module = make()
    before, kept = type(module), dict(module.__dict__)
    parameters = {n: p._version for n, p in module.named_parameters()}
    report = convert(module)
    assert re.match(reason, only_reason(report)), only_reason(report)
    assert type(module) is before and module.__dict__ == kept
    assert {n: p._version for n, p in module.named_parameters()} == parameters
    assert revert(module) == fused_op.convert(nn.Identity())  # there is nothing to revert


def test_kernel_of_another_device_is_not_invented(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "device", torch.device("xpu"))
    assert only_reason(convert(nn.LayerNorm(COLS))) == "is on xpu, for which there is no kernel"


def test_random_state_hooks_and_mode_are_left_alone():
    calls = []
    model = nn.Sequential(nn.LayerNorm(COLS), WithDropout(), LlamaNorm()).eval()
    for module in model:
        module.register_forward_pre_hook(lambda *_: calls.append("pre"))
        module.register_forward_hook(lambda *_: calls.append("post"))
    state = torch.get_rng_state()
    assert len(convert(model).converted) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls and not any(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    model(rows())
    assert calls == ["pre", "post"] * 3


def test_proof_is_outside_of_autocast_and_inside_of_no_grad():
    model = nn.Sequential(nn.LayerNorm(COLS), LlamaNorm())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert len(convert(model).converted) == 2


def test_optimizer_goes_on():
    model = nn.Sequential(nn.Linear(COLS, COLS), LlamaNorm(), nn.LayerNorm(COLS))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(rows()).square().sum().backward()
        optimizer.step()
        convert(model)
    assert all(int(s["step"]) == 2 for s in optimizer.state.values())
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.state}


# --- Names, copies, repetition --------------------------------------------------------------------


def small_model():
    return nn.ModuleDict(
        {"a": nn.LayerNorm(8), "b": LlamaNorm(8), "c": nn.ModuleList([RowsNorm(8)])}
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["a", "b", "c.0"]),
        ({"include": "a"}, ["a"]),
        ({"include": ["a", "c.*"]}, ["a", "c.0"]),
        ({"exclude": ("[ab]",)}, ["c.0"]),
        ({"include": "*", "exclude": "c*"}, ["a", "b"]),
        ({"include": []}, []),
        ({"include": lambda name, module: isinstance(module, nn.LayerNorm)}, ["a", "c.0"]),
        ({"exclude": lambda name, module: name == "a"}, ["b", "c.0"]),
    ],
)
def test_include_and_exclude(options, names):
    report = convert(small_model(), **options)
    assert [c.name for c in report.converted] == names
    reasons = {s.name: s.reason for s in report.skipped}
    assert reasons.keys() == {"a", "b", "c.0"} - set(names)
    assert set(reasons.values()) <= {"is not included", "is excluded"}


def failing(name, module):
    raise KeyError(name)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: convert(m, include="d"), ValueError, "include pattern 'd' matches no norm"),
        (lambda m: convert(m, exclude=["c"]), ValueError, "exclude pattern 'c' matches no norm"),
        (lambda m: convert(m, include=3), TypeError, "include must be a pattern, .* not 3"),
        (lambda m: convert(m, exclude=[3]), TypeError, r"exclude must be a pattern, .* not \[3\]"),
        (lambda m: convert(m, exclude=failing), KeyError, "a"),
        (lambda m: convert([m]), TypeError, "convert: model must be a torch.nn.Module, not list"),
        (lambda m: revert([m]), TypeError, "revert: model must be a torch.nn.Module, not list"),
    ],
)
def test_mistake_raises_and_changes_nothing(call, error, message):
    model = small_model()
    before = [type(m) for m in model.modules()]
    with pytest.raises(error, match=message):
        call(model)
    assert [type(m) for m in model.modules()] == before


def test_shared_module_is_converted_once():
    norm = LlamaNorm(8)
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert changed(convert(model, include="b")) == [("a", "LlamaNorm", "FusedLlamaNorm")]
    assert model["a"] is model["b"] is norm
    assert len(revert(model).converted) == 1 and type(norm) is LlamaNorm


def test_converting_twice_changes_nothing_and_one_revert_undoes_it():
    model = small_model()
    before = [type(m) for m in model.modules()]
    convert(model)
    after = [type(m) for m in model.modules()]
    report = convert(model)
    assert not report.converted and {s.reason for s in report.skipped} == {"is fused already"}
    assert [type(m) for m in model.modules()] == after
    revert(model)
    assert [type(m) for m in model.modules()] == before
    assert not revert(model).converted


def test_norms_that_were_fused_before_stay_so():
    model = nn.Sequential(FusedLayerNorm(8), FusedRMSNorm(8), nn.LayerNorm(8))
    assert [s.reason for s in convert(model).skipped] == ["is fused already"] * 2
    assert [c.name for c in revert(model).converted] == ["2"]
    assert [type(m) for m in model] == [FusedLayerNorm, FusedRMSNorm, nn.LayerNorm]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), LlamaNorm, ShapedRmsNorm])
def test_copies_are_converted_and_reverted(make, copied):
    module = randomize(make())
    original, x = type(module), rows(module.state_dict()["weight"].numel())
    before = module(x)
    convert(module)
    clone = copied(module)
    assert type(clone) is type(module) and torch.equal(clone(x), module(x))
    assert isinstance(clone, original)
    assert clone.state_dict().keys() == module.state_dict().keys()
    assert len(revert(clone).converted) == 1
    assert type(clone) is original and torch.equal(clone(x), before)
    assert type(module) is not original


class Reduced(LlamaNorm):
    """Brings its own way of pickling."""

    def __reduce__(self):
        return type(self), (), {**self.__dict__, "restored": True}


def test_pickling_of_the_original_class_is_kept():
    module = Reduced()
    assert convert(module).converted
    clone = pickle.loads(pickle.dumps(module))
    assert type(clone) is type(module) and clone.restored


def test_class_changed_after_convert_is_not_reverted():
    module = nn.LayerNorm((2, 8))
    convert(module)
    parametrizations.weight_norm(module)
    reason = "its class was changed after convert: undo that first"
    assert only_reason(revert(module)) == reason
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert len(revert(module).converted) == 1 and type(module) is nn.LayerNorm


def test_fused_class_is_made_once():
    a, b = LlamaNorm(), LlamaNorm(8)
    convert(nn.Sequential(a, b))
    assert type(a) is type(b)


@pytest.mark.parametrize("make", [LlamaNorm, RowsNorm])
def test_compiles_without_a_graph_break(make):
    module, x = make(COLS), rows()
    convert(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


def test_report_is_a_table():
    model = nn.ModuleDict({"norm": LlamaNorm().to(BF16), "gemma": ZeroCentredNorm()})
    report = convert(model)
    assert str(report).splitlines() == [
        "norms changed: 1, left as they are: 1",
        "  norm   LlamaNorm -> FusedLlamaNorm  "
        "up to 2 ulp apart: the original rounds before the weight too",
        "  gemma  ZeroCentredNorm              "
        "multiplies by 1 + weight, for which there is no kernel yet",
    ]


def test_readme_example_runs(capsys):
    section = README.read_text().split("## Convert a model")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    namespace = {}
    exec(code, namespace)
    assert "norms changed: 4, left as they are: 1" in capsys.readouterr().out
    assert type(namespace["model"].layers[0].norm1) is nn.LayerNorm  # reverted
