// Backward of many rows that are too long for a CTA, in one pass (sm_90). A cluster processes a
// row, each CTA one piece of it, and x and dy are read once, through shared memory. While the sums
// of one row travel through the cluster, the CTAs compute those of the next row. They are the sums
// of backward_columns.cuh, added in the same order. Rows are accessed by vectors, and there is no
// gradient of the residual sum to add. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include <type_traits>

#include "cuda/backward_columns.cuh"
#include "cuda/cluster_exchange.cuh"
#include "cuda/staged_rows.cuh"

namespace fused_op::cuda {

#if __CUDA_ARCH__ >= 900

// What a thread does with its units of one row after another.
template <typename Op, typename Tile>
class ClusterRows {
  static_assert(!Op::Epilogue::kGrouped, "all rows have the same parameters");
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  using W = typename Op::Epilogue::Parameter;
  static constexpr int N = Tile::kPack;
  static constexpr int kStages = Tile::kStages;
  template <int kStream>
  using Element = std::conditional_t<kStream == 0, typename Op::X, typename Op::GradOutput>;
  template <int kStream>
  static constexpr int kPackBytes = N * static_cast<int>(sizeof(Element<kStream>));
  template <int kStream>
  static constexpr int kStep = kPieceThreads * kPackBytes<kStream>;  // bytes from unit to unit
  static constexpr int kStageBytes = kPieceUnits * (kStep<0> + kStep<1>);
  using Parameters = LaneParameters<ParametersOf<Op, N>, Tile>;

 public:
  // `shared` holds kStages rows in flight, and then the parameters.
  __device__ __forceinline__ ClusterRows(const NormBackwardArgs& args, std::uint32_t shared,
                                         int rank, int ctas)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x)),
        first_col_((rank * kPieceThreads + thread_) * N),
        step_(ctas * kPieceThreads * N),
        shared_(shared),
        parameters_(shared + kStages * kStageBytes, thread_) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      parameters_.put(
          i, Op::Epilogue::template load<Norm, Vectors, N>(args_, 0, col(i), inside(i) ? N : 0));
      totals_[i].clear();
    }
  }

  // Starts to copy a row into a stage.
  __device__ __forceinline__ void copy(std::int64_t row, int stage) const {
    if (row < args_.rows) {
      copy_stream<0>(args_.x, row, stage);
      copy_stream<1>(args_.grad_output, row, stage);
    }
    end_copy_group();  // even if it is empty, because groups count rows
  }

  // This thread's share of the row's sums. Also adds the row's terms to the parameters' gradients.
  __device__ __forceinline__ PullbackSums<A> sums(std::int64_t row, int stage,
                                                  const Normalizer<A>& normalizer) {
    const typename Op::Epilogue epilogue(args_, row);
    PullbackSums<A> sums{A(0), A(0)};
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      if (inside(i)) {
        A xhat[N], grad[N];
        expand_unit(epilogue, stage, i, normalizer, xhat, grad, totals_[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sums.add(grad[j], xhat[j]);
        }
      }
    }
    return sums;
  }

  // Computes and stores dx.
  __device__ __forceinline__ void leave(std::int64_t row, int stage,
                                        const Normalizer<A>& normalizer,
                                        const Pullback<Norm, A>& pullback) {
    const typename Op::Epilogue epilogue(args_, row);
    const typename Op::Source source(args_, row);
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      if (inside(i)) {
        A xhat[N], grad[N];
        ParameterSums<N, A> ignored;
        expand_unit(epilogue, stage, i, normalizer, xhat, grad, ignored);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          xhat[j] = pullback(grad[j], xhat[j]);
        }
        typename Op::Source::template Gradients<N, 1> gradients;
        source.leave(col(i), xhat, 0, gradients);
        const Lane<kWarpSize, 0, 1, false> lane{col(i), static_cast<int>(args_.cols), true};
        source.template store<Vectors>(lane, 0, gradients);
      }
    }
  }

  // partials: [clusters, Norm::kGrads, partials_stride(cols)], or null if there is only one
  // cluster, whose sums are the gradients.
  __device__ __forceinline__ void leave_sums(A* partials, std::int64_t cluster) const {
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      if (inside(i)) {
        leave_pack(partials, cluster * Norm::kGrads, i, args_.grad_weight, totals_[i].weight);
        if constexpr (Norm::kGrads == 2) {
          leave_pack(partials, cluster * Norm::kGrads + 1, i, args_.grad_bias, totals_[i].bias);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int col(int i) const { return first_col_ + i * step_; }
  __device__ __forceinline__ bool inside(int i) const {
    return col(i) < static_cast<int>(args_.cols);
  }

  // The address in shared memory of this thread's unit i of x (0) or dy (1).
  template <int kStream>
  __device__ __forceinline__ std::uint32_t at(int stage, int i) const {
    return shared_ + stage * kStageBytes + (kStream == 1 ? kPieceUnits * kStep<0> : 0) +
           thread_ * kPackBytes<kStream> + i * kStep<kStream>;
  }
  template <int kStream>
  __device__ __forceinline__ void copy_stream(const ConstRows& rows, std::int64_t row,
                                              int stage) const {
    std::uintptr_t from = global_address(first_of<Element<kStream>, false>(rows, row) + first_col_);
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      if (inside(i)) {
        if constexpr (kPackBytes<kStream> == kVectorBytes) {
          copy_async(at<kStream>(stage, i), from);
        } else {
          copy_bytes_async<kPackBytes<kStream>>(at<kStream>(stage, i), from);
        }
      }
      from += step_ * static_cast<int>(sizeof(Element<kStream>));
    }
  }
  template <int kStream>
  __device__ __forceinline__ Pack<Element<kStream>, N> load(int stage, int i) const {
    Pack<Element<kStream>, N> pack;
    load_shared_bytes<kPackBytes<kStream>>(at<kStream>(stage, i), pack.words);
    return pack;
  }
  __device__ __forceinline__ void expand_unit(const typename Op::Epilogue& epilogue, int stage,
                                              int i, const Normalizer<A>& normalizer, A (&xhat)[N],
                                              A (&grad)[N], ParameterSums<N, A>& totals) {
    NoPack nothing;
    expand<Op>(epilogue, parameters_.get(i), col(i), load<0>(stage, i), load<1>(stage, i), nothing,
               normalizer, xhat, grad, totals);
  }
  __device__ __forceinline__ void leave_pack(A* partials, std::int64_t part, int i, void* gradient,
                                             const A (&sums)[N]) const {
    if (partials != nullptr) {
      std::uint32_t words[N * sizeof(A) / 4];
      memcpy(words, sums, sizeof(words));
      store_bytes<sizeof(words)>(partials + part * partials_stride(args_.cols) + col(i), words);
    } else if (gradient != nullptr) {
      store_bytes<sizeof(W) * N>(static_cast<W*>(gradient) + col(i), rounded<W>(sums).words);
    }
  }

  const NormBackwardArgs& args_;
  int thread_;
  int first_col_;
  int step_;  // columns from one unit to the next
  std::uint32_t shared_;
  Parameters parameters_;
  ParameterSums<N, A> totals_[kPieceUnits];
};

// Adds up the sums of a row's pieces in order.
template <typename A>
__device__ __forceinline__ PullbackSums<A> add_pieces(const PullbackSums<A>* pieces, int count) {
  PullbackSums<A> sums{A(0), A(0)};
  for (int piece = 0; piece < count; ++piece) {
    sums.wdy_xhat += pieces[piece].wdy_xhat;
    sums.wdy += pieces[piece].wdy;
  }
  return sums;
}

#endif

// grid: clusters of as many CTAs as a row has pieces.
template <typename Op, typename Tile>
__global__ void __launch_bounds__(kPieceThreads, 1)
    backward_cluster_kernel(const __grid_constant__ NormBackwardArgs args,
                            typename Op::A* partials) {
#if __CUDA_ARCH__ >= 900  // the kernel is never launched on older GPUs
  using Norm = typename Op::Norm;
  using A = typename Op::A;
  constexpr int kStages = Tile::kStages;
  constexpr int kSlots = 4;
  alignas(kStagedAlignment) extern __shared__ uint4 shared[];
  __shared__ PullbackSums<A> warp_sums[2][kPieceThreads / kWarpSize];
  __shared__ alignas(kVectorBytes) PullbackSums<A> piece_sums[kSlots * kMostCluster];
  __shared__ std::uint64_t arrivals[kSlots];

  const int ctas = static_cast<int>(cluster_size());
  const int rank = static_cast<int>(cluster_rank());
  const std::int64_t clusters = gridDim.x / ctas;
  const std::int64_t first_row = cluster_id();
  const A inverse_cols = reciprocal(static_cast<A>(args.cols));
  const ClusterExchange<PullbackSums<A>, kSlots> exchange{
      piece_sums, arrivals, ctas, ctas, cluster_rows(args.rows, first_row, clusters)};
  exchange.begin();
  await_kernels_before();

  ClusterRows<Op, Tile> rows(args, shared_address(shared), rank, ctas);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    rows.copy(first_row + stage * clusters, stage);
  }
  rows.begin();
  const auto saved_of = [&](std::int64_t row) {
    const A* const stats = static_cast<const A*>(args.stats);
    return row < args.rows ? Norm::saved(stats, row, args.rows) : SavedStats<A>{A(0), A(0)};
  };
  // Adds a row to the gradients of the parameters, and sends the sums of this CTA's piece.
  const auto take = [&](std::int64_t row, unsigned number, int stage,
                        const Normalizer<A>& normalizer) {
    const auto sums = sum_in_turn<Norm>(rows.sums(row, stage, normalizer), warp_sums[number % 2]);
    if (threadIdx.x < kWarpSize) {
      exchange.send(number, rank, sums);
    }
  };

  exchange.ready();
  SavedStats<A> next = saved_of(first_row + clusters);
  Normalizer<A> here = saved_of(first_row).normalizer();
  await_copies<kStages - 1>();
  take(first_row, 0, 0, here);
  int stage = 0;
  unsigned number = 0;  // counts the cluster's rows
  for (std::int64_t row = first_row; row < args.rows; row += clusters, ++number) {
    const Normalizer<A> after = next.normalizer();
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    next = saved_of(row + 2 * clusters);
    await_copies<kStages - 2>();
    if (row + clusters < args.rows) {
      take(row + clusters, number + 1, next_stage, after);
    }
    const PullbackSums<A> sums = add_pieces(exchange.await(number), ctas);
    if (Op::Source::wanted(args)) {
      rows.leave(row, stage, here, Pullback<Norm, A>(sums, here, inverse_cols));
    }
    rows.copy(row + kStages * clusters, stage);
    stage = next_stage;
    here = after;
  }
  rows.leave_sums(partials, first_row);
#endif
}

}  // namespace fused_op::cuda
