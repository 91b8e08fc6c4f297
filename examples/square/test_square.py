"""python -m pytest -q, in this folder. Compiles the op if load_jit.py has not."""

import pytest
import torch

# isort: split
from load_jit import reference, square, square_ext, square_python

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("op", [square, square_python]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 33), (100_001,)], ids=str)
def test_forward_and_gradient(op, device, dtype, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    dy = torch.randn_like(x)
    y = op(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.dtype == dtype and y.shape == x.shape
    eps = torch.finfo(dtype).eps
    double = x.detach().double()
    torch.testing.assert_close(y.double(), reference(double), rtol=eps, atol=eps**2)
    torch.testing.assert_close(dx.double(), 2 * double * dy.double(), rtol=eps, atol=eps**2)


def test_gradcheck(op, device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)


def test_views(op, device):
    x = torch.randn(8, 24, device=device)
    assert torch.equal(op(x.t()), op(x).t())
    assert torch.equal(op(x[:, 1::2]), op(x)[:, 1::2])
    assert torch.equal(op(torch._neg_view(x)), op(x))


def test_other_stream(op, device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    if device == "cpu":
        pytest.skip("streams are of CUDA")
    x = torch.ones(1 << 24, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y = op(x.add_(1))
    stream.synchronize()
    assert torch.all(y == 4)


def test_other_device(op, device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(7, 33, device="cuda:1", requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert torch.equal(y, x * x) and torch.equal(x.grad, 2 * x)


def test_more_elements_than_32_bits_count(op, device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros((1 << 32) + 3, device=device, dtype=torch.float16)
    x[-3:] = 3
    assert op(x)[-3:].tolist() == [9, 9, 9]
    (dx,) = torch.autograd.grad(op(x.requires_grad_()), x, x.detach())
    assert dx[-3:].tolist() == [18, 18, 18] and not dx[:3].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.long(), "x must be float16, .* got Long"),
        (lambda x: x.to_sparse(), "x must be a dense .* got layout Sparse"),
        (lambda x: x.to("meta"), "x must be a dense CPU or CUDA tensor, .* on meta"),
    ],
)
def test_bad_input(op, device, change, message):
    with pytest.raises(RuntimeError, match=f"square: {message}"):
        op(change(torch.ones(2, 3, device=device)))


def test_bad_gradient(op, device):
    x = torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match="square: the gradient must have shape"):
        square_ext().backward(x, x[0])
