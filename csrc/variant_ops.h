// The two ops of a variant, as their schemas describe them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <vector>

namespace fused_op {

using Stack = std::vector<c10::IValue>;  // the arguments of an op, then its results

// Where an argument of the backward op comes from. Its name tells: `grad_` and the name of an
// output, the name of a tensor or of a result of forward, `wanted`, or else an option.
struct Origin {
  enum Kind { kGrad, kSaved, kOption, kWanted } kind;
  std::size_t place = 0;  // among the outputs, the saved tensors or the options
};

// The arguments of forward are tensors, then options, then save_stats; its results are outputs,
// then the statistics.
struct VariantOps {
  explicit VariantOps(std::string name);

  std::string name;
  c10::OperatorHandle forward, backward;
  std::vector<std::string> tensors, results;
  std::vector<c10::Argument> options;  // of forward, then of backward alone
  std::size_t forward_options = 0;
  std::vector<Origin> origins;     // of the arguments of backward
  std::vector<std::size_t> saved;  // what backward takes of tensors and then results, by number
  std::vector<std::size_t> differentiated;  // whose gradients the results of backward are
  bool has_views = false;                   // outputs that are views of tensors: Python makes them

 private:
  Origin origin_of(const c10::Argument& argument);
  static constexpr std::string_view kGrad = "grad_";
};

// Those of the ops <name>_forward and <name>_backward. They live as long as the process: a graph
// may outlast every module.
const VariantOps& variant_ops(const std::string& name);

// An option of a call.
c10::IValue option_to_ivalue(PyObject* value, const c10::Argument& argument);
pybind11::object option_to_python(const c10::IValue& value, const c10::Argument& argument);

}  // namespace fused_op
