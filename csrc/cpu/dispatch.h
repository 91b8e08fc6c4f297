// Runtime values to compile-time types, once: with_dtypes, with_norm, with_source. Each calls its
// function object with the chosen types as template arguments. Torch-free.
#pragma once

#include "core/norm_math.h"
#include "cpu/row_source.h"

namespace fused_op::cpu {

// Types names the 16-bit types: Types::Float16, Types::BFloat16.
// The op layer has refused every other pair.
template <typename Types, typename Function>
auto with_dtypes(DType dtype, DType param_dtype, Function&& function) {
  using F16 = typename Types::Float16;
  using BF16 = typename Types::BFloat16;
  const bool same = dtype == param_dtype;
  switch (dtype) {
    case DType::kFloat16:
      return same ? function.template operator()<F16, F16>()
                  : function.template operator()<F16, float>();
    case DType::kBFloat16:
      return same ? function.template operator()<BF16, BF16>()
                  : function.template operator()<BF16, float>();
    case DType::kFloat32:
      return function.template operator()<float, float>();
    case DType::kFloat64:
      break;
  }
  return function.template operator()<double, double>();
}

template <typename Function>
auto with_norm(NormKind kind, Function&& function) {
  return kind == NormKind::kLayerNorm ? function.template operator()<LayerNorm>()
                                      : function.template operator()<RmsNorm>();
}

// Forward adds where there is a residual; backward where a gradient arrives through the sum.
template <typename T, typename Function>
auto with_source(const ConstRows& addend, Function&& function) {
  return addend.data == nullptr ? function.template operator()<Plain<T>>()
                                : function.template operator()<AddResidual<T>>();
}

}  // namespace fused_op::cpu
