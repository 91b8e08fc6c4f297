"""Dropout, dtypes of their own for output and residual, and a saved output: every combination.

Truth is the formula in fp64 of the very numbers that the call got, with the very mask that it drew;
tests/ops.py derives how far a result may be from it.
"""

from __future__ import annotations

import random

import pytest
import torch

import fused_op
from fused_op import reference
from fused_op._philox import keep_mask
from tests.case import SEED, generator
from tests.ops import BF16, F16, F32, F64, OPS, PAIRS, TOLERANCE, condition, pairwise, steps

PLAIN_OPS = [op for op in OPS if not op.zero_centered]
# Sub-warp rows, one and several warps, whole and partial packs, and rows that are streamed.
SHAPES = [(9, 1), (6, 5), (5, 64), (4, 96), (21, 128), (3, 200), (2, 1023), (70, 256)]
SHAPES += [(6, 2500)]  # long rows of the CPU, of which it takes four at a time
CUDA_SHAPES = [(300, 768), (33, 4096), (600, 1024), (17, 8192), (5, 8200), (300, 9000), (3, 40001)]


def dtypes_of_output(rows):
    """What out_dtype may be, None first."""
    return {F64: [None, F64], F32: [None, F16, BF16]}.get(rows, [None, F32])


def draw(op, pair, shape, residual_dtype, device):
    g = generator(device, op.name, str(pair), shape)
    wide = F64 if pair.rows is F64 else F32

    def normal(*size, dtype):
        return torch.randn(*size, generator=g, device=device, dtype=wide).to(dtype)

    inputs = {}
    for name in op.inputs:
        is_rows = name in ("input", "residual")
        dtype = pair.params if not is_rows else pair.rows if name == "input" else residual_dtype
        inputs[name] = normal(*(shape if is_rows else shape[-1:]), dtype=dtype)
    return inputs, normal


class Drawn:
    """Calls inside get this state, and so the mask is known; records that it was asked for."""

    def __init__(self, monkeypatch, device, on_device):
        where = device if on_device else "cpu"
        self.state = torch.randint(2**62, (2,), device=where, generator=generator(where, "state"))
        monkeypatch.setattr(fused_op._routes, "dropout_state", lambda input: self.state)


def check(name, actual, truth, scale, dtype, terms, p):
    t = TOLERANCE[dtype]
    bound = t.rounding * truth.abs() + t.smallest
    bound = bound + TOLERANCE[F64 if dtype is F64 else F32].compute * steps(terms) * scale
    ratio = ((actual.to(F64) - truth).abs() / (bound + 1e-300)).max().item() if len(truth) else 0
    assert actual.dtype == dtype and actual.shape == truth.shape, name
    assert ratio <= 1, f"{name}: error {ratio:.3g} times the tolerance (FUSED_OP_SEED={SEED})"


def combinations(op, pair, device):
    rows = []
    residuals = [pair.rows] if pair.rows in (F32, F64) or not op.adds else [pair.rows, F32]
    for residual in residuals:
        sums = [None] if residual in (F32, F64) or not op.adds else [None, F32]
        rows += pairwise(
            [pair],
            [residual],
            sums,
            dtypes_of_output(pair.rows),
            [0.0, 0.3, 1.0],
            [False, True],  # zero_centered
            [(), ("weight",), op.parameters],  # absent
            SHAPES + (CUDA_SHAPES if device == "cuda" else []),
            [False, True],  # the state is on the device
        )
    return rows


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("op", PLAIN_OPS, ids=str)
def test_every_combination(op, pair, device, monkeypatch):
    """Catches a dtype that is taken for another, a mask that differs between forward and backward,
    a gradient of the residual that lost elements, and tails of rows in any kernel."""
    cases = combinations(op, pair, device)
    assert len(cases) > 20
    for case in cases:
        check_combination(op, device, monkeypatch, *case)


def check_combination(op, device, monkeypatch, *combination):
    """One call of the op with options as `combinations` lists them, beside truth."""
    pair, residual_dtype, sum_dtype, out_dtype, p, zero_centered, absent, shape, there = combination
    inputs, normal = draw(op, pair, shape, residual_dtype, device)
    inputs |= dict.fromkeys(absent)
    state = Drawn(monkeypatch, device, there).state
    options = {"dropout_p": p, "zero_centered": zero_centered, "out_dtype": out_dtype}
    options |= {"residual_dtype": sum_dtype} if op.adds else {}
    leaves = {n: None if t is None else t.requires_grad_() for n, t in inputs.items()}
    results = op.fused(*leaves.values(), eps=1e-5, normalized_shape=shape[-1], **options)
    results = results if op.adds else (results,)
    grads = tuple(normal(*shape, dtype=r.dtype) for r in results)
    present = {n: t for n, t in leaves.items() if t is not None}
    got = torch.autograd.grad(results, list(present.values()), grads, allow_unused=True)
    got = dict(zip(present, got, strict=True))

    rows, cols = shape
    keep = torch.ones(shape, device=device, dtype=F64)
    if p > 0:
        keep = keep_mask(state, rows, cols, p, torch.device(device)).to(F64)
        keep = keep * (0 if p == 1 else 65536 / (65536 - round(p * 65536)))
    wide = {n: None if t is None else t.detach().to(F64) for n, t in leaves.items()}
    dy, *dsum = (g.to(F64) for g in grads)
    what = f"{op} {pair} {residual_dtype} {options} {absent} {shape}"
    x = wide["input"]
    if op.adds:
        truth = wide["input"] * keep + wide["residual"]
        size = wide["input"].abs() * keep + wide["residual"].abs()
        sum_is = sum_dtype or residual_dtype
        check(f"sum {what}", results[1].detach(), truth, size, sum_is, 1, p)
        x = results[1].detach().to(F64)  # the statistics are those of the sum as it is stored
        given, keep_x, keep_y = dsum[0], keep, 1.0
    else:
        given, keep_x, keep_y = 0.0, 1.0, keep
    weight, bias = wide["weight"], wide.get("bias")
    leaf = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    norm = "layer_norm" if op.centred else "rms_norm"
    output = reference.compute(
        norm,
        leaf[0],
        weight=leaf[1],
        bias=leaf[2],
        eps=1e-5,
        normalized_shape=None if weight is None else (cols,),
        zero_centered=zero_centered,
    )[0]
    shown = [t for t in leaf if t is not None]
    true = iter(torch.autograd.grad(output, shown, dy * keep_y))
    true = [None if t is None else next(true) for t in leaf]
    factor = 1 + weight if zero_centered and weight is not None else weight
    scale = condition(op, 1e-5, x, None if weight is None else factor, bias, dy * keep_y)
    # The op of the table knows no zero_centered: the factor is given as the weight itself.
    out_is = out_dtype or pair.rows
    check(
        *(f"output {what}", results[0].detach(), (output * keep_y).detach()),
        *(scale["output"] * keep_y, out_is, cols, p),
    )
    size = scale["grad_x"] + (given.abs() if op.adds else 0)
    check(
        *(f"grad_input {what}", got["input"], (true[0] + given) * keep_x),
        *(size * keep_x, pair.rows, cols, p),
    )
    if op.adds:
        gradient = got["residual"]
        check(f"grad_residual {what}", gradient, true[0] + given, size, residual_dtype, cols, p)
    for name, value in (("weight", true[1]), ("bias", true[2])):
        if value is not None:
            size = scale[f"grad_{name}"]
            check(f"{name} {what}", got[name], value, size, pair.params, cols * rows, p)


@pytest.mark.parametrize("op", [op for op in PLAIN_OPS if not op.adds], ids=str)
def test_memory_efficient(op, device, pair):
    """Catches gradients of something else than the output that was saved: truth is the formula with
    the normalised values that this very output stands for, and the statistics of the input."""
    for shape in SHAPES + (CUDA_SHAPES if device == "cuda" else []):
        for out_dtype in dtypes_of_output(pair.rows):
            zero_centered, absent = random.Random(str(shape)).choice(
                [(False, ()), (True, ()), (False, op.parameters), (False, ("weight",))]
            )
            inputs, normal = draw(op, pair, shape, pair.rows, device)
            inputs |= dict.fromkeys(absent)
            with torch.no_grad():
                if inputs["weight"] is not None:
                    inputs["weight"][0] = 1e-6 - zero_centered  # taken for 1e-5
            leaves = {n: None if t is None else t.requires_grad_() for n, t in inputs.items()}
            options = {"zero_centered": zero_centered, "out_dtype": out_dtype}
            options |= {"normalized_shape": shape[-1]}
            y = op.fused(*leaves.values(), eps=1e-5, memory_efficient=True, **options)
            same = op.fused(*leaves.values(), eps=1e-5, **options)
            assert torch.equal(y, same)
            dy = normal(*shape, dtype=y.dtype)
            present = {n: t for n, t in leaves.items() if t is not None}
            got = torch.autograd.grad(y, list(present.values()), dy)
            got = dict(zip(present, got, strict=True))

            wide = {n: None if t is None else t.detach().to(F64) for n, t in leaves.items()}
            x, weight, bias = wide["input"], wide["weight"], wide.get("bias")
            factor = torch.ones_like(x[0]) if weight is None else weight
            factor = 1 + weight if zero_centered and weight is not None else factor
            smallest = torch.tensor(1e-5, device=device, dtype=F32).to(F64)
            divisor = torch.where(factor.abs() < smallest, smallest.copysign(factor), factor)
            xhat = (y.detach().to(F64) - (0 if bias is None else bias)) / divisor
            centred = x - x.mean(-1, keepdim=True) if op.centred else x
            rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            dy = dy.to(F64)
            wdy = dy * factor
            true = wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)
            true = (true - wdy.mean(-1, keepdim=True) if op.centred else true) * rstd
            size = wdy.abs() + xhat.abs() * (wdy * xhat).abs().mean(-1, keepdim=True)
            size = (size + wdy.abs().mean(-1, keepdim=True)) * rstd
            # The quotient cancels where the bias outweighs what it is added to.
            lost = (y.detach().to(F64).abs() + (0 if bias is None else bias.abs())) / divisor.abs()
            size = size + rstd * (
                lost * (wdy * xhat).abs().mean(-1, keepdim=True)
                + xhat.abs() * (wdy.abs() * lost).mean(-1, keepdim=True)
            )
            mean = x.abs().mean(-1, keepdim=True) if op.centred else 0.0
            size = size * (1 + mean * rstd)
            what = f"{op} {pair} {shape} {options} {absent}"
            cols = shape[-1]
            check(f"grad_input {what}", got["input"], true, size, pair.rows, cols, 0)
            sums = {"weight": dy * xhat, "bias": dy}
            sizes = {"weight": dy.abs() * (xhat.abs() + lost), "bias": dy.abs()}
            for name in set(sums) & set(got):
                terms = cols * shape[0]
                value, size = sums[name].sum(0), sizes[name].sum(0)
                check(f"{name} {what}", got[name], value, size, pair.params, terms, 0)


def test_memory_efficient_has_one_derivative():
    x = torch.randn(3, 8, requires_grad=True)
    y = fused_op.fused_layer_norm(x, memory_efficient=True)
    with pytest.raises(RuntimeError, match="fused_layer_norm: with memory_efficient=True the inp"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_memory_efficient_keeps_the_output_alone():
    """Catches a saved input: the memory would not be saved."""
    x = torch.randn(3, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = fused_op.fused_layer_norm(x * 2, memory_efficient=True)
    kept = [t for t in saved if t.shape == y.shape]
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]
