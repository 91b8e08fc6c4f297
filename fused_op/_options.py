"""A call as two values: its tensors, and its options.

A call passes through every layer in this form. ``fused_op_cuda`` reads the tuples by position;
``csrc/python_arguments.cpp`` lists the positions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["layer_norm", "rms_norm"]
Rounding = Literal["once", "before_weight"]
Activation = Literal["silu", "sigmoid"]  # of a gate
PixelActivation = Literal["silu"] | None  # behind a norm over channels
Shape = int | Sequence[int]  # of normalized_shape

# input, residual, weight, bias, rng_state. A plain tuple: one is made for every call, and a named
# tuple would take another 0.2 us.
Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Outputs = Tensor | tuple[Tensor, Tensor]  # output, or (output, sum) with a residual
# output, sum, stats
ForwardResults = tuple[Tensor, Tensor | None, Tensor | None]

# grad_output, grad_sum, x, weight, bias, stats, rng_state
BackwardTensors = tuple[
    Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]
# Of input, residual, weight and bias.
Wanted = tuple[bool, bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Options(NamedTuple):
    """The arguments of a public function that are not tensors, as the user passed them.

    C++ checks the usual ones, ``checked`` in ``_arguments.py`` the others.
    """

    norm: Norm
    eps: float | None  # None: that of machine_eps()
    normalized_shape: Shape | None = None
    zero_centered: bool = False
    rounding: Rounding = "once"
    dropout_p: float = 0.0
    training: bool = True
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    memory_efficient: bool = False
    main_grad: bool = False  # add the gradients of parameters to their main_grad
    is_checked: bool = False


# The fields of Options. A call that goes straight to a kernel passes a plain tuple: making an
# Options takes 0.5 us, the whole call without a gradient 2 us.
Given = tuple[
    Norm,
    float | None,
    Shape | None,
    bool,
    Rounding,
    float,
    bool,
    torch.dtype | None,
    torch.dtype | None,
    bool,
    bool,
    bool,
]


class BackwardOptions(NamedTuple):
    """The arguments of a backward that are not tensors. Forward knows all of them."""

    norm: Norm
    normalized_ndim: int
    eps: float | None  # for the formula; kernels read stats
    zero_centered: bool
    rounding: Rounding
    dropout_p: float
    x_is_output: bool
    input_dtype: torch.dtype
    residual_dtype: torch.dtype | None
    param_dtype: torch.dtype
    output_dtype: torch.dtype
    main_grad: bool

    def shares_gradient(self) -> bool:
        """Whether input and residual share one gradient."""
        return shares_gradient(self.dropout_p, self.input_dtype, self.residual_dtype)


def backward_options(tensors: Tensors, options: Options, x_is_output: bool) -> BackwardOptions:
    """The options of the backward that belongs to a forward."""
    input, residual, weight, bias, _ = tensors
    dtype = input.dtype
    # If weight and bias differ in dtype, autograd rounds each gradient to its own.
    affine = weight if weight is not None else bias
    param_dtype = dtype if affine is None else affine.dtype
    if bias is not None and bias.dtype is not param_dtype:
        param_dtype = compute_dtype(input)
    return BackwardOptions(
        norm=options.norm,
        normalized_ndim=normalized_ndim(options, weight, bias),
        eps=options.eps,
        zero_centered=options.zero_centered,
        rounding=options.rounding,
        dropout_p=options.dropout_p,
        x_is_output=x_is_output,
        input_dtype=dtype,
        residual_dtype=None if residual is None else residual.dtype,
        param_dtype=param_dtype,
        output_dtype=options.out_dtype or dtype,
        main_grad=options.main_grad,
    )


def op_name(norm: str, adds: bool) -> str:
    """The public function that a user called."""
    return f"fused_add_{norm}" if adds else f"fused_{norm}"


def normalized_ndim(options: Options, weight: Tensor | None, bias: Tensor | None) -> int:
    """How many of the last dimensions are normalised together."""
    shape = options.normalized_shape
    if shape is None:
        return default_ndim(weight, bias)
    return 1 if isinstance(shape, int) else len(shape)


def default_ndim(weight: Tensor | None, bias: Tensor | None) -> int:
    """How many dimensions are normalised by default: the weight's, else the bias's, else 1."""
    affine = weight if weight is not None else bias
    return 1 if affine is None else affine.dim()


def shares_gradient(
    dropout_p: float, input_dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> bool:
    """Whether input and residual share one gradient."""
    return dropout_p == 0 and residual_dtype in (None, input_dtype)


def rounds_first(rounding: Rounding, input_dtype: torch.dtype) -> bool:
    """Whether normalised values are rounded before the weight: 32 bits need no rounding."""
    return rounding == "before_weight" and input_dtype.itemsize == 2


def machine_eps(input: Tensor) -> float:
    """The value of ``eps=None``."""
    return torch.finfo(compute_dtype(input)).eps


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and sums for inputs like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
