"""Refusals: the exception type, and a sentence that names the op, what it expects, and what it got.

Of what the library has beyond PyTorch's functions, of direct calls of the binding, and of imports;
test_bad_input.py has the arguments that PyTorch's functions have too.
"""

import builtins
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fused_op
import fused_op_cuda
from fused_op import fused_layer_norm
from fused_op._options import BackwardOptions, Options

X, W, B = torch.randn(4, 8), torch.randn(8), torch.randn(8)
STATS = torch.ones(2, 4)
NAN, INF = float("nan"), float("inf")


def cases(table: str) -> list[tuple[str, type[Exception], str]]:
    """(call, exception, part of its message) from two lines each."""
    lines = table.strip().splitlines()
    errors = (line.strip().split(": ", 1) for line in lines[1::2])
    return [
        (call, getattr(builtins, name), message)
        for call, (name, message) in zip(lines[::2], errors, strict=True)
    ]


FRONT_DOOR = r"""
fused_add_layer_norm(X, None)
    TypeError: fused_add_layer_norm: argument 'residual' must be Tensor, not NoneType
fused_op.fused_add_rms_norm(X, None)
    TypeError: fused_add_rms_norm: argument 'residual' must be Tensor, not NoneType
fused_add_layer_norm(X, X.half())
    RuntimeError: fused_add_layer_norm: residual must have the dtype of input, Float, got Half
fused_add_layer_norm(X, X.int())
    NotImplementedError: not implemented for 'Int': residual must be
fused_add_layer_norm(X, X[0])
    RuntimeError: fused_add_layer_norm: residual must have the shape of input, [4, 8], got [8]
fused_add_layer_norm(X, X.to("meta"))
    RuntimeError: residual: Tensor on device meta is not on the expected device cpu
fused_layer_norm([1.0], normalized_shape=1)
    TypeError: argument 'input' must be Tensor, not list
fused_op.rms_norm(None, 8)
    TypeError: rms_norm: argument 'input' must be Tensor, not NoneType
fused_layer_norm(X, dropout_p="p")
    TypeError: fused_layer_norm: argument 'dropout_p' must be float, not str
fused_layer_norm(X, dropout_p=X)
    TypeError: fused_layer_norm: argument 'dropout_p' must be float, not Tensor
fused_layer_norm(X, out_dtype=X)
    TypeError: fused_layer_norm: argument 'out_dtype' must be torch.dtype, not Tensor
fused_layer_norm(X, memory_efficient=X)
    TypeError: fused_layer_norm: argument 'memory_efficient' must be bool, not torch.Tensor
fused_layer_norm(X, W, zero_centered=1)
    TypeError: fused_layer_norm: argument 'zero_centered' must be bool, not int
fused_op.fused_add_rms_norm(X, X, W, zero_centered=None)
    TypeError: fused_add_rms_norm: argument 'zero_centered' must be bool, not NoneType
fused_layer_norm(X, W, zero_centered=np.True_)
    TypeError: argument 'zero_centered' must be bool, not numpy.bool
"""


@pytest.mark.parametrize(("call", "exception", "message"), cases(FRONT_DOOR))
def test_front_door(call, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        eval(call, vars(fused_op) | globals())
    torch.testing.assert_close(fused_layer_norm(X, W, B), F.layer_norm(X, (8,), W, B))


BACK_DOOR = r"""
forward(norm="batch_norm")
    ValueError: norm must be 'layer_norm' or 'rms_norm', got 'batch_norm'
forward(norm="rms_norm", eps=NAN)
    ValueError: eps must be finite, got nan
backward(normalized_ndim=-1)
    RuntimeError: Expected normalized_shape to be at least 1-dimensional
forward(norm="rms_norm", bias=B)
    RuntimeError: rms_norm has no bias
forward(dropout_p=2.0)
    ValueError: dropout probability has to be between 0 and 1, but got 2
forward(dropout_p=NAN)
    ValueError: dropout probability has to be between 0 and 1, but got nan
forward(dropout_p=0.5)
    RuntimeError: dropout needs an rng_state: seed and offset, Long of shape [2] on the CPU or cpu
forward(dropout_p=0.5, rng_state=torch.ones(2))
    RuntimeError: dropout needs an rng_state
forward(dropout_p=0.5, rng_state=torch.ones(3, dtype=torch.int64))
    RuntimeError: dropout needs an rng_state
forward(out_dtype=torch.float64)
    RuntimeError: out_dtype must be Float, Half or BFloat16 for input of Float, got Double
forward(out_dtype=torch.int8)
    RuntimeError: out_dtype must be Float, Half or BFloat16 for input of Float, got Char
forward(residual=X, residual_dtype=torch.float16)
    RuntimeError: residual_dtype must be the dtype of residual, Float, got Half
backward(norm="rms_norm", stats=STATS[:1])
    RuntimeError: rms_norm has no bias
backward(dropout_p=0.5)
    RuntimeError: dropout needs an rng_state
backward(dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int64))
    RuntimeError: a gradient of the residual is wanted, and there is none
backward(x_is_output=True, residual_dtype=torch.float32)
    RuntimeError: the output stands for x only without dropout and without a residual
backward(input_dtype=torch.float64)
    RuntimeError: input_dtype of Double does not fit x of Float
backward(residual_dtype=torch.float16)
    RuntimeError: residual_dtype must be input_dtype, or fit it, got Half
backward(weight=W.long())
    RuntimeError: got weight of Long
into()
    RuntimeError: of the wanted gradients of weight and bias, either all or none have a main_grad
into(W.half(), W)
    RuntimeError: main_grad must be a contiguous Float tensor of shape [8] on cpu, got Half of
into(W, W[:5])
    RuntimeError: got Float of shape [5] on cpu
into(W.to("meta"), W)
    RuntimeError: main_grad is added to in eager calls of plain tensors only
backward(grad_output=X[:3])
    RuntimeError: grad_output must have the shape of input, [4, 8], got [3, 8]
backward(grad_output=X.double())
    RuntimeError: grad_output of Double does not fit x of Float
backward(grad_sum=X[:3])
    RuntimeError: grad_sum must have the shape of input, [4, 8], got [3, 8]
backward(grad_sum=X.double())
    RuntimeError: grad_sum must have the dtype of input
backward(weight=W[:5])
    RuntimeError: Expected weight to be of same shape as normalized_shape
backward(normalized_ndim=3)
    RuntimeError: cannot normalise over the last 3 dimensions
backward(stats=STATS[:, :3])
    RuntimeError: for x: Float of shape [2, 4] on cpu, got Float of shape [2, 3] on cpu
backward(stats=STATS[:1])
    RuntimeError: got Float of shape [1, 4]
backward(stats=STATS.double())
    RuntimeError: got Double of shape [2, 4]
backward(param_dtype=torch.int8)
    RuntimeError: Float, Half, BFloat16 or Double, got param_dtype of Char
forward(rounding="twice")
    ValueError: rounding must be 'once' or 'before_weight', got 'twice'
backward(rounding="")
    ValueError: rounding must be 'once' or 'before_weight', got ''
forward(weight=1.0)
    TypeError: fused_layer_norm: argument 'weight' must be Tensor, not float
forward(residual=X, rng_state="state")
    TypeError: fused_add_layer_norm: argument 'rng_state' must be Tensor, not str
backward(stats=None)
    TypeError: fused_op::norm_backward: argument 'stats' must be Tensor, not NoneType
fused_op_cuda.norm((X, None, None, None), Options("layer_norm", 1e-5))
    TypeError: fused_layer_norm: tensors must be a tuple of 5, as
fused_op_cuda.norm_forward((X, None, None, None, None), "layer_norm", True)
    TypeError: options must be a tuple of 12, as fused_op/_options.py has it, not str
"""


def forward(**changes):
    tensors = dict.fromkeys(("input", "residual", "weight", "bias", "rng_state")) | {"input": X}
    options = Options("layer_norm", 1e-5, (8,))._asdict()
    take(changes, tensors, options)
    return fused_op_cuda.norm_forward(tuple(tensors.values()), Options(**options), True)


def backward_arguments(**changes):
    tensors = {
        "grad_output": X,
        "grad_sum": None,
        "x": X,
        "weight": W,
        "bias": None,
        "stats": STATS,
        "rng_state": None,
    }
    options = {
        "norm": "layer_norm",
        "normalized_ndim": 1,
        "eps": None,
        "zero_centered": False,
        "rounding": "once",
        "dropout_p": 0.0,
        "x_is_output": False,
        "input_dtype": torch.float32,
        "residual_dtype": None,
        "param_dtype": torch.float32,
        "output_dtype": torch.float32,
        "main_grad": False,
    }
    wanted = changes.pop("wanted", (True, True, True, True))
    take(changes, tensors, options)
    return tuple(tensors.values()), BackwardOptions(**options), wanted


def take(changes, *places):
    for name, value in changes.items():
        (place,) = (place for place in places if name in place)
        place[name] = value


def backward(**changes):
    return fused_op_cuda.norm_backward(*backward_arguments(**changes))


def into(weight=W, bias=None):
    return fused_op_cuda.norm_backward_into(*backward_arguments(), (weight, bias))


def test_a_backward_of_which_nothing_is_wanted(device):
    """Catches a launch without CTAs."""
    tensors = {"grad_output": X, "x": X, "weight": W, "stats": STATS}
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    assert backward(**moved, wanted=(False,) * 4) == (None,) * 4


@pytest.mark.parametrize(("call", "exception", "message"), cases(BACK_DOOR))
def test_direct_calls_of_the_binding_read_no_wrong_memory(call, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        eval(call)


TWINS = {
    "input": lambda f: f(None, (8,)),
    "input dtype": lambda f: f(X.long(), (8,)),
    "weight type": lambda f: f(X, (8,), 1.0),
    "weight shape": lambda f: f(X, (8,), W[:5]),
    "weight device": lambda f: f(X, (8,), W.to("meta")),
    "shape": lambda f: f(X, (5,)),
    "shape ()": lambda f: f(X, ()),
    "shape None": lambda f: f(X, None),
    "shape str": lambda f: f(X, "8"),
    "shape float": lambda f: f(X, (8.0,)),
    "eps str": lambda f: f(X, (8,), eps="a"),
    "eps too large": lambda f: f(X, (8,), eps=10**400),
}


@pytest.mark.parametrize("case", TWINS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_twins_fail_like_pytorch(name, case):
    with pytest.raises(Exception) as theirs:
        TWINS[case](getattr(F, name))
    with pytest.raises(theirs.type) as ours:
        TWINS[case](getattr(fused_op, name))
    # Their name of the function and of its kernel, and the position of the argument, are no facts
    # about ours; neither is the missing comma of "[*5]".
    phrase = re.sub(
        r'^.*argument (\S+) \(position \d+\) | at pos 0$|^".*?" ', "", str(theirs.value)
    )
    phrase = phrase.replace("[*5]", "[*, 5]").replace("device cpu!", "device cpu")
    assert phrase in str(ours.value)


def test_twin_of_layer_norm_refuses_parameters_like_pytorch():
    for weight, bias in ((W, B[:5]), (W.cfloat(), None)):
        with pytest.raises(RuntimeError) as theirs:
            F.layer_norm(X, (8,), weight, bias)
        with pytest.raises(RuntimeError) as ours:
            fused_op.layer_norm(X, (8,), weight, bias)
        assert str(theirs.value).replace("mixed dtype (CPU)", "mixed dtype") in str(ours.value)


def calls_with(int_of):
    x = torch.arange(48.0).view(2, 6, 4) % 5
    qkv, angles = x.view(2, 2, 12), torch.ones(2, 2, 2)
    return {
        "num_groups": lambda: fused_op.fused_group_norm(x, int_of(3)),
        "FusedGroupNorm": lambda: fused_op.FusedGroupNorm(int_of(3), 6)(x),
        "num_channels": lambda: fused_op.FusedChannelsFirstRMSNorm(int_of(6))(x),
        "group_size": lambda: fused_op.fused_gated_rms_norm(x, x, group_size=int_of(2)),
        "FusedGatedRMSNorm": lambda: fused_op.FusedGatedRMSNorm(4, group_size=int_of(2))(x, x),
        "heads": lambda: fused_op.fused_qk_norm_rope(
            qkv, angles, angles, heads=int_of(1), kv_heads=int_of(1)
        )[0],
    }


@pytest.mark.parametrize("name", calls_with(int))
def test_numbers_of_numpy_are_numbers(name):
    """Catches a size out of an array that is refused, or kept as what it is."""
    assert torch.equal(calls_with(np.int64)[name](), calls_with(int)[name]())
    with pytest.raises(TypeError, match="must be int, not ndarray"):
        calls_with(lambda value: np.array([value] * 2))[name]()


def import_error(setup: str) -> str:
    code = f"import sys, types, torch\n{setup}\nimport fused_op"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


def test_import_without_the_compiled_module():
    error = import_error("sys.modules['fused_op_cuda'] = None")
    assert error.startswith("ImportError: fused_op is not built, or was built for another torch")
    assert error.endswith("pip install --force-reinstall --no-deps .")


def test_import_with_a_module_for_another_torch():
    error = import_error(
        "fake = types.ModuleType('fused_op_cuda')\n"
        "fake.build_info = lambda: {'torch': '1.9.0'}\n"
        "sys.modules['fused_op_cuda'] = fake"
    )
    assert error.startswith(
        f"ImportError: fused_op was built for torch 1.9.0, but torch {torch.__version__} is inst"
    )
    assert error.endswith("pip install --force-reinstall --no-deps .")
