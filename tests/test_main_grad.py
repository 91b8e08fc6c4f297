"""Gradients of parameters that are added to ``main_grad``, the protocol of Megatron-LM."""

import pytest
import torch

import fused_op
from fused_op import FusedAddLayerNorm, FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm
from tests.ops import BF16, F16, F32

MODULES = [FusedLayerNorm, FusedRMSNorm, FusedAddLayerNorm, FusedAddRMSNorm]


def made(cls, cols, dtype, device, flag=True, **options):
    torch.manual_seed(0)
    module = cls(cols, device=device, dtype=dtype, fuse_wgrad_accumulation=True, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
        parameter.main_grad = torch.full(parameter.shape, 0.5, device=device)
        if flag:
            parameter.grad_added_to_main_grad = False
    return module


def rows(cls, shape, dtype, device):
    return [
        torch.randn(shape, device=device).to(dtype).requires_grad_()
        for _ in range(2 if "Add" in cls.__name__ else 1)
    ]


def run(module, inputs):
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((o.float() * (i + 1)).square().sum() for i, o in enumerate(outputs)).backward()


@pytest.mark.parametrize("cls", MODULES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (4, 3, 96), (700, 256), (3, 9000), (0, 8)])
def test_gradients_are_added(cls, dtype, device, shape):
    """Catches a gradient that overwrites, is rounded to 16 bits before it is added, or is added by
    one of the kernels only; and a gradient of rows that changes with it."""
    module = made(cls, shape[-1], dtype, device)
    torch.manual_seed(1)
    inputs = rows(cls, shape, dtype, device)
    for _ in range(2):
        run(module, inputs)

    # The truth: float32 parameters of the same values have a gradient that nobody rounds.
    other = cls(shape[-1], device=device, dtype=F32)
    other.load_state_dict(module.state_dict())
    torch.manual_seed(1)
    others = rows(cls, shape, dtype, device)
    for _ in range(2):
        run(other, others)
    for ours, theirs in zip(inputs, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, parameter), like in zip(module.named_parameters(), other.parameters(), strict=True):
        assert parameter.grad_added_to_main_grad is True, name
        torch.testing.assert_close(parameter.main_grad, like.grad + 0.5)


def test_bits_are_repeatable(device):
    results = []
    for _ in range(3):
        module = made(FusedLayerNorm, 256, BF16, device)
        torch.manual_seed(1)
        run(module, rows(FusedLayerNorm, (700, 256), BF16, device))
        results.append([p.main_grad for p in module.parameters()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_autograd_gets_a_dummy(device):
    """Hooks that reduce main_grad fire on the parameter's own gradient."""
    module = made(FusedLayerNorm, 64, BF16, device)
    seen = []
    for parameter in module.parameters():
        parameter.zero_out_wgrad = True
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    run(module, rows(FusedLayerNorm, (5, 64), BF16, device))
    assert seen == [(64,), (64,)]
    for parameter in module.parameters():
        assert parameter.grad.dtype is BF16 and not parameter.grad.any()
    without = made(FusedLayerNorm, 64, BF16, device, flag=False)
    run(without, rows(FusedLayerNorm, (5, 64), BF16, device))
    assert all(p.grad is None for p in without.parameters())
    assert all((p.main_grad != 0.5).any() for p in without.parameters())


def test_frozen_parameters_are_left_alone(device):
    module = made(FusedLayerNorm, 64, F32, device)
    module.bias.requires_grad_(False)
    run(module, rows(FusedLayerNorm, (5, 64), F32, device))
    assert (module.weight.main_grad != 0.5).all() and (module.bias.main_grad == 0.5).all()
    assert module.bias.grad_added_to_main_grad is False
    for dtype in (F32, BF16, torch.float64):
        frozen = made(FusedLayerNorm, 64, dtype, device).requires_grad_(False)
        (x,) = rows(FusedLayerNorm, (5, 64), dtype, device)
        run(frozen, [x])
        assert x.grad.any() and all((p.main_grad == 0.5).all() for p in frozen.parameters())


def test_dropout_and_zero_centered(device):
    module = made(FusedAddLayerNorm, 64, BF16, device, dropout_p=0.5, zero_centered=True)
    run(module, rows(FusedAddLayerNorm, (50, 64), BF16, device))
    assert all((p.main_grad != 0.5).any() for p in module.parameters())


def test_without_the_kernels(device):
    """disabled() adds the same sums by PyTorch's operations."""
    results = []
    for disabled in (False, True):
        module = made(FusedRMSNorm, 64, F32, device)
        torch.manual_seed(1)
        inputs = rows(FusedRMSNorm, (5, 64), F32, device)
        if disabled:
            with fused_op.disabled():
                run(module, inputs)
        else:
            run(module, inputs)
        results.append((module.weight.main_grad, inputs[0].grad))
    torch.testing.assert_close(*results)


def test_compiled_code_does_not_forget_it(device):
    """Catches a compiled backward that adds nothing: a whole graph is refused, and without
    ``fullgraph`` the norm runs eagerly."""
    results = []
    for options in (None, {}, {"fullgraph": True}):
        module = made(FusedRMSNorm, 64, F32, device)
        torch._dynamo.reset()
        called = module
        if options is not None:
            called = torch.compile(module, backend="aot_eager", **options)
        torch.manual_seed(1)
        inputs = rows(FusedRMSNorm, (5, 64), F32, device)
        if options == {"fullgraph": True}:
            # PyTorch 2.7 says only that it observed an exception.
            with pytest.raises(RuntimeError, match=r"main_grad is not added to|ExceptionVar"):
                run(called, inputs)
        else:
            run(called, inputs)
            results.append((module.weight.main_grad, inputs[0].grad))
    torch.testing.assert_close(*results)


def test_errors(device):
    module = FusedLayerNorm(64, device=device, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match="a parameter needs the attribute main_grad"):
        run(module, rows(FusedLayerNorm, (5, 64), F32, device))
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(64, device=device, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"main_grad must be a contiguous Float tensor of sh"):
        run(module, rows(FusedLayerNorm, (5, 64), F32, device))
    double = made(FusedLayerNorm, 64, torch.float64, device)
    with pytest.raises(RuntimeError, match="main_grad is a Float tensor, and x must not be Double"):
        run(double, rows(FusedLayerNorm, (5, 64), torch.float64, device))
    module.weight.main_grad = torch.zeros(63, device=device)
    with pytest.raises(RuntimeError, match=r"main_grad must be .* of shape \[64\] on"):
        run(module, rows(FusedLayerNorm, (5, 64), F32, device))
