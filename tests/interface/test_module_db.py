"""What PyTorch's own tests ask of every module, of our classes in the place of PyTorch's.

The samples are those of ``module_db``, which PyTorch's ``test/test_modules.py`` walks through; the
questions are that file's. Catches a constructor, a mode, a layout, a copy or a kind of derivative
that PyTorch's tests think of and ours do not. The samples change with the version of PyTorch.
"""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import fused_op
from fused_op import convert
from tests.ops import DEVICES, F32, F64

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
from torch.testing._internal.common_modules import module_db

INFOS = {
    info.module_cls: info for info in module_db if info.module_cls in (nn.LayerNorm, nn.RMSNorm)
}
OURS = {nn.LayerNorm: fused_op.FusedLayerNorm, nn.RMSNorm: fused_op.FusedRMSNorm}


def converted(cls):
    def make(*args, **kwargs):
        module = cls(*args, **kwargs)
        assert convert(module).converted
        return module

    return make


@pytest.fixture(params=INFOS, ids=lambda cls: cls.__name__)
def theirs(request):
    return request.param


@pytest.fixture(params=["built", "converted"])
def ours(request, theirs):
    return OURS[theirs] if request.param == "built" else converted(theirs)


def samples(theirs, device="cpu", dtype=F32, requires_grad=False, training=True):
    """(constructor's arguments, forward's, the reference function or None) of each sample."""
    info = INFOS[theirs]
    options = {"device": device, "dtype": dtype, "requires_grad": requires_grad}
    found = [
        (
            (s.constructor_input.args, {**s.constructor_input.kwargs}),
            (s.forward_input.args, s.forward_input.kwargs),
            s.reference_fn,
        )
        for s in info.module_inputs_func(info, training=training, **options)
        if s.forward_input is not None
    ]
    assert found
    return found


def made(cls, constructor, device="cpu", dtype=F32):
    args, kwargs = constructor
    torch.manual_seed(0)
    module = cls(*args, **kwargs, device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_forward(theirs, ours, device, dtype, training):
    for constructor, (args, kwargs), reference in samples(theirs, device, dtype, training=training):
        module = made(ours, constructor, device, dtype).train(training)
        expected = made(theirs, constructor, device, dtype).train(training)(*args, **kwargs)
        torch.testing.assert_close(module(*args, **kwargs), expected)
        if reference is not None and dtype is F32:  # in which it computes
            truth = reference(module, *args, **kwargs)
            torch.testing.assert_close(module(*args, **kwargs), truth)


def test_training_and_eval_agree(theirs, ours, device):
    for constructor, (args, kwargs), _ in samples(theirs, device):
        module = made(ours, constructor, device)
        in_training, in_eval = module(*args, **kwargs), module.eval()(*args, **kwargs)
        torch.testing.assert_close(in_training, in_eval, rtol=0, atol=0)


def test_factory_arguments(theirs, ours, device):
    for constructor, _, _ in samples(theirs, device):
        args, kwargs = constructor
        for dtype in (F32, F64):
            module = ours(*args, **kwargs, device=device, dtype=dtype)
            for tensor in (*module.parameters(), *module.buffers()):
                assert tensor.dtype is dtype and tensor.device.type == device
    accepted = inspect.signature(OURS[theirs]).parameters
    assert {"device", "dtype"} <= accepted.keys()


def test_device_context(theirs):
    """Parameters are made where the context says."""
    for (args, kwargs), _, _ in samples(theirs):
        with torch.device("meta"):
            module = OURS[theirs](*args, **kwargs)
        assert all(p.is_meta for p in module.parameters())
        empty = module.to_empty(device="cpu")
        assert empty is module and not any(p.is_meta for p in module.parameters())
        module.reset_parameters()
        fresh = theirs(*args, **kwargs).state_dict()
        assert all(torch.equal(v, fresh[k]) for k, v in module.state_dict().items())


def test_repr_copies_and_pickles(theirs, ours, device):
    for constructor, (args, kwargs), _ in samples(theirs, device):
        module = made(ours, constructor, device)
        assert repr(module) == repr(made(theirs, constructor)).replace(
            theirs.__name__, type(module).__name__
        )
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        expected = module(*args, **kwargs)
        for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
            assert type(clone) is type(module)
            torch.testing.assert_close(clone(*args, **kwargs), expected, rtol=0, atol=0)


def test_state_dicts_are_exchanged(theirs, ours, device):
    for constructor, (args, kwargs), _ in samples(theirs, device):
        module, plain = made(ours, constructor, device), made(theirs, constructor, device)
        fresh = theirs(*constructor[0], **constructor[1], device=device)
        assert fresh.load_state_dict(module.state_dict()).missing_keys == []
        assert module.load_state_dict(plain.state_dict()).unexpected_keys == []
        torch.testing.assert_close(fresh(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("set_grad", [False, True])
def test_to(theirs, ours, device, swap, set_grad):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for constructor, (args, kwargs), _ in samples(theirs, device):
            module = made(ours, constructor, device)
            names = [id(p) for p in module.parameters()]
            if set_grad:
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
            module.to(F64)
            assert all(p.dtype is F64 for p in module.parameters())
            assert not set_grad or all(p.grad.dtype is F64 for p in module.parameters())
            if swap:
                assert [id(p) for p in module.parameters()] == names
            wide = [a.double() if isinstance(a, Tensor) else a for a in args]
            expected = made(theirs, constructor, device).to(F64)(*wide, **kwargs)
            torch.testing.assert_close(module(*wide, **kwargs), expected)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def strided(tensor: Tensor) -> Tensor:
    """The same values, at strides of two."""
    if tensor.dim() == 0:
        return tensor
    wide = torch.stack([tensor, tensor], -1).detach()
    return wide[..., 0].requires_grad_(tensor.requires_grad)


def test_strided_inputs_and_gradients(theirs, ours, device):
    for constructor, (args, kwargs), _ in samples(theirs, device, requires_grad=True):
        module = made(ours, constructor, device)
        results = []
        for change in (lambda t: t, strided):
            leaves = [change(a) if isinstance(a, Tensor) else a for a in args]
            y = module(*leaves, **kwargs)
            torch.manual_seed(1)
            dy = change(torch.randn_like(y).detach())
            wanted = [t for t in (*leaves, *module.parameters()) if isinstance(t, Tensor)]
            results.append((y, *torch.autograd.grad(y, wanted, dy)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("training", [True, False])
def test_gradients(theirs, ours, device, check, training):
    for constructor, (args, kwargs), _ in samples(theirs, device, F64, True, training):
        module = made(ours, constructor, device, F64).train(training)
        named = dict(module.named_parameters())

        def function(*tensors, module=module, names=tuple(named), kwargs=kwargs):
            state = dict(zip(names, tensors, strict=False))
            return torch.func.functional_call(module, state, tensors[len(names) :], kwargs)

        if args[0].numel() > 0:
            assert check(function, (*named.values(), *args), fast_mode=True)


def test_memory_formats(theirs, ours, device):
    for constructor, (args, kwargs), _ in samples(theirs, device):
        module = made(ours, constructor, device)
        for memory_format, dim in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if args[0].dim() == dim:
                x = args[0].to(memory_format=memory_format)
                torch.testing.assert_close(module(x, **kwargs), module(args[0], **kwargs))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_cpu_and_gpu_agree_and_devices_are_changed(theirs, ours):
    for constructor, (args, kwargs), _ in samples(theirs, requires_grad=True):
        module = made(ours, constructor)
        on_cpu = module(*args, **kwargs)
        moved = [a.cuda() if isinstance(a, Tensor) else a for a in args]
        torch.testing.assert_close(module.cuda()(*moved, **kwargs).cpu(), on_cpu)
        torch.testing.assert_close(module.cpu()(*args, **kwargs), on_cpu, rtol=0, atol=0)
