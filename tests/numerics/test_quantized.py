"""Quantised outputs: the bits of other libraries' rules, applied to the output of the norm.

The rules here are written from their sources, in their words: torchao's float8_utils.py, vLLM's
layernorm_quant_kernels.cu, DeepGEMM's utils/math.py, TransformerEngine's recipe_common.cuh.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import fused_op
from tests.case import generator
from tests.ops import BF16, DEVICES, F16, F32

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
OPS = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]


# The rules. Each takes blocks of float32 values, [..., columns], and their largest magnitudes,
# [..., 1]; it returns what is quantised, before it is rounded to 8 bits, and the scales.
def torchao(y: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple:
    scale = torch.finfo(dtype).max / torch.clamp(amax.to(torch.float64), min=1e-12)
    scale = scale.to(torch.float32)
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return y * scale, scale.reciprocal()


def quotient(amax: Tensor, largest: float) -> Tensor:
    """On a GPU, PyTorch multiplies by the inverse of a divisor that is a number."""
    return amax / amax.new_tensor(largest)


def vllm(y: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple:
    if dtype == torch.int8:
        scale = quotient(amax, 127.0).clamp(min=torch.finfo(F32).eps)
        return y * (1.0 / scale), scale
    scale = quotient(amax, 448.0).clamp(min=1.0 / (448.0 * 512.0))
    return y / scale, scale


def deep_gemm(y: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple:
    sf = quotient(amax.clamp(1e-4), 448.0)
    if power_of_two:
        bits = sf.abs().float().view(torch.int)
        exp = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
        sf = (exp.clamp(1, 254) << 23).view(torch.float)
    return y * (1.0 / sf), sf


def te(y: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple:
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax  # __fdiv_rn
    scale[scale.isinf()] = torch.finfo(BF16).max  # value_for_inf of bfloat16 outputs
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(F32)
    scale[(amax == 0) | amax.isinf() | amax.isnan()] = 1.0
    return y * scale, 1.0 / scale


@dataclass(frozen=True)
class Rule:
    formula: Callable
    scheme: str
    dtype: torch.dtype
    power_of_two: bool = False
    extras: dict = field(default_factory=dict)

    @property
    def arguments(self) -> dict:
        given = {"scheme": self.scheme, "dtype": self.dtype, "convention": self.formula.__name__}
        return given | {"power_of_two": self.power_of_two} | self.extras

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.formula.__name__}-{self.scheme}-{dtype}" + "-power" * self.power_of_two

    def __call__(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The 8 bits and the scales of an output."""
        cols = y.shape[-1]
        blocks = y.float().unsqueeze(-2)
        if self.scheme == "block128":
            blocks = torch.nn.functional.pad(y.float(), (0, -cols % 128)).unflatten(-1, (-1, 128))
        amax = blocks.abs().amax(-1, keepdim=True)
        scaled, scale = self.formula(blocks, amax, self.dtype, self.power_of_two)
        return to_8_bits(scaled, self.dtype).flatten(-2)[..., :cols], scale.squeeze(-1)


def to_8_bits(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.round(scaled).clamp(-128, 127).nan_to_num(0).to(dtype)
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).to(dtype)


RULES = [
    *(Rule(torchao, *r) for r in itertools.product(["token", "block128"], [E4M3, E5M2], [0, 1])),
    *(Rule(vllm, *r) for r in itertools.product(["token", "block128"], [E4M3, torch.int8])),
    *(Rule(deep_gemm, "block128", E4M3, power) for power in (False, True)),
    *(Rule(te, "block128", *r) for r in itertools.product([E4M3, E5M2], [False, True])),
]
RULES = [Rule(r.formula, r.scheme, r.dtype, bool(r.power_of_two)) for r in RULES]


def bits(x: Tensor) -> Tensor:
    """As integers; every NaN is the same."""
    x = x.contiguous()
    if x.dtype == E8M0 or not x.dtype.is_floating_point:
        return x.view(torch.uint8) if x.element_size() == 1 else x
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(x.float().isnan(), 127, x.view(integers))


def assert_bits(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        different = bits(actual) != bits(expected)
        assert not different.any(), f"{int(different.sum())} of {different.numel()} differ"


def op_of(name: str) -> Callable:
    return getattr(fused_op, f"fused_{name}_quantized")


def norm_of(name: str) -> Callable:
    return getattr(fused_op, f"fused_{name}")


def tensors_of(name: str, shape: tuple, device: str, dtype=BF16, params=None, **kw) -> list:
    g = generator(device, name, shape, dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    rows = [(normal(*shape) * 3 + normal(*shape[:-1], 1)).to(dtype) for _ in range(2)]
    weight, bias = (normal(shape[-1]).to(params or dtype) for _ in range(2))
    given = rows[: 1 + name.startswith("add")] + [weight] + [bias] * ("layer" in name)
    return [t.requires_grad_(**kw) for t in given] if kw else given


def with_output(name: str, y: Tensor, rule: Rule, **extras) -> fused_op.QuantizedNorm:
    """The op's results where the output is y, one row of any values: a bias without a weight."""
    x = torch.arange(y.numel(), device=y.device).to(y.dtype).sin()
    return fused_op.fused_layer_norm_quantized(
        x[None], torch.zeros_like(y), y, keep_output=True, **rule.arguments, **extras
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_bits_are_those_of_the_convention(rule, dtype, device):
    """Catches another scale, another rounding, a block that ends elsewhere."""
    for name, cols in zip(
        itertools.cycle(OPS), (1, 8, 100, 128, 129, 600, 1024, 4097), strict=False
    ):
        tensors = tensors_of(name, (5, cols), device, dtype)
        result = op_of(name)(*tensors, keep_output=True, **rule.arguments)
        quantized, scale = rule(result.output)
        assert_bits(result.scale, scale)
        assert_bits(result.quantized, quantized)
        unquantized = norm_of(name)(*tensors)
        output, total = unquantized if "add" in name else (unquantized, None)
        assert_bits(result.output, output)
        assert_bits(result.sum, total)
        bare = op_of(name)(*tensors, **rule.arguments)
        assert bare.output is None
        for actual, expected in zip(bare[:2] + bare[3:], result[:2] + result[3:], strict=True):
            assert_bits(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_bfloat16_value(rule, device):
    """Catches a conversion that is wrong anywhere: subnormals, ties, the largest, infinity, NaN."""
    values = torch.arange(1 << 16, device=device).to(torch.int32).to(torch.int16).view(BF16)
    order = values.abs().float().nan_to_num(torch.inf).argsort()
    for y in values[order].split(1 << 16 if rule.scheme == "block128" else 1 << 9):
        result = with_output("layer_norm", y, rule)
        assert_bits(result.output[0], y + 0)  # which takes the sign from zero
        quantized, scale = rule(result.output)
        assert_bits(result.quantized, quantized)
        assert_bits(result.scale, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
@pytest.mark.parametrize("given", [1.0, 0.37, 1e-9, 1e30])
def test_the_scale_of_a_tensor(given, dtype, device):
    """Catches a product with anything else than the inverse, or what is not saturated."""
    values = torch.arange(1 << 16, device=device).to(torch.int32).to(torch.int16).view(BF16)
    scale = torch.tensor(given, device=device)
    for convention in ("torchao", "te") if dtype != torch.int8 else ("vllm",):
        rule = Rule(torchao, "tensor", dtype, extras={"convention": convention, "scale": scale})
        result = with_output("layer_norm", values, rule)
        factor = scale if convention == "te" else 1 / scale
        assert_bits(result.quantized, to_8_bits(result.output.float() * factor, dtype))
        assert_bits(result.scale, 1 / scale if convention == "te" else scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_do_not_depend_on_others(rule, device):
    """Catches NaN or infinity that leave their row, and bits that change with the rows."""
    for name, cols in (("rms_norm", 300), ("add_layer_norm", 1000), ("layer_norm", 7)):
        tensors = tensors_of(name, (37, cols), device)
        expected = op_of(name)(*tensors, **rule.arguments)
        adds = name.startswith("add")
        rows, params = tensors[: 1 + adds], tensors[1 + adds :]
        for first, last in ((0, 1), (5, 9), (36, 37)):
            part = op_of(name)(*(t[first:last] for t in rows), *params, **rule.arguments)
            for actual, whole in zip(part[:2], expected[:2], strict=True):
                assert_bits(actual, whole[first:last])
        rows[0][3, -1], rows[0][8, 0], rows[0][20] = torch.nan, torch.inf, 0
        others = [i for i in range(37) if i not in (3, 8, 20)]
        result = op_of(name)(*tensors, keep_output=True, **rule.arguments)
        for actual, whole in zip(result[:2], expected[:2], strict=True):
            assert torch.equal(bits(actual)[others], bits(whole)[others])
        quantized, scale = rule(result.output)
        assert_bits(result.quantized, quantized)
        assert_bits(result.scale, scale)


def test_rows_of_zeros_and_the_largest_value():
    """Catches a division by zero, and a largest value that is rounded past what fp8 holds."""
    x = torch.zeros(2, 256, dtype=BF16)
    x[1, 7] = 1
    for rule in RULES:
        result = fused_op.fused_rms_norm_quantized(x, eps=1e-5, **rule.arguments)
        assert (result.quantized[0].float() == 0).all(), rule
        assert result.scale[0].isfinite().all() and (result.scale[0] > 0).all(), rule
        largest = 127 if rule.dtype == torch.int8 else torch.finfo(rule.dtype).max
        found = float(result.quantized[1].float().max())
        assert largest / (2 if rule.power_of_two else 1) <= found <= largest, (rule, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("keep_output", [True, False])
def test_the_gradient_is_that_of_the_norm(name, keep_output, device):
    """Catches a gradient of what is rounded, and one that a placeholder loses."""
    rule = RULES[0]
    for shape in ((4, 33), (2, 3, 256)):
        tensors = tensors_of(name, shape, device, requires_grad=True)
        result = op_of(name)(*tensors, keep_output=keep_output, **rule.arguments)
        assert not result.quantized.requires_grad and not result.scale.requires_grad
        assert result.output.shape == shape and result.output.dtype == BF16
        if not keep_output:
            assert result.output.isnan().all() and result.output.untyped_storage().nbytes() == 2
        expected = norm_of(name)(*tensors)
        expected = expected if isinstance(expected, tuple) else (expected,)
        outputs = [result.output, result.sum][: len(expected)]
        grads = [torch.randn_like(t) for t in expected]
        ours = torch.autograd.grad(outputs, tensors, grads, retain_graph=True)
        theirs = torch.autograd.grad(expected, tensors, grads)
        for actual, wanted in zip(ours, theirs, strict=True):
            assert_bits(actual, wanted)
        if len(outputs) > 1:  # through the sum alone
            (one,) = torch.autograd.grad(outputs[1], tensors[:1], grads[1])
            assert_bits(one, grads[1])


@pytest.mark.parametrize("name", OPS)
def test_frozen_inputs_and_second_derivatives(name):
    """Catches a gradient that needs all of them, or is no function of the gradient's gradient."""
    for wanted in range(len(tensors_of(name, (3, 16), "cpu"))):
        tensors = tensors_of(name, (3, 16), "cpu", F32)
        tensors[wanted].requires_grad_()
        result, plain = op_of(name)(*tensors), norm_of(name)(*tensors)
        plain = plain[0] if isinstance(plain, tuple) else plain
        grad = torch.randn_like(plain).requires_grad_()
        seconds = []
        for output in (result.output, plain):
            (first,) = torch.autograd.grad(output, tensors[wanted], grad, create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), (tensors[wanted], grad),
                                               allow_unused=True))  # fmt: skip
        for ours, theirs in zip(*seconds, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_dtype", [F32, E8M0])
def test_transposed_scales(scale_dtype, device):
    """Catches scales that DeepGEMM and scaled_mm would read elsewhere."""
    for leading, cols in itertools.product(((1,), (4,), (7,), (2, 3), (2, 1, 5)), (128, 130, 700)):
        tensors = tensors_of("rms_norm", (*leading, cols), device)
        rule = {"scheme": "block128", "convention": "deep_gemm", "power_of_two": True}
        rule["scale_dtype"] = scale_dtype
        plain = fused_op.fused_rms_norm_quantized(*tensors, **rule)
        result = fused_op.fused_rms_norm_quantized(*tensors, scale_layout="transposed", **rule)
        assert_bits(result.quantized, plain.quantized)
        assert_bits(result.scale, plain.scale)
        rows, blocks = plain.scale.flatten(0, -2).shape
        padded = (rows + 3) // 4 * 4
        assert result.quantized.is_contiguous()
        whole = result.quantized.as_strided((padded, cols), (cols, 1))
        assert_bits(whole[:rows], plain.quantized.view(rows, cols))
        assert (whole[rows:].float() == 0).all()
        whole = result.scale.as_strided((padded, blocks), (1, padded))
        assert_bits(whole[:rows], plain.scale.view(rows, blocks))
        assert (whole[rows:].t().contiguous().view(torch.uint8) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [RULES[0], RULES[9], RULES[14]], ids=str)
def test_layouts_shapes_and_options(rule, device):
    """Catches a row that is read or written elsewhere than it lies."""
    x, weight, bias = tensors_of("layer_norm", (6, 4, 300), device)
    views = [
        x[::2],
        x.transpose(0, 1),
        x[..., 1:258],
        x[..., ::3],
        x.flatten()[1:1201].view(4, 300),
    ]
    for view in views:
        params = weight[: view.shape[-1]], bias[: view.shape[-1]]
        result = fused_op.fused_layer_norm_quantized(view, *params, **rule.arguments)
        copy = fused_op.fused_layer_norm_quantized(view.clone(), *params, **rule.arguments)
        for actual, expected in zip(result[:2], copy[:2], strict=True):
            assert_bits(actual, expected)
    together = fused_op.fused_rms_norm_quantized(x, normalized_shape=(4, 300), **rule.arguments)
    flat = fused_op.fused_rms_norm_quantized(x.view(6, 1200), **rule.arguments)
    assert_bits(together.quantized.view(6, 1200), flat.quantized)
    assert_bits(together.scale, flat.scale)
    for options in (
        {"zero_centered": True}, {"rounding": "before_weight"}, {"out_dtype": F32}, {"eps": 0.5}
    ):  # fmt: skip
        result = fused_op.fused_rms_norm_quantized(
            x, weight, keep_output=True, **options, **rule.arguments
        )
        assert_bits(result.output, fused_op.fused_rms_norm(x, weight, **options))
        assert_bits(result.quantized, rule(result.output)[0])
    result = fused_op.fused_add_rms_norm_quantized(
        x, x.float(), weight.float(), keep_output=True, **rule.arguments
    )
    assert result.sum.dtype == F32
    assert_bits(result.quantized, rule(result.output)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cols", [20000, 70001])
def test_long_rows(cols, device):
    """Catches rows of several parts of which each has a scale of its own."""
    for name, rule in (("rms_norm", RULES[0]), ("add_layer_norm", RULES[10])):
        tensors = tensors_of(name, (3, cols), device)
        result = op_of(name)(*tensors, keep_output=True, **rule.arguments)
        quantized, scale = rule(result.output)
        assert_bits(result.quantized, quantized)
        assert_bits(result.scale, scale)
        assert_bits(op_of(name)(*tensors, **rule.arguments).quantized, quantized)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [RULES[0], RULES[8], RULES[13]], ids=str)
def test_nothing_to_quantize(rule, device):
    for shape in ((0, 128), (3, 0), (0, 0)):
        x = torch.zeros(shape, dtype=BF16, device=device)
        ours, twin = (m.fused_rms_norm_quantized(x, keep_output=True, **rule.arguments)
                      for m in (fused_op, fused_op.reference))  # fmt: skip
        for actual, expected in zip(ours, twin, strict=True):
            assert_bits(actual, expected)
