// The rotation of rotary embedding: its arguments, the options of a call as types, and the angles
// as a GPU thread reads them. Torch-free.
#pragma once

#include "core/norm_args.h"
#include "core/packed.h"
#include "core/source.h"

namespace fused_op {

struct Rotation {
  ConstRows cos;             // one row for each token, or for each token of a sequence: see `split`
  ConstRows sin;             // of the dtype of cos, and its rows lie as those of cos
  int half = 0;              // pairs
  bool adjacent = false;     // pairs are neighbours; else halves
  bool rounds_norm = false;  // round n to the dtype of the input
  bool rounds_products = false;  // also round each product with cos or sin
  bool in_packs = false;         // on the GPU: see set_packs() in core/rope_variant.h
  bool in_halves = false;        // also set there
  RowSplit heads;                // of one token
  int groups = 1;                // rows with weights of their own: 1, or the number of heads
  RowSplit group;

  FUSED_OP_HD std::int64_t token_of(std::int64_t row) const { return heads.offset(row, 0); }
  FUSED_OP_HD std::int64_t first_parameter(std::int64_t row, std::int64_t cols) const {
    return group.offset(row, cols);
  }

  // The other column of a pair, the number of the pair, and whether a column is its first.
  template <bool kAdjacent>
  FUSED_OP_HD int other(int col) const {
    return kAdjacent ? col ^ 1 : col < half ? col + half : col - half;
  }
  template <bool kAdjacent>
  FUSED_OP_HD int pair(int col) const {
    return kAdjacent ? col / 2 : col < half ? col : col - half;
  }
  template <bool kAdjacent>
  FUSED_OP_HD bool is_first(int col) const {
    return kAdjacent ? col % 2 == 0 : col < half;
  }
};

struct RopeForwardArgs : NormForwardArgs {
  Rotation rotation;
};
struct RopeBackwardArgs : NormBackwardArgs {
  Rotation rotation;
  int groups = 1;  // as in rotation
  // Where rows of grad_input begin; it may be part of a larger tensor.
  std::int64_t grad_stride = 0;
  RowSplit grad_split;
};

// The options of a call as types: those of Rotation, x̂ rounded before the weight, and weights of
// groups.
template <bool kAdjacent_, bool kRoundsXhat_, bool kRoundsNorm_, bool kRoundsProducts_,
          bool kGroups_, bool kInPacks_, bool kInHalves_>
struct RopeForm {
  static constexpr bool kAdjacent = kAdjacent_;
  static constexpr bool kRoundsXhat = kRoundsXhat_;
  static constexpr bool kRoundsNorm = kRoundsNorm_;
  static constexpr bool kRoundsProducts = kRoundsProducts_;
  static constexpr bool kGroups = kGroups_;
  static constexpr bool kInPacks = kInPacks_;
  static constexpr bool kInHalves = kInHalves_;
};

#ifdef __CUDACC__
// A pack at an address where vectors may begin.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> pack_at(const T* from) {
  static_assert(sizeof(T) * N >= 4, "a smaller pack is read beyond its end");
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <typename A, typename T>
__device__ __forceinline__ A value_at(const T* from) {
  const T element = *from;
  Pack<T, 1> pack{};
  memcpy(pack.words, &element, sizeof(T));
  A value[1];
  to_values(pack, value);
  return value[0];
}

// The angles of a kernel's row.
template <typename Form, typename C>
struct Angles {
  const Rotation& rotation;
  const C* cos;
  const C* sin;

  __device__ __forceinline__ Angles(const Rotation& call, std::int64_t row)
      : rotation(call),
        cos(first_of<C, true>(call.cos, call.token_of(row))),
        sin(static_cast<const C*>(call.sin.data) + (cos - static_cast<const C*>(call.cos.data))) {}

  __device__ __forceinline__ bool turns(std::int64_t col) const { return col < 2 * rotation.half; }

  // cos and sin of the pairs from `first` on, which lie in packs.
  template <int N, typename A>
  __device__ __forceinline__ void load_pairs(int first, A (&c)[N], A (&s)[N]) const {
    to_values(pack_at<N>(cos + first), c);
    to_values(pack_at<N>(sin + first), s);
  }

  // cos and sin of the columns from `col` on. sin has the sign with which the other element is
  // added. For columns that are not rotated, cos is 1 and sin 0.
  template <int N, typename A>
  __device__ __forceinline__ void load(int col, A (&c)[N], A (&s)[N]) const {
    constexpr int kPairs = Form::kAdjacent ? N / 2 : N;
    if constexpr (Form::kInPacks && kPairs * sizeof(C) >= 4 && (!Form::kAdjacent || N % 2 == 0)) {
      A of_cos[kPairs], of_sin[kPairs];
      load_pairs(rotation.template pair<Form::kAdjacent>(col), of_cos, of_sin);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int pair = Form::kAdjacent ? j / 2 : j;
        c[j] = of_cos[pair];
        s[j] = of_sin[pair];
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const bool turned = turns(col + j);
        const int pair = turned ? rotation.template pair<Form::kAdjacent>(col + j) : 0;
        c[j] = turned ? value_at<A>(cos + pair) : A(1);
        s[j] = turned ? value_at<A>(sin + pair) : A(0);
      }
    }
    constexpr bool kOneHalf = Form::kInPacks && !Form::kAdjacent;  // a pack lies within one half
#pragma unroll
    for (int j = 0; j < N; ++j) {
      s[j] = rotation.template is_first<Form::kAdjacent>(kOneHalf ? col : col + j) ? -s[j] : s[j];
    }
  }

  // The other elements of the pairs, for the columns from `col` on, of a row in memory.
  template <int N, typename T>
  __device__ __forceinline__ Pack<T, N> others(const T* row, int col) const {
    if constexpr (Form::kInPacks && !Form::kAdjacent && N * sizeof(T) >= 4) {
      return pack_at<N>(row + rotation.template other<false>(col));
    } else {
      T elements[N]{};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (turns(col + j)) {
          elements[j] = row[rotation.template other<Form::kAdjacent>(col + j)];
        }
      }
      Pack<T, N> pack{};
      memcpy(pack.words, elements, sizeof(elements));
      return pack;
    }
  }
  template <typename T, bool kRounds, int N, typename A>
  __device__ __forceinline__ static void turn(A (&values)[N], const A (&other)[N], const A (&c)[N],
                                              const A (&s)[N]) {
    A along[N], across[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      along[j] = values[j] * c[j];
      across[j] = other[j] * s[j];
    }
    if constexpr (kRounds) {
      to_values(rounded<T>(along), along);
      to_values(rounded<T>(across), across);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = along[j] + across[j];
    }
  }
};
#endif

}  // namespace fused_op
