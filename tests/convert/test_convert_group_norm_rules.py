"""What `convert` leaves alone beside group norms: classes that only look like one.

Catches a module that is converted although it computes something else for some layout, mode or
number of images, and one that is left with traces of the attempt.
"""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_op import FusedGroupNorm, convert
from tests.norms import only_reason
from tests.ops import BF16

GROUPS, CHANNELS = 4, 24


class Doubles(nn.GroupNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Residual(nn.GroupNorm):
    def forward(self, x):
        return x + super().forward(x)


class Unbiased(nn.GroupNorm):
    def forward(self, x):
        y = x.reshape(x.shape[0], self.num_groups, -1)
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + self.eps).sqrt()
        shape = -1, *[1] * (x.dim() - 2)
        return y.reshape(x.shape) * self.weight.view(shape) + self.bias.view(shape)


class Interleaved(nn.GroupNorm):
    """Its groups are not neighbours."""

    def forward(self, x):
        y = x.unflatten(1, (-1, self.num_groups)).transpose(1, 2).flatten(1, 2)
        y = F.group_norm(y, self.num_groups, None, None, self.eps)
        y = y.unflatten(1, (self.num_groups, -1)).transpose(1, 2).flatten(1, 2)
        shape = -1, *[1] * (x.dim() - 2)
        return y * self.weight.view(shape) + self.bias.view(shape)


class OtherInMemory(nn.GroupNorm):
    def forward(self, x):
        y = super().forward(x)
        return y if x.is_contiguous() else y + 1


class OtherOfLarge(nn.GroupNorm):
    def forward(self, x):
        return x if x.shape[0] > 64 else super().forward(x)


class OtherInTraining(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class Detached(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.detach()) + 0 * x


class HidesNan(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x).nan_to_num()


class Counts(nn.GroupNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class NeedsScale(nn.GroupNorm):
    def forward(self, x, scale):
        return super().forward(x) * scale


class With16Bits(nn.GroupNorm):
    def forward(self, x):
        y = x.reshape(x.shape[0], self.num_groups, -1)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        shape = -1, *[1] * (x.dim() - 2)
        return y.reshape(x.shape) * self.weight.view(shape) + self.bias.view(shape)


def patched():
    module = nn.GroupNorm(GROUPS, CHANNELS)
    module.forward = functools.partial(F.relu)
    return module


def with_scale():
    module = nn.GroupNorm(GROUPS, CHANNELS)
    module.scale = nn.Parameter(torch.ones(1))
    return module


def of(cls):
    return lambda: cls(GROUPS, CHANNELS)


OTHER = "differs from group_norm of 4 groups by more than torch.float32 rounds"
REFUSED = {
    "doubles": (of(Doubles), OTHER),
    "residual": (of(Residual), "is not a norm: its output grows with its input|" + OTHER),
    "unbiased": (of(Unbiased), OTHER),
    "interleaved": (of(Interleaved), OTHER),
    "layout": (of(OtherInMemory), OTHER),
    "many images": (of(OtherOfLarge), OTHER),
    "training": (of(OtherInTraining), OTHER),
    "gradient": (of(Detached), "the gradient of its input is another than that of group_norm"),
    "NaN": (of(HidesNan), "hides NaN or infinities of its input"),
    "counts": (of(Counts), "its forward changes its attribute calls"),
    "scale": (of(NeedsScale), r"its forward takes more than the input \(scale\)"),
    "16 bits": (
        lambda: With16Bits(GROUPS, CHANNELS).to(BF16),
        "differs from group_norm of 4 groups by (roundings to torch.bfloat16 in between|more than)",
    ),
    "patched": (patched, "its forward is replaced on the instance"),
    "parameter": (with_scale, r"has parameters other than weight and bias \(scale\)"),
    "instance": (lambda: nn.InstanceNorm2d(CHANNELS, affine=True), "is a batch or instance norm"),
    "batch": (lambda: nn.BatchNorm2d(CHANNELS), "is a batch or instance norm"),
    "fused": (of(FusedGroupNorm), "is fused already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_left_as_it_was(case, device):
    make, reason = REFUSED[case]
    module = make().to(device)
    kept, before = dict(module.__dict__), type(module)
    found = only_reason(convert(module))
    assert re.match(reason, found), found
    assert type(module) is before and module.__dict__ == kept


def test_report_is_a_table():
    model = nn.ModuleDict({"norm": nn.GroupNorm(GROUPS, CHANNELS), "other": Doubles(4, CHANNELS)})
    assert str(convert(model)).splitlines() == [
        "norms changed: 1, left as they are: 1",
        "  norm   GroupNorm -> FusedGroupNorm",
        f"  other  Doubles                      {OTHER}",
    ]
