"""The formulas of ``reference.py``, for calls that the kernels cannot take.

Values, errors and memory format are those of a call of the kernels.
"""

from __future__ import annotations

from ._contexts import unrecorded
from ._norm_formula import Normalize, compute, contiguous, normalize
from ._ops import keeps_format
from ._options import Options, Outputs, Tensors, normalized_ndim


def compose(tensors: Tensors, options: Options, normalize: Normalize = normalize) -> Outputs:
    """The call in PyTorch operations. ``normalize`` replaces the formula of the norm."""
    input, residual, weight, bias, rng_state = tensors
    ndim = normalized_ndim(options, weight, bias)
    output, sum = compute(
        options.norm,
        input,
        residual=residual,
        weight=weight,
        bias=bias,
        rng_state=rng_state,
        eps=options.eps,
        normalized_shape=unrecorded(lambda: input.shape[input.dim() - ndim :]),
        zero_centered=options.zero_centered,
        rounding=options.rounding,
        dropout_p=options.dropout_p,
        output_dtype=options.out_dtype,
        sum_dtype=options.residual_dtype,
        normalize=normalize,
    )
    if sum is not None:
        return contiguous(output), contiguous(sum)
    if options.norm == "rms_norm" and keeps_format(input):
        return output  # the operations have kept it
    return contiguous(output)
