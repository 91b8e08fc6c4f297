// The words from which plans and variants compose the C++ name of a kernel. Host code, torch-free.
#pragma once

#include <initializer_list>
#include <string>

#include "core/norm_args.h"

namespace fused_op {

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

}  // namespace fused_op
