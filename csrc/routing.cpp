#include "routing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>

#include "backend.h"
#include "call_keys.h"
#include "checks.h"
#include "dispatcher.h"

namespace fused_op {
namespace {

CallKeys keys_of(const NormTensors& tensors) {
  return CallKeys({&tensors.input, pointer_to(tensors.residual), pointer_to(tensors.weight),
                   pointer_to(tensors.bias)});
}

CallKeys keys_of(const BackwardTensors& tensors, const MainGrads& main_grads = {}) {
  return CallKeys({&tensors.grad_output, pointer_to(tensors.grad_sum), &tensors.x,
                   pointer_to(tensors.weight), pointer_to(tensors.bias), &tensors.stats,
                   pointer_to(main_grads.weight), pointer_to(main_grads.bias)});
}

// The dispatcher tells profilers about a call. A call that bypasses it does the same, under the
// same name.
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
  // Checked here, because a tensor that is not plain may never reach a kernel.
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
  // For a gradient of another layout, the dispatcher's own error would only list its keys.
  check_dense("fused_op::norm_backward", "grad_output", tensors.grad_output);
  if (tensors.grad_sum) {
    check_dense("fused_op::norm_backward", "grad_sum", *tensors.grad_sum);
  }
  return keys_of(tensors).is_plain() ? run_kernel(tensors, options, {})
                                     : dispatcher::norm_backward(tensors, options);
}

FourTensors route_norm_backward_into(const BackwardTensors& tensors, const BackwardOptions& options,
                                     const MainGrads& main_grads) {
  // Python passes a main_grad only where the kernel is called at once.
  TORCH_CHECK(keys_of(tensors, main_grads).is_plain(),
              "fused_op: main_grad is added to in eager calls of plain tensors only, not under "
              "torch.compile, function transforms or in tensor subclasses");
  // As after every change in place: a caller that saved a main_grad for its own backward gets an
  // error.
  for (const auto* const main_grad : {&main_grads.weight, &main_grads.bias}) {
    if (*main_grad) {
      (*main_grad)->unsafeGetTensorImpl()->bump_version();
    }
  }
  return run_kernel(tensors, options, main_grads);
}

// Every route draws in the same way. Otherwise a mask would change with the route alone, as when
// checkpointing recomputes a forward.
at::Tensor route_dropout_state(const at::Tensor& input) {
  const CallKeys keys({&input});
  if (keys.is_plain()) {
    return backend::dropout_state(input.device(), /*on_device=*/false);
  }
  // Neither tensor has elements, so nothing is taken from the generator. at::rand makes vmap check
  // its randomness= argument.
  const auto options = at::TensorOptions().device(input.device());
  const at::Tensor like = keys.is_transformed() ? at::rand({0}, options) : at::empty({0}, options);
  return dispatcher::dropout_state(like, /*on_device=*/false);
}

}  // namespace fused_op
