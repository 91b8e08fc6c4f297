"""The L2 norm, the smallest variant: ``csrc/l2_norm.cpp`` is the C++ half."""

from __future__ import annotations

import math

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import reference
from ._arguments import as_float, check_eps, check_rows, check_tensor
from ._ops import register_fake
from ._options import compute_dtype
from ._variant import Variant

_OP = "fused_l2_norm"


def fused_l2_norm(input: Tensor, eps: float = 1e-6) -> Tensor:
    """L2 norm: ``input / sqrt(sum(input²) + eps)`` over the last dimension.

    Linear attention (Gated DeltaNet, Kimi Linear) applies it to queries and keys. Unlike
    ``torch.nn.functional.normalize``, which divides by ``max(‖input‖, eps)``, it is smooth.

    Args:
        input: ``[..., cols]``, float16, bfloat16, float32 or float64, on CPU or CUDA. Rows may be
            strided; any other layout is copied once.
        eps: added to the sum of squares before the root; finite.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The arithmetic is in float32
        (float64 for float64) and the result is rounded once.

    Raises:
        RuntimeError: ``input`` has no dimension, or a layout or dtype that no kernel takes.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite.
    """
    if has_torch_function_unary(input):
        return handle_torch_function(fused_l2_norm, (input,), input, eps)
    check_tensor(_OP, "input", input)
    output: Tensor = _L2_NORM((input,), (as_float(_OP, "eps", eps),))
    return output


def _check(input: Tensor, eps: float) -> None:
    check_eps(_OP, eps)
    check_rows(_OP, "input", input)


def _fake_forward(input: Tensor, eps: float, save_stats: bool) -> tuple[Tensor, Tensor]:
    _check(input, eps)
    rows = math.prod(input.shape[:-1])
    stats = input.new_empty((1, rows), dtype=compute_dtype(input))
    return input.new_empty(input.shape), stats if save_stats else input.new_empty(0)


def _fake_backward(grad_output: Tensor, input: Tensor, stats: Tensor) -> Tensor:
    return input.new_empty(input.shape)


register_fake("l2_norm_forward", _fake_forward)
register_fake("l2_norm_backward", _fake_backward)

_L2_NORM = Variant("l2_norm", reference.fused_l2_norm, _check)
