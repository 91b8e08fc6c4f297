// The Python module fused_op_cuda, which eager calls use. torch.compile sees the ops of the
// dispatcher instead: dispatcher.cpp.
#include "fused_op.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"
#include "kernel_tools.h"
#include "routing.h"

#ifndef FUSED_OP_NO_CUDA_REASON
#define FUSED_OP_NO_CUDA_REASON ""
#endif

namespace fused_op {

extern const char* const kSourceHash;  // setup.py writes its file

namespace {

namespace py = pybind11;

// Results for Python, which gets our reference to each; pybind11 would add one and drop ours, and
// that takes the interpreter lock again. Undefined tensors become None.
py::object to_python(at::Tensor&& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}
template <typename... Tensors>
py::tuple to_python(std::tuple<Tensors...>&& tensors) {
  return std::apply([](Tensors&... each) { return py::make_tuple(to_python(std::move(each))...); },
                    tensors);
}

// Tensors come as Python objects, because pybind11's own TypeError prints their values, which
// synchronises with the device.
const at::Tensor& as_tensor(const char* op, const char* name, py::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), op, ": argument '", name,
                   "' must be Tensor, not ", Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

OptionalTensor as_optional_tensor(const char* op, const char* name, py::handle object) {
  return object.is_none() ? std::nullopt : OptionalTensor(as_tensor(op, name, object));
}

py::object norm(std::string_view norm_name, py::handle input, py::handle residual,
                py::handle weight, py::handle bias, const OptionalTensor& rng_state,
                std::int64_t normalized_ndim, double eps, bool zero_centered, double dropout_p,
                OptionalDtype output_dtype, OptionalDtype sum_dtype) {
  const NormKind kind = parse_norm(norm_name);
  const char* const op = op_name(kind, !residual.is_none());
  auto result = route_norm(
      {as_tensor(op, "input", input), as_optional_tensor(op, "residual", residual),
       as_optional_tensor(op, "weight", weight), as_optional_tensor(op, "bias", bias), rng_state},
      {.norm = kind,
       .normalized_ndim = normalized_ndim,
       .eps = eps,
       .zero_centered = zero_centered,
       .dropout_p = dropout_p,
       .output_dtype = output_dtype,
       .sum_dtype = sum_dtype});
  if (const Route* const route = std::get_if<Route>(&result)) {
    return py::int_(static_cast<int>(*route));
  }
  auto& [output, sum, stats] = std::get<ThreeTensors>(result);
  return residual.is_none() ? to_python(std::move(output))
                            : to_python(std::make_tuple(std::move(output), std::move(sum)));
}

py::tuple norm_forward_flat(std::string_view norm, const at::Tensor& input,
                            const OptionalTensor& residual, const OptionalTensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& rng_state,
                            std::int64_t normalized_ndim, double eps, bool zero_centered,
                            double dropout_p, OptionalDtype output_dtype, OptionalDtype sum_dtype,
                            bool save_stats) {
  return to_python(route_norm_forward({input, residual, weight, bias, rng_state},
                                      {.norm = parse_norm(norm),
                                       .normalized_ndim = normalized_ndim,
                                       .eps = eps,
                                       .zero_centered = zero_centered,
                                       .dropout_p = dropout_p,
                                       .output_dtype = output_dtype,
                                       .sum_dtype = sum_dtype,
                                       .save_stats = save_stats}));
}

FourTensors norm_backward_flat(std::string_view norm, const at::Tensor& grad_output,
                               const OptionalTensor& grad_sum, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const at::Tensor& stats, const OptionalTensor& rng_state,
                               std::int64_t normalized_ndim, bool zero_centered, double dropout_p,
                               bool x_is_output, at::ScalarType input_dtype,
                               OptionalDtype residual_dtype, at::ScalarType param_dtype,
                               std::array<bool, 4> wanted,
                               const std::optional<MainGrads>& main_grads) {
  const BackwardTensors tensors{grad_output, grad_sum, x, weight, bias, stats, rng_state};
  const BackwardOptions options{.norm = parse_norm(norm),
                                .normalized_ndim = normalized_ndim,
                                .zero_centered = zero_centered,
                                .dropout_p = dropout_p,
                                .x_is_output = x_is_output,
                                .input_dtype = input_dtype,
                                .residual_dtype = residual_dtype,
                                .param_dtype = param_dtype,
                                .wanted = wanted};
  return main_grads ? route_norm_backward_into(tensors, options, *main_grads)
                    : route_norm_backward(tensors, options);
}

void check_main_grads_flat(const at::Tensor& x, std::int64_t normalized_ndim,
                           const OptionalTensor& weight, const OptionalTensor& bias) {
  check_main_grads("fused_op::norm_backward", {weight, bias}, weight.has_value(), bias.has_value(),
                   x, normalized_ndim);
}

py::dict build_info() {
  using py::literals::operator""_a;
#ifdef NDEBUG
  const bool debug = false;
#else
  const bool debug = true;
#endif
  return py::dict("version"_a = FUSED_OP_VERSION, "torch"_a = FUSED_OP_TORCH_VERSION,
                  "cuda"_a = FUSED_OP_CUDA_VERSION, "cuda_archs"_a = FUSED_OP_CUDA_ARCHS,
                  "no_cuda_reason"_a = FUSED_OP_NO_CUDA_REASON, "debug"_a = debug,
                  "source_hash"_a = kSourceHash);
}

}  // namespace

PYBIND11_MODULE(fused_op_cuda, m) {
  m.doc() = "The compiled half of fused_op: CPU and CUDA kernels behind one door.";
  m.def("norm", &norm);
  m.def("norm_forward", &norm_forward_flat);
  m.def("norm_backward",
        [](std::string_view norm, const at::Tensor& grad_output, const OptionalTensor& grad_sum,
           const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
           const at::Tensor& stats, const OptionalTensor& rng_state, std::int64_t normalized_ndim,
           bool zero_centered, double dropout_p, bool x_is_output, at::ScalarType input_dtype,
           OptionalDtype residual_dtype, at::ScalarType param_dtype, std::array<bool, 4> wanted) {
          return to_python(norm_backward_flat(norm, grad_output, grad_sum, x, weight, bias, stats,
                                              rng_state, normalized_ndim, zero_centered, dropout_p,
                                              x_is_output, input_dtype, residual_dtype, param_dtype,
                                              wanted, std::nullopt));
        });
  m.def("norm_backward_into",
        [](std::string_view norm, const at::Tensor& grad_output, const OptionalTensor& grad_sum,
           const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
           const at::Tensor& stats, const OptionalTensor& rng_state, std::int64_t normalized_ndim,
           bool zero_centered, double dropout_p, bool x_is_output, at::ScalarType input_dtype,
           OptionalDtype residual_dtype, at::ScalarType param_dtype, std::array<bool, 4> wanted,
           const OptionalTensor& weight_main_grad, const OptionalTensor& bias_main_grad) {
          return norm_backward_flat(norm, grad_output, grad_sum, x, weight, bias, stats, rng_state,
                                    normalized_ndim, zero_centered, dropout_p, x_is_output,
                                    input_dtype, residual_dtype, param_dtype, wanted,
                                    MainGrads{weight_main_grad, bias_main_grad});
        });
  m.def("check_main_grads", &check_main_grads_flat);
  m.def("dropout_state",
        [](const at::Tensor& input) { return to_python(route_dropout_state(input)); });

  m.attr("AUTOGRAD") = static_cast<int>(Route::kAutograd);
  m.attr("DISPATCH") = static_cast<int>(Route::kDispatch);
  m.attr("COMPOSITE") = static_cast<int>(Route::kComposite);
  m.attr("CAST") = static_cast<int>(Route::kCast);

  bind_kernel_tools(m);
  m.def("build_info", &build_info);
}

}  // namespace fused_op
