"""python -m pytest -q, in this folder, after python setup.py build_ext --inplace.

Everything asks `sample_inputs` of template_op.py for its arguments. What is about GPUs alone takes
its arguments on the CPU too, so that a machine without one finds a test that no longer fits the op.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# isort: split
from template_op import TemplateOp, reference, sample_inputs, template_op

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# YOUR OP: no elements, one, what is no multiple of a vector, more than a CTA has threads.
SHAPES = [(), (0,), (1,), (7, 33), (300, 24), (3, 100_001)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make(shape, dtype, device):
    """The arguments, all tensors of which want a gradient, and a list of those tensors."""
    torch.manual_seed(0)
    inputs = sample_inputs(shape, dtype, device)
    return inputs, [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor)]


def with_tensors(inputs, tensors):
    """The arguments with other tensors, in their order."""
    tensors = iter(tensors)
    return [next(tensors) if isinstance(x, torch.Tensor) else x for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(device, dtype, shape):
    """Against the reference in float64: catches a wrong formula, index or rounding."""
    inputs, tensors = make(shape, dtype, device)
    output = template_op(*inputs)
    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, tensors, grad_output)
    assert output.dtype == dtype and [grad.dtype for grad in grads] == [dtype] * len(grads)

    doubles = [x.detach().double().requires_grad_() for x in tensors]
    expected = reference(*with_tensors(inputs, doubles))
    expected_grads = torch.autograd.grad(expected, doubles, grad_output.double())
    # YOUR OP: one rounding to dtype is eps / 2. A longer formula needs some more in float32 and
    # float64, which it is computed in; a sum in proportion to its length.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=eps)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=eps, atol=eps)


def test_gradcheck(device):
    """First and second derivative against differences."""
    inputs, _ = make((3, 5), torch.float64, device)
    assert torch.autograd.gradcheck(template_op, inputs)
    assert torch.autograd.gradgradcheck(template_op, inputs)


class Calls(TorchDispatchMode):
    """Keeps the calls of this op's own ops, which the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "template_op":
            self.found.append((function, args))
        return function(*args, **(kwargs or {}))


def test_opcheck(device):
    """PyTorch's own questions to an op: schema, fake results, autograd, tracing."""
    inputs, tensors = make((2, 5), torch.float32, device)
    torch.library.opcheck(torch.ops.template_op.forward.default, inputs)
    with Calls() as calls:
        torch.autograd.grad(template_op(*inputs).sum(), tensors)
    assert [function for function, _ in calls.found] == [
        torch.ops.template_op.forward.default,
        torch.ops.template_op.backward.default,
    ]
    backward, arguments = calls.found[-1]
    torch.library.opcheck(backward, arguments)


def test_compiles_without_a_graph_break(device):
    inputs, tensors = make((2, 33), torch.float32, device)

    def loss(*inputs):
        return (template_op(*inputs) + 1).square().sum()

    grads = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), tensors)
    for grad, want in zip(grads, torch.autograd.grad(loss(*inputs), tensors), strict=True):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(device, dim):
    """Catches samples that are taken for something else, wherever they lie."""
    inputs, tensors = make((4, 3, 5), torch.float32, device)
    in_dims = tuple(dim if isinstance(x, torch.Tensor) else None for x in inputs)
    output = torch.vmap(template_op, in_dims)(*inputs)
    samples = zip(*(x.unbind(dim) for x in tensors), strict=True)
    expected = [template_op(*with_tensors(inputs, sample)) for sample in samples]
    torch.testing.assert_close(output, torch.stack(expected))


def test_func_grad(device):
    """torch.func.grad, and with vmap the gradients of each sample, against the reference's."""
    inputs, tensors = make((4, 3), torch.float32, device)
    tensors = [x.detach() for x in tensors]

    def grads(op):
        def loss(*tensors):
            return op(*with_tensors(inputs, tensors)).square().sum()

        return torch.func.grad(loss, argnums=tuple(range(len(tensors))))

    torch.testing.assert_close(grads(template_op)(*tensors), grads(reference)(*tensors))
    per_sample, expected = (torch.vmap(grads(op))(*tensors) for op in (template_op, reference))
    torch.testing.assert_close(per_sample, expected)


def test_views(device):
    """Catches a kernel that takes strided, misaligned or negated views for dense memory."""
    inputs, tensors = make((8, 24), torch.float32, device)
    tensors = [x.detach() for x in tensors]
    expected = template_op(*with_tensors(inputs, tensors))
    shifted = [torch.empty(8 * 24 + 1, device=device)[1:].view(8, 24) for _ in tensors]
    for views in (
        [x.t().contiguous().t() for x in tensors],
        [torch._neg_view(-x) for x in tensors],
        [to.copy_(x) for to, x in zip(shifted, tensors, strict=True)],
    ):
        assert torch.equal(template_op(*with_tensors(inputs, views)), expected)


def test_layer(device):
    """Catches a layer that passes its arguments on in another order."""
    (x, scale), _ = make((4,), torch.float32, device)  # YOUR OP: those of forward, of the layer
    assert torch.equal(TemplateOp(scale=scale)(x), template_op(input=x, scale=scale))


@contextlib.contextmanager
def late_stream(device):
    """A stream that is not the default one, and busy for a while; nothing on the CPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        yield
    stream.synchronize()


def test_other_stream(device):
    """Catches a launch on the default stream, which would not wait for the work before it."""
    inputs, tensors = make((1 << (24 if device == "cuda" else 10),), torch.float32, device)
    tensors = [x.detach() for x in tensors]
    expected = reference(*with_tensors(inputs, [x + 1 for x in tensors]))
    with late_stream(device):
        output = template_op(*with_tensors(inputs, [x.add_(1) for x in tensors]))
    torch.testing.assert_close(output, expected)


def test_other_device(device):
    """Catches a launch on the current device, which need not be that of the tensors."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs, tensors = make((7, 33), torch.float32, "cuda:1" if device == "cuda" else device)
    output, expected = template_op(*inputs), reference(*inputs)
    torch.testing.assert_close(output, expected)
    grads, wanted = (torch.autograd.grad(each.sum(), tensors) for each in (output, expected))
    torch.testing.assert_close(grads, wanted)


def test_more_elements_than_32_bits_count(device):
    """Catches an index of 32 bits: it wraps around, and the last elements are never reached."""
    count = (1 << (32 if device == "cuda" else 10)) + 3
    # YOUR OP: 2 bytes for each element of each tensor and gradient, of input and output.
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * 6 * count:
        pytest.skip("needs more free GPU memory")
    inputs, tensors = make((count,), torch.float16, device)
    output = template_op(*inputs)
    grads = torch.autograd.grad(output, tensors, output.detach())
    for part in (slice(3), slice(-3, None)):
        few = [x.detach()[part].requires_grad_() for x in tensors]
        expected = reference(*with_tensors(inputs, few))
        torch.testing.assert_close(output[part], expected)
        wanted = torch.autograd.grad(expected, few, output.detach()[part])
        torch.testing.assert_close(tuple(grad[part] for grad in grads), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.detach().long(), "input must be float16, .* got Long"),
        (lambda x: x.detach().to_sparse(), "template_op::forward.*Sparse"),
    ],
)
def test_bad_input(device, change, message):
    """YOUR OP: a line for each check in csrc/binding.cpp."""
    inputs, tensors = make((2, 3), torch.float32, device)
    with pytest.raises(RuntimeError, match=message):
        template_op(*with_tensors(inputs, [change(x) for x in tensors]))
