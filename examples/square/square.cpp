// square(x) = x²: checks, both backends, the autograd function in C++, and the Python module.
// load_jit.py compiles it. `forward` and `backward` are also bound without autograd, for the
// autograd function in Python that load_jit.py sets beside this one.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "square.h"
#endif

namespace {

void check(const at::Tensor& x) {
  TORCH_CHECK(x.layout() == at::kStrided && (x.is_cpu() || x.is_cuda()),
              "square: x must be a dense CPU or CUDA tensor, got layout ", x.layout(), " on ",
              x.device());
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "square: x must be float16, bfloat16, float32 or float64, got ", dtype);
#ifndef WITH_CUDA
  TORCH_CHECK(x.is_cpu(), "square: x is on ", x.device(), ", but this build has no CUDA");
#endif
}

// Values as they count (a view may be marked negative), without gaps.
at::Tensor dense(const at::Tensor& x) { return x.resolve_neg().contiguous(); }

#ifdef WITH_CUDA
DType to_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf       ? DType::kFloat16
         : dtype == at::kBFloat16 ? DType::kBFloat16
         : dtype == at::kFloat    ? DType::kFloat32
                                  : DType::kFloat64;
}

void check_launch(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "square: the kernel could not be launched: ", cudaGetErrorString(status));
}
#endif

at::Tensor forward(const at::Tensor& given_x) {
  check(given_x);
  const at::Tensor x = dense(given_x);
  const at::Tensor y = at::empty_like(x);
  if (x.numel() == 0) {
    return y;
  }
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    check_launch(square_forward_cuda(to_dtype(x.scalar_type()), x.numel(), x.const_data_ptr(),
                                     y.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
    return y;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "square", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    scalar_t* to = y.mutable_data_ptr<scalar_t>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      to[i] = from[i] * from[i];  // 16-bit products are computed in float, and rounded once
    }
  });
  return y;
}

at::Tensor backward(const at::Tensor& given_x, const at::Tensor& given_dy) {
  check(given_x);
  TORCH_CHECK(given_dy.sizes() == given_x.sizes() &&
                  given_dy.scalar_type() == given_x.scalar_type() &&
                  given_dy.device() == given_x.device(),
              "square: the gradient must have shape, dtype and device of x, ", given_x.sizes(), " ",
              given_x.scalar_type(), " ", given_x.device(), ", got ", given_dy.sizes(), " ",
              given_dy.scalar_type(), " ", given_dy.device());
  const at::Tensor x = dense(given_x), dy = dense(given_dy);
  const at::Tensor dx = at::empty_like(x);
  if (x.numel() == 0) {
    return dx;
  }
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    check_launch(square_backward_cuda(to_dtype(x.scalar_type()), x.numel(), x.const_data_ptr(),
                                      dy.const_data_ptr(), dx.mutable_data_ptr(),
                                      c10::cuda::getCurrentCUDAStream()));
    return dx;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "square", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const scalar_t* grad = dy.const_data_ptr<scalar_t>();
    scalar_t* to = dx.mutable_data_ptr<scalar_t>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      to[i] = static_cast<scalar_t>(2 * static_cast<A>(from[i]) * static_cast<A>(grad[i]));
    }
  });
  return dx;
}

struct SquareFunction : torch::autograd::Function<SquareFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return ::forward(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    // With create_graph=True this gradient is differentiated, which PyTorch's operations can be.
    const bool differentiated = at::GradMode::is_enabled();
    return {differentiated ? x.mul(grads[0]).mul(2) : ::backward(x, grads[0])};
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("square", [](const at::Tensor& x) { return SquareFunction::apply(x); });
  m.def("forward", &forward);
  m.def("backward", &backward);
}
