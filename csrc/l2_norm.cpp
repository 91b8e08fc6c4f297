// The L2 norm, input / sqrt(sum(input²) + eps) over the last dimension: the norm kernels without a
// weight, and with a sum instead of the mean.
#include "backend.h"
#include "checks.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

std::tuple<at::Tensor, at::Tensor> l2_norm_forward(const at::Tensor& input, double eps,
                                                   bool save_stats) {
  const char* const op = "fused_l2_norm";
  check_eps(op, eps);
  check_rows(op, "input", input);
  const Shape shape = checked_shape(op, input, 1);
  const at::ScalarType dtype = input.scalar_type();
  const at::Tensor output = backend::empty(input.sizes(), dtype, input.device());
  const at::Tensor stats =
      backend::empty_if(save_stats, {1, shape.rows}, stats_dtype(dtype), input.device());
  if (shape.empty()) {
    return {output, save_stats ? stats.zero_() : nothing_like(input)};
  }
  check_memory(op, "input", input);
  const Borrowed rows = readable_rows(input, shape, {.may_be_split = true});

  NormForwardArgs args;
  args.kind = NormKind::kL2Norm;
  args.dtype = args.param_dtype = to_dtype(dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(*rows, shape);
  args.output = {pointer(output), args.dtype};
  args.stats = pointer(stats);
  args.eps = eps;
  backend::norm_forward(args, input.device());
  return {output, or_nothing(stats, input)};
}

at::Tensor l2_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                            const at::Tensor& stats) {
  const char* const op = "fused_op::l2_norm_backward";
  check_rows(op, "input", input);
  check_grad(op, "grad_output", grad_output, input);
  const at::ScalarType dtype = input.scalar_type();
  const Shape shape = checked_shape(op, input, 1);
  check_stats(op, stats, NormKind::kL2Norm, input, shape.rows);
  const at::Tensor grad_input = backend::empty(input.sizes(), dtype, input.device());
  if (shape.empty()) {
    return grad_input;
  }
  check_memory(op, "input", input);
  check_memory(op, "grad_output", grad_output);
  check_memory(op, "stats", stats);
  const RowAccess access = access_of({&input, &grad_output}, shape);
  const Borrowed x = readable_rows(input, shape, access);
  const Borrowed dy = readable_rows(grad_output, shape, access);
  const Borrowed dense_stats = readable_dense(stats, stats.element_size());

  NormBackwardArgs args;
  args.kind = NormKind::kL2Norm;
  args.dtype = args.param_dtype = to_dtype(dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.x = const_rows(*x, shape);
  args.grad_output = const_rows(*dy, shape);
  args.stats = dense_stats->const_data_ptr();
  args.grad_input = {pointer(grad_input), args.dtype};
  args.grad_residual.dtype = args.dtype;
  backend::norm_backward(args, input.device());
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "l2_norm_forward(Tensor input, float eps, bool save_stats) "
              "-> (Tensor output, Tensor stats)",
              &l2_norm_forward);
  register_op(m,
              "l2_norm_backward(Tensor grad_output, Tensor input, Tensor stats) "
              "-> Tensor grad_input",
              &l2_norm_backward);
}

}  // namespace fused_op
