// The RMS norm of queries or keys with rotary embedding: its formulas, and the structs of its
// kernels. The rotation's arguments and angles: rotation.h. Torch-free.
//
// A row is a head. Its normalised values n = x̂·weight are rotated in pairs (a, b) by the angles of
// the head's token:
//
//   y_a = n_a·cos - n_b·sin      dn_a = dy_a·cos + dy_b·sin
//   y_b = n_b·cos + n_a·sin      dn_b = dy_b·cos - dy_a·sin
//
// The elements of a pair are in the two halves of the rotated columns (GPT-NeoX), or neighbours
// (GPT-J). Columns after the rotated ones are left as they are. A lane reads the other element of a
// pair from the cache again, which works for every layout of a row. But where whole rows are
// rotated in halves and do not exceed a warp, a lane with an even number of packs already has that
// element.
#pragma once

#include <type_traits>

#include "core/epilogue.h"
#include "core/packed.h"
#include "core/rotation.h"
#include "core/source.h"

namespace fused_op {

#ifdef __CUDACC__
template <typename W, typename X, typename C, typename Form, bool kSplit>
struct RotatedAffine : Affine<W, X> {
  using Args = RopeForwardArgs;
  using Inner = Affine<W, X>;
  static constexpr bool kInHalves = Form::kInHalves;
  // Whether two elements are rotated at a time: each step is rounded.
  static constexpr bool kInPairs =
      sizeof(X) == 2 && std::is_same_v<C, X> && Form::kRoundsNorm && Form::kRoundsProducts;

  const Args& call;
  std::int64_t row;
  int first;  // column of the lane's pack 0
  int step;
  Normalizer<Accumulator<X>> normalizer{};  // of the row: set by tell()

  template <typename Lane>
  __device__ __forceinline__ RotatedAffine(const Args& args, std::int64_t number, const Lane& lane)
      : Inner(args, number, lane), call(args), row(number), first(lane.first), step(Lane::kStep) {}

  template <typename Call>  // of either direction
  __device__ __forceinline__ static int first_parameter(const Call& args, std::int64_t row) {
    return Form::kGroups ? static_cast<int>(args.rotation.first_parameter(row, args.cols)) : 0;
  }
  template <typename Norm, typename Access, int N, typename Col, typename Before = Absent>
  __device__ __forceinline__ static auto load(const Args& args, std::int64_t row, Col col,
                                              int valid, const Before& before = {}) {
    return Inner::template load<Norm, Access, N>(args, row, first_parameter(args, row) + col, valid,
                                                 before);
  }

  // Starts to bring the angles into the L1 cache while the row is on its way. us without and with
  // it: 147 139 at 32768 tokens of 32 heads of 128 columns (H200, bf16).
  template <typename Access, typename Lane, int N, int kVectors>
  __device__ __forceinline__ static void load_beside(
      const Args& args, std::int64_t row, const Lane& lane,
      typename Inner::template Beside<N, kVectors>&) {
    if constexpr (Form::kInHalves) {
      const Angles<Form, C> angles(args.rotation, row);
#pragma unroll
      for (int i = 0; i < (kVectors + 1) / 2; ++i) {
        if (lane.col(i) < args.rotation.half) {
          asm volatile("prefetch.global.L1 [%0];" ::"l"(angles.cos + lane.col(i)));
          asm volatile("prefetch.global.L1 [%0];" ::"l"(angles.sin + lane.col(i)));
        }
      }
    }
  }

  // Turns x̂ into n.
  template <int N, typename A>
  __device__ __forceinline__ static void scale(const Pack<W, N>& weight, A (&values)[N]) {
    if constexpr (Form::kRoundsXhat) {
      to_values(rounded<X>(values), values);
    }
    A factor[N];
    to_values(weight, factor);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] *= factor[j];
    }
    if constexpr (Form::kRoundsNorm) {
      to_values(rounded<X>(values), values);
    }
  }

  // The same, rounded.
  template <int N, typename A>
  __device__ __forceinline__ static Pack<X, N> scaled(const Pack<W, N>& weight, A (&values)[N]) {
    if constexpr (Form::kRoundsXhat && std::is_same_v<W, X>) {
      return Pairs<X>::product(rounded<X>(values), weight);
    } else {
      scale(weight, values);
      return rounded<X>(values);
    }
  }

  template <typename Norm, typename Parameters, typename Beside, int N, typename A>
  __device__ __forceinline__ void apply(const Parameters& parameters, const Beside&, int i,
                                        A (&values)[N]) {
    scale(parameters.weight, values);
    const Angles<Form, C> angles(call.rotation, row);
    const int col = first + i * step;
    if (angles.turns(col)) {
      A other[N], c[N], s[N];
      others<Norm>(angles, col, values, other);
      angles.load(col, c, s);
      angles.template turn<X, Form::kRoundsProducts>(values, other, c, s);
    }
  }

  template <typename Norm, typename Parameters, int N, typename A>
  __device__ __forceinline__ void apply_to_halves(const Parameters& of_first,
                                                  const Parameters& of_second, int i,
                                                  A (&values)[2][N], Pack<X, N> (&results)[2]) {
    const Angles<Form, C> angles(call.rotation, row);
    const int pair = first + i * step;
    if constexpr (kInPairs) {
      using P = Pairs<X>;
      const Pack<X, N> a = scaled(of_first.weight, values[0]);
      const Pack<X, N> b = scaled(of_second.weight, values[1]);
      const Pack<X, N> c = pack_at<N>(angles.cos + pair), s = pack_at<N>(angles.sin + pair);
      results[0] = P::difference(P::product(a, c), P::product(b, s));
      results[1] = P::sum(P::product(b, c), P::product(a, s));
    } else {
      scale(of_first.weight, values[0]);
      scale(of_second.weight, values[1]);
      A before[N], c[N], s[N], minus_s[N];
      angles.load_pairs(pair, c, s);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        before[j] = values[0][j];
        minus_s[j] = -s[j];
      }
      Angles<Form, C>::template turn<X, Form::kRoundsProducts>(values[0], values[1], c, minus_s);
      Angles<Form, C>::template turn<X, Form::kRoundsProducts>(values[1], before, c, s);
      results[0] = rounded<X>(values[0]);
      results[1] = rounded<X>(values[1]);
    }
  }

 private:
  // The values n that are paired with those of the columns from `col` on.
  template <typename Norm, int N, typename A>
  __device__ __forceinline__ void others(const Angles<Form, C>& angles, int col,
                                         const A (&values)[N], A (&other)[N]) const {
    if constexpr (Form::kAdjacent && N % 2 == 0) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        other[j] = values[j ^ 1];
      }
    } else {
      to_values(angles.template others<N>(first_of<X, kSplit>(call.input, row), col), other);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        other[j] = Norm::normalized(other[j], normalizer);
      }
      const auto* const weight = static_cast<const W*>(call.weight);
      if (weight != nullptr) {
        scale(angles.template others<N>(weight + first_parameter(call, row), col), other);
      } else {
        A ones[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          ones[j] = 1;
        }
        scale(rounded<W>(ones), other);
      }
    }
  }

 public:
  struct Backward : Inner::Backward {
    using Args = RopeBackwardArgs;
    static constexpr bool kGrouped = Form::kGroups;
    static constexpr bool kInHalves = Form::kInHalves;

    const Args& call;
    std::int64_t row;

    __device__ __forceinline__ Backward(const Args& args, std::int64_t number)
        : Inner::Backward(args, number), call(args), row(number) {}

    template <typename Norm, typename Access, int N, typename Col>
    __device__ __forceinline__ static auto load(const Args& args, std::int64_t row, Col col,
                                                int valid) {
      const int first = first_parameter(args, row);
      return Inner::Backward::template load<Norm, Access, N>(args, row, first + col, valid);
    }

    template <typename Norm, int N, typename Parameters, typename A, typename Col>
    __device__ __forceinline__ void pullback(const Parameters& parameters, Col col,
                                             const A (&xhat)[N], A (&dy)[N], A (&grad_xhat)[N],
                                             ParameterSums<N, A>& sums) const {
      const Angles<Form, C> angles(call.rotation, row);
      if (angles.turns(col)) {
        A other[N];
        others(angles, static_cast<int>(col), dy, other);
        turn_back(angles, static_cast<int>(col), other, dy);
      }
      pullback_turned<Norm>(parameters, col, xhat, dy, grad_xhat, sums);
    }
    // What pullback_halves() reads of a row. A kernel loads it a row ahead: 320 us without, 245 us
    // with that (as above, when a lane had one pack).
    template <int N>
    struct OfRow {
      Pack<C, N> cos;
      Pack<C, N> sin;
    };
    template <int N>
    __device__ __forceinline__ static OfRow<N> load_of_row(const Args& args, std::int64_t row,
                                                           int col) {
      const Angles<Form, C> angles(args.rotation, row);
      const int pair = args.rotation.template pair<false>(col);
      return {pack_at<N>(angles.cos + pair), pack_at<N>(angles.sin + pair)};
    }
    template <typename Norm, int N, typename Parameters, typename A>
    __device__ __forceinline__ void pullback_halves(const Parameters& parameters,
                                                    const OfRow<N>& of_row, bool second, int col,
                                                    const A (&xhat)[N], A (&dy)[N],
                                                    const A (&other)[N], A (&grad_xhat)[N],
                                                    ParameterSums<N, A>& sums) const {
      A c[N], s[N];
      to_values(of_row.cos, c);
      to_values(of_row.sin, s);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        s[j] = second ? -s[j] : s[j];
      }
      Angles<Form, C>::template turn<X, false>(dy, other, c, s);
      pullback_turned<Norm>(parameters, col, xhat, dy, grad_xhat, sums);
    }

   private:
    template <typename Norm, int N, typename Parameters, typename A, typename Col>
    __device__ __forceinline__ void pullback_turned(const Parameters& parameters, Col col,
                                                    const A (&xhat)[N], A (&dy)[N],
                                                    A (&grad_xhat)[N],
                                                    ParameterSums<N, A>& sums) const {
      if constexpr (Form::kRoundsXhat) {
        A met[N];
        to_values(rounded<X>(xhat), met);
        Inner::Backward::template pullback<Norm>(parameters, col, met, dy, grad_xhat, sums);
      } else {
        Inner::Backward::template pullback<Norm>(parameters, col, xhat, dy, grad_xhat, sums);
      }
    }

    // The elements of dy that are paired with those of the columns from `col` on.
    template <int N, typename A>
    __device__ __forceinline__ void others(const Angles<Form, C>& angles, int col, const A (&dy)[N],
                                           A (&other)[N]) const {
      if constexpr (Form::kAdjacent && N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          other[j] = dy[j ^ 1];
        }
      } else {
        const X* const from = first_of<X, kSplit>(call.grad_output, row);
        to_values(angles.template others<N>(from, col), other);
      }
    }
    // dy to the gradient of n: rotates by the same angle, backwards.
    template <int N, typename A>
    __device__ __forceinline__ static void turn_back(const Angles<Form, C>& angles, int col,
                                                     const A (&other)[N], A (&dy)[N]) {
      A c[N], s[N];
      angles.load(col, c, s);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        s[j] = -s[j];
      }
      angles.template turn<X, false>(dy, other, c, s);
    }
  };
};

// The row is the input. Its gradient goes to rows that need not be contiguous.
template <typename X, bool kSplit>
struct Heads : Plain<X, kSplit> {
  using Plain<X, kSplit>::Plain;

  struct Backward : Plain<X, kSplit>::Backward {
    const RopeBackwardArgs& call;

    __device__ __forceinline__ Backward(const RopeBackwardArgs& args, std::int64_t number)
        : Plain<X, kSplit>::Backward(args, number), call(args) {}

    template <typename Access, typename Lane, typename Gradients>
    __device__ __forceinline__ void store(const Lane& lane, int first,
                                          const Gradients& gradients) const {
      X* const input = static_cast<X*>(call.grad_input.data) +
                       call.grad_split.offset(this->row, call.grad_stride);
      Access::store_some(lane, input, first, gradients.input);
    }
  };
};
#endif

}  // namespace fused_op
