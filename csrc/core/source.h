// Sources: where the row that is normalised comes from. A source is one struct; its template
// arguments are the element types of its streams. Torch-free.
//
//   prefetch()  prefetches the row before the previous kernels have ended
//   load()      starts the loads of a lane's packs, and computes nothing that would wait for them
//   finish()    turns them into the row that is normalised, as packs of Row, and stores what
//               backward will read
//   read()      reads packs of that row again, after finish()
//
// `lane` says which packs of the row belong to a lane (Lane of cuda/access.cuh). Elements past the
// end of the row are zero as they are loaded. They must still be zero in the row, because the
// kernels add them up, too.
//
// Its struct Backward is the way back. Like the source, it is made for one row.
//
//   Saved              the element type of the tensor that is read as x
//   kReadsSum          whether a gradient may arrive at the row itself, which forward stored
//   sum_arrives()      whether one does
//   kReadsBeside       whether the row is computed from x and from rows beside it: beside() returns
//                      those, as BesideRow, and combine() computes the row from them and x
//   wanted()           whether any gradient is stored
//   leave(), store()   leave() turns dx of a pack, which includes the arriving gradient, into the
//                      packs of the gradients, and takes the packs of x and of the rows beside it,
//                      if there are any; store() writes those packs to memory
#pragma once

#include <type_traits>

#include "core/convert.h"
#include "core/dropout.h"
#include "core/norm_args.h"

namespace fused_op {

// The first element of a row. Rows at two strides cost a division, which their kernels alone have.
template <typename T, bool kSplit>
FUSED_OP_HD const T* first_of(const ConstRows& rows, std::int64_t row) {
  const std::int64_t offset = kSplit ? rows.split.offset(row, rows.stride) : row * rows.stride;
  return static_cast<const T*>(rows.data) + offset;
}

// The row is the input.
template <typename X, bool kSplit = false>
struct Plain {
  using Row = X;
  using Input = X;

  template <int N, int kVectors>
  struct Loaded {
    Pack<X, N> input[kVectors];
  };

  const X* input;

  FUSED_OP_HD Plain(const NormForwardArgs& args, std::int64_t row)
      : input(first_of<X, kSplit>(args.input, row)) {}

  FUSED_OP_HD const Row* row() const { return input; }

  template <typename Access, int kVectors, typename Lane>
  FUSED_OP_HD void prefetch(const Lane& lane) const {
    Access::template prefetch_row<kVectors>(lane, input);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void load(const Lane& lane, Loaded<N, kVectors>& loaded) const {
    Access::load(lane, input, loaded.input);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void read(const Lane& lane, Pack<Row, N> (&row)[kVectors]) const {
    Access::load(lane, input, row);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void finish(const Lane&, const Loaded<N, kVectors>& loaded,
                          Pack<Row, N> (&row)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      row[i] = loaded.input[i];
    }
  }

  // dx is the gradient of the input.
  struct Backward {
    static constexpr bool kAtTwoStrides = kSplit;
    static constexpr bool kReadsSum = false;
    static constexpr bool kReadsBeside = false;
    using Saved = X;
    using GradSum = X;

    template <int N, int kCount>
    struct Gradients {
      Pack<X, N> input[kCount];
    };

    const NormBackwardArgs& args;
    std::int64_t row;

    FUSED_OP_HD Backward(const NormBackwardArgs& call, std::int64_t number)
        : args(call), row(number) {}

    FUSED_OP_HD static bool sum_arrives(const NormBackwardArgs&) { return false; }
    FUSED_OP_HD static bool wanted(const NormBackwardArgs& args) {
      return args.grad_input.data != nullptr;
    }
    template <int N, int kCount, typename A, typename Col>
    FUSED_OP_HD void leave(Col, A (&dx)[N], int k, Gradients<N, kCount>& gradients) const {
      gradients.input[k] = rounded<X>(dx);
    }
    // Reads the packs of the lane from `first` on.
    template <typename Access, typename Lane, int N, int kCount>
    FUSED_OP_HD void store(const Lane& lane, int first,
                           const Gradients<N, kCount>& gradients) const {
      X* const input = static_cast<X*>(args.grad_input.data) + row * lane.width;
      Access::store_some(lane, input, first, gradients.input);
    }
  };
};

// The row is dropout(input) + residual, rounded to S and stored as the next residual. The
// statistics are those of the stored sum, so that backward finds the same normalised values.
template <typename X, typename R, typename S, bool kDropout = false>
struct AddResidual {
  using Row = S;
  using Input = X;

  template <int N, int kVectors>
  struct Loaded {
    Pack<X, N> input[kVectors];
    Pack<R, N> residual[kVectors];
  };

  const NormForwardArgs& args;
  const X* input;
  const R* residual;
  S* sum;
  std::int64_t number;

  FUSED_OP_HD AddResidual(const NormForwardArgs& call, std::int64_t row)
      : args(call),
        input(first_of<X, false>(call.input, row)),
        residual(first_of<R, false>(call.residual, row)),
        sum(static_cast<S*>(call.sum) + row * call.cols),
        number(row) {}

  FUSED_OP_HD const Row* row() const { return sum; }

  template <typename Access, int kVectors, typename Lane>
  FUSED_OP_HD void prefetch(const Lane& lane) const {
    Access::template prefetch_row<kVectors>(lane, input);
    Access::template prefetch_row<kVectors>(lane, residual);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void load(const Lane& lane, Loaded<N, kVectors>& loaded) const {
    Access::load_both(lane, input, loaded.input, residual, loaded.residual);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void read(const Lane& lane, Pack<Row, N> (&row)[kVectors]) const {
    Access::load(lane, sum, row);
  }
  template <typename Access, typename Lane, int N, int kVectors>
  FUSED_OP_HD void finish(const Lane& lane, const Loaded<N, kVectors>& loaded,
                          Pack<Row, N> (&row)[kVectors]) const {
    DropoutPacks mask(kDropout ? args.dropout : Dropout{}, number, lane.first, Lane::kStep);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kVectors; ++i) {
      Accumulator<S> total[N], addend[N];
      to_values(loaded.input[i], total);
      to_values(loaded.residual[i], addend);
      if constexpr (kDropout) {
        mask.apply(args.dropout, i, total);
      }
      for (int j = 0; j < N; ++j) {
        total[j] += addend[j];
      }
      row[i] = rounded<S>(total);
    }
    Access::store(lane, sum, row);
  }

  // The gradient of the residual is dx plus what arrives at the sum. The gradient of the input is
  // the same, with the dropped elements dropped. One tensor serves as both if they cannot differ.
  struct Backward {
    static constexpr bool kAtTwoStrides = false;
    static constexpr bool kReadsSum = true;
    static constexpr bool kReadsBeside = false;
    using Saved = S;
    static constexpr bool kTwoGradients = kDropout || !std::is_same_v<X, R>;
    using GradSum = S;

    template <int N, int kCount>
    struct Gradients {
      Pack<X, N> input[kCount];
      Pack<R, N> residual[kTwoGradients ? kCount : 1];
    };

    const NormBackwardArgs& args;
    std::int64_t row;
    DropoutRow mask;

    FUSED_OP_HD Backward(const NormBackwardArgs& call, std::int64_t number)
        : args(call),
          row(number),
          mask(kDropout ? DropoutState(call.dropout) : DropoutState(Dropout{}), number) {}

    // If none arrives, and there is one gradient of the row's own dtype, Plain is the same.
    FUSED_OP_HD static bool sum_arrives(const NormBackwardArgs& args) {
      return (!kTwoGradients && std::is_same_v<X, S>) || args.grad_sum.data != nullptr;
    }
    FUSED_OP_HD static bool wanted(const NormBackwardArgs& args) {
      return args.grad_input.data != nullptr ||
             (kTwoGradients && args.grad_residual.data != nullptr);
    }
    template <int N, int kCount, typename A, typename Col>
    FUSED_OP_HD void leave(Col col, A (&dx)[N], int k, Gradients<N, kCount>& gradients) const {
      if constexpr (kTwoGradients) {
        gradients.residual[k] = rounded<R>(dx);
      }
      if constexpr (kDropout) {
        mask.apply(args.dropout, col, dx);
      }
      gradients.input[k] = rounded<X>(dx);
    }
    template <typename Access, typename Lane, int N, int kCount>
    FUSED_OP_HD void store(const Lane& lane, int first,
                           const Gradients<N, kCount>& gradients) const {
      if (!kTwoGradients || args.grad_input.data != nullptr) {
        X* const input = static_cast<X*>(args.grad_input.data) + row * lane.width;
        Access::store_some(lane, input, first, gradients.input);
      }
      if constexpr (kTwoGradients) {
        if (args.grad_residual.data != nullptr) {
          R* const residual = static_cast<R*>(args.grad_residual.data) + row * lane.width;
          Access::store_some(lane, residual, first, gradients.residual);
        }
      }
    }
  };
};

}  // namespace fused_op
