// Backward of the modulated norms. The CPU's loops compute all gradients at once. On a GPU, a
// kernel computes dx and the sums of core/modulated.h; the remaining gradients follow from those
// sums, which are as small as the entries. If rows share entries, a second kernel pulls back the
// gate.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

#include "backend.h"
#include "core/modulated_variant.h"
#include "modulated_norm.h"

namespace fused_op {
namespace {

// The longest row that fits into the CTAs of shared entries. Longer rows are computed entry by
// entry.
constexpr std::int64_t kMostEntryBytes = 32768;

// The arguments for either backend, and the readable tensors that they point into.
struct PullbackArgs {
  explicit PullbackArgs(const ModulatedPullback& of)
      : shape(of.x, 1),
        x(readable_rows(of.x, shape, {})),
        grad_output(readable_rows(of.grad_output, shape, {})),
        stats(readable_dense(of.stats, of.stats.element_size())),
        modulation(of.call, of.rows_each, shape) {
    args.kind = of.call.norm;
    args.dtype = to_dtype(x->scalar_type());
    args.rows = shape.rows;
    args.cols = shape.cols;
    args.x = const_rows(*x, shape);
    args.grad_output = const_rows(*grad_output, shape);
    args.stats = stats->const_data_ptr();
    args.grad_input.dtype = args.grad_residual.dtype = args.dtype;
    args.modulation = modulation.made;
  }

  Shape shape;
  Borrowed x, grad_output, stats;
  ReadableModulation modulation;
  ModulatedBackwardArgs args;
};

void run_on_cpu(const ModulatedPullback& of, const ModulatedGrads& grads) {
  const ModulatedCall& call = of.call;
  PullbackArgs made(of);
  ModulatedBackwardArgs& args = made.args;
  const at::ScalarType param_dtype = param_dtype_of(call);
  const Parameters parameters(call.weight, call.bias, false, param_dtype);
  const Borrowed dsum = of.grad_sum ? readable_rows(*of.grad_sum, made.shape, {}) : Borrowed();
  const Borrowed branch =
      call.gate != nullptr ? readable_rows(call.input, made.shape, {}) : Borrowed();
  args.param_dtype = to_dtype(param_dtype);
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
  args.grad_weight = pointer(grads.weight);
  args.grad_bias = pointer(grads.bias);
  args.grad_input.data = pointer(call.gate != nullptr ? grads.residual : grads.input);
  args.grad_scale = {pointer(grads.scale), args.modulation.scale.dtype};
  args.grad_shift = {pointer(grads.shift), args.modulation.scale.dtype};
  if (of.grad_sum) {
    args.grad_sum = const_rows(*dsum, made.shape);
  }
  if (call.gate != nullptr) {
    args.branch = const_rows(*branch, made.shape);
    args.grad_branch = {pointer(grads.input), to_dtype(call.input.scalar_type())};
    args.grad_gate = {pointer(grads.gate), args.modulation.gate.dtype};
  }
  const ModulatedVariant variant(args);
  backend::norm_backward(args, of.x.device(), &variant);
}

// Every row has its own entry, whose gradients are rows, too.
void run_own_entries(const ModulatedPullback& of, const at::Tensor& grad_x,
                     const ModulatedGrads& grads) {
  const ModulatedCall& call = of.call;
  PullbackArgs made(of);
  ModulatedBackwardArgs& args = made.args;
  const at::ScalarType param_dtype = param_dtype_of(call);
  const Parameters parameters(call.weight, call.bias, false, param_dtype);
  args.param_dtype = to_dtype(param_dtype);
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
  args.grad_weight = pointer(grads.weight);
  args.grad_bias = pointer(grads.bias);
  args.grad_input.data = pointer(grad_x);
  args.grad_scale = {pointer(grads.scale), args.modulation.scale.dtype};
  if (grads.shift.defined()) {
    grads.shift.copy_(of.grad_output.reshape(grads.shift.sizes()));
  }
  const ModulatedVariant variant(args);
  backend::norm_backward(args, of.x.device(), &variant);
}

// W and B of each entry, [entries, cols]. Undefined if not wanted.
struct EntrySums {
  at::Tensor weight, bias;
};

// To an RMS norm, a shift is also a bias.
NormKind kind_of(const ModulatedCall& call, const EntrySums& sums) {
  return call.norm == NormKind::kRmsNorm && sums.bias.defined() ? NormKind::kBiasedRmsNorm
                                                                : call.norm;
}

// A call of a kernel whose CTAs each take rows of one entry.
struct EntryCall {
  NormKind kind;  // kIdentity: the rows are multiplied by a gate
  const at::Tensor& x;
  const at::Tensor& grad_output;
  const OptionalTensor& grad_sum;
  const at::Tensor& stats;    // not read for kIdentity
  const at::Tensor& entries;  // scale, or the gate
  at::ScalarType entry_dtype;
  std::int64_t rows_each;
};
// Without a weight, the entries are the kernel's parameters, and the sums have their dtype.
void run_kernel(const EntryCall& call, const Parameters& parameters, at::ScalarType param_dtype,
                const at::Tensor& grad_x, const EntrySums& sums) {
  const Shape shape(call.x, 1);
  const Borrowed x = readable_rows(call.x, shape, {});
  const Borrowed dy = readable_rows(call.grad_output, shape, {});
  const Borrowed dsum = call.grad_sum ? readable_rows(*call.grad_sum, shape, {}) : Borrowed();
  const Borrowed stats = readable_dense(call.stats, call.stats.element_size());
  const ReadableModulation modulation(call.entries, call.entry_dtype, call.rows_each, shape);
  ModulatedBackwardArgs args;
  args.kind = call.kind;
  args.dtype = to_dtype(x->scalar_type());
  args.param_dtype = to_dtype(param_dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.x = const_rows(*x, shape);
  args.grad_output = const_rows(*dy, shape);
  if (call.grad_sum) {
    args.grad_sum = const_rows(*dsum, shape);
  }
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
  args.stats = stats->const_data_ptr();
  args.grad_input.dtype = args.grad_residual.dtype = args.dtype;
  args.grad_input.data = pointer(grad_x);
  args.grad_weight = pointer(sums.weight);
  args.grad_bias = pointer(sums.bias);
  args.modulation = modulation.made;
  args.groups = static_cast<int>(args.rows / call.rows_each);
  const ModulatedVariant variant(args);
  backend::norm_backward(args, x->device(), &variant);
}

// Entry by entry, each as an affine norm, for rows that are too long for a CTA.
void sum_in_turn(const ModulatedPullback& of, const at::Tensor& grad_x, const EntrySums& sums,
                 const at::Tensor& factors) {
  const std::int64_t cols = of.x.size(-1);
  const at::Tensor x = of.x.reshape({-1, cols});
  const at::Tensor grad_output = of.grad_output.reshape({-1, cols});
  for (std::int64_t entry = 0; entry < factors.size(0); ++entry) {
    const std::int64_t first = entry * of.rows_each;
    const at::Tensor its_x = x.narrow(0, first, of.rows_each);
    const at::Tensor its_dy = grad_output.narrow(0, first, of.rows_each);
    const at::Tensor stats = of.stats.narrow(1, first, of.rows_each).contiguous();
    const at::Tensor weight = factors.select(0, entry).clone();  // begins at a multiple of 16 bytes
    const Shape shape(its_x, 1);
    const Borrowed rows = readable_rows(its_x, shape, {});
    const Borrowed dy = readable_rows(its_dy, shape, {});
    NormBackwardArgs args;
    args.kind = kind_of(of.call, sums);
    args.dtype = to_dtype(x.scalar_type());
    args.param_dtype = to_dtype(weight.scalar_type());
    args.rows = of.rows_each;
    args.cols = cols;
    args.x = const_rows(*rows, shape);
    args.grad_output = const_rows(*dy, shape);
    args.weight = weight.const_data_ptr();
    args.stats = stats.const_data_ptr();
    args.grad_input.dtype = args.grad_residual.dtype = args.dtype;
    const at::Tensor dx = grad_x.defined() ? at::empty_like(its_x) : at::Tensor();
    const at::Tensor dweight = sums.weight.defined() ? at::empty_like(weight) : at::Tensor();
    const at::Tensor dbias = sums.bias.defined() ? at::empty_like(weight) : at::Tensor();
    args.grad_input.data = pointer(dx);
    args.grad_weight = pointer(dweight);
    args.grad_bias = pointer(dbias);
    backend::norm_backward(args, x.device());
    if (dx.defined()) {
      grad_x.view({-1, cols}).narrow(0, first, of.rows_each).copy_(dx);
    }
    if (dweight.defined()) {
      sums.weight.select(0, entry).copy_(dweight);
    }
    if (dbias.defined()) {
      sums.bias.select(0, entry).copy_(dbias);
    }
  }
}

// Computes the gradients that follow from W and B. All these tensors are as small as the entries.
void leave_entries(const ModulatedPullback& of, const EntrySums& sums, const ModulatedGrads& grads,
                   const at::Tensor& factors) {
  const ModulatedCall& call = of.call;
  if (grads.scale.defined() && !grads.scale.is_same(sums.weight)) {
    at::Tensor dscale = sums.weight;
    if (call.weight) {
      dscale = dscale.mul(*call.weight);
    }
    if (call.bias) {
      dscale = dscale.add(sums.bias.mul(*call.bias));
    }
    grads.scale.copy_(dscale.view(grads.scale.sizes()));
  }
  if (grads.shift.defined() && !grads.shift.is_same(sums.bias)) {
    grads.shift.copy_(sums.bias.view(grads.shift.sizes()));
  }
  if (grads.weight.defined()) {
    grads.weight.copy_(factors.mul(sums.weight).sum(0));
  }
  if (grads.bias.defined()) {
    grads.bias.copy_(factors.mul(sums.bias).sum(0));
  }
}

// Whether rows may share an entry, even if each entry has one row here. The two ways of computing
// deal elements out to lanes differently, and a row has the same bits however many there are.
bool shares_entries(const ModulatedPullback& of) {
  return of.rows_each > 1 || of.call.scale.dim() < of.x.dim();
}

bool is_too_long(const at::Tensor& x) { return x.size(-1) * x.element_size() > kMostEntryBytes; }

// The kernel adds the gradient that arrives at the sum to dx. If entries are taken one by one, it
// does not.
void run_shared_entries(const ModulatedPullback& of, const at::Tensor& grad_x,
                        const ModulatedGrads& grads) {
  const ModulatedCall& call = of.call;
  const std::int64_t cols = of.x.size(-1);
  const std::int64_t entries = of.x.numel() / cols / of.rows_each;
  const at::ScalarType wide = stats_dtype(of.x.scalar_type());
  const at::ScalarType entry = dtype_as_parameters(call.scale, entry_dtype(call));
  const bool plain = !call.weight && !call.bias && !is_too_long(of.x);
  const bool wants_bias =
      grads.shift.defined() || grads.bias.defined() || (call.bias && grads.scale.defined());
  const auto sums_in = [&](bool is_wanted, const at::Tensor& grad) {
    const at::ScalarType dtype = plain ? entry : wide;
    return !is_wanted ? at::Tensor()
           : plain && grad.defined() && grad.scalar_type() == dtype
               ? grad
               : backend::empty({entries, cols}, dtype, of.x.device());
  };
  const EntrySums sums{sums_in(grads.scale.defined() || grads.weight.defined(), grads.scale),
                       sums_in(wants_bias, grads.shift)};
  // 1 + scale, with as many elements as the entries.
  const at::Tensor factors =
      plain ? at::Tensor() : call.scale.to(wide).add(1).reshape({entries, cols});
  if (is_too_long(of.x)) {
    const at::Tensor weights = call.weight ? factors.mul(*call.weight).to(wide) : factors;
    sum_in_turn(of, grad_x, sums, weights);
  } else {
    run_kernel({kind_of(call, sums), of.x, of.grad_output, of.grad_sum, of.stats, call.scale, entry,
                of.rows_each},
               Parameters(call.weight, call.bias, false, wide), plain ? entry : wide, grad_x, sums);
  }
  leave_entries(of, sums, grads, factors);
}

// dinput = gate · dr and dgate = Σ dr · input, where grads.residual is dr.
void pull_back_gate(const ModulatedPullback& of, const ModulatedGrads& grads) {
  const ModulatedCall& call = of.call;
  const at::Tensor& gate = *call.gate;
  const at::Tensor& dr = grads.residual;
  const std::int64_t cols = of.x.size(-1);
  if (of.rows_each > 1 && !is_too_long(of.x)) {
    const at::ScalarType dtype = dtype_as_parameters(gate, gate.scalar_type());
    EntrySums sums{grads.gate, {}};
    if (grads.gate.defined() && dtype != gate.scalar_type()) {
      sums.weight = backend::empty(gate.sizes(), dtype, dr.device());
    }
    run_kernel(
        {NormKind::kIdentity, call.input, dr, std::nullopt, of.stats, gate, dtype, of.rows_each},
        Parameters(std::nullopt, std::nullopt, false, dtype), dtype, grads.input, sums);
    if (grads.gate.defined() && !sums.weight.is_same(grads.gate)) {
      grads.gate.copy_(sums.weight);
    }
    return;
  }
  const at::Tensor rows = dr.view({-1, of.rows_each, cols});
  if (grads.input.defined()) {
    at::Tensor dinput = grads.input.view(rows.sizes());
    at::mul_out(dinput, rows, gate.reshape({-1, 1, cols}));
  }
  if (grads.gate.defined()) {
    const at::Tensor input = call.input.reshape(rows.sizes());
    const at::Tensor product = rows.to(stats_dtype(rows.scalar_type())).mul(input);
    grads.gate.copy_(product.sum(1).view(grads.gate.sizes()));
  }
}

}  // namespace

void run_backward(const ModulatedPullback& of, const ModulatedGrads& grads) {
  if (of.x.is_cpu()) {
    run_on_cpu(of, grads);
    return;
  }
  const bool gated = of.call.gate != nullptr;
  const at::Tensor& grad_x = gated ? grads.residual : grads.input;
  const bool adds = shares_entries(of) && !is_too_long(of.x);  // what arrives at the sum
  if (shares_entries(of)) {
    run_shared_entries(of, grad_x, grads);
  } else {
    run_own_entries(of, grad_x, grads);
  }
  if (!gated || !grad_x.defined()) {
    return;
  }
  if (of.grad_sum && !adds) {
    grad_x.add_(*of.grad_sum);
  }
  if (grads.input.defined() || grads.gate.defined()) {
    pull_back_gate(of, grads);
  }
}

}  // namespace fused_op
