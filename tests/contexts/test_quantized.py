"""Quantised outputs under a compiler, transforms, autocast, other tensors; and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing._internal.optests import opcheck

import fused_op
from tests.calls import Calls
from tests.numerics.test_quantized import E4M3, E5M2, E8M0, OPS, assert_bits, op_of, tensors_of
from tests.ops import BF16, DEVICES, F32, F64

ROOT = Path(__file__).parents[2]
# What the op and its fake have to agree on.
OPTIONS = [
    {},
    {"convention": "vllm", "dtype": torch.int8, "keep_output": True},
    {"scheme": "block128", "scale_layout": "transposed"},
    {"scheme": "block128", "convention": "te", "scale_dtype": E8M0, "out_dtype": F32},
    {"scheme": "tensor", "convention": "te", "dtype": E5M2},
]
SHAPES = [(5, 200), (3, 2, 128), (0, 16), (2, 0)]


def options_on(device: str, options: dict) -> dict:
    given = {"scale": torch.tensor(0.5, device=device)} if options.get("scheme") == "tensor" else {}
    return options | given


def assert_equal(ours, theirs) -> None:
    for actual, expected in zip(ours, theirs, strict=True):
        assert_bits(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, shape, device):
    """Catches a fake result of other sizes, strides or dtype, and an undeclared alias."""
    norm, adds = name.removeprefix("add_"), name.startswith("add")
    tensors = tensors_of(name, shape, device)
    rows, params = tensors[: 1 + adds], tensors[1 + adds :]
    rows += [None] * (2 - len(rows))
    params += [None] * (2 - len(params))
    calls = ("token", False, True), ("block128", True, False), ("block128", False, False)
    for scheme, transposed, keep in (*calls, ("tensor", False, False)):
        scale = torch.tensor(0.5, device=device) if scheme == "tensor" else None
        arguments = (
            norm, *rows, *params, scale, 1, 1e-5, False, "once", None, None, scheme, E4M3,
            "torchao", False, F32, transposed, keep, keep,
        )  # fmt: skip
        op = torch.ops.fused_op.norm_quantized.default
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm"])
def test_compiled(name, options, device):
    """Catches a graph break, other bits, and a gradient that gets lost."""
    torch._dynamo.reset()
    options = options_on(device, options)

    tensors = tensors_of(name, (4, 200), device, requires_grad=True)
    compiled = torch.compile(lambda *t: op_of(name)(*t, **options), fullgraph=True)
    result, expected = compiled(*tensors), op_of(name)(*tensors, **options)
    assert_equal(result[:2], expected[:2])
    outputs, others = ([t for t in r[2:] if t is not None] for r in (result, expected))
    grads = [torch.randn_like(t) for t in others]
    assert_equal(torch.autograd.grad(outputs, tensors, grads),
                 torch.autograd.grad(others, tensors, grads))  # fmt: skip
    with torch.no_grad():
        assert_equal(compiled(*tensors)[:2], expected[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_without_kernels(name, options, device):
    """Catches a formula in PyTorch's operations with other bits than the kernels', given y."""
    options = options_on(device, options) | {"keep_output": True}
    tensors = tensors_of(name, (4, 300), device, requires_grad=True)
    with fused_op.disabled(), Calls() as calls:
        result = op_of(name)(*tensors, **options)
    assert not any("fused_op" in name for name in calls.names)
    expected = getattr(fused_op.reference, f"fused_{name}_quantized")(*tensors, **options)
    assert_equal(result, expected)
    placeholder = getattr(fused_op.reference, f"fused_{name}_quantized")(
        *tensors, **options | {"keep_output": False}
    ).output
    assert placeholder.isnan().all()
    grad = torch.randn_like(result.output)
    assert_equal(torch.autograd.grad(placeholder, tensors, grad),
                 torch.autograd.grad(result.output, tensors, grad))  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_function_transforms(name):
    """Catches a transform that looks past the gradient, or mixes samples."""
    adds = name.startswith("add")
    tensors = tensors_of(name, (3, 4, 160), "cpu", F32)
    count = 1 + adds
    dims = (0,) * count + (None,) * (len(tensors) - count)
    for options in (OPTIONS[0], OPTIONS[2], OPTIONS[1]):

        def call(*args, options=options):
            return tuple(t for t in op_of(name)(*args, **options | {"keep_output": True})
                         if t is not None)  # fmt: skip

        batched = torch.vmap(call, in_dims=dims)(*tensors)
        reference = getattr(fused_op.reference, f"fused_{name}_quantized")
        with torch.no_grad():
            one = reference(*(t[1] for t in tensors[:count]), *tensors[count:],
                            **options | {"keep_output": True})  # fmt: skip
        assert_equal([t[1] for t in batched], [t for t in one if t is not None])

    gradient = torch.func.grad(lambda x: (op_of(name)(x, *tensors[1:], keep_output=True).output
                                          * tensors[0]).sum())(tensors[0])  # fmt: skip
    x = tensors[0].clone().requires_grad_()
    plain = getattr(fused_op, f"fused_{name}")(x, *tensors[1:])
    plain = plain[0] if isinstance(plain, tuple) else plain
    # The product's own gradient is that of a constant factor: x is not in it.
    (expected,) = torch.autograd.grad((plain * tensors[0]).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_autocast_and_torch_function():
    x, residual, weight = tensors_of("add_rms_norm", (4, 64), "cpu", F32)
    with torch.autocast("cpu", BF16):
        result = fused_op.fused_add_rms_norm_quantized(x, residual.to(BF16), weight)
    assert result.sum.dtype == F32
    expected = fused_op.fused_add_rms_norm_quantized(x, residual.to(BF16).float(), weight)
    assert_equal(result, expected)

    class Subclass(torch.Tensor):
        pass

    wrapped = fused_op.fused_rms_norm_quantized(x.as_subclass(Subclass), weight)
    assert type(wrapped.quantized) is Subclass
    with torch.device("cpu"):  # a mode
        assert_equal(fused_op.fused_rms_norm_quantized(x, weight)[:2], wrapped[:2])


GOOD = {"scheme": "token", "dtype": E4M3, "convention": "torchao"}


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "scheme must be one of 'tensor', 'token', 'block128', got 'row'",
         {"scheme": "row"}),
        (TypeError, "argument 'scheme' must be str, not int", {"scheme": 1}),
        (ValueError, "convention must be one of", {"convention": "flashinfer"}),
        (TypeError, "argument 'dtype' must be torch.dtype, not str", {"dtype": "fp8"}),
        (ValueError, "convention 'torchao' has dtype .* not torch.int8", {"dtype": torch.int8}),
        (ValueError, "convention 'vllm' has dtype .* not torch.float8_e5m2",
         {"convention": "vllm", "dtype": E5M2}),
        (ValueError, "convention 'deep_gemm' has scheme 'block128', not 'token'",
         {"convention": "deep_gemm"}),
        (ValueError, "convention 'te' has scheme 'tensor' and 'block128', not 'token'",
         {"convention": "te"}),
        (ValueError, "scheme 'tensor' needs a scale", {"scheme": "tensor"}),
        (TypeError, "argument 'scale' must be Tensor, not float",
         {"scheme": "tensor", "scale": 1.0}),
        (ValueError, "scale must be None", {"scale": torch.ones(())}),
        (RuntimeError, "scale must be one Float on cpu, got Double",
         {"scheme": "tensor", "scale": torch.ones((), dtype=F64)}),
        (RuntimeError, r"scale must be one Float on cpu, got Float of shape \[2\]",
         {"scheme": "tensor", "scale": torch.ones(2)}),
        (ValueError, "are no powers of two", {"convention": "vllm", "power_of_two": True}),
        (TypeError, "'power_of_two' must be bool, not int", {"power_of_two": 1}),
        (ValueError, "scale_dtype must be torch.float32 or", {"scale_dtype": BF16}),
        (ValueError, "holds powers of two alone", {"scale_dtype": E8M0}),
        (ValueError, "scale_layout must be one of", {"scale_layout": "columns"}),
        (ValueError, "'transposed' is for scheme 'block128'", {"scale_layout": "transposed"}),
        (TypeError, "'keep_output' must be bool, not int", {"keep_output": 1}),
        (RuntimeError, "out_dtype must be", {"out_dtype": F64}),
        (ValueError, "eps must be finite", {"eps": float("nan")}),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
@pytest.mark.parametrize("way", ["kernel", "formula"])
def test_refuses(error, message, options, way):
    """Each by a sentence that begins with the function's name."""
    x = torch.ones(2, 128)
    message = f"^fused_rms_norm_quantized: .*{message}|{message}"
    if way == "formula" and error is RuntimeError and "scale" in message:
        pytest.skip("said where a kernel is about to read it")
    with pytest.raises(error, match=message):
        if way == "kernel":
            fused_op.fused_rms_norm_quantized(x, **GOOD | options)
        else:
            with fused_op.disabled():
                fused_op.fused_rms_norm_quantized(x, **GOOD | options)


@pytest.mark.parametrize("way", ["kernel", "formula"])
def test_refuses_tensors(way):
    context = fused_op.disabled() if way == "formula" else torch.no_grad()
    with context:
        with pytest.raises(RuntimeError, match="_quantized: input must be float16, bfloat16 or"):
            fused_op.fused_rms_norm_quantized(torch.ones(2, 8, dtype=F64))
        with pytest.raises(TypeError, match="_quantized: argument 'residual' must be Tensor"):
            fused_op.fused_add_rms_norm_quantized(torch.ones(2, 8), None)
        with pytest.raises(RuntimeError, match="residual must have the shape of input"):
            fused_op.fused_add_layer_norm_quantized(torch.ones(2, 8), torch.ones(2, 9))
        with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
            fused_op.fused_layer_norm_quantized(
                torch.ones(2, 8), torch.ones(9), normalized_shape=(8,)
            )
        for name, given in {"input": (None,), "weight": (torch.ones(2, 8), [1.0])}.items():
            with pytest.raises(TypeError, match=f"_quantized: argument '{name}' must be Tensor"):
                fused_op.fused_rms_norm_quantized(*given)
        with pytest.raises(RuntimeError, match="input must be a dense"):
            fused_op.fused_rms_norm_quantized(torch.ones(2, 8).to_sparse())


def test_meta_tensors():
    """Catches results that nobody writes, beside one, and a call that fails where all are."""
    x, meta = torch.ones(2, 8), torch.ones(8, device="meta")
    with pytest.raises(RuntimeError, match="weight: Tensor on device meta is not on"):
        fused_op.fused_rms_norm_quantized(x, meta)
    with pytest.raises(RuntimeError, match="scale: Tensor on device meta is not on"):
        fused_op.fused_rms_norm_quantized(x, scheme="tensor", scale=meta[:1])
    assert fused_op.fused_rms_norm_quantized(x.to("meta"), meta).quantized.is_meta


def test_signatures():
    """The four differ in what their norms differ in."""
    import inspect

    plain = inspect.signature(fused_op.fused_rms_norm_quantized).parameters
    for name, extra in zip(OPS, (set(), {"bias"}, {"residual", "residual_dtype"},
                                 {"bias", "residual", "residual_dtype"}), strict=True):  # fmt: skip
        parameters = inspect.signature(op_of(name)).parameters
        assert set(parameters) - set(plain) == extra
        norm = inspect.signature(getattr(fused_op, f"fused_{name}")).parameters
        positional = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        assert positional == [n for n, p in norm.items() if p.kind is not p.KEYWORD_ONLY]


@pytest.mark.slow
def test_the_example_trains():
    """Catches a gradient that is lost or wrong on its way to a norm whose output is fp8."""
    command = [sys.executable, "examples/fp8_mlp.py", "--steps", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line.split()[1:] for line in done.stdout.splitlines()[1:-1]]
    first, last = ([float(loss) for loss in losses[i]] for i in (0, -1))
    assert last[0] < first[0] / 10 and last[1] < first[1] / 10
    # 0.0915 and 0.0929 at step 60: fp8 has 3 bits, of which a mean over 128 columns takes most.
    assert last[1] / last[0] < 1.1
