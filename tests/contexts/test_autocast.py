"""Autocast: results in the dtype of the input, float32 inside, float32 parameters where they are.

PyTorch's CUDA autocast turns layer_norm and rms_norm into float32 operations: a 16-bit input is
copied to float32, and the output is float32. Here both stay as they are, under either autocast.
test_routing.py has the dtypes that do not fit together.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

import fused_op
from tests.calls import arguments, assert_same, binding_arguments, loss, outputs
from tests.ops import BF16, F16, F32, F64


def mixed(op, pair, device, requires_grad=False):
    """The arguments of an op: rows in one dtype, parameters in another."""
    args = [t.to(pair.params if t.dim() == 1 else pair.rows) for t in arguments(op, device=device)]
    return [t.requires_grad_(requires_grad) for t in args]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_dtypes_and_gradients_are_those_without_autocast(op, pair, device, dtype):
    """Catches a cast to the dtype of autocast, or to float32: other dtypes, other bits."""
    args = mixed(op, pair, device, requires_grad=True)
    expected = op.fused(*args)
    with torch.autocast(device, dtype):
        result = op.fused(*args)
    assert all(output.dtype is pair.rows for output in outputs(result))
    assert_same(result, expected, rtol=0, atol=0)
    wanted = torch.autograd.grad(loss(expected), args)
    assert_same(torch.autograd.grad(loss(result), args), wanted, rtol=0, atol=0)


def test_nothing_is_copied(op, pair, device):
    """Catches a float32 copy of a parameter or of the rows, made to fit the other dtype."""
    args = mixed(op, pair, device)
    with torch.autocast(device, BF16), profile() as trace:
        op.fused(*args)
    names = [event.name for event in trace.events()]
    assert "fused_op::norm_forward" in names  # else the trace is blind
    if not op.zero_centered:  # which adds 1, in operations of PyTorch
        assert not [name for name in names if name.startswith("aten::")]


def test_backward_saves_what_was_given(op, pair, device):
    """Catches a copy of the rows or the weight kept for backward, and 16-bit statistics."""
    args = mixed(op, pair, device, requires_grad=True)
    saved = []
    hooks = saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t)
    with torch.autocast(device, BF16), hooks:
        result = outputs(op.fused(*args))
    x, weight, stats = saved
    named = dict(zip(op.inputs, args, strict=True))
    assert x.data_ptr() == (result[1] if op.adds else named["input"]).data_ptr()
    assert weight.data_ptr() == named["weight"].data_ptr()
    assert stats.dtype is (F64 if pair.rows is F64 else F32)


def test_nested_and_disabled_regions(device):
    """Catches a rule that looks at the outer region, or stays on where autocast is off."""
    x, weight = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    with torch.autocast(device, BF16):
        with torch.autocast(device, F16):
            assert fused_op.fused_layer_norm(x.bfloat16(), weight).dtype is BF16
            assert fused_op.fused_layer_norm(x, weight.half()).dtype is F32
        with torch.autocast(device, enabled=False):
            assert fused_op.fused_layer_norm(x, weight).dtype is F32
            with pytest.raises(RuntimeError, match="residual must have the dtype of input"):
                fused_op.fused_add_layer_norm(x, x.half())
        assert fused_op.fused_add_layer_norm(x, x.half())[0].dtype is F32


class Block(nn.Module):
    """A residual stream between matrices, as in a transformer; `fused` or of PyTorch's norms."""

    def __init__(self, fused: bool):
        super().__init__()
        self.fused = fused
        kind = fused_op if fused else nn
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.first = kind.FusedLayerNorm(16) if fused else kind.LayerNorm(16)
        self.last = kind.FusedAddRMSNorm(16) if fused else kind.RMSNorm(16)

    def forward(self, x):
        x = self.inner(x)
        branch = self.outer(self.first(x))
        if self.fused:
            return self.last(branch, x)[0]
        return self.last(branch + x)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_model_trains_as_with_the_norms_of_pytorch(device, dtype):
    """Catches a norm that breaks the chain of dtypes, or whose gradients do not reach float32
    leaves."""
    torch.manual_seed(0)
    ours, theirs = Block(fused=True).to(device), Block(fused=False).to(device)
    theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(2, 32, 16, device=device)
    grads = []
    for model in (ours, theirs):
        with torch.autocast(device, dtype):
            output = model(x)
        assert model is theirs or output.dtype is dtype
        grads.append(torch.autograd.grad((output * target).sum(), [*model.parameters()]))
    for a, b in zip(*grads, strict=True):
        assert a.dtype is F32
        # Of sums of rounded terms: an element errs like the largest of its tensor.
        assert (a - b).abs().max() <= 16 * torch.finfo(dtype).eps * b.abs().max()


def test_gradients_scale_exactly(op, device):
    """Catches a backward that is not linear in what arrives: a scaler multiplies and divides it
    by a power of 2, which rounds nothing."""
    args = arguments(op, requires_grad=True, device=device)
    grads = torch.autograd.grad(loss(op.fused(*args)), args)
    scaled = torch.autograd.grad(loss(op.fused(*args)) * 2.0**12, args)
    assert_same(tuple(g / 2.0**12 for g in scaled), grads, rtol=0, atol=0)


def test_overflow_reaches_every_gradient(op, device):
    """Catches a backward that hides an infinity from the scaler, which looks at all gradients."""
    args = arguments(op, requires_grad=True, device=device)
    output = outputs(op.fused(*args))[0]
    grad = torch.ones_like(output)
    grad[0, 0, 0] = float("inf")
    for found in torch.autograd.grad(output, args, grad):
        assert not found.isfinite().all()


def test_scaler_steps_and_skips(device):
    """Catches gradients that a scaler cannot unscale, check, or step with."""
    torch.manual_seed(0)
    model = Block(fused=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    x, target = torch.randn(2, 32, 16, device=device)

    def step(factor):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(device, F16):
            result = (model(x) * target).sum() * factor
        scaler.scale(result).backward()
        scaler.step(optimizer)
        scaler.update()
        return [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]

    assert all(step(1.0)) and scaler.get_scale() == 2.0**10
    assert not any(step(1e30)) and scaler.get_scale() == 2.0**9  # beyond float16: inf
    assert all(step(1.0)) and scaler.get_scale() == 2.0**9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPU autocast keeps the dtype too")
def test_difference_from_cuda_autocast_of_pytorch():
    """Catches documentation that has become wrong: docs/contexts.md says what PyTorch does."""
    x = torch.randn(4, 6, dtype=BF16, device="cuda")
    with torch.autocast("cuda", BF16):
        ours, theirs = fused_op.layer_norm(x, (6,)), F.layer_norm(x, (6,))
    assert ours.dtype is BF16 and theirs.dtype is F32
    torch.testing.assert_close(ours, theirs.bfloat16())


def test_binding_takes_the_tensors_themselves(op, device):
    """Catches a detour by Python before a call that needs none: the binding answers at once."""
    import fused_op_cuda

    with torch.autocast(device, BF16):
        args = binding_arguments(op, [t.bfloat16() for t in arguments(op, device=device)])
        assert type(fused_op_cuda.norm(*args)) is not fused_op_cuda.Route
