"""``convert`` of modules that only an unusual class makes: it never fails, and keeps no class.

Catches an error of one module that ends the conversion of the model, a class that stays in memory,
and a comparison that needs more memory than the model.
"""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from fused_op import convert
from fused_op._fused_class import Formula, fused_class
from fused_op._proof import BATCHES, MORE_BATCHES, MOST_ELEMENTS, _batches
from fused_op._recipe import recipe_of
from tests.norms import COLS, GatedNorm, LlamaNorm


class ShapeOfNothing(LlamaNorm):
    @property
    def normalized_shape(self):
        raise RuntimeError("no shape before setup")


class BiasOfNothing(LlamaNorm):
    @property
    def bias(self):
        raise RuntimeError("no bias before setup")


class GroupsOfNothing(GatedNorm):
    @property
    def n_groups(self):
        raise RuntimeError("no groups before setup")


class FunctionNorm(nn.Module):
    forward = staticmethod(torch.relu)


class SealedGatedNorm(GatedNorm):
    def __init_subclass__(cls):
        raise TypeError("it is final")


def of_shape(shape) -> nn.Module:
    module = LlamaNorm()
    module.normalized_shape = shape
    return module


UNUSUAL = {
    "property": (ShapeOfNothing, "its normalized_shape raises RuntimeError: no shape before setup"),
    "bias": (BiasOfNothing, "its bias raises RuntimeError: no bias before setup"),
    "number": (lambda: of_shape(8.0), "its normalized_shape is a float, not one or several sizes"),
    "word": (lambda: of_shape("last"), "its normalized_shape is a str, not one or several sizes"),
    "tensor": (
        lambda: of_shape(torch.ones(2)),
        "its normalized_shape is a Tensor, not one or several sizes",
    ),
    "not yet": (lambda: of_shape(-1), "normalises no elements"),
    "builtin": (FunctionNorm, "its forward does not tell its arguments"),
    "sealed": (SealedGatedNorm, "its class refuses a subclass: TypeError: it is final"),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_module_does_not_end_the_conversion_of_others(case):
    """Catches an error of one module that leaves the whole model as it was."""
    make, reason = UNUSUAL[case]
    report = convert(nn.Sequential(make(), nn.LayerNorm(COLS)))
    assert [s.reason for s in report.skipped] == [reason]
    assert [c.name for c in report.converted] == ["1"]


def test_groups_whose_number_raises_are_none():
    """Catches the same error of a gated norm, which is converted without them."""
    assert [c.name for c in convert(nn.Sequential(GroupsOfNothing())).converted] == ["0"]


def test_class_that_nobody_uses_is_collected():
    """Catches a cache that keeps every class, and its globals, that was ever converted."""

    def used() -> weakref.ref:
        class Defined(LlamaNorm):
            pass

        module = Defined()
        assert convert(module).converted
        assert type(module) is fused_class(Defined, recipe_of(type(module)))
        return weakref.ref(Defined)

    found = used()
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("cols", [1, 16, 4096, 1 << 16, 1 << 20, 1 << 24])
def test_long_rows_are_compared_in_small_batches(cols):
    """Catches gigabytes for a norm over whole images, and short rows with fewer batches."""
    _, some, more, _ = _batches(Formula("layer_norm", "weight", "eps"), cols)
    for found, listed in zip((*some, *more), (*BATCHES, *MORE_BATCHES), strict=True):
        assert len(found) == len(listed)
        assert math.prod(found) * cols <= max(MOST_ELEMENTS, 7 * cols)
        assert found == listed or math.prod(listed) * cols > MOST_ELEMENTS
        assert math.prod(found) >= min(math.prod(listed), 7)
