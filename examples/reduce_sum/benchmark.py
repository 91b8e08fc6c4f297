"""Time of one call, beside PyTorch's and the memory's limit: python benchmark.py

A sum reads everything and writes next to nothing: its limit is half the time of a copy. (On a CPU
it may do better than that: there a copy reads what it is about to overwrite, too.)
"""

import torch
from reduce_sum import reduce_sum, reference
from torch.utils.benchmark import Timer


def time_us(function):
    """Median time of a call, in microseconds; Timer warms up and waits for the GPU."""
    timer = Timer("function()", globals={"function": function})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # More than the GPU's L2 cache holds, so that the memory is measured.
    numel = 1 << (28 if device == "cuda" else 22)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"{numel} elements, {dtype}, {device}, torch {torch.__version__}")
    for cols in (numel, 65536, 4096, 512):
        x = torch.randn(numel // cols, cols, device=device, dtype=dtype)
        target = torch.empty_like(x)
        limit = time_us(lambda target=target, x=x: target.copy_(x)) / 2
        ours = time_us(lambda x=x: reduce_sum(x, -1))
        theirs = time_us(lambda x=x: reference(x, -1))
        print(
            f"rows of {cols:9}: ours {ours:8.1f} us   PyTorch {theirs:8.1f} us   "
            f"limit {limit:8.1f} us   ours is {limit / ours:.0%} of the limit"
        )


if __name__ == "__main__":
    main()
