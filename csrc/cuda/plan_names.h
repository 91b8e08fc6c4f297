// What the plans of forward and backward share: the parts of a kernel's name, and whether rows are
// aligned. Host code without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
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

// Those of the rows that are not null.
inline std::vector<const ConstRows*> present(std::initializer_list<const ConstRows*> all) {
  std::vector<const ConstRows*> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [](const ConstRows* rows) { return rows->data != nullptr; });
  return found;
}
// The rows that a variant's kernel of forward reads together with the streams of every call.
inline std::vector<const ConstRows*> read_beside(const Variant& variant) {
  return present({&variant.beside, &variant.more_beside[0], &variant.more_beside[1]});
}
// All rows that it reads in packs, beside these streams.
inline std::vector<const ConstRows*> read_in_packs(const Variant& variant) {
  std::vector<const ConstRows*> found = read_beside(variant);
  const auto later = present({&variant.parameters_of_row[0], &variant.parameters_of_row[1]});
  found.insert(found.end(), later.begin(), later.end());
  return found;
}

// The name of an epilogue. With `rounds_first`, x̂ is rounded to the type of the input.
inline std::string epilogue_name(std::initializer_list<std::string> arguments, bool rounds_first,
                                 DType input) {
  const std::string affine = "fused_op::Affine" + joined(arguments);
  return rounds_first ? "fused_op::RoundsFirst" + joined({affine, type(input)}) : affine;
}

inline bool packs_aligned(const ConstRows& rows, int pack) {
  return rows_begin_at(rows, std::min(pack * size_of(rows.dtype), kVectorBytes));
}
inline ConstRows dense(const void* data, DType dtype, std::int64_t cols) {
  return {.data = data, .dtype = dtype, .stride = cols, .split = {}};
}

}  // namespace fused_op::cuda
