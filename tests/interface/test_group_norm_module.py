"""FusedGroupNorm: the bits of its function, the parameters of ``nn.GroupNorm``."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_op import FusedGroupNorm, fused_group_norm
from tests.norms import randomize, rows
from tests.ops import BF16, F16, F32, F64

SHAPE = (2, 6, 5, 7)


def image(dtype=F32, device="cpu", shape=SHAPE):
    return rows(shape[-1], dtype, *shape[:-1], device=device)


OPTIONS = [{}, {"eps": 1e-3}, {"affine": False}, {"activation": "silu"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (BF16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("given", [(), ("scale",), ("scale", "shift")], ids="+".join)
def test_values_and_gradients_are_those_of_the_function(dtypes, options, given, device):
    """Catches an argument that forward swaps, forgets or does not pass on."""
    x = image(dtypes[0], device)
    module = randomize(FusedGroupNorm(3, 6, **options, dtype=dtypes[1], device=device))
    entries = {name: image(dtypes[0], device, (2, 6)) for name in given}
    arguments = {name: options[name] for name in ("eps", "activation") if name in options}

    def function(t, **entries):
        return fused_group_norm(t, 3, module.weight, module.bias, **arguments, **entries)

    results = []
    for called in (module, function):
        leaves = {name: t.clone().requires_grad_() for name, t in entries.items()}
        leaf = x.clone().requires_grad_()
        y = called(leaf, **leaves)
        wanted = [leaf, *leaves.values(), *module.parameters()]
        results.append((y, *torch.autograd.grad(y, wanted, torch.ones_like(y))))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found.dtype is expected.dtype


def test_the_same_as_pytorch(device):
    """Catches other parameters, names or initial values than a checkpoint of PyTorch's has."""
    ours, theirs = (cls(3, 6, device=device) for cls in (FusedGroupNorm, nn.GroupNorm))
    assert isinstance(ours, nn.GroupNorm)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = image(device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    ours.activation = "silu"
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    ours.reset_parameters()
    assert (ours.weight == 1).all() and (ours.bias == 0).all()


def test_every_argument_of_pytorch(device):
    """Catches one that this torch has, and the module does not pass on."""
    names = list(inspect.signature(nn.GroupNorm).parameters)
    module = FusedGroupNorm(2, 6, 0.5, False, device)
    assert (module.num_groups, module.num_channels, module.eps, module.affine) == (2, 6, 0.5, False)
    assert module.weight is None and module.bias is None
    if "bias" in names:
        module = randomize(FusedGroupNorm(2, 6, bias=False, device=device))
        assert module.bias is None and module.weight is not None
        x = image(device=device)
        assert torch.equal(module(x), fused_group_norm(x, 2, module.weight))


def test_repr():
    theirs = repr(nn.GroupNorm(3, 6))
    assert repr(FusedGroupNorm(3, 6)) == theirs.replace("GroupNorm", "FusedGroupNorm")
    assert repr(FusedGroupNorm(3, 6, activation="silu")).endswith(", activation='silu')")


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
def test_copies(copied):
    """Catches a copy that is another class, shares memory, or lost an option."""
    module = randomize(FusedGroupNorm(3, 6, 0.1, activation="silu"))
    twin, x = copied(module), image()
    expected = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert type(twin) is FusedGroupNorm and repr(twin) == repr(module)
    assert torch.equal(twin(x), expected)


def test_device_and_dtype(device):
    """Catches a parameter that is made elsewhere, or that .to() leaves behind."""
    module = FusedGroupNorm(3, 6, device="meta", dtype=BF16)
    assert all(p.is_meta and p.dtype is BF16 for p in module.parameters())
    assert module(image(BF16, "meta")).is_meta
    module.to_empty(device=device).reset_parameters()
    expected = FusedGroupNorm(3, 6, device=device, dtype=BF16)(image(BF16, device))
    assert torch.equal(module(image(BF16, device)), expected)
    for dtype in (F16, F32, F64):
        module.to(dtype)
        assert module(image(dtype, device)).dtype is dtype


def test_layouts(device):
    x, module = image(device=device), randomize(FusedGroupNorm(3, 6, device=device))
    assert module(x).is_contiguous()
    last = module(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    # A GPU has kernels of their own for channels that are innermost.
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    torch.testing.assert_close(last, module(x), **exact)
    assert module(x[:, :, 0, 0]).shape == (2, 6)


def test_compile_without_graph_break(device):
    """Catches a forward that dynamo cannot trace, or compiles to other values."""
    for affine in (True, False):
        torch._dynamo.reset()
        module = FusedGroupNorm(3, 6, affine=affine, activation="silu", device=device)
        compiled = torch.compile(randomize(module), fullgraph=True, backend="aot_eager")
        x, scale = image(device=device).requires_grad_(), image(device=device, shape=(2, 6))
        found, expected = compiled(x, scale), module(x, scale)
        assert torch.equal(found, expected)
        for ours, theirs in zip(
            *(torch.autograd.grad(y.sum(), [x, *module.parameters()]) for y in (found, expected)),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eps": float("nan")}, ValueError, "FusedGroupNorm: eps must be finite, got nan"),
        ({"eps": None}, TypeError, "FusedGroupNorm: argument 'eps' must be float, not NoneType"),
        ({"activation": 1}, TypeError, "argument 'activation' must be str or None, not int"),
        ({"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
        ({"num_groups": 4}, ValueError, "must be divisible by num_groups"),
        ({"num_groups": 2.0}, TypeError, "argument 'num_groups' must be int, not float"),
        ({"num_groups": 0}, RuntimeError, "Expected num groups to be greater than 0, got 0"),
        ({"num_groups": -2}, RuntimeError, "Expected num groups to be greater than 0, got -2"),
    ],
    ids=str,
)
def test_constructor_refuses_what_forward_would(options, error, message):
    """Catches a module that is built, loaded and moved before its first call says no."""
    with pytest.raises(error, match=message):
        FusedGroupNorm(**({"num_groups": 3, "num_channels": 6} | options))


def test_calls_that_are_refused():
    """Catches an input of other channels, which a module without a weight would just normalise."""
    for affine in (True, False):
        with pytest.raises(RuntimeError, match="FusedGroupNorm: input must have 6 channels"):
            FusedGroupNorm(3, 6, affine=affine)(image(shape=(2, 9, 4, 4)))
    with pytest.raises(RuntimeError, match="input must have at least two dimensions"):
        FusedGroupNorm(3, 6)(torch.ones(6))
    with pytest.raises(TypeError, match="argument 'input' must be Tensor, not list"):
        FusedGroupNorm(3, 6)([1.0])
    with pytest.raises(RuntimeError, match="scale must have shape"):
        FusedGroupNorm(3, 6)(image(), torch.ones(6))
