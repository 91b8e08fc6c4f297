// What a variant of the norms shares with the others: how it registers its ops with the dispatcher.
//
// A variant has a pair of ops of its own, a forward and a backward. Its file checks, allocates,
// fills the arguments of core/norm_args.h or its own, which derive from them, and runs them on the
// backend: l2_norm.cpp is the smallest. Its other half is fused_op/_variant.py.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <string_view>

namespace fused_op {

// Registers `function` under the name that the schema begins with, for CPU and CUDA. (For CUDA also
// in a build without it: its error names the reason.) The derivative is that of the
// autograd.Function in fused_op/_variant.py: recorded past it, gradients would be zeros, so that
// asking for one is an error.
template <typename Function>
void register_op(torch::Library& library, std::string_view schema, Function* function) {
  const std::string name(schema.substr(0, schema.find('(')));
  library.def(std::string(schema).c_str(), {at::Tag::pt2_compliant_tag});
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, function));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd,
                                             torch::autograd::autogradNotImplementedFallback()));
}

// Results of an op must be real tensors: one that was not asked for has no elements.
inline at::Tensor nothing_like(const at::Tensor& tensor) { return tensor.new_empty({0}); }

}  // namespace fused_op
