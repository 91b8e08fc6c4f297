"""square(x) = x * x, compiled when it is first used: python load_jit.py

No installation: torch.utils.cpp_extension.load compiles square.cpp, and with an nvcc also
square_kernel.cu, into PyTorch's cache (TORCH_EXTENSIONS_DIR), and loads it. The next run finds it
there. Prints that the op works, and what a call costs with the autograd function in C++ and in
Python.
"""

import os
from functools import cache
from pathlib import Path

import torch
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import CUDA_HOME, load

HERE = Path(__file__).resolve().parent


@cache
def square_ext(verbose=False):
    """The compiled module. For the CPU alone with USE_CUDA=0, or where there is no nvcc."""
    use_cuda = os.environ.get("USE_CUDA") != "0" and torch.version.cuda is not None
    use_cuda = use_cuda and CUDA_HOME is not None
    if use_cuda and not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")  # no GPU here to ask
    return load(
        name="square_cuda" if use_cuda else "square_cpu",
        sources=[str(HERE / file) for file in ["square.cpp", *["square_kernel.cu"] * use_cuda]],
        extra_cflags=["-std=c++20", "-O3", *["-DWITH_CUDA"] * use_cuda],
        extra_cuda_cflags=["-std=c++20", "-O3"],
        extra_ldflags=["-Wl,--exclude-libs,ALL"],  # a libstdc++ linked statically is not torch's
        with_cuda=use_cuda,
        verbose=verbose,
    )


class SquareFunction(torch.autograd.Function):
    """The twin of SquareFunction in square.cpp."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return square_ext().forward(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: as in square.cpp
            return 2 * x * grad_output
        return square_ext().backward(x, grad_output)


def square(x):
    """x * x, by the autograd function in C++."""
    return square_ext().square(x)


def square_python(x):
    """x * x, by the autograd function in Python."""
    return SquareFunction.apply(x)


def reference(x):
    return x * x


def time_us(function):
    timer = Timer("function()", globals={"function": function})
    return timer.blocked_autorange(min_run_time=0.1).median * 1e6


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    square_ext(verbose=True)
    x = torch.randn(4, 4, device=device, requires_grad=True)
    for op in (square, square_python):
        torch.testing.assert_close(op(x), reference(x))
        (grad,) = torch.autograd.grad(op(x).sum(), x)
        torch.testing.assert_close(grad, 2 * x)
    print(f"square works on {device}: square(3) = {square(torch.tensor(3.0, device=device))}")

    # 16 elements: what is measured is the way to the kernel and back, not the kernel.
    dy = torch.ones_like(x)
    calls = {}
    names = ("C++ autograd function", "Python autograd function", "PyTorch, x * x")
    for name, op in zip(names, (square, square_python, reference), strict=True):
        calls[name, "forward"] = lambda op=op: op(x)
        calls[name, "both"] = lambda op=op: torch.autograd.grad(op(x), x, dy)
    # The best of rounds that take turns: what disturbs a measurement only ever adds to it.
    rounds = [{key: time_us(call) for key, call in calls.items()} for _ in range(5)]
    best = {key: min(times[key] for times in rounds) for key in calls}
    print("\nus a call of 16 elements          forward   forward + backward")
    for name in names:
        print(f"{name:30} {best[name, 'forward']:10.1f} {best[name, 'both']:20.1f}")

    large = torch.randn(1 << (27 if device == "cuda" else 20), device=device)
    target = torch.empty_like(large)
    print(
        f"\nus a call of {large.numel()} elements: ours {time_us(lambda: square(large)):.1f}, "
        f"PyTorch {time_us(lambda: reference(large)):.1f}, "
        f"copy limit {time_us(lambda: target.copy_(large)):.1f}"
    )


if __name__ == "__main__":
    main()
