// The RMS norm of heads with rotary embedding: for one tensor, or for the queries and keys of a
// packed tensor, whose gradient is written once.
#include <algorithm>

#include "backend.h"
#include "checks.h"
#include "core/pack.h"
#include "rope_call.h"
#include "variant.h"

namespace fused_op {
namespace {

void check_input(const char* op, const at::Tensor& input) {
  check_rows(op, "input", input);
  (void)checked_shape(op, input, 1);
  TORCH_CHECK(input.dim() >= 2, op, ": input must have shape [..., heads, head_dim], got ",
              input.sizes());
}

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor empty_if(bool wanted, at::IntArrayRef sizes, at::ScalarType dtype,
                    const at::Tensor& beside) {
  return backend::empty_if(wanted, sizes, dtype, beside.device());
}

Two rms_norm_rope_forward(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin,
                          const OptionalTensor& weight, double eps, std::string_view style,
                          bool zero_centered, std::string_view rounding, bool save_stats) {
  const char* const op = "fused_rms_norm_rope";
  const RopeOptions options = parse_rope_options(op, style, zero_centered, rounding, eps);
  check_input(op, input);
  const HeadTensors heads{input, "weight", weight};
  check_heads(op, heads);
  check_turn(op, {cos, sin}, input);
  check_all_memory(
      op, {{"input", &input}, {"cos", &cos}, {"sin", &sin}, {"weight", pointer_to(weight)}});
  const Shape shape(input, 1);
  const at::ScalarType dtype = input.scalar_type();
  const at::Tensor output = backend::empty(input.sizes(), dtype, input.device());
  const at::Tensor stats = empty_if(save_stats, {1, shape.rows}, stats_dtype(dtype), input);
  if (!shape.empty()) {
    rope_forward(heads, {cos, sin}, options, output, stats);
  } else if (save_stats) {
    stats.zero_();
  }
  return {output, or_nothing(stats, input)};
}

Two rms_norm_rope_backward(const at::Tensor& grad_output, const at::Tensor& input,
                           const at::Tensor& cos, const at::Tensor& sin,
                           const OptionalTensor& weight, const at::Tensor& stats,
                           std::string_view style, bool zero_centered, std::string_view rounding,
                           std::array<bool, 2> wanted) {
  const char* const op = "fused_op::rms_norm_rope_backward";
  const RopeOptions options = parse_rope_options(op, style, zero_centered, rounding);
  check_input(op, input);
  const HeadTensors heads{input, "weight", weight};
  check_heads(op, heads);
  check_turn(op, {cos, sin}, input);
  check_grad(op, "grad_output", grad_output, input);
  const Shape shape(input, 1);
  check_stats(op, stats, NormKind::kRmsNorm, input, shape.rows);
  check_all_memory(op, {{"grad_output", &grad_output},
                        {"input", &input},
                        {"cos", &cos},
                        {"sin", &sin},
                        {"weight", pointer_to(weight)},
                        {"stats", &stats}});
  const HeadGradients gradients{
      empty_if(wanted[0], input.sizes(), input.scalar_type(), input),
      weight ? empty_if(wanted[1], weight->sizes(), weight->scalar_type(), input) : at::Tensor()};
  if (!shape.empty()) {
    rope_backward(grad_output, heads, {cos, sin}, options, stats, gradients);
  } else if (gradients.weight.defined()) {
    gradients.weight.zero_();
  }
  return {or_nothing(gradients.rows, input), or_nothing(gradients.weight, input)};
}

// The views into a packed tensor.
struct Packed {
  HeadTensors q;
  HeadTensors k;
  at::Tensor v;

  Packed(const char* op, const at::Tensor& qkv, std::int64_t heads, std::int64_t kv_heads,
         const OptionalTensor& q_weight, const OptionalTensor& k_weight)
      : q{part(op, qkv, heads, kv_heads, 0), "q_weight", q_weight},
        k{part(op, qkv, heads, kv_heads, 1), "k_weight", k_weight},
        v(part(op, qkv, heads, kv_heads, 2)) {}

  static at::Tensor part(const char* op, const at::Tensor& qkv, std::int64_t heads,
                         std::int64_t kv_heads, int which) {
    check_rows(op, "qkv", qkv);
    TORCH_CHECK(qkv.dim() > 0, op, ": qkv must have at least one dimension, got a 0-dim tensor");
    TORCH_CHECK_VALUE(heads > 0 && kv_heads > 0, op, ": heads and kv_heads must be positive, got ",
                      heads, " and ", kv_heads);
    // The sum below would overflow, to 0 at worst.
    constexpr std::int64_t kMost = std::int64_t{1} << 31;
    TORCH_CHECK_VALUE(heads < kMost && kv_heads < kMost, op,
                      ": there are more than 2^31 heads: heads and kv_heads are ", heads, " and ",
                      kv_heads);
    const std::int64_t all = heads + 2 * kv_heads;
    TORCH_CHECK(qkv.size(-1) % all == 0, op,
                ": the last dimension of qkv must be (heads + 2 * kv_heads) * head_dim, a multiple "
                "of ",
                all, ", got ", qkv.size(-1));
    const std::int64_t first[] = {0, heads, heads + kv_heads};
    return qkv.unflatten(-1, {all, qkv.size(-1) / all})
        .narrow(-2, first[which], which == 0 ? heads : kv_heads);
  }
};

Three qk_norm_rope_forward(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                           const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                           double eps, std::int64_t heads, std::int64_t kv_heads,
                           std::string_view style, bool zero_centered, std::string_view rounding,
                           bool save_stats) {
  const char* const op = "fused_qk_norm_rope";
  const RopeOptions options = parse_rope_options(op, style, zero_centered, rounding, eps);
  const Packed packed(op, qkv, heads, kv_heads, q_weight, k_weight);
  check_heads(op, packed.q);
  check_heads(op, packed.k);
  check_turn(op, {cos, sin}, packed.q.rows);
  check_all_memory(op, {{"qkv", &qkv},
                        {"cos", &cos},
                        {"sin", &sin},
                        {"q_weight", pointer_to(q_weight)},
                        {"k_weight", pointer_to(k_weight)}});
  const at::ScalarType dtype = qkv.scalar_type();
  const std::int64_t q_rows = Shape(packed.q.rows, 1).rows;
  const std::int64_t k_rows = Shape(packed.k.rows, 1).rows;
  const at::Tensor q = backend::empty(packed.q.rows.sizes(), dtype, qkv.device());
  const at::Tensor k = backend::empty(packed.k.rows.sizes(), dtype, qkv.device());
  const at::Tensor stats = empty_if(save_stats, {1, q_rows + k_rows}, stats_dtype(dtype), qkv);
  const auto stats_of = [&](std::int64_t first, std::int64_t rows) {
    return save_stats ? stats.narrow(1, first, rows) : at::Tensor();
  };
  if (qkv.numel() > 0) {
    rope_forward(packed.q, {cos, sin}, options, q, stats_of(0, q_rows));
    rope_forward(packed.k, {cos, sin}, options, k, stats_of(q_rows, k_rows));
  } else if (save_stats) {
    stats.zero_();
  }
  return {q, k, or_nothing(stats, qkv)};
}

// Absent gradients count as zeros.
void backward_of_part(const OptionalTensor& grad_output, const HeadTensors& heads, const Turn& turn,
                      const RopeOptions& options, const at::Tensor& stats,
                      const HeadGradients& gradients) {
  if (grad_output && heads.rows.numel() > 0) {
    rope_backward(*grad_output, heads, turn, options, stats, gradients);
    return;
  }
  for (const at::Tensor& gradient : {gradients.rows, gradients.weight}) {
    if (gradient.defined()) {
      gradient.zero_();
    }
  }
}

// Whether all rows of a tensor can be seen as elements of 16 bytes.
bool is_of_vectors(const at::Tensor& tensor) {
  const auto whole = [&](std::int64_t elements) {
    return elements * tensor.element_size() % kVectorBytes == 0;
  };
  const at::IntArrayRef strides = tensor.strides();
  return strides.back() == 1 && std::all_of(strides.begin(), strides.end() - 1, whole) &&
         whole(tensor.size(-1)) && whole(tensor.storage_offset()) &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

// Where memory is not dense, PyTorch's GPU kernel copies one element a load. H200, values of 32768
// tokens of Qwen3 8B: 80 us with elements of 2 bytes, 35 us with elements of 16.
void copy_heads(const at::Tensor& to, const at::Tensor& from) {
  if (is_of_vectors(to) && is_of_vectors(from)) {
    to.view(at::kComplexDouble).copy_(from.view(at::kComplexDouble));
  } else {
    to.copy_(from);
  }
}

Three qk_norm_rope_backward(const OptionalTensor& grad_q, const OptionalTensor& grad_k,
                            const OptionalTensor& grad_v, const at::Tensor& qkv,
                            const at::Tensor& cos, const at::Tensor& sin,
                            const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                            const at::Tensor& stats, std::int64_t heads, std::int64_t kv_heads,
                            std::string_view style, bool zero_centered, std::string_view rounding,
                            std::array<bool, 3> wanted) {
  const char* const op = "fused_op::qk_norm_rope_backward";
  const RopeOptions options = parse_rope_options(op, style, zero_centered, rounding);
  const Packed packed(op, qkv, heads, kv_heads, q_weight, k_weight);
  const auto check_part = [&](const char* name, const OptionalTensor& grad, const at::Tensor& of) {
    if (grad) {
      check_grad(op, name, *grad, of);
    }
  };
  check_heads(op, packed.q);
  check_heads(op, packed.k);
  check_turn(op, {cos, sin}, packed.q.rows);
  check_part("grad_q", grad_q, packed.q.rows);
  check_part("grad_k", grad_k, packed.k.rows);
  check_part("grad_v", grad_v, packed.v);
  const std::int64_t q_rows = Shape(packed.q.rows, 1).rows;
  const std::int64_t k_rows = Shape(packed.k.rows, 1).rows;
  check_stats(op, stats, NormKind::kRmsNorm, qkv, q_rows + k_rows);
  check_all_memory(op, {{"grad_q", pointer_to(grad_q)},
                        {"grad_k", pointer_to(grad_k)},
                        {"grad_v", pointer_to(grad_v)},
                        {"qkv", &qkv},
                        {"cos", &cos},
                        {"sin", &sin},
                        {"q_weight", pointer_to(q_weight)},
                        {"k_weight", pointer_to(k_weight)},
                        {"stats", &stats}});

  const at::Tensor grad_qkv = empty_if(wanted[0], qkv.sizes(), qkv.scalar_type(), qkv);
  const auto grad_weight = [&](bool is_wanted, const OptionalTensor& weight) {
    return weight ? empty_if(is_wanted, weight->sizes(), weight->scalar_type(), qkv) : at::Tensor();
  };
  const HeadGradients of_q{{}, grad_weight(wanted[1], q_weight)};
  const HeadGradients of_k{{}, grad_weight(wanted[2], k_weight)};
  const auto rows_of = [&](int which) {
    return wanted[0] ? Packed::part(op, grad_qkv, heads, kv_heads, which) : at::Tensor();
  };
  backward_of_part(grad_q, packed.q, {cos, sin}, options, stats.narrow(1, 0, q_rows),
                   {rows_of(0), of_q.weight});
  backward_of_part(grad_k, packed.k, {cos, sin}, options, stats.narrow(1, q_rows, k_rows),
                   {rows_of(1), of_k.weight});
  if (wanted[0]) {
    const at::Tensor v = rows_of(2);
    if (grad_v) {
      copy_heads(v, *grad_v);
    } else {
      v.zero_();
    }
  }
  return {or_nothing(grad_qkv, qkv), or_nothing(of_q.weight, qkv), or_nothing(of_k.weight, qkv)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_op, m) {
  register_op(m,
              "rms_norm_rope_forward(Tensor input, Tensor cos, Tensor sin, Tensor? weight, float "
              "eps, str style, bool zero_centered, str rounding, bool save_stats) -> (Tensor "
              "output, Tensor stats)",
              &rms_norm_rope_forward);
  register_op(m,
              "rms_norm_rope_backward(Tensor grad_output, Tensor input, Tensor cos, Tensor sin, "
              "Tensor? weight, Tensor stats, str style, bool zero_centered, str rounding, bool[2] "
              "wanted) -> (Tensor grad_input, Tensor grad_weight)",
              &rms_norm_rope_backward);
  register_op(m,
              "qk_norm_rope_forward(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? "
              "k_weight, float eps, int heads, int kv_heads, str style, bool zero_centered, str "
              "rounding, bool save_stats) -> (Tensor q, Tensor k, Tensor stats)",
              &qk_norm_rope_forward);
  register_op(m,
              "qk_norm_rope_backward(Tensor? grad_q, Tensor? grad_k, Tensor? grad_v, Tensor qkv, "
              "Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, Tensor stats, int "
              "heads, int kv_heads, str style, bool zero_centered, str rounding, bool[3] wanted) "
              "-> (Tensor grad_qkv, Tensor grad_q_weight, Tensor grad_k_weight)",
              &qk_norm_rope_backward);
}

}  // namespace fused_op