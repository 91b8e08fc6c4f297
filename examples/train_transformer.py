"""Trains one small transformer twice, with torch.nn.LayerNorm and after fused_op.convert.

    python examples/train_transformer.py

The data is real and needs no download: the source text of Python's own standard library, one
character at a time. Both runs have the same seed, so the same weights and batches; the two loss
curves then differ only by how the norm rounds. Prints both final losses and the largest difference,
plots the curves into a PNG, and fails if they differ by more than rounding explains.

How much that is, a third run measures: PyTorch's LayerNorm again, with every output moved by one
rounding step, the least that any other right implementation may differ by.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# cuBLAS repeats its results bit by bit only with a fixed workspace, set before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_op import convert

MODULES = ("argparse", "ast", "copy", "dataclasses", "datetime", "difflib", "enum", "fractions",
           "functools", "heapq", "inspect", "ipaddress", "locale", "pickle", "random", "shutil",
           "statistics", "subprocess", "tarfile", "textwrap", "threading", "turtle", "typing",
           "zipfile")  # fmt: skip  # a module to a line would be a page of names
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 3, 4, 96, 64, 16
LEARNING_RATE = 1e-3

NATIVE, FUSED, NUDGED = "torch.nn.LayerNorm", "after fused_op.convert", "one rounding step"

# Two perturbations of one size end up at differences of one order of magnitude, not at equal ones.
SAFETY = 16


class NudgedLayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm with every output one rounding step larger."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + torch.finfo(y.dtype).eps)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = norm(WIDTH)
        # No bias: that of the keys cancels in the softmax, so its gradient is rounding noise, which
        # Adam would scale up to a full step and so drive any two runs apart.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = norm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        # Written out: the fused attention kernels do not repeat their gradients bit by bit.
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return self.project((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Transformer(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(LAYERS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS))
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def read_text() -> Tensor:
    """The modules' source as character numbers; what is not ASCII becomes a question mark.

    Raises:
        SystemExit: this Python comes without the source of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in MODULES if (path := folder / f"{name}.py").is_file()]
    if not paths:
        sys.exit(f"{folder} does not hold the source of Python's standard library")
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([numbers.get(character, numbers["?"]) for character in text])


def progress(steps: int, title: str) -> Iterator[int]:
    """Counts the steps with a tqdm bar, or without tqdm with a line now and then."""
    try:
        from tqdm import tqdm
    except ImportError:
        every = max(1, steps // 10)
        for step in range(steps):
            if step % every == 0:
                print(f"{title}: step {step} of {steps}", flush=True)
            yield step
    else:
        yield from tqdm(range(steps), desc=title)


def make_model(name: str, device: torch.device, seed: int) -> Transformer:
    """The model of a variant; all begin with the same weights."""
    torch.manual_seed(seed)
    model = Transformer(NudgedLayerNorm if name == NUDGED else nn.LayerNorm).to(device)
    if name == FUSED:
        report = convert(model)
        print(report)
        if len(report.converted) != 2 * LAYERS + 1:
            sys.exit("Not every norm was converted.")
    return model


def train(model: Transformer, text: Tensor, steps: int, seed: int, title: str) -> list[float]:
    """Trains the model and returns the loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = torch.Generator().manual_seed(seed)
    window = torch.arange(CONTEXT + 1)
    losses = []
    for _ in progress(steps, title):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=batches)
        batch = text[(starts + window).to(text.device)]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def plot(curves: dict[str, list[float]], bound: float, setting: str, path: Path) -> None:
    """Both loss curves, and below them their difference within the bound, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot is drawn")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    for (name, losses), (color, style) in zip(
        curves.items(), (("tab:blue", "-"), ("tab:orange", "--")), strict=True
    ):
        above.plot(losses, style, color=color, label=name)
    figure.suptitle(f"One transformer, with either norm ({setting})")
    above.set_ylabel("loss (nats per character)\nlower is better")
    above.legend()
    below.plot([a - b for a, b in zip(*curves.values(), strict=True)], color="black")
    below.axhspan(-bound, bound, color="tab:green", alpha=0.2, label="what rounding explains")
    below.set_ylabel("difference\n0: the same")
    below.legend()
    below.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"The loss curves are in {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--output", type=Path, default=Path(), help="a PNG file, or its folder")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.output.suffix != ".png":
        options.output /= "train_transformer.png"
    return options


def main() -> None:
    options = parse_options()
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    text = read_text().to(device)
    print(f"{len(text)} characters of the Python standard library, on {device}")

    curves = {}
    for name in (NATIVE, FUSED, NUDGED):
        model = make_model(name, device, options.seed)
        start = time.perf_counter()
        curves[name] = train(model, text, options.steps, options.seed, name)
        seconds = time.perf_counter() - start
        print(
            f"{name:<22} loss {curves[name][0]:.4f} -> {curves[name][-1]:.4f}   {seconds:.1f} s",
            flush=True,
        )

    reference, fused, nudged = curves.values()
    difference = largest_difference(reference, fused)
    # Where the nudge cancels, as in a single step, the rounding of the loss itself is left.
    rounding = LAYERS * torch.finfo(torch.float32).eps * max(reference)
    bound = SAFETY * max(largest_difference(reference, nudged), rounding)
    print(f"Largest difference of the two curves: {difference:.1e} (bound: {bound:.1e})")
    del curves[NUDGED]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    plot(curves, bound, f"{gpu}, float32, torch {torch.__version__}", options.output)
    if not difference <= bound:  # also a NaN
        sys.exit("The loss curves differ by more than rounding explains.")


if __name__ == "__main__":
    main()
