"""Compiles kernel files for sm_90 and asserts what their speed rests on: registers, and no spill.

    python .ci/kernel_limits.py csrc/cuda/core_bf16*.cu

A multiprocessor has 65536 registers: a kernel above its limit runs with fewer threads at a time
than csrc/cuda/core_table.h counts on, and a spill adds memory traffic to its own. Prints the most
registers found for each limit, and how long the file took.
"""

import re
import subprocess
import sys
import time

# Mangled names (ptxas knows no others), the registers a thread may take, the threads that then fit.
LIMITS = (
    (r"forward_kernel\w*PlainI\w*ForwardTileILi\d+ELi\d+ELi2ELi\d+ELb0E", 48, 1280),
    (r"forward_kernel\w*PlainI\w*ForwardTileILi\d+ELi\d+ELi[34]ELi\d+ELb0E", 64, 1024),
    (r"forward_kernel\w*AddResidualI\w*ForwardTileILi\d+ELi\d+ELi\d+ELi\d+ELb0E", 80, 768),
    (r"forward_kernel\w*ForwardTileILi\d+ELi\d+ELi\d+ELi\d+ELb1E", 128, 512),  # few rows
    (r"backward_kernel\w*BackwardTileILi\d+ELi\d+ELi1E", 80, 768),
    (r"backward_kernel\w*BackwardTileILi\d+ELi\d+ELi[23]E", 128, 512),
    (r"add_partials_kernel", 128, 512),
)
KERNEL = re.compile(
    r"Function properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores"
    r"(?:(?!Function properties).)*?Used (\d+) registers",
    re.DOTALL,
)


def main(files: list[str]) -> int:
    every, faults = [], []
    for file in files:
        start = time.perf_counter()
        command = ["nvcc", "-std=c++20", "-O3", "-fmad=false", "-Icsrc", "-arch=sm_90"]
        command += ["-Xptxas=-v", "-c", file, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        kernels = [(name, int(spill), int(used)) for name, spill, used in KERNEL.findall(log)]
        print(f"{file}: {len(kernels)} functions, {time.perf_counter() - start:.0f} s")
        faults += [] if kernels else [f"{file}: no kernels"]
        every += kernels
    faults += [f"{name} spills {spill} bytes" for name, spill, _ in every if spill]
    for pattern, limit, threads in LIMITS:
        used = {name: used for name, _, used in every if re.search(pattern, name)}
        if not used:
            faults.append(f"no kernel is called {pattern}")
            continue
        print(f"  {max(used.values()):3d} registers of {limit:3d} ({threads} threads) {pattern}")
        faults += [f"{name}: {n} registers" for name, n in used.items() if n > limit]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
