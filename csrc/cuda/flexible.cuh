// The source of rows that decides at run time what the others know at compile time: a dtype for
// each tensor, and dropout. Rows are held as accumulators, in packs of 8 elements (2 for double):
// 16 bytes of 16-bit elements, 32 of float. Where a pack is whole and aligned it moves in vectors,
// else element by element: any address will do, and rows of odd length are slower here than in the
// kernels of one dtype. Torch-free.
#pragma once

#include <type_traits>

#include "core/norm_args.h"
#include "core/norm_math.h"
#include "core/row_source.h"
#include "cuda/launch.h"
#include "cuda/row_access.cuh"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// How the flexible kernels see a row in memory.
struct AnyRow {
  char* data;
  DType dtype;
  bool aligned;

  __device__ __forceinline__ AnyRow(const void* base, std::int64_t elements, DType of_dtype)
      : data(static_cast<char*>(const_cast<void*>(base)) + elements * size_of(of_dtype)),
        dtype(of_dtype),
        aligned(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0) {}

  template <typename Col>
  __device__ __forceinline__ char* at(Col col) const {
    return data + static_cast<std::int64_t>(col) * size_of(dtype);
  }
};

__device__ __forceinline__ AnyRow any_row(const ConstRows& rows, std::int64_t row) {
  return {rows.data, rows.split.offset(row, rows.stride), rows.dtype};
}
__device__ __forceinline__ AnyRow any_row(const Rows& rows, std::int64_t row, std::int64_t cols) {
  return {rows.data, row * cols, rows.dtype};
}

// A pack as it lies in memory, in as many of the words as its dtype takes.
template <int N, typename A>
struct RawPack {
  std::uint32_t words[N * sizeof(A) / 4];
};

// Elements `0 <= j < valid` of a pack, one by one; the others are zero.
template <int N, typename A>
__device__ __forceinline__ void load_elements(const char* bytes, DType dtype, int valid,
                                              RawPack<N, A>& pack) {
  if (size_of(dtype) == 2) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const std::uint32_t low =
          j < valid ? *reinterpret_cast<const std::uint16_t*>(bytes + j * 2) : 0;
      const std::uint32_t high =
          j + 1 < valid ? *reinterpret_cast<const std::uint16_t*>(bytes + j * 2 + 2) : 0;
      pack.words[j / 2] = low | high << 16;
    }
  } else {
    constexpr int kWords = sizeof(A) / 4;  // float or double: what A is
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A value = 0;
      if (j < valid) {
        value = *reinterpret_cast<const A*>(bytes + j * sizeof(A));
      }
      memcpy(pack.words + j * kWords, &value, sizeof(A));
    }
  }
}

template <int N, typename A, typename Col>
__device__ __forceinline__ RawPack<N, A> load_raw(const AnyRow& row, Col col, Col width) {
  const char* const from = row.at(col);
  const bool whole = row.aligned && col + N <= width;
  RawPack<N, A> pack = {};
  load_if(whole, from, pack.words);
  if constexpr (sizeof(pack) > kVectorBytes) {
    load_if(whole && size_of(row.dtype) == sizeof(A), from + kVectorBytes, pack.words + 4);
  }
  if (!whole && col < width) {
    load_elements(from, row.dtype, static_cast<int>(min(width - col, Col{N})), pack);
  }
  return pack;
}

template <int N, typename A>
__device__ __forceinline__ void to_values(const RawPack<N, A>& raw, DType dtype, A (&values)[N]) {
  if constexpr (sizeof(A) == 4) {
    if (dtype != DType::kFloat32) {
      if (dtype == DType::kBFloat16) {
        Pack<__nv_bfloat16, N> pack;
        memcpy(pack.words, raw.words, sizeof(pack));
        unpack(pack, values);
      } else {
        Pack<__half, N> pack;
        memcpy(pack.words, raw.words, sizeof(pack));
        unpack(pack, values);
      }
      return;
    }
  }
  memcpy(values, raw.words, sizeof(values));
}

// The one rounding.
template <int N, typename A>
__device__ __forceinline__ RawPack<N, A> from_values(const A (&values)[N], DType dtype) {
  RawPack<N, A> raw = {};
  if constexpr (sizeof(A) == 4) {
    if (dtype != DType::kFloat32) {
      if (dtype == DType::kBFloat16) {
        const auto pack = pack_from<__nv_bfloat16, N>(values);
        memcpy(raw.words, pack.words, sizeof(pack));
      } else {
        const auto pack = pack_from<__half, N>(values);
        memcpy(raw.words, pack.words, sizeof(pack));
      }
      return raw;
    }
  }
  memcpy(raw.words, values, sizeof(values));
  return raw;
}

template <int N, typename A, typename Col>
__device__ __forceinline__ void store_values(const AnyRow& row, Col col, Col width,
                                             const A (&values)[N]) {
  if (col >= width) {
    return;
  }
  char* const bytes = row.at(col);
  const RawPack<N, A> raw = from_values(values, row.dtype);
  if (row.aligned && col + N <= width) {
    *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(raw.words);
    if constexpr (sizeof(raw) > kVectorBytes) {
      if (size_of(row.dtype) == sizeof(A)) {
        *reinterpret_cast<uint4*>(bytes + kVectorBytes) =
            *reinterpret_cast<const uint4*>(raw.words + 4);
      }
    }
    return;
  }
  const int valid = static_cast<int>(min(width - col, Col{N}));
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j < valid) {
      if (size_of(row.dtype) == 2) {
        reinterpret_cast<std::uint16_t*>(bytes)[j] =
            static_cast<std::uint16_t>(raw.words[j / 2] >> (j % 2 * 16));
      } else {
        reinterpret_cast<A*>(bytes)[j] = values[j];
      }
    }
  }
}

// Without packs of its own: everything above decides pack by pack.
struct AnyAccess {
  static constexpr bool kWholePacks = false;
  static constexpr bool kSharesBlocks = false;
  static constexpr bool kShifts = false;
};

// What a parameter is computed as.
template <typename W>
struct ParameterOf {
  using type = W;
};
template <typename A>
struct ParameterOf<AnyParameter<A>> {
  using type = A;
};

template <typename W>
constexpr bool kIsFlexible = !std::is_same_v<typename ParameterOf<W>::type, W>;

// load_parameters() of either kind. Those of run-time dtype are zero past the last column.
template <typename W, int N, typename Col>
__device__ __forceinline__ Pack<typename ParameterOf<W>::type, N> parameters_of(
    const void* parameters, DType dtype, Col col, Col width, float absent) {
  using P = typename ParameterOf<W>::type;
  if constexpr (!kIsFlexible<W>) {
    return load_parameters<N>(static_cast<const W*>(parameters), col, width, absent);
  } else {
    const auto* const from =
        static_cast<const char*>(parameters) + static_cast<std::int64_t>(col) * size_of(dtype);
    const bool wanted = parameters != nullptr && col < width;
    RawPack<N, P> raw = {};
    load_if(wanted, from, raw.words);
    if constexpr (sizeof(raw) > kVectorBytes) {
      const bool wide = size_of(dtype) == sizeof(P) && col + N / 2 < width;
      load_if(wanted && wide, from + kVectorBytes, raw.words + 4);
    }
    P values[N];
    to_values(raw, dtype, values);
    if (parameters == nullptr || col + N > width) {  // the block goes on behind the last column
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] = parameters == nullptr ? static_cast<P>(absent)
                    : col + j < width     ? values[j]
                                          : P(0);
      }
    }
    return as_pack(values);
  }
}

// A parameter's gradient, in the dtype of the parameter.
template <typename W, typename A>
__device__ __forceinline__ void store_gradient(void* target, DType dtype, std::int64_t col,
                                               A value) {
  if constexpr (!kIsFlexible<W>) {
    static_cast<W*>(target)[col] = static_cast<W>(value);
  } else if (size_of(dtype) == sizeof(A)) {
    static_cast<A*>(target)[col] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(target)[col] = __float2bfloat16_rn(static_cast<float>(value));
  } else {
    static_cast<__half*>(target)[col] = __float2half_rn(static_cast<float>(value));
  }
}

// A parameter's gradient, or what is added to it, which then is f32.
template <typename W, typename A>
__device__ __forceinline__ void finish_gradient(void* target, DType dtype, bool adds,
                                                std::int64_t col, A value) {
  if (adds) {
    static_cast<float*>(target)[col] += static_cast<float>(value);
  } else {
    store_gradient<W>(target, dtype, col, value);
  }
}

// The row is input, or dropout(input) + residual rounded to the dtype of the sum.
template <typename A>
struct Flexible {
  using Element = A;
  static constexpr bool kFlexible = true;
  static constexpr bool kSplit = true;  // where the rows say so
  static constexpr int kElements = sizeof(A) == 4 ? 8 : 2;
  static constexpr int kGradStreams = 3;
  static constexpr bool kDrops = false;  // decided at run time

  template <int N>
  struct Fetched {
    RawPack<N, A> input;
    RawPack<N, A> residual;
  };

  const NormForwardArgs& args;
  DropoutRow mask;
  AnyRow input;
  AnyRow residual;
  AnyRow sum;

  __device__ __forceinline__ Flexible(const NormForwardArgs& call, std::int64_t row)
      : args(call),
        mask(DropoutState(call.dropout), row),
        input(any_row(call.input, row)),
        residual(any_row(call.residual, row)),
        sum(call.sum, row * call.cols, call.dtype) {}

  __device__ __forceinline__ bool adds() const { return args.sum != nullptr; }

  template <typename, int N, typename Col>
  __device__ __forceinline__ Fetched<N> fetch(Col col, Col width) const {
    return {load_raw<N, A>(input, col, width),
            load_raw<N, A>(residual, col, adds() ? width : Col{0})};
  }
  template <typename, int kLanes, int N, int kVectors, typename Col>
  __device__ __forceinline__ void finish(const Fetched<N> (&fetched)[kVectors],
                                         Pack<A, N> (&row)[kVectors], Col col, Col width) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A total[N];
      to_values(fetched[i].input, input.dtype, total);
      if (adds()) {
        const Col here = col + i * kLanes * N;
        A addend[N];
        to_values(fetched[i].residual, residual.dtype, addend);
        if (args.dropout.active) {
          mask.apply(args.dropout, here, total);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          total[j] += addend[j];
        }
        store_values(sum, here, width, total);
        to_values(from_values(total, sum.dtype), sum.dtype, total);
      }
      row[i] = as_pack(total);
    }
  }
  // The finished row, read again.
  template <int N, typename Col>
  __device__ __forceinline__ Pack<A, N> reload(Col col, Col width) const {
    const AnyRow& row = adds() ? sum : input;
    A values[N];
    to_values(load_raw<N, A>(row, col, width), row.dtype, values);
    return as_pack(values);
  }
};

// Where the flexible kernels write an output: dropout, and then the one rounding.
template <typename A>
struct AnyTarget {
  const NormForwardArgs& args;
  DropoutRow mask;
  AnyRow row;

  __device__ __forceinline__ AnyTarget(const NormForwardArgs& call, std::int64_t number)
      : args(call),
        mask(DropoutState(call.dropout), number),
        row(any_row(call.output, number, call.cols)) {}

  template <int N, typename Col>
  __device__ __forceinline__ void store(Col col, Col width, const Pack<A, N>& pack) const {
    A values[N];
    unpack(pack, values);
    if (args.dropout.active && args.sum == nullptr) {
      mask.apply(args.dropout, col, values);
    }
    store_values(row, col, width, values);
  }
};

// x̂ of rows that hold the output, in place: (output - bias) / weight.
template <int N, typename A>
__device__ __forceinline__ void xhat_of_output(const NormBackwardArgs& args, std::int64_t col,
                                               const A (&weight)[N], A (&values)[N]) {
  A bias[N];
  unpack(parameters_of<AnyParameter<A>, N>(args.bias, args.param_dtype, col, args.cols, 0), bias);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A smallest = copysign(static_cast<A>(kSmallestWeight), weight[j]);
    const A divisor = fabs(weight[j]) < fabs(smallest) ? smallest : weight[j];
    values[j] = (values[j] - bias[j]) * reciprocal(divisor);
  }
}

// dx where it goes: as it is to the residual, and with the elements dropped to the input.
template <int N, typename A, typename Col>
__device__ __forceinline__ void store_row_gradients(const NormBackwardArgs& args,
                                                    const DropoutState& state, std::int64_t row,
                                                    Col col, Col width, A (&dx)[N]) {
  if (args.grad_residual.data != nullptr) {
    store_values(any_row(args.grad_residual, row, args.cols), col, width, dx);
  }
  if (args.grad_input.data != nullptr) {
    if (args.drops_input) {
      DropoutRow(state, row).apply(args.dropout, col, dx);
    }
    store_values(any_row(args.grad_input, row, args.cols), col, width, dx);
  }
}

}  // namespace fused_op::cuda
