"""The variants that the tests walk through, what they are called with, and how near truth is.

Truth is the same function of `fused_op.reference` in fp64. How far a result may be from it is
derived as in tests/ops.py: one rounding of the result, plus roundings of the type that computes,
relative to the formula with all its terms positive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import fused_op
import fused_op.reference
from fused_op import (
    _gated_rms_norm,
    _l2_norm,
    _modulated_norm,
    _post_add_pre_rms_norm,
    _rms_norm_add,
    _rms_norm_rope,
)
from tests.calls import outputs
from tests.case import generator
from tests.ops import F32, F64, TOLERANCE, Pair, steps


def sized(arguments: dict) -> dict:
    """`groups=2` is a `group_size` of half the columns, where they are even."""
    groups = arguments.pop("groups", 1)
    x = arguments["input"]
    cols = int(x.shape[-1]) if groups > 1 and isinstance(x, Tensor) and x.dim() else 0
    size = {"group_size": cols // groups} if cols and cols % groups == 0 else {}
    return {**arguments, **size}  # not `|`, which dynamo of torch 2.7 does not trace


def rotated(arguments: dict) -> dict:
    """`turned=50` is a cos and a sin for half the columns, exact in every dtype."""
    turned = arguments.pop("turned", None)
    if turned is None:
        return arguments
    x = arguments["input"]
    is_tensor = isinstance(x, Tensor) and x.dim() > 0
    *tokens, _, cols = (1, *x.shape) if is_tensor else (1, 1, 0)
    tokens = tokens[1:] if is_tensor and x.dim() > 1 else []
    dtype = x.dtype if is_tensor and x.dtype.is_floating_point else F32
    half = cols * turned // 200
    device = x.device if is_tensor else "cpu"
    angle = torch.arange(half, device=device) * 0.7 + 1
    for size in tokens[::-1]:
        shift = torch.arange(size, device=device) * 0.37
        angle = angle + shift.view(-1, *[1] * angle.dim())
    turn = {"cos": angle.cos(), "sin": angle.sin()}
    return {**arguments, **{n: (64 * t).round().div(64).to(dtype) for n, t in turn.items()}}


@dataclass(frozen=True)
class Variant:
    """A public function, its twin, its tensor arguments in call order, and options to try.

    `condition(inputs, grad, options)`: what roundings of each result are relative to, all of them
    in fp64. `variant`: the object behind the function, whose ops tests replace.
    """

    name: str
    variant: object
    rows: tuple[str, ...]  # of the shape of the input
    condition: Callable
    parameters: tuple[str, ...] = ()  # of the shape of its last dimension
    options: tuple[dict, ...] = ({},)
    ops: tuple[str, str] = field(default=("", ""))
    outputs: dict[str, str] = field(default_factory=lambda: {"output": "input"})  # and their like
    rounds: bool = False  # to 16 bits within, too
    of_grad: tuple[str, ...] = ()  # gradients that are functions of grad_output alone

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.rows + self.parameters

    @property
    def public(self) -> Callable:
        return getattr(fused_op, f"fused_{self.name}")

    def fused(self, **arguments: object) -> Tensor | tuple[Tensor, ...]:
        return self.public(**rotated(sized(arguments)))

    def reference(self, **arguments: object) -> Tensor | tuple[Tensor, ...]:
        return getattr(fused_op.reference, f"fused_{self.name}")(**rotated(sized(arguments)))

    def arguments(
        self, shape: tuple[int, ...], pair: Pair, device: str = "cpu", requires_grad: bool = False
    ) -> dict[str, Tensor]:
        """Random ones, in call order."""
        g = generator(device, self.name, shape)
        arguments = {}
        for name in self.inputs:
            size = shape if name in self.rows else shape[-1:]
            dtype = pair.rows if name in self.rows else pair.params
            t = torch.randn(size, generator=g, device=device).to(dtype)
            arguments[name] = t.requires_grad_(requires_grad)
        return arguments

    def __str__(self) -> str:
        return self.name


def grads_of(found: Tensor | tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """A gradient for each output: `grad`, or half of it, the other way."""
    return tuple((-0.5 if i else 1) * grad.to(y.dtype) for i, y in enumerate(outputs(found)))


def run(
    function: Callable, inputs: dict[str, Tensor], grad: Tensor, options: dict
) -> dict[str, Tensor]:
    """Outputs and gradients, of leaves over the same memory."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    found = outputs(function(**leaves, **options))
    first = (grad, *grads_of(found, grad)[1:])  # as it lies in memory
    grads = torch.autograd.grad(found, list(leaves.values()), first)
    names = ("output", "sum")[: len(found)]
    return {n: y.detach() for n, y in zip(names, found, strict=True)} | {
        f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)
    }


def check(variant: Variant, inputs: dict[str, Tensor], grad: Tensor, options: dict) -> None:
    """Each result has its dtype and shape, is dense, and is as near to truth as derived."""
    found = run(variant.fused, inputs, grad, options)
    wide = {n: t.to(F64) for n, t in inputs.items()}
    truth = run(variant.reference, wide, grad.to(F64), options)
    rounds = variant.rounds or options.get("rounding", "once") != "once"
    rounds = rounds and grad.dtype.itemsize == 2
    if rounds:  # fp64 has nothing to round: the twin in fp32 has the same roundings, but for ties
        truth = {n: t.to(F64) for n, t in run(variant.reference, inputs, grad, options).items()}
    scale = variant.condition(wide, grad.to(F64), options)
    cols, rows = grad.shape[-1], grad.numel() // max(grad.shape[-1], 1)
    compute = TOLERANCE[inputs["input"].dtype].compute
    for name, t in found.items():
        like = inputs[name.removeprefix("grad_") if "grad_" in name else variant.outputs[name]]
        assert (t.dtype, t.shape, t.device) == (like.dtype, like.shape, like.device), name
        assert t.is_contiguous(), name
        one = TOLERANCE[t.dtype]
        count = steps(cols) + (
            steps(rows) if name.removeprefix("grad_") in variant.parameters else 0
        )
        bound = one.rounding * truth[name].abs() + one.smallest + compute * count * scale[name]
        if rounds:  # values next to a tie of the input's dtype may go either way
            bound = bound + 4 * TOLERANCE[inputs["input"].dtype].rounding * scale[name]
        error = (t.to(F64) - truth[name]).abs() / (bound + 1e-300)
        assert not t.numel() or error.max() <= 1, f"{name}: {error.max():.3g} of the tolerance"


def _of_l2_norm(inputs: dict[str, Tensor], grad: Tensor, options: dict) -> dict[str, Tensor]:
    x = inputs["input"]
    rstd = (x.square().sum(-1, keepdim=True) + options.get("eps", 1e-6)).rsqrt()
    y = (x * rstd).abs()
    along = (grad.abs() * y).sum(-1, keepdim=True)
    return {"output": y, "grad_input": rstd * (grad.abs() + y * along)}


def _of_gated_rms_norm(inputs: dict[str, Tensor], grad: Tensor, options: dict) -> dict[str, Tensor]:
    x, z, weight = (inputs[name].abs() for name in ("input", "gate", "weight"))
    factor = 1 + inputs["weight"] if options.get("zero_centered") else weight
    sigma, dy = torch.sigmoid(inputs["gate"]), grad.abs()
    if options.get("activation") == "sigmoid":
        # The reference's 1 - sigma is off by an ulp of sigma, whatever is left of it.
        value, slope = sigma, sigma * (1 - sigma) + sigma / 64
    else:
        value, slope = z * sigma, sigma * (1 + z * (1 - sigma))
    groups = options.get("groups", 1)
    count = groups if x.shape[-1] % groups == 0 and x.shape[-1] else 1

    def mean(t: Tensor) -> Tensor:
        split = t.unflatten(-1, (count, t.shape[-1] // count))
        return split.mean(-1, keepdim=True).expand_as(split).flatten(-2)

    v = x * value if options.get("gate_first") else x
    rstd = (mean(v.square()) + options["eps"]).rsqrt()
    xhat = v * rstd
    dn = dy if options.get("gate_first") else dy * value
    wdn = dn * factor.abs()
    dv = rstd * (wdn + xhat * mean(wdn * xhat))
    found = {"grad_weight": (dn * xhat).flatten(0, -2).sum(0)}
    if options.get("gate_first"):
        output = xhat * factor.abs()
        return found | {"output": output, "grad_input": dv * value, "grad_gate": dv * x * slope}
    n = xhat * factor.abs()
    return found | {"output": n * value, "grad_input": dv, "grad_gate": dy * n * slope}


def _of_modulated_norm(inputs: dict[str, Tensor], grad: Tensor, options: dict) -> dict[str, Tensor]:
    centred = "bias" in inputs
    x, scale, shift = (inputs[name] for name in ("input", "scale", "shift"))
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + options["eps"]).rsqrt()
    # What subtracting the mean cancels is rounded as the sum behind the mean is.
    cancelled = x.abs().mean(-1, keepdim=True) if centred else 0
    xhat, weight = (x.abs() + cancelled) * rstd, inputs["weight"].abs()
    n = xhat * weight + (inputs["bias"].abs() if centred else 0)
    factor, dy = 1 + scale.abs(), grad.abs()
    wdn = dy * factor * weight
    dx = rstd * (wdn + xhat * (wdn * xhat).mean(-1, keepdim=True))
    if centred:
        dx = dx + rstd * wdn.mean(-1, keepdim=True)
    found = {"grad_scale": dy * n, "grad_shift": dy, "grad_weight": dy * factor * xhat}
    found |= {"grad_bias": dy * factor} if centred else {}
    found = {k: t if inputs[k[5:]].shape == x.shape else t.flatten(0, -2).sum(0)
             for k, t in found.items()}  # fmt: skip
    return found | {"output": n * factor + shift.abs(), "grad_input": dx}


MODULATED = "fused_op.modulated_norm_forward.default", "fused_op.modulated_norm_backward.default"


def _of_post_add_pre_rms_norm(
    inputs: dict[str, Tensor], grad: Tensor, options: dict
) -> dict[str, Tensor]:
    """`lost`: what the roundings of the sum grow by where its terms cancel."""

    def factor(name: str) -> Tensor:
        return inputs[name] + 1 if options.get("zero_centered") else inputs[name]

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    def pullback(dy: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
        return rstd * (dy + xhat * mean(dy * xhat))

    x, dy = inputs["input"], grad.abs()
    rstd = (mean(x.square()) + options["eps"]).rsqrt()
    xhat = x.abs() * rstd
    post, pre = factor("post_weight"), factor("pre_weight").abs()
    sum = inputs["residual"] + x * rstd * post
    post = post.abs()
    total = inputs["residual"].abs() + xhat * post
    sum_rstd = (mean(sum.square()) + options["eps"]).rsqrt()
    lost = 1 + mean(total.square()).sqrt() * sum_rstd
    normalized = total * sum_rstd
    dbranch = pullback(dy * pre, normalized, sum_rstd) * lost**2 + dy / 2
    return {
        "sum": total,
        "output": normalized * pre * lost,
        "grad_pre_weight": (dy * normalized * lost).flatten(0, -2).sum(0),
        "grad_residual": dbranch,
        "grad_post_weight": (dbranch * xhat).flatten(0, -2).sum(0),
        "grad_input": pullback(dbranch * post, xhat, rstd),
    }


def _of_rms_norm_add(inputs: dict[str, Tensor], grad: Tensor, options: dict) -> dict[str, Tensor]:
    weight, dy = inputs["weight"], grad.abs()
    factor = (1 + weight if options.get("zero_centered") else weight).abs()
    rstd = (inputs["input"].square().mean(-1, keepdim=True) + options["eps"]).rsqrt()
    xhat = inputs["input"].abs() * rstd
    along = (dy * factor * xhat).mean(-1, keepdim=True)
    return {
        "output": inputs["residual"].abs() + xhat * factor,
        "grad_residual": dy,
        "grad_weight": (dy * xhat).flatten(0, -2).sum(0),
        "grad_input": rstd * (dy * factor + xhat * along),
    }


def _of_rms_norm_rope(inputs: dict[str, Tensor], grad: Tensor, options: dict) -> dict[str, Tensor]:
    given = rotated({"input": inputs["input"], "turned": options["turned"]})
    cos, sin = (given[name].abs().unsqueeze(-2) for name in ("cos", "sin"))
    half = cos.shape[-1]

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., :half], t[..., half : 2 * half]
        if options.get("style") == "gptj":
            a, b = t[..., 0 : 2 * half : 2], t[..., 1 : 2 * half : 2]
        pairs = a * cos + b * sin, b * cos + a * sin
        gptj = options.get("style") == "gptj"
        turned = torch.stack(pairs, -1).flatten(-2) if gptj else torch.cat(pairs, -1)
        return torch.cat((turned, t[..., 2 * half :]), -1)

    factor = (inputs["weight"] + bool(options.get("zero_centered"))).abs()
    x = inputs["input"].abs()
    rstd = (x.square().mean(-1, keepdim=True) + options["eps"]).rsqrt()
    xhat, dn = x * rstd, turn(grad.abs())
    along = (dn * factor * xhat).mean(-1, keepdim=True)
    return {
        "output": turn(xhat * factor),
        "grad_input": rstd * (dn * factor + xhat * along),
        "grad_weight": (dn * xhat).flatten(0, -2).sum(0),
    }


ROPE = (
    {"turned": 100, "eps": 1e-6},
    {"turned": 50, "style": "gptj", "zero_centered": True, "eps": 1e-6},
    {"turned": 70, "rounding": "before_rotation", "eps": 1e-5},
    {"turned": 100, "rounding": "before_weight", "eps": 1e-6},
    {"turned": 100, "style": "gptj", "rounding": "before_weight", "zero_centered": True,
     "eps": 1e-6},
)  # fmt: skip

GATED = (
    {"eps": 1e-6},
    {"activation": "sigmoid", "zero_centered": True, "eps": 1e-6},
    {"gate_first": True, "rounding": "before_weight", "groups": 2, "eps": 1e-5},
    {"gate_first": True, "activation": "sigmoid", "eps": 1e-6},
    {"rounding": "before_weight", "groups": 4, "zero_centered": True, "eps": 1e-6},
    {"rounding": "before_weight", "eps": 1e-6},
)

VARIANTS = [
    Variant(
        "l2_norm", _l2_norm._L2_NORM, ("input",), _of_l2_norm, options=({}, {"eps": 0.5}),
        ops=("fused_op.l2_norm_forward.default", "fused_op.l2_norm_backward.default"),
    ),
    Variant(
        "gated_rms_norm", _gated_rms_norm._GATED_RMS_NORM, ("input", "gate"), _of_gated_rms_norm,
        ("weight",), GATED,
        ops=(
            "fused_op.gated_rms_norm_forward.default", "fused_op.gated_rms_norm_backward.default",
        ),
    ),
    # A row with an entry of its own, and one entry for all.
    Variant(
        "modulated_layer_norm", _modulated_norm._MODULATED_NORM, ("input", "scale", "shift"),
        _of_modulated_norm, ("weight", "bias"), ({"eps": 1e-6},), MODULATED,
        of_grad=("grad_shift",),
    ),
    Variant(
        "modulated_rms_norm", _modulated_norm._MODULATED_NORM, ("input",),
        _of_modulated_norm, ("scale", "shift", "weight"), ({"eps": 1e-6},), MODULATED,
    ),
    Variant(
        "post_add_pre_rms_norm", _post_add_pre_rms_norm._POST_ADD_PRE_RMS_NORM,
        ("input", "residual"), _of_post_add_pre_rms_norm, ("post_weight", "pre_weight"),
        ({"eps": 1e-6}, {"rounding": "before_weight", "zero_centered": True, "eps": 1e-5}),
        ops=(
            "fused_op.post_add_pre_rms_norm_forward.default",
            "fused_op.post_add_pre_rms_norm_backward.default",
        ),
        outputs={"output": "input", "sum": "residual"}, rounds=True,
    ),
    Variant(
        "rms_norm_add", _rms_norm_add._RMS_NORM_ADD, ("input", "residual"), _of_rms_norm_add,
        ("weight",),
        ({"eps": 1e-6}, {"rounding": "before_weight", "zero_centered": True, "eps": 1e-5}),
        ops=("fused_op.rms_norm_add_forward.default", "fused_op.rms_norm_add_backward.default"),
        outputs={"output": "residual"}, rounds=True, of_grad=("grad_residual",),
    ),
    Variant(
        "rms_norm_rope", _rms_norm_rope._RMS_NORM_ROPE, ("input",), _of_rms_norm_rope,
        ("weight",), ROPE,
        ops=(
            "fused_op.rms_norm_rope_forward.default", "fused_op.rms_norm_rope_backward.default",
        ),
    ),
]  # fmt: skip
CALLS = [(variant, options) for variant in VARIANTS for options in variant.options]


def bound(variant: Variant, options: dict, which: str = "fused") -> Callable:
    """The function with its options, and its tensors by their places."""
    function = partial(getattr(variant, which), **options)
    return lambda *tensors: function(**dict(zip(variant.inputs, tensors, strict=False)))
