// Where tensors become pointers: check, allocate, run one step or two. And the Python module.
// The narrow headers compile in half the time of torch/extension.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "op.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernel.h"
#endif

namespace reduce_sum {
namespace {

void check(const at::Tensor& input) {
  TORCH_CHECK(input.layout() == at::kStrided && (input.is_cpu() || input.is_cuda()),
              "reduce_sum: input must be a dense CPU or CUDA tensor, got layout ", input.layout(),
              " on ", input.device());
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "reduce_sum: input must be float16, bfloat16, float32 or float64, got ", dtype);
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
// take. That address may not be a reason for another order of the sum, so that a copy is made
// instead.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor result = tensor.resolve_neg().contiguous();
  return reinterpret_cast<std::uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result
                                                                             : result.clone();
}

// output [rows, parts] = the sums of the parts of input [rows, cols].
void run(const at::Tensor& input, std::int64_t rows, std::int64_t cols, std::int64_t part,
         const at::Tensor& output) {
  SumArgs args{};
  args.input_dtype = to_dtype(input.scalar_type());
  args.output_dtype = to_dtype(output.scalar_type());
  args.rows = rows;
  args.cols = cols;
  args.part = part;
  args.parts = output.numel() / rows;
  args.input = input.const_data_ptr();
  args.output = output.mutable_data_ptr();
  if (input.is_cpu()) {
    // Below about 32768 elements a thread's wake-up costs more than its share of the work.
    const std::int64_t grain = std::max<std::int64_t>(1, 32768 / std::min(part, cols));
    at::parallel_for(0, output.numel(), grain, [&](std::int64_t first, std::int64_t last) {
      cpu::sum_parts(args, first, last);
    });
    return;
  }
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(input.device());  // it need not be the current one
  const cudaError_t status = cuda::sum_parts(args, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(status == cudaSuccess,
              "reduce_sum: the kernel could not be launched: ", cudaGetErrorString(status));
#else
  TORCH_CHECK(false, "reduce_sum: input is on a GPU, but the extension was built without CUDA");
#endif
}

// The sums over the last dimension, or over all elements.
at::Tensor sum(const at::Tensor& input, bool by_row) {
  check(input);
  TORCH_CHECK(!by_row || input.dim() > 0, "reduce_sum: input has no dimension to sum over");
  const std::int64_t cols = by_row ? input.size(-1) : input.numel();
  const at::IntArrayRef sizes =
      by_row ? input.sizes().slice(0, input.dim() - 1) : at::IntArrayRef{};
  const at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() == 0) {
    return output.zero_();
  }
  const std::int64_t rows = output.numel();
  const std::int64_t parts = parts_of(cols);
  const at::Tensor dense_input = dense(input);
  if (parts == 1) {
    run(dense_input, rows, cols, cols, output);
    return output;
  }
  const at::ScalarType dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor partials = at::empty({rows, parts}, input.options().dtype(dtype));
  run(dense_input, rows, cols, kPart, partials);
  run(partials, rows, parts, parts, output);
  return output;
}

}  // namespace
}  // namespace reduce_sum

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sum", &reduce_sum::sum); }
