// How backward of norms over channels reads and writes: tiles of pixels in shared memory, and
// passes over their channels. Device code; torch-free.
#pragma once

#include "cuda/access.cuh"
#include "cuda/memory.cuh"
#include "cuda/pixel_exchange.cuh"

namespace fused_op::cuda {

// Moves `count` channels of the tile that begins with pixel `tile_row` between global memory and
// shared memory, where channels are kRowBytes apart. A copy moves a pack.
template <typename Op>
class ChannelCopies {
  using E = typename Op::E;
  static constexpr int kBytes = Op::kPack * static_cast<int>(sizeof(E));
  static constexpr int kCopies = Op::kTile / Op::kPack;  // of a channel
  static constexpr int kStep = Op::kThreads / kCopies;   // channels that are copied at once
  // Loads, before the first is waited for: from shared memory, or of 2 bytes.
  static constexpr int kTogether = 8;
  static constexpr int kHalvesTogether = 24;
  static_assert(kStep > 0);

 public:
  __device__ __forceinline__ ChannelCopies(const ChannelsFirstBackwardArgs& args,
                                           std::int64_t tile_row, std::int64_t first, int count)
      : row_(static_cast<int>(threadIdx.x) / kCopies),
        column_(static_cast<int>(threadIdx.x) % kCopies * Op::kPack),
        live_(tile_row + column_ < args.rows),
        count_(count),
        step_(kStep * args.pixels),
        element_(first_element(tile_row + column_, args.cols, args.pixels) +
                 (first + row_) * args.pixels) {}

  // Pixels past the last one become zeros.
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
        store_bytes_if<kBytes>(row + k * kStep < count_, target, packs[k].words);
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
    for (int row = row_; row < count_; row += kHalvesTogether * kStep) {
      std::uint32_t halves[kHalvesTogether];
#pragma unroll
      for (int k = 0; k < kHalvesTogether; ++k) {
        load_half_if(row + k * kStep < count_, source, &halves[k]);
        source += step_;
      }
#pragma unroll
      for (int k = 0; k < kHalvesTogether; ++k) {
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

 public:
  __device__ __forceinline__ StagedTile(const ChannelsFirstBackwardArgs& args,
                                        const ChannelsFirstBackwardSteps& steps,
                                        unsigned char* shared)
      : args_(args),
        steps_(steps),
        shared_(shared),
        here_(shared),
        used_(std::int64_t{blockIdx.x} * Op::kTile),
        copied_(used_) {}

  // Starts to copy this tile and the next one, or those of them that are not on their way yet;
  // for_parts() copies some channels at a time.
  __device__ __forceinline__ void copy_ahead() {
    if constexpr (Op::kWhole) {
      bool first = copied_ == used_;
#pragma unroll 1
      for (;;) {
        if (copied_ < args_.rows) {
          copy(copied_, 0, static_cast<int>(args_.cols), first ? here_ : other());
        }
        end_copy_group();
        copied_ += step();
        if (!first || steps_.stages == 1) {
          break;
        }
        first = false;
      }
    }
  }
  // Waits for this tile. It is also a barrier.
  __device__ __forceinline__ void await() const {
    if constexpr (Op::kWhole) {
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
    used_ += step();
    return used_ < args_.rows;
  }

  // Calls each(channel, exists, packs) for the channels of this thread's slice, as often in every
  // thread. Where a channel does not exist, the packs are zeros.
  template <typename Each>
  __device__ __forceinline__ void read(const PixelThread<Op>& thread, const Each& each) const {
    for_parts([&](std::int64_t first, int count) {
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
    });
  }
  // Stores each(channel, packs) of all channels. Packs of less than 16 bytes go by way of shared
  // memory, so that neighbouring threads store neighbouring pixels.
  template <typename Each>
  __device__ __forceinline__ void write(const PixelThread<Op>& thread, void* to,
                                        const Each& each) const {
    constexpr bool kDirect = Op::kPack == Op::N;
    const std::int64_t pixel = used_ + thread.lane * Op::N;
    E* const target = static_cast<E*>(to) + first_element(pixel, args_.cols, args_.pixels);
    for_parts([&](std::int64_t first, int count) {
#pragma unroll 2
      for (int mine = thread.slice; mine < count; mine += Op::kSlices) {
        Packs packs;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          packs[s] = *place(thread, s, mine);
        }
        const Pack<E, Op::N> result = each(first + mine, packs);
        if constexpr (kDirect) {
          store_if<kVectorBytes / 4>(pixel < args_.rows, target + (first + mine) * args_.pixels,
                                     result.words);
        } else {
          *place(thread, 0, mine) = result;
        }
      }
      if constexpr (!kDirect) {
        __syncthreads();
        ChannelCopies<Op>(args_, used_, first, count).store(here_, to);
      }
    });
  }

  // For an owner, of PixelExchange: the number of its pixel, and whether there is such a pixel.
  __device__ __forceinline__ std::int64_t own_row() const { return used_ + threadIdx.x; }
  __device__ __forceinline__ bool owns() const { return own_row() < args_.rows; }

 private:
  // From one tile of a CTA to its next.
  __device__ __forceinline__ static std::int64_t step() {
    return std::int64_t{gridDim.x} * Op::kTile;
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
  __device__ __forceinline__ void copy(std::int64_t tile_row, std::int64_t first, int count,
                                       unsigned char* to) const {
    const ChannelCopies<Op> copies(args_, tile_row, first, count);
    copies.load(args_.x.data, to);
    copies.load(args_.grad_output.data, to + stream_bytes());
  }
  // Calls each(first, count) for the channels that are in shared memory at once: all, or one part
  // after another, which it copies.
  template <typename Each>
  __device__ __forceinline__ void for_parts(const Each& each) const {
    if constexpr (Op::kWhole) {
      each(std::int64_t{0}, static_cast<int>(args_.cols));
    } else {
#pragma unroll 1
      for (std::int64_t first = 0; first < args_.cols; first += steps_.some) {
        const std::int64_t left = args_.cols - first;
        const int count = static_cast<int>(left < steps_.some ? left : steps_.some);
        __syncthreads();  // all have finished with those before
        copy(used_, first, count, here_);
        end_copy_group();
        await_copies<0>();
        __syncthreads();
        each(first, count);
      }
    }
  }

  const ChannelsFirstBackwardArgs& args_;
  const ChannelsFirstBackwardSteps& steps_;
  unsigned char* shared_;
  unsigned char* here_;
  // The first pixels of the tile in use, and of the next to copy.
  std::int64_t used_;
  std::int64_t copied_;
};

}  // namespace fused_op::cuda
