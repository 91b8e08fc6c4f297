// What stands between a call and a kernel, and what a call holds while the kernel runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <optional>

namespace fused_op {

// Where the dispatcher would send a call with these tensors, leaving autograd aside. nullptr:
// absent.
class CallKeys {
 public:
  explicit CallKeys(c10::ArrayRef<const at::Tensor*> tensors) {
    for (const at::Tensor* const tensor : tensors) {
      if (tensor != nullptr) {
        keys_ = keys_ | tensor->key_set();
        is_dual_ = is_dual_ || tensor->_fw_grad(/*level=*/0).defined();  // has no key
        requires_grad_ = requires_grad_ || tensor->requires_grad();
      }
    }
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    keys_ = (keys_ | local.included_) - local.excluded_;
    is_functorch_ = local.included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  }

  CallKeys(std::initializer_list<const at::Tensor*> tensors)
      : CallKeys(c10::ArrayRef<const at::Tensor*>(tensors)) {}

  // Whether nothing stands between the call and a dense CPU or CUDA kernel.
  bool is_plain() const {
    const c10::DispatchKey key =
        (keys_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset)
            .remove(c10::DispatchKey::BackendSelect)
            .highestPriorityTypeId();
    return !is_dual_ && (key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA);
  }
  bool is_autocast() const { return keys_.has_any(c10::autocast_dispatch_keyset); }
  bool is_recorded() const { return keys_.has(c10::DispatchKey::Tracer); }
  bool is_transformed() const { return is_dual_ || is_functorch_; }
  bool needs_grad() const { return requires_grad_ && at::GradMode::is_enabled(); }

 private:
  c10::DispatchKeySet keys_;
  bool is_dual_ = false;
  bool is_functorch_ = false;
  bool requires_grad_ = false;
};

// Releases the interpreter during long calls, so that other Python threads run. For short calls
// that costs time and gains nothing. (Backward of the nodes of autograd.cpp and variant_call.cpp
// does not hold the interpreter.)
class ReleasedInterpreter {
 public:
  explicit ReleasedInterpreter(const at::Tensor& x) {
    if (x.numel() > 65536 && PyGILState_Check() != 0) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace fused_op
