"""``override_torch``: PyTorch's norms run our kernels, and come back as they were."""

import gc
import random
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

import fused_op
from tests.case import SEED

RMS_IS_AN_OP = hasattr(torch.ops.aten, "_fused_rms_norm_backward")  # from torch 2.9 on
NORMS = ["layer_norm", "rms_norm"] if RMS_IS_AN_OP else ["layer_norm"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}

pytestmark = pytest.mark.filterwarnings("error:fused_op")


@pytest.fixture(autouse=True)
def is_undone():
    """No test leaves the switch on."""
    yield
    gc.collect()
    assert not fused_op._override._open


def arguments(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, cols: int = 33):
    tensors = [torch.randn(5, 7, cols, device=device, dtype=dtype, requires_grad=True)]
    for _ in range(2 if name == "layer_norm" else 1):
        tensors.append(torch.randn(cols, device=device, dtype=dtype, requires_grad=True))
    return tensors


def results(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of PyTorch's function."""
    input, *parameters = tensors
    output = getattr(F, name)(input, parameters[0].shape, *parameters)
    return [output, *torch.autograd.grad(output.float().cos().sum(), tensors)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_counts_and_undo(name: str, device: str, dtype: torch.dtype) -> None:
    """Catches a call that is not ours, wrong values, and bits that do not come back."""
    tensors = arguments(name, device, dtype)
    before = results(name, tensors)
    with fused_op.override_torch() as override:
        inside = results(name, tensors)
    # Gradients of parameters are sums over 35 rows, of terms that follow the rounded output.
    for actual, expected, factor in zip(inside, before, [1, 1, 6, 6][: len(inside)], strict=True):
        bound = factor * BOUNDS[dtype]
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    op = "native_layer_norm" if name == "layer_norm" else "_fused_rms_norm"
    report = override.report()
    assert report.ours == {op: 1, f"{op}_backward": 1} and not report.torchs
    after = results(name, tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert override.report() == report  # ended with the block


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("has_weight", [True, False])
def test_all_outputs_are_like_those_of_pytorch(name, has_weight, device, dtype) -> None:
    """Catches statistics of another shape or dtype than fake tensors promise."""
    x = torch.randn(3, 2, 4, 5, device=device, dtype=dtype).transpose(0, 1)
    weight = torch.randn(4, 5, device=device, dtype=dtype) if has_weight else None
    is_layer_norm = name == "layer_norm"
    op = torch.ops.aten.native_layer_norm if is_layer_norm else torch.ops.aten._fused_rms_norm
    backward = getattr(torch.ops.aten, op._qualified_op_name.split("::")[1] + "_backward")
    extra = [None] if is_layer_norm else []
    runs = []
    for is_ours in (False, True):
        if not is_ours and not is_layer_norm and device == "cpu":
            runs.append([*(op(x, [4, 5], weight, 1e-5))])  # it has no backward of its own
            continue
        override = fused_op.override_torch() if is_ours else None
        outputs = op(x, [4, 5], weight, *extra, 1e-5)
        mask = [True, has_weight, False][: 2 + is_layer_norm]
        grads = backward(x, x, [4, 5], *outputs[1:], weight, *extra, mask)
        if override:
            override.undo()
            assert sum(override.report().ours.values()) == 2
        runs.append([*outputs, *grads])
    for theirs, ours in zip(*runs, strict=len(runs[0]) == len(runs[1])):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
            assert theirs.is_contiguous() == ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_of_each_kind(name: str, device: str) -> None:
    """Catches autograd, forward-mode AD or a transform that PyTorch's ops lose under the switch."""
    tensors = arguments(name, device, torch.float64, cols=3)

    def function(input: Tensor, *parameters: Tensor) -> Tensor:
        return getattr(F, name)(input, [3], *parameters)

    with fused_op.override_torch() as override:
        assert torch.autograd.gradcheck(
            function, tensors, check_batched_grad=True, check_forward_ad=True
        )
        assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)
        detached = [t.detach() for t in tensors]
        batched = torch.func.vmap(lambda x: function(x, *detached[1:]))(detached[0])
        jacobians = torch.func.jacrev(function)(*detached), torch.func.jacfwd(function)(*detached)
    assert all(count > 0 for count in override.report().ours.values())
    torch.testing.assert_close(batched, function(*detached))
    torch.testing.assert_close(*jacobians)


@pytest.mark.parametrize("name", NORMS)
def test_samples_of_pytorch(name: str, device: str) -> None:
    """Catches a shape, an absent argument or an error that PyTorch's own tests think of."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(op for op in op_db if op.name == f"nn.functional.{name}")
    seen = 0
    for dtype, bound in BOUNDS.items():
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            leaves = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]
            leaves = [t for t in leaves if t.numel()]
            runs = []
            for is_on in (False, True):
                override = fused_op.override_torch() if is_on else None
                output = info.op(sample.input, *sample.args, **sample.kwargs)
                loss = output.float().cos().sum()
                runs.append((output, *(torch.autograd.grad(loss, leaves) if leaves else ())))
                if override:
                    override.undo()
                    seen += sum(override.report().ours.values())
            # Rows of few elements leave what is left of larger terms: see test_opinfo.py.
            torch.testing.assert_close(*runs, rtol=5 * bound, atol=5 * bound)
    assert seen > 0
    with fused_op.override_torch():
        for error in info.error_inputs(device) if info.error_inputs_func else ():
            sample = error.sample_input
            with pytest.raises(error.error_type, match=error.error_regex):
                info.op(sample.input, *sample.args, **sample.kwargs)


def test_transformer_encoder_by_its_fast_path(device: str) -> None:
    """Catches a C++ caller that still runs PyTorch's kernel, in inference and in training."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 16, device=device)
    for mode in (model.eval(), model.train()):
        with torch.set_grad_enabled(mode.training):
            before = mode(x)
            with fused_op.override_torch() as override, profile() as trace:
                inside = mode(x)
        names = [event.name for event in trace.events()]
        is_fast = any("_transformer_encoder_layer_fwd" in name for name in names)
        assert is_fast is not mode.training
        assert override.report().ours["native_layer_norm"] == 4
        torch.testing.assert_close(inside, before, rtol=1e-5, atol=1e-5)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {  # of transformers: its configuration, and its inputs
    "Bert": (SIZES | {"vocab_size": 32, "intermediate_size": 32}, {"input_ids": (2, 8)}),
    "ViT": (
        SIZES | {"intermediate_size": 32, "image_size": 16, "patch_size": 8},
        {"pixel_values": (2, 3, 16, 16)},
    ),
    "Whisper": (
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        | {"vocab_size": 32, "num_mel_bins": 8, "max_source_positions": 8, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        {"input_features": (2, 8, 16), "decoder_input_ids": (2, 8)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, device: str) -> None:
    """Catches a norm of a real model that still runs PyTorch's kernel, in either direction."""
    transformers = pytest.importorskip("transformers")
    values, shapes = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).to(device).eval()
    inputs = {
        key: torch.arange(16, device=device).view(shape) % 32
        if key.endswith("ids")
        else torch.randn(shape, device=device)
        for key, shape in shapes.items()
    }

    def step() -> list[Tensor]:
        model.zero_grad()
        output = model(**inputs)[0]
        output.square().mean().backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    before = step()
    with fused_op.override_torch() as override, profile() as trace:
        inside = step()
    torch.testing.assert_close(inside, before, rtol=1e-3, atol=1e-4)
    assert all(map(torch.equal, step(), before))
    events = [event.name for event in trace.events()]
    calls = events.count("aten::native_layer_norm")
    assert calls >= 4 and events.count("fused_op::norm_forward") == calls
    assert override.report().ours == {
        "native_layer_norm": calls,
        "native_layer_norm_backward": events.count("aten::native_layer_norm_backward"),
    }


def test_profiler_shows_our_ops_alone(device: str) -> None:
    """Catches a norm that runs by other operations than ours."""
    model = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)) if RMS_IS_AN_OP else nn.LayerNorm(8)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    model = model.to(device)
    with fused_op.override_torch(), profile() as trace:
        model(x).sum().backward()

    def is_below(event: FunctionEvent, name: str) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name == name or is_below(parent, name))

    forwards = [e for e in trace.events() if e.name == "fused_op::norm_forward"]
    backwards = [e for e in trace.events() if e.name == "fused_op::norm_backward"]
    assert len(forwards) == len(backwards) == len(NORMS)
    assert all(is_below(e, "aten::native_layer_norm") for e in forwards[:1])
    elementary = {"aten::pow", "aten::mean", "aten::rsqrt", "aten::mul"}
    assert not elementary & {e.name for e in trace.events()}


def test_handles_nest_in_any_order() -> None:
    """Catches an inner undo that ends the outer one, and one that leaves the switch on."""
    x = torch.randn(4, 8)
    first = fused_op.override_torch()
    second = fused_op.override_torch(compiled=False)
    first.undo()
    first.undo()
    F.layer_norm(x, (8,))
    assert (first.report().ours, second.report().ours) == ({}, {"native_layer_norm": 1})
    second.undo()
    F.layer_norm(x, (8,))
    assert second.report().ours == {"native_layer_norm": 1}
    with pytest.raises(RuntimeError, match="mine"), fused_op.override_torch() as third:
        raise RuntimeError("mine")
    F.layer_norm(x, (8,))
    assert third.report().ours == {} and "no norm was called" in str(third.report())


def test_what_no_kernel_takes_is_said_once_and_counted() -> None:
    """Catches a fallback without a word, and a word at every call."""
    x = torch.randn(4, 8)
    infinite = float("inf")
    with fused_op.override_torch() as override:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.testing.assert_close(F.layer_norm(x, (8,), eps=infinite), torch.zeros(4, 8))
        with fused_op.disabled():
            F.layer_norm(x, (8,))
    assert len(caught) <= 1  # none, where an earlier test has had it
    assert override.report().torchs == {
        "native_layer_norm: an eps that is not finite": 3,
        "native_layer_norm: inside fused_op.disabled()": 1,
    }
    assert "PyTorch kept 3 calls" in str(override.report())
    assert override.report().ours == {}


@pytest.mark.skipif(not RMS_IS_AN_OP, reason="this torch has no op for the RMS norm")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rms_norm_without_the_kernels(dtype: torch.dtype) -> None:
    """Catches a wrong formula where PyTorch has no kernel, on the CPU."""
    tensors = arguments("rms_norm", "cpu", dtype)
    before = results("rms_norm", tensors)
    with fused_op.override_torch(), fused_op.disabled():
        inside = results("rms_norm", tensors)
    torch.testing.assert_close(inside, before, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert torch.equal(inside[0], before[0])


@pytest.mark.parametrize("name", NORMS)
def test_no_rows_and_other_tensors(name: str, device: str) -> None:
    """Catches a crash on an empty batch, and meta tensors that lose PyTorch's own rules."""
    weight = torch.ones(8, device=device, requires_grad=True)
    with fused_op.override_torch():
        getattr(F, name)(torch.empty(0, 8, device=device), (8,), weight).sum().backward()
        meta = getattr(F, name)(torch.empty(3, 8, device="meta"), (8,))
    assert torch.equal(weight.grad, torch.zeros(8, device=device))
    assert meta.shape == (3, 8) and meta.is_meta


def test_f32_parameters_beside_16_bit_rows() -> None:
    """Catches statistics that are rounded to 16 bits, which PyTorch keeps in f32 here."""
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    weight = torch.randn(8)
    with fused_op.override_torch() as override:
        output, mean, _ = torch.native_layer_norm(x, [8], weight, None, 1e-5)
    theirs, their_mean, _ = torch.native_layer_norm(x, [8], weight, None, 1e-5)
    assert (output.dtype, mean.dtype) == (theirs.dtype, their_mean.dtype)
    torch.testing.assert_close(mean, their_mean)
    assert override.report().ours == {"native_layer_norm": 1}


def test_saved_statistics_may_move(device: str) -> None:
    """Catches a backward that takes two tensors for neighbours in memory because they once were."""
    tensors = arguments("layer_norm", device)
    with fused_op.override_torch():
        plain = results("layer_norm", tensors)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            moved = results("layer_norm", tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def test_threads() -> None:
    """Catches calls of several threads that disturb each other, or go uncounted."""
    tensors = [arguments("layer_norm") for _ in range(4)]
    alone = [results("layer_norm", each) for each in tensors]
    wrong = []

    def train(i: int) -> None:
        for _ in range(50):
            found = results("layer_norm", tensors[i])
            if any((a - b).abs().max() > 1e-4 for a, b in zip(found, alone[i], strict=True)):
                wrong.append(i)

    with fused_op.override_torch() as override:
        threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert override.report().ours["native_layer_norm_backward"] == 200


@pytest.mark.parametrize("name", NORMS)
def test_random_layouts(name: str, device: str) -> None:
    """Catches a layout of rows or gradients that PyTorch's kernel takes otherwise."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for _ in range(60):
        dtype = rng.choice(list(BOUNDS))
        shape = [rng.choice([0, 1, 3, 5, 17]) for _ in range(rng.randint(0, 3))] + [8, 3]
        ndim = rng.randint(1, 2)
        order = list(range(len(shape)))
        rng.shuffle(order)
        inverse = [order.index(i) for i in range(len(order))]
        x = torch.randn([shape[i] for i in order], device=device).to(dtype).permute(inverse)
        x = (x[:1].expand_as(x) if rng.random() < 0.3 else x).requires_grad_()
        weight = torch.randn(shape[-ndim:], device=device).to(dtype).requires_grad_()
        grad = torch.randn(shape, device=device).to(dtype).transpose(0, -1).contiguous()
        runs = []
        for is_on in (False, True):
            override = fused_op.override_torch() if is_on else None
            output = getattr(F, name)(x, shape[-ndim:], weight)
            found = torch.autograd.grad(output, [x, weight], grad.transpose(0, -1))
            runs.append((output, *found))
            if override:
                override.undo()
        bound = 10 * BOUNDS[dtype]
        for expected, found in zip(*runs, strict=True):
            # A weight's gradient is a sum over rows, whose rounded statistics leave no small one.
            largest = max([1.0, *expected.abs().flatten().tolist()])
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound * largest)


def test_wrong_argument() -> None:
    with pytest.raises(
        TypeError, match="override_torch: argument 'compiled' must be bool, not int"
    ):
        fused_op.override_torch(compiled=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.last = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.linear(self.norm(x)))


@pytest.mark.parametrize("compiled", [True, False])
def test_inductor(device: str, compiled: bool) -> None:
    """Catches compiled code with the wrong norms, graph breaks, and a cache that mixes them up."""
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    model = Block().to(device)
    x = torch.randn(6, 16, device=device, requires_grad=True)
    leaves = [x, *model.parameters()]
    eager = model(x)
    expected = torch.autograd.grad(eager.square().sum(), leaves)
    for is_on in (True, False, True):  # caches that another state has filled
        torch.compiler.reset()
        override = fused_op.override_torch(compiled=compiled) if is_on else None

        def run():
            output = torch.compile(model, fullgraph=True)(x)
            return output, torch.autograd.grad(output.square().sum(), leaves)

        (output, grads), code = run_and_get_code(run)
        torch.testing.assert_close((output, grads), (eager, expected), rtol=1e-4, atol=1e-4)
        ours = sum(text.count("fused_op.norm_forward.default(") for text in code)
        assert ours == (2 if is_on and compiled else 0)
        if override:
            override.undo()
            counts = override.report().compiled
            assert counts in ({"replaced": 2}, {}) if compiled else counts == {}  # {}: cached
    assert torch._inductor.config.pre_grad_custom_pass is None
    torch.compiler.reset()


def test_inductor_keeps_what_no_kernel_takes_and_the_pass_of_a_user() -> None:
    """Catches a graph that our pass breaks, and a user's pass that it drops."""
    torch.compiler.reset()
    seen = []
    torch._inductor.config.pre_grad_custom_pass = seen.append
    x, weight = torch.randn(4, 8), torch.randn(8, dtype=torch.float64)
    try:
        with fused_op.override_torch() as override:
            function = torch.compile(lambda x, weight: F.rms_norm(x, (8,), weight), fullgraph=True)
            torch.testing.assert_close(function(x, weight), F.rms_norm(x, (8,), weight))
        assert override.report().compiled == {"kept": 1} and len(seen) == 1
        assert torch._inductor.config.pre_grad_custom_pass == seen.append
    finally:
        torch._inductor.config.pre_grad_custom_pass = None
        torch.compiler.reset()


def test_other_backends_of_compile_call_our_kernels() -> None:
    """Catches a graph of PyTorch's ops that runs PyTorch's kernels."""
    torch.compiler.reset()
    x = torch.randn(4, 8, requires_grad=True)
    with fused_op.override_torch() as override:
        function = torch.compile(lambda x: F.layer_norm(x, (8,)), backend="aot_eager")
        function(x).sum().backward()
    assert override.report().ours == {"native_layer_norm": 1, "native_layer_norm_backward": 1}
    torch.compiler.reset()


SCRIPT = """
import sys, helper_beside_the_script, torch
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "2"], sys.argv
torch.nn.LayerNorm(8)(torch.randn(2, 8))
sys.exit(3)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_run(tmp_path, is_module: bool) -> None:
    """Catches a program that sees other arguments, another path or another exit than without."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "helper_beside_the_script.py").write_text("")
    (folder / "program.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fused_op", "run"]
    command += ["-m", "program"] if is_module else [str(folder / "program.py")]
    run = subprocess.run(
        [*command, "--steps", "2"],
        cwd=folder if is_module else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 3, run.stderr
    assert run.stdout == ""
    assert run.stderr == "fused_op took 1 calls of aten::native_layer_norm\n"


def test_every_device_is_overridden() -> None:
    """Catches a build for CUDA that leaves the GPU to PyTorch: no CPU call would show it."""
    with fused_op.override_torch() as override:
        dumps = [torch._C._dispatch_dump(f"aten::{op}") for op in override.report().ops]
    devices = 2 if fused_op.build_info()["cuda"] else 1
    assert all(dump.count("torch_override.cpp") == devices for dump in dumps), dumps
