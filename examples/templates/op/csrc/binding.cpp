// Where tensors become pointers: check, allocate, run on the tensor's device; and the registration
// with PyTorch's dispatcher. No pybind, no Python header: torch.ops.load_library loads the library,
// and a C++ program could. The narrow headers compile in half the time of torch/extension.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "op.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernel.h"
#endif

namespace template_op {
namespace {

// A check is a sentence: which op, what it expects, what it found. YOUR OP: one for each way in
// which arguments can disagree, before the first pointer is taken; and a line in test_bad_input.
// The device needs none: the dispatcher brings tensors of the CPU and of CUDA here, and no others.
void check_dtype(const char* name, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "template_op: ", name, " must be float16, bfloat16, float32 or float64, got ", dtype);
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return DType::kFloat32;
  }
}

// As kernels can read it: without gaps, and from an address that vector loads can take. Views that
// are only marked as negative do not come here: the dispatcher has computed them.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor result = tensor.contiguous();
  return reinterpret_cast<std::uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result
                                                                             : result.clone();
}

#ifdef WITH_CUDA
// A launch that fails, fails here; what goes wrong inside a kernel shows at a later CUDA call.
void check_launch(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "template_op: the kernel could not be launched: ", cudaGetErrorString(status));
}
#endif

constexpr std::int64_t kGrain = 32768;  // elements that are worth a thread's wake-up

void run_forward(const ForwardArgs& args, at::Device device) {
#ifdef WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);  // the tensor's device need not be the current one
    check_launch(cuda::forward(args, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  at::parallel_for(0, args.count, kGrain,
                   [&](std::int64_t first, std::int64_t last) { cpu::forward(args, first, last); });
}

void run_backward(const BackwardArgs& args, at::Device device) {
#ifdef WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    check_launch(cuda::backward(args, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  at::parallel_for(0, args.count, kGrain, [&](std::int64_t first, std::int64_t last) {
    cpu::backward(args, first, last);
  });
}

// YOUR OP: the two functions of the schema below. Each reads: check, allocate, fill the arguments,
// run.
at::Tensor forward(const at::Tensor& input, double scale) {
  check_dtype("input", input);
  const at::Tensor output = at::empty(input.sizes(), input.options());
  if (output.numel() == 0) {
    return output;
  }
  const at::Tensor dense_input = dense(input);  // owns its memory until the kernel is queued
  ForwardArgs args{};
  args.dtype = to_dtype(input.scalar_type());
  args.count = input.numel();
  args.scale = scale;
  args.input = dense_input.const_data_ptr();
  args.output = output.mutable_data_ptr();
  run_forward(args, input.device());
  return output;
}

at::Tensor backward(const at::Tensor& grad_output, double scale) {
  check_dtype("grad_output", grad_output);
  const at::Tensor grad_input = at::empty(grad_output.sizes(), grad_output.options());
  if (grad_input.numel() == 0) {
    return grad_input;
  }
  const at::Tensor dense_grad = dense(grad_output);
  BackwardArgs args{};
  args.dtype = to_dtype(grad_output.scalar_type());
  args.count = grad_output.numel();
  args.scale = scale;
  args.grad_output = dense_grad.const_data_ptr();
  args.grad_input = grad_input.mutable_data_ptr();
  run_backward(args, grad_output.device());
  return grad_input;
}

}  // namespace
}  // namespace template_op

// YOUR OP: what the ops look like, to Python and to the compiler. Nothing is mutated, and nothing
// aliases.
TORCH_LIBRARY(template_op, m) {
  m.def("forward(Tensor input, float scale) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("backward(Tensor grad_output, float scale) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(template_op, CPU, m) {
  m.impl("forward", &template_op::forward);
  m.impl("backward", &template_op::backward);
}

// Without it, PyTorch itself says that the op does not exist for CUDA.
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(template_op, CUDA, m) {
  m.impl("forward", &template_op::forward);
  m.impl("backward", &template_op::backward);
}
#endif
