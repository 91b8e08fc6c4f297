// The RMS norm with rotary embedding of queries or keys, in both directions: its checks, and its
// call of a kernel. rms_norm_rope.cpp has the ops. A kernel's row is a head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "fused_op.h"

namespace fused_op {

// The arguments of all ops that are not tensors.
struct RopeOptions {
  bool adjacent;
  bool zero_centered;
  bool rounds_xhat;
  bool rounds_norm;  // also the product with a weight of 32 bits
  double eps = 0;
};
RopeOptions parse_rope_options(const char* op, std::string_view style, bool zero_centered,
                               std::string_view rounding, double eps = 0);

struct Turn {
  const at::Tensor& cos;
  const at::Tensor& sin;
};

// Heads and the tensors of their norm.
struct HeadTensors {
  at::Tensor rows;  // [..., heads, head_dim], with any strides
  const char* weight_name;
  const OptionalTensor& weight;

  std::int64_t heads() const { return rows.size(-2); }
  bool has_own_weights() const { return weight && weight->dim() == 2 && heads() > 1; }
};

// Undefined if not wanted.
struct HeadGradients {
  at::Tensor rows;    // with any strides
  at::Tensor weight;  // like the weight
};

void check_heads(const char* op, const HeadTensors& heads);
// Checks that cos and sin fit these heads.
void check_turn(const char* op, const Turn& turn, const at::Tensor& rows);

// Everything has been checked, and there are elements. `output` has the shape of the rows and is
// dense. `stats` has one number for each head.
void rope_forward(const HeadTensors& heads, const Turn& turn, const RopeOptions& options,
                  const at::Tensor& output, const at::Tensor& stats);
void rope_backward(const at::Tensor& grad_output, const HeadTensors& heads, const Turn& turn,
                   const RopeOptions& options, const at::Tensor& stats,
                   const HeadGradients& gradients);

}  // namespace fused_op
