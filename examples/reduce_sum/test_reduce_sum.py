"""python -m pytest -q, in this folder, after python setup.py build_ext --inplace."""

import pytest
import torch

# isort: split
from reduce_sum import reduce_sum, reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Rows for a warp and for a CTA, on both sides of each limit; of one part and of several; widths
# that are no multiple of a vector; nothing at all.
SHAPES = [(1,), (5, 1), (9, 31), (3, 1024), (3, 1025), (2, 2048), (3, 16384), (2, 16385)]
SHAPES += [(2, 3, 50_000), (1, 300_001), (0, 8), (8, 0), (5000, 3)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [None, -1])
def test_sum_and_gradient(device, dtype, shape, dim):
    """Against a sum in float64: catches elements that are left out or taken twice."""
    torch.manual_seed(0)
    input = (torch.rand(shape, device=device) - 0.4).to(dtype).requires_grad_()
    output = reduce_sum(input, dim)
    double = input.detach().double().requires_grad_()
    expected = reference(double, dim)
    assert output.dtype == dtype and output.shape == expected.shape

    # One rounding to dtype, and those of a tree of float sums, in proportion to the addends.
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    addends = double.detach().abs().sum() if dim is None else double.detach().abs().sum(dim)
    limit = torch.finfo(dtype).eps * expected.detach().abs() + 64 * eps * addends
    assert torch.all((output.detach().double() - expected.detach()).abs() <= limit)

    grad_output = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, input, grad_output)
    (expected_grad,) = torch.autograd.grad(expected, double, grad_output.double())
    assert torch.equal(grad.double(), expected_grad)


def test_scalar(device):
    x = torch.tensor(3.0, device=device)
    assert reduce_sum(x) == 3
    with pytest.raises(RuntimeError, match="input has no dimension to sum over"):
        reduce_sum(x, -1)


@pytest.mark.parametrize("dim", [None, -1])
def test_gradcheck(device, dim):
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(reduce_sum, (x, dim))
    assert torch.autograd.gradgradcheck(reduce_sum, (x, dim))


@pytest.mark.parametrize("cols", [7, 1000, 3000, 100_000])
def test_bits_depend_on_the_row_alone(device, cols):
    """Catches atomics, and an order that depends on the batch, the address or the threads."""
    x = torch.randn(40, cols, device=device)
    sums = reduce_sum(x, -1)
    for _ in range(5):
        assert torch.equal(reduce_sum(x, -1), sums)
    assert torch.equal(reduce_sum(x[17:18], -1), sums[17:18])
    assert torch.equal(reduce_sum(x[17]), sums[17])
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view_as(x).copy_(x)
    assert torch.equal(reduce_sum(shifted, -1), sums)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = reduce_sum(x, -1)
    torch.set_num_threads(threads)
    assert torch.equal(alone, sums)


def test_views_and_keywords(device):
    x = torch.randn(8, 24, device=device)
    expected = reduce_sum(input=x, dim=-1)
    assert torch.equal(reduce_sum(x, 1), expected)
    assert torch.equal(reduce_sum(x.t().contiguous().t(), -1), expected)
    assert torch.equal(reduce_sum(torch._neg_view(-x), -1), expected)


def test_special_values(device):
    """A NaN or an infinity stays in its row; 16-bit sums leave the range of 16 bits only once."""
    x = torch.ones(3, 2000, device=device)
    x[0, 1500], x[1, 3] = float("nan"), float("inf")
    sums = reduce_sum(x, -1)
    assert sums[0].isnan() and sums[1].isinf() and sums[2] == 2000
    half = torch.full((4,), 60000.0, dtype=torch.float16, device=device)
    half[2:] *= -1
    assert reduce_sum(half) == 0


def test_other_stream(device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    if device == "cpu":
        pytest.skip("streams are of CUDA")
    x = torch.ones(1 << 20, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y = reduce_sum(x.add_(1))
    stream.synchronize()
    assert y == 2 * x.numel()


def test_other_device(device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.ones(3, 3000, device="cuda:1", requires_grad=True)
    sums = reduce_sum(x, -1)
    sums.sum().backward()
    assert torch.all(sums == 3000) and torch.all(x.grad == 1)


def test_more_elements_than_32_bits_count(device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros((1 << 22) + 1, 1024, device=device, dtype=torch.float16)
    x[-1] = 1
    sums = reduce_sum(x, -1)
    assert sums[-1] == 1024 and not sums[:-1].any()
    assert reduce_sum(x) == 1024
    assert reduce_sum(x.view(1, -1), -1) == 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.long(), "input must be float16, .* got Long"),
        (lambda x: x.to_sparse(), "input must be a dense .* got layout Sparse"),
        (lambda x: x.to("meta"), "input must be a dense CPU or CUDA tensor, .* on meta"),
    ],
)
def test_bad_input(device, change, message):
    with pytest.raises(RuntimeError, match=f"reduce_sum: {message}"):
        reduce_sum(change(torch.ones(2, 3, device=device)))


def test_bad_dim(device):
    with pytest.raises(ValueError, match=r"dim must be None or the last .*\(2, 3\), got 0"):
        reduce_sum(torch.ones(2, 3, device=device), 0)
