"""Time of one call, beside PyTorch's and a copy of the same bytes: python benchmark.py

The copy is the limit: the op reads its input once and writes its output once, and no kernel can do
that faster than the memory moves those bytes.
"""

import argparse

import torch
from scale_bias_relu import ScaleBiasReluFunction, fused_op_forward, reference
from torch.utils.benchmark import Timer


def time_us(function):
    """Median time of a call, in microseconds; Timer warms up and waits for the GPU."""
    timer = Timer("function()", globals={"function": function})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    # More than the GPU's L2 cache holds, so that the memory is measured.
    parser.add_argument("--rows", type=int, default=16384 if device == "cuda" else 2048)
    parser.add_argument("--cols", type=int, default=8192 if device == "cuda" else 1024)
    parser.add_argument("--dtype", default="bfloat16" if device == "cuda" else "float32")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    x = torch.randn(args.rows, args.cols, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(args.cols, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    print(f"{args.rows} x {args.cols}, {args.dtype}, {device}, torch {torch.__version__}")

    def row(name, ours, theirs, tensors):
        # `tensors` of the size of x are moved: a copy moves two.
        source, target = torch.empty_like(dy), torch.empty_like(dy)
        limit = time_us(lambda: target.copy_(source)) * tensors / 2
        ours, theirs = time_us(ours), time_us(theirs)
        print(
            f"{name:9} ours {ours:9.1f} us   PyTorch {theirs:9.1f} us   copy limit {limit:9.1f} us"
            f"   ours is {limit / ours:.0%} of the limit"
        )

    def backward(output):
        return lambda: torch.autograd.grad(output, (x, bias), dy, retain_graph=True)

    with torch.no_grad():
        row("forward", lambda: fused_op_forward(x, bias, 2.0), lambda: reference(x, bias, 2.0), 2)
    ours = backward(ScaleBiasReluFunction.apply(x, bias, 2.0))
    row("backward", ours, backward(reference(x, bias, 2.0)), 3)


if __name__ == "__main__":
    main()
