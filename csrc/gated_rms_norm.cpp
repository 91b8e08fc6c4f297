// The gated RMS norm: the norm kernels with a gate before or after the norm. A kernel's row is one
// group of columns of a tensor's row.
#include <optional>

#include "backend.h"
#include "checks.h"
#include "core/gated_variant.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

// The arguments of both ops that are not tensors.
struct GatedOptions {
  std::optional<std::int64_t> group_size;  // none: all columns
  bool sigmoid;
  bool gate_first;
  bool zero_centered;
  Rounding rounding;
};

GatedOptions parse_options(std::optional<std::int64_t> group_size, std::string_view activation,
                           bool gate_first, bool zero_centered, std::string_view rounding) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "sigmoid",
                    "fused_gated_rms_norm: activation must be 'silu' or 'sigmoid', got '",
                    activation, "'");
  return {group_size, activation == "sigmoid", gate_first, zero_centered, parse_rounding(rounding)};
}

// Up to this size, kernels can take groups as rows of the tensor. Longer groups are computed one
// after the other.
constexpr std::int64_t kMostGroupBytes = 8192;

// [..., groups, group_size], or the tensor itself if there is one group.
at::Tensor grouped(const at::Tensor& tensor, std::optional<std::int64_t> group_size) {
  const std::int64_t cols = tensor.size(-1);
  const std::int64_t size = group_size.value_or(cols);
  return size == cols ? tensor : tensor.unflatten(-1, {cols / size, size});
}

void check_tensors(const char* op, const at::Tensor& input, const at::Tensor& gate,
                   const OptionalTensor& weight, const GatedOptions& options) {
  check_rows(op, "input", input);
  const Shape shape = checked_shape(op, input, 1);
  check_rows(op, "gate", gate);
  check_device(op, "gate", gate, input);
  check_same_shape(op, "gate", gate, input);
  check_precision(op, "gate", gate, input);
  check_param_kind(op, "weight", weight, input);
  check_param_shape(op, "weight", weight, shape.normalized, input);
  const std::int64_t size = options.group_size.value_or(shape.cols);
  TORCH_CHECK(size == shape.cols || (size > 0 && shape.cols % size == 0), op,
              ": group_size must divide the last dimension of input, ", shape.cols, ", got ", size);
  TORCH_CHECK(size == shape.cols || shape.rows * (shape.cols / size) < std::int64_t{1} << 31, op,
              ": there are more than 2^31 groups");
}

Gate make_gate(const at::Tensor& gate, const Shape& shape, const GatedOptions& options,
               std::int64_t groups) {
  Gate made;
  made.rows = const_rows(gate, shape);
  made.sigmoid = options.sigmoid;
  made.first = options.gate_first;
  made.groups = static_cast<int>(groups);
  made.group = RowSplit(static_cast<std::uint32_t>(groups), 0);
  return made;
}

// Whether the GPU computes one group after the other: groups that are too long, or not whole
// vectors, so that the weights of a group may begin at any address.
bool takes_in_turn(const at::Tensor& input, const at::Tensor& gate, const OptionalTensor& weight,
                   const Shape& shape) {
  if (!input.is_cuda() || input.size(-1) == shape.cols) {
    return false;
  }
  const auto is_whole = [&](const at::Tensor& of) {
    return shape.cols * of.element_size() % kVectorBytes == 0;
  };
  return shape.cols * input.element_size() > kMostGroupBytes || !is_whole(input) ||
         !is_whole(gate) || (weight && !is_whole(*weight));
}

OptionalTensor group_of(const OptionalTensor& weight, std::int64_t group, std::int64_t size) {
  return weight ? OptionalTensor(weight->narrow(0, group * size, size)) : std::nullopt;
}

using Results = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Everything has been checked.
void run_forward(const at::Tensor& input, const at::Tensor& gate, const OptionalTensor& weight,
                 const GatedOptions& options, double eps, const at::Tensor& output,
                 const at::Tensor& stats) {
  const Shape shape(input, 1);
  const RowAccess access = access_of({&input, &gate}, shape, kMostGroupBytes);
  const Borrowed rows = readable_rows(input, shape, access);
  const Borrowed gates = readable_rows(gate, shape, access);
  const at::ScalarType dtype = input.scalar_type();
  const at::ScalarType param_dtype =
      kernel_param_dtype(dtype, weight, std::nullopt, options.zero_centered);
  const Parameters parameters(weight, std::nullopt, options.zero_centered, param_dtype);

  GatedForwardArgs args;
  args.kind = NormKind::kRmsNorm;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(param_dtype);
  args.rounding = options.rounding;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(*rows, shape);
  args.weight = const_pointer(*parameters.weight);
  args.output = {pointer(output), args.dtype};
  args.stats = pointer(stats);
  args.eps = eps;
  args.gate = make_gate(*gates, shape, options, input.dim() > output.dim() ? input.size(-2) : 1);
  GatedVariant variant(args.gate, args.dtype, args.param_dtype, args.rounding);
  variant.split = args.input.split.inner != 0 || args.gate.rows.split.inner != 0;
  backend::norm_forward(args, input.device(), &variant);
}

Results forward(const at::Tensor& input, const at::Tensor& gate, const OptionalTensor& weight,
                const GatedOptions& options, double eps, bool save_stats) {
  const at::Tensor x = grouped(input, options.group_size);
  const Shape shape(x, 1);
  const at::Tensor output = backend::empty(input.sizes(), input.scalar_type(), input.device());
  const at::Tensor stats = backend::empty_if(save_stats, {1, shape.rows},
                                             stats_dtype(input.scalar_type()), input.device());
  if (shape.empty()) {
    return {output, save_stats ? stats.zero_() : nothing_like(input)};
  }
  if (!takes_in_turn(input, gate, weight, shape)) {
    run_forward(x, grouped(gate, options.group_size), weight, options, eps, output, stats);
    return {output, or_nothing(stats, input)};
  }
  const std::int64_t size = shape.cols;
  const std::int64_t groups = input.size(-1) / size;
  for (std::int64_t g = 0; g < groups; ++g) {
    const auto [part, part_stats] =
        forward(input.narrow(-1, g * size, size), gate.narrow(-1, g * size, size),
                group_of(weight, g, size), options, eps, save_stats);
    output.narrow(-1, g * size, size).copy_(part);
    if (save_stats) {
      stats.view({-1, groups}).select(1, g).copy_(part_stats.view(-1));
    }
  }
  return {output, or_nothing(stats, input)};
}

struct GatedTensors {
  const at::Tensor& grad_output;
  const at::Tensor& input;
  const at::Tensor& gate;
  const OptionalTensor& weight;
  const at::Tensor& stats;
};

// Everything has been checked, and the gradients that are wanted are allocated.
void run_backward(const GatedTensors& tensors, const GatedOptions& options,
                  const at::Tensor& grad_input, const at::Tensor& grad_gate,
                  const at::Tensor& grad_weight, at::ScalarType param_dtype) {
  const at::Tensor x = grouped(tensors.input, options.group_size);
  const at::Tensor z = grouped(tensors.gate, options.group_size);
  const at::Tensor dy = grouped(tensors.grad_output, options.group_size);
  const Shape shape(x, 1);
  const RowAccess access = access_of({&x, &z, &dy}, shape, kMostGroupBytes);
  const Borrowed rows = readable_rows(x, shape, access);
  const Borrowed gates = readable_rows(z, shape, access);
  const Borrowed grads = readable_rows(dy, shape, access);
  const Borrowed stats = readable_dense(tensors.stats, tensors.stats.element_size());
  const Parameters parameters(tensors.weight, std::nullopt, options.zero_centered, param_dtype);

  GatedBackwardArgs args;
  args.kind = NormKind::kRmsNorm;
  args.dtype = to_dtype(x.scalar_type());
  args.param_dtype = to_dtype(param_dtype);
  args.rounding = options.rounding;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.x = const_rows(*rows, shape);
  args.grad_output = const_rows(*grads, shape);
  args.weight = const_pointer(*parameters.weight);
  args.stats = stats->const_data_ptr();
  args.grad_input = {pointer(grad_input), args.dtype};
  args.grad_residual.dtype = args.dtype;
  args.grad_weight = pointer(grad_weight);
  args.gate = make_gate(*gates, shape, options, x.dim() > tensors.input.dim() ? x.size(-2) : 1);
  args.groups = args.gate.groups;
  args.grad_gate = {pointer(grad_gate), args.gate.rows.dtype};
  GatedVariant variant(args.gate, args.dtype, args.param_dtype, args.rounding);
  variant.split = args.x.split.inner != 0 || args.gate.rows.split.inner != 0 ||
                  args.grad_output.split.inner != 0;
  variant.grad_beside = args.grad_gate;
  backend::norm_backward(args, x.device(), &variant);
}

Gradients backward(const GatedTensors& tensors, const GatedOptions& options,
                   std::array<bool, 3> wanted) {
  const auto& [grad_output, input, gate, weight, stats] = tensors;
  const at::Device device = input.device();
  const at::ScalarType weight_dtype = given_dtype(weight, std::nullopt, input.scalar_type());
  const at::ScalarType param_dtype =
      kernel_param_dtype(input.scalar_type(), weight, std::nullopt, options.zero_centered);
  const at::Tensor grad_input =
      backend::empty_if(wanted[0], input.sizes(), input.scalar_type(), device);
  const at::Tensor grad_gate =
      backend::empty_if(wanted[1], gate.sizes(), gate.scalar_type(), device);
  const at::Tensor grad_weight =
      backend::empty_if(wanted[2], input.sizes().slice(input.dim() - 1), param_dtype, device);
  const at::Tensor x = grouped(input, options.group_size);
  const Shape shape(x, 1);
  if (shape.empty()) {
    if (wanted[2]) {
      grad_weight.zero_();
    }
  } else if (!takes_in_turn(input, gate, weight, shape)) {
    run_backward(tensors, options, grad_input, grad_gate, grad_weight, param_dtype);
  } else {
    const std::int64_t size = shape.cols;
    const std::int64_t groups = input.size(-1) / size;
    const auto part_of = [&](const at::Tensor& of, std::int64_t g) {
      return of.narrow(-1, g * size, size);
    };
    for (std::int64_t g = 0; g < groups; ++g) {
      const at::Tensor dy = part_of(grad_output, g), its_input = part_of(input, g),
                       its_gate = part_of(gate, g),
                       its_stats = stats.view({-1, groups}).select(1, g).reshape({1, -1});
      const OptionalTensor its_weight = group_of(weight, g, size);
      const auto [dx, dz, dweight] =
          backward({dy, its_input, its_gate, its_weight, its_stats}, options, wanted);
      for (const auto& [whole, part] :
           {std::tie(grad_input, dx), std::tie(grad_gate, dz), std::tie(grad_weight, dweight)}) {
        if (whole.defined()) {
          part_of(whole, g).copy_(part);
        }
      }
    }
  }
  return {grad_input, grad_gate,
          wanted[2] && grad_weight.scalar_type() != weight_dtype ? grad_weight.to(weight_dtype)
                                                                 : grad_weight};
}

Results gated_rms_norm_forward(const at::Tensor& input, const at::Tensor& gate,
                               const OptionalTensor& weight, double eps,
                               std::optional<std::int64_t> group_size, std::string_view activation,
                               bool gate_first, bool zero_centered, std::string_view rounding,
                               bool save_stats) {
  const char* const op = "fused_gated_rms_norm";
  const GatedOptions options =
      parse_options(group_size, activation, gate_first, zero_centered, rounding);
  check_eps(op, eps);
  check_tensors(op, input, gate, weight, options);
  check_all_memory(op, {{"input", &input}, {"gate", &gate}, {"weight", pointer_to(weight)}});
  return forward(input, gate, weight, options, eps, save_stats);
}

Gradients gated_rms_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                  const at::Tensor& gate, const OptionalTensor& weight,
                                  const at::Tensor& stats, std::optional<std::int64_t> group_size,
                                  std::string_view activation, bool gate_first, bool zero_centered,
                                  std::string_view rounding, std::array<bool, 3> wanted) {
  const char* const op = "fused_op::gated_rms_norm_backward";
  const GatedOptions options =
      parse_options(group_size, activation, gate_first, zero_centered, rounding);
  check_tensors(op, input, gate, weight, options);
  check_grad(op, "grad_output", grad_output, input);
  check_stats(op, stats, NormKind::kRmsNorm, input, Shape(grouped(input, group_size), 1).rows);
  check_all_memory(op, {{"grad_output", &grad_output},
                        {"input", &input},
                        {"gate", &gate},
                        {"stats", &stats},
                        {"weight", pointer_to(weight)}});
  return or_nothing(backward({grad_output, input, gate, weight, stats}, options, wanted), input);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "gated_rms_norm_forward(Tensor input, Tensor gate, Tensor? weight, float eps, int? "
              "group_size, str activation, bool gate_first, bool zero_centered, str rounding, bool "
              "save_stats) -> (Tensor output, Tensor stats)",
              &gated_rms_norm_forward);
  register_op(m,
              "gated_rms_norm_backward(Tensor grad_output, Tensor input, Tensor gate, Tensor? "
              "weight, Tensor stats, int? group_size, str activation, bool gate_first, bool "
              "zero_centered, str rounding, bool[3] wanted) -> (Tensor grad_input, Tensor "
              "grad_gate, Tensor grad_weight)",
              &gated_rms_norm_backward);
}

}  // namespace fused_op
