"""python -m pytest -q, in this folder, after python setup.py build_ext --inplace."""

import pytest
import torch

# isort: split
from template_op import TemplateOp, reference, template_op

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# YOUR OP: no elements, one, what is no multiple of a vector, more than a CTA has threads.
SHAPES = [(), (0,), (1,), (7, 33), (300, 24), (3, 100_001)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(device, dtype, shape):
    """Against the reference in float64: catches a wrong formula, index or rounding."""
    torch.manual_seed(0)
    input = torch.randn(shape, device=device).to(dtype).requires_grad_()
    grad_output = torch.randn_like(input)
    output = template_op(input, 1.5)
    (grad,) = torch.autograd.grad(output, input, grad_output)
    assert output.dtype == dtype and output.shape == input.shape

    double = input.detach().double().requires_grad_()
    expected = reference(double, 1.5)
    (expected_grad,) = torch.autograd.grad(expected, double, grad_output.double())
    # YOUR OP: one rounding to dtype is eps / 2. A longer formula needs some more in float32 and
    # float64, which it is computed in; a sum in proportion to its length.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=eps)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=eps, atol=eps)


def test_gradcheck(device):
    """First and second derivative against differences."""
    input = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(template_op, (input, 1.5))
    assert torch.autograd.gradgradcheck(template_op, (input, 1.5))


def test_views(device):
    """Catches a kernel that takes strided, misaligned or negated views for dense memory."""
    x = torch.randn(8, 24, device=device)
    expected = template_op(x, 2.0)
    assert torch.equal(template_op(x.t().contiguous().t(), 2.0), expected)
    assert torch.equal(template_op(torch._neg_view(-x), 2.0), expected)
    shifted = torch.empty(8 * 24 + 1, device=device)[1:].view(8, 24).copy_(x)
    assert torch.equal(template_op(shifted, 2.0), expected)


def test_layer_and_keywords(device):
    x = torch.randn(4, device=device)
    assert torch.equal(TemplateOp(scale=3.0)(x), template_op(input=x, scale=3.0))


def test_other_stream(device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    if device == "cpu":
        pytest.skip("streams are of CUDA")
    x = torch.ones(1 << 24, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y = template_op(x.add_(1), 2.0)
    stream.synchronize()
    torch.testing.assert_close(y, reference(torch.full_like(x, 2), 2.0))


def test_other_device(device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(7, 33, device="cuda:1", requires_grad=True)
    y, expected = template_op(x, 2.0), reference(x, 2.0)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in (y, expected)))


def test_more_elements_than_32_bits_count(device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros((1 << 32) + 3, device=device, dtype=torch.float16)
    x[-3:] = 3
    y = template_op(x.requires_grad_(), 2.0)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for part in (slice(3), slice(-3, None)):
        few = x.detach()[part].requires_grad_()
        expected = reference(few, 2.0)
        torch.testing.assert_close(y[part], expected)
        torch.testing.assert_close(dx[part], torch.autograd.grad(expected, few, few.detach())[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.long(), "input must be float16, .* got Long"),
        (lambda x: x.to_sparse(), "input must be a dense .* got layout Sparse"),
        (lambda x: x.to("meta"), "input must be a dense CPU or CUDA tensor, .* on meta"),
    ],
)
def test_bad_input(device, change, message):
    with pytest.raises(RuntimeError, match=f"template_op: {message}"):
        template_op(change(torch.ones(2, 3, device=device)))
