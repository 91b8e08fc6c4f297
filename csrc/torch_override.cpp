#include "torch_override.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/native_layer_norm_backward_native.h>
#include <ATen/ops/native_layer_norm_native.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>

#include "autograd.h"
#include "backend.h"
#include "checks.h"
#include "core/kernel_error.h"
#include "routing.h"

// From torch 2.9 on, F.rms_norm is an op with a derivative of its own.
#if __has_include(<ATen/ops/_fused_rms_norm_backward_native.h>)
#define FUSED_OP_HAS_ATEN_RMS_NORM
#include <ATen/ops/_fused_rms_norm_backward_native.h>
#include <ATen/ops/_fused_rms_norm_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#endif

namespace fused_op {
namespace {

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;

// --- Counting ------------------------------------------------------------------------------------

enum Op { kLayerNormForward, kLayerNormBackward, kRmsNormForward, kRmsNormBackward };
constexpr std::array kOpNames = {"native_layer_norm", "native_layer_norm_backward",
                                 "_fused_rms_norm", "_fused_rms_norm_backward"};

std::array<std::atomic<std::int64_t>, kOpNames.size()> taken{};
std::mutex kept_mutex;
CallCounts& kept() {
  static CallCounts counts;  // NOLINT: lives as long as the process
  return counts;
}

constexpr const char* kDisabled = "inside fused_op.disabled()";

// Counts a call that PyTorch's kernel takes, and warns once for each reason.
void keep(Op op, const std::string& reason) {
  const std::string key = std::string(kOpNames[op]) + ": " + reason;
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(kept_mutex);
    is_first = kept()[key]++ == 0;
  }
  if (is_first && reason != kDisabled) {
    TORCH_WARN("fused_op.override_torch: PyTorch's own kernel takes calls of aten::", key);
  }
}

// --- What our kernels take -----------------------------------------------------------------------

// PyTorch's rule: parameters have the dtype of the rows, or are f32 beside 16-bit rows.
bool fits(const at::Tensor& input, const OptionalTensor& parameter) {
  return !parameter ||
         (parameter->layout() == at::kStrided && parameter->device() == input.device() &&
          is_supported_pair(input.scalar_type(), parameter->scalar_type()));
}

bool has_shape(const OptionalTensor& parameter, at::IntArrayRef shape) {
  return !parameter || parameter->sizes() == shape;
}

// Why PyTorch's kernel takes a call; null if ours does. PyTorch's kernel reports a wrong call best.
const char* why_not(const at::Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps) {
  if (is_disabled()) {
    return kDisabled;
  }
  if (input.layout() != at::kStrided ||
      !is_supported_pair(input.scalar_type(), input.scalar_type())) {
    return "no kernel for the dtype or layout of the input";
  }
  const bool one_dtype = !weight || !bias || weight->scalar_type() == bias->scalar_type();
  if (!one_dtype || !fits(input, weight) || !fits(input, bias)) {
    return "no kernel for the dtypes of the parameters";
  }
  const auto ndim = static_cast<std::int64_t>(shape.size());
  if (ndim == 0 || input.dim() < ndim || input.sizes().slice(input.dim() - ndim) != shape ||
      !has_shape(weight, shape) || !has_shape(bias, shape)) {
    return "shapes that do not fit together";
  }
  return std::isfinite(eps) ? nullptr : "an eps that is not finite";
}

// Some C++ callers pass undefined tensors for absent ones.
OptionalTensor given(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

// The result of our kernel, or of PyTorch's if there is a reason or no kernel is available.
template <typename Ours, typename Torchs>
auto choose(Op op, const char* reason, const Ours& ours, const Torchs& torchs) {
  std::string why;
  if (reason == nullptr) {
    try {
      auto results = ours();
      taken[op].fetch_add(1, std::memory_order_relaxed);
      return results;
    } catch (const KernelError& error) {
      why = error.what();
    }
  } else {
    why = reason;
  }
  auto results = torchs();
  keep(op, why);
  return results;
}

// --- Statistics ----------------------------------------------------------------------------------

// The leading sizes of x, and 1 for each normalised dimension.
c10::SmallVector<std::int64_t, 6> stats_sizes(const at::Tensor& x, std::size_t ndim) {
  c10::SmallVector<std::int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  std::fill(sizes.end() - static_cast<std::ptrdiff_t>(ndim), sizes.end(), 1);
  return sizes;
}

// A tensor of its own, which shares the memory.
at::Tensor part_of(const at::Tensor& tensor, std::int64_t offset, at::IntArrayRef sizes) {
  at::Tensor part = at::detail::make_tensor<at::TensorImpl>(c10::Storage(tensor.storage()),
                                                            tensor.key_set(), tensor.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(offset);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

// One row of the statistics, as PyTorch's ops return it. All rows share one allocation, and
// backward finds it again without a copy.
at::Tensor stats_row(const at::Tensor& stats, std::int64_t row, at::IntArrayRef sizes,
                     at::ScalarType dtype) {
  const at::Tensor one = part_of(stats, row * stats.size(1), sizes);
  return one.scalar_type() == dtype ? one : one.to(dtype);
}

// PyTorch keeps the statistics of 16-bit rows in 16 bits on the CPU, unless the parameters are f32.
at::ScalarType torch_stats_dtype(const at::Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& bias) {
  const OptionalTensor& parameter = weight ? weight : bias;
  const bool is_mixed = parameter && parameter->scalar_type() != input.scalar_type();
  return input.is_cpu() && !is_mixed ? input.scalar_type() : stats_dtype(input.scalar_type());
}

// [2, rows] of mean and rstd.
at::Tensor joined_stats(const at::Tensor& mean, const at::Tensor& rstd, at::ScalarType dtype) {
  const std::int64_t rows = mean.numel();
  if (mean.scalar_type() == dtype && rstd.scalar_type() == dtype && mean.is_contiguous() &&
      rstd.is_contiguous() && mean.storage().is_alias_of(rstd.storage()) &&
      rstd.storage_offset() == mean.storage_offset() + rows) {
    return part_of(mean, mean.storage_offset(), {2, rows});
  }
  const at::Tensor both = backend::empty({2, rows}, dtype, mean.device());
  both.select(0, 0).copy_(mean.reshape({rows}));
  both.select(0, 1).copy_(rstd.reshape({rows}));
  return both;
}

// --- The ops -------------------------------------------------------------------------------------

ThreeTensors run_forward(NormKind norm, const at::Tensor& input, at::IntArrayRef shape,
                         const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  NormOptions options;
  options.norm = norm;
  options.normalized_ndim = static_cast<std::int64_t>(shape.size());
  options.eps = eps;
  options.save_stats = true;
  return route_norm_forward({input, std::nullopt, weight, bias, std::nullopt}, options);
}

FourTensors run_backward(NormKind norm, const at::Tensor& grad, const at::Tensor& input,
                         at::IntArrayRef shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, const at::Tensor& stats,
                         std::array<bool, 4> wanted) {
  const OptionalTensor& parameter = weight ? weight : bias;
  BackwardOptions options;
  options.norm = norm;
  options.normalized_ndim = static_cast<std::int64_t>(shape.size());
  options.input_dtype = input.scalar_type();
  options.param_dtype = parameter ? parameter->scalar_type() : input.scalar_type();
  options.wanted = wanted;
  return route_norm_backward({grad, std::nullopt, input, weight, bias, stats, std::nullopt},
                             options);
}

// Why our kernel cannot take a gradient and statistics; null if it can.
const char* why_not_backward(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& rstd) {
  const bool fits_input = grad.layout() == at::kStrided &&
                          grad.scalar_type() == input.scalar_type() &&
                          grad.sizes() == input.sizes() && grad.device() == input.device();
  const bool is_usual = fits_input && rstd.device() == input.device();
  return is_usual ? nullptr : "a gradient or statistics that do not fit the input";
}

using LayerNorm = Three(const at::Tensor&, at::IntArrayRef, const OptionalTensor&,
                        const OptionalTensor&, double);
using LayerNormBackward = Three(const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                const OptionalTensor&, std::array<bool, 3>);

template <LayerNorm* kTorch>
Three layer_norm(const at::Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight_or,
                 const OptionalTensor& bias_or, double eps) {
  const OptionalTensor weight = given(weight_or), bias = given(bias_or);
  const auto ours = [&]() -> Three {
    auto [output, sum, stats] = run_forward(NormKind::kLayerNorm, input, shape, weight, bias, eps);
    const auto sizes = stats_sizes(input, shape.size());
    const at::ScalarType dtype = torch_stats_dtype(input, weight, bias);
    return {output, stats_row(stats, 0, sizes, dtype), stats_row(stats, 1, sizes, dtype)};
  };
  return choose(kLayerNormForward, why_not(input, shape, weight, bias, eps), ours,
                [&] { return kTorch(input, shape, weight, bias, eps); });
}

template <LayerNormBackward* kTorch>
Three layer_norm_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef shape,
                          const at::Tensor& mean, const at::Tensor& rstd,
                          const OptionalTensor& weight_or, const OptionalTensor& bias_or,
                          std::array<bool, 3> mask) {
  const OptionalTensor weight = given(weight_or), bias = given(bias_or);
  const char* reason = why_not(input, shape, weight, bias, /*eps=*/0);
  reason = reason != nullptr ? reason : why_not_backward(grad, input, rstd);
  const auto ours = [&]() -> Three {
    const at::Tensor stats = joined_stats(mean, rstd, stats_dtype(input.scalar_type()));
    auto [grad_input, unused, grad_weight, grad_bias] =
        run_backward(NormKind::kLayerNorm, grad, input, shape, weight, bias, stats,
                     {mask[0], false, mask[1] && weight, mask[2] && bias});
    return {grad_input, grad_weight, grad_bias};
  };
  return choose(kLayerNormBackward, reason, ours,
                [&] { return kTorch(grad, input, shape, mean, rstd, weight, bias, mask); });
}

#ifdef FUSED_OP_HAS_ATEN_RMS_NORM

using RmsNorm = Two(const at::Tensor&, at::IntArrayRef, const OptionalTensor&,
                    std::optional<double>);
using RmsNormBackward = Two(const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                            const at::Tensor&, const OptionalTensor&, std::array<bool, 2>);

double eps_of(const at::Tensor& input, std::optional<double> eps) {
  return eps.value_or(input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                         : std::numeric_limits<float>::epsilon());
}

template <RmsNorm* kTorch>
Two rms_norm(const at::Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight_or,
             std::optional<double> eps) {
  const OptionalTensor weight = given(weight_or);
  const auto ours = [&]() -> Two {
    auto [output, sum, stats] =
        run_forward(NormKind::kRmsNorm, input, shape, weight, std::nullopt, eps_of(input, eps));
    return {output, stats_row(stats, 0, stats_sizes(input, shape.size()), stats.scalar_type())};
  };
  return choose(kRmsNormForward, why_not(input, shape, weight, std::nullopt, eps.value_or(0)), ours,
                [&] { return kTorch(input, shape, weight, eps); });
}

template <RmsNormBackward* kTorch>
Two rms_norm_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef shape,
                      const at::Tensor& rstd, const OptionalTensor& weight_or,
                      std::array<bool, 2> mask) {
  const OptionalTensor weight = given(weight_or);
  const char* reason = why_not(input, shape, weight, std::nullopt, /*eps=*/0);
  reason = reason != nullptr ? reason : why_not_backward(grad, input, rstd);
  const auto ours = [&]() -> Two {
    const at::Tensor stats =
        rstd.to(stats_dtype(input.scalar_type())).contiguous().view({1, rstd.numel()});
    auto [grad_input, unused, grad_weight, grad_bias] =
        run_backward(NormKind::kRmsNorm, grad, input, shape, weight, std::nullopt, stats,
                     {mask[0], false, mask[1] && weight, false});
    return {grad_input, grad_weight};
  };
  return choose(kRmsNormBackward, reason, ours,
                [&] { return kTorch(grad, input, shape, rstd, weight, mask); });
}

// The last dimensions: as many as `count`.
c10::SmallVector<std::int64_t, 6> trailing_dims(std::size_t count) {
  c10::SmallVector<std::int64_t, 6> dims;
  for (std::size_t i = 0; i < count; ++i) {
    dims.push_back(-static_cast<std::int64_t>(i) - 1);
  }
  return dims;
}

// On the CPU, PyTorch has no kernel for the RMS norm. It runs this formula, and its derivative is
// that of the formula's operations. Once overridden, the op needs a derivative of its own.
Two formula(const at::Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
            std::optional<double> eps) {
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported_pair(dtype, dtype), "\"rms_norm\" not implemented for '",
                              dtype, "'");
  const at::Tensor x = input.to(stats_dtype(dtype));
  const at::Tensor rstd = at::rsqrt(
      x.pow(2).mean(trailing_dims(shape.size()), /*keepdim=*/true).add(eps_of(input, eps)));
  at::Tensor output = x.mul(rstd);
  output = weight ? output.mul(*weight) : output;
  return {output.to(dtype), rstd};
}

Two formula_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef shape,
                     const at::Tensor& rstd, const OptionalTensor& weight,
                     std::array<bool, 2> mask) {
  const at::ScalarType dtype = stats_dtype(input.scalar_type());
  const auto dims = trailing_dims(shape.size());
  const at::Tensor normalized = input.to(dtype).mul(rstd), dy = grad.to(dtype);
  at::Tensor grad_input, grad_weight;
  if (mask[0]) {
    const at::Tensor scaled = weight ? dy.mul(*weight) : dy;
    const at::Tensor mean = scaled.mul(normalized).mean(dims, /*keepdim=*/true);
    grad_input = scaled.sub(normalized.mul(mean)).mul(rstd).to(input.scalar_type());
  }
  if (mask[1] && weight) {
    grad_weight = dy.mul(normalized).sum_to_size(shape).to(weight->scalar_type());
  }
  return {grad_input, grad_weight};
}

#endif

// --- The switch ----------------------------------------------------------------------------------

std::vector<torch::Library>& registered() {
  static std::vector<torch::Library> libraries;
  return libraries;
}

torch::Library& open_library(c10::DispatchKey key) {
  return registered().emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

// Silences the dispatcher's warning about an overridden kernel: overriding is what was asked for.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

std::vector<std::string> override_torch() {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  torch::Library& cpu = open_library(c10::DispatchKey::CPU);
  cpu.impl(kOpNames[0], TORCH_FN(layer_norm<at::native::layer_norm_cpu>));
  cpu.impl(kOpNames[1], TORCH_FN(layer_norm_backward<at::native::layer_norm_backward_cpu>));
#ifdef FUSED_OP_HAS_ATEN_RMS_NORM
  cpu.impl(kOpNames[2], TORCH_FN(rms_norm<formula>));
  cpu.impl(kOpNames[3], TORCH_FN(rms_norm_backward<formula_backward>));
#endif
#ifdef FUSED_OP_WITH_CUDA
  torch::Library& cuda = open_library(c10::DispatchKey::CUDA);
  cuda.impl(kOpNames[0], TORCH_FN(layer_norm<at::native::layer_norm_cuda>));
  cuda.impl(kOpNames[1], TORCH_FN(layer_norm_backward<at::native::layer_norm_backward_cuda>));
#ifdef FUSED_OP_HAS_ATEN_RMS_NORM
  cuda.impl(kOpNames[2], TORCH_FN(rms_norm<at::native::_fused_rms_norm_cuda>));
  cuda.impl(kOpNames[3], TORCH_FN(rms_norm_backward<at::native::_fused_rms_norm_backward_cuda>));
#endif
#endif
#ifdef FUSED_OP_HAS_ATEN_RMS_NORM
  return {kOpNames.begin(), kOpNames.end()};
#else
  return {kOpNames[0], kOpNames[1]};
#endif
}

void restore_torch() { registered().clear(); }

std::pair<CallCounts, CallCounts> override_counts() {
  CallCounts ours;
  for (std::size_t op = 0; op < kOpNames.size(); ++op) {
    ours[kOpNames[op]] = taken[op].load(std::memory_order_relaxed);
  }
  const std::lock_guard<std::mutex> lock(kept_mutex);
  return {ours, kept()};
}

}  // namespace fused_op
