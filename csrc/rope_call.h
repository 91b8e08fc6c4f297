// Queries or keys on their way to a kernel that normalises and rotates them: what is checked, and
// the call in either direction. rms_norm_rope.cpp has the ops. A row of the kernels is a head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "fused_op.h"

namespace fused_op {

// The arguments of all ops that are no tensors.
struct RopeOptions {
  bool adjacent;
  bool zero_centered;
  bool rounds_xhat;
  bool rounds_norm;  // also of a product with a weight of 32 bits
  double eps = 0;
};
RopeOptions parse_rope_options(const char* op, std::string_view style, bool zero_centered,
                               std::string_view rounding, double eps = 0);

struct Turn {
  const at::Tensor& cos;
  const at::Tensor& sin;
};

// Heads, and what they have of a norm.
struct HeadTensors {
  at::Tensor rows;  // [..., heads, head_dim], of any strides
  const char* weight_name;
  const OptionalTensor& weight;

  std::int64_t heads() const { return rows.size(-2); }
  bool has_own_weights() const { return weight && weight->dim() == 2 && heads() > 1; }
};

// Undefined where they are not wanted.
struct HeadGradients {
  at::Tensor rows;    // of any strides
  at::Tensor weight;  // like the weight
};

void check_heads(const char* op, const HeadTensors& heads);
// That they fit heads of these.
void check_turn(const char* op, const Turn& turn, const at::Tensor& rows);

// Everything is checked, and there are elements. `output` has the shape of the rows, and is dense;
// `stats` has a number for each head.
void rope_forward(const HeadTensors& heads, const Turn& turn, const RopeOptions& options,
                  const at::Tensor& output, const at::Tensor& stats);
void rope_backward(const at::Tensor& grad_output, const HeadTensors& heads, const Turn& turn,
                   const RopeOptions& options, const at::Tensor& stats,
                   const HeadGradients& gradients);

}  // namespace fused_op
