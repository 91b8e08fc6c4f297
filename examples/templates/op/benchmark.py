"""Time of one call, beside PyTorch's and a copy of the same bytes: python benchmark.py"""

import torch
from template_op import reference, sample_inputs, template_op
from torch.utils.benchmark import Timer


def time_us(function):
    """Median time of a call, in microseconds; Timer warms up and waits for the GPU."""
    timer = Timer("function()", globals={"function": function})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # More than the GPU's L2 cache holds, so that the memory is measured.
    count = 1 << (27 if device == "cuda" else 21)
    inputs = sample_inputs((count,), torch.float32, device)
    # The limit is what has to be read and written, at the speed of a copy, which reads and writes
    # its tensor once each. YOUR OP: how many tensors of this size it reads and writes.
    tensors_moved = 2
    x, target = torch.randn(count, device=device), torch.empty(count, device=device)
    limit = time_us(lambda: target.copy_(x)) * tensors_moved / 2
    ours, theirs = time_us(lambda: template_op(*inputs)), time_us(lambda: reference(*inputs))
    print(f"{count} float32, {device}, torch {torch.__version__}")
    print(f"ours {ours:.1f} us   PyTorch {theirs:.1f} us   copy limit {limit:.1f} us")


if __name__ == "__main__":
    main()
