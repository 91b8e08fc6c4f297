"""Trains an MLP block whose first linear layer reads fp8 that the RMS norm wrote, beside bfloat16.

    python examples/fp8_mlp.py --steps 200

The norm returns its output in fp8 with a scale for each row, and a placeholder without memory that
takes the gradient: straight through, as if nothing had been rounded. On a GPU that multiplies fp8
(compute capability 8.9) the product is torch._scaled_mm; elsewhere both factors are decoded first,
which gives the numbers but not the speed.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_op

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in fp8, and the scale of each of its rows."""
    scale = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (weight / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def has_fp8_products(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def multiply(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """(x · x_scale) @ (weight · weight_scale).T in bfloat16, of fp8 with a scale for each row."""
    if has_fp8_products(x):
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16
        )
    product = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
    return product.bfloat16()


class Fp8Linear(torch.autograd.Function):
    """A linear layer of what a norm quantised. Backward is in bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, quantized: Tensor, scale: Tensor, weight: Tensor
    ) -> Tensor:
        """``output``, of which nothing is read, is where the gradient goes."""
        ctx.save_for_backward(quantized, scale, weight)
        return multiply(quantized, scale, *quantize_rows(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        quantized, scale, weight = ctx.saved_tensors
        x = (quantized.float() * scale).bfloat16()  # a byte an element was kept for it
        return grad @ weight, None, None, grad.t() @ x


class Block(nn.Module):
    """x + down(silu(up(norm(x))))."""

    def __init__(self, width: int, fp8: bool) -> None:
        super().__init__()
        self.fp8 = fp8
        self.norm = nn.Parameter(torch.ones(width))
        self.up = nn.Parameter(torch.randn(4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 4 * width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8:
            n = fused_op.fused_rms_norm_quantized(x, self.norm, scheme="token")
            hidden = Fp8Linear.apply(n.output, n.quantized, n.scale, self.up)
        else:
            hidden = F.linear(fused_op.fused_rms_norm(x, self.norm), self.up)
        return x + F.linear(F.silu(hidden), self.down)


def train(fp8: bool, steps: int, width: int, device: str) -> list[float]:
    """The losses of two blocks that learn a fixed random map."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(width, fp8), Block(width, fp8)).to(device, torch.bfloat16)
    target = (torch.randn(width, width) / width**0.5).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(256, width).to(device, torch.bfloat16)
        loss = F.mse_loss(model(x).float(), F.tanh(x @ target).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both, and print their losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 16")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curves = [train(fp8, options.steps, options.width, device) for fp8 in (False, True)]
    print("step   bfloat16   fp8")
    for step in range(0, options.steps, max(options.steps // 10, 1)):
        print(f"{step:4}   {curves[0][step]:8.4f}   {curves[1][step]:.4f}")
    plain, fp8 = (sum(losses[-10:]) / len(losses[-10:]) for losses in curves)
    print(f"mean of the last ten: {plain:.4f} {fp8:.4f}, fp8 / bfloat16 {fp8 / plain:.3f}")


if __name__ == "__main__":
    main()
