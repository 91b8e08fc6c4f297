"""A converted module runs wherever the original ran: what no kernel knows goes to the original.

Catches an input for which conversion turns a result into an error, on every way that calls take;
one that goes to the original without need; and an error of a missing kernel that is hidden.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fused_op
from fused_op import convert, disabled
from tests.norms import COLS, HiddenEpsNorm, LlamaNorm, RowsNorm, ShapedRmsNorm, randomize, rows
from tests.ops import BF16, F16, F32, F64

MAKES = {
    "LayerNorm": lambda: nn.LayerNorm(COLS),
    "LayerNorm without parameters": lambda: nn.LayerNorm(COLS, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(COLS),
    "RMSNorm without a weight": lambda: nn.RMSNorm(COLS, elementwise_affine=False),
    "Llama's": LlamaNorm,
    "timm's": lambda: RowsNorm(COLS),
    "RMSNorm of another class without a weight": lambda: ShapedRmsNorm(affine=False),
    "eps in the code": HiddenEpsNorm,
}


class Opaque(torch.Tensor):
    """A wrapper that knows PyTorch's operators and no others."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} is unknown to Opaque")
        unwrapped = [a.inner if isinstance(a, cls) else a for a in args]
        return func(*unwrapped, **(kwargs or {}))


def ragged(layout):
    parts = [rows(COLS, F32, 3), rows(COLS, F32, 5)]
    return torch.nested.nested_tensor(parts, layout=layout)


INPUTS = {
    "float32": lambda: rows(),
    "float64": lambda: rows(dtype=F64),
    "bfloat16": lambda: rows(dtype=BF16),
    "float16": lambda: rows(dtype=F16),
    "complex": lambda: rows().to(torch.complex64),
    "complex128": lambda: rows().to(torch.complex128),
    "int": lambda: rows().int(),
    "bool": lambda: rows() > 0,
    "jagged": lambda: ragged(torch.jagged),
    "nested": lambda: ragged(torch.strided),
    "sparse": lambda: rows().to_sparse(),
    "mkldnn": lambda: rows().to_mkldnn(),
    "meta": lambda: rows().to("meta"),
    "inference": lambda: from_inference_mode(),
    "wrapper": lambda: Opaque(rows()),
    "two tensors": lambda: TwoTensor(rows(), rows()),
    "no tensor": lambda: None,
    "other columns": lambda: rows(COLS + 1),
    "one column, broadcast": lambda: rows(1),
    "no dimension": lambda: torch.tensor(1.0),
    "no rows": lambda: rows(COLS, F32, 0, 5),
}


def from_inference_mode():
    with torch.inference_mode():
        return rows()


@functools.cache
def both(name, weight):
    """A module and its conversion, which some dtypes have not."""
    module = randomize(MAKES[name]()).to(weight)
    fused = copy.deepcopy(module)
    assert convert(fused).converted or weight is F64
    return module, fused


def attempt(module, x):
    try:
        return module(x)
    except Exception as error:
        return error


def dense(y):
    y = y.values() if y.is_nested and y.layout is torch.jagged else y
    y = torch.cat([t.flatten() for t in y.unbind()]) if y.is_nested else y
    y = y.a if isinstance(y, TwoTensor) else y
    return y if y.layout is torch.strided else y.to_dense()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, disabled])
@pytest.mark.parametrize("weight", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MAKES)
def test_runs_where_the_original_ran(name, kind, weight, mode):
    (module, fused), x = both(name, weight), INPUTS[kind]()
    with mode():
        expected, got = attempt(module, x), attempt(fused, x)
    if isinstance(expected, Exception):
        return  # the fused op may take more than the original
    assert isinstance(got, torch.Tensor), got
    assert (got.dtype, got.layout, got.is_nested) == (
        expected.dtype,
        expected.layout,
        expected.is_nested,
    )
    if not got.is_meta:
        wide = min(got.dtype, weight, key=lambda dtype: dtype.itemsize)
        eps = 4 * torch.finfo(wide).eps if wide.is_floating_point else 1e-5
        free = {"rtol": max(eps, 1e-5), "atol": max(eps, 1e-5)}
        torch.testing.assert_close(dense(got), dense(expected), **free)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", ["complex", "jagged", "float64", "bfloat16", "one column, broadcast"]
)
@pytest.mark.parametrize("make", [nn.RMSNorm, nn.LayerNorm, LlamaNorm])
def test_compiled_too(make, kind):
    torch._dynamo.reset()
    module, x = make(COLS), INPUTS[kind]()
    expected = attempt(torch.compile(module, backend="aot_eager"), x)
    torch._dynamo.reset()
    convert(module)
    if isinstance(expected, Exception):
        return
    got = torch.compile(module, backend="aot_eager")(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(dense(got), dense(expected), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cls", [fused_op.FusedLayerNorm, fused_op.FusedRMSNorm])
def test_module_that_a_user_built_still_refuses(cls):
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        cls(COLS)(rows().to(torch.complex64))
    with pytest.raises(RuntimeError, match="input must be a dense"):
        cls(COLS)(ragged(torch.jagged))


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, LlamaNorm])
def test_missing_kernel_is_not_hidden(make, monkeypatch):
    """Catches a fallback that makes a build without CUDA, or a failed launch, run and be slow."""
    module = make(COLS)
    convert(module)

    def fail(*args):
        raise RuntimeError("fused_op was built without CUDA")

    monkeypatch.setattr("fused_op_cuda.norm", fail)
    with pytest.raises(RuntimeError, match="was built without CUDA"):
        module(rows())


class Float32(nn.Module):
    """Returns float32 for rows of any dtype, and so computes the norm of float32 rows alone."""

    eps = 1e-6

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class LayerNormOfMine(nn.LayerNorm):
    pass


class GroupNormOfMine(nn.GroupNorm):
    pass


@pytest.mark.parametrize(
    "make",
    [
        Float32,
        lambda: ShapedRmsNorm(affine=False),
        lambda: LayerNormOfMine(COLS, elementwise_affine=False),
        lambda: GroupNormOfMine(2, COLS, affine=False),
    ],
)
def test_without_parameters_only_proved_dtypes_are_fused(make, monkeypatch):
    """Catches rows whose dtype or bits conversion changes, where no parameter has a dtype."""
    norm, original = make(), make()
    assert len(convert(nn.ModuleList([norm])).converted) == 1
    forward, called = type(original).forward, []
    counted = lambda self, x: (called.append(x.dtype), forward(self, x))[1]  # noqa: E731
    for dtype in (F32, BF16, F16, F64):
        x = torch.randn(6, COLS, generator=torch.Generator().manual_seed(0)).to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(type(original), "forward", counted)
            y = norm(x)
        torch.testing.assert_close(y, original(x))  # the dtype, too
    assert F32 not in called
    assert make is not Float32 or called == [BF16, F16, F64]


def test_per_sample_gradients_of_a_group_norm():
    """Catches a question to an ExpandedWeight that it cannot answer."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    found = []
    x = torch.randn(3, 8, 4)
    for converts in (False, True):
        norm = nn.GroupNorm(2, 8)
        if converts:
            convert(norm)
        call_for_per_sample_grads(norm)(x).square().sum().backward()
        found.append((norm.weight.grad_sample, norm.bias.grad_sample))
    torch.testing.assert_close(*found)
