"""Gradients of parameters that are added to ``main_grad``, the protocol of Megatron-LM."""

import contextlib
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

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


class Stop(torch.autograd.Function):
    """Whatever comes before it gets no gradient, but is called."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_at_all(device):
    module = made(FusedAddLayerNorm, 8, F32, device)
    x = torch.randn(3, 8, device=device, dtype=BF16, requires_grad=True)
    y, total = module(x, torch.randn(3, 8, device=device, requires_grad=True))
    (Stop.apply(y).sum() + Stop.apply(total).sum()).backward()
    assert (module.weight.main_grad == 0.5).all() and (x.grad is None or not x.grad.any())


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


BAD_MAIN_GRADS = {
    "bfloat16": lambda device: torch.zeros(64, dtype=BF16, device=device),
    "float64": lambda device: torch.zeros(64, dtype=torch.float64, device=device),
    "one dimension more": lambda device: torch.zeros(1, 64, device=device),
    "rows": lambda device: torch.zeros(2, 64, device=device),
    "scalar": lambda device: torch.zeros((), device=device),
    "strided": lambda device: torch.zeros(128, device=device)[::2],
    "expanded": lambda device: torch.zeros(1, device=device).expand(64),
    "absent": lambda device: None,
}


@pytest.mark.parametrize("bad", BAD_MAIN_GRADS)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_disabled_refuses_what_the_kernel_refuses(name, bad, device):
    """Catches a switch that hides a mistake, and a refusal after one of two was added to."""
    messages = []
    for disabled in (False, True):
        module = made(FusedLayerNorm, 64, F32, device)
        getattr(module, name).main_grad = BAD_MAIN_GRADS[bad](device)
        with pytest.raises(RuntimeError, match="main_grad") as error:
            with fused_op.disabled() if disabled else contextlib.nullcontext():
                run(module, rows(FusedLayerNorm, (5, 64), F32, device))
        messages.append(str(error.value))
        other = module.bias if name == "weight" else module.weight
        assert (other.main_grad == 0.5).all() and other.grad_added_to_main_grad is False
    assert messages[0] == messages[1]


@pytest.mark.parametrize("disabled", [False, True])
def test_versions(disabled, device):
    """Catches a change that autograd does not see: who saved main_grad for backward must be told,
    and inference tensors do not change outside of inference mode."""
    with fused_op.disabled() if disabled else contextlib.nullcontext():
        module = made(FusedLayerNorm, 64, F32, device)
        factor = torch.ones(64, device=device, requires_grad=True)
        product = (factor * module.weight.main_grad).sum()
        versions = [p.main_grad._version for p in module.parameters()]
        run(module, rows(FusedLayerNorm, (5, 64), F32, device))
        assert [p.main_grad._version for p in module.parameters()] == [v + 1 for v in versions]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.inference_mode():
            module.weight.main_grad = torch.zeros(64, device=device)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            run(module, rows(FusedLayerNorm, (5, 64), F32, device))
        if not disabled:  # PyTorch's own add_ has added before it refuses
            assert not module.weight.main_grad.any()


def create_graph(output, x):
    torch.autograd.grad(output.square().sum(), x, create_graph=True)


def backward_with_graph(output, x):
    output.square().sum().backward(create_graph=True)


def batched(output, x):
    torch.autograd.grad(output, x, torch.ones(3, *output.shape).to(x), is_grads_batched=True)


def forward_mode(output, x):
    with forward_ad.dual_level():
        torch.autograd.grad(output, x, forward_ad.make_dual(torch.ones_like(output), output))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("derivative", [create_graph, backward_with_graph, batched, forward_mode])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("cls", MODULES, ids=lambda c: c.__name__)
def test_gradients_of_gradients_are_refused(cls, disabled, derivative, device):
    """Catches a main_grad that grows a graph with each step, and a part of the gradient that goes
    to .grad instead, where an optimizer of main_grad never looks. Frozen modules have neither."""
    match = "main_grad holds numbers alone"
    if derivative is batched:  # of which PyTorch tells nobody
        match = "vmap: aten::add_" if disabled else "eager calls of plain tensors only"
    module = made(cls, 64, F32, device)
    x = torch.randn(5, 64, device=device, requires_grad=True)

    def output():
        result = module(x, x * 2) if "Add" in cls.__name__ else module(x)
        return result[0] + 2 * result[1] if isinstance(result, tuple) else result

    with fused_op.disabled() if disabled else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match=match):
            derivative(output(), x)
        for parameter in module.parameters():
            assert (parameter.main_grad == 0.5).all() and parameter.grad is None
            assert not parameter.main_grad.requires_grad
        module.requires_grad_(False)
        derivative(output(), x)
        module.requires_grad_(True)
        output().square().sum().backward()
        assert all((p.main_grad != 0.5).any() for p in module.parameters())


@pytest.mark.parametrize("cls", MODULES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "save_on_cpu"])
def test_saved_tensors_that_come_back_without_attributes(cls, how, device):
    """Catches a main_grad that is looked for on what was saved, and not on the parameter."""
    results = []
    for is_replaced in (False, True):
        module = made(cls, 32, F32, device)
        torch.manual_seed(1)
        inputs = rows(cls, (5, 32), F32, device)
        call, context = module, contextlib.nullcontext
        if is_replaced and how == "save_on_cpu":
            context = torch.autograd.graph.save_on_cpu
        elif is_replaced:
            call = partial(checkpoint, module, use_reentrant=how == "reentrant")
        with context():
            run(call, inputs)
        results.append([t.grad for t in inputs] + [p.main_grad for p in module.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
