"""The gated RMS norm, as a function and a module: ``csrc/gated_rms_norm.cpp`` is the C++ half."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from . import reference
from ._arguments import (
    as_float,
    as_int,
    check_bools,
    check_eps,
    check_parameter,
    check_rounding,
    check_rows,
    check_tensor,
)
from ._ops import register_fake
from ._options import Activation, Rounding, compute_dtype, machine_eps
from ._sizes import differ
from ._variant import Variant

_OP = "fused_gated_rms_norm"
_ACTIVATIONS = ("silu", "sigmoid")


def fused_gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    group_size: int | None = None,
    activation: Activation = "silu",
    gate_first: bool = False,
    zero_centered: bool = False,
    rounding: Rounding = "once",
) -> Tensor:
    """RMS norm with a gate: ``rms_norm(input) * weight * φ(gate)`` over the last dimension.

    It follows linear attention and state-space layers (Qwen3-Next, Kimi Linear, Mamba 2 and models
    built from it).

    Args:
        input: ``[..., cols]``, float16, bfloat16, float32 or float64, on CPU or CUDA. Rows may be
            strided; any other layout is copied once.
        gate: shape and device of ``input``; any of these dtypes, but float64 only beside float64. A
            view of a wider projection is read in place, too.
        weight: ``[cols]``; ``None`` means 1. Fast in the dtype of ``input``, or in float32 beside a
            16-bit ``input``. Any other dtype is converted in each call, and its gradient converted
            back.
        eps: added to the mean square before the root; finite. ``None``: the machine epsilon of the
            arithmetic (float32, or float64 for float64), as in ``torch.nn.functional.rms_norm``.
        group_size: columns that are normalised together, each group by itself; it divides ``cols``.
            Default: all.
        activation: φ, ``"silu"`` or ``"sigmoid"``, in the precision of the arithmetic.
        gate_first: ``rms_norm(input * φ(gate)) * weight``, as in Mamba 2. The product is not
            rounded.
        zero_centered: multiply by ``1 + weight``, for weights that are stored minus one. The 1 is
            added in the precision of the arithmetic.
        rounding: ``"once"``: only the output is rounded to 16 bits. ``"before_weight"``: the
            normalised values are first rounded to the dtype of ``input``, and their product with a
            weight of 16 bits is too, as in ``weight * normalized.to(input.dtype)``; then comes the
            gate. For derivatives, rounding is the identity; it changes nothing in float32 and
            float64.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The arithmetic is in float32
        (float64 for float64). For backward ``input``, ``gate`` and a number for each group are
        saved.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite, or ``activation`` or ``rounding`` has another
            value.

    Source: Dao and Gu 2024 (https://arxiv.org/abs/2405.21060), its ``RMSNormGated``.
    """
    tensors = input, gate, weight
    keywords: dict[str, Any] = {
        "group_size": group_size,
        "activation": activation,
        "gate_first": gate_first,
        "zero_centered": zero_centered,
        "rounding": rounding,
    }
    if has_torch_function(tensors):
        return handle_torch_function(fused_gated_rms_norm, tensors, *tensors, eps, **keywords)
    check_tensor(_OP, "input", input)
    check_tensor(_OP, "gate", gate)
    group_size = check_options(_OP, **keywords)
    eps = machine_eps(input) if eps is None else as_float(_OP, "eps", eps)
    # None stays None: torch.compile would make code for the number of columns.
    options = eps, group_size, activation, gate_first, zero_centered, rounding
    output: Tensor = _GATED_RMS_NORM(tensors, options)
    return output


def check_options(
    op: str, group_size: Any, activation: Any, rounding: Any, **bools: Any
) -> int | None:
    """Check the arguments that are not tensors. Returns ``group_size``, as an int."""
    check_bools(op, **bools)
    check_rounding(op, rounding)
    if not isinstance(activation, str):
        found = type(activation).__name__
        raise TypeError(f"{op}: argument 'activation' must be str, not {found}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{op}: activation must be 'silu' or 'sigmoid', got {activation!r}")
    return None if group_size is None else as_int(op, "group_size", group_size)


class FusedGatedRMSNorm(nn.Module):
    """:func:`fused_op.fused_gated_rms_norm` with its weight.

    Args:
        hidden_size: columns of the input.
        eps: added to the mean square before the root; ``None``: as in the function.
        elementwise_affine: False: no weight.
        device: of the weight.
        dtype: of the weight; beside a 16-bit input float32 costs nothing.
        group_size: as in the function.
        activation: as in the function.
        gate_first: as in the function.
        zero_centered: multiply by ``1 + weight``; the weight is initialised to 0.
        rounding: as in the function.

    Shape:
        Two tensors ``[..., hidden_size]``, the input and the gate, to one of the input's.

    Raises:
        TypeError, ValueError: as the function, and if ``group_size`` does not divide
            ``hidden_size``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        group_size: int | None = None,
        activation: Activation = "silu",
        gate_first: bool = False,
        zero_centered: bool = False,
        rounding: Rounding = "once",
    ) -> None:
        """See the class."""
        super().__init__()
        name = type(self).__name__
        self.options: dict[str, Any] = {
            "group_size": group_size,
            "activation": activation,
            "gate_first": gate_first,
            "zero_centered": zero_centered,
            "rounding": rounding,
        }
        group_size = self.options["group_size"] = check_options(name, **self.options)
        if eps is not None:
            check_eps(name, eps)
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise ValueError(
                f"{name}: group_size must divide hidden_size, {hidden_size}, got {group_size}"
            )
        self.hidden_size, self.eps = hidden_size, eps
        weight = torch.empty(hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight) if elementwise_affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factor to 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.options["zero_centered"] else 1.0)

    def extra_repr(self) -> str:
        """The arguments of the constructor that are not the default."""
        defaults = None, "silu", False, False, "once"
        shown = [f"{self.hidden_size}, eps={self.eps}"]
        if self.weight is None:
            shown.append("elementwise_affine=False")
        for (name, value), default in zip(self.options.items(), defaults, strict=True):
            if value != default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate the input."""
        return fused_gated_rms_norm(input, gate, self.weight, self.eps, **self.options)


def _formula(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *options: Any) -> Any:
    names = "group_size", "activation", "gate_first", "zero_centered", "rounding"
    keywords: Any = dict(zip(names, options, strict=True))
    return reference.fused_gated_rms_norm(input, gate, weight, eps, **keywords)


def _check(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    *options: Any,
) -> None:
    check_eps(_OP, eps)
    check_rows(_OP, "input", input)
    check_rows(_OP, "gate", gate)
    if differ(gate.shape, input.shape):
        raise RuntimeError(
            f"{_OP}: gate must have the shape of input, {list(input.shape)}, got {list(gate.shape)}"
        )
    if (gate.dtype == torch.float64) != (input.dtype == torch.float64):
        raise RuntimeError(
            f"{_OP}: gate of {gate.dtype} does not fit input of {input.dtype}: both or none must "
            "be float64"
        )
    cols = input.shape[-1]
    check_parameter(_OP, "weight", weight, cols)
    if group_size is not None and group_size != cols and (group_size <= 0 or cols % group_size):
        raise RuntimeError(
            f"{_OP}: group_size must divide the last dimension of input, {cols}, got {group_size}"
        )


def _fake_forward(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    activation: str,
    gate_first: bool,
    zero_centered: bool,
    rounding: str,
    save_stats: bool,
) -> tuple[Tensor, Tensor]:
    _check(input, gate, weight, eps, group_size)
    cols = input.shape[-1]
    groups = 1 if group_size is None or group_size == cols else cols // group_size
    rows = math.prod(input.shape[:-1]) * groups
    stats = input.new_empty((1, rows), dtype=compute_dtype(input))
    return input.new_empty(input.shape), stats if save_stats else input.new_empty(0)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    group_size: int | None,
    activation: str,
    gate_first: bool,
    zero_centered: bool,
    rounding: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = input.new_empty(0)
    grad_weight = nothing
    if wanted[2]:
        dtype = input.dtype if weight is None else weight.dtype
        grad_weight = input.new_empty(input.shape[-1:], dtype=dtype)
    return (
        input.new_empty(input.shape) if wanted[0] else nothing,
        gate.new_empty(gate.shape) if wanted[1] else nothing,
        grad_weight,
    )


register_fake("gated_rms_norm_forward", _fake_forward)
register_fake("gated_rms_norm_backward", _fake_backward)

_GATED_RMS_NORM = Variant("gated_rms_norm", _formula, _check)
