// Where tensors become pointers: check, allocate, run on the tensor's device; and the registration
// with PyTorch's dispatcher. No pybind, no Python header: the library is loaded by
// torch.ops.load_library, and could be by a C++ program.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "op.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernel.h"
#endif

namespace convrnn {
namespace {

// The device needs no check of its own: the dispatcher calls this for CPU and CUDA tensors alone.
void check_dtype(const at::Tensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "convrnn: x must be float16, bfloat16, float32 or float64, got ", dtype);
}

void check_like_x(const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type() && tensor.device() == x.device(),
              "convrnn: ", name, " must be of ", x.scalar_type(), " on ", x.device(),
              " like x, got ", tensor.scalar_type(), " on ", tensor.device());
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

Sizes check(const at::Tensor& x, const at::Tensor& kernel, const at::Tensor& hidden) {
  check_dtype(x);
  check_like_x("kernel", kernel, x);
  check_like_x("hidden", hidden, x);
  TORCH_CHECK(x.dim() == 3, "convrnn: x must have shape [batch, steps, columns], got ", x.sizes());
  TORCH_CHECK(kernel.dim() == 3 && kernel.size(0) == 1 && kernel.size(1) == 1 && kernel.size(2) > 0,
              "convrnn: kernel must have shape [1, 1, taps] with at least one tap, got ",
              kernel.sizes());
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == x.size(0) && hidden.size(1) == x.size(2),
              "convrnn: hidden must have shape [", x.size(0), ", ", x.size(2),
              "] (batch and columns of x ", x.sizes(), "), got ", hidden.sizes());
  return {x.size(0), x.size(1), x.size(2), kernel.size(2)};
}

#ifdef WITH_CUDA
void check_smem(DType dtype, const Sizes& sizes) {
  const std::int64_t needed = cuda::smem_bytes(dtype, sizes), limit = cuda::smem_limit();
  TORCH_CHECK(needed <= limit, "convrnn: ", sizes.cols, " columns and ", sizes.taps, " taps need ",
              needed, " bytes of shared memory, where the state is kept, but this GPU ", "has ",
              limit, " for a CTA");
}

void check_launch(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "convrnn: the kernel could not be launched: ", cudaGetErrorString(status));
}
#endif

// Calls work(first, last) on ranges of the batch that together cover it.
template <typename Work>
void parallel_for(const Sizes& sizes, const Work& work) {
  // Below about 32768 elements a thread's wake-up costs more than its share of the work.
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / (sizes.steps * sizes.cols));
  at::parallel_for(0, sizes.batch, grain, work);
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& kernel, const at::Tensor& hidden) {
  ForwardArgs args{};
  args.sizes = check(x, kernel, hidden);
  const at::Tensor output = at::empty(x.sizes(), x.options());
  if (output.numel() == 0) {
    return output;
  }
  // These own what the pointers point into until the kernel is queued. Views that are only marked
  // as negative do not come here: the dispatcher has made them real.
  const at::Tensor dense_x = x.contiguous();
  const at::Tensor dense_kernel = kernel.contiguous();
  const at::Tensor dense_hidden = hidden.contiguous();
  args.dtype = to_dtype(x.scalar_type());
  args.x = dense_x.const_data_ptr();
  args.kernel = dense_kernel.const_data_ptr();
  args.hidden = dense_hidden.const_data_ptr();
  args.output = output.mutable_data_ptr();
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());  // it need not be the current one
    check_smem(args.dtype, args.sizes);
    check_launch(cuda::forward(args, c10::cuda::getCurrentCUDAStream()));
    return output;
  }
#endif
  parallel_for(args.sizes,
               [&](std::int64_t first, std::int64_t last) { cpu::forward(args, first, last); });
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output,
                                                        const at::Tensor& output,
                                                        const at::Tensor& kernel,
                                                        const at::Tensor& hidden) {
  BackwardArgs args{};
  args.sizes = check(output, kernel, hidden);
  check_like_x("grad_output", grad_output, output);
  TORCH_CHECK(grad_output.sizes() == output.sizes(), "convrnn: grad_output must have shape ",
              output.sizes(), " like output, got ", grad_output.sizes());
  const auto options = output.options();
  const at::Tensor grad_x = at::empty(output.sizes(), options);
  const at::Tensor grad_hidden = at::empty(hidden.sizes(), options);
  if (output.numel() == 0) {
    return {grad_x, at::empty(kernel.sizes(), options).zero_(), grad_hidden.zero_()};
  }
  const at::Tensor dense_grad = grad_output.contiguous();
  const at::Tensor dense_output = output.contiguous();
  const at::Tensor dense_kernel = kernel.contiguous();
  const at::Tensor dense_hidden = hidden.contiguous();
  const at::ScalarType accumulator = output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor partials =
      at::empty({args.sizes.batch, args.sizes.taps}, options.dtype(accumulator));
  args.dtype = to_dtype(output.scalar_type());
  args.grad_output = dense_grad.const_data_ptr();
  args.output = dense_output.const_data_ptr();
  args.kernel = dense_kernel.const_data_ptr();
  args.hidden = dense_hidden.const_data_ptr();
  args.grad_x = grad_x.mutable_data_ptr();
  args.grad_kernel = partials.mutable_data_ptr();
  args.grad_hidden = grad_hidden.mutable_data_ptr();
  if (output.is_cpu()) {
    parallel_for(args.sizes,
                 [&](std::int64_t first, std::int64_t last) { cpu::backward(args, first, last); });
  }
#ifdef WITH_CUDA
  if (output.is_cuda()) {
    const c10::cuda::CUDAGuard guard(output.device());
    check_smem(args.dtype, args.sizes);
    check_launch(cuda::backward(args, c10::cuda::getCurrentCUDAStream()));
  }
#endif
  // A few numbers from each row of the batch, added up by PyTorch: in a fixed order, too.
  return {grad_x, partials.sum(0).to(output.scalar_type()).view(kernel.sizes()), grad_hidden};
}

}  // namespace
}  // namespace convrnn

// What the ops look like, to the compiler as well: nothing is mutated, nothing aliases.
TORCH_LIBRARY(convrnn, m) {
  m.def("forward(Tensor x, Tensor kernel, Tensor hidden) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def(
      "backward(Tensor grad_output, Tensor output, Tensor kernel, Tensor hidden) "
      "-> (Tensor grad_x, Tensor grad_kernel, Tensor grad_hidden)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(convrnn, CPU, m) {
  m.impl("forward", &convrnn::forward);
  m.impl("backward", &convrnn::backward);
}

// Without it, PyTorch itself says that the op does not exist for CUDA.
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(convrnn, CUDA, m) {
  m.impl("forward", &convrnn::forward);
  m.impl("backward", &convrnn::backward);
}
#endif
