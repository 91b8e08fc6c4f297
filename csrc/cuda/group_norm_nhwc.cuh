// How the kernels of group norms walk over images whose channels are neighbours: group_norm_nhwc.h.
// Device code; torch-free.
#pragma once

#include "core/norm_math.h"
#include "cuda/group_norm_nhwc.h"
#include "cuda/group_norm_slots.cuh"

namespace fused_op::cuda {

// What a kernel is compiled for. E: the elements that it reads and writes.
template <typename E_, int kPack, bool kSilu_>
struct NhwcOp {
  using E = E_;
  using A = Accumulator<E>;
  static constexpr int N = kPack;
  static constexpr bool kSilu = kSilu_;
};

// Where a thread stands.
template <typename Op>
struct NhwcPlace {
  using E = typename Op::E;
  using Packs = Pack<E, Op::N>;
  static constexpr int kBytes = sizeof(E) * Op::N;

  int slab;
  std::int64_t sample;
  int group;           // the first of the tile, in the sample
  int channel;         // the first of the thread's packs, in the tile
  int row;             // of the thread
  int rows;            // of the CTA
  int slab_pixels;     // of this slab
  int pixels;          // of the thread
  std::int64_t first;  // element of its first pack
  std::int64_t next;   // elements from one of its packs to the next

  // block: the number of the CTA, or of the one whose work it does.
  __device__ __forceinline__ NhwcPlace(const GroupNormArgs& args, const GroupNormNhwcSteps& steps,
                                       unsigned block)
      : rows(steps.rows) {
    const unsigned tiles = static_cast<unsigned>(steps.tiles);
    const unsigned slabs = static_cast<unsigned>(steps.slabs);
    group = static_cast<int>(block % tiles) * steps.tile_groups;
    slab = static_cast<int>(block / tiles % slabs);
    sample = block / tiles / slabs;
    row = static_cast<int>(threadIdx.x) / steps.columns;
    channel = (static_cast<int>(threadIdx.x) - row * steps.columns) * Op::N;
    const std::int64_t begin = std::int64_t{slab} * steps.slab_pixels;
    slab_pixels =
        static_cast<int>(min(args.pixels - begin, static_cast<std::int64_t>(steps.slab_pixels)));
    pixels = row < rows ? max(slab_pixels - row + rows - 1, 0) / rows : 0;
    first = (sample * args.pixels + begin + row) * args.channels +
            std::int64_t{group} * steps.group_channels + channel;
    next = rows * args.channels;
  }

  // Calls use(packs, element) for the packs of each of the thread's pixels; they begin at that
  // element of each tensor. A few of them are on their way to shared memory meanwhile, where each
  // thread has room of its own: kNhwcStages packs of each tensor.
  template <int kTensors, typename Use>
  __device__ __forceinline__ void walk(const void* const (&tensors)[kTensors], void* room,
                                       Use&& use) const {
    const std::uint32_t stage_bytes = kBytes * kTensors * blockDim.x;
    const std::uint32_t own = shared_address(room) + threadIdx.x * kBytes;
    const auto copy = [&](int pixel, std::uint32_t to) {
      if (pixel < pixels) {
        const std::int64_t element = first + pixel * next;
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor) {
          const auto from =
              reinterpret_cast<std::uintptr_t>(static_cast<const E*>(tensors[tensor]) + element);
          const std::uint32_t at = to + tensor * kBytes * blockDim.x;
          if constexpr (kBytes == 16) {
            copy_async(at, from);
          } else {
            copy_bytes_async<kBytes>(at, from);
          }
        }
      }
      end_copy_group();
    };
#pragma unroll
    for (int stage = 0; stage < kNhwcStages; ++stage) {
      copy(stage, own + stage * stage_bytes);
    }
    std::uint32_t stage = own;
    std::int64_t element = first;
#pragma unroll 1
    for (int pixel = 0; pixel < pixels; ++pixel) {
      await_copies<kNhwcStages - 1>();
      Packs packs[kTensors];
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        load_shared_bytes<kBytes>(stage + tensor * kBytes * blockDim.x, packs[tensor].words);
      }
      use(packs, element);
      copy(pixel + kNhwcStages, stage);
      element += next;
      stage += stage_bytes;
      stage = stage == own + kNhwcStages * stage_bytes ? own : stage;
    }
  }

  // Numbers of the thread's channels, of which there is a row for each sample.
  template <typename A>
  __device__ __forceinline__ void read(const A* row, A (&values)[Op::N]) const {
    Pack<A, Op::N> pack;
    load_bytes_if<sizeof(A) * Op::N, false>(true, row + channel, pack.words);
    to_values(pack, values);
  }
};

__device__ __forceinline__ int warp_of_cta() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ __forceinline__ int warps_of_cta() { return static_cast<int>(blockDim.x) / kWarpSize; }
__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// The third kernel begins with the slabs that the first one read last: the L2 cache has them still.
__device__ __forceinline__ unsigned last_block_first() { return gridDim.x - 1 - blockIdx.x; }

}  // namespace fused_op::cuda
