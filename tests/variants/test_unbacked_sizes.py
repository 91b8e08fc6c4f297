"""Compiled code for sizes that only the data tells, as that of `x[mask]`.

Catches a question about such a size, to which a compiler has no answer. Dynamo asks in the Python
code, and PyTorch in the function that foretells the results of an op.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

import fused_op
from tests.calls import assert_same, loss, outputs
from tests.case import generator
from tests.ops import BF16, F32

pytestmark = pytest.mark.skipif(
    not hasattr(symbolic_shapes, "guard_or_false"),
    reason="PyTorch 2.7 leaves no comparison of such sizes undecided",
)

MASKS = [1, 1, 0, 0, 1], [0, 1, 0, 0, 0], [0] * 5, [1] * 5
N, C = 5, 16  # N of the dimension that is selected from


@dataclass(frozen=True)
class Call:
    """`function(*selected, *whole)`; along `dim` of the selected ones there are any number."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    selected: list[tuple[int, ...]]
    whole: list[tuple[int, ...]] = field(default_factory=list)
    dim: int = 0
    memory_format: torch.memory_format = torch.contiguous_format
    sentence: str | None = None  # what is said of tensors that differ in size

    def tensors(self, device: str, dtype: torch.dtype = F32) -> list[Tensor]:
        g = generator(device, self.selected, self.whole)
        made = [torch.randn(s, generator=g, device=device) for s in (*self.selected, *self.whole)]
        made = [t.to(dtype) for t in made]
        return [t.contiguous(memory_format=self.memory_format) if t.dim() == 4 else t for t in made]

    def run(self, indices: list[Tensor], *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """With indices of its own, or the same ones, for each tensor that is selected from."""
        count = len(self.selected)
        pairs = zip(tensors[:count], indices * (count // len(indices)), strict=True)
        before = (slice(None),) * self.dim
        return self.function(*(t[(*before, i)] for t, i in pairs), *tensors[count:])


def rotated(function, *args, **options):
    """An angle gets no gradient."""
    cos, sin = (angle.detach().cos() for angle in args[1:3])
    return function(args[0], cos, sin, *args[3:], **options)


def quantized(function, *args, **options):
    """What is differentiated; the rest of the results is tested by the output."""
    found = function(*args, keep_output=True, **options)
    return found.output if found.sum is None else (found.output, found.sum)


def image(input, weight, bias, **options):
    return fused_op.fused_group_norm(input, 4, weight, bias, **options)


def image_of_samples(input, scale, shift, weight, bias):
    return image(input, weight, bias, scale=scale, shift=shift, activation="silu")


def turned(function, x, *parameters):
    """Rows in another order of memory."""
    return function(x.transpose(0, 2), *parameters)


def kept_format(x):
    return fused_op.fused_rms_norm(x.movedim(1, -1).contiguous().movedim(-1, 1), None)


MODULATED = fused_op.fused_modulated_layer_norm
GATED = fused_op.fused_gated_add_rms_norm
ROWS, SAMPLES = (N, C), (N, 3, C)
OF_RESIDUAL = "residual must have the shape of input"
OF_SCALE = "the shape of scale must be the first dimensions of input"
CALLS = {
    "layer_norm": Call(fused_op.fused_layer_norm, [ROWS], [(C,)]),
    "add_layer_norm": Call(fused_op.fused_add_layer_norm, [ROWS] * 2, [(C,)], sentence=OF_RESIDUAL),
    "turned": Call(partial(turned, fused_op.fused_layer_norm), [(N, 3, 5, C)], [(C,)]),
    "kept_format": Call(kept_format, [(N, 3, 5, C)]),
    "modulated_of_rows": Call(MODULATED, [ROWS] * 3, [(C,)], sentence=OF_SCALE),
    "modulated_of_all": Call(MODULATED, [ROWS], [(C,), (C,), (C,)]),
    "modulated_of_one": Call(MODULATED, [SAMPLES], [(1, 1, C), (1, 1, C), (C,)]),
    "modulated_of_samples": Call(MODULATED, [SAMPLES, ROWS, ROWS], [(C,)], sentence=OF_SCALE),
    "modulated_of_tokens": Call(MODULATED, [SAMPLES] * 3, [(C,)], sentence=OF_SCALE),
    "modulated_tokens": Call(MODULATED, [(2, N, C)], [(2, C), (2, C), (C,)], dim=1),
    "modulated_rms_norm": Call(fused_op.fused_modulated_rms_norm, [SAMPLES, ROWS],
                               sentence=OF_SCALE),
    "gated_add_of_all": Call(GATED, [ROWS] * 2, [(1, C)] * 3, sentence=OF_RESIDUAL),
    "gated_add_of_frames": Call(GATED, [(N, 2, 3, C)] * 2 + [(N, 2, 1, C)] * 3,
                                sentence=OF_RESIDUAL),
    "gated_add_layer_norm": Call(fused_op.fused_gated_add_layer_norm, [SAMPLES] * 2 + [ROWS] * 3,
                                 sentence=OF_RESIDUAL),
    "gated_rms_norm": Call(partial(fused_op.fused_gated_rms_norm, group_size=8), [SAMPLES] * 2,
                           [(C,)], sentence="gate must have the shape of input"),
    "l2_norm": Call(fused_op.fused_l2_norm, [ROWS]),
    "post_add_pre_rms_norm": Call(fused_op.fused_post_add_pre_rms_norm, [ROWS] * 2, [(C,), (C,)],
                                  sentence=OF_RESIDUAL),
    "rms_norm_add": Call(fused_op.fused_rms_norm_add, [ROWS] * 2, [(C,)], sentence=OF_RESIDUAL),
    "rms_norm_rope": Call(partial(rotated, fused_op.fused_rms_norm_rope),
                          [(N, 4, C), (N, 8), (N, 8)], [(4, C)], sentence="cos must have shape"),
    "qk_norm_rope": Call(
        partial(rotated, fused_op.fused_qk_norm_rope, heads=2, kv_heads=1),
        [(N, 3, 4 * C), (N, 3, 8), (N, 3, 8)], [(C,), (C,)], sentence="cos must have shape",
    ),
    "group_norm": Call(image, [(N, C, 3, 3)], [(C,), (C,)]),
    "group_norm_of_samples": Call(image_of_samples, [(N, C, 3, 3), ROWS, ROWS], [(C,), (C,)],
                                  sentence="scale must have shape"),
    "group_norm_pixels": Call(image, [(2, C, N)], [(C,), (C,)], dim=2),
    "channels_first_layer_norm": Call(fused_op.fused_channels_first_layer_norm, [(N, C, 3, 3)],
                                      [(C,), (C,)]),
    "channels_first_pixels": Call(fused_op.fused_channels_first_rms_norm, [(2, C, N)], [(C,)],
                                  dim=2),
    "channels_last": Call(fused_op.fused_channels_first_rms_norm, [(N, C, 3, 3)], [(C,)],
                          memory_format=torch.channels_last),
    "rms_norm_quantized": Call(partial(quantized, fused_op.fused_rms_norm_quantized,
                                       scheme="block128", scale_layout="transposed"), [SAMPLES]),
    "add_layer_norm_quantized": Call(
        partial(quantized, fused_op.fused_add_layer_norm_quantized, scheme="token"), [ROWS] * 2,
        [(C,)], sentence=OF_RESIDUAL,
    ),
}  # fmt: skip
# Of transposed scales, Dynamo of PyTorch 2.11 raises PendingUnbackedSymbolNotFound.
needs_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="needs PyTorch 2.13")
every_call = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_2_13 if n == "rms_norm_quantized" else ()) for n in CALLS],
)
OF_SEVERAL = [name for name, call in CALLS.items() if call.sentence is not None]


@pytest.fixture(autouse=True)
def captured():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def mask_of(numbers, device):
    return torch.tensor(numbers, dtype=torch.bool, device=device)


def with_one_mask(call, mask, *tensors):
    return call.run([torch.nonzero(mask).squeeze(1)], *tensors)


def with_masks(call, masks, *tensors):
    """To the compiler, none of the sizes is that of another."""
    return call.run([torch.nonzero(mask).squeeze(1) for mask in masks], *tensors)


def check(compiled, eager, tensors, given):
    """Forward with a gradient to come and without, and backward."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    result, expected = compiled(given, *leaves), eager(given, *leaves)
    assert_same(result, expected)
    found, wanted = (
        torch.autograd.grad(loss(y), leaves, allow_unused=True) for y in (result, expected)
    )
    for mine, right in zip(found, wanted, strict=True):
        assert (mine is None) == (right is None)
        if right is not None:
            assert_same(mine, right)
    with torch.no_grad():
        assert_same(compiled(given, *tensors), expected)


@pytest.mark.slow
@every_call
def test_one_selection(name, device):
    call = CALLS[name]
    eager = partial(with_one_mask, call)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for mask in MASKS:
        check(compiled, eager, call.tensors(device), mask_of(mask, device))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SEVERAL)
def test_a_selection_for_each_tensor(name, device):
    """Sizes that differ after all are the op's to refuse."""
    call = CALLS[name]
    eager = partial(with_masks, call)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    count, tensors = len(call.selected), call.tensors(device)
    for mask in MASKS:
        masks = [mask_of(mask[i:] + mask[:i], device) for i in range(count)]
        check(compiled, eager, tensors, masks)
    masks = [mask_of([i < 3 + (k == 1) for i in range(N)], device) for k in range(count)]
    for function in (eager, compiled):
        with torch.no_grad(), pytest.raises(RuntimeError, match=call.sentence):
            function(masks, *tensors)


@pytest.mark.slow
@every_call
def test_export(name, device):
    call = CALLS[name]
    tensors = call.tensors(device)

    class Module(torch.nn.Module):
        def forward(self, mask, *tensors):
            return with_one_mask(call, mask, *tensors)

    for strict in (False, True):
        args = mask_of(MASKS[0], device), *tensors
        program = torch.export.export(Module(), args, strict=strict).module()
        for mask in MASKS:
            mask = mask_of(mask, device)
            expected = with_one_mask(call, mask, *tensors)
            assert_same(program(mask, *tensors), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modulated_of_samples", "gated_add_of_all"])
def test_inductor(name, device):
    call = CALLS[name]

    def block(mask, *tensors):
        return tuple(t.relu() for t in outputs(with_one_mask(call, mask, *tensors)))

    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(block, fullgraph=True)
        for mask in MASKS:
            check(compiled, block, call.tensors(device, BF16), mask_of(mask, device))


def test_export_of_innermost_channels(device):
    """Catches a question about the layout of an image whose size only the data tells."""

    class Cut(torch.nn.Module):
        def forward(self, image, rows):
            n = rows.item()
            torch._check(n >= 1)
            torch._check(n <= 3)
            return fused_op.fused_group_norm(image[:, :, :n], 2)

    image = torch.randn(2, 4, 3, 5, device=device).to(memory_format=torch.channels_last)
    given = image, torch.tensor(2)
    for strict in (True, False):
        exported = torch.export.export(Cut(), given, strict=strict).module()
        assert_same(exported(*given), Cut()(*given))


def test_the_op_with_an_unknown_number_of_channels(device):
    """Catches strides that the compiler expects and the op does not make."""

    def call(count):
        n = count.item()
        torch._check(n >= 1)
        torch._check(n <= 50)
        images = torch.arange(72 * n, device=device).float().sin().reshape(2, 6, 6, n)
        none = (None,) * 4
        op = torch.ops.fused_op.group_norm_forward
        return op(images.permute(0, 3, 1, 2), *none, 1, 1e-5, None, False)[0] + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, fullgraph=True)
        for n in (5, 1):
            assert_same(compiled(torch.tensor(n)), call(torch.tensor(n)), rtol=1e-5, atol=1e-6)
