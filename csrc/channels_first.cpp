// LayerNorm and RMSNorm over the channels of images, [samples, channels, *spatial], which lie as
// planes: dimension 1 is normalised where it is. fused_op/_channels_first.py hands images whose
// channels are innermost to the norms of rows.
#include "core/channels_first.h"

#include "backend.h"
#include "checks.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

struct Images {
  const at::Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
};

struct ImageOptions {
  NormKind norm;  // with a bias, whether there is one or not
  bool silu;
};

ImageOptions parse_options(std::string_view norm, std::optional<std::string_view> activation) {
  const bool silu = parse_silu(activation);
  const NormKind kind = parse_norm(norm);
  return {kind == NormKind::kRmsNorm ? NormKind::kBiasedRmsNorm : kind, silu};
}

const char* op_name(const ImageOptions& options) {
  return options.norm == NormKind::kLayerNorm ? "fused_channels_first_layer_norm"
                                              : "fused_channels_first_rms_norm";
}

// How many rows, which are pixels, and columns, which are channels.
struct ImageShape {
  explicit ImageShape(const at::Tensor& input)
      : channels(input.size(1)),
        pixels(c10::multiply_integers(input.sizes().slice(2))),
        rows(input.size(0) * pixels) {}

  std::int64_t channels;
  std::int64_t pixels;  // of a channel
  std::int64_t rows;

  bool empty() const { return rows == 0 || channels == 0; }
};

ImageShape check_images(const char* op, const Images& images) {
  const at::Tensor& input = images.input;
  check_rows(op, "input", input);
  TORCH_CHECK(input.dim() >= 2, op,
              ": input must have at least two dimensions, [N, C, *spatial], got shape ",
              input.sizes());
  const std::array<std::int64_t, 1> channels{input.size(1)};
  check_param_kind(op, "weight", images.weight, input);
  check_param_kind(op, "bias", images.bias, input);
  check_param_shape(op, "weight", images.weight, channels, input);
  check_param_shape(op, "bias", images.bias, channels, input);
  return ImageShape(input);
}

void check_image_memory(const char* op, const Images& images) {
  check_all_memory(op, {{"input", &images.input},
                        {"weight", pointer_to(images.weight)},
                        {"bias", pointer_to(images.bias)}});
}

at::ScalarType param_dtype_of(const Images& images) {
  return kernel_param_dtype(images.input.scalar_type(), images.weight, images.bias);
}

// What forward and backward fill in alike.
template <typename Args>
void fill(Args& args, const ImageShape& shape, const ImageOptions& options, const Images& images,
          const Parameters& parameters, at::ScalarType param_dtype) {
  args.kind = options.norm;
  args.dtype = to_dtype(images.input.scalar_type());
  args.param_dtype = to_dtype(param_dtype);
  args.rows = shape.rows;
  args.cols = shape.channels;
  args.pixels = shape.pixels;
  args.silu = options.silu;
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
}

ConstRows planes(const at::Tensor& readable, const ImageShape& shape) {
  return {readable.const_data_ptr(), to_dtype(readable.scalar_type()), shape.channels, {}};
}

std::tuple<at::Tensor, at::Tensor> channels_first_forward(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    std::string_view norm, double eps, std::optional<std::string_view> activation,
    bool save_stats) {
  const ImageOptions options = parse_options(norm, activation);
  const char* const op = op_name(options);
  check_eps(op, eps);
  const Images images{input, weight, bias};
  const ImageShape shape = check_images(op, images);
  const at::ScalarType dtype = input.scalar_type();
  const at::Tensor output = backend::empty(input.sizes(), dtype, input.device());
  const at::Tensor stats = backend::empty_if(save_stats, {stats_rows(options.norm), shape.rows},
                                             stats_dtype(dtype), input.device());
  if (shape.empty()) {
    return {output, save_stats ? stats.zero_() : nothing_like(input)};
  }
  check_image_memory(op, images);
  const Borrowed readable = readable_dense(input, input.element_size());
  const at::ScalarType param_dtype = param_dtype_of(images);
  const Parameters parameters(weight, bias, false, param_dtype);
  ChannelsFirstForwardArgs args;
  fill(args, shape, options, images, parameters, param_dtype);
  args.input = planes(*readable, shape);
  args.output = {pointer(output), args.dtype};
  args.stats = pointer(stats);
  args.eps = eps;
  backend::channels_first_forward(args, input.device());
  return {output, or_nothing(stats, input)};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Everything is checked.
Gradients run_backward(const at::Tensor& grad_output, const Images& images, const at::Tensor& stats,
                       const ImageShape& shape, const ImageOptions& options,
                       std::array<bool, 3> wanted) {
  const at::Tensor& input = images.input;
  const at::ScalarType param_dtype = param_dtype_of(images);
  const at::IntArrayRef channels = input.sizes().slice(1, 1);
  const at::Device device = input.device();
  const at::Tensor grad_input =
      backend::empty_if(wanted[0], input.sizes(), input.scalar_type(), device);
  const at::Tensor grad_weight = backend::empty_if(wanted[1], channels, param_dtype, device);
  const at::Tensor grad_bias = backend::empty_if(wanted[2], channels, param_dtype, device);
  if (shape.empty()) {
    for (const at::Tensor& sums : {grad_weight, grad_bias}) {
      if (sums.defined()) {
        sums.zero_();
      }
    }
    return {grad_input, grad_weight, grad_bias};
  }
  const Borrowed x = readable_dense(input, input.element_size());
  const Borrowed dy = readable_dense(grad_output, grad_output.element_size());
  const Borrowed dense_stats = readable_dense(stats, stats.element_size());
  const Parameters parameters(images.weight, images.bias, false, param_dtype);
  ChannelsFirstBackwardArgs args;
  fill(args, shape, options, images, parameters, param_dtype);
  args.x = planes(*x, shape);
  args.grad_output = planes(*dy, shape);
  args.stats = dense_stats->const_data_ptr();
  args.grad_input = {pointer(grad_input), args.dtype};
  args.grad_residual.dtype = args.dtype;
  args.grad_weight = pointer(grad_weight);
  args.grad_bias = pointer(grad_bias);
  backend::channels_first_backward(args, input.device());
  return {grad_input, grad_weight, grad_bias};
}

Gradients channels_first_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  const at::Tensor& stats, std::string_view norm,
                                  std::optional<std::string_view> activation,
                                  std::array<bool, 3> wanted) {
  const char* const op = "fused_op::channels_first_backward";
  const ImageOptions options = parse_options(norm, activation);
  const Images images{input, weight, bias};
  const ImageShape shape = check_images(op, images);
  check_grad(op, "grad_output", grad_output, input);
  check_stats(op, stats, options.norm, input, shape.rows);
  if (!shape.empty()) {
    check_image_memory(op, images);
    check_memory(op, "grad_output", grad_output);
    check_memory(op, "stats", stats);
  }
  auto [grad_input, grad_weight, grad_bias] =
      run_backward(grad_output, images, stats, shape, options, wanted);
  const auto of = [&](const at::Tensor& gradient, const OptionalTensor& parameter) {
    return gradient.defined() ? gradient.to((parameter ? *parameter : input).scalar_type())
                              : nothing_like(parameter ? *parameter : input);
  };
  return {of(grad_input, {}), of(grad_weight, weight), of(grad_bias, bias)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "channels_first_forward(Tensor input, Tensor? weight, Tensor? bias, str norm, float "
              "eps, str? activation, bool save_stats) -> (Tensor output, Tensor stats)",
              &channels_first_forward);
  register_op(m,
              "channels_first_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? "
              "bias, Tensor stats, str norm, str? activation, bool[3] wanted) -> (Tensor "
              "grad_input, Tensor grad_weight, Tensor grad_bias)",
              &channels_first_backward);
}

}  // namespace fused_op
