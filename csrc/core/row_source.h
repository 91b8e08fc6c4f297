// Where the row that is normalised comes from (forward), and what else its gradient carries
// (backward), for the CPU and for the kernels that are built with the extension: one element type,
// which dispatch.h and the launchers of cuda/ choose. (Those compiled at first use: source.h.)
// Torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/pack.h"

namespace fused_op {

// A row that may be at two strides, and one that on the GPU is not: there, SplitRows has kernels of
// its own. Deciding it in all of them took 64x1024 from 1.93 to 2.07 us, and backward of
// 131072x1024 from 0.95 to 0.90 of the limit (bf16, H200).
template <typename T>
FUSED_OP_HD const T* split_row_of(const ConstRows& rows, std::int64_t row) {
  return static_cast<const T*>(rows.data) + rows.split.offset(row, rows.stride);
}
template <typename T>
FUSED_OP_HD const T* row_of(const ConstRows& rows, std::int64_t row) {
#ifdef __CUDA_ARCH__
  return static_cast<const T*>(rows.data) + row * rows.stride;
#else
  return split_row_of<T>(rows, row);
#endif
}

// The row is the input.
template <typename T>
struct Plain {
  using Element = T;
  static constexpr bool kFlexible = false;
  static constexpr int kElements = kVector<T>;  // of a lane's pack
  static constexpr bool kSplit = false;
  static constexpr int kGradStreams = 2;  // backward reads x, dy
  static constexpr bool kDrops = false;
  static constexpr bool kStoresRow = false;  // finish() stores what row() points at

  // fetch() only loads, so that a caller can have many in flight; finish() computes. Packs are as
  // in Access::store_row.
  template <int N>
  using Fetched = Pack<T, N>;

  const T* input;

  FUSED_OP_HD explicit Plain(const T* row) : input(row) {}
  FUSED_OP_HD Plain(const NormForwardArgs& args, std::int64_t row)
      : input(row_of<T>(args.input, row)) {}

  template <typename Access, int N, typename Col>
  FUSED_OP_HD Fetched<N> fetch(Col col, Col width) const {
    return Access::template load<N>(input, col, width);
  }
  template <typename Access, int kLanes, int N, int kVectors, typename Col>
  FUSED_OP_HD void finish(const Fetched<N> (&fetched)[kVectors], Pack<T, N> (&row)[kVectors],
                          Col col, Col width) const {
    for (int i = 0; i < kVectors; ++i) {
      row[i] = fetched[i];
      Access::clip(width - (col + i * kLanes * N), row[i]);
    }
  }
  // Where the finished row can be read again.
  FUSED_OP_HD const T* row() const { return input; }
};

// The same in packs of one word of 4 bytes: of rows that are no whole number of vectors.
template <typename T>
struct WordRows : Plain<T> {
  static constexpr int kElements = 4 / sizeof(T);
  using Plain<T>::Plain;
};

// The same at two strides.
template <typename T>
struct SplitRows : Plain<T> {
  static constexpr bool kSplit = true;

  FUSED_OP_HD SplitRows(const NormForwardArgs& args, std::int64_t row)
      : Plain<T>(split_row_of<T>(args.input, row)) {}
};

// The row is input + residual, rounded to T and stored as the new residual: the statistics are
// those of the stored sum, so that backward, which reads it, finds the same normalised values.
template <typename T>
struct AddResidual {
  using Element = T;
  static constexpr bool kFlexible = false;
  static constexpr int kElements = kVector<T>;
  static constexpr bool kSplit = false;
  static constexpr int kGradStreams = 3;  // backward reads x, dy and the gradient of the sum
  static constexpr bool kDrops = false;
  static constexpr bool kStoresRow = true;

  template <int N>
  struct Fetched {
    Pack<T, N> input;
    Pack<T, N> residual;
  };

  const T* input;
  const T* residual;
  T* sum;

  FUSED_OP_HD AddResidual(const NormForwardArgs& args, std::int64_t row)
      : input(row_of<T>(args.input, row)),
        residual(row_of<T>(args.residual, row)),
        sum(static_cast<T*>(args.sum) + row * args.cols) {}

  template <typename Access, int N, typename Col>
  FUSED_OP_HD Fetched<N> fetch(Col col, Col width) const {
    return {Access::template load<N>(input, col, width),
            Access::template load<N>(residual, col, width)};
  }
  template <typename Access, int kLanes, int N, int kVectors, typename Col>
  FUSED_OP_HD void finish(const Fetched<N> (&fetched)[kVectors], Pack<T, N> (&row)[kVectors],
                          Col col, Col width) const {
    for (int i = 0; i < kVectors; ++i) {
      Accumulator<T> total[N], addend[N];
      unpack(fetched[i].input, total);
      unpack(fetched[i].residual, addend);
      for (int j = 0; j < N; ++j) {
        total[j] += addend[j];
      }
      row[i] = pack_from<T, N>(total);
      Access::clip(width - (col + i * kLanes * N), row[i]);
    }
    Access::template store_row<kLanes>(sum, col, width, row);
  }
  FUSED_OP_HD const T* row() const { return sum; }
};

// Backward of the same with dropout of the input. Two gradients leave: that of the residual, and
// that of the input, of which the same elements are dropped. (Forward: AddResidual of source.h.)
template <typename T>
struct DropoutAddResidual : AddResidual<T> {
  static constexpr bool kDrops = true;
};

}  // namespace fused_op
