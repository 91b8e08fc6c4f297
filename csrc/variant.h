// What the variants of the norms share: how they register their ops with the dispatcher.
//
// A variant has two ops of its own, forward and backward. Its file checks, allocates, fills the
// arguments of core/norm_args.h (or its own, derived from them), and runs them on the backend.
// l2_norm.cpp is the smallest. The Python half is fused_op/_variant.py; variant_call.cpp calls the
// ops, and finds what backward takes by the names in the schemas (variant_ops.h).
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>

namespace fused_op {

// Registers `function` under the name at the beginning of the schema, for CPU and CUDA. (In a CPU
// build, CUDA is registered, too: its error names the reason.) The derivative is that of the node
// in variant_call.cpp, and of the autograd.Function in fused_op/_variant.py. Asking for one that is
// recorded without them is an error, because the gradients would be zeros.
template <typename Function>
void register_op(torch::Library& library, std::string_view schema, Function* function) {
  const std::string name(schema.substr(0, schema.find('(')));
  library.def(std::string(schema).c_str(), {at::Tag::pt2_compliant_tag});
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, function));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd,
                                             torch::autograd::autogradNotImplementedFallback()));
}

// The results of an op must be real tensors: AOTInductor cannot represent undefined ones. A result
// that was not asked for has no elements.
inline at::Tensor nothing_like(const at::Tensor& tensor) { return tensor.new_empty({0}); }
inline at::Tensor or_nothing(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() ? tensor : nothing_like(like);
}
template <typename... Tensors>
std::tuple<Tensors...> or_nothing(std::tuple<Tensors...> results, const at::Tensor& like) {
  std::apply([&](Tensors&... each) { ((each = or_nothing(each, like)), ...); }, results);
  return results;
}

}  // namespace fused_op
