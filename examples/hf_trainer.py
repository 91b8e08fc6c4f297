"""Trains a small Llama of transformers by its Trainer, with fused norms: one callback.

    pip install transformers accelerate
    python examples/hf_trainer.py

Nothing is downloaded: the model begins with random weights, and learns the bytes of Python's own
standard library. Prints what was converted, and the loss. Fails if a norm was left as it was, or if
the loss did not fall.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from llama import read_source
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fused_op.integrations.hf_trainer import FusedNorms

CONTEXT = 64


class Source(Dataset[dict[str, Tensor]]):
    """Pieces of the source text; the bytes are the tokens."""

    def __init__(self) -> None:
        self.text = read_source()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        piece = self.text[i * CONTEXT : (i + 1) * CONTEXT].long()
        return {"input_ids": piece, "labels": piece}


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    norms = FusedNorms()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(make_model(), arguments, train_dataset=Source(), callbacks=[norms])
        print(norms.report)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps on {arguments.device}")
    if norms.report is None or len(norms.report.converted) != 5:  # two a layer, and the last
        sys.exit("Not every norm was converted.")
    if not losses[-1] < losses[0]:
        sys.exit("The loss did not fall.")


if __name__ == "__main__":
    main()
