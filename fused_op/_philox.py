"""The dropout mask: its state, and the mask of ``csrc/core/dropout.h`` in PyTorch's operations.

Source: Philox4x32-10 of Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1,
2, 3".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

import fused_op_cuda

from ._contexts import is_recording

_WORD = 0xFFFFFFFF
_ALL = 1 << 16


def _dropped(p: float) -> int:
    """How many of the 2^16 values of a random number drop an element; all of them if p is 1."""
    return _ALL if p == 1 else min(int(p * _ALL + 0.5), _ALL - 1)


def keep_scale(p: float) -> float:
    """The factor of kept elements: the inverse of the probability that keeps them."""
    return 0.0 if p == 1 else _ALL / (_ALL - _dropped(p))


def dropout_state(input: Tensor) -> Tensor:
    """Seed and offset of one mask, from the generator that PyTorch's own dropout draws from.

    The draw is the same, eager or traced, under any mode. A forward that activation checkpointing
    runs again, possibly by another route, has the mask of the first one.
    """
    if not is_dynamo_compiling():
        if is_recording():  # recorded_mask() draws by itself
            return torch.empty(2, dtype=torch.int64, device=input.device)
        return fused_op_cuda.dropout_state(input)
    return traced_dropout_state(input)


def traced_dropout_state(input: Tensor) -> Tensor:
    """``dropout_state`` in a graph that is being compiled.

    As route_dropout_state in csrc/routing.cpp. The compiler would merge equal calls in a graph, but
    knows that results of torch.empty are never equal.
    """
    is_transformed = torch._C._are_functorch_transforms_active()
    like = (torch.rand if is_transformed else torch.empty)(0, device=input.device)
    state: Tensor = torch.ops.fused_op.dropout_state.default(like, True)
    return state


def keep_mask(rng_state: Tensor, rows: int, cols: int, p: float, device: torch.device) -> Tensor:
    """Which elements dropout keeps.

    Args:
        rng_state: seed and offset, int64 of shape ``[2]``.
        rows: of the normalised tensor.
        cols: of the normalised tensor.
        p: probability of being dropped, rounded to a multiple of ``2^-16``; to 1 only if it is 1.
        device: of the result.

    Returns:
        ``[rows, cols]``, bool.
    """
    state = rng_state.to(device)
    seed, offset = state[..., 0], state[..., 1]
    row = torch.arange(rows, device=device).unsqueeze(1)
    block = torch.arange((cols + 7) // 8, device=device).unsqueeze(0)
    row, block = row + torch.zeros_like(block), block + torch.zeros_like(row)
    counter = [block & _WORD, row & _WORD, offset & _WORD, (offset >> 32) & _WORD]
    low, high = seed & _WORD, ((seed >> 32) & _WORD) ^ ((row >> 32) & _WORD)
    words = _philox(counter, low, high)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    random = torch.stack(halves, dim=-1).flatten(-2)[..., :cols]
    return random >= _dropped(p)


def recorded_mask(x: Tensor, p: float) -> Tensor:
    """Which elements dropout keeps in a trace: a mask of its own at each run.

    PyTorch draws it: its compiler of traces for GPUs never finishes with the rounds of Philox.
    """
    return torch.dropout(torch.ones_like(x), _dropped(p) / _ALL, train=True) != 0


def _philox(counter: list[Tensor], low: Tensor, high: Tensor) -> list[Tensor]:
    """Ten rounds, of 32-bit words in int64."""
    a, b, c, d = counter
    for _ in range(10):
        (a_high, a_low), (c_high, c_low) = _product(0xD2511F53, a), _product(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return [a, b, c, d]


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two.

    By halves of the factor: the whole product may overflow int64, which inductor's C++ leaves
    undefined, and its compiler then takes off what masks the sign.
    """
    bottom = (factor & 0xFFFF) * word
    top = (factor >> 16) * word + (bottom >> 16)
    return top >> 16, (top & 0xFFFF) << 16 | bottom & 0xFFFF
