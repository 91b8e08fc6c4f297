// The RMS norm of a branch, its addition to the residual, and the RMS norm of the sum: what stands
// between two blocks of Gemma. Also the first two without the third, as in OLMo 2. Each norm has
// the arguments and the bits of norm.cpp.
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>

#include "backend.h"
#include "checks.h"
#include "core/post_add_pre.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

struct Rows {
  const at::Tensor& input;
  const at::Tensor& residual;
  const OptionalTensor& post_weight;
  const OptionalTensor& pre_weight;
};

Shape check(const char* op, const Rows& rows, const NormOptions& options, const char* post_name) {
  const NormTensors tensors{rows.input, rows.residual, {}, {}, {}};
  check_kinds(op, tensors, options);
  const Shape shape = checked_shape(op, rows.input, 1);
  check_call(op, tensors, options, shape);
  check_param_kind(op, post_name, rows.post_weight, rows.input);
  check_param_kind(op, "pre_weight", rows.pre_weight, rows.input);
  check_param_shape(op, post_name, rows.post_weight, shape.normalized, rows.input);
  check_param_shape(op, "pre_weight", rows.pre_weight, shape.normalized, rows.input);
  if (!shape.empty()) {
    check_memory(op, tensors);
    check_memory(op, post_name, rows.post_weight);
    check_memory(op, "pre_weight", rows.pre_weight);
  }
  return shape;
}

// The norm of the branch in a kernel of its own, then the rest.
void run_in_turn(PostAddPreForwardArgs& args, const Rows& rows, at::Tensor sum) {
  const at::Device device = rows.input.device();
  const at::Tensor branch = backend::empty(rows.input.sizes(), rows.input.scalar_type(), device);
  args.post.output.data = pointer(branch);
  backend::norm_forward(args.post, device);
  if (args.output.data == nullptr) {
    at::add_out(sum, rows.residual.to(sum.scalar_type()), branch);
    return;
  }
  args.input = {branch.const_data_ptr(), args.post.dtype, args.cols, {}};
  backend::norm_forward(args, device);
}

using ForwardResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Returns output, sum and statistics. If only the sum is wanted, the output is undefined and the
// statistics are those of the branch.
ForwardResults run_forward(const Rows& rows, const NormOptions& options, const Shape& shape,
                           bool only_sum) {
  const at::Tensor& input = rows.input;
  const at::Device device = input.device();
  const at::ScalarType dtype = options.sum_dtype.value_or(rows.residual.scalar_type());
  const at::Tensor sum = backend::empty(input.sizes(), dtype, device);
  const at::Tensor output =
      backend::empty_if(!only_sum, input.sizes(), input.scalar_type(), device);
  const at::Tensor stats = backend::empty_if(options.save_stats, {only_sum ? 1 : 2, shape.rows},
                                             stats_dtype(dtype), device);
  if (shape.empty()) {
    return {output, sum, options.save_stats ? stats.zero_() : nothing_like(input)};
  }
  const Borrowed readable = readable_rows(input, shape, {});  // for both norms
  const NormTensors post_tensors{*readable, {}, rows.post_weight, {}, {}};
  const NormTensors pre_tensors{*readable, rows.residual, rows.pre_weight, {}, {}};
  const ForwardInputs post(post_tensors, options, shape, input.scalar_type());
  const ForwardInputs pre(pre_tensors, options, shape, dtype);
  PostAddPreForwardArgs args{pre.args, post.args};
  args.input = {.dtype = args.post.dtype};
  args.output = {pointer(output), args.post.dtype};
  args.sum = pointer(sum);
  args.post.output.dtype = args.post.dtype;
  args.post.stats = pointer(stats);
  if (options.save_stats && !only_sum) {
    args.stats = static_cast<char*>(args.post.stats) + shape.rows * stats.element_size();
  }
  if (!backend::post_add_pre_forward(args, device)) {
    run_in_turn(args, rows, sum);
  }
  return {output, sum, or_nothing(stats, input)};
}

NormOptions options_of(double eps, bool zero_centered, std::string_view rounding,
                       OptionalDtype sum_dtype, bool save_stats) {
  return {.norm = NormKind::kRmsNorm,
          .eps = eps,
          .zero_centered = zero_centered,
          .rounding = parse_rounding(rounding),
          .output_dtype = std::nullopt,
          .sum_dtype = sum_dtype,
          .save_stats = save_stats};
}

ForwardResults post_add_pre_forward(const at::Tensor& input, const at::Tensor& residual,
                                    const OptionalTensor& post_weight,
                                    const OptionalTensor& pre_weight, double eps,
                                    bool zero_centered, std::string_view rounding,
                                    OptionalDtype sum_dtype, bool save_stats) {
  const NormOptions options = options_of(eps, zero_centered, rounding, sum_dtype, save_stats);
  const Rows rows{input, residual, post_weight, pre_weight};
  const Shape shape = check("fused_post_add_pre_rms_norm", rows, options, "post_weight");
  return run_forward(rows, options, shape, false);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_add_forward(
    const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight, double eps,
    bool zero_centered, std::string_view rounding, OptionalDtype sum_dtype, bool save_stats) {
  const NormOptions options = options_of(eps, zero_centered, rounding, sum_dtype, save_stats);
  const OptionalTensor none;
  const Rows rows{input, residual, weight, none};
  const Shape shape = check("fused_rms_norm_add", rows, options, "weight");
  auto [_, sum, stats] = run_forward(rows, options, shape, true);
  return {sum, stats};
}

BackwardOptions options_of_norm(const at::Tensor& input, const OptionalTensor& weight,
                                bool zero_centered, std::string_view rounding,
                                OptionalDtype residual_dtype, std::array<bool, 4> wanted) {
  return {.norm = NormKind::kRmsNorm,
          .zero_centered = zero_centered,
          .rounding = parse_rounding(rounding),
          .input_dtype = input.scalar_type(),
          .residual_dtype = residual_dtype,
          .param_dtype = (weight ? *weight : input).scalar_type(),
          .wanted = wanted};
}

// The rounding between the two norms counts as the identity: the gradient of the branch is that of
// the sum, rounded to the dtype of the branch.
FourTensors post_add_pre_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_sum,
                                  const at::Tensor& input, const at::Tensor& sum,
                                  const OptionalTensor& post_weight,
                                  const OptionalTensor& pre_weight, const at::Tensor& stats,
                                  bool zero_centered, std::string_view rounding,
                                  at::ScalarType residual_dtype, std::array<bool, 4> wanted) {
  const auto [wants_input, wants_residual, wants_post, wants_pre] = wanted;
  const auto options = [&](const OptionalTensor& weight, OptionalDtype residual,
                           std::array<bool, 4> of_norm) {
    return options_of_norm(input, weight, zero_centered, rounding, residual, of_norm);
  };
  const bool wants_branch = wants_input || wants_post;
  at::Tensor grad_branch, grad_residual, grad_pre;
  if (grad_output) {
    std::tie(grad_branch, grad_residual, grad_pre, std::ignore) = norm_backward(
        {*grad_output, grad_sum, sum, pre_weight, {}, stats.narrow(0, 1, 1), {}},
        options(pre_weight, residual_dtype, {wants_branch, wants_residual, wants_pre, false}));
    if (wants_residual && !grad_residual.defined()) {
      grad_residual = grad_branch;
    }
  } else {  // only the sum was used
    TORCH_CHECK(grad_sum, "fused_op::post_add_pre_rms_norm_backward: no gradient");
    grad_branch = grad_sum->to(input.scalar_type());
    if (wants_residual) {
      grad_residual = grad_sum->to(residual_dtype, /*non_blocking=*/false, /*copy=*/true,
                                   at::MemoryFormat::Contiguous);
    }
    if (wants_pre && pre_weight) {
      grad_pre = at::zeros_like(*pre_weight);
    }
  }
  at::Tensor grad_input, grad_post;
  if (wants_branch) {
    std::tie(grad_input, std::ignore, grad_post, std::ignore) =
        norm_backward({grad_branch, {}, input, post_weight, {}, stats.narrow(0, 0, 1), {}},
                      options(post_weight, {}, {wants_input, false, wants_post, false}));
  }
  return {or_nothing(grad_input, input), or_nothing(grad_residual, input),
          or_nothing(grad_post, input), or_nothing(grad_pre, input)};
}

// The gradient of the residual is that of the sum: no op returns what it is given.
std::tuple<at::Tensor, at::Tensor> rms_norm_add_backward(
    const at::Tensor& grad_sum, const at::Tensor& input, const OptionalTensor& weight,
    const at::Tensor& stats, bool zero_centered, std::string_view rounding,
    std::array<bool, 2> wanted) {
  const auto [grad_input, _, grad_weight, __] =
      norm_backward({grad_sum.to(input.scalar_type()), {}, input, weight, {}, stats, {}},
                    options_of_norm(input, weight, zero_centered, rounding, {},
                                    {wanted[0], false, wanted[1], false}));
  return {or_nothing(grad_input, input), or_nothing(grad_weight, input)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "post_add_pre_rms_norm_forward(Tensor input, Tensor residual, Tensor? post_weight, "
              "Tensor? pre_weight, float eps, bool zero_centered, str rounding, ScalarType? "
              "sum_dtype, bool save_stats) -> (Tensor output, Tensor sum, Tensor stats)",
              &post_add_pre_forward);
  register_op(m,
              "rms_norm_add_forward(Tensor input, Tensor residual, Tensor? weight, float eps, bool "
              "zero_centered, str rounding, ScalarType? sum_dtype, bool save_stats) -> (Tensor "
              "sum, Tensor stats)",
              &rms_norm_add_forward);
  register_op(m,
              "rms_norm_add_backward(Tensor grad_sum, Tensor input, Tensor? weight, Tensor stats, "
              "bool zero_centered, str rounding, bool[2] wanted) -> (Tensor grad_input, Tensor "
              "grad_weight)",
              &rms_norm_add_backward);
  register_op(m,
              "post_add_pre_rms_norm_backward(Tensor? grad_output, Tensor? grad_sum, Tensor input, "
              "Tensor sum, Tensor? post_weight, Tensor? pre_weight, Tensor stats, bool "
              "zero_centered, str rounding, ScalarType residual_dtype, bool[4] wanted) -> (Tensor "
              "grad_input, Tensor grad_residual, Tensor grad_post_weight, Tensor "
              "grad_pre_weight)",
              &post_add_pre_backward);
}

}  // namespace fused_op
