"""The tables of interface/test_bad_input.py, and their calls: by the fused ops, and by PyTorch's.

`norm(input, weight, ...)` stands for each op, `layer` for those that have a bias. An op that adds
gets a residual of zeros, so that every op of a kind has one answer.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.ops import F64, OPS, Op

# Each row: its name, then the calls; below each call what it raises.
REFUSED = r"""
02_parameters_that_are_no_floats
    norm(X, W.long())
        RuntimeError: expect parameter to have scalar type of Float, Half, BFloat16 or Double, got
    norm(X, W.cfloat())
        RuntimeError: got weight of ComplexFloat
    layer(X, None, B.to(torch.float8_e4m3fn))
        RuntimeError: got bias of Float8_e4m3fn
04_integer_input
    norm(X.long())
        NotImplementedError: for 'Long': input must be float16, bfloat16, float32 or float64
    norm(X.bool())
        NotImplementedError: not implemented for 'Bool'
    norm(X.to(torch.uint16))
        NotImplementedError: not implemented for 'UInt16'
05_complex_and_float8_input
    norm(X.cfloat())
        NotImplementedError: not implemented for 'ComplexFloat'
    norm(X.to(torch.float8_e4m3fn))
        NotImplementedError: not implemented for 'Float8_e4m3fn'
06_quantized_input
    norm(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8))
        NotImplementedError: not implemented for 'QInt8'
07_sparse_layouts
    norm(X.to_sparse())
        RuntimeError: input must be a dense (strided) tensor, got layout Sparse
    norm(X.to_sparse_csr())
        RuntimeError: input must be a dense (strided) tensor, got layout SparseCsr
    norm(X, W.to_sparse())
        RuntimeError: weight must be a dense (strided) tensor, got layout Sparse
    norm(X.cpu().to_mkldnn())
        RuntimeError: input must be a dense (strided) tensor, got layout Mkldnn
08_nested_tensors
    norm(torch.nested.nested_tensor([X, X], layout=torch.jagged))
        RuntimeError: input must be a dense (strided) tensor, got a nested one
    norm(torch.nested.nested_tensor([X, X]))
        RuntimeError: input must be a dense (strided) tensor, got a nested one
10_devices_that_differ
    norm(X, W.to("meta"))
        RuntimeError: weight: Tensor on device meta is not on the expected device {device}
    norm(X.to("meta"), W)
        RuntimeError: is not on the expected device
15_no_tensor
    norm(None)
        TypeError: argument 'input' must be Tensor, not NoneType
    norm([1.0])
        TypeError: argument 'input' must be Tensor, not list
    norm(np.ones(3))
        TypeError: argument 'input' must be Tensor, not
    norm(X, 1.0)
        TypeError: argument 'weight' must be Tensor, not float
    layer(X, W, "b")
        TypeError: argument 'bias' must be Tensor, not str
16_input_of_no_dimension
    norm(X[0, 0])
        RuntimeError: input must have at least one dimension, got a 0-dim tensor
21_parameters_of_a_wrong_shape
    norm(X, W[:5])
        RuntimeError: weight of shape [5] and normalized_shape = [8] (the last dimensions of
    norm(X, W[:1])
        RuntimeError: but got weight of shape [1]
    norm(X, W[None])
        RuntimeError: but got weight of shape [1, 8] and normalized_shape = [4, 8]
    norm(X, W[0])
        RuntimeError: containing at least one element, but got normalized_shape = []
    norm(X, W[None, None])
        RuntimeError: cannot normalise over the last 3 dimensions of input of shape [4, 8]
    layer(X, W, B[:5])
        RuntimeError: Expected bias to be of same shape as normalized_shape, but got bias of shape
    layer(X, W, B[0])
        RuntimeError: but got bias of shape []
22_empty_normalized_shape
    norm(X, normalized_shape=())
        RuntimeError: Expected normalized_shape to be at least 1-dimensional
23_another_normalized_shape
    norm(X, normalized_shape=5)
        RuntimeError: Given normalized_shape=[5], expected input with shape [*, 5], but got input of
    norm(X, normalized_shape=(2, 4, 8))
        RuntimeError: Given normalized_shape=[2, 4, 8]
24_normalized_shape_of_another_type
    norm(X, normalized_shape="8")
        TypeError: argument 'normalized_shape' must be tuple of ints, not str
    norm(X, normalized_shape=(8.0,))
        TypeError: must be tuple of ints, but found element of type float
38_eps_nan
    norm(X, eps=NAN)
        ValueError: eps must be finite, got nan
    norm(X.clone().requires_grad_(), eps=NAN)
        ValueError: eps must be finite, got nan
    norm(X.to("meta"), eps=NAN)
        ValueError: eps must be finite, got nan
39_eps_infinite
    norm(X, eps=INF)
        ValueError: eps must be finite, got inf
40_eps_that_is_no_number
    norm(X, eps="1e-5")
        TypeError: argument 'eps' must be float, not str
    layer(X, eps=None)
        TypeError: argument 'eps' must be float, not NoneType
    norm(X, eps=1j)
        TypeError: argument 'eps' must be float, not complex
41_eps_too_large
    norm(X, eps=10 ** 400)
        OverflowError: int too large to convert to float
42_eps_tensor_with_a_shape_or_a_gradient
    norm(X, eps=torch.tensor([1e-05]))
        TypeError: argument 'eps' must be float, not Tensor
    norm(X, eps=torch.tensor(1e-05, requires_grad=True))
        TypeError: argument 'eps' must be float, not Tensor
"""

ACCEPTED = r"""
01_16_bit_rows_beside_f32_parameters
    layer(X.half(), W, B)
    norm(X.bfloat16(), W)
02_parameters_of_another_dtype
    norm(X, W.bfloat16())
    norm(X.half(), W.bfloat16())
    norm(X, W.double())
    norm(X.double(), W)
03_weight_and_bias_of_two_dtypes
    layer(X.half(), W, B.half())
    layer(X.half(), None, B.bfloat16())
14_absent_parameters
    norm(X)
    norm(X, W)
    layer(X, None, B)
17_one_dimension
    norm(X[0], W)
18_no_rows
    norm(X[:0], W)
    layer(Y[:, :0], W, B)
19_no_columns
    norm(X[:, :0], W[:0])
    norm(X[:0, :0])
20_one_column
    norm(X[:, :1], W[:1])
24_normalized_shape_of_one_int
    norm(X, normalized_shape=8)
25_several_normalized_dimensions
    norm(Y, W2)
    norm(Y, normalized_shape=(4, 8))
26_other_strides
    norm(torch.cat([X, -X]).t(), W)
    norm(Y.transpose(0, 1), W)
    norm(torch.cat([X, X], 1)[:, ::2], W)
    norm(Z.to(memory_format=torch.channels_last), W)
27_strides_of_zero
    norm(X[:1].expand(4, 8), W)
    norm(X[:, :1].expand(4, 8), W)
28_parameters_with_strides
    norm(X, W[:1].expand(8))
    layer(X, torch.cat([W, W])[::2], torch.cat([B, B])[::2])
29_rows_that_overlap
    norm(X.as_strided((5, 8), (4, 1)), W)
30_storage_offsets
    norm(X.flatten()[1:25].view(3, 8), W)
    layer(X, torch.cat([W, W])[1:9], torch.cat([B, B])[3:11])
32_lazy_negative_and_conjugate
    norm(torch._neg_view(X), W)
    norm(X, torch._neg_view(W))
    norm(torch.complex(X, X).conj().imag, W)
37_eps_zero
    norm(X, eps=0)
    norm(X, eps=-0.0)
    layer(torch.ones_like(X), eps=0.0)
38_eps_negative
    norm(X.double(), eps=-0.05)
39_eps_that_underflows
    norm(X, eps=1e-50)
41_every_kind_of_number_as_eps
    norm(X, eps=True)
    norm(X, eps=1)
    norm(X, eps=np.float32(1e-3))
    norm(X, eps=np.float64(1e-3))
    norm(X, eps=torch.tensor(1e-3))
"""


FOUR = [op for op in OPS if not op.zero_centered]
NAN, INF = float("nan"), float("inf")


def rows_of(table: str, lines_per_call: int) -> list:
    """A parameter for each call of the table: its lines, by the name of its row."""
    found, name, lines = [], "", []
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            name = line
            continue
        lines.append(line.strip())
        if len(lines) == lines_per_call:
            found.append(pytest.param(*lines, id=name))
            lines = []
    return found


def ops_of(call: str) -> list[Op]:
    """The ops that a call stands for."""
    return [op for op in FOUR if op.centred or not call.startswith("layer")]


def names(device: str) -> dict:
    """What the calls are written with, on the device."""
    g = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(device)

    tensors = {"X": normal(4, 8), "W": normal(8), "B": normal(8)}
    tensors |= {"Y": normal(3, 4, 8), "Z": normal(2, 3, 4, 8), "W2": normal(4, 8)}
    return tensors | {"torch": torch, "np": np, "NAN": NAN, "INF": INF, "device": device}


def ours(op: Op, device: str):
    """norm() as the fused op; returns its outputs."""

    def norm(input, weight=None, bias=None, **options):
        rows = (input, residual_for(input, device)) if op.adds else (input,)
        parameters = (weight, bias) if op.centred else (weight,)
        result = op.fused(*rows, *parameters, **options)
        return result if op.adds else (result,)

    return norm


def residual_for(input, device: str) -> torch.Tensor:
    """Zeros like the input; any tensor where that is refused: the input is looked at first."""
    try:
        return torch.zeros_like(input, memory_format=torch.contiguous_format)
    except (TypeError, RuntimeError, NotImplementedError):
        return torch.zeros(4, 8, device=device)


def theirs(op: Op):
    """norm() as PyTorch's function, in float64."""

    def norm(input, weight=None, bias=None, eps=None, normalized_shape=None):
        x, w, b = (None if t is None else t.to(F64) for t in (input, weight, bias))
        shape = normalized_shape or next(
            (tuple(t.shape) for t in (w, b) if t is not None), x.shape[-1:]
        )
        shape = (shape,) if isinstance(shape, int) else shape
        if eps is None:
            eps = (
                1e-5
                if op.centred
                else torch.finfo(F64 if input.dtype is F64 else torch.float32).eps
            )
        if op.centred:
            output = F.layer_norm(x, shape, w, b, float(eps))
        else:
            output = F.rms_norm(x, shape, w, float(eps))
        return (output, x) if op.adds else (output,)

    return norm


def with_gradients(norm):
    """norm() that returns its outputs and the gradients through them, of numbers that differ."""

    def function(*tensors, **options):
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        result = norm(*leaves, **options)
        used = [t for t in result if t.requires_grad]
        grads = [torch.arange(t.numel(), device=t.device).cos().view_as(t) for t in used]
        grads = [g.to(leaves[0].dtype).to(t.dtype) for g, t in zip(grads, used, strict=True)]
        present = [t for t in leaves if t is not None]
        return (*result, *torch.autograd.grad(used, present, grads))

    return function
