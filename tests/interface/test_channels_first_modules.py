"""The modules of norms over channels: the bits of their functions, the parameters of PyTorch's."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import fused_op
from fused_op import FusedChannelsFirstLayerNorm, FusedChannelsFirstRMSNorm
from tests.norms import randomize, rows
from tests.ops import BF16, F16, F32, F64

FUNCTIONS = {
    FusedChannelsFirstLayerNorm: fused_op.fused_channels_first_layer_norm,
    FusedChannelsFirstRMSNorm: fused_op.fused_channels_first_rms_norm,
}
SHAPE = (2, 6, 5, 7)


@pytest.fixture(params=FUNCTIONS, ids=lambda cls: cls.__name__)
def cls(request):
    return request.param


def image(dtype=F32, device="cpu", shape=SHAPE):
    return rows(shape[-1], dtype, *shape[:-1], device=device)


OPTIONS = [
    {},
    {"bias": True},
    {"bias": False, "eps": 1e-3},
    {"elementwise_affine": False},
    {"activation": "silu", "bias": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (BF16, F32), (F64, F64)], ids=str)
def test_values_and_gradients_are_those_of_the_function(cls, dtypes, options, device):
    """Catches an argument that forward swaps, forgets or does not pass on."""
    x = image(dtypes[0], device)
    module = randomize(cls(6, **options, dtype=dtypes[1], device=device))
    arguments = {n: options[n] for n in ("eps", "activation") if n in options}
    results = []
    for function in (module, lambda t: FUNCTIONS[cls](t, module.weight, module.bias, **arguments)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        grads = torch.autograd.grad(y, [leaf, *module.parameters()], image(y.dtype, device))
        results.append((y, *grads))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found.dtype is expected.dtype
    has_weight = options.get("elementwise_affine", True)
    assert (module.weight is not None) == has_weight
    is_layer_norm = cls is FusedChannelsFirstLayerNorm
    assert (module.bias is not None) == (has_weight and options.get("bias", is_layer_norm))


def test_the_same_as_pytorch_between_permutations(cls, device):
    """Catches other parameters, names or initial values than a checkpoint of PyTorch's has."""
    is_layer_norm = cls is FusedChannelsFirstLayerNorm
    theirs = (nn.LayerNorm if is_layer_norm else nn.RMSNorm)(6, eps=1e-6, device=device)
    ours = cls(6, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.eps == theirs.eps
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = image(device=device)
    expected = theirs(x.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(ours(x), expected)
    ours.reset_parameters()
    assert (ours.weight == 1).all() and (ours.bias is None or (ours.bias == 0).all())


def test_arguments(cls):
    """Catches another order or another default than the two modules and their function have."""
    parameters = inspect.signature(cls).parameters
    names = ["num_channels", "eps", "elementwise_affine", "bias", "activation", "device", "dtype"]
    assert list(parameters) == names
    assert parameters["eps"].default == inspect.signature(FUNCTIONS[cls]).parameters["eps"].default
    kinds = [parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names]
    assert kinds == [False] * 4 + [True] * 3


def test_repr(cls):
    name, bias = cls.__name__, cls is FusedChannelsFirstLayerNorm
    assert repr(cls(6)) == f"{name}(6, eps=1e-06, elementwise_affine=True, bias={bias})"
    assert repr(cls(6, 0.5, False)) == f"{name}(6, eps=0.5, elementwise_affine=False)"
    assert repr(cls(6, bias=True, activation="silu")).endswith(", bias=True, activation='silu')")


def saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, saved_and_loaded, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "torch.save", "pickle"],
)
def test_copies(cls, copied):
    """Catches a copy that is another class, shares memory, or lost an option."""
    module = randomize(cls(6, 0.1, activation="silu"))
    twin, x = copied(module), image()
    expected = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert type(twin) is cls and repr(twin) == repr(module)
    assert torch.equal(twin(x), expected)


def test_device_and_dtype(cls, device):
    """Catches a parameter that is made elsewhere, or that .to() leaves behind."""
    module = cls(6, bias=True, device="meta", dtype=BF16)
    assert all(p.is_meta and p.dtype is BF16 for p in module.parameters())
    assert module(image(BF16, "meta")).is_meta
    module.to_empty(device=device).reset_parameters()
    expected = cls(6, device=device, dtype=BF16)(image(BF16, device))
    assert torch.equal(module(image(BF16, device)), expected)
    for dtype in (F16, F32, F64):
        module.to(dtype)
        assert all(p.dtype is dtype for p in module.parameters())
        assert module(image(dtype, device)).dtype is dtype


def test_layouts(cls, device):
    x, module = image(device=device), randomize(cls(6, device=device))
    assert module(x).is_contiguous()
    last = module(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, module(x))
    assert module(x[:, :, 0, 0]).shape == (2, 6)


def test_compile_without_graph_break(cls, device):
    """Catches a forward that dynamo cannot trace, or compiles to other values."""
    for affine in (True, False):
        torch._dynamo.reset()
        module = randomize(cls(6, 1e-6, affine, activation="silu", device=device))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = image(device=device).requires_grad_()
        found, expected = compiled(x), module(x)
        assert torch.equal(found, expected)
        for ours, theirs in zip(
            *(torch.autograd.grad(y.sum(), [x, *module.parameters()]) for y in (found, expected)),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eps": float("nan")}, ValueError, "eps must be finite, got nan"),
        ({"eps": None}, TypeError, "argument 'eps' must be float, not NoneType"),
        ({"bias": 1}, TypeError, "argument 'bias' must be bool, not int"),
        ({"elementwise_affine": "no"}, TypeError, "'elementwise_affine' must be bool, not str"),
        ({"activation": 1}, TypeError, "argument 'activation' must be str or None, not int"),
        ({"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
        ({"num_channels": (6,)}, TypeError, "argument 'num_channels' must be int, not tuple"),
        ({"num_channels": True}, TypeError, "argument 'num_channels' must be int, not bool"),
    ],
    ids=str,
)
def test_constructor_refuses_what_forward_would(cls, options, error, message):
    """Catches a module that is built, loaded and moved before its first call says no."""
    with pytest.raises(error, match=f"{cls.__name__}: .*{message}"):
        cls(**({"num_channels": 6} | options))


def test_calls_that_are_refused(cls):
    """Catches an input of other channels, which a module without a weight would just normalise."""
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        cls(6)(image(shape=(2, 5, 4, 4)))
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}: input must have 6 channels, dim.*5"):
        cls(6, elementwise_affine=False)(image(shape=(2, 5, 4, 4)))
    with pytest.raises(RuntimeError, match="input must have at least two dimensions"):
        cls(6, elementwise_affine=False)(torch.ones(6))
    with pytest.raises(TypeError, match="argument 'input' must be Tensor, not list"):
        cls(6, elementwise_affine=False)([1.0])
