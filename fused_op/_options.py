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


# What makes a NamedTuple of its fields: the class itself is a function in Python around this, and
# takes 0.2 us more.
new_tuple = tuple.__new__


class Options(NamedTuple):
    """The arguments of a public function that are no tensors, as the user gave them.

    Usual ones are checked in C++, the others by ``checked`` of ``_arguments.py``.
    """

    norm: Norm
    eps: float | None  # None: that of machine_eps()
    normalized_shape: Shape | None = None
    zero_centered: bool = False
    dropout_p: float = 0.0
    training: bool = True
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    memory_efficient: bool = False
    main_grad: bool = False  # add the parameters' gradients to their main_grad
    is_checked: bool = False


# The fields of Options, which a call that a kernel takes at once has no need to name.
Given = tuple[
    Norm,
    float | None,
    Shape | None,
    bool,
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
    norm, eps, shape, zero_centered, dropout_p, _, out_dtype, _, _, main_grad, _ = options
    dtype = input.dtype
    # Where weight and bias differ in dtype, autograd rounds their gradients to either.
    affine = weight if weight is not None else bias
    param_dtype = dtype if affine is None else affine.dtype
    if bias is not None and bias.dtype is not param_dtype:
        param_dtype = compute_dtype(input)
    return new_tuple(
        BackwardOptions,
        (
            norm,
            default_ndim(weight, bias) if shape is None else _count(shape),
            eps,
            zero_centered,
            dropout_p,
            x_is_output,
            dtype,
            None if residual is None else residual.dtype,
            param_dtype,
            out_dtype or dtype,
            main_grad,
        ),
    )


def op_name(norm: str, adds: bool) -> str:
    """The public function that a user called."""
    return f"fused_add_{norm}" if adds else f"fused_{norm}"


def normalized_ndim(options: Options, weight: Tensor | None, bias: Tensor | None) -> int:
    """How many of the last dimensions are normalised together."""
    shape = options.normalized_shape
    return default_ndim(weight, bias) if shape is None else _count(shape)


def _count(shape: Shape) -> int:
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


def machine_eps(input: Tensor) -> float:
    """What ``eps=None`` stands for."""
    return torch.finfo(compute_dtype(input)).eps


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and sums for inputs like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
