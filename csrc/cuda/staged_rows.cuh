// How backward_kernel reads ahead of the row it works on: cp.async into shared memory. With
// Vectors, each lane reads back only what it copied, and needs no barrier. With Words, a warp's
// part of a row is copied in aligned blocks of 16 bytes, and lanes read each other's words. Device
// code; torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/source.h"
#include "cuda/access.cuh"
#include "cuda/backward_op.cuh"
#include "cuda/backward_tile.h"
#include "cuda/memory.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/words.cuh"

namespace fused_op::cuda {

// Where a lane reads a row in shared memory.
struct StagedPlace {
  std::uint32_t at;
  std::uint32_t bytes;  // by words: which bytes of two words are one of the row (__byte_perm)
};

// One stream's row of a group of lanes in shared memory.
//
//   kLaneBytes      bytes from a lane's part to the next lane's
//   kLaneDistance   bytes of global memory from where a lane copies to where the next one does
//   copy()          starts the copies of a lane
//   load()          pack i
template <typename Access, typename Tile, typename T>
struct StagedStream {  // by words
  static constexpr int N = Tile::kPack;
  static constexpr int kBytes =
      staged_bytes(true, N, Tile::kLanes, Tile::kVectors, static_cast<int>(sizeof(T)));
  static constexpr int kLaneBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kLaneDistance = kVectorBytes;
  // Whether a row may begin in the middle of a word, and the pack has words.
  static constexpr bool kHalves = sizeof(T) == 2 && N > 1 && Access::kHalves;

  // `to` is the lane's part; `from` is the address of its first block plus the row's shift. If
  // `whole`, all of the row's last block is copied, with what comes after the row.
  template <typename Lane>
  __device__ __forceinline__ static void copy(const Lane& lane, int lane_of_row, bool whole,
                                              std::uint32_t to, std::uintptr_t from) {
    constexpr int kStride = Tile::kLanes * kVectorBytes;
    constexpr int kSpan = Tile::kWarpCols * static_cast<int>(sizeof(T));
    const int shift = static_cast<int>(from % kVectorBytes);
    const int left = lane.width - (lane.first - lane_of_row * N);
    const int end = min(left, Tile::kWarpCols) * static_cast<int>(sizeof(T)) + shift;
    const int first = lane_of_row * kVectorBytes;
    const int last = end - (whole ? 1 : kVectorBytes);  // where the last block may begin
    to += lane_of_row * (kVectorBytes - kLaneBytes);
#pragma unroll
    for (int i = 0; i * kStride < kSpan + kVectorBytes; ++i) {
      constexpr int kSureBytes = Lane::kSure * Tile::kStep * static_cast<int>(sizeof(T));
      if ((i + 1) * kStride <= kSureBytes || first + i * kStride <= last) {
        copy_async(to + i * kStride, from - shift + i * kStride);
      }
    }
    const int rest = end % kVectorBytes;
    if (!whole && rest > 0 && end / kVectorBytes % Tile::kLanes == lane_of_row) {
      const int block = end - rest - first;
      copy_some(to + block, from - shift + block, rest);
    }
  }

  // From the lane's part, and the row's offset in a block of 16 bytes. Opaque to the compiler,
  // which would find it again for each pack. H200, bf16, LayerNorm, us so and with it: 158.5 151.3
  // at 6711x9999, 131.8 128.1 at 8193x8191.
  __device__ __forceinline__ static StagedPlace place(std::uint32_t part, std::uint32_t shift) {
    StagedPlace place{part + (kHalves ? shift & ~3u : shift), shift % 4 != 0 ? 0x5432u : 0x3210u};
    asm volatile("" : "+r"(place.at), "+r"(place.bytes));
    return place;
  }

  __device__ __forceinline__ static Pack<T, N> load(const StagedPlace& place, int i) {
    Pack<T, N> pack;
    const std::uint32_t at = place.at + i * Tile::kStep * static_cast<int>(sizeof(T));
    if constexpr (sizeof(T) == 8) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        load_shared_bytes<8>(at + j * 8, pack.words + 2 * j);
      }
    } else if constexpr (sizeof(T) == 2 && N == 1) {
      load_shared_bytes<2>(at, pack.words);
    } else {
      constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
      std::uint32_t words[kWords + 1];
#pragma unroll
      for (int k = 0; k < kWords + (kHalves ? 1 : 0); ++k) {
        load_shared_bytes<4>(at + 4 * k, words + k);
      }
      // There is no branch, because it would keep the loads of a row apart.
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        pack.words[k] = kHalves ? __byte_perm(words[k], words[k + 1], place.bytes) : words[k];
      }
    }
    return pack;
  }
};

template <typename Tile, typename T>
struct StagedStream<Vectors, Tile, T> {
  static constexpr int N = Tile::kPack;
  static constexpr int kPackBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kPiece = kPackBytes < kVectorBytes ? kPackBytes : kVectorBytes;
  static constexpr int kPieces = kPackBytes / kPiece;
  static constexpr int kBytes =
      staged_bytes(false, N, Tile::kLanes, Tile::kVectors, static_cast<int>(sizeof(T)));
  static constexpr int kLaneBytes = kPiece;
  static constexpr int kLaneDistance = kPackBytes;

  template <typename Lane>
  __device__ __forceinline__ static void copy(const Lane& lane, int, bool, std::uint32_t to,
                                              std::uintptr_t from) {
    // Whole lines are better with up to two vectors. us of words and of lines: 102.5 101.3 at
    // 1048576x64, 53.1 52.5 at 8192x4096, but with three vectors 200 206 at 174762x768 (bf16,
    // H200).
    using Fetch = std::conditional_t<Tile::kVectors <= 2, FetchLine, FetchWords>;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (lane.template valid<N>(i) > 0) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          const std::uint32_t there = to + (i * kPieces + k) * Tile::kLanes * kPiece;
          const std::uintptr_t here = from + i * Tile::kLanes * kPackBytes + k * kPiece;
          if constexpr (kPiece == kVectorBytes) {
            copy_async<Fetch>(there, here);
          } else {
            copy_bytes_async<kPiece>(there, here);
          }
        }
      }
    }
  }

  __device__ __forceinline__ static StagedPlace place(std::uint32_t part, std::uint32_t) {
    return {part, 0};
  }
  __device__ __forceinline__ static Pack<T, N> load(const StagedPlace& place, int i) {
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      load_shared_bytes<kPiece>(place.at + (i * kPieces + k) * Tile::kLanes * kPiece,
                                pack.words + k * (kPiece / 4));
    }
    return pack;
  }
};

// The rows of x, dy and the third stream, if there is one, on their way through shared memory. Of
// kStages rows, one is in use and the others are being copied.
template <typename Op, typename Tile>
class StagedRows {
  using Access = typename Op::Access;
  static constexpr int N = Tile::kPack;
  static constexpr int kStreams = Op::kStreams;
  using Args = typename Op::Args;

  template <int kStream>
  using Element = StreamElement<Op, kStream>;
  template <int kStream>
  using Stream = StagedStream<Access, Tile, Element<kStream>>;
  template <int kStream>
  static constexpr int kOffset = kStream == 0   ? 0
                                 : kStream == 1 ? Stream<0>::kBytes
                                                : Stream<0>::kBytes + Stream<1>::kBytes;

 public:
  static constexpr int kStageBytes = kOffset<2> + (kStreams == 3 ? Stream<2>::kBytes : 0);
  static constexpr int kGroupBytes = Tile::kStages * kStageBytes;
  // The compiler interleaves packs that are sure to be in the row, whereas branches keep the others
  // apart. With 32 elements a lane, or 24 with a sum, registers do not suffice for several packs at
  // once, so none counts as sure.
  static constexpr int kSure =
      Access::kWhole && Tile::kPack * Tile::kVectors > (kStreams == 3 ? 16 : 24) ? 0 : Tile::kSure;
  using RowLane = Lane<Tile::kLanes, Tile::kStep, kSure, false>;

  // `at`: kGroupBytes of shared memory that belong to this lane's group.
  __device__ __forceinline__ StagedRows(const Args& args, const BackwardSteps& steps,
                                        std::uint32_t at, std::int64_t first_row,
                                        const RowLane& lane, int lane_of_row)
      : args_(args),
        steps_(steps),
        lane_(lane),
        lane_of_row_(lane_of_row),
        begin_(at + lane_of_row * Stream<0>::kLaneBytes),
        here_(begin_) {
    place(first_row);
    copy(first_row, begin_);
    if constexpr (Tile::kStages == 3) {
      copy(first_row + steps.rows, begin_ + kStageBytes);
    }
  }

  // Starts to copy the row that comes kStages - 1 rows later, and waits for this one.
  __device__ __forceinline__ void advance_to(std::int64_t row) {
    if constexpr (!Access::kWhole) {
      __syncwarp();  // the neighbours have read what is overwritten now
    }
    constexpr std::uint32_t kLast = (Tile::kStages - 1) * kStageBytes;
    copy(row + steps_.ahead, here_ == begin_ ? here_ + kLast : here_ - kStageBytes);
    await_copies<Tile::kStages - 1>();
    if constexpr (!Access::kWhole) {
      __syncwarp();  // their copies have arrived too
    }
    find_row<0>();
    find_row<1>();
    if constexpr (kStreams == 3) {
      find_row<2>();
    }
  }
  __device__ __forceinline__ void release() {
    here_ = here_ == begin_ + (Tile::kStages - 1) * kStageBytes ? begin_ : here_ + kStageBytes;
  }

  // Pack i of the current row, in x (0), dy (1) or the third stream.
  template <int kStream>
  __device__ __forceinline__ Pack<Element<kStream>, N> load(int i) const {
    return Stream<kStream>::load(at_hand_[kStream], i);
  }

 private:
  template <int kStream>
  __device__ __forceinline__ std::uint32_t part_of(std::uint32_t stage) const {
    return stage + kOffset<kStream> +
           lane_of_row_ * (Stream<kStream>::kLaneBytes - Stream<0>::kLaneBytes);
  }

  template <int kStream>
  __device__ __forceinline__ void find_row() {
    const auto from =
        static_cast<std::uint32_t>(ahead_[kStream] - Tile::kStages * steps_.bytes[kStream]);
    at_hand_[kStream] = Stream<kStream>::place(part_of<kStream>(here_), from % kVectorBytes);
  }

  template <int kStream>
  __device__ __forceinline__ void place(const ConstRows& rows, std::int64_t row) {
    const auto* const first = first_of<Element<kStream>, Op::Source::kAtTwoStrides>(rows, row) +
                              lane_.first - lane_of_row_ * N;
    ahead_[kStream] =
        reinterpret_cast<std::uintptr_t>(first) + lane_of_row_ * Stream<kStream>::kLaneDistance;
  }
  __device__ __forceinline__ void place(std::int64_t row) {
    place<0>(args_.x, row);
    place<1>(args_.grad_output, row);
    if constexpr (kStreams == 3) {
      place<2>(Op::third(args_), row);
    }
  }

  template <int kStream>
  __device__ __forceinline__ void copy_stream(bool whole, std::uint32_t to) const {
    Stream<kStream>::copy(lane_, lane_of_row_, whole, part_of<kStream>(to), ahead_[kStream]);
  }
  __device__ __forceinline__ void copy(std::int64_t row, std::uint32_t to) {
    if (row < last_row_of<Op, Tile>(args_, steps_)) {
      const bool whole = row < steps_.whole_rows;
      copy_stream<0>(whole, to);
      copy_stream<1>(whole, to);
      if constexpr (kStreams == 3) {
        if (Op::third_arrives(args_)) {
          copy_stream<2>(whole, to);
        }
      }
    }
    if constexpr (Op::Source::kAtTwoStrides) {
      place(row + steps_.rows);
    } else {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        ahead_[s] += steps_.bytes[s];
      }
    }
    end_copy_group();  // even if it is empty, because groups count rows
  }

  const Args& args_;
  const BackwardSteps& steps_;
  RowLane lane_;
  int lane_of_row_;
  std::uint32_t begin_;             // this lane's part of the first stage
  std::uint32_t here_;              // this lane's part of the current row's stage
  StagedPlace at_hand_[kStreams];   // this lane's part of the current row
  std::uintptr_t ahead_[kStreams];  // where this lane copies the next row from
};

// The parameters of a lane's packs, in registers or in shared memory that only this lane uses.
// There they lie in blocks of 16 bytes, and the same block of all lanes lies side by side.
template <typename Parameters, typename Tile>
class LaneParameters {
  static constexpr int kWords = static_cast<int>(sizeof(Parameters)) / 4;  // of a pack
  static constexpr int kStride = Tile::kLanes * kVectorBytes;

 public:
  static constexpr int kGroupBytes =
      Tile::kParametersStay ? 0 : parameter_bytes(Tile::kLanes, Tile::kVectors, 4 * kWords);

  __device__ __forceinline__ LaneParameters(std::uint32_t at, int lane_of_row)
      : part_(at + lane_of_row * kVectorBytes) {}

  // Packs come in order, 0 first.
  __device__ __forceinline__ void put(int i, const Parameters& parameters) {
    if constexpr (Tile::kParametersStay) {
      kept_[i] = parameters;
    } else {
      std::uint32_t words[kWords];
      memcpy(words, &parameters, sizeof(words));
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const int word = i * kWords + k;
        block_[word % 4] = words[k];
        if (word % 4 == 3 || word == Tile::kVectors * kWords - 1) {
          store_shared(part_ + word / 4 * kStride, block_);
        }
      }
    }
  }
  // Packs come in order, 0 first. The first one after packs that were left out must begin a block.
  __device__ __forceinline__ Parameters get(int i) {
    if constexpr (Tile::kParametersStay) {
      return kept_[i];
    } else {
      std::uint32_t words[kWords];
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const int word = i * kWords + k;
        if (word % 4 == 0) {
          load_shared_bytes<16>(part_ + word / 4 * kStride, block_);
        }
        words[k] = block_[word % 4];
      }
      Parameters parameters;
      memcpy(&parameters, words, sizeof(words));
      return parameters;
    }
  }

 private:
  std::uint32_t part_;
  std::uint32_t block_[4];  // the block that is being filled or read
  Parameters kept_[Tile::kParametersStay ? Tile::kVectors : 1];
};

}  // namespace fused_op::cuda
