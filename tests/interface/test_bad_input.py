"""Bad and odd tensors, shapes, values and eps: refused with a sentence, or right.

Rows 1 to 42 of a table whose others, about autograd, contexts and limits, are in
test_bad_input_contexts.py. After each of them a good call on the same device is still right (the
fixture `still_works`). What the library has beyond PyTorch's arguments is in test_errors.py.
"""

import builtins
import re
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fused_op
from tests.bad_input import (
    ACCEPTED,
    FOUR,
    INF,
    NAN,
    REFUSED,
    names,
    ops_of,
    ours,
    rows_of,
    theirs,
    with_gradients,
)
from tests.case import make_case
from tests.ops import BF16, DEVICES, F16, F32, F64, Pair

pytestmark = [
    pytest.mark.usefixtures("still_works"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch warns of some of the tensors
]


@pytest.mark.parametrize(("call", "error"), rows_of(REFUSED, 2))
def test_refused(call, error, device):
    kind, message = error.split(": ", 1)
    where = str(torch.zeros(0, device=device).device)
    for op in ops_of(call):
        norm = ours(op, device)
        with pytest.raises(getattr(builtins, kind)) as caught:
            eval(call, names(device) | {"norm": norm, "layer": norm})
        sentence = str(caught.value)
        assert caught.type is getattr(builtins, kind), call
        assert message.replace("{device}", where) in sentence, f"{op}: {sentence}"
        assert kind == "OverflowError" or sentence.startswith(f"{op.name}: "), sentence


@pytest.mark.parametrize("call", rows_of(ACCEPTED, 1))
def test_accepted(call, device):
    values = names(device)
    for op in ops_of(call):
        got, expected = (
            eval(call, values | {"norm": with_gradients(norm), "layer": with_gradients(norm)})
            for norm in (ours(op, device), theirs(op))
        )
        for actual, truth in zip(got, expected, strict=True):
            # Of RMS norm alone, the output of channels-last rows is channels-last, as PyTorch's.
            keeps = "channels_last" in call and not op.centred and not op.adds and actual is got[0]
            memory_format = torch.channels_last if keeps else torch.contiguous_format
            assert actual.is_contiguous(memory_format=memory_format), f"{op}: {call}"
            # Of the largest element, since a small one may be what is left of large ones: its own
            # rounding, and some of the arithmetic in f32 or f64.
            size = truth.nan_to_num().abs().max().item() if truth.numel() else 0.0
            compute = F64 if got[0].dtype is F64 else F32
            roundings = torch.finfo(actual.dtype).eps + 32 * torch.finfo(compute).eps
            free = {"rtol": 0, "atol": roundings * max(size, 1)}
            torch.testing.assert_close(actual.to(F64), truth.to(F64), equal_nan=True, **free)


def test_01_dtypes_of_results(device):
    for op in FOUR:
        case = make_case(op, (4, 8), Pair(F16, F32), device)
        got = {name: t.dtype for name, t in case.run().items()}
        wide = {f"grad_{name}" for name in op.parameters}
        assert got == {name: F32 if name in wide else F16 for name in got}


def test_09_meta_tensors(device):
    for op in FOUR:
        rows, weight = torch.empty(4, 8, device="meta"), torch.empty(8, device="meta")
        got = with_gradients(ours(op, device))(rows, weight)
        assert [t.shape for t in got] == [(4, 8)] * (1 + op.adds) + [(4, 8), (8,)]
        assert all(t.is_meta for t in got)


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
@pytest.mark.parametrize("op", FOUR, ids=str)
def test_09_shapes_of_tensors_without_data(op, mode):
    """Catches a result for shapes that no kernel takes: backward would say so, or nothing."""
    with mode():
        rows, weight = (
            torch.empty(*shape, device="meta" if mode is nullcontext else "cpu")
            for shape in ((4, 8), (8,))
        )
        for x in (rows[:, :1], rows[:, :5]):
            with pytest.raises(RuntimeError, match=f"^{op.name}: Expected weight to be of same sh"):
                op.fused(*[x] * (1 + op.adds), weight)
        if op.adds:
            with pytest.raises(RuntimeError, match=f"^{op.name}: residual must have the shape of"):
                op.fused(rows, rows[:1], weight)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_10_cpu_beside_cuda(device):
    here, there = names(device), names("cpu" if device == "cuda" else "cuda")
    for op in FOUR:
        with pytest.raises(RuntimeError, match=r"weight: Tensor on device .+ is not on the expect"):
            ours(op, device)(here["X"], there["W"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_11_tensors_of_two_gpus(device):
    """An address on another GPU may even be readable: then the call would only be slow."""
    x, weight = torch.randn(4, 8, device="cuda:1"), torch.randn(8, device="cuda:0")
    for op in FOUR:
        with pytest.raises(RuntimeError, match="cuda:0 is not on the expected device cuda:1"):
            ours(op, "cuda:1")(x, weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_12_a_gpu_that_is_not_the_current_one(device):
    for op in FOUR:
        case = make_case(op, (5, 300), Pair(F32, F32), "cuda:1")
        with torch.cuda.device(0):
            case.check(case.run())


@pytest.mark.skipif(
    "cuda" not in DEVICES or fused_op.build_info()["cuda"] != "",
    reason="needs a GPU and a build without CUDA",
)
@pytest.mark.parametrize("device", ["cpu"])  # where good calls work then
def test_13_cuda_tensor_on_a_build_without_cuda(device):
    reason = fused_op.build_info()["no_cuda_reason"]
    for op in FOUR:
        with pytest.raises(RuntimeError, match=re.escape(f"was built without CUDA: {reason}")):
            ours(op, "cuda")(torch.randn(4, 8, device="cuda"))


def test_31_addresses_between_elements(device):
    """Memory of others may begin anywhere: the CPU copies; on the GPU any load of it, PyTorch's
    included, would end the context, so that it is refused."""
    for op in FOUR:
        x = torch.randn(3, 8)
        memory = torch.zeros(2 + x.nbytes, dtype=torch.uint8, device=device)
        memory[2:].copy_(x.view(torch.uint8).flatten())
        if device == "cpu":
            shifted = torch.frombuffer(memory.numpy(), dtype=F32, offset=2).view(3, 8)
            got = with_gradients(ours(op, device))(shifted)
            for actual, expected in zip(got, with_gradients(ours(op, device))(x), strict=True):
                assert torch.equal(actual, expected)
            continue
        shifted = torch.as_tensor(Floats(memory.data_ptr() + 2, 24), device=device).view(3, 8)
        weight = torch.as_tensor(Floats(memory.data_ptr() + 2, 8), device=device)
        with pytest.raises(RuntimeError, match="input must lie at a multiple of its element size"):
            ours(op, device)(shifted)
        with pytest.raises(RuntimeError, match="input must lie at a multiple of its element size"):
            ours(op, device)(shifted[:, ::2])
        with pytest.raises(RuntimeError, match="weight must lie at a multiple of its element size"):
            ours(op, device)(x.to(device), weight)


class Floats:
    """float32 at any address of the GPU, for torch.as_tensor to read."""

    def __init__(self, address: int, count: int) -> None:
        data = {"data": (address, False), "shape": (count,), "typestr": "<f4", "version": 3}
        self.__cuda_array_interface__ = data


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_33_nan_and_inf_stay_in_their_row(device, bad):
    for op in FOUR:
        x = names(device)["Y"]
        clean = ours(op, device)(x)[0]
        with_bad = x.clone()
        with_bad[1, 2, 3] = bad
        got = ours(op, device)(with_bad)[0]
        assert not got[1, 2].isfinite().all()
        got[1, 2] = clean[1, 2]
        assert torch.equal(got, clean), f"{op}"


@pytest.mark.parametrize(("dtype", "value"), [(F16, 65504.0), (F32, 1e30), (BF16, 3e38)])
def test_34_35_constant_rows_of_large_numbers(device, dtype, value):
    """The variance overflows, or is a difference of two large numbers, in a formula that is
    transformed: a layer norm is exactly the bias, an RMS norm a row of ones."""
    for op in FOUR:
        x = torch.full((3, 1000), value, dtype=dtype, device=device)
        bias = {"bias": torch.full((1000,), 0.5, dtype=dtype, device=device)} if op.centred else {}
        got = ours(op, device)(x, **bias)[0]
        expected = torch.full_like(x, 0.5 if op.centred else 1.0)
        torch.testing.assert_close(got, expected, rtol=0 if op.centred else 1e-6, atol=0)


def test_36_offset_far_above_the_deviation(device):
    """E[x^2] - E[x]^2 errs by 0.12 here."""
    for op in (op for op in FOUR if op.centred):
        g = torch.Generator().manual_seed(0)
        x = (1e4 + 1e-2 * torch.randn(8, 1000, generator=g, dtype=F64)).to(device, F32)
        got, truth = ours(op, device)(x, eps=1e-9)[0], theirs(op)(x, eps=1e-9)[0]
        assert (got - truth).abs().max() < 5e-6
