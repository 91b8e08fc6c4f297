"""Trains twice with the same random batches and compares every loss, bit for bit.

    python -m tests.tools.soak --minutes 5 [--device cuda] [--seed 1] [--dtype bfloat16]

The sizes of batches and sequences change with each step, so that the memory of every step is that
of others before; dropout, a residual stream and 16-bit autocast take part. It prints how many
steps agreed, and ends with an error at the first that did not.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import zlib

import torch
from torch import Tensor, nn

from fused_op import FusedAddLayerNorm, FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm

WIDTH, WORDS = 96, 64
CHUNK = 20  # steps that a run makes before the other repeats them


class Block(nn.Module):
    """Each module of the package once."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.last = FusedLayerNorm(WIDTH, dropout_p=0.1), FusedRMSNorm(WIDTH)
        self.add = FusedAddLayerNorm(WIDTH, dropout_p=0.1)
        self.add_rms = FusedAddRMSNorm(WIDTH, residual_dtype=torch.float32)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x, residual = self.add(self.mix[0](self.first(x)).tanh(), x)
        x, residual = self.add_rms(self.mix[1](x).tanh(), residual)
        return self.out(self.last(residual))


class Run:
    """One of the two: its model, its random numbers, its state between two chunks."""

    def __init__(self, device: str, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.model = Block().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sizes = random.Random(seed)
        self.seed, self.step = seed, 0

    def losses(self, steps: int) -> list[Tensor]:
        found = []
        for _ in range(steps):
            batch, length = self.sizes.randint(1, 8), self.sizes.randint(1, 128)
            torch.manual_seed(self.seed + self.step)  # the batch, and what dropout drops
            words = torch.randint(WORDS, (batch, length + 1)).to(self.device)
            with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
                logits = self.model(words[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            found.append(loss.detach())
            self.step += 1
        return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of autocast; float32: without")
    options = parser.parse_args(argv)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # for what is not a norm: embedding, matrix products
    try:
        soak(options.minutes, options.device, options.seed, getattr(torch, options.dtype))
    finally:
        torch.set_deterministic_debug_mode(before)


def soak(minutes: float, device: str, seed: int, dtype: torch.dtype) -> None:
    runs = [Run(device, seed, dtype) for _ in range(2)]
    end = time.monotonic() + 60 * minutes
    bits = 0
    while True:
        first, second = ([loss.item() for loss in run.losses(CHUNK)] for run in runs)
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            if struct.pack("d", a) != struct.pack("d", b):
                step = runs[0].step - CHUNK + i
                sys.exit(f"step {step} of seed {seed}: {a!r} is not {b!r}")
        bits = zlib.crc32(struct.pack(f"{CHUNK}d", *first), bits)
        if time.monotonic() > end:
            break
    print(f"{runs[0].step} steps agreed on {device}, losses {bits:08x}, last {first[-1]:.4f}")


if __name__ == "__main__":
    main()
