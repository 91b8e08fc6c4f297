"""A small decoder as Llama's, and the text that train_llama.py teaches it.

RMSNorm before each half of a block, rotary embedding, SwiGLU, causal attention; bytes for tokens.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
EPS = 1e-5


@dataclass(frozen=True)
class Size:
    """The default: 4.9 million parameters, 8192 tokens a step."""

    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 512
    batch: int = 16


SMALL = Size(width=64, layers=2, heads=2, context=64, batch=8)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.width * 8 // 3 // 16 * 16
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (rotate(t, cos, sin) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + half) of every head by an angle in proportion to the position."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, EPS)
        self.head = nn.Linear(size.width, 256, bias=False)
        half = size.width // size.heads // 2
        frequencies = 1e4 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(size.context), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        # Autocast leaves an embedding in float32, and the whole residual stream with it.
        x = self.bytes(text).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def read_source() -> Tensor:
    """The bytes of the standard library's modules, in the order of their paths.

    Raises:
        SystemExit: this Python comes without the source of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    source = b"".join((folder / p).read_bytes() for p in paths if NOT_SOURCE.isdisjoint(p.parts))
    if len(source) < 1 << 20:
        sys.exit(f"{folder} does not hold the source of Python's standard library")
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)
