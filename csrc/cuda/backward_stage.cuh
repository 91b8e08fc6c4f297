// How norm_backward_kernel reads rows ahead of the one it works on: cp.async into shared memory.
// Whole packs need no barrier for that, since each thread reads back only what it copied; shifted
// rows and those by words need their warp's, since a lane also reads its neighbours' blocks.
// Included by backward.cuh only; torch-free.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/norm_args.h"
#include "core/row_source.h"
#include "cuda/flexible.cuh"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/row_tile.h"

namespace fused_op::cuda {

// What norm_backward_kernel keeps in shared memory: for each group of a row's kLanes lanes (a warp,
// or less), the 16-byte blocks of its rows in flight, and the weight where registers are short.
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
struct BackwardLayout {
  using T = typename Source::Element;
  static constexpr int N = Source::kElements;
  using P = typename ParameterOf<W>::type;
  // Elements of a thread. With few of them, what the first pass over a row makes of them stays in
  // registers for the second (shifted rows, which need more registers: the packs), and so does the
  // weight.
  static constexpr int kOwned = Tile::kVectors * N;
  static constexpr bool kKeeps =
      Tile::kCtaThreads == kMaxRowThreads;  // more have 96 registers each
  static constexpr bool kKeepRow = kKeeps && !Access::kShifts &&
                                   kOwned * sizeof(Accumulator<T>) <= (Source::kFlexible ? 32 : 64);
  static constexpr bool kKeepPacks =
      kKeeps && Access::kShifts && Tile::kVectors <= (Source::kGradStreams == 2 ? 2 : 1);
  // Whether dx of all vectors is stored at once, with the edges of each but the row's left out.
  static constexpr bool kStoreRow = Access::kSharesBlocks && (kKeepRow || kKeepPacks);
  static constexpr bool kKeepWeight = (kKeeps || !Access::kShifts) && kOwned * sizeof(P) <= 32;
  static constexpr int kWeightBlocks = kKeepWeight ? 0 : kOwned * sizeof(P) / kVectorBytes;
  // Blocks a shifted row has more than vectors. One would do, but where there is room, rows begin
  // at multiples of 128 bytes in shared memory too. (Whole packs need that: one spare block there
  // took 131072x1024, 32768x4096 bf16 from 0.95, 0.94 of the limit to 0.90, 0.86, H200.)
  static constexpr int kSpare = !Access::kSharesBlocks ? 0
                                : Tile::kVectors > 3   ? 1
                                : Tile::kLanes < 8     ? Tile::kLanes
                                                       : 8;
  static constexpr int kPackBlocks = N * sizeof(T) / kVectorBytes;
  static constexpr int kStreamBlocks = Tile::kLanes * Tile::kVectors * kPackBlocks + kSpare;
  static constexpr int kStageBlocks = Source::kGradStreams * kStreamBlocks;
  FUSED_OP_HD static constexpr int group_blocks(int stages) {
    return stages * kStageBlocks + Tile::kLanes * kWeightBlocks;
  }
  // Registers: 128 a thread for several vectors (96 in WideTile), 85 for one.
  static constexpr bool kLight = Tile::kVectors == 1 && sizeof(Accumulator<T>) == 4;
  static constexpr int kThreads = kLight ? 256 : Tile::kCtaThreads;
  static constexpr int kCtasPerSm = !kLight                                               ? 1
                                    : !Access::kSharesBlocks && Source::kGradStreams == 2 ? 3
                                                                                          : 2;
  // Rows in flight: three where the longest row of the tile leaves room for them.
  static constexpr int kStages =
      Tile::kCtaThreads / Tile::kLanes * group_blocks(3) * kVectorBytes <= 226 * 1024 ? 3 : 2;
  static constexpr int kGroupBlocks = group_blocks(kStages);
  // Whether the launcher may have fewer in flight. Others have no registers for that: the WideTile
  // lost 2 % at 26214x5120, and LayerNorm with dropout goes without too. H200, bf16, us where the
  // launcher chooses and where the number is known: LayerNorm with dropout 357 345 at 16384x8192,
  // 354 338 at 131072x1024; but RMSNorm with dropout 329 388, 333 365, since the compiler then puts
  // the load of the statistics behind the copies of a row.
  static constexpr bool kChooses = kStages == 3 && !kLight && !Source::kFlexible &&
                                   !(Source::kDrops && Norm::kCentered) &&
                                   Tile::kCtaThreads == kMaxRowThreads;
};

// From one row of a team to its next one, made by the launcher: kernel parameters take no
// registers.
struct RowSteps {
  int stages;  // rows in flight, that at hand among them, where the launcher chooses
  std::int64_t rows;
  std::int64_t ahead;       // rows from that at hand to that to copy: stages - 1 steps
  std::int64_t streams[3];  // bytes, in x, dy and the gradient of the sum
  std::int64_t grad_input;  // bytes
  bool split;               // of rows at two strides, whose addresses are made anew
};

// Rows in flight, known at compile time to most kernels.
template <typename Layout>
__device__ __forceinline__ int stages_of(const RowSteps& steps) {
  return Layout::kChooses ? steps.stages : Layout::kStages;
}

// The rows of x, dy and the gradient of the sum on their way through shared memory: of those in
// flight one is at hand and the others are being copied. Each lane has its own blocks of them.
template <typename W, typename Norm, typename Source, typename Access, typename Tile>
class StagedRows {
  using Layout = BackwardLayout<W, Norm, Source, Access, Tile>;
  using T = typename Source::Element;
  static constexpr int N = Layout::N;
  static constexpr int kStreams = Source::kGradStreams;
  static constexpr int kStreamBytes = Layout::kStreamBlocks * kVectorBytes;
  static constexpr int kStageBytes = kStreams * kStreamBytes;
  static constexpr int kStride = Tile::kLanes * kVectorBytes;  // from a lane's block to its next

 public:
  __device__ __forceinline__ StagedRows(const NormBackwardArgs& args, const RowSteps& steps,
                                        std::uint32_t blocks_at, std::int64_t first_row,
                                        int first_col, int lane)
      : args_(args),
        steps_(steps),
        blocks_at_(blocks_at),
        here_(blocks_at),
        free_(blocks_at + (stages() - 1) * kStageBytes),
        first_col_(first_col),
        lane_(lane) {
    place(first_row);
    copy(first_row, blocks_at);
    if (stages() == 3) {
      copy(first_row + steps.rows, blocks_at + kStageBytes);
    }
  }

  // Starts to copy the row that comes stages() - 1 after this one, and waits for this one.
  __device__ __forceinline__ void advance_to(std::int64_t row) {
    if constexpr (Access::kSharesBlocks) {
      __syncwarp();  // the neighbours have read what is overwritten now
    }
    copy(row + steps_.ahead, free_);
    if (stages() == 3) {
      __pipeline_wait_prior(2);
    } else {
      __pipeline_wait_prior(1);
    }
    if constexpr (Access::kSharesBlocks) {
      __syncwarp();  // their blocks have arrived too
    }
  }
  __device__ __forceinline__ void release() {
    free_ = here_;
    here_ = here_ == blocks_at_ + (stages() - 1) * kStageBytes ? blocks_at_ : here_ + kStageBytes;
  }

  // Vector i of the row at hand, in one of the streams.
  __device__ __forceinline__ Pack<T, N> load(int stream, int i) const {
    if constexpr (Source::kFlexible) {
      const DType dtype = rows(stream).dtype;
      RawPack<N, T> raw;
#pragma unroll
      for (int k = 0; k < Layout::kPackBlocks; ++k) {
        load_shared(block(here_, stream, i, k), raw.words + 4 * k);
      }
      T values[N];
      to_values(raw, dtype, values);
      return as_pack(values);
    } else {
      return Access::template load_staged<N, T>(
          here_ + stream * kStreamBytes + i * kStride,
          static_cast<int>((ahead_[stream] - stages() * steps_.streams[stream]) % kVectorBytes));
    }
  }

 private:
  __device__ __forceinline__ const ConstRows& rows(int stream) const {
    return stream == 0 ? args_.x : stream == 1 ? args_.grad_output : args_.grad_sum;
  }
  // The first of this lane's columns.
  __device__ __forceinline__ std::uintptr_t address(int stream, std::int64_t row) const {
    if constexpr (Source::kFlexible) {
      return reinterpret_cast<std::uintptr_t>(any_row(rows(stream), row).at(first_col_));
    } else if constexpr (Source::kSplit) {
      return reinterpret_cast<std::uintptr_t>(split_row_of<T>(rows(stream), row) + first_col_);
    } else {
      return reinterpret_cast<std::uintptr_t>(row_of<T>(rows(stream), row) + first_col_);
    }
  }
  __device__ __forceinline__ void place(std::int64_t row) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      ahead_[s] = address(s, row);
    }
  }
  __device__ __forceinline__ static std::uint32_t block(std::uint32_t stage, int stream, int i,
                                                        int k) {
    return stage + stream * kStreamBytes + (i * Layout::kPackBlocks + k) * kStride;
  }

  __device__ __forceinline__ void copy(std::int64_t row, std::uint32_t to) {
    if (row < args_.rows) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        if constexpr (Source::kFlexible) {
          if (rows(s).data != nullptr) {
            copy_any(s, to);
          }
        } else if (s < 2 || !Source::kDrops || args_.grad_sum.data != nullptr) {
          copy_vectors(s, to);
        }
      }
    }
    if (Source::kSplit && steps_.split) {
      place(row + steps_.rows);
    } else {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        ahead_[s] += steps_.streams[s];
      }
    }
    __pipeline_commit();  // an empty group too: the count of groups is the count of rows
  }

  // Lane l reads back blocks l and l + 1, of which it copied the first.
  __device__ __forceinline__ void copy_vectors(int s, std::uint32_t to) {
    const int row_bytes = (width() - first_col_) * static_cast<int>(sizeof(T));  // from here on
    const int shift = Access::kWholePacks ? 0 : static_cast<int>(ahead_[s] % kVectorBytes);
    const std::uintptr_t from =
        Access::kWholePacks ? ahead_[s] : ahead_[s] / kVectorBytes * kVectorBytes;
    // H200, bf16, us by words and by lines: 102.5 101.3 at 1048576x64, 53.1 52.5 at
    // 8192x4096, 55.2 54.6 at 4096x8192; but with three vectors 200 206 at 174762x768, 201 210 at
    // 43690x3072.
    constexpr bool kLine = Access::kWholePacks && Tile::kVectors <= 2;
    using Fetch = std::conditional_t<kLine, FetchLine, FetchWords>;
#pragma unroll
    for (int i = 0; i < Tile::kVectors + (Access::kWholePacks ? 0 : 1); ++i) {
      if (i * kStride < row_bytes + shift && (i < Tile::kVectors || lane_ == 0)) {
        copy_async<Fetch>(to + s * kStreamBytes + i * kStride, from + i * kStride);
      }
    }
  }

  // In the stream's own dtype: a pack lies in one block, or in two.
  __device__ __forceinline__ void copy_any(int s, std::uint32_t to) {
    const DType dtype = rows(s).dtype;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const int valid = width() - (first_col_ + i * Tile::kLanes * N);
      if (valid <= 0) {
        continue;
      }
      const std::uintptr_t from = ahead_[s] + i * Tile::kLanes * N * size_of(dtype);
      if (from % kVectorBytes == 0 && valid >= N) {
        copy_async(block(to, s, i, 0), from);
        if (Layout::kPackBlocks == 2 && size_of(dtype) == sizeof(T)) {
          copy_async(block(to, s, i, 1), from + kVectorBytes);
        }
      } else {
        RawPack<N, T> raw = {};
        load_elements(reinterpret_cast<const char*>(from), dtype, min(valid, N), raw);
#pragma unroll
        for (int k = 0; k < Layout::kPackBlocks; ++k) {
          store_shared(block(to, s, i, k), raw.words + 4 * k);
        }
      }
    }
  }

  __device__ __forceinline__ int stages() const { return stages_of<Layout>(steps_); }
  __device__ __forceinline__ int width() const { return static_cast<int>(args_.cols); }

  const NormBackwardArgs& args_;
  const RowSteps& steps_;
  std::uint32_t blocks_at_;
  std::uint32_t here_;  // the row at hand; `free_` is where the one before it was
  std::uint32_t free_;
  std::uintptr_t ahead_[kStreams];  // this lane's columns of the next row to copy
  int first_col_;
  int lane_;
};

}  // namespace fused_op::cuda
