// A tile of neighbouring pixels as the loops of cpu/channels_first.h see it: how its channels are
// read and written, and normalised. Included by a level alone: level.h.
#pragma once

#include "core/channels_first.h"
#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Pixels of a tile, some of which a sample's last tile may lack: their lanes compute zeros. Every
// loop over lanes has kLanes steps.
template <int kLanes, typename E, typename A>
class PixelReader {
 public:
  PixelReader(const void* data, const PixelTile& tile, std::int64_t pixels)
      : from_(static_cast<const E*>(data) + tile.first), pixels_(pixels), count_(tile.count) {}

  // Valid until the next call.
  FUSED_OP_CPU_INLINE const A* operator()(std::int64_t channel) {
    const E* const from = from_ + channel * pixels_;
    if constexpr (std::is_same_v<E, A>) {
      if (count_ == kLanes) {
        return from;
      }
    }
    if (count_ == kLanes) {
      load_pack<kLanes>(from, values_);
    } else {
      read<E>(from, 0, count_, values_);
    }
    return values_;
  }

 private:
  const E* from_;
  std::int64_t pixels_;
  std::int64_t count_;
  alignas(64) A values_[kLanes] = {};
};

template <int kLanes, typename E, typename A>
FUSED_OP_CPU_INLINE void write_pixels(const A* from, void* data, const PixelTile& tile,
                                      std::int64_t pixels, std::int64_t channel) {
  E* const to = static_cast<E*>(data) + tile.first + channel * pixels;
  if (tile.count == kLanes) {
    store_pack<kLanes>(from, to);
  } else {
    write<E>(from, to, 0, tile.count);
  }
}

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
