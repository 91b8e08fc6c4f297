"""The norms with the signatures of ``torch.nn.functional``, for search and replace."""

from __future__ import annotations

from torch import Tensor

from ._arguments import as_normalized_shape
from ._options import Given, Shape
from ._routes import overridable, run
from .functional import _NormFunction


@overridable
def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """:func:`fused_layer_norm` with the signature of ``torch.nn.functional.layer_norm``.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
        normalized_shape: the last dimensions, normalised together.
        weight: ``normalized_shape``, float16, bfloat16, float32 or float64; ``None`` means 1.
        bias: like ``weight``; ``None`` means 0.
        eps: added to the variance before the root; finite.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError, TypeError, ValueError: what PyTorch's function raises, with its sentence.
    """
    if normalized_shape is None:
        as_normalized_shape("layer_norm", input, normalized_shape)
    given: Given = (
        "layer_norm", eps, normalized_shape, False, "once", 0.0, True, None, None, False,
        False, False,
    )  # fmt: skip
    output: Tensor = run(layer_norm, _NormFunction, given, (input, None, weight, bias, None))
    return output


@overridable
def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """:func:`fused_rms_norm` with the signature of ``torch.nn.functional.rms_norm``.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, on CPU or CUDA.
        normalized_shape: the last dimensions, normalised together.
        weight: ``normalized_shape``, float16, bfloat16, float32 or float64; ``None`` means 1.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64).

    Returns:
        A tensor of the shape and dtype of ``input``: contiguous, or channels-last like it.

    Raises:
        RuntimeError, TypeError, ValueError: what PyTorch's function raises, with its sentence.
    """
    if normalized_shape is None:
        as_normalized_shape("rms_norm", input, normalized_shape)
    given: Given = (
        "rms_norm", eps, normalized_shape, False, "once", 0.0, True, None, None, False,
        False, False,
    )  # fmt: skip
    output: Tensor = run(rms_norm, _NormFunction, given, (input, None, weight, None, None))
    return output
