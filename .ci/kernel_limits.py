"""Reads what built kernels take and asserts what their speed rests on: registers, and no spill.

    python .ci/kernel_limits.py                # of the fused_op_cuda that is installed, for sm_90
    python .ci/kernel_limits.py core_bf16.o

A multiprocessor has 65536 registers: a kernel above its limit runs with fewer threads at a time
than csrc/cuda/core_table.h counts on, and a spill adds memory traffic to its own. Prints the most
registers found for each limit. Needs cuobjdump, as machine_code.py does.
"""

import importlib.util
import re
import subprocess
import sys

from machine_code import find_cuobjdump

# Mangled names (cuobjdump knows no others), the registers a thread may take, the threads that then
# fit. The first is of parameters in the type of the rows: fp32 ones of 16-bit rows take 53.
LIMITS = (
    (r"forward_kernel\w*PlainI\w*AffineIS\w*ForwardTileILi\d+ELi\d+ELi2ELi\d+ELb0E", 48, 1280),
    (r"forward_kernel\w*PlainI\w*ForwardTileILi\d+ELi\d+ELi[34]ELi\d+ELb0E", 64, 1024),
    (r"forward_kernel\w*AddResidualI\w*ForwardTileILi\d+ELi\d+ELi\d+ELi\d+ELb0E", 80, 768),
    (r"forward_kernel\w*ForwardTileILi\d+ELi\d+ELi\d+ELi\d+ELb1E", 128, 512),  # few rows
    (r"backward_kernel\w*BackwardTileILi\d+ELi\d+ELi1E", 80, 768),
    (r"backward_kernel\w*BackwardTileILi\d+ELi\d+ELi[23]E", 128, 512),
    (r"add_partials_kernel", 128, 512),
)
KERNEL = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def main(files: list[str]) -> int:
    files = files or [importlib.util.find_spec("fused_op_cuda").origin]
    every, faults = [], []
    for file in files:
        command = [find_cuobjdump(), "-res-usage", file]
        log = subprocess.run(command, check=True, capture_output=True, text=True)
        kernels = KERNEL.findall(log.stdout + log.stderr)
        print(f"{file}: {len(kernels)} functions")
        faults += [] if kernels else [f"{file}: no kernels"]
        every += [(name, *map(int, numbers)) for name, *numbers in kernels]
    # A spill goes to the stack, and so does an array whose index is not known.
    faults += [f"{name} keeps {s + m} bytes in memory" for name, _, s, m in every if s + m]
    for pattern, limit, threads in LIMITS:
        used = {name: used for name, used, *_ in every if re.search(pattern, name)}
        if not used:
            faults.append(f"no kernel is called {pattern}")
            continue
        print(f"  {max(used.values()):3d} registers of {limit:3d} ({threads} threads) {pattern}")
        faults += [f"{name}: {n} registers" for name, n in used.items() if n > limit]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
