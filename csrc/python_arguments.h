// The tuples that Python calls with, fused_op/_options.py, as the structs of fused_op.h.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <variant>

#include "fused_op.h"
#include "routing.h"

namespace fused_op {

struct NormCall {
  NormTensors tensors;
  NormOptions options;
  bool memory_efficient = false;
  bool main_grad = false;
};

struct BackwardCall {
  BackwardTensors tensors;
  BackwardOptions options;
};

// Raises a TypeError for anything that is not a tensor or not such a tuple.
NormCall unpack(pybind11::handle tensors, pybind11::handle options);
BackwardCall unpack_backward(pybind11::handle tensors, pybind11::handle options,
                             std::array<bool, 4> wanted);
MainGrads unpack_main_grads(pybind11::handle tuple);

// The call, if it is a usual one or one that Python has checked; else kCheck or kDropout. A call is
// usual if no __torch_function__ can take it, each option has its usual type, and the input ends in
// normalized_shape. For a usual call this replaces the checks in _arguments.py.
std::variant<NormCall, Route> unpack_usual(pybind11::handle tensors, pybind11::handle options);

}  // namespace fused_op
