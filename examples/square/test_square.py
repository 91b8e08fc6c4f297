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
