"""Launches the variant of toy_variant.h: a plan of fused_op's, another source and epilogue.

The arguments of the kernels are those of csrc/core/norm_args.h, as ctypes; `LAYOUT` has a C++
compiler check that they lie where C++ puts them.
"""

import ctypes as c
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import fused_op_cuda

CAP = 2
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
TYPES = {"f16": "fused_op::Float16", "bf16": "fused_op::BFloat16", "f32": "float", "f64": "double"}
CODES = {name: code for code, name in enumerate(TYPES)}
HEADERS = {"toy_variant.h": Path(__file__).with_name("toy_variant.h").read_text()}
for kernel in ("forward_rows.cuh", "backward_rows.cuh", "add_partials.cuh"):
    HEADERS[f"toy/{kernel}"] = f'#include "cuda/{kernel}"\n#include "toy_variant.h"\n'


def struct(*fields: tuple[str, type]) -> type[c.Structure]:
    return type("Struct", (c.Structure,), {"_fields_": list(fields)})


I32, I64, Pointer, Bool = c.c_int, c.c_int64, c.c_void_p, c.c_bool
Split = struct(("inner", c.c_uint32), ("magic", c.c_uint32), ("shift", c.c_uint32), ("outer", I64))
ConstRows = struct(("data", Pointer), ("dtype", I32), ("stride", I64), ("split", Split))
Rows = struct(("data", Pointer), ("dtype", I32))
Dropout = struct(
    ("active", Bool), ("threshold", c.c_uint32), ("scale", c.c_float), ("wide_scale", c.c_double),
    ("seed", c.c_uint64), ("offset", c.c_uint64), ("state", Pointer),
)  # fmt: skip
ForwardArgs = struct(
    ("kind", I32), ("dtype", I32), ("param_dtype", I32), ("rounding", I32), ("rows", I64),
    ("cols", I64), ("input", ConstRows), ("residual", ConstRows), ("weight", Pointer),
    ("bias", Pointer),
    ("output", Rows), ("sum", Pointer), ("stats", Pointer), ("eps", c.c_double),
    ("dropout", Dropout),
)  # fmt: skip
BackwardArgs = struct(
    ("kind", I32), ("dtype", I32), ("param_dtype", I32), ("rounding", I32), ("rows", I64),
    ("cols", I64), ("x", ConstRows), ("grad_output", ConstRows), ("grad_sum", ConstRows),
    ("weight", Pointer),
    ("bias", Pointer), ("stats", Pointer), ("has_residual", Bool), ("grad_input", Rows),
    ("grad_residual", Rows), ("grad_weight", Pointer), ("grad_bias", Pointer), ("add_grads", Bool),
    ("x_is_output", Bool), ("workspace", Pointer), ("dropout", Dropout), ("drops_input", Bool),
)  # fmt: skip
Steps = struct(
    ("rows", I64),
    ("ahead", I64),
    ("bytes", I64 * 3),
    ("whole_rows", I64),
    ("tail_row", I64),
    ("tail_cta", I64),
)
Targets = struct(("data", Pointer * 2), ("add", Bool))
IN_CPP = {
    "NormForwardArgs": ForwardArgs,
    "NormBackwardArgs": BackwardArgs,
    "ConstRows": ConstRows,
    "Dropout": Dropout,
    "cuda::BackwardSteps": Steps,
}
LAYOUT = '#include <cstddef>\n#include "core/norm_args.h"\n#include "cuda/backward_tile.h"\n'
for name, mirror in IN_CPP.items():
    LAYOUT += f"static_assert(sizeof(fused_op::{name}) == {c.sizeof(mirror)});\n"
    for field, _ in mirror._fields_:
        offset = getattr(mirror, field).offset
        LAYOUT += f"static_assert(offsetof(fused_op::{name}, {field}) == {offset});\n"


def plan(
    backward: bool, centred: bool, rows: int, cols: int, dtypes: tuple[str, str, str]
) -> tuple:
    """The plan of a call without a residual, (input, parameters, output), and its toy kernels."""
    source, parameters, output = dtypes
    shape = {"backward": backward, "centred": centred, "rows": rows, "cols": cols}
    types = {"input": source, "residual": "", "parameters": parameters, "output": output}
    options = {"rounding": "once", "dropout": False, "memory_efficient": False, "aligned": True}
    gpu = {"multiprocessors": 132, "shared_bytes": 227 << 10}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu["multiprocessors"] = properties.multi_processor_count
        gpu["shared_bytes"] = properties.shared_memory_per_block_optin
    integers, kernels = fused_op_cuda._plan(**shape, **types, **options, **gpu)
    row, weight, y = (TYPES[dtype] for dtype in dtypes)
    ours = {
        f"fused_op::Plain<{row}, false>": f"toy::Scale2<{row}>",
        f"fused_op::Affine<{weight}, {y}, false{', false' * backward}>": (
            f"toy::SoftCap<{weight}, {y}, {CAP}>"
        ),
    }
    toys = []
    for header, name, _ in kernels:
        for old, new in ours.items():
            assert "partials" in header or old in name, (old, name)
            name = name.replace(old, new)
        toys.append((header.replace("cuda/", "toy/"), name))
    return integers, toys


class Driver:
    """The CUDA driver, as far as it loads and launches."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes its context current
        self.library = c.CDLL("libcuda.so.1")
        self.arch = int("".join(map(str, torch.cuda.get_device_capability())))

    def __getattr__(self, name: str):
        def call(*arguments) -> None:
            status = getattr(self.library, name)(*arguments)
            assert status == 0, f"{name}: CUresult {status}"

        return call

    @cache  # noqa: B019  (one object lives as long as the process)
    def kernel(self, header: str, name: str) -> Pointer:
        symbol, code, _ = fused_op_cuda._compile(header, name, self.arch, HEADERS)
        library, kernel, function = Pointer(), Pointer(), Pointer()
        self.cuLibraryLoadData(c.byref(library), code, None, None, 0, None, None, 0)
        self.cuLibraryGetKernel(c.byref(kernel), library, symbol.encode())
        self.cuKernelGetFunction(c.byref(function), kernel)
        return function

    def launch(self, function: Pointer, grid: tuple, block: tuple, shared: int, *arguments) -> None:
        dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.cuFuncSetAttribute(function, dynamic_shared_bytes, c.c_int(shared))
        pointers = (Pointer * len(arguments))(*map(c.addressof, arguments))
        grid, block = ((*size, *(1,) * (3 - len(size))) for size in (grid, block))
        stream = Pointer(torch.cuda.current_stream().cuda_stream)
        self.cuLaunchKernel(function, *grid, *block, shared, stream, pointers, None)


def const_rows(rows: Tensor) -> c.Structure:
    return ConstRows(rows.data_ptr(), CODES[NAMES[rows.dtype]], rows.stride(0), Split())


def dense_rows(rows: Tensor) -> c.Structure:
    return Rows(rows.data_ptr(), CODES[NAMES[rows.dtype]])


def forward(driver: Driver, centred: bool, x: Tensor, weight: Tensor, bias: Tensor, out) -> tuple:
    """(output, 2 · x, statistics)."""
    rows, cols = x.shape
    dtypes = (NAMES[x.dtype], NAMES[weight.dtype], NAMES[out])
    integers, [kernel] = plan(False, centred, rows, cols, dtypes)
    output, scaled = torch.empty_like(x, dtype=out), torch.empty_like(x)
    stats = torch.empty(2 if centred else 1, rows, device=x.device)
    args = ForwardArgs(
        kind=0 if centred else 1, dtype=CODES[dtypes[0]], param_dtype=CODES[dtypes[1]],
        rows=rows, cols=cols, input=const_rows(x), weight=weight.data_ptr(), bias=bias.data_ptr(),
        output=dense_rows(output), sum=scaled.data_ptr(), stats=stats.data_ptr(), eps=1e-5,
    )  # fmt: skip
    shape = (integers["ctas"],), (integers["threads"],)
    driver.launch(driver.kernel(*kernel), *shape, 0, args)
    return output, scaled, stats


def backward(driver: Driver, centred: bool, scaled: Tensor, stats: Tensor, *rest: Tensor) -> tuple:
    """Gradients of x, weight and, if centred, bias."""
    weight, bias, dy = rest
    rows, cols = scaled.shape
    dtypes = (NAMES[scaled.dtype], NAMES[weight.dtype], NAMES[dy.dtype])
    integers, kernels = plan(True, centred, rows, cols, dtypes)
    assert "::backward_kernel<" in kernels[0][1], "these arguments are that kernel's"
    grad_x, grad_weight, grad_bias = map(torch.empty_like, (scaled, weight, bias))
    workspace = torch.empty(integers["partials_bytes"] // 4, device=dy.device)
    args = BackwardArgs(
        kind=0 if centred else 1, dtype=CODES[dtypes[0]], param_dtype=CODES[dtypes[1]],
        rows=rows, cols=cols, x=const_rows(scaled), grad_output=const_rows(dy),
        weight=weight.data_ptr(), bias=bias.data_ptr(), stats=stats.data_ptr(),
        grad_input=dense_rows(grad_x), grad_residual=Rows(None, CODES[dtypes[0]]),
        grad_weight=grad_weight.data_ptr(), grad_bias=grad_bias.data_ptr() if centred else None,
        workspace=workspace.data_ptr(),
    )  # fmt: skip
    ctas, side = integers["ctas"], integers["side_by_side"]
    step = ctas * side
    in_bytes = [step * rows.stride(0) * rows.element_size() for rows in (scaled, dy)]
    # No row is known to end a block before its tensor does.
    steps = Steps(step, (integers["stages"] - 1) * step, (I64 * 3)(*in_bytes, 0), 0)
    # The plan knows of the weight. This epilogue has the bias beside it.
    threads = integers["row_threads"] * side
    pack_bytes = max(integers["pack"] * weight.element_size(), 4)
    shared = integers["shared_bytes"] + threads * (integers["vectors"] * pack_bytes + 16)
    partials = Pointer(workspace.data_ptr() if integers["partials_bytes"] else None)
    block = (integers["row_threads"], side)
    driver.launch(driver.kernel(*kernels[0]), (ctas,), block, shared, args, steps, partials)
    if integers["partials_bytes"]:
        grads = 2 if centred else 1
        targets = Targets((Pointer * 2)(args.grad_weight, args.grad_bias), False)
        counts = c.c_int(ctas), c.c_int(grads), I64((cols + 7) // 8 * 8), I64(cols)
        grid = ((cols + 31) // 32, grads)  # 8 lanes of 4 columns
        driver.launch(driver.kernel(*kernels[1]), grid, (8, 16), 0, partials, *counts, targets)
    return (grad_x, grad_weight, grad_bias) if centred else (grad_x, grad_weight)
