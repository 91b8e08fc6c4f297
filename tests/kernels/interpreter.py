"""Runs the CUDA kernels without a GPU: their PTX, by the interpreter in ptx/.

    gpu = Gpu(multiprocessors=132)
    output, _, stats = gpu.forward(norm="rms_norm", input=x, weight=weight)

All but the GPU is the library's own: csrc/cuda makes the plan, names the kernel, finds it in its
table and launches it. ptx/gpu.cpp stands in for the driver, the runtime and the compiler. Arguments
and results are those of torch.ops.fused_op.norm_forward and norm_backward; tensors are on the CPU.
"""

import ctypes
import hashlib
import itertools
import math
import operator
import os
import shutil
import subprocess
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor

import build_backend
from tests.kernels import nvrtc
from tests.kernels.toy_variant import (
    CODES,
    NAMES,
    BackwardArgs,
    ConstRows,
    Dropout,
    ForwardArgs,
    Rows,
    Split,
)

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "ptx"
COMPILER = shutil.which("g++") or shutil.which("c++")
# Of csrc/cuda all host code but compile.cpp, driver.cpp and what keeps kernels in files.
HOST = ("launch*.cpp", "plan*.cpp", "kernels.cpp")
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-fPIC"]
FLAGS += ["-Wall", "-Wextra", "-DFUSED_OP_NO_CORE_TABLE", "-DFUSED_OP_CHECK_KEYS"]
if os.environ.get("FUSED_OP_STRICT"):  # other compilers may have other warnings
    FLAGS += ["-Werror"]
Compile = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)


def cuda_includes() -> list[Path]:
    """Folders with CUDA's headers: of the toolkit, or of wheels."""
    home = build_backend.find_cuda_home()
    if home and home.joinpath("include", "cuda.h").exists():
        return [home / "include"]
    return build_backend.find_cuda_headers((torch.version.cuda or "13").split(".")[0])


def why_not() -> str:
    """Why kernels cannot be run here; empty if they can."""
    if COMPILER is None:
        return "no C++ compiler"
    if not cuda_includes():
        return "no cuda.h"
    return nvrtc.why_not()


FOLDER = ROOT / "build" / "ptx"  # of the library and of PTX, by the hashes of what they come from


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def build() -> Path:
    """The interpreter as a shared library: what was compiled from the same sources is kept."""
    host = sorted(path for name in HOST for path in (ROOT / "csrc" / "cuda").glob(name))
    headers = sorted([*HERE.glob("*.h"), *(ROOT / "csrc").glob("c*/*.h")])
    common = digest(*(path.read_text() for path in headers), *FLAGS)
    sources = [*sorted(HERE.glob("*.cpp")), *host]
    objects = {FOLDER / f"{digest(common, path.read_text())}.o": path for path in sources}
    made = FOLDER / f"{digest(*map(str, objects))}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"), tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        if not made.exists():  # else another process of pytest-xdist was faster
            missing = [item for item in objects.items() if not item[0].exists()]
            with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
                list(pool.map(lambda item: compile_object(Path(scratch), *item), missing))
            # Its own functions of the runtime, though torch may have brought the real ones.
            link = [COMPILER, "-shared", "-Wl,-Bsymbolic", *objects, "-o", f"{scratch}/made.so"]
            subprocess.run(link, check=True)
            os.replace(f"{scratch}/made.so", made)
    return made


def compile_object(scratch: Path, made: Path, source: Path) -> None:
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in cuda_includes())]
    command = [COMPILER, *FLAGS, *includes, "-c", str(source), "-o", str(scratch / made.name)]
    subprocess.run(command, check=True)
    (scratch / made.name).replace(made)


@cache
def library() -> ctypes.CDLL:
    made = ctypes.CDLL(str(build()))
    for name in ("gpu_forward", "gpu_backward", "gpu_launched", "gpu_unwritten", "gpu_run"):
        getattr(made, name).restype = ctypes.c_char_p
    made.gpu_workspace.restype = ctypes.c_int64
    return made


@cache
def sources() -> str:
    """All that a kernel may include, as one text."""
    csrc = nvrtc.CSRC
    paths = [*csrc.glob("core/*.h"), *csrc.glob("cuda/*.*h"), *csrc.glob("rtc/*")]
    return "\0".join(path.read_text() for path in sorted(paths))


@cache
def ptx_of(header: str, name: str) -> bytes:
    """The kernel's PTX, from the folder if it was compiled before."""
    path = FOLDER / f"{digest(sources(), header, name, *nvrtc.options())}.ptx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(nvrtc.compile_ptx(header, name)[1])
        scratch.replace(path)
    return path.read_bytes()


@Compile
def compile_kernel(header: bytes, name: bytes) -> int | None:
    try:
        text = ptx_of(header.decode(), name.decode())  # stays in the cache, and so at its address
    except Exception:  # which C++ cannot catch: it would take any number for the address
        traceback.print_exc()
        return None
    return ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value


class KernelFault(AssertionError):
    """What a kernel does is wrong; or the interpreter does not know what it does."""


class Launch(NamedTuple):
    """One that has run."""

    grid: tuple[int, int]
    block: tuple[int, int]
    cluster: int
    shared_bytes: int
    instructions: int  # of all threads
    kernel: str  # in C++


def rows_of(tensor: Tensor | None) -> ctypes.Structure:
    """[rows, cols], or [outer, inner, cols] for rows at two strides."""
    if tensor is None:
        return ConstRows()
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    split = Split()
    if tensor.dim() == 3:
        inner = tensor.shape[1]
        shift = (inner - 1).bit_length()
        split = Split(inner, (2**32 * (2**shift - inner)) // inner + 1, shift, tensor.stride(0))
    return ConstRows(tensor.data_ptr(), code_of(tensor.dtype), tensor.stride(-2), split)


def code_of(dtype: torch.dtype) -> int:
    return CODES[NAMES[dtype]]


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """At a multiple of 16 bytes, as the GPU's allocator would give it, in whole blocks of 16.

    The memory holds what is NaN in every type.
    """
    count = math.prod(shape)
    memory = torch.full((count * dtype.itemsize + 31,), 255, dtype=torch.uint8)
    first = -memory.data_ptr() % 16
    return memory[first : first + count * dtype.itemsize].view(dtype).view(shape)


class Gpu:
    """One with compute capability 9.0 and so many SMs."""

    indices: ClassVar[dict[int, int]] = {}  # by the number of SMs: what the library knows it by

    def __init__(
        self, multiprocessors: int = 132, clusters: bool = True, backwards: bool = False
    ) -> None:
        """`clusters`: it has a place for one. `backwards`: later threads and CTAs run first."""
        self.multiprocessors = multiprocessors
        self.clusters, self.backwards = clusters, backwards
        self.launches: list[Launch] = []

    def _begin(self) -> None:
        index = self.indices.setdefault(self.multiprocessors, len(self.indices))
        library().gpu_set(
            index, self.multiprocessors, self.clusters, self.backwards, compile_kernel
        )

    def _reads(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                size = tensor.element_size()
                leading = itertools.product(*map(range, tensor.shape[:-1]))
                firsts = [sum(map(operator.mul, at, tensor.stride()), 0) for at in leading]
                spans = [(size * first, size * tensor.shape[-1]) for first in firsts]
                if tensor.is_contiguous():
                    spans = [(0, size * tensor.numel())]
                for first, count in spans:
                    self._allow(name, tensor.data_ptr() + first, count, False, False)

    def _writes(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                count = tensor.numel() * tensor.element_size()
                self._allow(name, tensor.data_ptr(), count, True, True)

    def _allow(self, name: str, at: int, count: int, is_writable: bool, is_empty: bool) -> None:
        arguments = ctypes.c_void_p(at), ctypes.c_int64(count), is_writable, is_empty
        library().gpu_allow(name.encode(), *arguments)

    def _end(self, problem: bytes) -> None:
        for line in library().gpu_launched().decode().splitlines():
            *numbers, kernel = line.split(" ", 7)
            x, y, width, height, cluster, shared, executed = map(int, numbers)
            self.launches.append(Launch((x, y), (width, height), cluster, shared, executed, kernel))
        if not problem:
            problem = library().gpu_unwritten()
        if problem:
            raise KernelFault(problem.decode())

    def run(
        self, ptx: str, ctas: int, threads: int, *tensors: Tensor, cluster: int = 1, shared: int = 0
    ) -> None:
        """Any kernel, which may write to the last of its tensors and read the others."""
        self._begin()
        self._reads(**{f"argument {i}": tensor for i, tensor in enumerate(tensors[:-1])})
        self._writes(result=tensors[-1])
        values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._end(library().gpu_run(ptx.encode(), ctas, threads, cluster, shared, pointers))

    def forward(
        self,
        *,
        norm: str,
        input: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        rng_state: Tensor | None = None,
        eps: float = 1e-5,
        rounding: str = "once",
        dropout_p: float = 0.0,
        output_dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
        save_stats: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(output, sum, stats) as torch.ops.fused_op.norm_forward returns them."""
        centred, rows = norm == "layer_norm", math.prod(input.shape[:-1])
        dtype = input.dtype if residual is None else sum_dtype or residual.dtype
        output = empty(*input.shape, dtype=output_dtype or input.dtype)
        total = None if residual is None else empty(*input.shape, dtype=dtype)
        stats = empty(1 + centred, rows, dtype=wide(dtype)) if save_stats else None
        param = next((t.dtype for t in (weight, bias) if t is not None), input.dtype)
        args = ForwardArgs(
            kind=0 if centred else 1, dtype=code_of(dtype), param_dtype=code_of(param),
            rounding=ROUNDINGS.index(rounding), rows=rows, cols=input.shape[-1],
            input=rows_of(input), residual=rows_of(residual), weight=pointer(weight),
            bias=pointer(bias), output=Rows(output.data_ptr(), code_of(output.dtype)),
            sum=pointer(total), stats=pointer(stats), eps=eps,
            dropout=dropout_of(dropout_p, rng_state),
        )  # fmt: skip
        self._begin()
        self._reads(input=input, residual=residual, weight=weight, bias=bias)
        self._writes(output=output, sum=total, stats=stats)
        self._end(library().gpu_forward(ctypes.byref(args)))
        return output, total, stats

    def backward(
        self,
        *,
        norm: str,
        grad_output: Tensor,
        x: Tensor,
        stats: Tensor,
        grad_sum: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        rng_state: Tensor | None = None,
        rounding: str = "once",
        dropout_p: float = 0.0,
        x_is_output: bool = False,
        input_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
        main_grads: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of (input, residual, weight, bias) as torch.ops.fused_op.norm_backward does.

        `main_grads` of weight and bias, float32, are added to.
        """
        centred, rows, cols = norm == "layer_norm", math.prod(x.shape[:-1]), x.shape[-1]
        input_dtype = input_dtype or x.dtype
        param = param_dtype or (x.dtype if weight is None else weight.dtype)
        shared = residual_dtype is None or (dropout_p == 0 and residual_dtype == input_dtype)
        own = main_grads is None
        wants = (
            wanted[0] or (shared and wanted[1]), wanted[1] and not shared,
            wanted[2] and own, wanted[3] and centred and own,
        )  # fmt: skip
        dtypes = (input_dtype, residual_dtype or input_dtype, param, param)
        shapes = (x.shape, x.shape, (cols,), (cols,))
        made = [
            empty(*shape, dtype=dtype) if want else None
            for want, shape, dtype in zip(wants, shapes, dtypes, strict=True)
        ]
        grads = made[2:] if own else list(main_grads)
        args = BackwardArgs(
            kind=0 if centred else 1, dtype=code_of(x.dtype), param_dtype=code_of(param),
            rounding=ROUNDINGS.index(rounding), rows=rows, cols=cols, x=rows_of(x),
            grad_output=rows_of(grad_output), grad_sum=rows_of(grad_sum), weight=pointer(weight),
            bias=pointer(bias) if x_is_output else None, stats=stats.data_ptr(),
            has_residual=residual_dtype is not None,
            grad_input=Rows(pointer(made[0]), code_of(dtypes[0])),
            grad_residual=Rows(pointer(made[1]), code_of(dtypes[1])),
            grad_weight=pointer(grads[0]), grad_bias=pointer(grads[1]),
            add_grads=not own, x_is_output=x_is_output,
            dropout=dropout_of(dropout_p, rng_state),
            drops_input=dropout_p > 0 and residual_dtype is not None,
        )  # fmt: skip
        self._begin()
        workspace = empty(library().gpu_workspace(ctypes.byref(args)), dtype=torch.uint8)
        args.workspace = workspace.data_ptr() if workspace.numel() else None
        self._reads(grad_output=grad_output, x=x, grad_sum=grad_sum, weight=weight, stats=stats)
        self._reads(bias=bias if x_is_output else None)
        self._writes(grad_input=made[0], grad_residual=made[1], grad_weight=made[2])
        self._writes(grad_bias=made[3])
        for name, grad in zip(("weight", "bias"), main_grads or (), strict=False):
            if grad is not None:
                self._allow(f"main_grad of {name}", grad.data_ptr(), 4 * cols, True, False)
        if workspace.numel():
            # Of whole blocks of 16 bytes, not all of which need be written.
            at, count = workspace.data_ptr(), workspace.numel()
            self._allow("workspace", at, count, True, True)
        self._end(library().gpu_backward(ctypes.byref(args)))
        return tuple(made)


ROUNDINGS = ("once", "before_weight")


def wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics of rows of this type are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dropout_of(p: float, rng_state: Tensor | None) -> ctypes.Structure:
    """As to_dropout of csrc/kernel_arguments.cpp makes it."""
    if p == 0:
        return Dropout()
    dropped = 2**16 if p == 1 else min(math.floor(p * 2**16 + 0.5), 2**16 - 1)
    scale = 0 if p == 1 else 2**16 / (2**16 - dropped)
    seed, offset = (value % 2**64 for value in rng_state.tolist())
    return Dropout(True, dropped, scale, scale, seed, offset)
