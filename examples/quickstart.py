"""The library in a minute, on a CPU or a GPU: python examples/quickstart.py

Calls a fused norm, converts a model that exists, compiles it, and times both against PyTorch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.utils.benchmark import Timer

import fused_op
from fused_op import convert, fused_add_rms_norm, fused_layer_norm, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
ROWS, COLS = (8192, 4096) if DEVICE == "cuda" else (512, 1024)


def call() -> None:
    """A layer norm, and the step of a pre-norm block: add the branch, normalise the sum."""
    x = torch.randn(ROWS, COLS, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.ones(COLS, device=DEVICE, requires_grad=True)  # float32 beside any rows
    bias = torch.zeros(COLS, device=DEVICE, requires_grad=True)
    y = fused_layer_norm(x, weight, bias)
    y.sum().backward()
    torch.testing.assert_close(y, reference.fused_layer_norm(x, weight, bias))

    residual = torch.randn_like(x)
    y, residual = fused_add_rms_norm(x, residual, weight)
    print(f"fused_add_rms_norm: {tuple(y.shape)} {y.dtype}, and the sum as the new residual")


def convert_a_model() -> None:
    """Only the class of each norm changes: parameters and optimizer state stay what they are."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(256), enable_nested_tensor=False)
    model = model.to(DEVICE)
    x = torch.randn(4, 32, 256, device=DEVICE)
    before = model(x)
    print(convert(model))
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), before, rtol=1e-4, atol=1e-4)


def keep_freed_memory() -> None:
    """Have glibc keep large outputs on the CPU for the next call, as long-running programs do.

    Otherwise it may map their pages anew in each call, of one norm but not of the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 1 << 30)


def time_it() -> None:
    """Forward and backward, with the host's part; benchmarks/ has the kernels alone."""
    keep_freed_memory()
    x = torch.randn(ROWS, COLS, device=DEVICE, dtype=DTYPE, requires_grad=True)
    dy = torch.randn_like(x)
    norms = [norm.to(DEVICE, DTYPE) for norm in (nn.LayerNorm(COLS), fused_op.FusedLayerNorm(COLS))]
    timers = [
        Timer(
            "norm(x).backward(dy)",
            globals={"norm": norm, "x": x, "dy": dy},
            num_threads=torch.get_num_threads(),  # not Timer's default of one
        )
        for norm in norms
    ]
    # By turns, and the fastest round: another process may slow some of them.
    rounds = [[t.blocked_autorange(min_run_time=0.2).median for t in timers] for _ in range(5)]
    print(f"{ROWS} x {COLS} {DTYPE} on {DEVICE}, forward and backward, less is better:")
    for norm, seconds in zip(norms, map(min, zip(*rounds, strict=True)), strict=True):
        print(f"  {type(norm).__module__.partition('.')[0]:<10}{seconds * 1e6:10.1f} us")


if __name__ == "__main__":
    print(fused_op.build_info())
    call()
    convert_a_model()
    time_it()
