// Where tensors become pointers: check, allocate, run on the tensor's device. And the Python
// module. The narrow headers compile in half the time of torch/extension.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

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
void check_tensor(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda()),
              "template_op: ", name, " must be a dense CPU or CUDA tensor, got layout ",
              tensor.layout(), " on ", tensor.device());
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

// As kernels can read it: values in memory as they count (a view such as the imaginary part of a
// conjugate is only marked negative), without gaps, and from an address that vector loads can take.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor result = tensor.resolve_neg().contiguous();
  return reinterpret_cast<std::uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result
                                                                             : result.clone();
}

#ifdef WITH_CUDA
// A launch that fails, fails here; what goes wrong inside a kernel shows at a later CUDA call.
void check_launch(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "template_op: the kernel could not be launched: ", cudaGetErrorString(status));
}
#else
[[noreturn]] void fail_without_cuda() {
  TORCH_CHECK(false, "template_op: a tensor is on a GPU, but the extension was built without CUDA");
}
#endif

constexpr std::int64_t kGrain = 32768;  // elements that are worth a thread's wake-up

void run_forward(const ForwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    at::parallel_for(0, args.count, kGrain, [&](std::int64_t first, std::int64_t last) {
      cpu::forward(args, first, last);
    });
    return;
  }
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);  // the tensor's device need not be the current one
  check_launch(cuda::forward(args, c10::cuda::getCurrentCUDAStream()));
#else
  fail_without_cuda();
#endif
}

void run_backward(const BackwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    at::parallel_for(0, args.count, kGrain, [&](std::int64_t first, std::int64_t last) {
      cpu::backward(args, first, last);
    });
    return;
  }
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  check_launch(cuda::backward(args, c10::cuda::getCurrentCUDAStream()));
#else
  fail_without_cuda();
#endif
}

// YOUR OP: the two functions that Python calls. Each reads: check, allocate, fill the arguments,
// run.
at::Tensor forward(const at::Tensor& input, double scale) {
  check_tensor("input", input);
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
  check_tensor("grad_output", grad_output);
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &template_op::forward);
  m.def("backward", &template_op::backward);
}
