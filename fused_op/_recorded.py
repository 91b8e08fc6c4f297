"""A call in PyTorch's own norms: what ``torch.jit.trace`` records, and what becomes ONNX.

Both keep operators for later: for programs that do not import this package, and for gradients that
nobody has asked for yet. ``fused_op::norm_forward`` serves neither, since its derivative belongs to
``_NormFunction`` and not to the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from . import reference
from ._ops import fake_norm_forward
from ._routes import Call, Tensors, composite
from .reference import Norm, unrecorded


def record(tensors: Tensors, call: Call) -> Any:
    """The call while ``torch.jit.trace`` records, by itself or for the older exporter of ONNX."""
    _, _, weight, bias, _ = tensors
    norm, *_, main_grad = call
    parameters = [t for t in (weight, bias) if t is not None]
    if main_grad and torch.is_grad_enabled() and any(t.requires_grad for t in parameters):
        raise RuntimeError(
            "fused_op: torch.jit.trace does not record that gradients are added to main_grad: "
            "trace under torch.no_grad(), or set fuse_wgrad_accumulation to False"
        )
    if torch.onnx.is_in_onnx_export() and (norm == "rms_norm" or not parameters):
        # That exporter knows no rms_norm, and no layer_norm of sizes that are not constants.
        return composite(tensors, call, _by_arithmetic)
    return composite(tensors, call, _by_operator)


def _by_operator(
    norm: Norm, x: Tensor, ndim: int, factor: Tensor | None, offset: Tensor | None, eps: float
) -> Tensor:
    """``reference.normalize`` by ``aten::layer_norm`` or ``aten::rms_norm``."""
    if factor is not None or offset is not None:
        shape = unrecorded(lambda: list(x.shape[x.dim() - ndim :]))
    else:  # the sizes, and how many come before them, may be others in each later call
        shape = [x.size(i) for i in range(-ndim, 0)]
    if norm == "layer_norm":
        return torch.layer_norm(x, shape, factor, offset, eps)
    return torch.rms_norm(x, shape, factor, eps)


def _by_arithmetic(
    norm: Norm, x: Tensor, ndim: int, factor: Tensor | None, offset: Tensor | None, eps: float
) -> Tensor:
    """``reference.normalize`` in the few operations that PyTorch's own norms become in ONNX."""
    mean, rstd = _statistics(norm, x, ndim, eps)
    output = (x if mean is None else x - mean) * rstd
    output = output if factor is None else output * factor
    return output if offset is None else output + offset


def _statistics(norm: Norm, x: Tensor, ndim: int, eps: float) -> tuple[Tensor | None, Tensor]:
    dims = list(range(-ndim, 0))
    mean = x.mean(dims, keepdim=True) if norm == "layer_norm" else None
    centred = x if mean is None else x - mean
    return mean, (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _decompose_norm_forward(
    norm: Norm,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    normalized_ndim: int,
    eps: float,
    zero_centered: bool,
    dropout_p: float,
    output_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    affine = weight if weight is not None else bias
    ndim = normalized_ndim or (1 if affine is None else affine.dim())
    call: Call = (
        norm, ndim, eps, zero_centered, dropout_p, output_dtype, sum_dtype, False, False,
    )  # fmt: skip
    outputs = composite((input, residual, weight, bias, rng_state), call, _by_operator)
    output, sum = (outputs, None) if residual is None else outputs
    absent = input.new_empty(0)
    stats = absent
    if save_stats:
        x = (input if sum is None else sum).to(reference.compute_dtype(input))
        mean, rstd = _statistics(norm, x, ndim, eps)
        rows = (rstd,) if mean is None else (mean, rstd)
        stats = torch.stack(rows).reshape(len(rows), -1)
    return output, absent if sum is None else sum, stats


# The exporter of ONNX for torch.export looks in PyTorch's table for what it does not know. Fake
# tensors look there too, unless the op has an entry under "meta".
register_decomposition(torch.ops.fused_op.norm_forward.default)(_decompose_norm_forward)
register_decomposition(torch.ops.fused_op.norm_forward.default, type="meta")(fake_norm_forward)
