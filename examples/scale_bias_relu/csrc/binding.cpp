// Where tensors become pointers: check, allocate, run on the tensor's device. And the Python
// module. The narrow headers compile in half the time of torch/extension.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "op.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernel.h"
#endif

namespace scale_bias_relu {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A check is a sentence: which op, what it expects, what it found.
void check_input(const at::Tensor& input) {
  TORCH_CHECK(input.layout() == at::kStrided && (input.is_cpu() || input.is_cuda()),
              "scale_bias_relu: input must be a dense CPU or CUDA tensor, got layout ",
              input.layout(), " on ", input.device());
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "scale_bias_relu: input must be float16, bfloat16, float32 or float64, got ", dtype);
}

void check_like_input(const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  TORCH_CHECK(tensor.scalar_type() == input.scalar_type() && tensor.device() == input.device(),
              "scale_bias_relu: ", name, " must be of ", input.scalar_type(), " on ",
              input.device(), " like input, got ", tensor.scalar_type(), " on ", tensor.device());
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
// conjugate is only marked negative), row after row, and from an address that vector loads can
// take.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor result = tensor.resolve_neg().contiguous();
  return reinterpret_cast<std::uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result
                                                                             : result.clone();
}

void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// Calls work(first, last) on ranges that together cover [0, count); an item is some `elements`.
template <typename Work>
void parallel_for(std::int64_t count, std::int64_t elements, const Work& work) {
  // Below about 32768 elements a thread's wake-up costs more than its share of the work.
  at::parallel_for(0, count, std::max<std::int64_t>(1, 32768 / elements), work);
}

#ifdef WITH_CUDA
// A launch that fails, fails here; what goes wrong inside a kernel shows at a later CUDA call.
void check_launch(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "scale_bias_relu: the kernel could not be launched: ", cudaGetErrorString(status));
}
#else
[[noreturn]] void fail_without_cuda() {
  TORCH_CHECK(false,
              "scale_bias_relu: input is on a GPU, but the extension was built without CUDA");
}
#endif

void run_forward(const ForwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    parallel_for(args.rows, args.cols,
                 [&](std::int64_t first, std::int64_t last) { cpu::forward(args, first, last); });
    return;
  }
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);  // the tensor's device need not be the current one
  check_launch(cuda::forward(args, c10::cuda::getCurrentCUDAStream()));
#else
  fail_without_cuda();
#endif
}

std::int64_t backward_parts(const BackwardArgs& args, at::Device device) {
#ifdef WITH_CUDA
  if (device.is_cuda()) {
    return cuda::backward_parts(args.dtype, args.rows, args.cols);
  }
#endif
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  return cpu::backward_parts(args.rows);
}

void run_backward(const BackwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    const std::int64_t part_elements = args.rows / args.parts * args.cols + 1;
    parallel_for(args.parts, part_elements,
                 [&](std::int64_t first, std::int64_t last) { cpu::backward(args, first, last); });
    if (args.grad_bias != nullptr) {
      parallel_for(args.cols, args.parts, [&](std::int64_t first, std::int64_t last) {
        cpu::finish_grad_bias(args, first, last);
      });
    }
    return;
  }
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  check_launch(cuda::backward(args, c10::cuda::getCurrentCUDAStream()));
#else
  fail_without_cuda();
#endif
}

at::Tensor forward(const at::Tensor& input, const OptionalTensor& bias, double scale) {
  check_input(input);
  const std::int64_t cols = input.dim() == 0 ? 1 : input.size(-1);
  if (bias) {
    check_like_input("bias", *bias, input);
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == cols,
                "scale_bias_relu: bias must have shape [", cols, "] (last dimension of input ",
                input.sizes(), "), got ", bias->sizes());
  }
  const at::Tensor output = at::empty(input.sizes(), input.options());
  if (output.numel() == 0) {
    return output;
  }
  // These own what the pointers point into until the kernel is queued.
  const at::Tensor dense_input = dense(input);
  const at::Tensor dense_bias = bias ? dense(*bias) : at::Tensor();

  ForwardArgs args{};
  args.dtype = to_dtype(input.scalar_type());
  args.rows = input.numel() / cols;
  args.cols = cols;
  args.scale = scale;
  args.input = dense_input.const_data_ptr();
  args.bias = bias ? dense_bias.const_data_ptr() : nullptr;
  args.output = output.mutable_data_ptr();
  run_forward(args, input.device());
  return output;
}

// Gradients that are not wanted are not computed: they come back undefined, in Python as None.
std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_output, const at::Tensor& output,
                                            double scale, bool input_wanted, bool bias_wanted) {
  check_input(output);
  check_like_input("grad_output", grad_output, output);
  TORCH_CHECK(grad_output.sizes() == output.sizes(),
              "scale_bias_relu: grad_output must have shape ", output.sizes(), " like output, got ",
              grad_output.sizes());
  const std::int64_t cols = output.dim() == 0 ? 1 : output.size(-1);
  at::Tensor grad_input, grad_bias, partials;
  if (input_wanted) {
    grad_input = at::empty(output.sizes(), output.options());
  }
  if (bias_wanted) {
    grad_bias = at::empty({cols}, output.options());
  }
  if (output.numel() == 0) {
    return {grad_input, bias_wanted ? grad_bias.zero_() : grad_bias};
  }
  const at::Tensor dense_grad = dense(grad_output);
  const at::Tensor dense_output = dense(output);

  BackwardArgs args{};
  args.dtype = to_dtype(output.scalar_type());
  args.rows = output.numel() / cols;
  args.cols = cols;
  args.scale = scale;
  args.parts = backward_parts(args, output.device());
  if (bias_wanted) {
    const auto dtype = args.dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
    partials = at::empty({args.parts, cols}, output.options().dtype(dtype));
  }
  args.grad_output = dense_grad.const_data_ptr();
  args.output = dense_output.const_data_ptr();
  args.grad_input = pointer(grad_input);
  args.grad_bias = pointer(grad_bias);
  args.partials = pointer(partials);
  run_backward(args, output.device());
  return {grad_input, grad_bias};
}

}  // namespace
}  // namespace scale_bias_relu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &scale_bias_relu::forward);
  m.def("backward", &scale_bias_relu::backward);
}
