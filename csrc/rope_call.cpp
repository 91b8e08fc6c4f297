#include "rope_call.h"

#include <algorithm>

#include "backend.h"
#include "checks.h"
#include "core/rope_variant.h"
#include "kernel_arguments.h"

namespace fused_op {
namespace {

// The longest heads that kernels read at two strides. Longer ones are copied.
constexpr std::int64_t kMostHeadBytes = 8192;

void check_angles(const char* op, const char* name, const at::Tensor& angles,
                  const at::Tensor& input) {
  check_rows(op, name, angles);
  check_device(op, name, angles, input);
  TORCH_CHECK(angles.dim() > 0, op, ": ", name,
              " must have at least one dimension, got a 0-dim tensor");
  const at::IntArrayRef tokens = input.sizes().slice(0, input.dim() - 2);
  at::IntArrayRef sizes = angles.sizes().slice(0, angles.dim() - 1);
  while (!sizes.empty() && sizes.front() == 1) {
    sizes = sizes.slice(1);
  }
  TORCH_CHECK(sizes.size() <= tokens.size() && sizes == tokens.slice(tokens.size() - sizes.size()),
              op, ": ", name, " must have shape [..., rotary_dim / 2] with the last of the sizes ",
              tokens, " in front (input without heads and head_dim), got ", angles.sizes());
  TORCH_CHECK(2 * angles.size(-1) <= input.size(-1), op, ": ", name,
              " rotates twice its last dimension, ", 2 * angles.size(-1),
              " columns, and a head has ", input.size(-1));
}

// cos or sin, as one row for each token. The kernel arguments point into `readable`.
struct AngleRows {
  at::Tensor readable;
  ConstRows rows;

  explicit AngleRows(const at::Tensor& angles) : readable(angles) {
    // A dimension that is broadcast repeats the same rows.
    while (readable.dim() > 1 && (readable.size(0) == 1 || readable.stride(0) == 0)) {
      readable = readable.select(0, 0);
    }
    const at::IntArrayRef sizes = readable.sizes();
    readable =
        readable.reshape({c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
    if (readable.size(1) > 1 && readable.stride(1) != 1) {
      readable = readable.contiguous();
    }
    rows = {readable.const_data_ptr(), to_dtype(readable.scalar_type()), readable.stride(0),
            RowSplit(static_cast<std::uint32_t>(readable.size(0)), 0)};
  }

  bool lie_as(const AngleRows& other) const {
    return readable.size(0) == other.readable.size(0) && rows.stride == other.rows.stride;
  }
};

// Whether the GPU computes one head after the other: heads with weights of their own that are too
// long, or not whole vectors, so that a weight may begin at any address.
bool takes_in_turn(const HeadTensors& heads) {
  const at::Tensor& rows = heads.rows;
  if (!rows.is_cuda() || !heads.has_own_weights()) {
    return false;
  }
  const std::int64_t cols = rows.size(-1);
  return cols * rows.element_size() > kMostHeadBytes ||
         cols * rows.element_size() % kVectorBytes != 0 ||
         cols * heads.weight->element_size() % kVectorBytes != 0;
}

at::ScalarType param_dtype_of(const HeadTensors& heads, const RopeOptions& options) {
  return kernel_param_dtype(heads.rows.scalar_type(), heads.weight, std::nullopt,
                            options.zero_centered);
}

// What both directions read. Everything has been checked, and there are elements.
template <typename Args>
struct Call {
  at::ScalarType param_dtype;
  Parameters parameters;
  AngleRows cos;
  AngleRows sin;
  Args args;

  Call(const HeadTensors& heads, const Turn& turn, const RopeOptions& options)
      : param_dtype(param_dtype_of(heads, options)),
        parameters(heads.weight, std::nullopt, options.zero_centered, param_dtype),
        cos(turn.cos),
        sin(turn.sin) {
    if (!sin.lie_as(cos)) {
      cos = AngleRows(turn.cos.contiguous());
      sin = AngleRows(turn.sin.contiguous());
    }
    const Shape shape(heads.rows, 1);
    args.kind = NormKind::kRmsNorm;
    args.dtype = to_dtype(heads.rows.scalar_type());
    args.param_dtype = to_dtype(param_dtype);
    args.rounding = options.rounds_xhat ? Rounding::kBeforeWeight : Rounding::kOnce;
    args.rows = shape.rows;
    args.cols = shape.cols;
    args.weight = const_pointer(*parameters.weight);
    args.rotation = make_rotation(
        {cos.rows, sin.rows.data, static_cast<int>(cos.readable.size(1)), options.adjacent},
        heads.heads(), heads.has_own_weights(), options.rounds_xhat, options.rounds_norm, args);
  }
};

HeadTensors one_head(const HeadTensors& heads, const OptionalTensor& weight, std::int64_t number) {
  return {heads.rows.narrow(-2, number, 1), heads.weight_name, weight};
}

// Whether kernels write the gradient of the rows in place: on the GPU, in vectors.
bool takes_gradient(const at::Tensor& rows) {
  const auto in_vectors = [&](std::int64_t elements) {
    return elements * rows.element_size() % kVectorBytes == 0;
  };
  const at::IntArrayRef strides = rows.strides().slice(0, rows.dim() - 1);
  return rows.is_cpu() || rows.is_contiguous() ||
         (reinterpret_cast<std::uintptr_t>(rows.const_data_ptr()) % kVectorBytes == 0 &&
          std::all_of(strides.begin(), strides.end(), in_vectors));
}

}  // namespace

RopeOptions parse_rope_options(const char* op, std::string_view style, bool zero_centered,
                               std::string_view rounding, double eps) {
  TORCH_CHECK_VALUE(style == "neox" || style == "gptj", op,
                    ": style must be 'neox' or 'gptj', got '", style, "'");
  TORCH_CHECK_VALUE(
      rounding == "once" || rounding == "before_rotation" || rounding == "before_weight", op,
      ": rounding must be 'once', 'before_rotation' or 'before_weight', got '", rounding, "'");
  check_eps(op, eps);
  return {style == "gptj", zero_centered, rounding == "before_weight",
          rounding == "before_rotation", eps};
}

void check_heads(const char* op, const HeadTensors& heads) {
  const at::Tensor& rows = heads.rows;
  check_param_kind(op, heads.weight_name, heads.weight, rows);
  if (heads.weight) {
    const at::IntArrayRef sizes = heads.weight->sizes();
    TORCH_CHECK(
        sizes == rows.sizes().slice(rows.dim() - 1) || sizes == rows.sizes().slice(rows.dim() - 2),
        op, ": Expected ", heads.weight_name, " of shape [", rows.size(-1), "] or [", rows.size(-2),
        ", ", rows.size(-1), "], one number for each column of a head or of all heads, but got ",
        heads.weight_name, " of shape ", sizes);
  }
  TORCH_CHECK(rows.numel() / std::max<std::int64_t>(rows.size(-1), 1) < std::int64_t{1} << 31, op,
              ": there are more than 2^31 heads");
}

void check_turn(const char* op, const Turn& turn, const at::Tensor& input) {
  check_angles(op, "cos", turn.cos, input);
  check_angles(op, "sin", turn.sin, input);
  TORCH_CHECK(turn.sin.sizes() == turn.cos.sizes(), op, ": sin must have the shape of cos, ",
              turn.cos.sizes(), ", got ", turn.sin.sizes());
  TORCH_CHECK(turn.cos.scalar_type() == turn.sin.scalar_type(), op,
              ": sin must have the dtype of cos, ", turn.cos.scalar_type(), ", got ",
              turn.sin.scalar_type());
}

void rope_forward(const HeadTensors& heads, const Turn& turn, const RopeOptions& options,
                  const at::Tensor& output, const at::Tensor& stats) {
  if (takes_in_turn(heads)) {
    for (std::int64_t h = 0; h < heads.heads(); ++h) {
      const OptionalTensor weight = heads.weight->select(0, h);
      const HeadTensors one = one_head(heads, weight, h);
      const at::Tensor part =
          backend::empty(one.rows.sizes(), output.scalar_type(), output.device());
      const at::Tensor part_stats =
          stats.defined()
              ? backend::empty({stats.numel() / heads.heads()}, stats.scalar_type(), stats.device())
              : at::Tensor();
      rope_forward(one, turn, options, part, part_stats);
      output.narrow(-2, h, 1).copy_(part);
      if (stats.defined()) {
        stats.view({-1, heads.heads()}).select(1, h).copy_(part_stats);
      }
    }
    return;
  }
  const Shape shape(heads.rows, 1);
  const Borrowed rows =
      readable_rows(heads.rows, shape, {.may_be_split = true, .most_split_bytes = kMostHeadBytes});
  Call<RopeForwardArgs> call(heads, turn, options);
  RopeForwardArgs& args = call.args;
  args.input = const_rows(*rows, shape);
  args.output = {pointer(output), args.dtype};
  args.stats = pointer(stats);
  args.eps = options.eps;
  set_packs(args.rotation, {args.input}, args.cols);
  RopeVariant variant(args.rotation, args.dtype, args.param_dtype, args.cols, args.rounding);
  variant.split = args.input.split.inner != 0;
  backend::norm_forward(args, output.device(), &variant);
}

void rope_backward(const at::Tensor& grad_output, const HeadTensors& heads, const Turn& turn,
                   const RopeOptions& options, const at::Tensor& stats,
                   const HeadGradients& gradients) {
  if (takes_in_turn(heads)) {
    for (std::int64_t h = 0; h < heads.heads(); ++h) {
      const OptionalTensor weight = heads.weight->select(0, h);
      const auto part_of = [&](const at::Tensor& of, std::int64_t dim) {
        return of.defined() ? of.narrow(dim, h, 1) : of;
      };
      rope_backward(grad_output.narrow(-2, h, 1), one_head(heads, weight, h), turn, options,
                    stats.view({-1, heads.heads()}).select(1, h).contiguous(),
                    {part_of(gradients.rows, -2), part_of(gradients.weight, 0)});
    }
    return;
  }
  const at::Tensor& x = heads.rows;
  const Shape shape(x, 1);
  const RowAccess access = access_of({&x, &grad_output}, shape, kMostHeadBytes);
  const Borrowed rows = readable_rows(x, shape, access);
  const Borrowed grads = readable_rows(grad_output, shape, access);
  const Borrowed dense_stats = readable_dense(stats, stats.element_size());
  at::Tensor grad_rows = gradients.rows;
  if (grad_rows.defined() && !takes_gradient(grad_rows)) {
    grad_rows = backend::empty(x.sizes(), x.scalar_type(), x.device());
  }

  Call<RopeBackwardArgs> call(heads, turn, options);
  RopeBackwardArgs& args = call.args;
  at::Tensor grad_weight = gradients.weight;
  if (grad_weight.defined() &&
      (grad_weight.scalar_type() != call.param_dtype || grad_weight.storage_offset() != 0)) {
    grad_weight = backend::empty(grad_weight.sizes(), call.param_dtype, x.device());
  }
  args.x = const_rows(*rows, shape);
  args.grad_output = const_rows(*grads, shape);
  args.stats = dense_stats->const_data_ptr();
  args.grad_input = {pointer(grad_rows), args.dtype};
  args.grad_residual.dtype = args.dtype;
  args.grad_stride = args.cols;
  if (grad_rows.defined()) {
    const ConstRows places = const_rows(grad_rows, shape);
    args.grad_stride = places.stride;
    args.grad_split = places.split;
  }
  args.grad_weight = pointer(grad_weight);
  args.groups = args.rotation.groups;
  set_packs(args.rotation, {args.x, args.grad_output}, args.cols);
  RopeVariant variant(args.rotation, args.dtype, args.param_dtype, args.cols, args.rounding);
  variant.split = args.x.split.inner != 0 || args.grad_output.split.inner != 0;
  backend::norm_backward(args, x.device(), &variant);
  if (grad_rows.defined() && !grad_rows.is_same(gradients.rows)) {
    gradients.rows.copy_(grad_rows);
  }
  if (grad_weight.defined() && !grad_weight.is_same(gradients.weight)) {
    gradients.weight.copy_(grad_weight);
  }
}

}  // namespace fused_op
