// The modulated norms, norm(x)·(1 + scale) + shift, and the same after a gated residual: the norm
// kernels with the parameters of an entry (core/modulated.h).
#include "modulated_norm.h"

#include <ATen/ops/zeros_like.h>

#include "backend.h"
#include "checks.h"
#include "core/modulated_variant.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

// How many rows of the input share an entry, or 0 if the shapes do not fit. The leading dimensions
// of the entries are the first ones of the input, followed by ones.
std::int64_t rows_of_entry(const at::Tensor& entries, const at::Tensor& input) {
  const std::int64_t leading = entries.dim() - 1;
  if (leading < 0 || leading >= input.dim() || entries.size(-1) != input.size(-1)) {
    return 0;
  }
  std::int64_t dim = 0;
  while (dim < leading && entries.size(dim) == input.size(dim)) {
    ++dim;
  }
  const at::IntArrayRef sizes = entries.sizes().slice(0, leading);
  if (c10::multiply_integers(sizes.slice(dim)) != 1) {
    return 0;
  }
  return c10::multiply_integers(input.sizes().slice(dim, input.dim() - 1 - dim));
}

std::int64_t check_entries(const char* op, const char* name, const at::Tensor& entries,
                           const at::Tensor& input) {
  check_rows(op, name, entries);
  check_device(op, name, entries, input);
  check_precision(op, name, entries, input);
  TORCH_CHECK(entries.dim() > 0, op, ": ", name,
              " must have at least one dimension, got a 0-dim tensor");
  const std::int64_t rows = rows_of_entry(entries, input);
  TORCH_CHECK(rows > 0 || input.numel() == 0, op, ": the shape of ", name,
              " must be the first dimensions of input, ", input.sizes(),
              ", then ones, then the last dimension, got ", entries.sizes(),
              ": expand or reshape it");
  return rows;
}

// That of the rows that are normalised.
at::ScalarType row_dtype(const ModulatedCall& call) {
  return (call.gate != nullptr ? *call.residual : call.input).scalar_type();
}

// Checks everything but memory. Returns how many rows share an entry.
std::int64_t check_tensors(const ModulatedCall& call) {
  const auto& [op, norm, input, scale, shift, weight, bias, residual, gate] = call;
  check_rows(op, "input", input);
  const Shape shape = checked_shape(op, input, 1);
  const std::int64_t rows = check_entries(op, "scale", scale, input);
  const auto check_same = [&](const char* name, const at::Tensor& entries) {
    TORCH_CHECK(check_entries(op, name, entries, input) == rows, op, ": ", name,
                " must have entries for the same rows as scale, ", scale.sizes(), ", got ",
                entries.sizes(), ": expand the smaller one");
  };
  if (shift) {
    check_same("shift", *shift);
  }
  if (gate != nullptr) {
    check_residual_kind(op, *residual, input, std::nullopt);
    check_same_shape(op, "residual", *residual, input);
    check_same("gate", *gate);
  }
  const auto check_param = [&](const char* name, const OptionalTensor& param) {
    check_param_kind(op, name, param, input);
    check_param_shape(op, name, param, shape.normalized, input);
  };
  check_param("weight", weight);
  check_param("bias", bias);
  TORCH_CHECK(shape.rows < std::int64_t{1} << 31, op, ": there are more than 2^31 rows");
  return rows;
}

void check_call_memory(const ModulatedCall& call) {
  check_all_memory(call.op, {{"input", &call.input},
                             {"residual", call.residual},
                             {"gate", call.gate},
                             {"scale", &call.scale},
                             {"shift", pointer_to(call.shift)},
                             {"weight", pointer_to(call.weight)},
                             {"bias", pointer_to(call.bias)}});
}

// Entries as kernels read them: rows at one stride, in `dtype`.
Borrowed readable_entries(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() != dtype) {
    return Borrowed::owned(tensor.to(dtype, false, true, at::MemoryFormat::Contiguous));
  }
  const Shape shape(tensor, 1);
  Borrowed readable = readable_rows(tensor, shape, {});
  return const_rows(*readable, shape).split.inner == 0
             ? std::move(readable)
             : Borrowed::owned(tensor.clone(at::MemoryFormat::Contiguous));
}

}  // namespace

at::ScalarType entry_dtype(const ModulatedCall& call) {
  const at::ScalarType scale = call.scale.scalar_type();
  return call.shift ? c10::promoteTypes(scale, call.shift->scalar_type()) : scale;
}

at::ScalarType param_dtype_of(const ModulatedCall& call) {
  return kernel_param_dtype(call.input.scalar_type(), call.weight, call.bias);
}

at::ScalarType dtype_as_parameters(const at::Tensor& of, at::ScalarType dtype) {
  const auto begin_at_words = [&](const at::Tensor& rows) {
    const ConstRows found = const_rows(rows, Shape(rows, 1));
    return reinterpret_cast<std::uintptr_t>(found.data) % 4 == 0 && found.stride % 2 == 0;
  };
  return c10::elementSize(dtype) > 2 ||
                 (of.size(-1) % 2 == 0 && begin_at_words(*readable_entries(of, dtype)))
             ? dtype
             : at::kFloat;
}

ReadableModulation::ReadableModulation(const ModulatedCall& call, std::int64_t rows_each,
                                       const Shape& shape)
    : ReadableModulation(call.scale, entry_dtype(call), rows_each, shape) {
  if (call.shift) {
    shift = readable_entries(*call.shift, entry_dtype(call));
    made.shift = found(*shift, shape);
  }
  if (call.gate != nullptr) {
    gate = readable_entries(*call.gate, call.gate->scalar_type());
    made.gate = found(*gate, shape);
  }
}
ReadableModulation::ReadableModulation(const at::Tensor& of, at::ScalarType dtype,
                                       std::int64_t rows_each, const Shape& shape)
    : scale(readable_entries(of, dtype)) {
  made.rows_each = rows_each;
  made.scale = found(*scale, shape);
  made.shift.dtype = made.scale.dtype;
}
ConstRows ReadableModulation::found(const at::Tensor& readable, const Shape& shape) const {
  const std::int64_t stride = const_rows(readable, Shape(readable, 1)).stride;
  return entries(readable.const_data_ptr(), to_dtype(readable.scalar_type()), stride,
                 made.rows_each, shape.rows);
}

namespace {

struct ModulatedResults {
  at::Tensor output, sum, stats;
};

ModulatedResults forward(const ModulatedCall& call, double eps, bool save_stats) {
  check_eps(call.op, eps);
  const std::int64_t rows_each = check_tensors(call);
  const at::Tensor& input = call.input;
  const Shape shape(input, 1);
  const at::ScalarType dtype = row_dtype(call);
  const at::Device device = input.device();
  ModulatedResults results{backend::empty(input.sizes(), input.scalar_type(), device),
                           backend::empty_if(call.gate != nullptr, input.sizes(), dtype, device),
                           backend::empty_if(save_stats, {stats_rows(call.norm), shape.rows},
                                             stats_dtype(dtype), device)};
  if (shape.empty()) {
    if (save_stats) {
      results.stats.zero_();
    }
    return results;
  }
  check_call_memory(call);
  const Borrowed rows = readable_rows(input, shape, {});
  const Borrowed residual =
      call.gate != nullptr ? readable_rows(*call.residual, shape, {}) : Borrowed();
  const at::ScalarType param_dtype = param_dtype_of(call);
  const Parameters parameters(call.weight, call.bias, false, param_dtype);
  const ReadableModulation modulation(call, rows_each, shape);

  ModulatedForwardArgs args;
  args.kind = call.norm;
  args.dtype = to_dtype(dtype);
  args.param_dtype = to_dtype(param_dtype);
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.input = const_rows(*rows, shape);
  if (call.gate != nullptr) {
    args.residual = const_rows(*residual, shape);
    args.sum = pointer(results.sum);
  }
  args.weight = const_pointer(*parameters.weight);
  args.bias = const_pointer(*parameters.bias);
  args.output = {pointer(results.output), to_dtype(input.scalar_type())};
  args.stats = pointer(results.stats);
  args.eps = eps;
  args.modulation = modulation.made;
  const ModulatedVariant variant(args);
  backend::norm_forward(args, device, &variant);
  return results;
}

// The same fields as ModulatedGrads.
struct ModulatedWanted {
  bool input, residual, gate, scale, shift, weight, bias;
};

ModulatedGrads allocate(const ModulatedCall& call, const ModulatedWanted& wanted) {
  const at::Tensor& input = call.input;
  const auto empty = [&](bool is_wanted, const at::Tensor& like, at::ScalarType dtype) {
    return backend::empty_if(is_wanted, like.sizes(), dtype, input.device());
  };
  const auto empty_parameter = [&](bool is_wanted) {
    return backend::empty_if(is_wanted, input.sizes().slice(input.dim() - 1), param_dtype_of(call),
                             input.device());
  };
  ModulatedGrads grads;
  grads.input = empty(wanted.input, input, input.scalar_type());
  if (call.gate != nullptr) {
    // The gradients of the gate are computed from the gradient of the residual.
    grads.residual = empty(wanted.residual || wanted.input || wanted.gate, input, row_dtype(call));
    grads.gate = empty(wanted.gate, *call.gate, call.gate->scalar_type());
  }
  grads.scale = empty(wanted.scale, call.scale, entry_dtype(call));
  grads.shift = empty(wanted.shift, call.shift ? *call.shift : call.scale, entry_dtype(call));
  grads.weight = empty_parameter(wanted.weight);
  grads.bias = empty_parameter(wanted.bias);
  return grads;
}

ModulatedGrads backward(const ModulatedCall& call, const at::Tensor& grad_output,
                        const OptionalTensor& grad_sum, const at::Tensor& x,
                        const at::Tensor& stats, const ModulatedWanted& wanted) {
  const auto& [op, norm, input, scale, shift, weight, bias, residual, gate] = call;
  const std::int64_t rows_each = check_tensors(call);
  const auto check = [&](const char* name, const at::Tensor& rows, const at::Tensor& like) {
    check_rows(op, name, rows);
    check_device(op, name, rows, input);
    check_same_shape(op, name, rows, input);
    TORCH_CHECK(rows.scalar_type() == like.scalar_type(), op, ": ", name,
                " must have the dtype of ", &like == residual ? "residual, " : "input, ",
                like.scalar_type(), ", got ", rows.scalar_type());
    if (rows.numel() > 0) {
      check_memory(op, name, rows);
    }
  };
  const at::Tensor& row = gate != nullptr ? *residual : input;
  check("grad_output", grad_output, input);
  check("sum", x, row);
  if (grad_sum) {
    check("grad_sum", *grad_sum, row);
  }
  const Shape shape(input, 1);
  check_stats(op, stats, norm, input, shape.rows);
  ModulatedGrads grads = allocate(call, wanted);
  if (shape.empty()) {
    for (at::Tensor* grad : {&grads.gate, &grads.scale, &grads.shift, &grads.weight, &grads.bias}) {
      if (grad->defined()) {
        grad->zero_();
      }
    }
  } else {
    check_call_memory(call);
    check_memory(op, "stats", stats);
    run_backward({call, rows_each, grad_output, grad_sum, x, stats}, grads);
  }
  const auto give = [&](at::Tensor& grad, const OptionalTensor& of) {
    if (!grad.defined()) {
      grad = nothing_like(input);
    } else if (of && grad.scalar_type() != of->scalar_type()) {
      grad = grad.to(of->scalar_type());
    }
  };
  give(grads.scale, scale);
  give(grads.shift, shift);
  give(grads.weight, weight);
  give(grads.bias, bias);
  for (at::Tensor* grad : {&grads.input, &grads.residual, &grads.gate}) {
    give(*grad, std::nullopt);
  }
  return grads;
}

NormKind checked_norm(std::string_view norm, const OptionalTensor& bias) {
  const NormKind kind = parse_norm(norm);
  TORCH_CHECK(kind == NormKind::kLayerNorm || !bias, "fused_op: rms_norm has no bias");
  return kind;
}
const char* modulated_name(NormKind norm) {
  return norm == NormKind::kLayerNorm ? "fused_modulated_layer_norm" : "fused_modulated_rms_norm";
}
const char* gated_name(NormKind norm) {
  return norm == NormKind::kLayerNorm ? "fused_gated_add_layer_norm" : "fused_gated_add_rms_norm";
}

std::tuple<at::Tensor, at::Tensor> modulated_norm_forward(
    const at::Tensor& input, const at::Tensor& scale, const OptionalTensor& shift,
    const OptionalTensor& weight, const OptionalTensor& bias, std::string_view norm, double eps,
    bool save_stats) {
  const NormKind kind = checked_norm(norm, bias);
  const auto results =
      forward({modulated_name(kind), kind, input, scale, shift, weight, bias}, eps, save_stats);
  return {results.output, or_nothing(results.stats, input)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> modulated_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
    const at::Tensor& stats, std::string_view norm, std::array<bool, 5> wanted) {
  const NormKind kind = checked_norm(norm, bias);
  auto grads = backward({modulated_name(kind), kind, input, scale, shift, weight, bias},
                        grad_output, std::nullopt, input, stats,
                        {wanted[0], false, false, wanted[1], wanted[2], wanted[3], wanted[4]});
  return {grads.input, grads.scale, grads.shift, grads.weight, grads.bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_add_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, const at::Tensor& gate,
    const at::Tensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, std::string_view norm, double eps, bool save_stats) {
  const NormKind kind = checked_norm(norm, bias);
  const auto results =
      forward({gated_name(kind), kind, input, scale, shift, weight, bias, &residual, &gate}, eps,
              save_stats);
  return {results.output, results.sum, or_nothing(results.stats, input)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gated_add_norm_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_sum,
                        const at::Tensor& input, const at::Tensor& residual, const at::Tensor& gate,
                        const at::Tensor& scale, const OptionalTensor& shift,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        const at::Tensor& sum, const at::Tensor& stats, std::string_view norm,
                        std::array<bool, 7> wanted) {
  const NormKind kind = checked_norm(norm, bias);
  auto grads =
      backward({gated_name(kind), kind, input, scale, shift, weight, bias, &residual, &gate},
               grad_output ? *grad_output : at::zeros_like(input), grad_sum, sum, stats,
               {wanted[0], wanted[1], wanted[2], wanted[3], wanted[4], wanted[5], wanted[6]});
  return {grads.input, grads.residual, grads.gate, grads.scale,
          grads.shift, grads.weight,   grads.bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "modulated_norm_forward(Tensor input, Tensor scale, Tensor? shift, Tensor? weight, "
              "Tensor? bias, str norm, float eps, bool save_stats) -> (Tensor output, Tensor "
              "stats)",
              &modulated_norm_forward);
  register_op(m,
              "modulated_norm_backward(Tensor grad_output, Tensor input, Tensor scale, Tensor? "
              "shift, Tensor? weight, Tensor? bias, Tensor stats, str norm, bool[5] wanted) -> "
              "(Tensor grad_input, Tensor grad_scale, Tensor grad_shift, Tensor grad_weight, "
              "Tensor grad_bias)",
              &modulated_norm_backward);
  register_op(m,
              "gated_add_norm_forward(Tensor input, Tensor residual, Tensor gate, Tensor scale, "
              "Tensor? shift, Tensor? weight, Tensor? bias, str norm, float eps, bool save_stats) "
              "-> (Tensor output, Tensor sum, Tensor stats)",
              &gated_add_norm_forward);
  register_op(m,
              "gated_add_norm_backward(Tensor? grad_output, Tensor? grad_sum, Tensor input, Tensor "
              "residual, Tensor gate, Tensor scale, Tensor? shift, Tensor? weight, Tensor? bias, "
              "Tensor sum, Tensor stats, str norm, bool[7] wanted) -> (Tensor grad_input, Tensor "
              "grad_residual, Tensor grad_gate, Tensor grad_scale, Tensor grad_shift, Tensor "
              "grad_weight, Tensor grad_bias)",
              &gated_add_norm_backward);
}

}  // namespace fused_op
