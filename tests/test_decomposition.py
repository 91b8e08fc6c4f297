"""The decomposition of the forward op, in which the exporter of ONNX finds what it knows.

Catches a result or an option that it forgets, and a fake tensor that runs it in place of the rule
for shapes.
"""

import random

import pytest
import torch
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.ops import F32, F64

OP = torch.ops.fused_op.norm_forward.default


@pytest.mark.parametrize("seed", range(60))
def test_results_of_the_op(seed, pair, device):
    draw = random.Random(f"{seed} {pair}")
    generator = torch.Generator().manual_seed(seed)
    norm, wide = draw.choice(["layer_norm", "rms_norm"]), F64 if pair.rows is F64 else F32
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    ndim = draw.randint(1, len(shape))

    def tensor(shape, dtype):
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, residual = (tensor(shape, pair.rows) for _ in range(2))
    weight, bias = (tensor(shape[-ndim:], pair.params) for _ in range(2))
    adds, p = draw.random() < 0.5, draw.choice([0.0, 0.4])
    args = (
        *(norm, x, residual if adds else None, weight if draw.random() < 0.7 else None),
        bias if norm == "layer_norm" and draw.random() < 0.7 else None,
        *(torch.tensor([3, seed]) if p else None, ndim, 1e-3, draw.random() < 0.5, p),
        *(draw.choice([None, wide]), draw.choice([None, wide]) if adds else None),
        draw.random() < 0.5,
    )
    for found, expected in zip(decomposition_table[OP](*args), OP(*args), strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        torch.testing.assert_close(
            found, expected, rtol=1e-2, atol=1e-3
        ) if found.dtype.itemsize == 2 else torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5
        )


def test_fake_tensors_take_the_rule_for_shapes(monkeypatch):
    def fail(*args):
        raise AssertionError("a fake tensor runs the decomposition")

    monkeypatch.setitem(decomposition_table, OP, fail)
    for mode in (FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())):
        x = mode.from_tensor(torch.randn(3, 6))
        args = (None, None, None, None, 1, 1e-5, False, 0.0, None, None, True)
        output, _, stats = OP("rms_norm", x, *args)
        assert output.shape == x.shape and stats.shape == (1, x.shape[0])
