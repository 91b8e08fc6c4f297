"""A call in PyTorch's own norms, for ``torch.jit.trace`` and ONNX.

Both keep operators for later: for programs that do not import this package, and for gradients that
nobody has asked for yet. ``fused_op::norm_forward`` serves neither, since its derivative belongs to
``_NormFunction`` and not to the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._contexts import is_recording, unrecorded
from ._formulas import compose
from ._norm_formula import Affine, apply_affine
from ._options import Norm, Options, Outputs, Tensors


def record(tensors: Tensors, options: Options) -> Outputs:
    """The call while ``torch.jit.trace`` records, or ``torch.onnx.export`` by either exporter."""
    _, _, weight, bias, _ = tensors
    parameters = [t for t in (weight, bias) if t is not None]
    if options.main_grad and torch.is_grad_enabled() and any(t.requires_grad for t in parameters):
        raise RuntimeError(
            "fused_op: torch.jit.trace does not record that gradients are added to main_grad: "
            "trace under torch.no_grad(), or set fuse_wgrad_accumulation to False"
        )
    if is_recording() and torch.onnx.is_in_onnx_export():
        # By the older exporter, which knows no rms_norm, and no layer_norm of sizes that are not
        # constants.
        if options.norm == "layer_norm" and parameters:
            return compose(tensors, options, _by_operator)
        return compose(tensors, options, _by_arithmetic)
    return compose(tensors, options, _by_operator)


def _by_operator(norm: Norm, x: Tensor, ndim: int, eps: float, affine: Affine) -> Tensor:
    """``normalize`` by ``aten::layer_norm`` or ``aten::rms_norm``."""
    factor, offset, round_to = affine
    if round_to is not None:
        return apply_affine(affine, _by_operator(norm, x, ndim, eps, Affine(None, None, None)))
    if factor is not None or offset is not None:
        shape = unrecorded(lambda: list(x.shape[x.dim() - ndim :]))
    else:  # the sizes, and how many come before them, may be others in each later call
        shape = [x.size(i) for i in range(-ndim, 0)]
    if norm == "layer_norm":
        return torch.layer_norm(x, shape, factor, offset, eps)
    return torch.rms_norm(x, shape, factor, eps)


def _by_arithmetic(norm: Norm, x: Tensor, ndim: int, eps: float, affine: Affine) -> Tensor:
    """``normalize`` in the few operations that PyTorch's own norms become in ONNX."""
    dims = list(range(-ndim, 0))
    if norm == "layer_norm":
        x = x - x.mean(dims, keepdim=True)
    normalized = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return apply_affine(affine, normalized)
