"""Trains a small classifier with the op inside, on synthetic data: python train.py

The labels come from a fixed random network, so that there is something to learn. Fails if the loss
does not fall.
"""

import argparse
import sys

import torch
from scale_bias_relu import FusedOpLayer
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(2048, 512, device=device)
    labels = nn.Linear(512, 10, device=device)(inputs).argmax(1)

    model = nn.Sequential(
        nn.Linear(512, 256),
        FusedOpLayer(256, scale=2.0),
        nn.Linear(256, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = torch.randint(len(inputs), (128,), device=device)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.4f}")
    if not losses[-1] < 0.5 * losses[0]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
