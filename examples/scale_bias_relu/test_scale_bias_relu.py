"""python -m pytest -q, in this folder, after python setup.py build_ext --inplace."""

import pytest
import torch
from torch import nn

# isort: split
import scale_bias_relu_ext
from scale_bias_relu import FusedOpLayer, custom_relu, fused_op_forward, reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# A vector load is 16 bytes: widths that are no multiple of it, one column, more rows than a CTA's.
SHAPES = [(), (5,), (1, 1), (7, 33), (2, 3, 64), (300, 24), (3, 1000), (0, 8), (8, 0)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = shape[-1] if shape else 1
    tensors = (torch.randn(s, generator=generator) for s in (shape, (features,), shape))
    return [t.to(device, dtype) for t in tensors]  # input, bias, grad_output


def close(actual, expected, dtype, count=1):
    """Off by a rounding to dtype, and by those of a float sum of `count` terms."""
    eps = torch.finfo(dtype).eps + count * torch.finfo(torch.float32).eps
    eps = torch.finfo(dtype).eps * (4 + count) if dtype == torch.float64 else eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_forward_and_gradients(device, dtype, shape, has_bias):
    """Against the reference in float64: catches a wrong formula, index or rounding."""
    input, bias, grad_output = make(shape, dtype, device)
    bias = bias if has_bias else None
    leaves = [t.requires_grad_() for t in (input, bias) if t is not None]
    output = fused_op_forward(input, bias, 0.5)
    assert output.dtype == dtype and output.shape == input.shape
    grads = torch.autograd.grad(output, leaves, grad_output)

    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = reference(doubles[0], doubles[1] if has_bias else None, 0.5)
    close(output, expected.view(shape), dtype)
    # The mask of the rounded output, which backward sees: a value next to 0 may be rounded to it.
    masked = torch.where(output > 0, grad_output, 0).double()
    close(grads[0], masked * 0.5, dtype)
    if has_bias:
        rows = masked.reshape(-1, bias.numel()) if bias.numel() else masked.new_zeros(1, 0)
        close(grads[1], rows.sum(0), dtype, count=len(rows))


def test_gradcheck(device):
    input, bias, _ = (t.requires_grad_() for t in make((4, 6), torch.float64, device))
    assert torch.autograd.gradcheck(fused_op_forward, (input, bias, 1.5))
    assert torch.autograd.gradgradcheck(fused_op_forward, (input, bias, 1.5))


def test_only_wanted_gradients(device):
    input, bias, _ = make((4, 6), torch.float32, device)
    fused_op_forward(input, bias.requires_grad_(), 2.0).sum().backward()
    assert bias.grad is not None and input.grad is None
    fused_op_forward(input.requires_grad_(), None, 2.0).sum().backward()
    assert input.grad is not None


@pytest.mark.parametrize("cols", [10, 256, 4096])
def test_bitwise_repeatable(device, cols):
    """Catches a sum whose order varies. The threads of the CPU are no part of the order either."""
    grad_output = make((2000, cols), torch.float32, device)[2]
    output = torch.ones_like(grad_output)
    threads = torch.get_num_threads()
    first = scale_bias_relu_ext.backward(grad_output, output, 1.0, False, True)[1]
    torch.set_num_threads(1)
    second = scale_bias_relu_ext.backward(grad_output, output, 1.0, False, True)[1]
    torch.set_num_threads(threads)
    assert torch.equal(first, second)
    close(first, grad_output.double().sum(0), torch.float32, count=100)


def test_keyword_arguments_and_views(device):
    input, bias, _ = make((8, 24), torch.float32, device)
    expected = fused_op_forward(input, bias, 2.0)
    assert torch.equal(fused_op_forward(input=input, bias=bias, scale=2.0), expected)
    assert torch.equal(fused_op_forward(input.t().contiguous().t(), bias, 2.0), expected)
    assert torch.equal(fused_op_forward(torch._neg_view(-input), bias, 2.0), expected)
    shifted = torch.empty(8 * 24 + 1, device=device)[1:].view(8, 24).copy_(input)
    assert torch.equal(fused_op_forward(shifted, bias, 2.0), expected)


def test_special_values(device):
    """NaN stays NaN, as in torch.relu, and infinities go their ways."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1.0], device=device)
    assert torch.equal(custom_relu(x).nan_to_num(7.0), torch.relu(x).nan_to_num(7.0))


def test_layer_trains_under_autocast(device):
    layer = nn.Sequential(nn.Linear(8, 16), FusedOpLayer(16, scale=2.0)).to(device)
    assert "features=16, scale=2.0" in repr(layer)
    with torch.autocast(device, torch.bfloat16):
        output = layer(torch.randn(4, 8, device=device))
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert layer[1].bias.grad.dtype == torch.float32


def test_other_stream(device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    if device == "cpu":
        pytest.skip("streams are of CUDA")
    x = torch.ones(1 << 24, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y = custom_relu(x.add_(1))
    stream.synchronize()
    assert torch.all(y == 2)


def test_other_device(device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    input, bias, grad_output = make((7, 64), torch.float32, "cuda:1")
    output = fused_op_forward(input.requires_grad_(), bias.requires_grad_(), 2.0)
    output.backward(grad_output)
    close(output, reference(input.double(), bias.double(), 2.0), torch.float32)
    assert bias.grad.device == torch.device("cuda:1")


def test_more_elements_than_32_bits_count(device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros((1 << 22) + 1, 1024, device=device, dtype=torch.float16)
    x[-1] = 1
    y = fused_op_forward(x, None, 2.0)
    assert torch.all(y[-1] == 2) and not y[0].any()
    dx, dbias = scale_bias_relu_ext.backward(x, y, 3.0, True, True)
    assert torch.all(dx[-1] == 3) and not dx[0].any() and torch.all(dbias == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, b: (x.long(), b), "input must be float16, .* got Long"),
        (lambda x, b: (x.to_sparse(), b), "input must be a dense .* got layout Sparse"),
        (lambda x, b: (x.to("meta"), b), "input must be a dense CPU or CUDA tensor, .* on meta"),
        (lambda x, b: (x, b[:2]), r"bias must have shape \[3\] .*\[2, 3\]\), got \[2\]"),
        (lambda x, b: (x, b[None]), r"bias must have shape \[3\] .* got \[1, 3\]"),
        (lambda x, b: (x, b.double()), "bias must be of Float on .* got Double"),
        (lambda x, b: (x, b.to("meta")), "bias must be of Float on .* got Float on meta"),
    ],
)
def test_bad_input(device, change, message):
    arguments = change(torch.ones(2, 3, device=device), torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match=f"scale_bias_relu: {message}"):
        fused_op_forward(*arguments)


def test_bad_grad_output(device):
    y = torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match=r"grad_output must have shape \[2, 3\] .* got \[3\]"):
        scale_bias_relu_ext.backward(y[0], y, 1.0, True, True)
