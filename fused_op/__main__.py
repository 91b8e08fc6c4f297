"""``python -m fused_op``: what was built, which devices it is for, and whether it computes right.

The exit status is 1 if a check fails. A device that this build has no code for is not checked.
``python -m fused_op cache``, ``plan`` and ``compile`` are about the kernels that are compiled at
their first use. ``run`` runs a program in which PyTorch's norms are computed by these kernels.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fused_op
from fused_op_cuda import cpu_level

from ._kernel_cache import cache
from ._kernel_plan import add_commands, compile_kernels, print_plan
from ._run import add_run_command, run_program

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), (F64, F64)]
OPS = {  # and their tensors, in call order
    "fused_layer_norm": ("input", "weight", "bias"),
    "fused_rms_norm": ("input", "weight"),
    "fused_add_layer_norm": ("input", "residual", "weight", "bias"),
    "fused_add_rms_norm": ("input", "residual", "weight"),
}
CPU_LEVELS = {  # of which FUSED_OP_CPU chooses another
    "default": "loops without AVX",
    "avx2": "loops in AVX2",
    "avx512": "loops in AVX-512",
}
ROWS, COLS = 67, 1027  # neither is a multiple of what a warp, a vector or a chunk of rows holds


def main(argv: Sequence[str] = ()) -> int:
    """Do what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fused_op", description="Check this build.")
    commands = parser.add_subparsers(dest="command", title="commands")
    about_cache = commands.add_parser("cache", help="the kernels that were compiled at first use")
    about_cache.add_argument("--clear", action="store_true", help="remove them")
    add_commands(commands)
    add_run_command(commands)
    options = parser.parse_args(argv)
    if options.command == "cache":
        return cache(options.clear)
    if options.command == "plan":
        return print_plan(options)
    if options.command == "run":
        return run_program(options)
    return compile_kernels(options) if options.command == "compile" else report()


def report() -> int:
    """Print what was built, and check it; return the exit status."""
    info = fused_op.build_info()
    print(f"fused_op {info['version']}" + (", a debug build" if info["debug"] else ""))
    print(f"torch    {torch.__version__}, built for {info['torch']}")
    if not info["cuda"]:
        print(f"CUDA     none: {info['no_cuda_reason']}")
    elif info["cuda_archs"]:
        print(f"CUDA     {info['cuda']}, for {info['cuda_archs']}")
    else:
        print(f"CUDA     {info['cuda']}, without nvcc: all kernels are compiled at first use")

    print("\nDevices")
    usable = []
    for device, description, is_covered in devices():
        print(f"  {device:7} {description}")
        if is_covered:
            usable.append(device)

    print(f"\nOutputs and gradients at {ROWS} x {COLS}, beside fused_op.reference in float64")
    failures = 0
    for device, op, (rows, params) in itertools.product(usable, OPS, PAIRS):
        try:
            problem = check(op, device, rows, params)
        except Exception as error:  # whatever it is, the other checks shall still be made
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        failures += bool(problem)
        dtypes = say(rows) + ("" if rows is params else f", parameters {say(params)}")
        print(f"  {'FAIL' if problem else 'pass'}  {op:20}  {device:7} {dtypes}", end="")
        print(f": {problem}" if problem else "")
    print(f"\n{failures} failed" if failures else "\nAll passed")
    return 1 if failures else 0


def devices() -> Iterator[tuple[str, str, bool]]:
    """(device, what it is, whether this build has code for it), for the CPU and each GPU."""
    yield "cpu", f"{CPU_LEVELS[cpu_level()]}, {torch.get_num_threads()} threads", True
    if not torch.cuda.is_available():
        why = "torch sees none" if torch.version.cuda else "torch is a build without CUDA"
        yield "cuda", f"no GPU: {why}", False
        return
    info = fused_op.build_info()
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        archs = info["cuda_archs"]
        is_covered = bool(info["cuda"]) and (not archs or covers(archs, (major, minor)))
        note = "covered by this build" if is_covered else "NOT covered by this build, not checked"
        gpu = torch.cuda.get_device_name(index)
        yield f"cuda:{index}", f"{gpu}, capability {major}.{minor}, {note}", is_covered


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code for archs, as in TORCH_CUDA_ARCH_LIST, runs on a GPU of that capability.

    Machine code runs within its major version, from its minor version on; PTX on all that is newer;
    what is built for "9.0a" on 9.0 alone, and for "10.0f" on the family of 10.0.
    """
    for arch in re.split("[ ;]+", archs):
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if found is None:  # a name such as Hopper: the checks will tell
            return True
        major, minor, suffix, ptx = int(found[1]), int(found[2]), found[3], found[4]
        if (major, minor) == capability:
            return True
        if suffix != "a" and major == capability[0] and minor < capability[1]:
            return True
        if ptx and not suffix and (major, minor) < capability:
            return True
    return False


def check(op: str, device: str, rows: torch.dtype, params: torch.dtype) -> str:
    """What is wrong with an op for these dtypes, in words; empty if nothing is."""
    leaves, grads = arguments(op, device, rows, params)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = results(getattr(fused_op, op), leaves, grads)
    truth = results(getattr(fused_op.reference, op), exact, [g.double() for g in grads])
    names = ["output", "sum"][: len(grads)] + [f"gradient of {name}" for name in OPS[op]]
    wrong = []
    for name, ours, theirs in zip(names, found, truth, strict=True):
        # One rounding of the result; and those of the arithmetic, some ten and log2 of the terms of
        # a sum, each relative to terms that may be larger than the result: not than the largest.
        compute = torch.finfo(F64 if rows is F64 else F32).eps
        bound = torch.finfo(ours.dtype).eps / 2 * theirs.abs() + 50 * compute * theirs.abs().max()
        error = (ours.double() - theirs).abs()
        if not bool((error <= bound).all()):  # NaN is wrong too
            wrong.append(f"{name} is off by {error.max().item():.2g}")
    return ", ".join(wrong)


def arguments(
    op: str, device: str, rows: torch.dtype, params: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a call, as leaves, and the gradients of its outputs.

    Whole sixteenths up to 4: exact in every dtype, and so is input + residual. What is left of the
    error is the op's own.
    """
    g = torch.Generator().manual_seed(0)

    def sixteenths(*shape: int, dtype: torch.dtype) -> Tensor:
        return (torch.randint(-64, 65, shape, generator=g) / 16).to(device, dtype)

    leaves = []
    for name in OPS[op]:
        if name in ("weight", "bias"):
            leaves.append(sixteenths(COLS, dtype=params).requires_grad_())
        else:
            leaves.append(sixteenths(ROWS, COLS, dtype=rows).requires_grad_())
    outputs = 2 if "residual" in OPS[op] else 1
    return leaves, [sixteenths(ROWS, COLS, dtype=rows) for _ in range(outputs)]


def results(
    function: Callable[..., Any], leaves: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """The outputs of a call, then the gradients of its arguments."""
    outputs = function(*leaves, eps=1e-5)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # In this thread: autograd's own threads may still free tensors of a backward that has returned,
    # and abort the process if the interpreter ends in the meantime.
    with torch.autograd.set_multithreading_enabled(False):
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def say(dtype: torch.dtype) -> str:
    """The name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
