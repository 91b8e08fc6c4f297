"""The plug points of other libraries: the installed library where there is one, else its interface.

Each stand-in has the checks of the library that it stands for, as far as they concern a norm.
"""

import importlib
import inspect
import subprocess
import sys
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fused_op
from fused_op.integrations import hf_kernels, megatron

FILES = ("hf_kernels", "hf_trainer", "megatron", "torchtitan", "vllm")


@pytest.fixture
def stand_in(monkeypatch):
    """Makes modules that are importable in this test alone, and forgets ours that import them."""

    def make(name: str, **members) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(members)
        for i in range(1, name.count(".") + 1):
            parent = name.rsplit(".", i)[0]
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, last = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
        return module

    yield make
    for file in ("torchtitan", "vllm"):
        sys.modules.pop(f"fused_op.integrations.{file}", None)


def test_nothing_is_imported_with_the_package() -> None:
    """Catches a plug point that makes each user pay for, or have, a library of others."""
    code = "import sys, fused_op; print([m for m in sys.modules if 'integrations' in m or m in "
    code += "('kernels', 'transformers', 'vllm', 'torchtitan', 'megatron')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


# --- Hugging Face kernels -----------------------------------------------------------------------


class LlamaRMSNorm(nn.Module):
    kernel_layer_name = "RMSNorm"

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class ZeroCentered(nn.Module):
    kernel_layer_name = "RMSNormZeroCentered"

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) - 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class PlainLayerNorm(nn.LayerNorm):
    kernel_layer_name = "LayerNorm"


LAYERS = {
    hf_kernels.RMSNorm: LlamaRMSNorm,
    hf_kernels.RMSNormZeroCentered: ZeroCentered,
    hf_kernels.LayerNorm: lambda: PlainLayerNorm(16),
}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_kernels_layers_are_what_kernels_accepts(layer) -> None:
    """Catches state, a constructor or another signature, which kernels refuses; and wrong flags."""
    module = LAYERS[layer]()
    assert layer.__init__ is nn.Module.__init__ and layer.has_backward and layer.can_torch_compile
    added = {name for name, _ in inspect.getmembers(layer)}
    added -= {name for name, _ in inspect.getmembers(nn.Module)}
    assert added == {"has_backward", "can_torch_compile"}
    ours, theirs = (inspect.signature(cls.forward).parameters for cls in (layer, type(module)))
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_forward_in_a_module_of_a_model(layer, compiled: bool) -> None:
    """Catches a forward that reads an attribute which the modules of the slot do not have."""
    torch.compiler.reset()
    module = LAYERS[layer]()
    x = torch.randn(5, 16, requires_grad=True)
    leaves = [x, *module.parameters()]
    expected = module(x)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    module.forward = layer.forward.__get__(module)  # as kernels does
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    found = run(x)
    assert compiled or "NormNode" in found.grad_fn.name()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), leaves), gradients, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("is_training", [False, True])
def test_kernels_takes_the_registered_layers(is_training: bool) -> None:
    """Catches a mapping that kernels itself does not take, or does not find for a mode."""
    kernels = pytest.importorskip("kernels")
    model = nn.Sequential(LlamaRMSNorm(), ZeroCentered(), PlainLayerNorm(16))
    x = torch.randn(5, 16, requires_grad=True)
    expected = model(x)
    mode = kernels.Mode.TRAINING if is_training else kernels.Mode.INFERENCE
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        hf_kernels.register()
        kernels.kernelize(model, mode=mode | kernels.Mode.TORCH_COMPILE, device="cpu")
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all("NormNode" in norm(x).grad_fn.name() for norm in model)


def test_kernels_mapping_has_a_layer_for_each_device() -> None:
    mapping = hf_kernels.mapping()
    assert {name: set(devices) for name, devices in mapping.items()} == {
        name: {"cpu", "cuda"} for name in ("RMSNorm", "RMSNormZeroCentered", "LayerNorm")
    }
    layer = mapping["LayerNorm"]["cuda"]
    assert layer.load() is hf_kernels.LayerNorm and str(layer) == "fused_op, layer `LayerNorm`"
    assert layer == hf_kernels.Layer(hf_kernels.LayerNorm) != hf_kernels.Layer(hf_kernels.RMSNorm)
    assert len({layer, hf_kernels.Layer(hf_kernels.LayerNorm)}) == 1


# --- transformers.Trainer -----------------------------------------------------------------------


def tiny_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_callback_converts_once_and_before_training() -> None:
    """Catches a model that trains as it was, and a second conversion of it."""
    model = tiny_llama()
    from fused_op.integrations.hf_trainer import FusedNorms

    callback = FusedNorms(exclude="model.norm")
    callback.on_init_end(None, None, None, model=model)
    report = callback.report
    assert report is not None and len(report.converted) == 4
    callback.on_train_begin(None, None, None, model=model)
    assert callback.report is report
    trial = tiny_llama()  # of model_init, which the trainer calls again when it begins to train
    callback.on_train_begin(None, None, None, model=trial)
    assert callback.report is not report and callback.report == report
    late = FusedNorms()  # added to a trainer that exists
    late.on_init_end(None, None, None)
    late.on_train_begin(None, None, None, model=model)
    assert late.report is not None and [c.name for c in late.report.converted] == ["model.norm"]


def test_trainer(tmp_path) -> None:
    """Catches a callback that the trainer does not call, and a loss that is not the same."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs it")
    from fused_op.integrations.hf_trainer import FusedNorms

    data = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8) % 32]
    losses = []
    for callbacks in ([], [FusedNorms()]):
        args = transformers.TrainingArguments(
            tmp_path, max_steps=3, report_to=[], use_cpu=True, logging_steps=1, save_strategy="no"
        )
        trainer = transformers.Trainer(tiny_llama(), args, train_dataset=data, callbacks=callbacks)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(callbacks[0].report.converted) == 5 and len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# --- Megatron-Core ------------------------------------------------------------------------------


def megatron_config(**changes) -> SimpleNamespace:
    """The fields of a TransformerConfig that a norm reads."""
    values = dict(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        memory_efficient_layer_norm=False,
        sequence_parallel=False,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    return SimpleNamespace(**(values | changes))


class LocalSpecProvider:
    """Stands for that of Megatron: no base is needed for it."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        raise AssertionError("the norms are those of fused_op")

    def fuse_layernorm_and_linear(self) -> bool:
        return False


class Backend(megatron.FusedNorms, LocalSpecProvider):
    pass


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_megatron_builds_what_the_config_says(normalization, zero_centered, has_residual) -> None:
    """Catches a field of the config that has no effect: WrappedTorchNorm refuses three of them."""
    config = megatron_config(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        memory_efficient_layer_norm=True,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
    )
    backend = Backend()
    assert not backend.fuse_layernorm_and_linear()
    build = backend.layer_norm(rms_norm=normalization == "RMSNorm", has_residual=has_residual)
    assert build.returns_residual is has_residual
    norm = build(config=config, hidden_size=16, eps=1e-3)
    assert isinstance(norm, getattr(fused_op, f"Fused{normalization}"))
    assert (norm.zero_centered, norm.memory_efficient, norm.eps) == (zero_centered, True, 1e-3)
    assert norm.weight.dtype is torch.bfloat16 and norm.normalized_shape == (16,)
    assert all(p.sequence_parallel is True for p in norm.parameters())
    assert norm.weight.count_nonzero() == (0 if zero_centered else 16)
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    found = norm(x)
    if has_residual:
        found, residual = found
        assert residual is x and norm.returns_residual
    expected = getattr(nn, normalization)(16, 1e-3).bfloat16()(x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    names = ["weight", "bias"] if normalization == "LayerNorm" else ["weight"]
    assert list(norm.state_dict()) == names


def test_megatron_main_grad() -> None:
    """Catches gradients that do not arrive where Megatron's optimizer reads them."""

    class Adding(Backend):
        fuse_wgrad_accumulation = True

    norm = Adding().layer_norm()(config=megatron_config(), hidden_size=16)
    norm.weight.main_grad = torch.zeros(16)
    norm.weight.grad_added_to_main_grad = False
    norm(torch.randn(3, 16)).sum().backward()
    assert norm.weight.grad_added_to_main_grad and norm.weight.main_grad.count_nonzero() == 16


def test_megatron_refuses_other_norms() -> None:
    with pytest.raises(ValueError, match="must be LayerNorm or RMSNorm, got 'L2Norm'"):
        megatron.build_norm(megatron_config(normalization="L2Norm"), 16)


# --- torchtitan ---------------------------------------------------------------------------------


def titan_norm(base: type[nn.Module]) -> type[nn.Module]:
    """A norm as in torchtitan.models.common.nn_modules: built by its Config."""

    class Norm(base):
        @dataclass(kw_only=True, slots=True)
        class Config:
            normalized_shape: int
            eps: float = 1e-5
            elementwise_affine: bool = True

            def build(self):
                return self._owner(self)

        def __init_subclass__(cls) -> None:
            if "Config" in cls.__dict__:
                cls.Config._owner = cls

        def __init__(self, config) -> None:
            super().__init__(
                config.normalized_shape,
                eps=config.eps,
                elementwise_affine=config.elementwise_affine,
            )

    Norm.Config._owner = Norm
    return Norm


def test_torchtitan(stand_in) -> None:
    """Catches an override for other norms than torchtitan's, a lost field, and another forward."""
    registry = {}

    def override(*, target, fqns=None, description="", exact=False):
        def decorator(factory):
            registry[factory.__name__] = (target, exact)
            return factory

        return decorator

    def derive(source, target_cls, **deltas):
        names = {field.name for field in fields(target_cls)}
        return target_cls(**{name: getattr(source, name) for name in names}, **deltas)

    stand_in("torchtitan.config", override=override, derive=derive)
    rms, layer = titan_norm(nn.RMSNorm), titan_norm(nn.LayerNorm)
    stand_in("torchtitan.models.common.nn_modules", RMSNorm=rms, LayerNorm=layer)
    plug = importlib.import_module("fused_op.integrations.torchtitan")
    assert registry == {"rms_norm": (rms.Config, True), "layer_norm": (layer.Config, True)}
    x = torch.randn(3, 16, requires_grad=True)
    for theirs, factory, fused in (
        (rms, plug.rms_norm, fused_op.FusedRMSNorm),
        (layer, plug.layer_norm, fused_op.FusedLayerNorm),
    ):
        config = theirs.Config(normalized_shape=16, eps=1e-3)
        norm = factory(config).build()
        assert isinstance(norm, theirs) and isinstance(norm, fused) and norm.eps == 1e-3
        assert "NormNode" in norm(x).grad_fn.name()
        plain = config.build()
        torch.testing.assert_close(norm(x), plain(x), rtol=1e-5, atol=1e-5)
        assert norm.state_dict().keys() == plain.state_dict().keys()


# --- vLLM ---------------------------------------------------------------------------------------


class IrOp:
    """The part of vllm.ir.op.IrOp that registration meets."""

    def __init__(self, native) -> None:
        self.native, self.impls = native, {}

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def decorator(implementation):
            assert provider not in self.impls
            schemas = [
                torch.library.infer_schema(f, mutates_args=[])
                for f in (implementation, self.native)
            ]
            assert schemas[0] == schemas[1]
            names = inspect.signature(self.native).parameters
            assert list(inspect.signature(supports_args).parameters) == list(names)
            self.impls[provider] = (implementation, supports_args)
            return implementation

        return decorator


def native_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


def native_fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    total = x.float() + x_residual.float()
    return native_rms_norm(total, weight, epsilon).to(x.dtype), total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm(stand_in, dtype) -> None:
    """Catches a schema that vLLM refuses, other values, and calls that must stay vLLM's."""
    ops = stand_in(
        "vllm.ir.ops",
        rms_norm=IrOp(native_rms_norm),
        fused_add_rms_norm=IrOp(native_fused_add_rms_norm),
    )
    plug = importlib.import_module("fused_op.integrations.vllm")
    plug.register()
    plug.register()  # by the entry point, and by hand
    x, residual = torch.randn(2, 3, 16).to(dtype)
    weight = torch.randn(16).to(dtype)
    bound = 1e-5 if dtype is torch.float32 else 4e-2
    for op, rows in ((ops.rms_norm, (x,)), (ops.fused_add_rms_norm, (x, residual))):
        run, supports = op.impls["fused_op"]
        for given in (weight, None):
            assert supports(*rows, given, 1e-6)
            found, expected = (f(*rows, given, 1e-6) for f in (run, op.native))
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        assert not supports(*rows, weight, 1e-6, 8)
        assert not supports(*(t.to(torch.float8_e4m3fn) for t in rows), weight, 1e-6)
    assert not ops.fused_add_rms_norm.impls["fused_op"][1](x, residual.double(), weight, 1e-6)


def test_vllm_finds_the_plugin() -> None:
    """Catches an entry point that the package does not declare, or that names nothing."""
    from pathlib import Path

    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["vllm.general_plugins"]["fused_op"]
    module, _, function = entry.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
