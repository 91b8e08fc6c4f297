// What the launch of a transposition and its kernel agree on. Host and device; torch-free.
#pragma once

namespace fused_op::cuda {

constexpr int kTransposeTile = 64;  // rows, and columns, of a CTA
constexpr int kTransposeThreads = 256;

}  // namespace fused_op::cuda
