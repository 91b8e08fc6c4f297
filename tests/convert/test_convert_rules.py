"""Which norms convert changes and which it refuses, and with which words it reports either.

Catches a norm that is fused although the kernel computes something else than its forward, a right
one that is refused, and a report, a pattern or a refusal that misleads.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fused_op
from fused_op import convert, revert
from fused_op._fused_class import fused_class
from fused_op._gated_class import GatedFormula, gated_class
from fused_op._recipe import recipe_of
from fused_op.modules import FusedLayerNorm, FusedRMSNorm
from tests.norms import (
    COLS,
    Activation,
    AffineNorm,
    BiaslessLayerNorm,
    BufferNorm,
    ChildNorm,
    Clamps,
    ClampsLittle,
    Counts,
    DetachedStatistics,
    FiveDimensions,
    GatedNorm,
    HiddenEpsNorm,
    HidesNan,
    HidesZeros,
    IgnoresWeight,
    LlamaNorm,
    Logs,
    LogsInTraining,
    ManyRows,
    NeedsGate,
    NeedsOptionalGate,
    NoGradient,
    Remembers,
    RoundsOften,
    RowsNorm,
    ShapedRmsNorm,
    SubclassedParameter,
    TwoEpsilons,
    TwoPlusWeight,
    UnusedBufferNorm,
    WiderOutput,
    WithDropout,
    WithScale,
    ZeroCentredLayerNorm,
    ZeroCentredNorm,
    changed,
    only_reason,
    randomize,
    rows,
    small_model,
)
from tests.ops import BF16, F16, F32, F64

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
        (lambda: ZeroCentredNorm(), None),
        (lambda: HiddenEpsNorm(), None),
        (lambda: HiddenEpsNorm(1e-12), None),
        (lambda: BufferNorm(), None),
        (lambda: UnusedBufferNorm(), None),
    ],
)
def test_norm_changes_its_class_and_nothing_else(make, fused, dtype, device):
    module = randomize(make()).to(device, dtype)
    if dtype is F64 and isinstance(module, LlamaNorm):
        pytest.skip("computes in float32: refused, below")
    original, kept = type(module), dict(module.__dict__)
    report = convert(module)
    assert changed(report) == [("", original.__name__, f"Fused{original.__name__}")]
    formula = recipe_of(type(module))
    gated = isinstance(formula, GatedFormula)  # its calls with a gate are fused, too
    class_of = gated_class if gated else fused_class
    assert type(module) is (fused or class_of(original, formula))
    assert gated == (isinstance(module, GatedNorm) and dtype is F32)
    assert isinstance(module, original)
    assert all(module.__dict__[key] is value for key, value in kept.items())
    twice = isinstance(module, LlamaNorm) and not isinstance(module, ZeroCentredNorm)
    (converted,) = report.converted
    assert converted.ulps == (2 if twice and dtype is not F32 else 1)
    assert converted.rounding == ("before_weight" if converted.ulps == 2 else "once")
    assert not formula or formula.rounding == converted.rounding
    if isinstance(module, LlamaNorm):
        assert converted.same_roundings == (dtype in (F16, BF16))
    assert len(revert(module).converted) == 1
    assert type(module) is original and module.__dict__ == kept


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize(
    "make", [nn.LayerNorm, nn.RMSNorm, LlamaNorm, BiaslessLayerNorm, ZeroCentredNorm]
)
def test_proof_succeeds_at_every_width(make, dtype, device):
    """A bound that is too tight would refuse some right norms, by chance of their widths."""
    if issubclass(make, LlamaNorm) and dtype is F64:
        pytest.skip("computes in float32")
    model = nn.Sequential(*(make(cols) for cols in (*range(1, 70, 4), 255, 4096)))
    assert not convert(model.to(device, dtype)).skipped


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize(
    "cls",
    [
        *(LlamaNorm, BiaslessLayerNorm, RowsNorm, ShapedRmsNorm),
        *(ZeroCentredNorm, ZeroCentredLayerNorm),
    ],
)
def test_fused_class_computes_by_the_kernel(cls, dtype, device, monkeypatch):
    """A class of another library becomes a fused one, with the weight, bias and eps it had."""
    module, x = randomize(cls(COLS)).to(device, dtype), rows(COLS, dtype, device=device)
    if issubclass(cls, LlamaNorm) and dtype is F64:
        pytest.skip("computes in float32")
    is_rounded = cls is ZeroCentredLayerNorm and dtype in (F16, BF16)
    convert(module)
    norm, factor, _, rounding, images, _, dtypes = recipe_of(type(module))
    assert not images and not dtypes
    zero_centered = cls in (ZeroCentredNorm, ZeroCentredLayerNorm)
    one_more = "rounded 1 + weight" if is_rounded else "1 + weight"
    assert factor == (one_more if zero_centered else "weight")
    eps = getattr(module, "variance_epsilon", None) or module.eps
    if norm == "layer_norm":
        params = module.weight + is_rounded, getattr(module, "bias", None)
        zero_centered = zero_centered and not is_rounded
        expected = fused_op.fused_layer_norm(x, *params, eps, zero_centered=zero_centered)
    else:
        options = {"zero_centered": zero_centered, "rounding": rounding}
        expected = fused_op.fused_rms_norm(x, module.weight, eps, **options)
    monkeypatch.setattr(cls, "forward", None)
    assert torch.equal(module(x), expected)


def test_call_that_was_not_proved_takes_the_original_forward(device):
    module, x = randomize(GatedNorm()).to(device), rows(device=device)
    original = copy.deepcopy(module)
    assert convert(module).converted
    half = x.to(BF16)
    assert module(half).dtype == F32  # as the original, whose weight promotes
    for args, kwargs in [((half,), {}), ((x, half), {}), ((), {"hidden_states": x})]:
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


class FinalNorm(LlamaNorm):
    def __init_subclass__(cls):
        raise TypeError("FinalNorm is final")


class WritesWeight(LlamaNorm):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-100, 100)  # changes none of the weights of a comparison
        return super().forward(x)


class WritesInput(LlamaNorm):
    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            x.clamp_(-100, 100)
        return y


def mixed_dtypes():
    module = nn.LayerNorm(COLS)
    module.bias.data = module.bias.data.to(BF16)
    return module


OTHER = r"differs from {} over the last 1 dimension\(s\) by more than torch.float32 rounds"
REFUSED = {
    "2 + weight": (TwoPlusWeight, OTHER.format("rms_norm")),
    "roundings": (
        lambda: RoundsOften().to(BF16),
        r"differs from layer_norm .* by roundings to torch.bfloat16 in between, which are not ours",
    ),
    "hides NaN": (HidesNan, "hides NaN or infinities of its input"),
    "hides zeros": (HidesZeros, "differs from rms_norm in rows of zeros"),
    "clamps": (Clamps, OTHER.format("rms_norm")),
    "clamps little": (ClampsLittle, OTHER.format("rms_norm")),
    "many rows": (ManyRows, OTHER.format("rms_norm")),
    "five dimensions": (FiveDimensions, OTHER.format("rms_norm")),
    "counts": (Counts, "its forward changes its attribute calls, which the fused one would not"),
    "remembers": (
        Remembers,
        "its forward changes its attribute last, which the fused",
    ),
    "logs": (Logs, "its forward changes its attribute log, which the fused one would not"),
    "logs in training": (LogsInTraining, "its forward changes its attribute state"),
    "gate": (NeedsGate, r"its forward takes more than the input \(gate\)"),
    "gate of None": (NeedsOptionalGate, "differs from the gated RMS norms that there are"),
    "activation": (Activation, "is not a norm: its output grows with its input"),
    "affine": (AffineNorm, "is not a norm: its output grows with its input"),
    "lazy": (nn.LazyBatchNorm1d, "is lazy: run the model once"),
    "float64 in float32": (
        lambda: LlamaNorm().double(),
        r"differs from rms_norm .* by more than torch.float64 rounds",
    ),
    "other eps": (TwoEpsilons, OTHER.format("rms_norm")),
    "no weight": (IgnoresWeight, OTHER.format("rms_norm")),
    "dropout": (WithDropout, OTHER.format("rms_norm")),
    "gradient": (DetachedStatistics, "the gradient of its input is another than that of rms_norm"),
    "no gradient": (NoGradient, "gives no gradient"),
    "batch": (lambda: nn.BatchNorm1d(COLS), "is a batch or instance norm: it normalises over the"),
    "dtype of result": (WiderOutput, r"forward of torch.float32\[3, 24\] returns torch.float64\["),
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
    "eps": (
        lambda: with_attribute("variance_epsilon", torch.tensor(1e-6)),
        "its variance_epsilon is a Tensor, not a number",
    ),
    "dtype": (
        lambda: nn.LayerNorm(COLS, dtype=torch.float8_e4m3fn, elementwise_affine=True),
        "is of torch.float8_e4m3fn, for which there is no kernel",
    ),
    "mixed": (mixed_dtypes, "its weight and bias differ in dtype or device"),
    "final": (FinalNorm, "its class refuses a subclass: TypeError: FinalNorm is final"),
    "writes weight": (WritesWeight, "its forward writes to its weight, which the fused one would"),
    "writes input": (WritesInput, "its forward writes to its input, which the fused one would not"),
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
def test_refused_and_left_as_it_was(case, device):
    make, reason = REFUSED[case]
    module = make().to(device)
    before, kept = type(module), dict(module.__dict__)
    parameters = {n: p._version for n, p in module.named_parameters()}
    report = convert(module)
    assert re.match(reason, only_reason(report)), only_reason(report)
    assert type(module) is before and module.__dict__ == kept
    assert {n: p._version for n, p in module.named_parameters()} == parameters
    assert revert(module) == fused_op.convert(nn.Identity())  # there is nothing to revert


class RaisingProperty(nn.Module):
    @property
    def eps(self):
        raise RuntimeError("no eps before setup")


def test_property_of_another_module_may_raise():
    report = convert(nn.Sequential(RaisingProperty(), nn.LayerNorm(COLS)))
    assert [c.name for c in report.converted] == ["1"] and not report.skipped


def test_kernel_of_another_device_is_not_invented(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "device", torch.device("xpu"))
    assert only_reason(convert(nn.LayerNorm(COLS))) == "is on xpu, for which there is no kernel"


# --- Patterns, mistakes, the report ---------------------------------------------------------------


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
        (lambda m: convert(m, residual="yes"), TypeError, "'residual' must be bool, not str"),
        (lambda m: convert(m, modulation=1), TypeError, "'modulation' must be bool, not int"),
        (lambda m: convert(m, activation="silu"), TypeError, "'activation' must be bool, not str"),
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


def test_norm_of_nothing_stays():
    """Catches one empty norm that ends the conversion of all others."""
    report = convert(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(0), nn.RMSNorm((3, 0))))
    assert [norm.reason for norm in report.skipped] == ["normalises no elements"] * 2


def test_report_is_a_table():
    model = nn.ModuleDict({"norm": LlamaNorm().to(BF16), "other": AffineNorm()})
    report = convert(model)
    assert str(report).splitlines() == [
        "norms changed: 1, left as they are: 1",
        "  norm   LlamaNorm -> FusedLlamaNorm  same roundings",
        "  other  AffineNorm                   is not a norm: its output grows with its input",
    ]
