// The registrations, and nothing else: each op once with the dispatcher (torch.ops.fused_op, which
// torch.compile sees) and once in the Python module fused_op_cuda (which eager calls use).
#include "fused_op.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "kernel_tools.h"
#include "routing.h"

#ifndef FUSED_OP_NO_CUDA_REASON
#define FUSED_OP_NO_CUDA_REASON ""
#endif

namespace fused_op {
extern const char* const kSourceHash;  // setup.py writes its file
}  // namespace fused_op

// Further files add to the namespace with TORCH_LIBRARY_FRAGMENT.
TORCH_LIBRARY(fused_op, m) {
  m.def(
      "norm_forward(str norm, Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor? rng_state, int normalized_ndim, float eps, bool zero_centered, float dropout_p, "
      "ScalarType? output_dtype, ScalarType? sum_dtype, bool save_stats) "
      "-> (Tensor output, Tensor sum, Tensor stats)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "norm_backward(str norm, Tensor grad_output, Tensor? grad_sum, Tensor x, Tensor? weight, "
      "Tensor? bias, Tensor stats, Tensor? rng_state, int normalized_ndim, bool zero_centered, "
      "float dropout_p, bool x_is_output, ScalarType input_dtype, ScalarType? residual_dtype, "
      "ScalarType param_dtype, bool[4] wanted) "
      "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
      {at::Tag::pt2_compliant_tag});
  m.def("dropout_state(Tensor like, bool on_device) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

// Also in a build without CUDA: its error names the reason.
TORCH_LIBRARY_IMPL(fused_op, CPU, m) {
  m.impl("norm_forward", &fused_op::Dispatched<fused_op::norm_forward>::call);
  m.impl("norm_backward", &fused_op::Dispatched<fused_op::norm_backward>::call);
  m.impl("dropout_state", &fused_op::dropout_state);
}

TORCH_LIBRARY_IMPL(fused_op, CUDA, m) {
  m.impl("norm_forward", &fused_op::Dispatched<fused_op::norm_forward>::call);
  m.impl("norm_backward", &fused_op::Dispatched<fused_op::norm_backward>::call);
  m.impl("dropout_state", &fused_op::dropout_state);
}

// The derivative is that of the autograd.Function in functional.py. Whoever records a graph through
// an op past it, as the training of an exported program does, would get gradients of zero.
TORCH_LIBRARY_IMPL(fused_op, Autograd, m) {
  m.impl("norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
}

PYBIND11_MODULE(fused_op_cuda, m) {
  m.doc() = "The compiled half of fused_op: CPU and CUDA kernels behind one door.";
  m.def("norm", &fused_op::route_norm);
  m.def("norm_forward", &fused_op::route_norm_forward);
  m.def("norm_backward", &fused_op::route_norm_backward);
  m.def("norm_backward_into", &fused_op::route_norm_backward_into);
  m.def("check_main_grads",
        pybind11::overload_cast<const at::Tensor&, std::int64_t, const fused_op::OptionalTensor&,
                                const fused_op::OptionalTensor&>(&fused_op::check_main_grads));
  m.def("dropout_state", &fused_op::route_dropout_state);

  m.attr("AUTOGRAD") = int{fused_op::kAutograd};
  m.attr("DISPATCH") = int{fused_op::kDispatch};
  m.attr("COMPOSITE") = int{fused_op::kComposite};
  m.attr("CAST") = int{fused_op::kCast};

  fused_op::bind_kernel_tools(m);

  m.def("build_info", [] {
    using pybind11::literals::operator""_a;
#ifdef NDEBUG
    const bool debug = false;
#else
    const bool debug = true;
#endif
    return pybind11::dict("version"_a = FUSED_OP_VERSION, "torch"_a = FUSED_OP_TORCH_VERSION,
                          "cuda"_a = FUSED_OP_CUDA_VERSION, "cuda_archs"_a = FUSED_OP_CUDA_ARCHS,
                          "no_cuda_reason"_a = FUSED_OP_NO_CUDA_REASON, "debug"_a = debug,
                          "source_hash"_a = fused_op::kSourceHash);
  });
}
