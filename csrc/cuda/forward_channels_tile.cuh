// What forward of norms over channels is made of: where a thread stands, and how it reads channels
// and adds them up. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "core/norm_math.h"
#include "cuda/access.cuh"
#include "cuda/channel_parameters.cuh"
#include "cuda/channels_first.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// What a kernel is compiled for. E: the elements that it reads and writes; W: those of the
// parameters.
template <typename Norm_, typename E_, typename W_, int kPack, int kWarps_, int kGroups_,
          int kChannels_, int kCtasPerSm_, bool kSilu_>
struct ChannelsFirstForwardOp {
  using Norm = Norm_;
  using E = E_;
  using W = W_;
  using A = Accumulator<E>;
  static constexpr int N = kPack;
  static constexpr int kWarps = kWarps_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kChannels = kChannels_;
  static constexpr bool kSilu = kSilu_;
  static constexpr bool kKept = kChannels > 0;
  static constexpr int kEach = (kChannels + kWarps - 1) / kWarps;  // channels of a warp, at most
  static constexpr int kThreads = kWarpSize * kWarps * kGroups;
  static constexpr int kTile = kWarpSize * N;  // pixels
  static constexpr int kCtasPerSm = kCtasPerSm_;
};

// Where a thread stands in the tile of its group. Groups are numbered as tiles are.
template <typename Op>
struct PixelPlace {
  int lane;
  int warp;   // number of the warp in its group
  int group;  // number of the group in its CTA
  bool live;  // false past the last pixel: such lanes compute on zeros and store nothing
  std::int64_t channels;
  std::int64_t stride;  // elements from one channel to the next
  std::int64_t first;   // element of the lane's first pixel in channel 0

  __device__ __forceinline__ explicit PixelPlace(const ChannelsFirstForwardArgs& args)
      : lane(static_cast<int>(threadIdx.x)),
        warp(static_cast<int>(threadIdx.y)),
        group(static_cast<int>(threadIdx.z)),
        live(row() < args.rows),
        channels(Op::kKept ? Op::kChannels : args.cols),
        stride(args.pixels),
        first(first_element(row(), channels, stride)) {}
  // The number of the lane's first pixel.
  __device__ __forceinline__ std::int64_t row() const {
    return (static_cast<std::int64_t>(blockIdx.x) * Op::kGroups + group) * Op::kTile + lane * Op::N;
  }
  __device__ __forceinline__ std::int64_t channel(int i) const { return warp + i * Op::kWarps; }
  __device__ __forceinline__ bool has(int i) const {
    return (Op::kKept && (i + 1) * Op::kWarps <= Op::kChannels) || channel(i) < channels;
  }
  __device__ __forceinline__ std::int64_t element(int i) const {
    return first + channel(i) * stride;
  }
  // The same place, for stores. The compiler must not keep the offsets that it computed for the
  // loads: they would take more registers than the loaded values.
  __device__ __forceinline__ PixelPlace again() const {
    PixelPlace same = *this;
    asm volatile("" : "+l"(same.stride));
    return same;
  }
  // How many channels this warp has.
  __device__ __forceinline__ int count() const {
    return static_cast<int>((channels - warp + Op::kWarps - 1) / Op::kWarps);
  }
};

// A lane's pixels in its warp's channels: kept in registers, or read again each time.
template <typename Op, bool kKept>
class Channels {
  using E = typename Op::E;
  static constexpr int N = Op::N;
  static constexpr int kOfPack = sizeof(E) * N < 4 ? 2 : 1;  // channels that share a word

 public:
  __device__ __forceinline__ Channels(const void* data, const PixelPlace<Op>& place)
      : from_(static_cast<const E*>(data)), place_(place) {
    if constexpr (Op::Norm::kCentered) {
      clear(first_);
      load_bytes_if<sizeof(E) * N, false>(place_.live, from_ + place_.first, first_.words);
    }
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < Op::kEach; ++i) {
        keep(i, read(i));
      }
    }
  }
  // Called between two passes, it makes the second one unpack the pixels again: see access.cuh.
  __device__ __forceinline__ void stay_packed() {
    if constexpr (kKept) {
      cuda::stay_packed(packs_);
    }
  }
  // Of channel 0, which every warp has read if the norm subtracts a mean.
  template <typename A>
  __device__ __forceinline__ void get_first(A (&values)[N]) const {
    to_values(first_, values);
  }
  template <typename A>
  __device__ __forceinline__ void get(int i, A (&values)[N]) const {
    if constexpr (kKept) {
      A all[kOfPack * N];
      to_values(packs_[i / kOfPack], all);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = all[i % kOfPack * N + j];
      }
    } else {
      to_values(read(i), values);
    }
  }

 private:
  __device__ __forceinline__ void keep(int i, const Pack<E, N>& pack) {
    if constexpr (kOfPack == 1) {
      packs_[i] = pack;
    } else if (i % kOfPack == 0) {
      packs_[i / kOfPack].words[0] = pack.words[0];
    } else {
      packs_[i / kOfPack].words[0] |= pack.words[0] << 16;
    }
  }
  __device__ __forceinline__ Pack<E, N> read(int i) const {
    Pack<E, N> pack;
    clear(pack);
    load_bytes_if<sizeof(E) * N, false>(place_.live && place_.has(i), from_ + place_.element(i),
                                        pack.words);
    return pack;
  }

  const E* from_;
  const PixelPlace<Op>& place_;
  Pack<E, N> first_;
  Pack<E, kOfPack * N> packs_[kKept ? (Op::kEach + kOfPack - 1) / kOfPack : 1];
};

// Copies the parameters of all channels to shared memory, [warp][i]. From there they arrive soon;
// from global memory, each channel would wait for a cache. Share of copy without and with it: 0.38
// 0.59 at 8x768x1568, 0.63 0.71 at 8x384x6272 (H200, bf16). It is also a barrier of the CTA.
template <typename Op>
__device__ __forceinline__ void keep_maps(const ChannelsFirstForwardArgs& args,
                                          ChannelMap<typename Op::A> (&to)[Op::kWarps][Op::kEach]) {
  const ChannelParameters<Op> parameters(args);
  const int thread =
      static_cast<int>((threadIdx.z * Op::kWarps + threadIdx.y) * kWarpSize + threadIdx.x);
#pragma unroll 1
  for (int channel = thread; channel < Op::kChannels; channel += Op::kThreads) {
    to[channel % Op::kWarps][channel / Op::kWarps] = parameters.map(channel);
  }
  __syncthreads();
}

// Calls add(i, parts) for all channels of a warp, and adds the parts of kFoldedChannels channels at
// a time to the totals.
template <typename Op, bool kKept, int kValues, typename Add>
__device__ __forceinline__ void add_channels(const PixelPlace<Op>& place,
                                             typename Op::A (&totals)[kValues][Op::N],
                                             const Add& add) {
  using A = typename Op::A;
  const auto add_folded = [&](const A(&parts)[kValues][Op::N]) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
#pragma unroll
      for (int j = 0; j < Op::N; ++j) {
        totals[k][j] += parts[k][j];
      }
    }
  };
  if constexpr (kKept) {
#pragma unroll
    for (int first = 0; first < Op::kEach; first += kFoldedChannels) {
      A parts[kValues][Op::N] = {};
#pragma unroll
      for (int i = first; i < first + kFoldedChannels && i < Op::kEach; ++i) {
        if (place.has(i)) {
          add(i, parts);
        }
      }
      add_folded(parts);
    }
  } else {
    const int count = place.count();
#pragma unroll 1
    for (int first = 0; first < count; first += kFoldedChannels) {
      A parts[kValues][Op::N] = {};
      const int last = first + kFoldedChannels < count ? first + kFoldedChannels : count;
#pragma unroll 4
      for (int i = first; i < last; ++i) {
        add(i, parts);
      }
      add_folded(parts);
    }
  }
}

// Calls each(i) for all channels of a warp.
template <typename Op, bool kKept, typename Each>
__device__ __forceinline__ void for_channels(const PixelPlace<Op>& place, const Each& each) {
  if constexpr (kKept) {
#pragma unroll
    for (int i = 0; i < Op::kEach; ++i) {
      if (place.has(i)) {
        each(i);
      }
    }
  } else {
    const int count = place.count();
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      each(i);
    }
  }
}

// Sums values of each pixel over the warps of a group, in the order of the warps. All threads of
// the group call add(); between two calls there must be a barrier.
template <typename Op, int kValues>
struct WarpSums {
  using A = typename Op::A;
  static constexpr int N = Op::N;
  using Shared = A[Op::kGroups][kValues][Op::kWarps][Op::kTile];

  Shared& shared;

  __device__ __forceinline__ static void barrier(const PixelPlace<Op>& place) {
    row_barrier(place.group, Op::kWarps * kWarpSize);
  }
  __device__ __forceinline__ void add(const PixelPlace<Op>& place, A (&values)[kValues][N]) const {
    if constexpr (Op::kWarps == 1) {
      return;
    }
    auto& mine = shared[place.group];
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        mine[k][place.warp][j * kWarpSize + place.lane] = values[k][j];
      }
    }
    barrier(place);
#pragma unroll 1
    for (int i = place.warp * kWarpSize + place.lane; i < kValues * Op::kTile;
         i += Op::kWarps * kWarpSize) {
      auto& parts = mine[i / Op::kTile];
      const int slot = i % Op::kTile;
      A total = parts[0][slot];
#pragma unroll
      for (int warp = 1; warp < Op::kWarps; ++warp) {
        total += parts[warp][slot];
      }
      parts[0][slot] = total;
    }
    barrier(place);
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[k][j] = mine[k][0][j * kWarpSize + place.lane];
      }
    }
  }
};

}  // namespace fused_op::cuda
