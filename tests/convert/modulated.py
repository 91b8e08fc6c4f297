"""Modules that modulate a norm, for the tests of ``convert(modulation=True)``."""

import torch
from torch import Tensor, nn
from torch.profiler import profile

from fused_op.convert import Report

COLS = 16
ROWS = torch.randn(2, 3, COLS)
# Of values and gradients in float32: gradients are sums over rows, in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Condition(nn.Module):
    """A norm whose scale and shift come from an embedding; subclasses modulate by them."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, **options: object) -> None:
        super().__init__()
        self.norm, self.linear = norm(COLS, **options), nn.Linear(COLS, 2 * COLS)

    def entries(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return self.linear(embedding).chunk(2, dim=-1)


class Indexed(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class InTwoStatements(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        hidden = self.norm(x)
        hidden = hidden * (scale.unsqueeze(1) + 1) + shift.unsqueeze(dim=1)
        return hidden


class Both(Condition):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.entries(embedding)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        y = self.norm(x + y)
        return y


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLS)

    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift


def modulations(report: Report) -> dict[str, int]:
    return {block.type_name: block.modulations for block in report.blocks}


def fused_modulations(run) -> int:
    """How many norms modulate in their kernel."""
    with profile() as trace:
        run()
    return sum(e.name == "fused_op::modulated_norm_forward" for e in trace.events())


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 5, COLS, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(3, COLS, device=device, dtype=dtype, requires_grad=True)


def results(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    output = module(*inputs)
    leaves = [*inputs, *module.parameters()]
    return [output, *torch.autograd.grad(output.cos().sum(), leaves)]
