// The norms with a quantised output, as an op of the dispatcher: check, allocate, run. The rules
// are in core/quantize.h. Backward is that of the plain norm.
#include <string>
#include <tuple>

#include "backend.h"
#include "checks.h"
#include "core/quantize.h"
#include "fused_op.h"
#include "kernel_arguments.h"
#include "variant.h"

namespace fused_op {
namespace {

using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct QuantizedOptions {
  QuantizeRule rule;
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  at::ScalarType scale_dtype = at::kFloat;
  bool transposed = false;  // the scales of neighbouring rows are adjacent
  bool keep_output = false;
};

template <typename Value, std::size_t kCount>
Value parse(const char* what, std::string_view given,
            const std::array<std::pair<std::string_view, Value>, kCount>& known) {
  for (const auto& [name, value] : known) {
    if (name == given) {
      return value;
    }
  }
  TORCH_CHECK_VALUE(false, "fused_op::norm_quantized: no ", what, " '", given, "'");
}

Scheme parse_scheme(std::string_view name) {
  return parse("scheme", name,
               std::array{std::pair(std::string_view("tensor"), Scheme::kTensor),
                          std::pair(std::string_view("token"), Scheme::kToken),
                          std::pair(std::string_view("block128"), Scheme::kBlock128)});
}

Convention parse_convention(std::string_view name) {
  return parse("convention", name,
               std::array{std::pair(std::string_view("torchao"), Convention::kTorchao),
                          std::pair(std::string_view("vllm"), Convention::kVllm),
                          std::pair(std::string_view("deep_gemm"), Convention::kDeepGemm),
                          std::pair(std::string_view("te"), Convention::kTe)});
}

Format to_format(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat8_e4m3fn:
      return Format::kE4M3;
    case at::kFloat8_e5m2:
      return Format::kE5M2;
    default:
      TORCH_CHECK(dtype == at::kChar, "fused_op::norm_quantized: no dtype ", dtype);
      return Format::kInt8;
  }
}

// Python checks which dtypes a convention allows. This checks only what the kernels rely on.
void check_quantized(const char* op, const NormTensors& tensors, const NormOptions& options,
                     const OptionalTensor& scale, const QuantizedOptions& quantized) {
  const at::ScalarType input = tensors.input.scalar_type();
  TORCH_CHECK(input != at::kDouble, op,
              ": input must be float16, bfloat16 or float32 where the output is quantised, got ",
              input);
  TORCH_CHECK(quantized.scale_dtype == at::kFloat || quantized.scale_dtype == at::kFloat8_e8m0fnu,
              op, ": scale_dtype must be Float or Float8_e8m0fnu, got ", quantized.scale_dtype);
  const bool is_given = quantized.rule.scheme == Scheme::kTensor;
  TORCH_CHECK(is_given == scale.has_value(), op,
              ": scheme 'tensor' needs a scale, and no other scheme takes one");
  TORCH_CHECK(quantized.rule.scheme == Scheme::kBlock128 || !quantized.transposed, op,
              ": only scales of blocks can be transposed");
  TORCH_CHECK(!options.output_dtype || *options.output_dtype != at::kDouble, op,
              ": out_dtype must not be Double");
  if (is_given) {
    check_dense(op, "scale", *scale);
    check_memory(op, "scale", *scale);
    TORCH_CHECK(scale->scalar_type() == at::kFloat && scale->numel() == 1 &&
                    scale->device() == tensors.input.device(),
                op, ": scale must be one Float on ", tensors.input.device(), ", got ",
                scale->scalar_type(), " of shape ", scale->sizes(), " on ", scale->device());
  }
}

// A matrix whose entries from `kept` on along `dim` are zero and cut off.
at::Tensor empty_padded(at::IntArrayRef sizes, std::int64_t dim, std::int64_t kept,
                        at::ScalarType dtype, at::Device device) {
  const at::Tensor all = backend::empty(sizes, dtype, device);
  const std::int64_t more = all.size(dim) - kept;
  if (more > 0 && all.numel() > 0) {
    (all.element_size() == 1 ? all.view(at::kByte) : all).narrow(dim, kept, more).zero_();
  }
  return all.narrow(dim, 0, kept);
}

struct QuantizedOutputs {
  at::Tensor quantized;
  at::Tensor scale;
  Quantization to;
};

QuantizedOutputs allocate(const at::Tensor& input, const Shape& shape,
                          const QuantizedOptions& options, const OptionalTensor& scale) {
  const at::Device device = input.device();
  const std::int64_t padded = options.transposed ? (shape.rows + 3) / 4 * 4 : shape.rows;
  QuantizedOutputs outputs;
  outputs.quantized =
      empty_padded({padded, shape.cols}, 0, shape.rows, options.dtype, device).view(input.sizes());
  outputs.to.rule = options.rule;
  outputs.to.quantized = outputs.quantized.mutable_data_ptr();
  if (scale) {
    outputs.to.given = scale->const_data_ptr<float>();
    return outputs;
  }
  const std::int64_t blocks =
      options.rule.scheme == Scheme::kToken ? 1 : (shape.cols + kBlockCols - 1) / kBlockCols;
  std::vector<std::int64_t> sizes = shape.leading.vec();
  sizes.push_back(blocks);
  if (options.transposed) {
    outputs.scale =
        empty_padded({blocks, padded}, 1, shape.rows, options.scale_dtype, device).t().view(sizes);
    outputs.to.row_stride = 1;
    outputs.to.block_stride = padded;
  } else {
    outputs.scale = backend::empty(sizes, options.scale_dtype, device);
    outputs.to.row_stride = blocks;
    outputs.to.block_stride = 1;
  }
  outputs.to.exponents = options.scale_dtype != at::kFloat;
  outputs.to.scales = outputs.scale.mutable_data_ptr();
  return outputs;
}

// Fills the scales of rows without columns.
void fill_scale(const at::Tensor& scale, const QuantizeRule& rule, DType output) {
  const float decode = scale_of(0, rule, output).decode;
  if (scale.scalar_type() == at::kFloat) {
    scale.fill_(decode);
  } else {
    scale.view(at::kByte).fill_(exponent_of(decode));
  }
}

FiveTensors run(const NormTensors& tensors, const NormOptions& options, const OptionalTensor& scale,
                const QuantizedOptions& quantized) {
  const std::string name =
      std::string(op_name(options.norm, tensors.residual.has_value())) + "_quantized";
  const char* const op = name.c_str();
  check_kinds(op, tensors, options);
  check_quantized(op, tensors, options, scale, quantized);
  const Shape shape = checked_shape(op, tensors.input, normalized_ndim(tensors, options));
  check_call(op, tensors, options, shape);

  const at::Tensor& input = tensors.input;
  const at::Device device = input.device();
  const at::ScalarType output_dtype = options.output_dtype.value_or(input.scalar_type());
  at::ScalarType row_dtype = input.scalar_type();
  at::Tensor output, sum, stats;
  if (quantized.keep_output) {
    output = backend::empty(input.sizes(), output_dtype, device);
  }
  if (tensors.residual) {
    row_dtype = options.sum_dtype.value_or(tensors.residual->scalar_type());
    sum = backend::empty(input.sizes(), row_dtype, device);
  }
  if (options.save_stats) {
    stats = backend::empty({stats_rows(options.norm), shape.rows}, stats_dtype(row_dtype), device);
  }
  const QuantizedOutputs outputs = allocate(input, shape, quantized, scale);
  if (shape.empty()) {
    if (outputs.scale.defined() && outputs.scale.numel() > 0) {
      fill_scale(outputs.scale, quantized.rule, to_dtype(output_dtype));
    }
    if (options.save_stats) {
      stats.zero_();
    }
    return {outputs.quantized, outputs.scale, output, sum, stats};
  }
  check_memory(op, tensors);
  ForwardInputs inputs(tensors, options, shape, row_dtype);
  NormForwardArgs& args = inputs.args;
  args.output = {pointer(output), to_dtype(output_dtype)};
  args.sum = pointer(sum);
  args.stats = pointer(stats);
  backend::norm_quantized(args, outputs.to, device);
  return {outputs.quantized, outputs.scale, output, sum, stats};
}

FiveTensors norm_quantized_op(std::string_view norm, const at::Tensor& input,
                              const OptionalTensor& residual, const OptionalTensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& scale,
                              std::int64_t normalized_ndim, double eps, bool zero_centered,
                              std::string_view rounding, OptionalDtype output_dtype,
                              OptionalDtype sum_dtype, std::string_view scheme,
                              at::ScalarType dtype, std::string_view convention, bool power_of_two,
                              at::ScalarType scale_dtype, bool transposed, bool keep_output,
                              bool save_stats) {
  return or_nothing(run({input, residual, weight, bias, std::nullopt},
                        {.norm = parse_norm(norm),
                         .normalized_ndim = normalized_ndim,
                         .eps = eps,
                         .zero_centered = zero_centered,
                         .rounding = parse_rounding(rounding),
                         .output_dtype = output_dtype,
                         .sum_dtype = sum_dtype,
                         .save_stats = save_stats},
                        scale,
                        {.rule = {.format = to_format(dtype),
                                  .convention = parse_convention(convention),
                                  .scheme = parse_scheme(scheme),
                                  .power_of_two = power_of_two},
                         .dtype = dtype,
                         .scale_dtype = scale_dtype,
                         .transposed = transposed,
                         .keep_output = keep_output}),
                    input);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "norm_quantized(str norm, Tensor input, Tensor? residual, Tensor? weight, "
              "Tensor? bias, Tensor? scale, int normalized_ndim, float eps, bool zero_centered, "
              "str rounding, ScalarType? output_dtype, ScalarType? sum_dtype, str scheme, "
              "ScalarType dtype, str convention, bool power_of_two, ScalarType scale_dtype, "
              "bool transposed, bool keep_output, bool save_stats) "
              "-> (Tensor quantized, Tensor scale, Tensor output, Tensor sum, Tensor stats)",
              &norm_quantized_op);
}

}  // namespace fused_op
