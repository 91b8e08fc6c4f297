"""GroupNorm, with a scale and a shift for each sample: ``csrc/group_norm.cpp`` is the other half.

The kernels take contiguous planes, and on a GPU also images whose channels are innermost and fill
their memory; a slice of such channels is copied once. A CPU copies both to planes and back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from ._arguments import as_float, as_int, check_eps, check_parameter, check_rows, check_tensor
from ._channels_first import check_activation, in_planes, spread_out
from ._channels_first_formula import channels_are_last
from ._group_norm_formula import group_norm, like_layout
from ._ops import register_fake
from ._options import PixelActivation, compute_dtype
from ._sizes import differ, holds
from ._variant import Variant, is_strided
from .modules import CONVERTED, takes_original

_NAME = "fused_group_norm"


def fused_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: PixelActivation = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """GroupNorm of ``[N, C, *spatial]`` with what follows it in diffusion models, in one op.

    With ``n = group_norm(input, num_groups, weight, bias, eps) * (1 + scale) + shift`` the result
    is ``n`` or ``silu(n)``.

    Args:
        input: ``[N, C]`` or ``[N, C, *spatial]``, float16, bfloat16, float32 or float64, on CPU or
            CUDA. Fast if contiguous. Where the channels are innermost in memory, as in
            ``torch.channels_last``, a CPU copies it to planes, and the result back.
        num_groups: how many groups the channels are divided into; a divisor of ``C``.
        weight: ``[C]``; ``None`` means 1. Fast in the dtype of ``input`` or, beside 16 bits,
            float32; any other of the four is converted in each call, and its gradient back.
        bias: ``[C]``, likewise; ``None`` means 0.
        eps: added to the variance before the root; finite.
        activation: ``"silu"``: the result is ``silu(n)``.
        scale: ``[N, C]``, or ``[N, C, 1, ...]`` with a one for each spatial dimension; ``None``
            means 0. Any of these dtypes, but float64 only beside float64. Chunks of a wider
            projection are read in place.
        shift: likewise, and independent of ``scale``. If the two differ in dtype, both are
            converted.

    Returns:
        A tensor of the shape and dtype of ``input``. Its channels are innermost where those of
        ``input`` are, else it is contiguous. The arithmetic is in float32 (float64 for float64),
        1 is added there, and the result is rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices disagree, or ``num_groups`` does not divide the
            channels; the message names the argument.
        TypeError: an argument has the wrong type.
        ValueError: ``eps`` is NaN or infinite, or ``activation`` is neither of the two.

    Source: Wu and He 2018 (https://arxiv.org/abs/1803.08494).
    """
    tensors = input, weight, bias, scale, shift
    if has_torch_function(tensors):
        handled: Tensor = handle_torch_function(
            fused_group_norm, tensors, input, num_groups, weight, bias, eps,
            activation=activation, scale=scale, shift=shift,
        )  # fmt: skip
        return handled
    check_tensor(_NAME, "input", input)
    eps = as_float(_NAME, "eps", eps)
    num_groups = as_num_groups(_NAME, num_groups)
    check_activation(_NAME, activation)
    image = _in_readable_layout(input)
    options = num_groups, eps, activation
    given, entries = spread_out(image), [scale, shift]
    if given is not image:
        _check_tensors(*tensors, num_groups)
        entries = [e.flatten(2) if e is not None and e.dim() > 2 else e for e in entries]
    output: Tensor = _GROUP_NORM((given, weight, bias, *entries), options)
    if given is not image:
        output = output.view(input.shape)
    return output if image is input else like_layout(output, input)


def _in_readable_layout(input: Tensor) -> Tensor:
    """The input in a layout that the op takes as it is; ``input`` itself if it is in one."""
    is_plain = type(input) is Tensor and not is_dynamo_compiling()
    if is_plain and is_strided(input) and input.is_contiguous():
        return input  # without the questions below, which a small call would feel
    if _is_channels_last(input) and (input.is_cuda or not is_dynamo_compiling()):
        return input  # on a CPU the op copies it; if traced, Inductor does so faster
    if input.is_cuda and input.dim() > 2 and is_strided(input) and channels_are_last(input):
        return input.movedim(1, -1).contiguous().movedim(-1, 1)
    return in_planes(input)


def _is_channels_last(input: Tensor) -> bool:
    """Whether channels are innermost and fill their memory, which the op takes as they are."""
    if input.dim() < 3 or not is_strided(input) or holds(input.numel() == 0):
        return False
    pixels = math.prod(input.shape[2:])
    if holds(input.shape[1] == 1) or holds(pixels == 1):  # then it is contiguous as well
        return False
    stride: Any = 1
    for dim in (1, *range(input.dim() - 1, 1, -1), 0):
        size = input.shape[dim]
        if not (holds(input.stride(dim) == stride) or holds(size == 1)):
            return False
        stride = stride * size
    return True


class FusedGroupNorm(nn.GroupNorm):
    """:func:`fused_op.fused_group_norm` with its weight and bias, in place of ``nn.GroupNorm``.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as in ``torch.nn.GroupNorm``.
        activation: ``"silu"`` behind the norm, in the same op.
        others: what the installed PyTorch has more, such as ``bias``.

    Shape:
        ``[N, num_channels, *spatial]`` to the same; ``scale`` and ``shift``: see the function.

    Raises:
        RuntimeError, TypeError, ValueError: as the function; from the constructor, if its
            arguments show the mistake.

    Source: Wu and He 2018 (https://arxiv.org/abs/1803.08494).
    """

    # Of the class, because instances that ``convert`` changed have none.
    activation: PixelActivation = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: PixelActivation = None,
        **others: Any,
    ) -> None:
        """See the class."""
        name = type(self).__name__
        num_groups = as_num_groups(name, num_groups)
        check_eps(name, eps)
        check_activation(name, activation)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **others)
        self.activation = activation

    def forward(
        self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """Normalise the groups of each sample; multiply by ``1 + scale``, and add ``shift``."""
        weight, bias = self.weight, self.bias
        if hasattr(self, CONVERTED):  # as nn.GroupNorm: without a weight, any number of channels
            may_be_original = scale is None and shift is None and self.activation is None
        else:
            may_be_original = False
            self._check_channels(input)
        tensors: Any = input, weight, bias
        if (
            may_be_original
            and is_dynamo_compiling()
            and takes_original(self, *tensors, is_image=True)
        ):
            return super().forward(input)
        try:
            return fused_group_norm(
                input, self.num_groups, weight, bias, self.eps,
                activation=self.activation, scale=scale, shift=shift,
            )  # fmt: skip
        except (RuntimeError, TypeError):
            if not may_be_original or not takes_original(
                self, *tensors, has_failed=True, is_image=True
            ):
                raise
        return super().forward(input)

    def _check_channels(self, input: Any) -> None:
        if isinstance(input, Tensor) and input.dim() > 1 and input.shape[1] != self.num_channels:
            raise RuntimeError(
                f"{type(self).__name__}: input must have {self.num_channels} channels, dimension "
                f"1, got shape {list(input.shape)}"
            )

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        shown = super().extra_repr()
        return shown if self.activation is None else f"{shown}, activation={self.activation!r}"


def _formula(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
    eps: float,
    activation: PixelActivation,
) -> Tensor:
    return group_norm(input, num_groups, weight, bias, scale, shift, eps, activation)


def _check(*arguments: Any) -> None:
    *tensors_and_groups, eps, activation = arguments
    check_eps(_NAME, eps)
    check_activation(_NAME, activation)
    _check_tensors(*tensors_and_groups)


def _check_tensors(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
) -> None:
    if input.dim() < 2:
        raise RuntimeError(
            f"{_NAME}: input must have at least two dimensions, [N, C, *spatial], got shape "
            f"{list(input.shape)}"
        )
    check_rows(_NAME, "input", input)
    as_num_groups(_NAME, num_groups)
    if input.shape[1] % num_groups != 0:
        raise RuntimeError(
            f"{_NAME}: Expected number of channels in input to be divisible by num_groups, but got "
            f"input of shape {list(input.shape)} and num_groups={num_groups}"
        )
    named = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    for name, tensor in named.items():
        if tensor is None:
            continue
        check_tensor(_NAME, name, tensor)
        if name in ("weight", "bias"):
            check_parameter(_NAME, name, tensor, input.shape[1])
        else:
            _check_entry(name, tensor, input)
        if tensor.device != input.device:
            raise RuntimeError(
                f"{_NAME}: {name}: Tensor on device {tensor.device} is not on the expected device "
                f"{input.device} of input"
            )


def as_num_groups(op: str, num_groups: Any) -> int:
    count: int = as_int(op, "num_groups", num_groups)
    if count <= 0:
        raise RuntimeError(f"{op}: Expected num groups to be greater than 0, got {count}")
    return count


def _check_entry(name: str, entry: Tensor, input: Tensor) -> None:
    check_rows(_NAME, name, entry)
    if (entry.dtype == torch.float64) != (input.dtype == torch.float64):
        raise RuntimeError(
            f"{_NAME}: {name} of {entry.dtype} does not fit input of {input.dtype}: both or none "
            "must be float64"
        )
    first = input.shape[:2]
    fits = entry.dim() in (2, input.dim()) and not differ(entry.shape[:2], first)
    if not fits or any(size != 1 for size in entry.shape[2:]):
        raise RuntimeError(
            f"{_NAME}: {name} must have shape {list(first)}, the first two dimensions of input, or "
            f"these and a one for each other, got {list(entry.shape)}"
        )


def _fake_forward(
    input: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, groups: int, eps: float,
    activation: PixelActivation, save_stats: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(input, weight, bias, scale, shift, groups, eps, activation)
    stats = input.new_empty((2, input.shape[0] * groups), dtype=compute_dtype(input))
    return _empty_image(input), stats if save_stats else input.new_empty(0)


def _empty_image(input: Tensor) -> Tensor:
    """An image as the op makes it, in the layout of the input if it has taken that as it is."""
    if _is_channels_last(input):
        return input.new_empty(input.movedim(1, -1).shape).movedim(-1, 1)
    return input.new_empty(input.shape)


def _fake_backward(
    grad_output: Tensor, input: Tensor, weight: Any, bias: Any, scale: Any, shift: Any,
    stats: Tensor, groups: int, activation: PixelActivation, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    channels, entries = input.shape[1:2], input.shape[:2]
    parameters = weight, bias, scale, shift
    shapes = channels, channels, entries, entries
    return _empty_image(input) if wanted[0] else input.new_empty(0), *(
        (input.new_empty(shape) if t is None else t.new_empty(t.shape))
        if want
        else (input if t is None else t).new_empty(0)
        for t, shape, want in zip(parameters, shapes, wanted[1:], strict=True)
    )


register_fake("group_norm_forward", _fake_forward)
register_fake("group_norm_backward", _fake_backward)

_GROUP_NORM = Variant("group_norm", _formula, _check, by_rows=False)
