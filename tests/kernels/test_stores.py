"""Kernels that NVRTC makes store whole vectors.

Catches a vector that the compiler stores word by word. It may do so where a kernel assigns a vector
to memory in an unrolled loop with branches, and whenever code nearby changes. No number shows it; a
group norm took half as long again.
"""

import re
from collections import defaultdict

import pytest

from tests.kernels.interpreter import ptx_of
from tests.kernels.test_run_kernels import needs_interpreter

GROUPS = "group_norm_{0}_kernel<fused_op::cuda::GroupNormOp<fused_op::{1}, {2}>>"
NHWC = "group_norm_nhwc_{0}_kernel<fused_op::cuda::NhwcOp<fused_op::{1}>>"
CHANNELS = (
    "channels_first_{0}_kernel<fused_op::cuda::ChannelsFirst{1}Op<"
    "fused_op::LayerNorm, fused_op::{2}, {3}>>"
)
KERNELS = {  # header: names
    "cuda/forward_group_norm.cuh": [
        GROUPS.format("forward", "BFloat16", "8, 4, true"),
        GROUPS.format("forward", "Float16", "4, 4, false"),
    ],
    "cuda/backward_group_norm.cuh": [
        GROUPS.format("backward", "BFloat16", "8, 2, true"),
        GROUPS.format("backward", "Float16", "4, 2, false"),
    ],
    "cuda/forward_group_norm_nhwc.cuh": [NHWC.format("forward", "BFloat16, 8, true")],
    "cuda/backward_group_norm_nhwc.cuh": [NHWC.format("backward", "Float16, 8, false")],
    "cuda/forward_channels_first.cuh": [
        CHANNELS.format("forward", "Forward", *of)
        for of in [
            ("BFloat16", "fused_op::BFloat16, 4, 4, 2, 64, 4, false"),
            ("BFloat16", "float, 4, 8, 1, 96, 4, false"),
            ("Float16", "fused_op::Float16, 4, 16, 1, 768, 1, true"),
        ]
    ],
    "cuda/backward_channels_first.cuh": [
        CHANNELS.format("backward", "Backward", *of)
        for of in [
            ("BFloat16", "fused_op::BFloat16, 8, 8, 16, fused_op::cuda::AllChannels, false"),
            ("BFloat16", "float, 8, 4, 64, fused_op::cuda::AllChannels, true"),
            ("Float16", "fused_op::Float16, 4, 4, 128, fused_op::cuda::AllChannels, false"),
            ("Float16", "float, 8, 2, 128, fused_op::cuda::SomeChannels, false"),
        ]
    ],
}


def words_side_by_side(ptx: str) -> list[str]:
    """The registers at which words are stored to an address and four bytes behind it."""
    offsets = defaultdict(set)
    for register, offset in re.findall(r"st\.global\.[bu]32\s+\[(%\w+)(?:\+(\d+))?\]", ptx):
        offsets[register].add(int(offset or 0))
    return [register for register, found in offsets.items() if {0, 4} <= found]


@needs_interpreter
@pytest.mark.parametrize(
    ("header", "name"), [(h, n) for h, names in KERNELS.items() for n in names]
)
def test_vectors_are_stored_whole(header, name):
    ptx = ptx_of(header, f"fused_op::cuda::{name}").decode()
    assert re.search(r"st\.global\.v[24]\.[bu]32", ptx), "the kernel stores no vectors"
    assert not words_side_by_side(ptx)


@needs_interpreter
@pytest.mark.parametrize(
    "structs",
    [
        "Plain<T, false>, fused_op::GatedAffine<T, T, T, false, false, true, false>",
        "GatedInput<T, T, false, false, false>, fused_op::GroupAffine<T, T, true>",
    ],
)
def test_gradients_of_a_gated_norm_in_groups_are_stored_whole(structs):
    """Those of input and gate; the sums for the weight, which a CTA stores once, need not be."""
    structs = re.sub(r"\bT\b", "fused_op::BFloat16", structs)
    vectors = 2
    tile = f"<8, 32, {vectors}, 512, 1, 3, true, true, false, 512, false>"
    name = (
        "fused_op::cuda::backward_kernel<fused_op::cuda::BackwardOp<fused_op::RmsNorm, "
        f"fused_op::{structs}, fused_op::cuda::Vectors>, fused_op::cuda::BackwardTile{tile}>"
    )
    headers = '#include "core/gated.h"\n#include "cuda/backward_rows.cuh"\n'
    stores = re.findall(r"st\.global\.v4\.[bu]32", ptx_of(headers, name).decode())
    assert len(stores) == 2 * vectors


def test_finds_words_side_by_side():
    halves = "st.global.u32 \t[%rd1], %r1;\n st.global.u32 [%rd1+4], %r2;"
    assert words_side_by_side(halves) == ["%rd1"]
    assert not words_side_by_side("st.global.v2.u32 [%rd1], {%r1, %r2};")
