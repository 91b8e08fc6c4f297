// A tile of neighbouring pixels as the loops of cpu/channels_first.h see it: how its channels are
// read and written, and normalised. Included by a level alone: level.h.
#pragma once

#include "core/channels_first.h"
#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Channels that are converted at a time, and whose terms are added in A; totals are double.
constexpr std::int64_t kSumChannels = 32;

// Calls function(first, last) for the channels, kSumChannels at a time.
template <typename Function>
FUSED_OP_CPU_INLINE void for_channels(std::int64_t channels, const Function& function) {
  for (std::int64_t first = 0; first < channels; first += kSumChannels) {
    function(first, std::min(first + kSumChannels, channels));
  }
}

// The elements of some channels: `count` pixels of each, neighbouring channels `stride` apart.
struct ChannelElements {
  void* data;  // only read by load_channels()
  std::int64_t first;
  std::int64_t stride;
  std::int64_t count;
};

// Convert channels to kLanes accumulators each, and back. Only these functions know the type of the
// elements.
template <int kLanes, typename E, typename A>
FUSED_OP_CPU_SHARED void load_channels(const ChannelElements& of, std::int64_t channels, A* to) {
  const E* from = static_cast<const E*>(of.data) + of.first;
  for (std::int64_t i = 0; i < channels; ++i, from += of.stride, to += kLanes) {
    if (of.count == kLanes) {
      load_pack<kLanes>(from, to);
    } else if constexpr (std::is_same_v<E, A>) {
      std::copy_n(from, of.count, to);
    } else {
      read<E>(from, 0, of.count, to);
    }
  }
}
template <int kLanes, typename E, typename A>
FUSED_OP_CPU_SHARED void store_channels(const A* from, const ChannelElements& of,
                                        std::int64_t channels) {
  E* to = static_cast<E*>(of.data) + of.first;
  for (std::int64_t i = 0; i < channels; ++i, to += of.stride, from += kLanes) {
    if (of.count == kLanes) {
      store_pack<kLanes>(from, to);
    } else if constexpr (std::is_same_v<E, A>) {
      std::copy_n(from, of.count, to);
    } else {
      write<E>(from, to, 0, of.count);
    }
  }
}

// A tile of a tensor as accumulators, kSumChannels channels at a time. A sample's last tile may
// lack some of the kLanes pixels: their lanes compute zeros. Every loop over lanes has kLanes
// steps.
template <int kLanes, typename A>
class Pixels {
 public:
  Pixels(const void* data, DType dtype, const PixelTile& tile, std::int64_t pixels)
      : of_{const_cast<void*>(data), tile.first, pixels, tile.count},
        dtype_(dtype),
        is_ready_(dtype == kDTypeOf<A> && tile.count == kLanes) {
    std::fill_n(values_, tile.count < kLanes ? kSumChannels * kLanes : 0, A(0));
  }

  // The next calls are about these channels, no more than kSumChannels, which will be written.
  void take(std::int64_t first) {
    first_ = first;
    at_ = values_;
    stride_ = kLanes;
    if (is_ready_) {
      at_ = static_cast<A*>(of_.data) + of_.first + first * of_.stride;
      stride_ = of_.stride;
    }
  }
  // Or read.
  void load(std::int64_t first, std::int64_t last) {
    take(first);
    if (is_ready_) {
      return;
    }
    const ChannelElements part = elements(first);
    if constexpr (std::is_same_v<A, float>) {
      if (dtype_ == DType::kFloat16) {
        return load_channels<kLanes, Float16>(part, last - first, values_);
      }
      if (dtype_ == DType::kBFloat16) {
        return load_channels<kLanes, BFloat16>(part, last - first, values_);
      }
    }
    load_channels<kLanes, A>(part, last - first, values_);
  }
  // Stores the channels that were taken.
  void store(std::int64_t last) const {
    if (is_ready_) {
      return;
    }
    const ChannelElements part = elements(first_);
    if constexpr (std::is_same_v<A, float>) {
      if (dtype_ == DType::kFloat16) {
        return store_channels<kLanes, Float16>(values_, part, last - first_);
      }
      if (dtype_ == DType::kBFloat16) {
        return store_channels<kLanes, BFloat16>(values_, part, last - first_);
      }
    }
    store_channels<kLanes, A>(values_, part, last - first_);
  }

  FUSED_OP_CPU_INLINE A* operator[](std::int64_t channel) const {
    return at_ + (channel - first_) * stride_;
  }

 private:
  ChannelElements elements(std::int64_t first) const {
    return {of_.data, of_.first + first * of_.stride, of_.stride, of_.count};
  }

  const ChannelElements of_;
  const DType dtype_;
  const bool is_ready_;  // the elements are accumulators, and all of the kLanes pixels are there
  A* at_ = nullptr;
  std::int64_t first_ = 0;
  std::int64_t stride_ = 0;
  alignas(64) A values_[kSumChannels * kLanes];
};

// Weight and bias as accumulators; of what is absent, what changes nothing, not even a zero's sign.
template <typename A, typename Args>
struct ChannelParameters {
  explicit ChannelParameters(const Args& args) : values(new A[2 * args.cols]), cols(args.cols) {
    fill(args.weight, args.param_dtype, A(1), values.get());
    fill(args.bias, args.param_dtype, A(-0.0), values.get() + cols);
  }
  A weight(std::int64_t channel) const { return values[channel]; }
  A bias(std::int64_t channel) const { return values[cols + channel]; }

  std::unique_ptr<A[]> values;
  std::int64_t cols;

 private:
  void fill(const void* from, DType dtype, A absent, A* to) const {
    if (from == nullptr) {
      std::fill_n(to, cols, absent);
    } else {
      read_elements(from, dtype, 0, cols, to);
    }
  }
};

// The normalisers of a tile's pixels.
template <int kLanes, typename A>
struct PixelNormalizers {
  alignas(64) A scale[kLanes];
  alignas(64) A mean[kLanes];
  alignas(64) A shift[kLanes];
  alignas(64) A rstd[kLanes];

  FUSED_OP_CPU_INLINE void put(int lane, const Normalizer<A>& normalizer) {
    scale[lane] = normalizer.scale;
    mean[lane] = normalizer.mean;
    shift[lane] = normalizer.shift;
    rstd[lane] = normalizer.rstd;
  }
  Normalizer<A> operator[](int lane) const {
    return {scale[lane], mean[lane], shift[lane], rstd[lane]};
  }
};

// Of a channel of a tile, by pointers that do not overlap: compilers vectorise that, and not the
// same in a loop over channels.
template <typename Norm, int kLanes, typename A>
void normalize_pixels(const A* __restrict x, const A* __restrict scale, const A* __restrict mean,
                      const A* __restrict shift, const A* __restrict rstd, A* __restrict xhat) {
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    xhat[j] = Norm::normalized(x[j], Normalizer<A>{scale[j], mean[j], shift[j], rstd[j]});
  }
}
template <int kLanes, typename A>
void affine_pixels(const A* __restrict xhat, A weight, A bias, A* __restrict n) {
#pragma omp simd
  for (int j = 0; j < kLanes; ++j) {
    n[j] = multiply_add(xhat[j], weight, bias);
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
