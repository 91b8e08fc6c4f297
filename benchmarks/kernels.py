"""Kernels alone: builds csrc/cuda with plain nvcc, checks it, and times variants beside each other.

For work on the kernels. No extension is built: a library has the core table of one pair of dtypes,
and compiles what else a shape needs when it is called. Each tree is a copy of csrc/; all are
measured in one run, beside the copy or add of the same bytes.

    python -m benchmarks.kernels --shape 8192,4096 --shape 131200,1023
    python -m benchmarks.kernels --tree csrc --tree ../variant/csrc --only backward
    python -m benchmarks.kernels --build-only        # on a machine without a GPU
"""

from __future__ import annotations

import argparse
import ctypes
import os
import runpy
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .grids import parse_shape
from .timing import GraphTimer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((131072, 1024), (32768, 4096), (131200, 1023), (8192, 1024), (64, 1024))
# Dtypes of rows and of parameters, which core_*.cu are named after, and what C++ calls them.
PAIRS = {
    "bf16": (torch.bfloat16, torch.bfloat16, "BFloat16, BFloat16"),
    "bf16_f32": (torch.bfloat16, torch.float32, "BFloat16, float"),
    "f16": (torch.float16, torch.float16, "Float16, Float16"),
    "f16_f32": (torch.float16, torch.float32, "Float16, float"),
    "f32": (torch.float32, torch.float32, "float, float"),
    "f64": (torch.float64, torch.float64, ""),  # the core table has none
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # order of core/norm_args.h
KINDS = ("layer_norm", "rms_norm")

DOOR = """
#include <cstdio>

#include "cuda/core_table.h"
#include "cuda/fused_op_kernel.h"
#include "cuda/kernels.h"
using namespace fused_op;
// An exception must not reach Python.
template <typename Function>
std::int64_t guarded(Function&& function) {
  try {
    return function();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\\n", error.what());
    return -1;
  }
}
extern "C" int forward(int kind, int dtype, int param_dtype, std::int64_t rows, std::int64_t cols,
                       const void* x, const void* weight, const void* bias, void* y, void* stats,
                       cudaStream_t stream) {
  NormForwardArgs args;
  args.kind = static_cast<NormKind>(kind);
  args.dtype = args.input.dtype = args.output.dtype = static_cast<DType>(dtype);
  args.param_dtype = static_cast<DType>(param_dtype);
  args.rows = rows;
  args.cols = args.input.stride = cols;
  args.input.data = x;
  args.weight = weight;
  args.bias = bias;
  args.output.data = y;
  args.stats = stats;
  args.eps = 1e-5;
  return static_cast<int>(guarded([&] { return cuda::norm_forward(args, nullptr, stream); }));
}
// Without a workspace: returns its bytes. With one: launches, and returns the error.
extern "C" std::int64_t backward(int kind, int dtype, int param_dtype, std::int64_t rows,
                                 std::int64_t cols, const void* x, const void* dy,
                                 const void* weight, const void* stats, void* dx, void* dweight,
                                 void* dbias, void* workspace, cudaStream_t stream) {
  NormBackwardArgs args;
  args.kind = static_cast<NormKind>(kind);
  args.dtype = args.x.dtype = args.grad_output.dtype = args.grad_input.dtype =
      static_cast<DType>(dtype);
  args.param_dtype = static_cast<DType>(param_dtype);
  args.rows = rows;
  args.cols = args.x.stride = args.grad_output.stride = cols;
  args.x.data = x;
  args.grad_output.data = dy;
  args.weight = weight;
  args.stats = stats;
  args.grad_input.data = dx;
  args.grad_weight = dweight;
  args.grad_bias = dbias;
  args.workspace = workspace;
  if (workspace == nullptr) {
    return guarded([&] { return std::int64_t(cuda::norm_backward_workspace(args, nullptr)); });
  }
  return guarded([&] { return cuda::norm_backward(args, nullptr, stream); });
}
"""
# The core table's kernels of another pair: null, so that they are compiled at their first use.
LEFT_OUT = """
template <> const void* cuda::core_forward_of<{0}>(NormKind, bool, int) {{ return nullptr; }}
template <> const void* cuda::core_backward_of<{0}>(NormKind, bool, int) {{ return nullptr; }}
"""
ROUNDED = "BFloat16, BFloat16, true"  # whose x̂ is rounded before the weight
NO_PARTIALS = "template <> const void* cuda::core_partials_of<{0}>() {{ return nullptr; }}\n"


def build(tree: Path, pair: str, library: Path, arch: str) -> None:
    """Compiles the core table of one pair of dtypes, and all launches, into a shared library."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        others = [types for name, (*_, types) in PAIRS.items() if name != pair and types]
        code = DOOR + "".join(LEFT_OUT.format(types) for types in [*others, ROUNDED])
        for types in others:  # those of a pair of one type have the sums of its parameters
            row, parameters = types.split(", ")
            code += NO_PARTIALS.format(row) if row == parameters else ""
        door = folder / "door.cu"
        door.write_text(code)
        headers = runpy.run_path(str(ROOT / "setup.py"))["write_kernel_sources"](folder, tree)
        sources = [door, Path(headers), tree / "cuda/fused_op_kernel.cu"]
        sources += [*tree.glob("cuda/*.cpp"), *tree.glob(f"cuda/core_{pair}.cu")]
        objects = [Path(f"{source}.o").name for source in sources]
        nvcc = ["nvcc", "-std=c++20", "-O3", "-lineinfo", "-fmad=false", f"-I{tree}"]
        nvcc += [f"-arch={arch}", "-Xcompiler=-fPIC,-fno-gnu-unique", "-Xptxas=--warn-on-spills"]
        nvcc += [f'-DFUSED_OP_CUDA_VERSION="{torch.version.cuda}"']  # whose NVRTC it loads
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compile = lambda job: subprocess.run(  # noqa: E731
                [*nvcc, "-c", job[0], "-o", folder / job[1]], check=True
            )
            list(pool.map(compile, zip(sources, objects, strict=True)))
        link = ["nvcc", "-shared", "-cudart=shared", f"-arch={arch}", "-o", library]
        subprocess.run([*link, *(folder / name for name in objects)], check=True)


class Problem:
    """One norm on the GPU, and its calls through a library."""

    def __init__(self, op: str, pair: str, rows: int, cols: int) -> None:
        dtype, param_dtype, _ = PAIRS[pair]
        wide = dtype is torch.float64
        make = lambda *size, like=dtype: torch.randn(size, device="cuda").to(like)  # noqa: E731
        self.op = op
        self.head = (KINDS.index(op), DTYPES.index(dtype), DTYPES.index(param_dtype))
        self.x, self.dy, self.y, self.dx = (make(rows, cols) for _ in range(4))
        self.weight, self.bias = make(cols, like=param_dtype), make(cols, like=param_dtype)
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.bias)
        self.stats = make(2, rows, like=torch.float64 if wide else torch.float32)
        self.workspace: Tensor | None = None

    def forward(self, library: ctypes.CDLL, stats: bool = True) -> Tensor:
        bias = self.bias if self.op == "layer_norm" else None
        tensors = (self.x, self.weight, bias, self.y, self.stats if stats else None)
        self._ok(library.forward(*self._arguments(tensors)))
        return self.y

    def backward(self, library: ctypes.CDLL) -> Tensor:
        dbias = self.dbias if self.op == "layer_norm" else None
        tensors = (self.x, self.dy, self.weight, self.stats, self.dx, self.dweight, dbias)
        if self.workspace is None:
            size = library.backward(*self._arguments((*tensors, None)))
            self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self._ok(library.backward(*self._arguments((*tensors, self.workspace))))
        return self.dx

    def _arguments(self, tensors: tuple[Tensor | None, ...]) -> list[object]:
        numbers = [ctypes.c_int(number) for number in self.head]
        sizes = [ctypes.c_int64(size) for size in self.x.shape]
        pointers = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        return [*numbers, *sizes, *pointers, stream]

    def errors(self, library: ctypes.CDLL) -> dict[str, float]:
        """Relative L2 errors against fp64."""
        results = {"y": self.forward(library).clone(), "dx": self.backward(library).clone()}
        results["dweight"] = self.dweight
        leaves = [t.double().requires_grad_() for t in (self.x, self.weight)]
        if self.op == "layer_norm":
            results["dbias"] = self.dbias
            leaves.append(self.bias.double().requires_grad_())
        norm = getattr(torch.nn.functional, self.op)
        y = norm(leaves[0], self.x.shape[1:], *leaves[1:], eps=1e-5)
        truth = (y, *torch.autograd.grad(y, leaves, self.dy.double()))
        return {
            name: float((ours.double() - true).norm() / true.norm())
            for (name, ours), true in zip(results.items(), truth, strict=True)
        }

    @staticmethod
    def _ok(error: int) -> None:
        if error != 0:
            raise RuntimeError(f"the launch failed with CUDA error {error}")


def time_us(
    timer: GraphTimer, libraries: dict, op: str, pair: str, shape: tuple, mode: str
) -> dict:
    """Microseconds of each library, and of the limit: a copy (forward) or add (backward)."""
    tensors = 2 if mode == "forward" else 3
    size = tensors * shape[0] * shape[1] * PAIRS[pair][0].itemsize
    with timer.context():
        problems = [Problem(op, pair, *shape) for _ in range(timer.sets_for(size))]
    if mode == "forward":
        limit = [lambda p=p: p.y.copy_(p.x) for p in problems]
    else:
        limit = [lambda p=p: torch.add(p.x, p.dy, out=p.dx) for p in problems]
    times = {"limit": timer(limit, size).us}
    for name, library in libraries.items():
        for problem in problems:
            problem.workspace = None  # the library's own size
        if mode == "forward":
            calls = [lambda p=p, o=library: p.forward(o, stats=False) for p in problems]
        else:
            calls = [lambda p=p, o=library: p.backward(o) for p in problems]
        times[name] = timer(calls, size).us
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", action="append", type=Path, help="a csrc/; default: this one")
    parser.add_argument("--op", choices=KINDS, default="layer_norm")
    parser.add_argument("--pair", choices=PAIRS, default="bf16")
    parser.add_argument("--shape", action="append", type=parse_shape, help="rows,cols; repeatable")
    parser.add_argument("--only", choices=("forward", "backward"))
    parser.add_argument("--arch", default="native", help="of nvcc; default: the GPU in sight")
    parser.add_argument("--libraries", type=Path, default=ROOT / "build/kernels")
    parser.add_argument("--build-only", action="store_true", help="needs --arch without a GPU")
    parser.add_argument("--no-build", action="store_true", help="take what is in --libraries")
    args = parser.parse_args()
    args.libraries.mkdir(parents=True, exist_ok=True)
    trees = {f"{i}: {tree}": tree for i, tree in enumerate(args.tree or [ROOT / "csrc"])}
    files = {name: args.libraries / f"{i}_{args.pair}.so" for i, name in enumerate(trees)}
    if not args.no_build:
        with ThreadPoolExecutor() as pool:
            work = lambda name: build(trees[name].resolve(), args.pair, files[name], args.arch)  # noqa: E731
            list(pool.map(work, trees))
    if args.build_only:
        return
    libraries = {name: ctypes.CDLL(os.fspath(file)) for name, file in files.items()}
    timer = GraphTimer(rounds=5)
    for shape in args.shape or SHAPES:
        for name, library in libraries.items():
            library.backward.restype = ctypes.c_int64
            errors = Problem(args.op, args.pair, *shape).errors(library)
            print(shape, name, *(f"{n} {e:.1e}" for n, e in errors.items()))
        for mode in (args.only,) if args.only else ("forward", "backward"):
            times = time_us(timer, libraries, args.op, args.pair, shape, mode)
            limit = times.pop("limit")
            figures = (f"{name} {us:.2f} us = {limit / us:.3f}" for name, us in times.items())
            print(shape, mode, f"limit {limit:.2f} us,", ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
