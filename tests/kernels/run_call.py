"""A call of the ops on the interpreted GPU, forward and backward, and how far it is from the truth.

Truth is the CPU backend in float64, on the values that the kernel read: its sum, its statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import fused_op  # noqa: F401  (registers torch.ops.fused_op)
from tests.case import generator, worst
from tests.kernels.interpreter import Gpu, Launch
from tests.ops import BF16, F16, F32, F64, OPS, TOLERANCE, condition, steps

DTYPES = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
EPS = 1e-5
SMALLEST_WEIGHT = 1e-5  # kSmallestWeight of csrc/core/norm_math.h


@dataclass(frozen=True)
class Call:
    norm: str
    rows: int
    cols: int
    dtype: str = "bf16"
    residual: str = ""  # its dtype, and that of the sum
    params: str = ""  # that of the input unless said
    out: str = ""
    weight: bool = True
    bias: bool = True
    dropout: float = 0.0
    rounding: str = "once"
    efficient: bool = False  # backward from the output
    shift: int = 0  # elements from a multiple of 16 bytes to the first row
    pad: int = 0  # elements between rows
    heads: int = 0  # rows at two strides: so many, then some of another tensor
    sms: int = 132
    clusters: bool = True
    backwards: bool = False  # the order in which threads run
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True)
    main_grads: bool = False
    special: str = ""  # rows: all one number ("constant", "large"), or one with "nan" or "infinite"

    def __str__(self) -> str:
        default = Call("", 0, 0)
        said = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(said).replace("norm=", "").replace("torch.", "")

    @property
    def centred(self) -> bool:
        return self.norm == "layer_norm"

    def type_of(self, name: str) -> torch.dtype:
        return DTYPES[getattr(self, name) or self.dtype]


class Result(NamedTuple):
    tensors: dict[str, Tensor]
    inputs: dict[str, Tensor | None]
    launches: list[Launch]


def place(values: Tensor, shift: int = 0, pad: int = 0) -> Tensor:
    """The rows in memory that has NaN between them and around."""
    (rows, cols), size = values.shape, values.element_size()
    memory = torch.full((rows * (cols + pad) + shift + 32,), torch.nan, dtype=values.dtype)
    first = -memory.data_ptr() // size % (16 // size) + shift
    placed = memory[first : first + rows * (cols + pad)].view(rows, cols + pad)[:, :cols]
    return placed.copy_(values)


def place_heads(values: Tensor, heads: int) -> Tensor:
    """The same as [outer, heads, cols], beside as many of another tensor."""
    outer = values.shape[0] // heads
    memory = torch.full((outer, 2, heads, values.shape[1]), torch.nan, dtype=values.dtype)
    return memory[:, 0].copy_(values.view(outer, heads, -1))


def make_inputs(call: Call, values_of: Call) -> dict[str, Tensor | None]:
    g = generator("cpu", str(values_of))

    def rows(dtype: torch.dtype, shift: int = 0, offset: float = 0.0) -> Tensor:
        shape = values_of.rows, values_of.cols
        values = torch.randn(shape, generator=g) * torch.randn(shape[0], 1, generator=g).exp2()
        values = (values + offset)[: call.rows]
        if call.special == "constant":
            values.fill_(1 / 3)  # whose sum is rounded
        elif call.special == "large":
            values.fill_(torch.finfo(dtype).max / 2)
        elif call.special == "nan":
            values[call.rows // 2, call.cols // 2] = torch.nan
        elif call.special == "infinite":
            values[call.rows // 2, call.cols // 2] = torch.inf
        if call.heads:
            return place_heads(values.to(dtype), call.heads)
        return place(values.to(dtype), shift, call.pad)

    def parameter(wanted: bool) -> Tensor | None:
        values = torch.randn(1, call.cols, generator=g).to(call.type_of("params"))
        return place(values)[0] if wanted else None

    seed = torch.randint(2**62, (2,), generator=g)
    seed[1] = seed[1] % 2**40 * 4
    return {
        "input": rows(call.type_of("dtype"), call.shift, 1.0),
        "residual": rows(call.type_of("residual")) if call.residual else None,
        "weight": parameter(call.weight),
        "bias": parameter(call.bias and call.centred),
        "state": seed,
        "grad_output": rows(
            call.type_of("out"), call.shift * (call.efficient or bool(call.residual))
        ),
        "grad_sum": rows(call.type_of("residual")) if call.residual else None,
    }


@cache
def run(call: Call, values: Call | None = None) -> Result:
    """Forward and backward, on the values of another call's inputs if said."""
    inputs = make_inputs(call, values or call)
    gpu = Gpu(call.sms, call.clusters, call.backwards)
    weight, bias, state = inputs["weight"], inputs["bias"], inputs["state"]
    options = {"rounding": call.rounding, "dropout_p": call.dropout, "rng_state": state}
    output, total, stats = gpu.forward(
        norm=call.norm, input=inputs["input"], residual=inputs["residual"], weight=weight,
        bias=bias, eps=EPS, output_dtype=call.type_of("out"), **options,
    )  # fmt: skip
    found = {"output": output, "sum": total, "stats": stats}
    main_grads = [torch.ones(call.cols) for _ in range(1 + call.centred)]
    grads = gpu.backward(
        norm=call.norm, grad_output=inputs["grad_output"], grad_sum=inputs["grad_sum"],
        x=saved(call, inputs, found), stats=stats, weight=weight, bias=bias,
        x_is_output=call.efficient, input_dtype=call.type_of("dtype"),
        residual_dtype=call.type_of("residual") if call.residual else None,
        param_dtype=call.type_of("params"), wanted=call.wanted,
        main_grads=[*main_grads, None][:2] if call.main_grads else None, **options,
    )  # fmt: skip
    names = ("grad_input", "grad_residual", "grad_weight", "grad_bias")
    found |= dict(zip(names, grads, strict=True))
    if call.main_grads:
        found |= dict(zip(names[2:], [grad - 1 for grad in main_grads], strict=False))
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    return Result(found, inputs, gpu.launches)


def saved(call: Call, inputs: dict, found: dict) -> Tensor:
    """What backward reads as x."""
    if call.efficient:
        return found["output"]
    return inputs["input"] if found["sum"] is None else found["sum"]


def wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(F64)


def errors(call: Call) -> dict[str, float]:
    """Of each result, the largest error as a multiple of what roundings may cost."""
    found, inputs, _ = run(call)
    ratios = check_sum(call, found, inputs)
    x = wide(found.get("sum", inputs["input"])).reshape(call.rows, call.cols)
    weight, bias, state = wide(inputs["weight"]), wide(inputs["bias"]), inputs["state"]
    drops_output = call.dropout if not call.residual else 0.0
    truth = torch.ops.fused_op.norm_forward(
        call.norm, x, None, weight, bias, state if drops_output else None,
        1, EPS, False, "once", drops_output, F64, None, True,
    )  # fmt: skip
    truths = {"output": truth[0], "stats": truth[2]}
    truths |= backward_truth(call, found, inputs, x)
    for name, bound in bounds(call, x, found, inputs).items():
        if name in found:
            t = TOLERANCE[found[name].dtype]
            shape = truths[name].shape
            bound = bound + t.rounding * truths[name].abs() + t.smallest
            ratios[name] = worst(found[name].reshape(shape), truths[name], bound).item()
    return ratios


def check_sum(call: Call, found: dict, inputs: dict) -> dict[str, float]:
    """The sum is the CPU's, to the bit, with the same elements dropped."""
    if "sum" not in found:
        return {}
    expected = torch.ops.fused_op.norm_forward(
        call.norm, inputs["input"], inputs["residual"], None, None,
        inputs["state"] if call.dropout else None,
        1, EPS, False, "once", call.dropout, None, None, False,
    )[1]  # fmt: skip
    return {"sum": 0.0 if torch.equal(found["sum"], expected) else torch.inf}


def backward_truth(call: Call, found: dict, inputs: dict, x: Tensor) -> dict[str, Tensor]:
    """Gradients in float64, of x or of the output that the kernel has written."""
    weight, bias = wide(inputs["weight"]), wide(inputs["bias"])
    source = wide(found["output"]) if call.efficient else x
    stats = wide(found["stats"])
    grads = torch.ops.fused_op.norm_backward(
        call.norm, wide(inputs["grad_output"]).reshape(x.shape), wide(inputs["grad_sum"]), source,
        weight, bias, stats, inputs["state"] if call.dropout else None, 1, False, "once",
        call.dropout, call.efficient, F64, F64 if call.residual else None, F64,
        [True, bool(call.residual), True, call.centred],
    )  # fmt: skip
    input, residual, weight_grad, bias_grad = grads
    return {
        "grad_input": input,
        "grad_residual": residual if residual.numel() else input,  # empty: it is the same
        "grad_weight": weight_grad,
        "grad_bias": bias_grad,
    }


def bounds(call: Call, x: Tensor, found: dict, inputs: dict) -> dict[str, Tensor]:
    """What roundings of the compute type, and of x̂ before the weight, may cost each result."""
    op = next(op for op in OPS if op.centred == call.centred and not op.zero_centered)
    compute = TOLERANCE[call.type_of("residual" if call.residual else "dtype")].compute
    before = TOLERANCE[call.type_of("dtype")].rounding if call.rounding != "once" else 0.0
    scale = 1 / (1 - call.dropout)
    dy = wide(inputs["grad_output"]).reshape(x.shape) * scale
    weight, bias = wide(inputs["weight"]), wide(inputs["bias"])
    of = condition(op, EPS, x, weight, bias, dy)
    if call.efficient:  # a weight near zero makes much of the rounding of the output
        xhat = wide(found["output"]) - (0 if bias is None else bias)
        if weight is not None:  # backward divides by no smaller one, either
            xhat = xhat / weight.abs().clamp(min=SMALLEST_WEIGHT).copysign(weight)
        read = condition(op, EPS, x, weight, bias, dy, xhat=xhat.reshape(x.shape))
        of |= {name: torch.maximum(of[name], read[name]) for name in ("grad_x", "grad_weight")}
    if inputs["grad_sum"] is not None:
        of["grad_x"] = of["grad_x"] + wide(inputs["grad_sum"]).abs()
    one, many = compute * steps(call.cols), compute * (steps(call.cols) + steps(call.rows))
    mean = x.abs().mean(-1)
    rstd = ((x - x.mean(-1, keepdim=True) * op.centred).square().mean(-1) + EPS).rsqrt()
    spread = one * (1 + mean * rstd * op.centred) * rstd
    return {
        "output": (one + before) * scale * of["output"],
        "stats": torch.stack([one * mean, spread][not op.centred :]),
        "grad_input": (one + before) * scale * of["grad_x"],
        "grad_residual": (one + before) * of["grad_x"],
        "grad_weight": (many + before) * of["grad_weight"],
        "grad_bias": many * of["grad_bias"],
    }
