"""A digest of the results of drawn CPU calls; test_cpu_levels.py compares them.

In a process of its own for each level, which is chosen once: FUSED_OP_CPU.
"""

import hashlib
import random
from collections.abc import Iterator

import torch

import fused_op

COLS = (1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 63, 64, 100, 255, 1023, 1024, 1057, 2100, 4099)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


def draw_input(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, and some that are constant, far from 0, huge or subnormal."""
    x = torch.randn(shape, dtype=torch.float64)
    kind = draw.randrange(6)
    limits = torch.finfo(dtype)
    if kind == 1:
        x = x * 0.01 + 30
    elif kind == 2:
        x[:: draw.randint(1, 3)] = 0.7
    elif kind == 3:
        x = (x * limits.max / 8).clamp(-limits.max / 2, limits.max / 2)
    elif kind == 4:
        x = x * limits.tiny / 4
    return x.to(dtype)


def drawn_call(draw: random.Random) -> tuple[str, list[torch.Tensor]]:
    """One call with gradients: what it was, and all its results."""
    if draw.random() < 0.2:
        return drawn_group_norm(draw)
    op, dtype = draw.choice(OPS), draw.choice(DTYPES)
    shape = (draw.choice((1, 2, 5, 33, 70)), draw.choice(COLS))
    adds, is_half = op.startswith("add"), dtype.itemsize == 2
    x = draw_input(draw, shape, dtype)
    if draw.random() < 0.2:
        x = draw_input(draw, (shape[0], shape[1] + 3), dtype)[:, : shape[1]]
    args = [x]
    if adds:
        args.append(
            torch.randn(shape).to(draw.choice((dtype, torch.float32)) if is_half else dtype)
        )
    params = draw.choice((dtype, torch.float32)) if is_half else dtype
    count = draw.choice((0, 1, 2)) if "layer" in op else draw.choice((0, 1))
    args += [torch.randn(shape[1:]).to(params) for _ in range(count)]
    options: dict[str, object] = {"normalized_shape": shape[1:]}
    if draw.random() < 0.3:
        options["dropout_p"] = draw.choice((0.1, 0.5))
    elif not adds and count and draw.random() < 0.3:
        options["memory_efficient"] = True
    if count and draw.random() < 0.3:
        options["zero_centered"] = True
    if draw.random() < 0.3:
        options["rounding"] = "before_weight"
    if is_half and draw.random() < 0.3:
        options["out_dtype"] = torch.float32
    args = [tensor.requires_grad_() for tensor in map(torch.Tensor.detach, args)]
    results = getattr(fused_op, "fused_" + op)(*args, **options)
    outputs = list(results) if adds else [results]
    grads = torch.autograd.grad(outputs, args, [torch.randn_like(result) for result in outputs])
    return f"{op} {dtype} {shape} {options}", [*outputs, *grads]


def drawn_group_norm(draw: random.Random) -> tuple[str, list[torch.Tensor]]:
    dtype, groups, pixels = draw.choice(DTYPES), draw.randint(1, 3), draw.choice((*COLS, 40001))
    shape = draw.choice((1, 2, 5)), groups * draw.choice((1, 2, 9)), pixels
    activation, params = draw.choice((None, "silu")), draw.choice((dtype, torch.float32))
    x = draw_input(draw, shape, dtype)
    args = [x, *(torch.randn(shape[1]).to(params) for _ in range(2))]
    args += [torch.randn(shape[:2]).to(dtype) for _ in range(2)]
    args = [tensor.requires_grad_() for tensor in args]
    x, weight, bias, scale, shift = args
    output = fused_op.fused_group_norm(
        x, groups, weight, bias, activation=activation, scale=scale, shift=shift
    )
    grads = torch.autograd.grad(output, args, torch.randn_like(output))
    return f"group_norm {dtype} {shape} {groups} {activation}", [output, *grads]


def digests(count: int) -> Iterator[str]:
    """A line per call. All NaNs are one: which of two goes on is the compiler's choice."""
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(count):
        name, results = drawn_call(draw)
        digest = hashlib.sha256()
        for result in results:
            known = torch.where(result.isnan(), torch.full_like(result, torch.nan), result)
            digest.update(bytes(known.detach().contiguous().flatten().view(torch.uint8).tolist()))
        yield f"{name}: {digest.hexdigest()[:16]}"
