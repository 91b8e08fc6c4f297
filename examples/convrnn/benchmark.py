"""Time of one call, beside loops of PyTorch operations: python benchmark.py [--no-compile]

The loop is launched step by step; under torch.compile too, since a step has to wait for the one
before. The copy of the same bytes is the limit of the memory, which a recurrence does not reach: it
is bound by the time that a step takes.
"""

import argparse

import torch
from convrnn import convrnn_forward, reference
from torch.utils.benchmark import Timer


def time_us(function):
    """Median time of a call, in microseconds; Timer warms up and waits for the GPU."""
    timer = Timer("function()", globals={"function": function})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-compile", action="store_true", help="it takes a minute")
    parser.add_argument("--shape", default="132,32,1024,5", help="batch, steps, columns, taps")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, steps, cols, taps = map(int, args.shape.split(","))
    x = torch.randn(batch, steps, cols, device=device)
    kernel = torch.randn(1, 1, taps, device=device) / taps
    hidden = torch.randn(batch, cols, device=device)
    inputs = [t.requires_grad_() for t in (x, kernel, hidden)]
    grad_output = torch.randn_like(x)
    print(f"batch, steps, columns, taps {args.shape}; float32, {device}, torch {torch.__version__}")

    functions = {"ours, one launch": convrnn_forward, "loop of PyTorch operations": reference}
    if not args.no_compile:
        functions["that loop under torch.compile"] = torch.compile(reference)
    print(f"{'us':32} forward   forward + backward")
    for name, function in functions.items():

        def forward(function=function):
            with torch.no_grad():
                return function(*inputs)

        def both(function=function):
            return torch.autograd.grad(function(*inputs), inputs, grad_output)

        print(f"{name:30} {time_us(forward):9.1f} {time_us(both):20.1f}")
    target = torch.empty_like(x)
    copy = time_us(lambda: target.copy_(x.detach()))
    print(f"{'copy limit':30} {copy:9.1f} {copy * 2.5:20.1f}")


if __name__ == "__main__":
    main()
