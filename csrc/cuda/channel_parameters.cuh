// The parameters of an image's channel: what norms over channels and group norms do with x̂, and how
// the former read weight and bias. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "cuda/access.cuh"

namespace fused_op::cuda {

// n = x̂ · factor + offset.
template <typename A>
struct ChannelMap {
  A factor;
  A offset;
};

// Weight and bias of a channel. If absent, they are 1 and -0, which change nothing, not even the
// sign of a zero. They are not read for a channel that does not exist.
template <typename Op>
struct ChannelParameters {
  using A = typename Op::A;
  using W = typename Op::W;

  const W* weights;
  const W* biases;

  template <typename Args>
  __device__ __forceinline__ explicit ChannelParameters(const Args& args)
      : weights(static_cast<const W*>(args.weight)), biases(static_cast<const W*>(args.bias)) {}

  __device__ __forceinline__ static A read(const W* from, std::int64_t channel, bool exists,
                                           A absent) {
    return from == nullptr ? absent : load_value<A>(exists, from + channel);
  }
  __device__ __forceinline__ A weight(std::int64_t channel, bool exists = true) const {
    return read(weights, channel, exists, A(1));
  }
  __device__ __forceinline__ A bias(std::int64_t channel, bool exists = true) const {
    return read(biases, channel, exists, A(-0.0));
  }
  __device__ __forceinline__ ChannelMap<A> map(std::int64_t channel) const {
    return {weight(channel), bias(channel)};
  }
};

}  // namespace fused_op::cuda
