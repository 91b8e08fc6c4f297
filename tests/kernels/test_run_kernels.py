"""The CUDA kernels compute what they should, and touch no memory that they should not: no GPU.

Their PTX is interpreted (interpreter.py). What this catches on a machine without a GPU: a wrong
value or mask; a load or a store outside of a tensor, misaligned, or before the kernels before are
done; what is read from shared memory before it is written; a barrier that some threads never reach;
a result, or part of one, that nothing writes. What it cannot: what ptxas makes of the PTX, and the
order in which a GPU's memory shows the stores of one thread to another.
"""

import re
from dataclasses import replace

import pytest
import torch

from tests.kernels import interpreter
from tests.kernels.interpreter import Gpu
from tests.kernels.run_call import EPS, Call, errors, run

needs_interpreter = pytest.mark.skipif(
    bool(interpreter.why_not()), reason=f"no interpreter: {interpreter.why_not()}"
)
LN, RMS = "layer_norm", "rms_norm"
CALLS = [
    # forward_kernel and backward_few_kernel: lanes of a warp, a warp, several.
    Call(RMS, 3, 8),
    Call(LN, 5, 9, "f16", params="f32"),
    Call(RMS, 5, 64, "f64", residual="f64", shift=1),
    Call(LN, 3, 64, "f64", residual="f64"),
    Call(RMS, 9, 64, "bf16", residual="f32", rounding="before_weight"),
    Call(LN, 5, 127, "f64", dropout=0.3),
    Call(LN, 3, 144, residual="f32", params="f32", shift=1),
    Call(RMS, 33, 144, "f16", residual="f16", params="f32", out="f32", dropout=0.3, shift=2),
    Call(LN, 5, 144, "f16", residual="f16", params="f32", rounding="before_weight", dropout=0.3),
    Call(LN, 301, 144, sms=2),  # five rows of six lanes in a warp, and two lanes left over
    Call(LN, 301, 72, "f32", residual="f32", sms=2, backwards=True),
    Call(RMS, 33, 136, "f16", shift=1),
    Call(RMS, 67, 136, residual="f32", params="f32", out="f32", rounding="before_weight", sms=2),
    Call(RMS, 3, 512, "f32", backwards=True),
    Call(LN, 3, 512, "f64", residual="f64", shift=1, sms=4),
    Call(LN, 3, 520, "f16", params="f32", rounding="before_weight", shift=1, efficient=True),
    Call(RMS, 9, 520, params="f32", out="f32", rounding="before_weight", shift=2, efficient=True),
    Call(RMS, 2, 512, "f32", residual="f32", shift=1),
    Call(LN, 3, 768, "f32", residual="f32", weight=False),
    Call(RMS, 5, 1024),
    Call(LN, 3, 1152, "f16", params="f32", bias=False),
    Call(LN, 3, 2050, "f64", residual="f64", backwards=True),
    Call(RMS, 2, 2050, "f64", shift=1, efficient=True),
    Call(LN, 3, 1537),  # the last warp's code differs from that of the others
    Call(RMS, 3, 2050, "f16", params="f32", shift=1, backwards=True),
    Call(LN, 2, 6145, out="f32"),
    Call(RMS, 3, 4097, residual="bf16", wanted=(True, True, False, False)),
    Call(LN, 2, 6144, residual="f32", params="f32", rounding="before_weight", shift=1),
    Call(RMS, 2, 6144, "f16", residual="f32", params="f32", out="f32"),
    Call(LN, 2, 6144, "f64", sms=2, efficient=True),
    Call(RMS, 1, 8193, "f16", residual="f32", rounding="before_weight", shift=1),
    Call(LN, 2, 8193, "f16", residual="f32", out="f32", rounding="before_weight", dropout=0.3),
    Call(LN, 2, 12288, residual="f32", sms=4),
    Call(RMS, 3, 12288, "f32", sms=2),
    Call(RMS, 3, 96, weight=False, shift=2),  # absent parameters beside rows by words
    Call(LN, 3, 96, weight=False, shift=2),
    # forward_flat_kernel.
    Call(RMS, 257, 3, "f16", sms=2, efficient=True),
    Call(LN, 33, 3, dropout=0.3, residual="f32", sms=2),
    Call(LN, 257, 3, "f32", pad=1),
    Call(RMS, 65, 8, "f16", residual="f32", params="f32", out="f32", rounding="before_weight"),
    Call(LN, 5, 8, "f64", sms=2),
    Call(LN, 1500, 1, sms=2, backwards=True),
    Call(LN, 301, 33, sms=2, efficient=True),
    Call(RMS, 601, 10, "f16", params="f32", rounding="before_weight", sms=2, backwards=True),
    Call(LN, 261, 31, "f32", sms=2, weight=False),
    Call(RMS, 301, 51, sms=2, backwards=True),
    Call(LN, 900, 2, "f16", sms=2),
    Call(LN, 601, 24, sms=2),
    Call(RMS, 301, 40, "f16", params="f32", sms=2, backwards=True),
    Call(LN, 301, 97, sms=2, efficient=True),
    Call(LN, 131, 255, "f16", sms=2),
    Call(RMS, 131, 193, "f32", weight=False, sms=2, backwards=True),
    # Tiles of the core table, and backward_kernel: CTAs that take rows in turn.
    Call(RMS, 257, 64, rounding="before_weight", sms=2),
    Call(LN, 257, 64, "f64", residual="f64"),
    Call(LN, 257, 127, "f32", sms=4),
    Call(LN, 257, 255, residual="bf16", rounding="before_weight", sms=2),
    Call(RMS, 257, 256, residual="bf16", out="f32", sms=4, backwards=True),
    Call(LN, 257, 256, "f32", sms=2, wanted=(False, False, True, True)),
    Call(RMS, 257, 512, "f32", residual="f32", sms=2),
    Call(RMS, 257, 512, residual="bf16", rounding="before_weight", shift=2),
    Call(LN, 400, 768, "f16", sms=8, main_grads=True),
    Call(RMS, 257, 1023, "f16", sms=2, backwards=True),
    Call(LN, 129, 2048, residual="bf16", sms=4, dropout=0.3),
    Call(RMS, 33, 6144, "f64", sms=2),
    Call(LN, 33, 12288, "f32", sms=2, efficient=True),
    Call(RMS, 33, 16384, "f16", params="f32", out="f32", sms=2),
    # The last rows are left to more CTAs.
    Call(LN, 259, 5120, sms=3),
    Call(RMS, 110, 5120, "f32", sms=1, backwards=True),
    # Rows at two strides.
    Call(LN, 24, 64, heads=4),
    Call(RMS, 600, 128, "f32", heads=3, sms=2),
    # Long rows: clusters, clusters that take rows in turn, and without any.
    Call(RMS, 2, 8193, "f32"),
    Call(RMS, 2, 8193, "f64", shift=1, sms=4),
    Call(LN, 1, 20001, "f16", residual="f16", rounding="before_weight"),
    Call(LN, 2, 20000, residual="bf16", params="f32", shift=1, clusters=False),
    Call(RMS, 1, 20000, "f64", residual="f64", clusters=False),
    Call(RMS, 150, 4200, "f64", shift=1, sms=2),  # more rows than a CTA takes at once
    Call(LN, 33, 20000, rounding="before_weight", sms=2, efficient=True),
    Call(RMS, 33, 20000, "f64", sms=2),
    Call(RMS, 33, 40000, residual="bf16", sms=2, backwards=True),
    Call(LN, 1, 70001, "f64", residual="f64", dropout=0.3, sms=4),
    Call(RMS, 1, 70001, "f64"),
    Call(LN, 1, 100_000, "f64", sms=2, clusters=False),
    Call(LN, 1, 100_000, rounding="before_weight", backwards=True),
]
# A bulk copy is of whole vectors; few short rows, and clusters for backward, are not worth more.
VECTORS_ALONE = {"forward_flat_kernel", "forward_in_turn_kernel", "backward_cluster_kernel"}


@needs_interpreter
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values(call):
    """Catches what is listed above."""
    bad = {name: error for name, error in errors(call).items() if not error <= 1}
    assert not bad, f"error as a multiple of the tolerance: {bad}"


SPECIAL = [  # a kernel each with code of its own for rows whose moments it takes again
    Call(LN, 3, 8, special="constant"),
    Call(LN, 1500, 1, "f32", special="constant", sms=2),
    Call(LN, 900, 2, special="constant", sms=2),
    Call(LN, 301, 33, special="constant", sms=2),
    Call(LN, 301, 255, special="constant", sms=2),
    Call(LN, 31, 107, residual="bf16", special="constant", backwards=True),
    Call(LN, 5, 33333, residual="bf16", special="constant", backwards=True),
    Call(LN, 85, 217, special="constant", pad=3, sms=3),
    Call(RMS, 261, 31, "f32", special="large", sms=2),
    Call(LN, 3, 96, "f16", special="constant", shift=2),
    Call(LN, 23, 144, special="constant"),
    Call(RMS, 23, 72, "f32", special="large"),
    Call(LN, 3, 1152, "f32", special="constant"),
    Call(RMS, 3, 1152, "f32", special="large"),
    Call(LN, 3, 2047, special="constant"),
    Call(LN, 3, 4097, special="constant", residual="bf16"),
    Call(LN, 2, 20000, special="constant"),
    Call(RMS, 2, 20000, "f32", special="large", shift=1),
    Call(LN, 33, 20000, special="constant", sms=2),
    Call(LN, 2, 20001, "f32", special="constant", clusters=False),
]


@needs_interpreter
@pytest.mark.parametrize("call", SPECIAL, ids=str)
def test_rare_rows(call):
    """Catches rows that do not vary, or overflow, and become NaN; and a fault of their own code."""
    found = run(call).tensors
    assert bool(found["output"].isfinite().all()) and bool(found["stats"].isfinite().all())
    if not call.residual:  # two values that are the same, and vary by a rounding of their sum
        bad = {name: e for name, e in errors(call).items() if not e <= 1 and "grad" not in name}
        assert not bad, f"error as a multiple of the tolerance: {bad}"


UNSAVED = [  # a thread takes the rows of whole vectors in registers, if it saves no statistics
    Call(LN, 8197, 1, sms=1),
    Call(RMS, 8203, 1, "f16", params="f32", rounding="before_weight", sms=1, backwards=True),
    Call(LN, 4099, 1, "f32", special="infinite", sms=1),
    Call(LN, 4099, 2, sms=1),
    Call(LN, 4097, 2, special="constant", sms=1),
    Call(LN, 2053, 2, "f32", sms=1),
    Call(RMS, 2051, 2, "f32", special="large", sms=1),
    Call(LN, 2049, 4, "f16", weight=False, special="constant", sms=1),
    Call(RMS, 1030, 4, "f32", special="nan", sms=1, backwards=True),
    Call(LN, 1100, 8, special="constant", sms=1),
    Call(RMS, 1033, 8, "f16", sms=1),
]


@needs_interpreter
@pytest.mark.parametrize("call", UNSAVED, ids=str)
def test_without_statistics(call):
    """Catches an output that depends on whether statistics are saved; rows that are left out."""
    saving = run(call)
    inputs = saving.inputs
    gpu = Gpu(call.sms, call.clusters, call.backwards)
    output, _, _ = gpu.forward(
        norm=call.norm, input=inputs["input"], weight=inputs["weight"], bias=inputs["bias"],
        eps=EPS, rounding=call.rounding, output_dtype=call.type_of("out"), save_stats=False,
    )  # fmt: skip
    assert gpu.launches[0].kernel != saving.launches[0].kernel
    assert torch.equal(output.nan_to_num(0.5), saving.tensors["output"].nan_to_num(0.5))
    assert torch.equal(output.isnan(), saving.tensors["output"].isnan())


@needs_interpreter
@pytest.mark.parametrize(
    "call",
    [
        Call(RMS, 5, 24),
        Call(LN, 23, 144),
        Call(RMS, 25, 136, "f16", shift=1),
        Call(LN, 1500, 1, sms=2),
        Call(LN, 900, 2, "f32", sms=2),
        Call(LN, 5, 1152, "f32"),
        Call(LN, 5, 20000, sms=2),
    ],
    ids=str,
)
def test_nan_stays_in_its_row(call):
    """Catches a lane that reads its neighbour's row, and a NaN that is lost."""
    whole = run(call).tensors
    with_nan = run(replace(call, special="nan"), values=call).tensors
    others = torch.arange(call.rows) != call.rows // 2
    for name in ("output", "grad_input"):
        assert torch.equal(with_nan[name][others], whole[name][others]), name
        assert bool(with_nan[name][~others].isnan().all()), name


@needs_interpreter
def test_every_kernel_runs():
    """Catches a kernel, or a way in which its rows move, that none of the calls comes to."""
    sources = (interpreter.ROOT / "csrc" / "cuda").glob("*.cuh")
    pattern = r"__global__[^;{]*?(\w+_kernel)\("
    kernels = {name for path in sources for name in re.findall(pattern, path.read_text())}
    assert len(kernels) > 10
    others = {"add_partials_kernel", "quantize_rows_kernel"}  # the latter: test_run_quantized.py
    others |= {f"channels_first_{way}_kernel" for way in ("forward", "backward")}  # have their own
    others |= {f"group_norm_{what}_kernel" for what in ("forward", "backward", "sums")}  # likewise
    nhwc = ("moments", "channels", "forward", "sums", "gradients", "backward")
    others |= {f"group_norm_nhwc_{what}_kernel" for what in nhwc}  # likewise
    ways = {(kernel, "Vectors") for kernel in kernels - others}
    ways |= {(kernel, "Words") for kernel, _ in ways if kernel not in VECTORS_ALONE}
    ways |= {("backward_kernel", "WholeWords")}
    ran = {launch.kernel for call in CALLS for launch in run(call).launches}
    pattern = r"cuda::(\w+)<.*cuda::(\w+)>, fused_op::cuda::\w+Tile<"
    assert {
        re.match(f"fused_op::{pattern}", name).groups() for name in ran if "Tile" in name
    } == ways
    assert any("::add_partials_kernel<" in name for name in ran)


SAME = [  # the calls differ in what must not change a bit of a row
    (Call(RMS, 6, 96, rounding="before_weight"), {"shift": 2}),
    (Call(LN, 61, 144), {"shift": 2}),
    (Call(RMS, 301, 136, "f16", sms=2), {"sms": 132}),
    (Call(LN, 6, 1024, "f16", params="f32"), {"shift": 1, "sms": 2}),
    (Call(LN, 6, 4100, "f32"), {"pad": 3, "backwards": True}),
    (Call(LN, 301, 33, sms=2), {"pad": 1}),
    (Call(LN, 1500, 1, sms=2), {"pad": 1}),
    (Call(LN, 900, 2, "f16", sms=2), {"pad": 1}),
    (Call(LN, 1500, 1, "f32", special="infinite", sms=2), {"pad": 1}),
    (Call(LN, 900, 2, special="constant", sms=2), {"pad": 1}),
    (Call(LN, 900, 3, "f32", special="constant", sms=2), {"pad": 1}),
    (Call(RMS, 301, 60, "f16", params="f32", sms=2), {"sms": 132}),
    (Call(LN, 261, 31, "f32", sms=2, special="constant"), {"pad": 1}),
    (Call(LN, 6, 20000, residual="bf16"), {"shift": 4, "clusters": False}),
    (Call(RMS, 300, 2048, residual="f32", sms=2), {"sms": 132, "backwards": True}),
]


@needs_interpreter
@pytest.mark.parametrize(("call", "other"), SAME, ids=str)
def test_bits(call, other):
    """Catches bits of a row that depend on its address, the GPU, or the order of threads."""
    first, second = run(call), run(replace(call, **other), values=call)
    kernels = [[launch.kernel for launch in each.launches] for each in (first, second)]
    grids = [[launch.grid for launch in each.launches] for each in (first, second)]
    assert kernels[0] != kernels[1] or grids[0] != grids[1] or "backwards" in other
    for name in ("output", "sum", "stats", "grad_input", "grad_residual"):
        if name in first.tensors:
            each = first.tensors[name], second.tensors[name]
            torch.testing.assert_close(*each, rtol=0, atol=0, equal_nan=True)


@needs_interpreter
@pytest.mark.parametrize(
    "call", [Call(RMS, 8, 1152), Call(LN, 61, 136), Call(LN, 300, 640, "f32", sms=4)], ids=str
)
def test_bits_of_a_row_alone(call):
    """Catches bits of a row that depend on how many rows there are beside it."""
    among = run(call)
    alone = run(replace(call, rows=1), values=call)
    for name in ("output", "grad_input"):
        assert torch.equal(among.tensors[name][:1], alone.tensors[name]), name
