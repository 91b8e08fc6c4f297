"""``python -m fused_op plan`` and ``compile``: what a call launches; kernels made beforehand.

Neither needs a GPU: a plan is integers, made of a call and of what is known of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import fused_op_cuda

from ._machine_code import facts_of

DTYPES = ("f16", "bf16", "f32", "f64")
NORMS = ("layer_norm", "rms_norm")
OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
ROUNDINGS = ("once", "before_weight")
# KiB of shared memory that a CTA may have, by ten times the compute capability.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227}
SHARED_KIB |= {120: 99, 121: 99}
SMS = 132
NO_CODE = "code    none"
ORIGINS = {
    "package": "installed with the package",
    "cache": "from the cache of earlier compilations",
    "compiled": "compiled now, and kept in the cache if that can be written to",
}


class Gpu(NamedTuple):
    """What a plan depends on."""

    multiprocessors: int
    arch: int  # ten times the compute capability
    shared_bytes: int  # of a CTA
    fast_memory: bool = True  # many GB/s for each multiprocessor, as of an H200, but not of an H100

    def __str__(self) -> str:
        arch = f"{self.arch // 10}.{self.arch % 10}"
        return f"{self.multiprocessors} SMs of {arch}, {self.shared_bytes} bytes of shared memory"


def parse_arch(text: str) -> int:
    """Ten times a compute capability such as 9.0."""
    major, _, minor = text.partition(".")
    if not (major.isdigit() and len(minor) == 1 and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"a compute capability is like 9.0, not {text!r}")
    return int(major + minor)


def gpu_of(sms: int | None, arch: int | None) -> Gpu:
    """The first GPU, or an H200 where there is none, with what was asked for in its place."""
    found = Gpu(SMS, 90, SHARED_KIB[90] << 10)
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        shared_bytes = properties.shared_memory_per_block_optin
        own_arch = 10 * properties.major + properties.minor
        fast_memory = fused_op_cuda._has_fast_memory(0)
        found = Gpu(properties.multi_processor_count, own_arch, shared_bytes, fast_memory)
    if arch is not None and arch != found.arch:
        found = Gpu(found.multiprocessors, arch, SHARED_KIB.get(arch, 99) << 10)
    return found if sms is None else found._replace(multiprocessors=sms)


@dataclass(frozen=True)
class Call:
    """A call of an op, by what its kernels depend on."""

    op: str  # of NORMS
    rows: int
    cols: int
    dtype: str
    backward: bool = False
    residual: str = ""  # its dtype, which is also that of the sum; "": none
    param_dtype: str = ""  # "": like dtype
    out_dtype: str = ""  # "": like dtype
    rounding: str = "once"
    dropout: bool = False
    memory_efficient: bool = False
    misaligned: bool = False

    def mistake(self) -> str:
        """What no op takes, as a clause; empty if it is one's call."""

        def fits(other: str, narrower: tuple[str, ...] = ()) -> bool:
            is_wider = other == "f32" and self.dtype in ("f16", "bf16")
            return other in ("", self.dtype) or is_wider or other in narrower

        if self.rows < 1 or self.cols < 1:
            return "rows and columns count from 1"
        if not fits(self.residual) or not fits(self.param_dtype):
            return (
                f"beside {self.dtype}, residual and parameters are of that dtype or wider, to f32"
            )
        if not fits(self.out_dtype, ("f16", "bf16") if self.dtype == "f32" else ()):
            return f"the output of {self.dtype} cannot be {self.out_dtype}"
        if self.memory_efficient and (self.residual or self.dropout):
            return "memory_efficient goes with neither a residual nor dropout"
        return ""

    def kernels(self, gpu: Gpu) -> tuple[dict[str, int], list[tuple[str, str, bool]]]:
        """The plan; of each kernel its header, name, and whether the extension contains it."""
        return fused_op_cuda._plan(
            backward=self.backward,
            centred=self.op == "layer_norm",
            rows=self.rows,
            cols=self.cols,
            input=self.dtype,
            residual=self.residual,
            parameters=self.param_dtype or self.dtype,
            output=self.out_dtype or self.dtype,
            rounding=self.rounding,
            dropout=self.dropout,
            memory_efficient=self.memory_efficient and self.backward,
            aligned=not self.misaligned,
            multiprocessors=gpu.multiprocessors,
            shared_bytes=gpu.shared_bytes,
            arch=gpu.arch,
            fast_memory=gpu.fast_memory,
        )

    def __str__(self) -> str:
        words = [
            f"{'add_' * bool(self.residual)}{self.op} {'backward' if self.backward else 'forward'}",
            f"{self.rows} x {self.cols} {self.dtype}",
            f"residual {self.residual}" * bool(self.residual),
            f"parameters {self.param_dtype}" * bool(self.param_dtype),
            f"output {self.out_dtype}" * bool(self.out_dtype),
            f"rounding {self.rounding}" * (self.rounding != "once"),
            *(
                name
                for name in ("dropout", "memory_efficient", "misaligned")
                if getattr(self, name)
            ),
        ]
        return ", ".join(filter(None, words))


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the options of the two commands."""

    def add_common(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--param-dtype", choices=DTYPES, default="", help="of weight and bias")
        parser.add_argument("--out-dtype", choices=DTYPES, default="", help="as in the call")
        parser.add_argument("--rounding", choices=ROUNDINGS, default="once", help="as in the call")
        parser.add_argument("--dropout", action="store_true", help="with dropout_p above 0")
        parser.add_argument("--memory-efficient", action="store_true", help="as in the call")
        parser.add_argument("--misaligned", action="store_true", help="rows begin at any element")
        parser.add_argument("--arch", type=parse_arch, help="9.0, or that of the GPU here")

    plan = commands.add_parser("plan", help="which kernels a call launches, and how")
    plan.add_argument("--op", choices=NORMS, required=True)
    plan.add_argument("--rows", type=int, required=True)
    plan.add_argument("--cols", type=int, required=True)
    plan.add_argument("--dtype", choices=DTYPES, required=True, help="of the input")
    plan.add_argument("--backward", action="store_true")
    same = (*DTYPES, "same")
    plan.add_argument("--residual", nargs="?", choices=same, const="same", default="", help="added")
    plan.add_argument("--sms", type=int, help=f"{SMS}, or those of the GPU here")
    add_common(plan)

    compile_ = commands.add_parser("compile", help="make kernels beforehand, for the package")
    compile_.add_argument("--op", type=_list_of(OPS), default=OPS, help="default: all of them")
    compile_.add_argument("--cols", type=_numbers, required=True, help="such as 144,1152")
    compile_.add_argument("--dtype", type=_list_of(DTYPES), required=True, help="such as bf16,f32")
    compile_.add_argument("--folder", default="", help="default: where the package looks for them")
    add_common(compile_)


def _list_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        unknown = [word for word in words if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return words

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"widths are like 144,1152, not {text!r}")
    return tuple(map(int, words))


def why_no_kernels() -> str:
    """Why this build compiles none, as a sentence; empty if it may."""
    reason: str = fused_op_cuda.build_info()["no_cuda_reason"]
    return reason and f"This build has no CUDA backend, and compiles no kernels: {reason}"


def print_plan(options: argparse.Namespace) -> int:
    """Print what a call launches; return the exit status."""
    call = Call(
        op=options.op,
        rows=options.rows,
        cols=options.cols,
        dtype=options.dtype,
        backward=options.backward,
        residual=options.dtype if options.residual == "same" else options.residual,
        **_common(options),
    )
    if problem := call.mistake() or why_no_kernels():
        print(problem)
        return 1
    gpu = gpu_of(options.sms, options.arch)
    plan, kernels = call.kernels(gpu)
    print(f"call    {call}")
    print(f"GPU     {gpu}{'' if torch.cuda.is_available() else ' (there is none here)'}")
    print("plan    " + "\n        ".join(f"{name:15} {value}" for name, value in plan.items()))
    is_missing = False
    for header, name, core in kernels:
        print(f"kernel  {name}")
        print(f"source  {header}")
        for line in describe(header, name, core, gpu):
            print(line)
            is_missing = is_missing or line.startswith(NO_CODE)
    if is_missing:
        print("PyTorch's operations take the call, after a warning; FUSED_OP_JIT=require: an error")
    return 0


def describe(header: str, name: str, core: bool, gpu: Gpu) -> Iterator[str]:
    """Where the code of a kernel comes from, and what it takes."""
    try:
        symbol, code, origin = fused_op_cuda._find_kernel(header, name, gpu.arch)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        yield "code    compiled with the extension" if core else f"{NO_CODE}: {reason}"
        return
    if core:
        yield "code    compiled with the extension; by NVRTC it"
    else:
        yield f"code    {ORIGINS[origin]}, {len(code)} bytes"
    facts = facts_of(symbol, code)
    if facts is None:
        yield "takes   not known: the driver compiles this PTX further"
        return
    yield f"takes   {facts.registers} registers and {facts.stack_bytes} bytes of stack a thread"
    yield f"        {facts.shared_bytes} bytes of shared memory a CTA, beside those of the launch"


def _common(options: argparse.Namespace) -> dict[str, Any]:
    names = ("param_dtype", "out_dtype", "rounding", "dropout", "memory_efficient", "misaligned")
    return {name: getattr(options, name) for name in names}


def calls_of(options: argparse.Namespace) -> Iterator[Call]:
    """Every op, dtype and width that was asked for, with few rows, some and many."""
    both, sizes = (False, True), [1 << k for k in range(21)]
    for op, dtype, cols, backward, rows in itertools.product(
        options.op, options.dtype, options.cols, both, sizes
    ):
        call = Call(op.removeprefix("add_"), rows, cols, dtype, backward, **_common(options))
        yield replace(call, residual=dtype) if op.startswith("add_") else call


def compile_kernels(options: argparse.Namespace) -> int:
    """Compile the kernels of many calls into a folder, a line each; return the exit status."""
    calls = list(calls_of(options))
    if problem := next(filter(None, (call.mistake() for call in calls)), "") or why_no_kernels():
        print(problem)
        return 1
    gpu = gpu_of(None, options.arch)
    either = [gpu._replace(fast_memory=fast) for fast in (True, False)]  # an architecture has both
    folder = options.folder or fused_op_cuda._cache_info()["package_folder"]
    print(f"for {gpu}, into {folder}")
    compiled: set[str] = set()
    of_extension: set[str] = set()
    for call in calls:
        for header, name, core in (kernel for each in either for kernel in call.kernels(each)[1]):
            if name in compiled or name in of_extension:
                continue
            function = name.partition("<")[0].rpartition("::")[2]
            if core:
                of_extension.add(name)
                print(f"  {'':7} {call}: {function} is compiled with the extension")
                continue
            start = time.perf_counter()
            try:
                fused_op_cuda._write_package(header, name, gpu.arch, {}, options.folder)
            except RuntimeError as error:
                print(f"  FAILED  {call}: {error}")
                return 1
            compiled.add(name)
            print(f"  {time.perf_counter() - start:5.2f} s {call}: {function}", flush=True)
    print(f"{len(compiled)} kernels")
    return 0
