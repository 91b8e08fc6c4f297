"""python -m pytest -q, in this folder, after python setup.py build_ext --inplace."""

import pytest
import torch

# isort: split
from convrnn import convrnn_forward, reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# batch, steps, columns, taps: one of each; an even kernel; one that is wider than the state; more
# taps than a CTA has warps; states for one, four and sixteen elements a thread.
SHAPES = [(1, 1, 1, 1), (3, 5, 33, 3), (2, 4, 64, 4), (2, 3, 5, 13), (1, 3, 100, 40)]
SHAPES += [(2, 3, 1025, 5), (2, 2, 5000, 3)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make(shape, dtype, device, requires_grad=True):
    batch, steps, cols, taps = shape
    torch.manual_seed(0)
    x = torch.randn(batch, steps, cols)
    kernel = torch.randn(1, 1, taps) / taps
    hidden = torch.randn(batch, cols)
    return [t.to(device, dtype).requires_grad_(requires_grad) for t in (x, kernel, hidden)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_states_and_gradients(device, dtype, shape):
    """Against the reference in float64: catches a wrong index, border, order or rounding."""
    inputs = make(shape, dtype, device)
    output = convrnn_forward(*inputs)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference(*doubles)
    assert output.dtype == dtype and output.shape == expected.shape
    # Each step rounds, and passes on what it has rounded before, about as large.
    eps = torch.finfo(dtype).eps * 4 * shape[1]
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=eps)

    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, grad_output)
    expected_grads = torch.autograd.grad(expected, doubles, grad_output.double())
    for name, grad, want in zip(("x", "kernel", "hidden"), grads, expected_grads, strict=True):
        # The gradient of the kernel is a sum over everything.
        limit = eps * (output.numel() ** 0.5 if name == "kernel" else 1) * 4
        torch.testing.assert_close(grad.double(), want, rtol=4 * eps, atol=limit, msg=name)


def test_gradcheck(device):
    assert torch.autograd.gradcheck(convrnn_forward, make((2, 3, 6, 3), torch.float64, device))
    assert torch.autograd.gradcheck(convrnn_forward, make((2, 2, 5, 4), torch.float64, device))


@pytest.mark.parametrize("shape", [(0, 3, 4, 3), (2, 0, 4, 3), (2, 3, 0, 3)], ids=str)
def test_empty(device, shape):
    """No steps: the gradients of kernel and hidden state are zeros, not whatever memory holds."""
    inputs = make(shape, torch.float32, device)
    output = convrnn_forward(*inputs)
    assert output.shape == inputs[0].shape
    _, grad_kernel, grad_hidden = torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert not grad_kernel.any() and not grad_hidden.any()


def test_opcheck(device):
    """PyTorch's own questions to an op: schema, fake results, autograd, tracing."""
    inputs = make((2, 3, 6, 3), torch.float32, device)
    torch.library.opcheck(torch.ops.convrnn.forward.default, tuple(inputs))
    x, kernel, hidden = (t.detach() for t in inputs)
    torch.library.opcheck(torch.ops.convrnn.backward.default, (x, x.tanh(), kernel, hidden))


def test_compiles_without_a_graph_break(device):
    inputs = make((2, 3, 6, 3), torch.float32, device)

    def loss(*inputs):
        return convrnn_forward(*inputs).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(*inputs), inputs)
    for grad, want in zip(grads, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(grad, want)


def test_second_derivative_is_refused(device):
    inputs = make((2, 3, 6, 3), torch.float32, device)
    grads = torch.autograd.grad(convrnn_forward(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        torch.autograd.grad(grads[0].sum(), inputs)


def test_bitwise_repeatable(device):
    """Catches a race between two steps, and a sum in a varying order."""
    inputs = make((40, 50, 700, 5), torch.float32, device)
    grad_output = torch.randn_like(inputs[0])

    def once():
        output = convrnn_forward(*inputs)
        return output, *torch.autograd.grad(output, inputs, grad_output)

    first = once()
    for _ in range(5 if device == "cuda" else 1):
        assert all(map(torch.equal, once(), first))


def test_views(device):
    x, kernel, hidden = make((4, 3, 8, 3), torch.float32, device, requires_grad=False)
    expected = convrnn_forward(x, kernel, hidden)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(convrnn_forward(strided, kernel, hidden), expected)
    assert torch.equal(convrnn_forward(torch._neg_view(-x), kernel, hidden), expected)


def test_other_stream(device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    if device == "cpu":
        pytest.skip("streams are of CUDA")
    x, kernel, hidden = make((64, 4, 1024, 3), torch.float32, device, requires_grad=False)
    expected = convrnn_forward(x + 1, kernel, hidden)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        output = convrnn_forward(x.add_(1), kernel, hidden)
    stream.synchronize()
    assert torch.equal(output, expected)


def test_other_device(device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make((2, 3, 40, 3), torch.float64, "cuda:1")
    output = convrnn_forward(*inputs)
    expected = reference(*inputs)
    torch.testing.assert_close(output, expected)
    grads = torch.autograd.grad(output.sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), inputs))


def test_more_elements_than_32_bits_count(device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.zeros(4097, 1024, 1024, device=device, dtype=torch.float16)
    x[-1] = 1
    kernel, hidden = x.new_zeros(1, 1, 3), x.new_zeros(4097, 1024)
    output = convrnn_forward(x, kernel, hidden)
    assert torch.all(output[-1] == output[-1, 0, 0]) and output[-1, 0, 0] > 0
    assert not output[0].any()
    grad_x, _, _ = torch.ops.convrnn.backward(x, output, kernel, hidden)
    assert torch.all(grad_x[-1] == grad_x[-1, 0, 0]) and grad_x[-1, 0, 0] > 0
    assert not grad_x[0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, k, h: (x.long(), k, h), "x must be float16, .* got Long"),
        (
            lambda x, k, h: (x[0], k, h),
            r"x must have shape \[batch, steps, columns\], got \[3, 4\]",
        ),
        (lambda x, k, h: (x, k[0], h), r"kernel must have shape \[1, 1, taps\] .* got \[1, 3\]"),
        (lambda x, k, h: (x, k[..., :0], h), r"at least one tap, got \[1, 1, 0\]"),
        (lambda x, k, h: (x, k, h[:1]), r"hidden must have shape \[2, 4\] .*, got \[1, 4\]"),
        (lambda x, k, h: (x, k.double(), h), "kernel must be of Float on .*, got Double"),
        (lambda x, k, h: (x, k, h.double()), "hidden must be of Float on .*, got Double"),
    ],
)
def test_bad_input(device, change, message):
    arguments = change(*make((2, 3, 4, 3), torch.float32, device, requires_grad=False))
    with pytest.raises(RuntimeError, match=f"convrnn: .*{message}"):
        convrnn_forward(*arguments)


def test_bad_grad_output(device):
    x, kernel, hidden = make((2, 3, 4, 3), torch.float32, device, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"grad_output must have shape \[2, 3, 4\] .* \[3, 4\]"):
        torch.ops.convrnn.backward(x[0], x, kernel, hidden)


def test_too_many_columns(device):
    if device == "cpu":
        pytest.skip("the CPU has no such limit")
    arguments = make((1, 1, 100_000, 3), torch.float32, device, requires_grad=False)
    with pytest.raises(
        RuntimeError, match=r"100000 columns and 3 taps need .* bytes of shared memory"
    ):
        convrnn_forward(*arguments)
