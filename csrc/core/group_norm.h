// The group norm of images, [samples, channels, pixels]: its arguments and formulas for both
// backends. Torch-free.
//
//   x̂ = (x - mean) · rstd over the channels and pixels of one group of a sample
//   n = x̂ · factor + offset,  y = n or silu(n)
//   factor = weight · (1 + scale),  offset = bias · (1 + scale) + shift
//
// weight and bias belong to a channel; scale and shift to a channel of a sample. Backward, with
// dn = dy or dy·silu'(n), and the sums A = Σ dn and B = Σ dn·x̂ over the pixels of a channel:
//
//   dscale = weight·B + bias·A             dshift = A
//   dweight = Σ over samples of (1 + scale)·B,  dbias = Σ over samples of (1 + scale)·A
//   dx = rstd · (dn·factor - mean(dn·factor) - x̂ · mean(dn·factor·x̂)), means over the group
//
// Source: Wu & He 2018 (arXiv:1803.08494).
#pragma once

#include <cstdint>

#include "core/norm_args.h"

namespace fused_op {

// What is read for each channel, rather than for each pixel.
struct ChannelArgs {
  DType param_dtype = DType::kFloat32;
  const void* weight = nullptr;  // [channels], null means 1
  const void* bias = nullptr;    // [channels], null means 0
  DType entry_dtype = DType::kFloat32;
  const void* scale = nullptr;    // [samples, channels], null means 0; channels are neighbours
  const void* shift = nullptr;    // likewise
  std::int64_t entry_stride = 0;  // of scale and shift, from sample to sample
};

// Images, and everything written, are contiguous, in the order [samples, channels, pixels], or
// [samples, pixels, channels] (NHWC) where a backend has it. No dimension is empty, and channels
// are a multiple of groups. f64 goes only with f64.
struct GroupNormArgs {
  DType dtype = DType::kFloat32;
  std::int64_t samples = 0;
  std::int64_t channels = 0;
  std::int64_t pixels = 0;
  std::int64_t groups = 0;
  bool nhwc = false;  // the channels of a pixel are neighbours
  bool silu = false;
  ChannelArgs channel;

  std::int64_t group_channels() const { return channels / groups; }
  std::int64_t group_elements() const { return group_channels() * pixels; }
  std::int64_t all_groups() const { return samples * groups; }
};

struct GroupNormForwardArgs : GroupNormArgs {
  const void* input = nullptr;
  void* output = nullptr;
  void* stats = nullptr;  // [2, samples · groups] mean and rstd; null: not wanted
  double eps = 0;
  void* workspace = nullptr;  // as many bytes as the backend asks for
};

struct GroupNormBackwardArgs : GroupNormArgs {
  const void* input = nullptr;
  const void* grad_output = nullptr;
  const void* stats = nullptr;  // as forward wrote them
  void* grad_input = nullptr;   // null, as all below: not wanted
  void* grad_weight = nullptr;  // [channels], of param_dtype
  void* grad_bias = nullptr;
  void* grad_scale = nullptr;  // [samples, channels], of entry_dtype
  void* grad_shift = nullptr;
  void* workspace = nullptr;  // as many bytes as the backend asks for

  FUSED_OP_HD bool wants_sums() const {
    return grad_weight != nullptr || grad_bias != nullptr || grad_scale != nullptr ||
           grad_shift != nullptr;
  }
};

}  // namespace fused_op
