"""A call as two values: its tensors, and its options.

A call passes through every layer as these. ``fused_op_cuda`` reads the tuples by their places, and
``csrc/python_arguments.cpp`` lists the places again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["layer_norm", "rms_norm"]
Rounding = Literal["once", "before_weight"]
Activation = Literal["silu", "sigmoid"]  # of a gate
Shape = int | Sequence[int]  # of normalized_shape

# input, residual, weight, bias, rng_state. A plain tuple: it is made for every call, and naming its
# places would take another 0.2 us.
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
    """The arguments of a public function that are no tensors, as the user gave them.

    Usual ones are checked in C++, the others by ``checked`` of ``_arguments.py``.
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
    main_grad: bool = False  # add the parameters' gradients to their main_grad
    is_checked: bool = False


# The fields of Options. A call that a kernel takes at once does not name them: to make an Options
# takes 0.5 us, and the whole call without a gradient 2 us.
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
    """What the backward of a call is beside its tensors, all of which forward knew."""

    norm: Norm
    normalized_ndim: int
    eps: float | None  # for the formula: the kernels have stats
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
        """Whether input and residual have one gradient."""
        return shares_gradient(self.dropout_p, self.input_dtype, self.residual_dtype)


def backward_options(tensors: Tensors, options: Options, x_is_output: bool) -> BackwardOptions:
    """Those of the backward of a forward."""
    input, residual, weight, bias, _ = tensors
    dtype = input.dtype
    # Where weight and bias differ in dtype, autograd rounds their gradients to either.
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
    """How many dimensions normalized_shape has by default: as the weight, else the bias, else 1."""
    affine = weight if weight is not None else bias
    return 1 if affine is None else affine.dim()


def shares_gradient(
    dropout_p: float, input_dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> bool:
    """Whether input and residual have one gradient."""
    return dropout_p == 0 and residual_dtype in (None, input_dtype)


def rounds_first(rounding: Rounding, input_dtype: torch.dtype) -> bool:
    """Whether normalised values are rounded before the weight: in 32 bits nothing is to round."""
    return rounding == "before_weight" and input_dtype.itemsize == 2


def machine_eps(input: Tensor) -> float:
    """What ``eps=None`` stands for."""
    return torch.finfo(compute_dtype(input)).eps


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and sums for inputs like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
