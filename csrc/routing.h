// Which way a call goes, decided in C++ because it is asked on every call: 0.3 us here, several in
// Python. A kernel reads raw pointers, which only a plain tensor has. Fake, sharded, transformed or
// lazily negated tensors look like tensors too, but their pointer is missing or means something
// else; they go through the dispatcher, which knows them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "fused_op.h"

namespace fused_op {

namespace py = pybind11;

// What fused_op_cuda.norm() leaves to Python, as the int that it returns.
enum Route : int {
  kAutograd = 0,   // plain, and a gradient is needed
  kDispatch = 1,   // not plain
  kComposite = 2,  // torch.func and forward AD: only PyTorch's own operations have their rules
  kCast = 3,       // autocast is on, and no kernel adds rows of these dtypes as they are
};

// Where the dispatcher would send a call with these tensors, autograd aside. nullptr: absent.
class CallKeys {
 public:
  explicit CallKeys(std::initializer_list<const at::Tensor*> tensors) {
    for (const at::Tensor* const tensor : tensors) {
      if (tensor != nullptr) {
        keys_ = keys_ | tensor->key_set();
        is_dual_ = is_dual_ || tensor->_fw_grad(/*level=*/0).defined();  // leaves no key
        requires_grad_ = requires_grad_ || tensor->requires_grad();
      }
    }
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    keys_ = (keys_ | local.included_) - local.excluded_;
    is_functorch_ = local.included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  }

  // Nothing between the call and a dense CPU or CUDA kernel.
  bool is_plain() const {
    const c10::DispatchKey key =
        (keys_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset)
            .remove(c10::DispatchKey::BackendSelect)
            .highestPriorityTypeId();
    return !is_dual_ && (key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA);
  }
  bool is_autocast() const { return keys_.has_any(c10::autocast_dispatch_keyset); }
  bool is_transformed() const { return is_dual_ || is_functorch_; }
  bool needs_grad() const { return requires_grad_ && at::GradMode::is_enabled(); }

 private:
  c10::DispatchKeySet keys_;
  bool is_dual_ = false;
  bool is_functorch_ = false;
  bool requires_grad_ = false;
};

inline const at::Tensor* address(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

// A kernel as the dispatcher takes it: AOTInductor has no place for an undefined result.
template <auto kKernel>
struct Dispatched;
template <typename Results, typename... Rest,
          Results (*kKernel)(std::string_view, const at::Tensor&, Rest...)>
struct Dispatched<kKernel> {
  static Results call(std::string_view norm, const at::Tensor& first, Rest... rest) {
    auto results = kKernel(norm, first, rest...);
    const auto define = [&](at::Tensor& tensor) {
      tensor = tensor.defined() ? tensor : first.new_empty({0});
    };
    std::apply([&](auto&... result) { (define(result), ...); }, results);
    return results;
  }
};

// Calls `kernel`, or the dispatcher's op of the same name and signature unless the call is plain.
template <typename Kernel, typename... Args>
auto call(Kernel* kernel, const char* op, const CallKeys& keys, const at::Tensor& x,
          const Args&... args) {
  if (!keys.is_plain()) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<Kernel>().call(args...);
  }
  // The dispatcher tells profilers about a call; so does one that goes past it, by the same name.
  RECORD_FUNCTION(op, std::vector<c10::IValue>{c10::IValue(args)...});
  // Long calls let other Python threads run; for short ones that costs and buys nothing.
  std::optional<py::gil_scoped_release> released;
  if (x.numel() > 65536) {
    released.emplace();
  }
  return kernel(args...);
}

// Results for Python, which gets our reference to each; pybind11 would add one and drop ours, and
// that takes the interpreter lock again. Undefined tensors become None.
inline py::object to_python(at::Tensor&& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}
template <typename... Tensors>
py::tuple to_python(std::tuple<Tensors...>&& tensors) {
  return std::apply([](Tensors&... each) { return py::make_tuple(to_python(std::move(each))...); },
                    tensors);
}

// norm_forward and norm_backward for tensors of any kind.
inline py::tuple route_norm_forward(std::string_view norm, const at::Tensor& input,
                                    const OptionalTensor& residual, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& rng_state,
                                    std::int64_t normalized_ndim, double eps, bool zero_centered,
                                    double dropout_p, OptionalDtype output_dtype,
                                    OptionalDtype sum_dtype, bool save_stats) {
  const CallKeys keys({&input, address(residual), address(weight), address(bias)});
  return to_python(call(norm_forward, "fused_op::norm_forward", keys, input, norm, input, residual,
                        weight, bias, rng_state, normalized_ndim, eps, zero_centered, dropout_p,
                        output_dtype, sum_dtype, save_stats));
}

inline py::tuple route_norm_backward(std::string_view norm, const at::Tensor& grad_output,
                                     const OptionalTensor& grad_sum, const at::Tensor& x,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     const at::Tensor& stats, const OptionalTensor& rng_state,
                                     std::int64_t normalized_ndim, bool zero_centered,
                                     double dropout_p, bool x_is_output, at::ScalarType input_dtype,
                                     OptionalDtype residual_dtype, at::ScalarType param_dtype,
                                     std::array<bool, 4> wanted) {
  // For another layout of a gradient the dispatcher's error would be a list of its own keys.
  check_dense("fused_op::norm_backward", "grad_output", grad_output);
  if (grad_sum) {
    check_dense("fused_op::norm_backward", "grad_sum", *grad_sum);
  }
  const CallKeys keys(
      {&grad_output, address(grad_sum), &x, address(weight), address(bias), &stats});
  return to_python(call(norm_backward, "fused_op::norm_backward", keys, x, norm, grad_output,
                        grad_sum, x, weight, bias, stats, rng_state, normalized_ndim, zero_centered,
                        dropout_p, x_is_output, input_dtype, residual_dtype, param_dtype, wanted));
}

// Python asks for main_grad only where the kernel is called at once.
inline FourTensors route_norm_backward_into(
    std::string_view norm, const at::Tensor& grad_output, const OptionalTensor& grad_sum,
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const at::Tensor& stats, const OptionalTensor& rng_state, std::int64_t normalized_ndim,
    bool zero_centered, double dropout_p, bool x_is_output, at::ScalarType input_dtype,
    OptionalDtype residual_dtype, at::ScalarType param_dtype, std::array<bool, 4> wanted,
    const OptionalTensor& weight_main_grad, const OptionalTensor& bias_main_grad) {
  const CallKeys keys({&grad_output, address(grad_sum), &x, address(weight), address(bias), &stats,
                       address(weight_main_grad), address(bias_main_grad)});
  TORCH_CHECK(keys.is_plain(),
              "fused_op: main_grad is added to in eager calls of plain tensors only, not under "
              "torch.compile, function transforms or in tensor subclasses");
  // As every change in place: who saved a main_grad for a backward of his own is told.
  for (const auto* const main_grad : {&weight_main_grad, &bias_main_grad}) {
    if (*main_grad) {
      (*main_grad)->unsafeGetTensorImpl()->bump_version();
    }
  }
  return norm_backward_into(norm, grad_output, grad_sum, x, weight, bias, stats, rng_state,
                            normalized_ndim, zero_centered, dropout_p, x_is_output, input_dtype,
                            residual_dtype, param_dtype, wanted, weight_main_grad, bias_main_grad);
}

// Seed and offset for the dropout of a call with this input: on every route by the same draw, or
// else a mask would change where only the route does, as when checkpointing recomputes a forward.
inline at::Tensor route_dropout_state(const at::Tensor& input) {
  const CallKeys keys({&input});
  if (keys.is_plain()) {
    return backend::dropout_state(input.device(), /*on_device=*/false);
  }
  // Without elements, either takes nothing from the generator. For the random one, vmap asks its
  // randomness=.
  const auto options = at::TensorOptions().device(input.device());
  const at::Tensor like = keys.is_transformed() ? at::rand({0}, options) : at::empty({0}, options);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("fused_op::dropout_state", "")
      .typed<decltype(dropout_state)>()
      .call(like, /*on_device=*/false);
}

inline const at::Tensor& as_tensor(const char* op, const char* name, py::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), op, ": argument '", name,
                   "' must be Tensor, not ", Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

inline OptionalTensor as_optional_tensor(const char* op, const char* name, py::handle object) {
  return object.is_none() ? std::nullopt : OptionalTensor(as_tensor(op, name, object));
}

// The first thing that a public function calls. Returns its result if no gradient is needed and the
// kernels can take the tensors as they are; else the Route. The tensors come as Python objects,
// because pybind11's own TypeError prints their values, which synchronises with the device.
inline py::object route_norm(std::string_view norm, py::handle input_object,
                             py::handle residual_object, py::handle weight_object,
                             py::handle bias_object, const OptionalTensor& rng_state,
                             std::int64_t normalized_ndim, double eps, bool zero_centered,
                             double dropout_p, OptionalDtype output_dtype,
                             OptionalDtype sum_dtype) {
  const char* const op = op_name(norm, !residual_object.is_none());
  const at::Tensor& input = as_tensor(op, "input", input_object);
  const OptionalTensor residual = as_optional_tensor(op, "residual", residual_object);
  const OptionalTensor weight = as_optional_tensor(op, "weight", weight_object);
  const OptionalTensor bias = as_optional_tensor(op, "bias", bias_object);
  const CallKeys keys({&input, address(residual), address(weight), address(bias)});
  if (keys.is_autocast() && can_cast(input, residual)) {
    return py::int_(int{kCast});
  }
  if (keys.is_plain() && !keys.needs_grad()) {
    auto [output, sum, stats] = call(norm_forward, "fused_op::norm_forward", keys, input, norm,
                                     input, residual, weight, bias, rng_state, normalized_ndim, eps,
                                     zero_centered, dropout_p, output_dtype, sum_dtype, false);
    return residual ? to_python(std::make_tuple(std::move(output), std::move(sum)))
                    : to_python(std::move(output));
  }
  // Said here rather than by the kernel: what is not plain may never reach one.
  check_eps(op, eps);
  check_kinds(op, input, residual, weight, bias, output_dtype, sum_dtype);
  return py::int_(int{keys.is_plain()         ? kAutograd
                      : keys.is_transformed() ? kComposite
                                              : kDispatch});
}

}  // namespace fused_op
