// Which way a call goes, decided in C++ because it is asked on every call: 0.3 us here, several in
// Python. A kernel reads raw pointers, which only a plain tensor has. Fake, sharded, transformed or
// lazily negated tensors look like tensors too, but their pointer is missing or means something
// else; they go through the dispatcher, which knows them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>

#include "checks.h"
#include "fused_op.h"

namespace fused_op {

namespace py = pybind11;

// What fused_op_cuda.norm() leaves to Python, as the int that it returns. functional.py has the
// same list.
enum Route : int {
  kAutograd = 0,   // plain, and a gradient is needed
  kDispatch = 1,   // not plain
  kComposite = 2,  // torch.func and forward AD: only PyTorch's own operations have their rules
  kCast = 3,       // autocast is on, and no kernel takes these dtypes as they are
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
template <typename... Rest, ThreeTensors (*kKernel)(std::string_view, const at::Tensor&, Rest...)>
struct Dispatched<kKernel> {
  static ThreeTensors call(std::string_view norm, const at::Tensor& first, Rest... rest) {
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
  // Long calls let other Python threads run; for short ones that costs and buys nothing.
  std::optional<py::gil_scoped_release> released;
  if (x.numel() > 65536) {
    released.emplace();
  }
  return kernel(args...);
}

// norm_forward and norm_backward for tensors of any kind.
inline ThreeTensors route_norm_forward(std::string_view norm, const at::Tensor& input,
                                       const OptionalTensor& residual, const OptionalTensor& weight,
                                       const OptionalTensor& bias, std::int64_t normalized_ndim,
                                       double eps, bool zero_centered, bool save_stats) {
  const CallKeys keys({&input, address(residual), address(weight), address(bias)});
  return call(norm_forward, "fused_op::norm_forward", keys, input, norm, input, residual, weight,
              bias, normalized_ndim, eps, zero_centered, save_stats);
}

inline ThreeTensors route_norm_backward(std::string_view norm, const at::Tensor& grad_output,
                                        const OptionalTensor& grad_sum, const at::Tensor& x,
                                        const OptionalTensor& weight, const at::Tensor& stats,
                                        std::int64_t normalized_ndim, bool zero_centered,
                                        at::ScalarType param_dtype, std::array<bool, 3> wanted) {
  const CallKeys keys({&grad_output, address(grad_sum), &x, address(weight), &stats});
  return call(norm_backward, "fused_op::norm_backward", keys, x, norm, grad_output, grad_sum, x,
              weight, stats, normalized_ndim, zero_centered, param_dtype, wanted);
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
                             py::handle bias_object, std::int64_t normalized_ndim, double eps,
                             bool zero_centered) {
  const char* const op = op_name(norm, !residual_object.is_none());
  const at::Tensor& input = as_tensor(op, "input", input_object);
  const OptionalTensor residual = as_optional_tensor(op, "residual", residual_object);
  const OptionalTensor weight = as_optional_tensor(op, "weight", weight_object);
  const OptionalTensor bias = as_optional_tensor(op, "bias", bias_object);
  const CallKeys keys({&input, address(residual), address(weight), address(bias)});
  if (keys.is_autocast() && can_cast(input, residual, weight, bias)) {
    return py::int_(int{kCast});
  }
  if (keys.is_plain() && !keys.needs_grad()) {
    const auto [output, sum, stats] =
        call(norm_forward, "", keys, input, norm, input, residual, weight, bias, normalized_ndim,
             eps, zero_centered, false);
    return residual ? py::object(py::make_tuple(output, sum)) : py::cast(output);
  }
  // Said here rather than by the kernel: what is not plain may never reach one.
  check_eps(op, eps);
  check_kinds(op, input, residual, weight, bias);
  return py::int_(int{keys.is_plain()         ? kAutograd
                      : keys.is_transformed() ? kComposite
                                              : kDispatch});
}

}  // namespace fused_op
