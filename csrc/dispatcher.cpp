// The dispatcher's schemas are flat lists of arguments. Only this file knows them: it unpacks them
// on the way to a kernel and packs them on the way to the dispatcher.
#include "dispatcher.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "checks.h"
#include "variant.h"

namespace fused_op {
namespace {

ThreeTensors norm_forward_op(std::string_view norm, const at::Tensor& input,
                             const OptionalTensor& residual, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& rng_state,
                             std::int64_t normalized_ndim, double eps, bool zero_centered,
                             std::string_view rounding, double dropout_p,
                             OptionalDtype output_dtype, OptionalDtype sum_dtype, bool save_stats) {
  return or_nothing(norm_forward({input, residual, weight, bias, rng_state},
                                 {.norm = parse_norm(norm),
                                  .normalized_ndim = normalized_ndim,
                                  .eps = eps,
                                  .zero_centered = zero_centered,
                                  .rounding = parse_rounding(rounding),
                                  .dropout_p = dropout_p,
                                  .output_dtype = output_dtype,
                                  .sum_dtype = sum_dtype,
                                  .save_stats = save_stats}),
                    input);
}

FourTensors norm_backward_op(std::string_view norm, const at::Tensor& grad_output,
                             const OptionalTensor& grad_sum, const at::Tensor& x,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             const at::Tensor& stats, const OptionalTensor& rng_state,
                             std::int64_t normalized_ndim, bool zero_centered,
                             std::string_view rounding, double dropout_p, bool x_is_output,
                             at::ScalarType input_dtype, OptionalDtype residual_dtype,
                             at::ScalarType param_dtype, std::array<bool, 4> wanted) {
  return or_nothing(norm_backward({grad_output, grad_sum, x, weight, bias, stats, rng_state},
                                  {.norm = parse_norm(norm),
                                   .normalized_ndim = normalized_ndim,
                                   .zero_centered = zero_centered,
                                   .rounding = parse_rounding(rounding),
                                   .dropout_p = dropout_p,
                                   .x_is_output = x_is_output,
                                   .input_dtype = input_dtype,
                                   .residual_dtype = residual_dtype,
                                   .param_dtype = param_dtype,
                                   .wanted = wanted}),
                    grad_output);
}

// The arguments of these ops, in the order of the schemas.
auto flat(const NormTensors& tensors, const NormOptions& options) {
  return std::tuple_cat(
      std::tuple(name_of(options.norm)),
      std::tie(tensors.input, tensors.residual, tensors.weight, tensors.bias, tensors.rng_state),
      std::tie(options.normalized_ndim, options.eps, options.zero_centered),
      std::tuple(name_of(options.rounding)),
      std::tie(options.dropout_p, options.output_dtype, options.sum_dtype, options.save_stats));
}

auto flat(const BackwardTensors& tensors, const BackwardOptions& options) {
  return std::tuple_cat(std::tuple(name_of(options.norm)),
                        std::tie(tensors.grad_output, tensors.grad_sum, tensors.x, tensors.weight,
                                 tensors.bias, tensors.stats, tensors.rng_state),
                        std::tie(options.normalized_ndim, options.zero_centered),
                        std::tuple(name_of(options.rounding)),
                        std::tie(options.dropout_p, options.x_is_output, options.input_dtype,
                                 options.residual_dtype, options.param_dtype, options.wanted));
}

// Calls the registered op of this name. Its signature is that of `Op`.
template <typename Op, typename Arguments>
auto call(const char* name, const Arguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Op>();
  return std::apply([&](const auto&... each) { return op.call(each...); }, arguments);
}

template <typename Arguments>
std::vector<c10::IValue> to_ivalues(const Arguments& arguments) {
  return std::apply(
      [](const auto&... each) { return std::vector<c10::IValue>{c10::IValue(each)...}; },
      arguments);
}

}  // namespace

namespace dispatcher {

ThreeTensors norm_forward(const NormTensors& tensors, const NormOptions& options) {
  return call<decltype(norm_forward_op)>("fused_op::norm_forward", flat(tensors, options));
}

FourTensors norm_backward(const BackwardTensors& tensors, const BackwardOptions& options) {
  return call<decltype(norm_backward_op)>("fused_op::norm_backward", flat(tensors, options));
}

at::Tensor dropout_state(const at::Tensor& like, bool on_device) {
  return call<decltype(fused_op::dropout_state)>("fused_op::dropout_state",
                                                 std::tie(like, on_device));
}

std::vector<c10::IValue> arguments(const NormTensors& tensors, const NormOptions& options) {
  return to_ivalues(flat(tensors, options));
}

std::vector<c10::IValue> arguments(const BackwardTensors& tensors, const BackwardOptions& options) {
  return to_ivalues(flat(tensors, options));
}

}  // namespace dispatcher

// Other files add to the namespace with TORCH_LIBRARY_FRAGMENT.
TORCH_LIBRARY(fused_op, m) {
  m.def(
      "norm_forward(str norm, Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor? rng_state, int normalized_ndim, float eps, bool zero_centered, str rounding, "
      "float dropout_p, ScalarType? output_dtype, ScalarType? sum_dtype, bool save_stats) "
      "-> (Tensor output, Tensor sum, Tensor stats)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "norm_backward(str norm, Tensor grad_output, Tensor? grad_sum, Tensor x, Tensor? weight, "
      "Tensor? bias, Tensor stats, Tensor? rng_state, int normalized_ndim, bool zero_centered, "
      "str rounding, float dropout_p, bool x_is_output, ScalarType input_dtype, ScalarType? "
      "residual_dtype, "
      "ScalarType param_dtype, bool[4] wanted) "
      "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
      {at::Tag::pt2_compliant_tag});
  m.def("dropout_state(Tensor like, bool on_device) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

// CUDA is registered in a CPU build, too: the error then names the reason.
TORCH_LIBRARY_IMPL(fused_op, CPU, m) {
  m.impl("norm_forward", &norm_forward_op);
  m.impl("norm_backward", &norm_backward_op);
  m.impl("dropout_state", &dropout_state);
}

TORCH_LIBRARY_IMPL(fused_op, CUDA, m) {
  m.impl("norm_forward", &norm_forward_op);
  m.impl("norm_backward", &norm_backward_op);
  m.impl("dropout_state", &dropout_state);
}

// The autograd.Function in functional.py has the derivative. A graph that is recorded through an op
// without it, as when an exported program is trained, would get gradients of zero.
TORCH_LIBRARY_IMPL(fused_op, Autograd, m) {
  m.impl("norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fused_op
