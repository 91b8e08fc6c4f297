"""Kernels alone: builds csrc/cuda with plain nvcc, checks it, and times variants beside each other.

For work on the kernels. No extension is built: one nvcc call a file, 40 s for one pair of dtypes.
Each tree is a copy of csrc/; all are measured in one run, beside the copy or add of the same bytes.

    python -m benchmarks.kernels --shape 8192,4096 --shape 131200,1023
    python -m benchmarks.kernels --tree csrc --tree ../variant/csrc --only backward
    python -m benchmarks.kernels --build-only        # on a machine without a GPU
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .timing import GraphTimer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((131072, 1024), (32768, 4096), (131200, 1023), (8192, 1024), (64, 1024))
# The launch_*.cu of a pair of dtypes, and how the C++ of the others is left out.
PAIRS = {
    "bf16": (torch.bfloat16, torch.bfloat16, "__nv_bfloat16, __nv_bfloat16"),
    "bf16_f32": (torch.bfloat16, torch.float32, "__nv_bfloat16, float"),
    "f16": (torch.float16, torch.float16, "__half, __half"),
    "f16_f32": (torch.float16, torch.float32, "__half, float"),
    "f32": (torch.float32, torch.float32, "float, float"),
    "f64": (torch.float64, torch.float64, "double, double"),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # order of core/norm_args.h

DOOR = """
#include "cuda/fused_op_kernel.h"
#include "cuda/launch.h"
using namespace fused_op;
extern "C" int forward(const NormForwardArgs* args, cudaStream_t stream) {
  return cuda::norm_forward(*args, stream);
}
extern "C" std::size_t workspace(const NormBackwardArgs* args) {
  return cuda::norm_backward_workspace(*args);
}
extern "C" int backward(const NormBackwardArgs* args, cudaStream_t stream) {
  return cuda::norm_backward(*args, stream);
}
"""
LEFT_OUT = """
template <> cudaError_t cuda::launch_forward<{0}>(const NormForwardArgs&, cudaStream_t) {{
  return cudaErrorNotSupported;
}}
template <> std::size_t cuda::backward_workspace<{0}>(const NormBackwardArgs&) {{ return 0; }}
template <> cudaError_t cuda::launch_backward<{0}>(const NormBackwardArgs&, cudaStream_t) {{
  return cudaErrorNotSupported;
}}
"""


def build(tree: Path, pair: str, library: Path, arch: str) -> None:
    """Compiles the kernels of one pair of dtypes into a shared library."""
    with tempfile.TemporaryDirectory() as directory:
        door = Path(directory) / "door.cu"
        others = [types for name, (*_, types) in PAIRS.items() if name != pair]
        door.write_text(DOOR + "".join(LEFT_OUT.format(types) for types in others))
        sources = [tree / f"cuda/launch_{pair}.cu", tree / "cuda/fused_op_kernel.cu", door]
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]
        nvcc = ["nvcc", "-std=c++20", "-O3", "-lineinfo", "-fmad=false", f"-I{tree}"]
        nvcc += [f"-arch={arch}", "-Xcompiler=-fPIC,-fno-gnu-unique", "-Xptxas=--warn-on-spills"]
        with ThreadPoolExecutor() as pool:
            compile = lambda job: subprocess.run([*nvcc, "-c", job[0], "-o", job[1]], check=True)  # noqa: E731
            list(pool.map(compile, zip(sources, objects, strict=True)))
        link = ["nvcc", "-shared", "-cudart=shared", f"-arch={arch}", *objects, "-o", library]
        subprocess.run(link, check=True)


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


def _structure(pointers: str, tail: str = "") -> type[ctypes.Structure]:
    """The args structs of core/norm_args.h: kind, dtypes, sizes; then rows (*) and pointers."""
    fields = [(name, ctypes.c_int) for name in ("kind", "dtype", "param_dtype")]
    fields += [(name, ctypes.c_int64) for name in ("rows", "cols")]
    for name in pointers.split():
        fields.append((name.strip("*"), Rows if "*" in name else ctypes.c_void_p))
    fields += [(name, ctypes.c_double) for name in tail.split()]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


ForwardArgs = _structure("*input *residual weight bias output sum stats", "eps")
BackwardArgs = _structure(
    "*x *grad_output *grad_sum weight stats grad_input grad_weight grad_bias workspace"
)


class Problem:
    """One LayerNorm problem on the GPU, and its calls through a library."""

    def __init__(self, pair: str, rows: int, cols: int) -> None:
        dtype, param_dtype, _ = PAIRS[pair]
        wide = dtype is torch.float64
        make = lambda *size, like=dtype: torch.randn(size, device="cuda").to(like)  # noqa: E731
        self.head = (0, DTYPES.index(dtype), DTYPES.index(param_dtype), rows, cols)
        self.x, self.dy, self.y, self.dx = (make(rows, cols) for _ in range(4))
        self.weight, self.bias = make(cols, like=param_dtype), make(cols, like=param_dtype)
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.bias)
        self.stats = make(2, rows, like=torch.float64 if wide else torch.float32)
        self.workspace: Tensor | None = None

    def forward(self, library: ctypes.CDLL, stats: bool = True) -> Tensor:
        x, empty = Rows(self.x.data_ptr(), self.x.stride(0)), Rows(None, 0)
        pointers = [t.data_ptr() for t in (self.weight, self.bias, self.y)]
        pointers += [None, self.stats.data_ptr() if stats else None]
        args = ForwardArgs(*self.head, x, empty, *pointers, 1e-5)
        self._ok(library.forward(ctypes.byref(args), self._stream()))
        return self.y

    def backward(self, library: ctypes.CDLL) -> Tensor:
        rows = [Rows(t.data_ptr(), t.stride(0)) for t in (self.x, self.dy)]
        tensors = (self.weight, self.stats, self.dx, self.dweight, self.dbias)
        args = BackwardArgs(*self.head, *rows, Rows(None, 0), *(t.data_ptr() for t in tensors))
        if self.workspace is None:
            size = library.workspace(ctypes.byref(args))
            self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        args.workspace = self.workspace.data_ptr()
        self._ok(library.backward(ctypes.byref(args), self._stream()))
        return self.dx

    def errors(self, library: ctypes.CDLL) -> dict[str, float]:
        """Relative L2 errors against fp64."""
        results = {"y": self.forward(library).clone(), "dx": self.backward(library).clone()}
        results |= {"dweight": self.dweight, "dbias": self.dbias}
        x, w, b = (t.double().requires_grad_() for t in (self.x, self.weight, self.bias))
        y = torch.nn.functional.layer_norm(x, x.shape[1:], w, b)
        truth = (y, *torch.autograd.grad(y, (x, w, b), self.dy.double()))
        return {
            name: float((ours.double() - true).norm() / true.norm())
            for (name, ours), true in zip(results.items(), truth, strict=True)
        }

    @staticmethod
    def _ok(error: int) -> None:
        if error != 0:
            raise RuntimeError(f"the launch failed with CUDA error {error}")

    @staticmethod
    def _stream() -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def time_us(timer: GraphTimer, libraries: dict, pair: str, shape: tuple, mode: str) -> dict:
    """Microseconds of each library, and of the limit: a copy (forward) or add (backward)."""
    tensors = 2 if mode == "forward" else 3
    size = tensors * shape[0] * shape[1] * PAIRS[pair][0].itemsize
    with timer.context():
        problems = [Problem(pair, *shape) for _ in range(timer.sets_for(size))]
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
    parser.add_argument("--pair", choices=PAIRS, default="bf16")
    parser.add_argument("--shape", action="append", help="rows,cols; may be repeated")
    parser.add_argument("--only", choices=("forward", "backward"))
    parser.add_argument("--arch", default="native", help="of nvcc; default: the GPU in sight")
    parser.add_argument("--libraries", type=Path, default=ROOT / "build/kernels")
    parser.add_argument("--build-only", action="store_true", help="needs --arch without a GPU")
    parser.add_argument("--no-build", action="store_true", help="take what is in --libraries")
    args = parser.parse_args()
    args.libraries.mkdir(parents=True, exist_ok=True)
    trees = {f"{i}: {tree}": tree for i, tree in enumerate(args.tree or [ROOT / "csrc"])}
    files = {name: args.libraries / f"{i}_{args.pair}.so" for i, name in enumerate(trees)}
    for name, tree in trees.items():
        if not args.no_build:
            build(tree.resolve(), args.pair, files[name], args.arch)
    if args.build_only:
        return
    libraries = {name: ctypes.CDLL(os.fspath(file)) for name, file in files.items()}
    shapes = [tuple(map(int, s.split(","))) for s in args.shape or ()] or SHAPES
    timer = GraphTimer(rounds=5)
    for shape in shapes:
        for name, library in libraries.items():
            library.workspace.restype = ctypes.c_size_t
            errors = Problem(args.pair, *shape).errors(library)
            print(shape, name, *(f"{n} {e:.1e}" for n, e in errors.items()))
        for mode in (args.only,) if args.only else ("forward", "backward"):
            times = time_us(timer, libraries, args.pair, shape, mode)
            limit = times.pop("limit")
            figures = (f"{name} {us:.2f} us = {limit / us:.3f}" for name, us in times.items())
            print(shape, mode, f"limit {limit:.2f} us,", ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
