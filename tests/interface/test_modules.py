"""Each module beside PyTorch's: the same object to everything around it, the same numbers."""

import copy
import inspect
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import fused_op
from fused_op import FusedAddLayerNorm, FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm
from tests.case import make_case
from tests.ops import F32, PAIRS, Op

THEIRS = {
    FusedLayerNorm: nn.LayerNorm,
    FusedRMSNorm: nn.RMSNorm,
    FusedAddLayerNorm: nn.LayerNorm,
    FusedAddRMSNorm: nn.RMSNorm,
}
OF_OP = {
    "fused_layer_norm": FusedLayerNorm,
    "fused_rms_norm": FusedRMSNorm,
    "fused_add_layer_norm": FusedAddLayerNorm,
    "fused_add_rms_norm": FusedAddRMSNorm,
}


@pytest.fixture(params=THEIRS, ids=lambda cls: cls.__name__)
def cls(request):
    return request.param


def inputs(cls, *shape, **options):
    torch.manual_seed(0)
    return [torch.randn(shape, **options) for _ in range(2 if "Add" in cls.__name__ else 1)]


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def randomized(module):
    """Parameters that are not ones and zeros: those hide a parameter that is not used."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def as_function(op: Op, cls: type, shape: tuple[int, ...]) -> Op:
    """The op with its parameters set into a module, so that a Case can call and check it."""

    def fused(*tensors, eps, normalized_shape=None):
        given = dict(zip(op.inputs, tensors, strict=True))
        has_weight = given["weight"] is not None
        options = {"bias": given["bias"] is not None} if op.centred else {}
        options |= {"zero_centered": True} if op.zero_centered else {}
        module = cls(shape, eps, has_weight, **options)
        for name in op.parameters:
            assert (getattr(module, name) is None) == (given[name] is None)
            if given[name] is not None:  # not a Parameter: gradients are to reach the Case's leaves
                delattr(module, name)
                setattr(module, name, given[name])
        return module(*(given[name] for name in op.inputs if name not in op.parameters))

    return replace(op, fused=fused)


def test_values_and_gradients(op, device, pair):
    """Catches an argument that forward swaps, forgets or does not pass on, for any dtypes and for
    parameters that are absent: nothing but normalized_shape then says what is one row."""
    without = [op.parameters, ()] + ([("bias",)] if op.centred else [])
    for absent in without:
        for shape in [(33,), (4, 6)]:
            wrapped = as_function(op, OF_OP[op.name], shape)
            options = {"normalized_shape": shape, "eps": 1e-3}
            case = make_case(wrapped, (5, *shape), pair, device, absent, **options)
            case.check(case.run())


def test_equals_pytorch_in_fp64(cls, device):
    """Catches a module that computes another function than the one whose place it takes."""
    options = {"dtype": torch.float64, "device": device}
    ours, theirs = cls((3, 8), **options), THEIRS[cls]((3, 8), **options)
    theirs.load_state_dict(randomized(ours).state_dict())
    leaves = [t.requires_grad_() for t in inputs(cls, 5, 3, 8, **options)]
    output, *rest = outputs(ours(*leaves))
    expected = theirs(sum(leaves))
    torch.testing.assert_close(output, expected)
    for new_residual in rest:
        torch.testing.assert_close(new_residual, sum(leaves))
    grad = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, [*leaves, *ours.parameters()], grad),
        torch.autograd.grad(expected, [*leaves, *theirs.parameters()], grad),
    )


def test_rms_default_eps(device):
    """Catches an eps of None that is lost, or taken from the dtype of a 16-bit input."""
    x = torch.full((2, 8), 1e-4, device=device)
    output = FusedRMSNorm(8, device=device)(x.half())
    square = x.half().double().square()
    expected = x.half().double() / (square + torch.finfo(F32).eps).sqrt()
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=0)


def test_constructor_is_pytorchs(cls):
    """Catches an argument in another place or with another default, and other initial values; an
    argument that PyTorch's have not and that is not by keyword, or shows in repr unasked."""
    theirs = THEIRS[cls]
    assert issubclass(cls, theirs)
    parameters = [inspect.signature(c).parameters.values() for c in (cls, theirs)]
    ours, expected = ([(p.name, p.kind, p.default) for p in given] for given in parameters)
    assert ours[: len(expected)] == expected
    extras = ours[len(expected) :]
    assert {kind for _, kind, _ in extras} == {inspect.Parameter.KEYWORD_ONLY}
    only = "residual_dtype" if "Add" in cls.__name__ else "memory_efficient"
    names = {"zero_centered", "rounding", "dropout_p", "out_dtype", "fuse_wgrad_accumulation", only}
    assert {name for name, _, _ in extras} == names
    assert not any(default for name, _, default in extras if name != "rounding")
    ours = cls((2, 5), 0.5, dtype=torch.float64)
    like = theirs((2, 5), 0.5, dtype=torch.float64)
    assert repr(ours) == repr(like).replace(theirs.__name__, cls.__name__)
    assert list(ours.state_dict()) == list(like.state_dict())
    for name, value in like.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    randomized(ours).reset_parameters()
    for name, value in like.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    assert not list(cls(5, elementwise_affine=False).parameters())


def test_zero_centered_weight(cls):
    """Catches a weight that is not initialised to 0, which then doubles what it should leave alone,
    a bias that is not zero, and an argument that repr, reset_parameters or a copy forgets."""
    plain, module = cls((2, 3), dtype=torch.float64), cls((2, 3), zero_centered=True).double()
    args = inputs(cls, 4, 2, 3, dtype=torch.float64)
    for made in (module, pickle.loads(pickle.dumps(randomized(module)))):
        assert repr(made) == repr(plain)[:-1] + ", zero_centered=True)"
        made.reset_parameters()
        assert not any(p.any() for p in made.parameters())
        torch.testing.assert_close(made(*args), plain(*args), rtol=0, atol=0)
        made.load_state_dict({k: torch.full_like(v, 2) for k, v in plain.state_dict().items()})
        with torch.no_grad():
            plain_with_3 = copy.deepcopy(plain)
            plain_with_3.weight.fill_(3)
            for bias in [p for name, p in plain_with_3.named_parameters() if name == "bias"]:
                bias.fill_(2)
        torch.testing.assert_close(made(*args), plain_with_3(*args), rtol=0, atol=0)
    assert not list(cls(5, elementwise_affine=False, zero_centered=True).parameters())


def test_checkpoints_go_both_ways(cls):
    """Catches a parameter under another name, or a further entry that a strict load refuses."""
    ours, theirs = randomized(cls(6)), THEIRS[cls](6)
    theirs.load_state_dict(ours.state_dict())
    again = cls(6)
    again.load_state_dict(theirs.state_dict())
    args = inputs(cls, 4, 6)
    torch.testing.assert_close(again(*args), ours(*args), rtol=0, atol=0)


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
    """Catches a copy that is another class, shares memory, or lost eps, shape or parameters."""
    module = randomized(cls((2, 3), 0.1))
    twin = copied(module)
    args = inputs(cls, 4, 2, 3)
    expected = module(*args)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert type(twin) is cls and repr(twin) == repr(module)
    torch.testing.assert_close(twin(*args), expected, rtol=0, atol=0)


def test_meta_device(cls, device):
    """Catches a module that computes at construction, where there is no memory yet."""
    module = cls(6, device="meta")
    for output in outputs(module(*inputs(cls, 4, 6, device="meta"))):
        assert output.device.type == "meta" and output.shape == (4, 6)
    module.to_empty(device=device).reset_parameters()
    args = inputs(cls, 4, 6, device=device)
    expected = THEIRS[cls](6, device=device)(sum(args))
    torch.testing.assert_close(outputs(module(*args))[0], expected)


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.rows is p.params], ids=str)
def test_moves_to_a_dtype(cls, device, pair):
    """Catches a parameter that .to(), .half() or .double() leaves behind."""
    moves = [lambda module: module.to(pair.params)]
    by_name = {torch.float16: "half", torch.float64: "double", torch.bfloat16: "bfloat16"}
    if pair.params in by_name:
        moves.append(lambda module: getattr(module, by_name[pair.params])())
    for move in moves:
        module = move(randomized(cls(6, device=device)))
        args = inputs(cls, 4, 6, dtype=pair.rows, device=device)
        assert all(parameter.dtype is pair.params for parameter in module.parameters())
        params = [p.detach() for p in module.parameters()]
        name = next(name for name, its in OF_OP.items() if its is cls)
        eps = module.eps
        expected = getattr(fused_op, name)(*args, *params, eps=eps)
        torch.testing.assert_close(module(*args), expected, rtol=0, atol=0)
        assert all(output.dtype is pair.rows for output in outputs(module(*args)))


def test_keyword_names(cls):
    """Catches a forward whose arguments cannot be given by the names that PyTorch's have."""
    args = inputs(cls, 4, 6)
    names = list(inspect.signature(THEIRS[cls].forward).parameters)[1:]
    names = ["input", "residual"] if len(args) == 2 else names
    module = cls(6)
    by_name = module(**dict(zip(names, args, strict=True)))
    torch.testing.assert_close(by_name, module(*args), rtol=0, atol=0)


def test_compile_without_graph_break(cls, device):
    """Catches a forward that dynamo cannot trace, or compiles to other values."""
    torch._dynamo.reset()
    module = randomized(cls((2, 3), device=device))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    args = inputs(cls, 4, 2, 3, device=device)
    torch.testing.assert_close(compiled(*args), module(*args), rtol=0, atol=0)


def test_errors(cls):
    """Catches a module that takes a wrong input for another number of rows, or blames another."""
    module = cls((3, 8), elementwise_affine=False)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[3, 8\], expected input with"):
        module(*inputs(cls, 4, 8, 3))
    with pytest.raises(RuntimeError, match="mixed dtype: expect parameter to have scalar type of"):
        cls(8).to(torch.cfloat)(*inputs(cls, 4, 8))
    if "Add" in cls.__name__:
        x = torch.randn(4, 8)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'residual'"):
            cls(8)(x)
        with pytest.raises(RuntimeError, match=r"residual must have the shape of input, \[4, 8\]"):
            cls(8)(x, x[0])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": -1}, ValueError, "dropout probability has to be between 0 and 1, but got"),
        ({"dropout_p": 1.5}, ValueError, "dropout probability has to be between 0 and 1, but got"),
        ({"dropout_p": NAN}, ValueError, "dropout probability has to be between 0 and 1, but got"),
        ({"dropout_p": "p"}, TypeError, "argument 'dropout_p' must be float, not str"),
        ({"eps": NAN}, ValueError, "eps must be finite, got nan"),
        ({"eps": INF}, ValueError, "eps must be finite, got inf"),
        ({"eps": "1e-5"}, TypeError, "argument 'eps' must be float, not str"),
        ({"zero_centered": 1}, TypeError, "argument 'zero_centered' must be bool, not int"),
        ({"rounding": None}, TypeError, "argument 'rounding' must be str, not NoneType"),
        ({"rounding": "never"}, ValueError, "must be 'once' or 'before_weight', got 'never'"),
        ({"fuse_wgrad_accumulation": None}, TypeError, "must be bool, not NoneType"),
        ({"out_dtype": torch.int8}, RuntimeError, "out_dtype must be float16, bfloat16, float32"),
        ({"out_dtype": "float"}, TypeError, "argument 'out_dtype' must be torch.dtype, not str"),
    ],
    ids=str,
)
def test_constructor_refuses_what_forward_would(cls, options, error, message):
    """Catches a model that is built, loaded and moved before its first call says no."""
    with pytest.raises(error, match=f"{cls.__name__}: .*{message}"):
        cls(8, **options)


def test_constructor_refuses_options_of_one_kind():
    with pytest.raises(TypeError, match="FusedLayerNorm: argument 'eps' must be float"):
        FusedLayerNorm(8, eps=None)
    with pytest.raises(ValueError, match="FusedRMSNorm: memory_efficient=True keeps the output"):
        FusedRMSNorm(8, memory_efficient=True, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="FusedAddRMSNorm: residual_dtype must be float16, bf"):
        FusedAddRMSNorm(8, residual_dtype=torch.int64)


def test_training_matters_with_dropout_alone(cls):
    """Catches a guard that has torch.compile compile again where eval() changes nothing."""
    for dropout_p, expected in ((0.0, 1), (0.5, 2)):
        torch._dynamo.reset()
        count = torch._dynamo.testing.CompileCounter()
        module = cls(8, dropout_p=dropout_p)
        compiled = torch.compile(module, backend=count)
        for training in (True, False, True):
            module.train(training)
            compiled(*inputs(cls, 4, 8))
        assert count.frame_count == expected


# What a module means must not be lost where PyTorch reads its parameters past forward


def encoder_layer(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, **options)
    return randomized(layer).eval().requires_grad_(False)


@pytest.mark.parametrize("replaced", [("norm1",), ("norm2",), ("norm1", "norm2")])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_transformer_layer_calls_a_zero_centered_norm(replaced, norm_first, mode, device):
    """Its fast path multiplies by the weight as it is: off by 2.6."""
    plain = encoder_layer(norm_first=norm_first).to(device)
    layer = copy.deepcopy(plain)
    for name in replaced:
        norm = FusedLayerNorm(16, zero_centered=True, device=device)
        theirs = getattr(plain, name)
        norm.load_state_dict({"weight": theirs.weight - 1, "bias": theirs.bias})
        setattr(layer, name, norm.eval())
    x = torch.randn(2, 5, 16, device=device)
    with mode():
        expected = plain(x)
        for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-4)


def test_transformer_layer_calls_a_norm_with_an_out_dtype():
    layer = encoder_layer()
    layer.norm2 = FusedLayerNorm(16, out_dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert layer(torch.randn(2, 5, 16)).dtype is torch.bfloat16


def test_transformer_layer_keeps_its_fast_path_with_other_norms(monkeypatch):
    """Catches a price for modules that mean what PyTorch's mean."""
    layer = encoder_layer()
    layer.norm1 = FusedLayerNorm(16, dropout_p=0.5, memory_efficient=False).eval()
    fused_op.convert(layer.norm2)
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(args), fast(*args))[1]
    )
    with torch.no_grad():
        layer(torch.randn(2, 5, 16))
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*prototype:UserWarning")
def test_transformer_encoder_refuses_nested_rows_of_a_zero_centered_norm():
    """It makes nested tensors of padded ones before it asks a layer; never a wrong number."""
    layer = encoder_layer()
    layer.norm1 = FusedLayerNorm(16, zero_centered=True)
    encoder = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), pytest.raises(RuntimeError, match="input must be a dense"):
        encoder(x, src_key_padding_mask=padding)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    encoder.requires_grad_(False)
    with torch.no_grad():
        padded = encoder(x, src_key_padding_mask=padding)
    alone = encoder(x[1:, :3].clone().requires_grad_())
    torch.testing.assert_close(padded[1:, :3], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_leaves_the_norms_alone():
    """torch.ao.quantization puts a module of its own, of the raw weight, in the place of PyTorch's
    LayerNorm."""
    from torch.ao import quantization

    norm = randomized(FusedLayerNorm(16, zero_centered=True))
    model = nn.Sequential(nn.Linear(16, 16), norm).eval()
    model.qconfig = quantization.get_default_qconfig()
    prepared = quantization.prepare(model)
    prepared(torch.randn(4, 16))
    changed = quantization.convert(prepared)
    assert type(changed[1]) is FusedLayerNorm and changed[1].zero_centered
