// What the plans of forward and backward share: the words of a kernel's name, and where rows begin.
// Host code without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/norm_args.h"
#include "core/pack.h"

namespace fused_op::cuda {

// Words of a kernel's name.
inline std::string type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "fused_op::Float16";
    case DType::kBFloat16:
      return "fused_op::BFloat16";
    case DType::kFloat32:
      return "float";
    case DType::kFloat64:
      break;
  }
  return "double";
}
inline std::string flag(bool value) { return value ? "true" : "false"; }
inline std::string number(int value) { return std::to_string(value); }
inline std::string joined(std::initializer_list<std::string> arguments) {
  std::string all;
  for (const std::string& argument : arguments) {
    all += (all.empty() ? "<" : ", ") + argument;
  }
  return all + ">";
}
inline std::string norm_name(NormKind norm) {
  return norm == NormKind::kLayerNorm ? "fused_op::LayerNorm" : "fused_op::RmsNorm";
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
