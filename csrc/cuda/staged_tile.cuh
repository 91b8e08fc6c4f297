// How backward of norms over channels reads and writes: tiles of pixels in shared memory, and
// passes over their channels. Device code; torch-free.
#pragma once

#include "cuda/access.cuh"
#include "cuda/memory.cuh"
#include "cuda/pixel_exchange.cuh"

namespace fused_op::cuda {

// Moves `count` channels of a tile between global memory, where they are `pixels` apart, and shared
// memory, where they are kRowBytes apart. A copy moves a pack.
template <typename Op>
class ChannelCopies {
  using E = typename Op::E;
  static constexpr int kBytes = Op::kPack * static_cast<int>(sizeof(E));
  static constexpr int kCopies = Op::kTile / Op::kPack;  // of a channel
  static constexpr int kStep = Op::kThreads / kCopies;   // channels that are copied at once
  static constexpr int kTogether = 8;                    // loads, before the first is waited for
  static_assert(kStep > 0);

 public:
  __device__ __forceinline__ ChannelCopies(const PixelTile& tile, std::int64_t first, int count,
                                           std::int64_t pixels)
      : row_(static_cast<int>(threadIdx.x) / kCopies),
        column_(static_cast<int>(threadIdx.x) % kCopies * Op::kPack),
        live_(column_ < tile.count),
        count_(count),
        step_(kStep * pixels),
        element_(tile.first + (first + row_) * pixels + column_) {}

  // Pixels past the end of the tile become zeros.
  __device__ __forceinline__ void load(const void* from, unsigned char* to) const {
    const E* source = static_cast<const E*>(from) + element_;
    to += place();
    if (!live_) {
      constexpr std::uint32_t kZeros[4] = {};
#pragma unroll 1
      for (int row = row_; row < count_; row += kStep, to += kStep * Op::kRowBytes) {
        store_bytes<kBytes>(to, kZeros);
      }
    } else if constexpr (kBytes == 2) {
      load_together(source, to);
    } else {
#pragma unroll 4
      for (int row = row_; row < count_; row += kStep, to += kStep * Op::kRowBytes) {
        const auto target = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
        if constexpr (kBytes == 16) {
          copy_async(target, reinterpret_cast<std::uintptr_t>(source));
        } else {
          copy_bytes_async<kBytes>(target, reinterpret_cast<std::uintptr_t>(source));
        }
        source += step_;
      }
    }
  }
  __device__ __forceinline__ void store(const unsigned char* from, void* to) const {
    if (!live_) {
      return;
    }
    E* target = static_cast<E*>(to) + element_;
    from += place();
#pragma unroll 1
    for (int row = row_; row < count_; row += kTogether * kStep) {
      Pack<E, Op::kPack> packs[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (row + k * kStep < count_) {
          load_shared_bytes<kBytes>(static_cast<std::uint32_t>(
                                        __cvta_generic_to_shared(from + k * kStep * Op::kRowBytes)),
                                    packs[k].words);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (row + k * kStep < count_) {
          store_bytes<kBytes>(target, packs[k].words);
        }
        target += step_;
      }
      from += kTogether * kStep * Op::kRowBytes;
    }
  }

 private:
  __device__ __forceinline__ int place() const {
    return row_ * Op::kRowBytes + column_ * static_cast<int>(sizeof(E));
  }
  // Of 2 bytes, which cp.async does not copy.
  __device__ __forceinline__ void load_together(const E* source, unsigned char* to) const {
#pragma unroll 1
    for (int row = row_; row < count_; row += kTogether * kStep) {
      std::uint32_t halves[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        load_half_if(row + k * kStep < count_, source, &halves[k]);
        source += step_;
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (row + k * kStep < count_) {
          store_bytes<2>(to, &halves[k]);
        }
        to += kStep * Op::kRowBytes;
      }
    }
  }

  int row_;
  int column_;
  bool live_;
  int count_;
  std::int64_t step_;
  std::int64_t element_;
};

// The tile in use, of x and dy, in shared memory: [stages][kStreams][some][kTile].
template <typename Op>
class StagedTile {
  using E = typename Op::E;
  static constexpr int kStreams = 2;
  using Packs = Pack<E, Op::N>[kStreams];

  // A CTA's tiles, one after another.
  struct Cursor {
    std::int64_t sample;
    std::int64_t tile;  // of the sample
  };

 public:
  __device__ __forceinline__ StagedTile(const ChannelsFirstBackwardSteps& steps,
                                        unsigned char* shared, const void* x, const void* dy,
                                        std::int64_t channels, std::int64_t pixels)
      : steps_(steps),
        channels_(channels),
        pixels_(pixels),
        whole_(steps.some == channels),
        shared_(shared),
        here_(shared),
        step_(cursor(gridDim.x)),
        used_(cursor(blockIdx.x)),
        copied_(used_),
        tile_(at(used_)),
        from_{x, dy} {}

  // Starts to copy this tile and the next one, or those of them that are not on their way yet, and
  // waits for this one. This is also a barrier.
  __device__ __forceinline__ void begin() {
    if (whole_) {
      bool first = copied_.sample == used_.sample && copied_.tile == used_.tile;
#pragma unroll 1
      for (;;) {
        if (copied_.sample < steps_.samples) {
          copy(at(copied_), 0, first ? here_ : other());
        }
        end_copy_group();
        advance(copied_);
        if (!first || steps_.stages == 1) {
          break;
        }
        first = false;
      }
      if (steps_.stages == 2) {
        await_copies<1>();
      } else {
        await_copies<0>();
      }
    }
    __syncthreads();
  }
  // Goes on to the next tile; false if there is none.
  __device__ __forceinline__ bool next() {
    __syncthreads();
    if (steps_.stages == 2) {
      here_ = other();
    }
    advance(used_);
    tile_ = at(used_);
    return used_.sample < steps_.samples;
  }

  // Calls each(channel, exists, packs) for the channels of this thread's slice, as often in every
  // thread. Where a channel does not exist, the packs are zeros.
  template <typename Each>
  __device__ __forceinline__ void read(const PixelThread<Op>& thread, const Each& each) const {
#pragma unroll 1
    for (std::int64_t first = 0; first < channels_; first += steps_.some) {
      const int count = fetch(first);
#pragma unroll 2
      for (int row = 0; row < count; row += Op::kSlices) {
        const int mine = row + thread.slice;
        Packs packs;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          clear(packs[s]);
          if (mine < count) {
            packs[s] = *place(thread, s, mine);
          }
        }
        each(first + mine, mine < count, packs);
      }
    }
  }
  // Stores each(channel, packs) of all channels. Narrow packs go by way of shared memory, so that
  // neighbouring threads store neighbouring pixels.
  template <typename Each>
  __device__ __forceinline__ void write(const PixelThread<Op>& thread, void* to,
                                        const Each& each) const {
    const bool live = thread.lane * Op::N < tile_.count;
    E* const target = static_cast<E*>(to) + tile_.first + thread.lane * Op::N;
#pragma unroll 1
    for (std::int64_t first = 0; first < channels_; first += steps_.some) {
      const int count = fetch(first);
#pragma unroll 2
      for (int mine = thread.slice; mine < count; mine += Op::kSlices) {
        Packs packs;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          packs[s] = *place(thread, s, mine);
        }
        const Pack<E, Op::N> result = each(first + mine, packs);
        if constexpr (Op::kPack < Op::N) {
          *place(thread, 0, mine) = result;
        } else if (live) {
          store_bytes<kVectorBytes>(target + (first + mine) * pixels_, result.words);
        }
      }
      if constexpr (Op::kPack < Op::N) {
        __syncthreads();
        ChannelCopies<Op>(tile_, first, count, pixels_).store(here_, to);
      }
    }
  }

  // The pixel that this thread owns: its row, and whether there is one.
  __device__ __forceinline__ std::int64_t own_row() const { return tile_.row + threadIdx.x; }
  __device__ __forceinline__ bool owns() const { return threadIdx.x < tile_.count; }

 private:
  __device__ __forceinline__ Cursor cursor(std::int64_t tiles) const {
    const std::int64_t of_sample = PixelTile::tiles_of_sample(pixels_, Op::kTile);
    return {tiles / of_sample, tiles % of_sample};
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.sample += step_.sample;
    cursor.tile += step_.tile;
    if (cursor.tile * Op::kTile >= pixels_) {
      cursor.tile -= PixelTile::tiles_of_sample(pixels_, Op::kTile);
      ++cursor.sample;
    }
  }
  __device__ __forceinline__ PixelTile at(const Cursor& cursor) const {
    return {cursor.sample, cursor.tile, Op::kTile, channels_, pixels_};
  }
  __device__ __forceinline__ std::int64_t stream_bytes() const {
    return steps_.some * Op::kRowBytes;
  }
  __device__ __forceinline__ unsigned char* other() const {
    return here_ == shared_ ? shared_ + kStreams * stream_bytes() : shared_;
  }
  __device__ __forceinline__ Pack<E, Op::N>* place(const PixelThread<Op>& thread, int s,
                                                   int row) const {
    return reinterpret_cast<Pack<E, Op::N>*>(here_ + s * stream_bytes() + row * Op::kRowBytes +
                                             thread.lane * kVectorBytes);
  }
  __device__ __forceinline__ int count(std::int64_t first) const {
    return static_cast<int>(channels_ - first < steps_.some ? channels_ - first : steps_.some);
  }
  __device__ __forceinline__ void copy(const PixelTile& tile, std::int64_t first,
                                       unsigned char* to) const {
    const ChannelCopies<Op> copies(tile, first, count(first), pixels_);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      copies.load(from_[s], to + s * stream_bytes());
    }
  }
  // Channels `first` and following are in shared memory afterwards; returns how many.
  __device__ __forceinline__ int fetch(std::int64_t first) const {
    if (!whole_) {
      __syncthreads();  // all have finished with those before
      copy(tile_, first, here_);
      end_copy_group();
      await_copies<0>();
      __syncthreads();
    }
    return count(first);
  }

  const ChannelsFirstBackwardSteps& steps_;
  std::int64_t channels_;
  std::int64_t pixels_;
  bool whole_;
  unsigned char* shared_;
  unsigned char* here_;
  Cursor step_;
  Cursor used_;
  Cursor copied_;  // the next to copy
  PixelTile tile_;
  const void* from_[kStreams];
};

}  // namespace fused_op::cuda
