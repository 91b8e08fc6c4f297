"""PyTorch's own samples of layer_norm and rms_norm, given to the functions of the same names here.

Catches a shape, an absent argument, a kind of derivative or an error that PyTorch's tests think of
and ours do not. The samples are internal to torch.testing and change with its version.
"""

import re
from functools import partial

import pytest
import torch
from torch import Tensor

import fused_op
from tests.ops import DEVICES

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
from torch.testing._internal.common_methods_invocations import op_db

OP_INFOS = {
    name: next(op for op in op_db if op.name == f"nn.functional.{name}")
    for name in ("layer_norm", "rms_norm")
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

pytestmark = pytest.mark.parametrize("name", OP_INFOS)


def samples_of(name: str, device: str, dtype: torch.dtype) -> list:
    samples = list(OP_INFOS[name].sample_inputs(device, dtype, requires_grad=True))
    assert samples
    return samples


def tensors_of(sample) -> list[Tensor]:
    return [t for t in (sample.input, *sample.args) if isinstance(t, Tensor) and t.numel() > 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_values_and_gradients(name, device, dtype) -> None:
    for sample in samples_of(name, device, dtype):
        results = []
        for function in (getattr(fused_op, name), OP_INFOS[name].op):
            output = function(sample.input, *sample.args, **sample.kwargs)
            leaves = tensors_of(sample)
            grads = torch.autograd.grad(output.float().cos().sum(), leaves) if leaves else ()
            results.append((output, *grads))
        # Rows of a few elements, so gradients are what is left of larger terms: 1e3 roundings of
        # float32, some roundings of 16 bits, in which PyTorch may round in between, too.
        tolerance = {8: 1e-7, 4: 1e-4, 2: 2e-2}[dtype.itemsize]
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "mode",
    [
        partial(torch.autograd.gradcheck, check_batched_grad=True),
        partial(
            torch.autograd.gradcheck,
            check_forward_ad=True,
            check_batched_forward_grad=True,
            check_undefined_grad=False,
        ),
        partial(torch.autograd.gradgradcheck, check_batched_grad=True),
        partial(torch.autograd.gradgradcheck, check_fwd_over_rev=True),
    ],
    ids=["reverse", "forward", "second", "forward-over-reverse"],
)
def test_derivatives(name, device, mode) -> None:
    for sample in samples_of(name, device, torch.float64):

        def function(*tensors: Tensor, sample=sample) -> Tensor:
            given = iter(tensors)
            input, *args = (
                next(given) if isinstance(a, Tensor) else a for a in (sample.input, *sample.args)
            )
            return getattr(fused_op, name)(input, *args, **sample.kwargs)

        assert mode(function, [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)])


@pytest.mark.parametrize("device", DEVICES)
def test_errors(name, device) -> None:
    """The exception's type is PyTorch's, and its sentence contains PyTorch's phrase."""
    info = OP_INFOS[name]
    if info.error_inputs_func is None:
        pytest.skip(f"PyTorch lists no mistakes for {name}")
    for error in info.error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type) as caught:
            getattr(fused_op, name)(sample.input, *sample.args, **sample.kwargs)
        assert re.search(error.error_regex, str(caught.value))
