#include "routing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>

#include "backend.h"
#include "checks.h"
#include "dispatcher.h"

namespace fused_op {
namespace {

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
  bool is_recorded() const { return keys_.has(c10::DispatchKey::Tracer); }
  bool is_transformed() const { return is_dual_ || is_functorch_; }
  bool needs_grad() const { return requires_grad_ && at::GradMode::is_enabled(); }

 private:
  c10::DispatchKeySet keys_;
  bool is_dual_ = false;
  bool is_functorch_ = false;
  bool requires_grad_ = false;
};

const at::Tensor* address(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

CallKeys keys_of(const NormTensors& tensors) {
  return CallKeys(
      {&tensors.input, address(tensors.residual), address(tensors.weight), address(tensors.bias)});
}

CallKeys keys_of(const BackwardTensors& tensors, const MainGrads& main_grads = {}) {
  return CallKeys({&tensors.grad_output, address(tensors.grad_sum), &tensors.x,
                   address(tensors.weight), address(tensors.bias), &tensors.stats,
                   address(main_grads.weight), address(main_grads.bias)});
}

// Long calls let other Python threads run; for short ones that costs and buys nothing. (The node of
// autograd.cpp does not hold the interpreter.)
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

// The dispatcher tells profilers about a call; so does one that goes past it, by the same name.
ThreeTensors run_kernel(const NormTensors& tensors, const NormOptions& options) {
  RECORD_FUNCTION("fused_op::norm_forward", dispatcher::arguments(tensors, options));
  const ReleasedInterpreter released(tensors.input);
  return norm_forward(tensors, options);
}

FourTensors run_kernel(const BackwardTensors& tensors, const BackwardOptions& options,
                       const MainGrads& main_grads) {
  RECORD_FUNCTION("fused_op::norm_backward", dispatcher::arguments(tensors, options));
  const ReleasedInterpreter released(tensors.x);
  return norm_backward(tensors, options, main_grads);
}

}  // namespace

bool is_plain(const NormTensors& tensors) { return keys_of(tensors).is_plain(); }
bool is_plain(const BackwardTensors& tensors) { return keys_of(tensors).is_plain(); }

std::variant<ThreeTensors, Route> route_norm(const NormTensors& tensors,
                                             const NormOptions& options) {
  const CallKeys keys = keys_of(tensors);
  if (keys.is_autocast() && can_cast(tensors)) {
    return Route::kCast;
  }
  if (keys.is_plain() && !keys.needs_grad()) {
    return run_kernel(tensors, options);
  }
  // Said here rather than by the kernel: what is not plain may never reach one.
  check_kinds(op_name(options.norm, tensors.residual.has_value()), tensors, options);
  if (keys.is_plain()) {
    return Route::kAutograd;
  }
  if (keys.is_recorded()) {
    return Route::kRecord;
  }
  return keys.is_transformed() ? Route::kComposite : Route::kDispatch;
}

ThreeTensors route_norm_forward(const NormTensors& tensors, const NormOptions& options) {
  return keys_of(tensors).is_plain() ? run_kernel(tensors, options)
                                     : dispatcher::norm_forward(tensors, options);
}

FourTensors route_norm_backward(const BackwardTensors& tensors, const BackwardOptions& options) {
  // For another layout of a gradient the dispatcher's error would be a list of its own keys.
  check_dense("fused_op::norm_backward", "grad_output", tensors.grad_output);
  if (tensors.grad_sum) {
    check_dense("fused_op::norm_backward", "grad_sum", *tensors.grad_sum);
  }
  return keys_of(tensors).is_plain() ? run_kernel(tensors, options, {})
                                     : dispatcher::norm_backward(tensors, options);
}

FourTensors route_norm_backward_into(const BackwardTensors& tensors, const BackwardOptions& options,
                                     const MainGrads& main_grads) {
  // Python asks for main_grad only where the kernel is called at once.
  TORCH_CHECK(keys_of(tensors, main_grads).is_plain(),
              "fused_op: main_grad is added to in eager calls of plain tensors only, not under "
              "torch.compile, function transforms or in tensor subclasses");
  // As every change in place: who saved a main_grad for a backward of his own is told.
  for (const auto* const main_grad : {&main_grads.weight, &main_grads.bias}) {
    if (*main_grad) {
      (*main_grad)->unsafeGetTensorImpl()->bump_version();
    }
  }
  return run_kernel(tensors, options, main_grads);
}

// On every route by the same draw, or else a mask would change where only the route does, as when
// checkpointing recomputes a forward.
at::Tensor route_dropout_state(const at::Tensor& input) {
  const CallKeys keys({&input});
  if (keys.is_plain()) {
    return backend::dropout_state(input.device(), /*on_device=*/false);
  }
  // Without elements, either takes nothing from the generator. For the random one, vmap asks its
  // randomness=.
  const auto options = at::TensorOptions().device(input.device());
  const at::Tensor like = keys.is_transformed() ? at::rand({0}, options) : at::empty({0}, options);
  return dispatcher::dropout_state(like, /*on_device=*/false);
}

}  // namespace fused_op
