"""Norms as other libraries write them, modules that only look like one, and rows for them.

They need no other library: tests/convert/test_convert_architectures.py has the real ones.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.case import generator
from tests.ops import F32

COLS = 24


# Norms as other libraries write them.
class LlamaNorm(nn.Module):
    """Statistics in float32, and a rounding before the weight."""

    def __init__(self, cols=COLS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class ZeroCentredNorm(LlamaNorm):
    """As Gemma's."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1 + self.weight.float())).type_as(x)


class BiaslessLayerNorm(nn.Module):
    def __init__(self, cols=COLS):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(cols)), 1e-5

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class RowsNorm(nn.LayerNorm):
    """As timm's LayerNorm."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ZeroCentredLayerNorm(nn.LayerNorm):
    """As Megatron's and Nemotron's LayerNorm1p: the sum is rounded to the dtype of the weight."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class ImageNorm(RowsNorm):
    """As timm's LayerNorm2d: the channels are dimension 1."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DataFormatNorm(RowsNorm):
    """As the norms of ConvNeXt and SAM in transformers."""

    def __init__(self, cols=COLS, data_format="channels_first"):
        super().__init__(cols, 1e-6)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_first":
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class WideImageNorm(ImageNorm):
    """As timm's LayerNorm2dFp32."""

    def forward(self, x):
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        pixels = x.permute(0, 2, 3, 1).float()
        y = F.layer_norm(pixels, self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype).permute(0, 3, 1, 2)


class PlaneNorm(nn.Module):
    """As SAM's own, and as VitDet's: in the dtype of the image."""

    def __init__(self, cols=COLS):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(cols)), nn.Parameter(torch.zeros(cols))
        self.eps = 1e-6

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class WaveNorm(RowsNorm):
    """As SqueezeBERT's: [N, C, L]."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class ImageRmsNorm(nn.Module):
    """As timm's RmsNorm2dFp32, but with a bias."""

    def __init__(self, cols=COLS):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(cols)), nn.Parameter(torch.zeros(cols))
        self.eps = 1e-5

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + self.eps)
        y = y * self.weight.float().view(1, -1, 1, 1) + self.bias.float().view(1, -1, 1, 1)
        return y.to(x.dtype)


class LlamaImageNorm(LlamaNorm):
    """Of Llama's roundings."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ImageOrRowsNorm(RowsNorm):
    """Tells images by four dimensions, and takes rows otherwise."""

    def forward(self, x):
        if x.dim() < 4:
            return super().forward(x)
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class ShapedRmsNorm(nn.Module):
    """As timm's RmsNorm; without a weight on demand."""

    def __init__(self, cols=COLS, affine=True):
        super().__init__()
        self.normalized_shape, self.eps = (cols,), 1e-6
        self.weight = nn.Parameter(torch.ones(cols)) if affine else None

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class VideoNorm(ShapedRmsNorm):
    """Of any number of spatial dimensions."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states, gate=None):
        y = super().forward(hidden_states)
        return y if gate is None else y * F.silu(gate)


# What only looks like a norm, or has something that a kernel does not know.
class TwoEpsilons(LlamaNorm):
    """Normalises by the root mean square plus eps, which differs for small rows alone."""

    def forward(self, x):
        rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (x.float() / (rms + self.variance_epsilon)).to(x.dtype)


class TwoPlusWeight(LlamaNorm):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, 2 + self.weight, self.variance_epsilon)


class IgnoresWeight(LlamaNorm):
    """Right for a fresh module, whose weights are ones."""

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, None, self.variance_epsilon)


class DetachedStatistics(LlamaNorm):
    """The right output, but another gradient."""

    def forward(self, x):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd.detach())


class NoGradient(LlamaNorm):
    def forward(self, x):
        return super().forward(x).detach()


class WithDropout(LlamaNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


class WiderOutput(LlamaNorm):
    def forward(self, x):
        return super().forward(x).double()


class WithScale(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class ChildNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(COLS)
        self.dropout = nn.Dropout()


class HidesNan(LlamaNorm):
    def forward(self, x):
        return torch.nan_to_num(super().forward(x))


class HidesZeros(LlamaNorm):
    """Rows of zeros, as of padding, become ones."""

    def forward(self, x):
        return torch.where((x == 0).all(-1, keepdim=True), torch.ones_like(x), super().forward(x))


class Clamps(LlamaNorm):
    """Far above what a model in float16 could hold."""

    def forward(self, x):
        return super().forward(x.clamp(-8000, 8000))


class ClampsLittle(LlamaNorm):
    def forward(self, x):
        return super().forward(torch.where(x.abs() < 2**-19, 0, x))


class ManyRows(LlamaNorm):
    def forward(self, x):
        return x if x.shape[0] > 64 else super().forward(x)


class FiveDimensions(LlamaNorm):
    def forward(self, x):
        return x if x.dim() == 6 else super().forward(x)


class Counts(LlamaNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Remembers(LlamaNorm):
    last = None

    def forward(self, x):
        self.last = x.shape
        return super().forward(x)


class Logs(LlamaNorm):
    """A list, which a shallow copy would share."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(len(x.shape))
        return super().forward(x)


class State:
    seen = 0


class LogsInTraining(LlamaNorm):
    """In an object of its own, and in training alone."""

    def __init__(self):
        super().__init__()
        self.state = State()

    def forward(self, x):
        if self.training:
            self.state.seen += 1
        return super().forward(x)


class NeedsGate(LlamaNorm):
    """Of an activation that no kernel has."""

    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * F.gelu(gate)


class NeedsOptionalGate(LlamaNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states) * F.gelu(gate)


class Activation(nn.Module):
    """As XIELUActivation, which has an eps too."""

    def __init__(self):
        super().__init__()
        self.alpha, self.eps = nn.Parameter(torch.ones(1)), 1e-6

    def forward(self, x):
        return self.alpha * F.elu(x) + self.eps


class AffineNorm(nn.Module):
    """As NoNorm of MobileBERT."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(COLS)), nn.Parameter(torch.zeros(COLS))

    def forward(self, x):
        return x * self.weight + self.bias


class RoundsOften(nn.LayerNorm):
    """As DeBERTa's: to 16 bits after the normalisation, the product and the sum."""

    def __init__(self):
        super().__init__(COLS)

    def forward(self, x):
        y = F.layer_norm(x.float(), self.normalized_shape, eps=self.eps).to(x.dtype)
        return self.weight * y + self.bias


class HiddenEpsNorm(nn.Module):
    """As OLMo's: the number is in the code."""

    def __init__(self, number=1e-5):
        super().__init__()
        self.number = number

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], eps=self.number)


class BufferNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(1, 2, COLS))
        self.eps = 1e-6

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class UnusedBufferNorm(BufferNorm):
    """As FalconMamba's, whose weight is there for the sake of some kernels."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class SubclassedParameter(nn.Parameter):
    pass


def rows(cols=COLS, dtype=F32, *batch, device="cpu"):
    """The same numbers on each device."""
    shape = (*(batch or (3, 5)), cols)
    return torch.randn(shape, generator=generator("cpu", "rows", shape)).to(device, dtype)


def randomize(model):
    """Random parameters: those of a fresh norm, ones and zeros, hide mistakes.

    Matrices are small enough for a softmax that does not amplify roundings: T5 has no scale in it.
    """
    g = generator("cpu", "parameters")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.1 if p.dim() > 1 else 1))
    return model


def changed(report):
    return [(c.name, c.before, c.after) for c in report.converted]


def only_reason(report):
    assert not report.converted
    (skipped,) = report.skipped
    return skipped.reason


def small_model():
    return nn.ModuleDict(
        {"a": nn.LayerNorm(8), "b": LlamaNorm(8), "c": nn.ModuleList([RowsNorm(8)])}
    )
