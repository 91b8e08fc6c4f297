"""Reads the machine code of built kernels and asserts that a GPU takes each of its operands.

    python .ci/machine_code.py                 # of the fused_op_cuda that is installed
    python .ci/machine_code.py core_bf16.o

ptxas 13.0 may put the descriptor of a memory access, a pair of registers, at an odd one, as it did
for a `cp.async` with a cache policy (desc[UR1]): an illegal instruction, which tests find only if a
GPU runs that very kernel. Needs cuobjdump: on the PATH, or triton's, which torch for CUDA brings.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

FUNCTION = re.compile(r"Function : (\w+)")
DESCRIPTOR = re.compile(r"\bdesc\[UR(\d+)\]")


def find_cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None:
        found = shutil.which(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    if found is None:
        raise SystemExit("there is no cuobjdump, neither on the PATH nor in triton")
    return found


def faults_of(file: str) -> list[str]:
    """A line for each such instruction in the file; nothing to look at is a fault too."""
    function, functions, descriptors, faults = "", 0, 0, []
    command = [find_cuobjdump(), "-sass", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dump:
        for line in dump.stdout:
            if match := FUNCTION.search(line):
                function = match[1]
                functions += 1
            for register in DESCRIPTOR.findall(line):
                descriptors += 1
                if int(register) % 2 == 1:
                    faults.append(f"{function} has desc[UR{register}]")
    print(f"{file}: {functions} functions, {descriptors} descriptors")
    if dump.returncode != 0 or descriptors == 0:
        faults.append(f"{file}: cuobjdump shows no machine code (status {dump.returncode})")
    return faults


def main(files: list[str]) -> int:
    files = files or [importlib.util.find_spec("fused_op_cuda").origin]
    faults = [fault for file in files for fault in faults_of(file)]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
