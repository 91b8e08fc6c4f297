"""Checks long rows and prints a digest of their outputs; test_memory_bits.py compares them.

A process of its own for each kind of memory, which is looked at once: FUSED_OP_FAST_MEMORY.
"""

import hashlib
from collections.abc import Iterator

import torch

from fused_op._kernel_plan import Call, gpu_of
from tests.case import make_case
from tests.kernels.every_kernel import NAMES
from tests.ops import F64, OPS, PAIRS

SHAPES = ((300, 20480), (150, 32768), (700, 32768), (70, 65536), (70, 131072))


def digests() -> Iterator[str]:
    """A line per call: what it was, the kernel of forward, and the bits of the output."""
    gpu = gpu_of(None, None)
    for op in OPS:
        for pair in PAIRS:
            if op.adds or op.zero_centered or pair.params != pair.rows or pair.rows == F64:
                continue
            for rows, cols in SHAPES:
                call = Call(
                    "layer_norm" if op.centred else "rms_norm", rows, cols, NAMES[pair.rows]
                )
                kernel = call.kernels(gpu)[1][0][1].partition("<")[0].rpartition("::")[2]
                case = make_case(op, (rows, cols), pair, "cuda")
                # Rows whose moments are taken again.
                case.inputs["input"][1::7] = 3 if op.centred else torch.finfo(pair.rows).max
                results = case.run(())
                case.check(results)
                bits = results["output"].view(torch.uint8).cpu().numpy().tobytes()
                digest = hashlib.sha256(bits).hexdigest()[:16]
                yield f"{op} {pair} {rows}x{cols} {kernel} {digest}"


if __name__ == "__main__":
    print("\n".join(digests()))
