"""How an output is quantised: the rules, and their formulas in PyTorch operations.

The rules are those of ``csrc/core/quantize.h``, which says where each comes from. The kernels give
the bits of these formulas, applied to the rounded output.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import check_bools, check_tensor

Scheme = Literal["tensor", "token", "block128"]
Convention = Literal["torchao", "vllm", "deep_gemm", "te"]
ScaleLayout = Literal["row_major", "transposed"]

BLOCK = 128
# Rows of transposed scales are padded to a multiple of this.
PADDING = 4

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_VLLM = (torch.float8_e4m3fn, torch.int8)
# The dtypes that each scheme of a convention allows.
_RULES: dict[str, dict[str, tuple[torch.dtype, ...]]] = {
    "torchao": {"tensor": _FLOAT8, "token": _FLOAT8, "block128": _FLOAT8},
    "vllm": {"tensor": _VLLM, "token": _VLLM, "block128": _VLLM},
    "deep_gemm": {"block128": (torch.float8_e4m3fn,)},
    "te": {"tensor": _FLOAT8, "block128": _FLOAT8},
}
_POWERS_OF_TWO = {
    ("torchao", "token"),
    ("torchao", "block128"),
    ("deep_gemm", "block128"),
    ("te", "block128"),
}


class QuantizedNorm(NamedTuple):
    """What a norm with a quantised output returns; what is not wanted is None."""

    quantized: Tensor
    scale: Tensor
    output: Tensor | None
    sum: Tensor | None


class Rule(NamedTuple):
    """How an output is quantised: arguments of the dispatcher's op, in its order."""

    scheme: Scheme
    dtype: torch.dtype
    convention: Convention
    power_of_two: bool
    scale_dtype: torch.dtype
    transposed: bool


def checked_rule(
    op: str,
    scale: Any,
    scheme: Any,
    dtype: Any,
    convention: Any,
    power_of_two: Any,
    scale_dtype: Any,
    scale_layout: Any,
) -> Rule:
    """The rule of a call. Raises the error for a wrong argument."""
    _check_choice(op, "scheme", scheme, ("tensor", "token", "block128"))
    _check_choice(op, "convention", convention, tuple(_RULES))
    _check_choice(op, "scale_layout", scale_layout, ("row_major", "transposed"))
    for name, value in (("dtype", dtype), ("scale_dtype", scale_dtype)):
        if not isinstance(value, torch.dtype):
            raise TypeError(
                f"{op}: argument '{name}' must be torch.dtype, not {type(value).__name__}"
            )
    schemes = _RULES[convention]
    if scheme not in schemes:
        known = " and ".join(repr(name) for name in schemes)
        raise ValueError(f"{op}: convention {convention!r} has scheme {known}, not {scheme!r}")
    if dtype not in schemes[scheme]:
        known = " and ".join(str(known) for known in schemes[scheme])
        raise ValueError(f"{op}: convention {convention!r} has dtype {known}, not {dtype}")
    if scheme == "tensor":
        if scale is None:
            raise ValueError(f"{op}: scheme 'tensor' needs a scale: it is not computed")
        check_tensor(op, "scale", scale)
    elif scale is not None:
        raise ValueError(f"{op}: scheme {scheme!r} computes its scales: scale must be None")
    return Rule(
        scheme,
        dtype,
        convention,
        _checked_power(op, scheme, convention, power_of_two, scale_dtype),
        scale_dtype,
        _checked_layout(op, scheme, scale_layout),
    )


def _check_choice(op: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{op}: argument '{name}' must be str, not {type(value).__name__}")
    if value not in known:
        choices = ", ".join(repr(choice) for choice in known)
        raise ValueError(f"{op}: {name} must be one of {choices}, got {value!r}")


def _checked_power(
    op: str, scheme: str, convention: str, power_of_two: Any, scale_dtype: torch.dtype
) -> bool:
    if power_of_two is None:
        power_of_two = (convention, scheme) == ("te", "block128")
    check_bools(op, power_of_two=power_of_two)
    if power_of_two and (convention, scheme) not in _POWERS_OF_TWO:
        raise ValueError(
            f"{op}: scales of convention {convention!r} and scheme {scheme!r} are no powers of two"
        )
    if scale_dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise ValueError(
            f"{op}: scale_dtype must be torch.float32 or torch.float8_e8m0fnu, got {scale_dtype}"
        )
    if scale_dtype != torch.float32 and not power_of_two:
        raise ValueError(f"{op}: scale_dtype {scale_dtype} holds powers of two alone: set it, too")
    return bool(power_of_two)


def _checked_layout(op: str, scheme: str, scale_layout: str) -> bool:
    if scale_layout == "transposed" and scheme != "block128":
        raise ValueError(f"{op}: scale_layout 'transposed' is for scheme 'block128'")
    return scale_layout == "transposed"


def quantize(output: Tensor, ndim: int, scale: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """An output in 8 bits, and its scales. The last ``ndim`` dimensions are one row."""
    rows = output.detach().float().flatten(output.dim() - ndim)
    cols = rows.shape[-1]
    if rule.scheme == "tensor":
        assert scale is not None
        inverse = scale.detach().reciprocal()
        decode, factor = (inverse, scale) if rule.convention == "te" else (scale, inverse)
        return _rounded(rows * factor.reshape(()), rule).reshape(output.shape), decode
    blocks = rows.unsqueeze(-2)
    if rule.scheme == "block128":
        # Padded to whole blocks with zeros, which do not change the largest magnitude.
        blocks = F.pad(rows, (0, -cols % BLOCK))
        blocks = blocks.reshape(*rows.shape[:-1], -(-cols // BLOCK), BLOCK)
    amax = blocks.abs().amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])
    decode, factor = _scales(amax, rule, output.dtype)
    divides = rule.convention == "vllm" and rule.dtype != torch.int8
    by = (decode if divides else factor).unsqueeze(-1)
    quantized = _rounded(blocks / by if divides else blocks * by, rule)
    quantized = quantized.flatten(-2)[..., :cols].reshape(output.shape)
    return quantized.contiguous(), _stored(decode, rule)


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _scales(amax: Tensor, rule: Rule, output_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factor that decodes values, and the one that encodes them."""
    largest = _largest(rule.dtype)
    if rule.convention == "torchao":
        factor = (largest / amax.double().clamp(min=1e-12)).float()
        factor = _power_of_two_below(factor) if rule.power_of_two else factor
        return factor.reciprocal(), factor
    if rule.convention == "vllm":
        floor = 2.0**-23 if rule.dtype == torch.int8 else 1 / (largest * 512)
        decode = (amax / largest).clamp(min=floor)
        return decode, decode.reciprocal()
    if rule.convention == "deep_gemm":
        decode = amax.clamp(min=1e-4) / largest
        decode = _power_of_two_above(decode) if rule.power_of_two else decode
        return decode, decode.reciprocal()
    # PyTorch computes a number divided by a tensor as a product with the tensor's inverse.
    factor = torch.full_like(amax, largest) / amax
    highest = torch.finfo(torch.bfloat16 if output_dtype == torch.bfloat16 else torch.float32).max
    factor = torch.where(factor.isinf(), highest, factor)
    factor = _power_of_two_below(factor) if rule.power_of_two else factor
    factor = torch.where((amax == 0) | ~amax.isfinite(), 1.0, factor)
    return factor.reciprocal(), factor


def _power_of_two_below(x: Tensor) -> Tensor:
    bits = x.view(torch.int32) & 0x7F800000
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def _power_of_two_above(x: Tensor) -> Tensor:
    bits = x.abs().view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).bool().int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def _rounded(scaled: Tensor, rule: Rule) -> Tensor:
    if rule.dtype == torch.int8:
        return scaled.round().clamp(-128, 127).nan_to_num(0).to(torch.int8)
    largest = _largest(rule.dtype)
    return scaled.clamp(-largest, largest).to(rule.dtype)


def _stored(scale: Tensor, rule: Rule) -> Tensor:
    """The scales in their dtype and layout."""
    if rule.scale_dtype != torch.float32:
        exponents = scale.view(torch.int32) >> 23 & 0xFF
        scale = exponents.to(torch.uint8).view(rule.scale_dtype)
    if not rule.transposed:
        return scale
    rows = scale.flatten(0, -2) if scale.dim() > 1 else scale.unsqueeze(0)
    padded = padded_rows(rows.shape[0])
    kept = rows.new_zeros(rows.shape[1], padded)[:, : rows.shape[0]].t()
    kept.copy_(rows)
    return kept.view(scale.shape)


def padded_rows(rows: int) -> int:
    """How many rows transposed scales have room for."""
    return (rows + PADDING - 1) // PADDING * PADDING
