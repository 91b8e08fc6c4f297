"""Post-norm, addition and pre-norm: ``csrc/post_add_pre_rms_norm.cpp`` is the C++ half.

Calls that its kernels cannot take go to the two ops ``fused_rms_norm`` and
``fused_add_rms_norm``, one after the other, with the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ._arguments import (
    as_float,
    check_bools,
    check_eps,
    check_extras,
    check_options,
    check_parameter,
    check_residual,
    check_rounding,
    check_rows,
    check_tensor,
)
from ._norm_formula import normalize_backward
from ._ops import register_fake
from ._options import BackwardOptions, Rounding, compute_dtype, machine_eps
from ._variant import Variant
from .functional import fused_add_rms_norm, fused_rms_norm

_OP = "fused_post_add_pre_rms_norm"


def fused_post_add_pre_rms_norm(
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None = None,
    pre_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``residual + rms_norm(input)``, and that sum as the new residual.

    This stands between two blocks of a model whose blocks have a norm at both ends (Gemma 2 and 3):
    the norm after one block, the addition, and the norm before the next. The results are bit
    for bit those of :func:`fused_rms_norm` and then :func:`fused_add_rms_norm`.

    Args:
        input: ``[..., cols]``, float16, bfloat16, float32 or float64, on CPU or CUDA: the output of
            the block. Rows may be strided; any other layout is copied once.
        residual: shape and device of ``input``; its dtype, or float32 beside a 16-bit ``input``.
        post_weight: ``[cols]``, of the norm of ``input``; ``None`` means 1. Fast in the dtype of
            ``input`` or, beside 16 bits, float32; any other of the four is converted in each call,
            and its gradient back.
        pre_weight: likewise, of the norm of the sum.
        eps: of both norms, added to the mean square before the root; finite. ``None``: the machine
            epsilon of the arithmetic (float32, or float64 for float64).
        zero_centered: multiply by ``1 + weight``, for weights that are stored minus one, as Gemma's
            are. The 1 is added in the precision of the arithmetic.
        rounding: ``"once"``: each norm rounds only its output to 16 bits. ``"before_weight"``: the
            normalised values are first rounded to the dtype of ``input``, as in
            ``weight * normalized.to(input.dtype)``. For derivatives, rounding is the identity.
        residual_dtype: dtype of the sum: that of ``residual``, or float32 beside 16-bit rows.

    Returns:
        ``(output, sum)``, contiguous and of the shape of ``input``. The norm of ``input`` is
        rounded to its dtype before the addition, and the sum to its own; the statistics are those
        of the rounded sum. For backward ``input``, the sum and two numbers for each row are saved.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite, or ``rounding`` is neither of the two.

    Source: Gemma Team 2024 (https://arxiv.org/abs/2408.00118).
    """
    tensors = input, residual, post_weight, pre_weight
    keywords: dict[str, Any] = {
        "zero_centered": zero_centered,
        "rounding": rounding,
        "residual_dtype": residual_dtype,
    }
    if has_torch_function(tensors):
        return handle_torch_function(
            fused_post_add_pre_rms_norm, tensors, *tensors, eps, **keywords
        )
    check_tensor(_OP, "input", input)
    check_tensor(_OP, "residual", residual)
    check_bools(_OP, zero_centered=zero_centered)
    check_rounding(_OP, rounding)
    check_options(_OP, 0.0, None, residual_dtype, False)
    eps = machine_eps(input) if eps is None else as_float(_OP, "eps", eps)
    options = eps, zero_centered, rounding, residual_dtype, residual.dtype
    outputs: tuple[Tensor, Tensor] = _POST_ADD_PRE_RMS_NORM(tensors, options)
    return outputs


class FusedPostAddPreRMSNorm(nn.Module):
    """:func:`fused_op.fused_post_add_pre_rms_norm` with its weights.

    Args:
        hidden_size: columns of the input.
        eps: of both norms; ``None``: as in the function.
        elementwise_affine: False: no weights.
        device: of the weights.
        dtype: of the weights; beside a 16-bit input float32 costs nothing.
        zero_centered: multiply by ``1 + weight``; the weights are initialised to 0.
        rounding: as in the function.
        residual_dtype: as in the function.

    Shape:
        Two tensors ``[..., hidden_size]``, the input and the residual, to two of the same.

    Raises:
        TypeError, ValueError: as the function.
    """

    post_weight: nn.Parameter | None
    pre_weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
        rounding: Rounding = "once",
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        """See the class."""
        super().__init__()
        self.options: dict[str, Any] = {
            "zero_centered": zero_centered,
            "rounding": rounding,
            "residual_dtype": residual_dtype,
        }
        check_extras(type(self).__name__, **self.options)
        if eps is not None:
            check_eps(type(self).__name__, eps)
        self.hidden_size, self.eps = hidden_size, eps
        for name in ("post_weight", "pre_weight"):
            weight = torch.empty(hidden_size, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both factors to 1."""
        for weight in self.parameters():
            nn.init.constant_(weight, 0.0 if self.options["zero_centered"] else 1.0)

    def extra_repr(self) -> str:
        """The arguments of the constructor that are not the default."""
        shown = [f"{self.hidden_size}, eps={self.eps}"]
        if self.pre_weight is None:
            shown.append("elementwise_affine=False")
        for (name, value), default in zip(self.options.items(), (False, "once", None), strict=True):
            if value != default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum as the new residual."""
        weights = self.post_weight, self.pre_weight
        return fused_post_add_pre_rms_norm(input, residual, *weights, self.eps, **self.options)


def _gradients(grads: Any, saved: Any, options: Any, wanted: Any) -> Any:
    """The backward of the two ops, or only of the first if the output is not used."""
    grad_output, grad_sum = grads
    input, sum = saved["input"], saved["sum"]
    post_weight, pre_weight = saved["post_weight"], saved["pre_weight"]
    eps, zero_centered, rounding, _, residual_dtype = options
    wants_input, wants_residual, wants_post, wants_pre = wanted

    def of_norm(weight: Tensor | None, residual_dtype: torch.dtype | None) -> BackwardOptions:
        param_dtype = input.dtype if weight is None else weight.dtype
        return BackwardOptions(
            *("rms_norm", 1, eps, zero_centered, rounding, 0.0, False, input.dtype),
            *(residual_dtype, param_dtype, input.dtype, False),
        )

    if grad_output is None:
        branch, grad_residual = grad_sum.to(input.dtype), grad_sum.to(residual_dtype)
        grad_pre = torch.zeros_like(pre_weight) if wants_pre else None
    else:
        branch, grad_residual, grad_pre, _ = normalize_backward(
            (grad_output, grad_sum, sum, pre_weight, None, None, None),
            of_norm(pre_weight, residual_dtype),
            (wants_input or wants_post, wants_residual, wants_pre, False),
        )
        if wants_residual and residual_dtype == input.dtype:
            grad_residual = branch if grad_residual is None else grad_residual
    grad_input = grad_post = None
    if wants_input or wants_post:
        grad_input, _, grad_post, _ = normalize_backward(
            (branch, None, input, post_weight, None, None, None),
            of_norm(post_weight, None),
            (wants_input, False, wants_post, False),
        )
    found = grad_input, grad_residual, grad_post, grad_pre
    return tuple(grad if w else None for grad, w in zip(found, wanted, strict=True))


def _formula(
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The two ops, each of which picks its own route."""
    both: dict[str, Any] = {"zero_centered": zero_centered, "rounding": rounding}
    branch = fused_rms_norm(input, post_weight, eps, **both)
    return fused_add_rms_norm(branch, residual, pre_weight, eps, residual_dtype=sum_dtype, **both)


def _check(
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
    *_: Any,
) -> None:
    check_eps(_OP, eps)
    check_rows(_OP, "input", input)
    check_residual(_OP, residual, input, sum_dtype)
    check_parameter(_OP, "post_weight", post_weight, input.shape[-1])
    check_parameter(_OP, "pre_weight", pre_weight, input.shape[-1])


def _fake_forward(
    input: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
    sum_dtype: torch.dtype | None,
    save_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(input, residual, post_weight, pre_weight, eps, zero_centered, rounding, sum_dtype)
    rows = math.prod(input.shape[:-1])
    stats = input.new_empty((2, rows), dtype=compute_dtype(input))
    return (
        input.new_empty(input.shape),
        input.new_empty(input.shape, dtype=sum_dtype or residual.dtype),
        stats if save_stats else input.new_empty(0),
    )


def _fake_backward(
    grad_output: Tensor | None,
    grad_sum: Tensor | None,
    input: Tensor,
    sum: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    stats: Tensor,
    zero_centered: bool,
    rounding: str,
    residual_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def of_weight(weight: Tensor | None) -> Tensor:
        return input.new_empty(input.shape[-1:], dtype=(input if weight is None else weight).dtype)

    gradients = (
        input.new_empty(input.shape),
        input.new_empty(input.shape, dtype=residual_dtype),
        of_weight(post_weight),
        of_weight(pre_weight),
    )
    made = [g if w else input.new_empty(0) for g, w in zip(gradients, wanted, strict=True)]
    return made[0], made[1], made[2], made[3]


register_fake("post_add_pre_rms_norm_forward", _fake_forward)
register_fake("post_add_pre_rms_norm_backward", _fake_backward)

_POST_ADD_PRE_RMS_NORM = Variant("post_add_pre_rms_norm", _formula, _check, gradients=_gradients)
