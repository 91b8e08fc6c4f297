"""Modules with SiLU behind a group norm, for the tests of ``convert(activation=True)``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import profile

from fused_op.convert import Report

CHANNELS = 8
# Of values and gradients in float32: gradients are sums over pixels, in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class GroupNorm32(nn.GroupNorm):
    """The group norm of guided diffusion and what came from it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class Activated(nn.Module):
    """A group norm and SiLU; subclasses put one behind the other."""

    def __init__(self, norm: type[nn.Module] = nn.GroupNorm, affine: bool = True) -> None:
        super().__init__()
        self.norm = norm(2, CHANNELS, affine=affine)
        self.act = nn.SiLU()


class InOneStatement(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x * 2)) + x


class InTwoStatements(Activated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = self.act(hidden)
        return hidden


class ByFunction(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class ByAnyOfItsNames(Activated):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = torch.nn.functional.silu(x)
        return functional.silu(x)


class AfterBranches(Activated):
    """As ResnetBlock2D of diffusers."""

    def forward(self, x: Tensor, kind: str = "plain") -> Tensor:
        if kind == "plain":
            if x.dim() == 4:
                x = x + 1
            x = self.norm(x)
        elif kind == "double":
            x = self.norm(x)
            x = x * 2
        elif kind == "none":
            return x
        else:
            x = self.norm(x - 1)
        x = self.act(x)
        return x


class AfterABranch(Activated):
    """Without a norm, the activation remains."""

    def forward(self, x: Tensor, normalizes: bool = True) -> Tensor:
        for _ in range(2):
            if normalizes:
                x = self.norm(x)
            x = self.act(x)
        return x


class InASequence(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.GroupNorm, affine: bool = True) -> None:
        super().__init__()
        act = nn.SiLU()  # twice, and the second one behind no norm
        self.layers = nn.Sequential(norm(2, CHANNELS, affine=affine), act, act, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def activations(report: Report) -> dict[str, int]:
    return {block.type_name: block.activations for block in report.blocks}


def operations(run) -> tuple[int, int]:
    """How many group norms of this package run, and how many SiLUs beside them."""
    with profile() as trace:
        run()
    names = [event.name for event in trace.events()]
    fused = names.count("fused_op::group_norm_forward")
    return fused, sum(name in ("aten::silu", "aten::silu_") for name in names)


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, CHANNELS, 4, 5, device=device, dtype=dtype, requires_grad=True)


def results(module: nn.Module, x: Tensor, *options: object) -> list[Tensor]:
    output = module(x, *options)
    return [output, *torch.autograd.grad(output.cos().sum(), [x, *module.parameters()])]
