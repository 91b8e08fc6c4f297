// A tile of neighbouring pixels as the loops of cpu/channels_first.h see it: how its channels are
// read and written, and normalised. Included by a level alone: level.h.
#pragma once

#include "core/channels_first.h"
#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Pixels of a tile, some of which a sample's last tile may lack: their lanes compute zeros. Every
// loop over lanes has kLanes steps.
template <int kLanes, typename A>
class PixelReader {
 public:
  PixelReader(const void* data, DType dtype, const PixelTile& tile, std::int64_t pixels)
      : data_(data),
        dtype_(dtype),
        first_(tile.first),
        count_(tile.count),
        pixels_(pixels),
        in_place_(dtype == kDTypeOf<A> && tile.count == kLanes) {}

  // Valid until the next call.
  FUSED_OP_CPU_INLINE const A* operator()(std::int64_t channel) {
    const std::int64_t first = first_ + channel * pixels_;
    if (in_place_) {
      return static_cast<const A*>(data_) + first;
    }
    read_elements(data_, dtype_, first, count_, values_);
    return values_;
  }

 private:
  const void* data_;
  DType dtype_;
  std::int64_t first_;
  std::int64_t count_;
  std::int64_t pixels_;
  bool in_place_;
  alignas(64) A values_[kLanes] = {};
};

template <typename A>
void write_pixels(const A* from, void* data, DType dtype, const PixelTile& tile,
                  std::int64_t pixels, std::int64_t channel) {
  write_elements(from, data, dtype, tile.first + channel * pixels, tile.count);
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
