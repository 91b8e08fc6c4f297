// What the plans of forward and backward share: the parts of a kernel's name, and whether rows are
// aligned. Host code without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/norm_args.h"
#include "core/pack.h"
#include "core/type_names.h"
#include "core/variant.h"

namespace fused_op::cuda {

inline std::string norm_name(NormKind norm) {
  return norm == NormKind::kLayerNorm  ? "fused_op::LayerNorm"
         : norm == NormKind::kRmsNorm  ? "fused_op::RmsNorm"
         : norm == NormKind::kL2Norm   ? "fused_op::L2Norm"
         : norm == NormKind::kIdentity ? "fused_op::Identity"
                                       : "fused_op::BiasedRmsNorm";
}

// The rows that a variant's kernels read in packs, beside the streams of every call.
inline std::vector<const ConstRows*> read_beside(const Variant& variant) {
  std::vector<const ConstRows*> found;
  for (const ConstRows* rows : {&variant.beside, &variant.entries[0], &variant.entries[1]}) {
    if (rows->data != nullptr) {
      found.push_back(rows);
    }
  }
  return found;
}

// The name of an epilogue. With `rounds_first`, x̂ is rounded to the type of the input.
inline std::string epilogue_name(std::initializer_list<std::string> arguments, bool rounds_first,
                                 DType input) {
  const std::string affine = "fused_op::Affine" + joined(arguments);
  return rounds_first ? "fused_op::RoundsFirst" + joined({affine, type(input)}) : affine;
}

// Whether every row begins at a multiple of `bytes`.
inline bool rows_begin_at(const ConstRows& rows, int bytes) {
  const std::int64_t elements = std::max(bytes / size_of(rows.dtype), 1);
  return reinterpret_cast<std::uintptr_t>(rows.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         rows.stride % elements == 0 &&
         (rows.split.inner == 0 || rows.split.outer_stride % elements == 0);
}
inline bool packs_aligned(const ConstRows& rows, int pack) {
  return rows_begin_at(rows, std::min(pack * size_of(rows.dtype), kVectorBytes));
}
inline ConstRows dense(const void* data, DType dtype, std::int64_t cols) {
  return {.data = data, .dtype = dtype, .stride = cols, .split = {}};
}

}  // namespace fused_op::cuda
