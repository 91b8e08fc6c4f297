// Conversion between elements of any dtype and accumulators. Included only by a level: level.h.
//
// All levels give the same bits. Where a level has F16C, it converts FUSED_OP_CPU_F16C f16 elements
// at once. Everything else is integer arithmetic without branches, which compilers vectorise; they
// do not vectorise c10's conversions.
#pragma once

#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <typename E>
constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;

inline float from_bfloat16(std::uint16_t element) {
  return std::bit_cast<float>(std::uint32_t{element} << 16);
}

inline std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<std::uint16_t>(value != value ? 0x7fc0u : nearest);
}

inline float from_float16(std::uint16_t element) {
  constexpr std::int32_t kExponent = 1 << 23;
  const std::int32_t sign = (element & 0x8000) << 16;
  const std::int32_t magnitude = (element & 0x7fff) << 13;
  // Inf and NaN keep an exponent of all ones.
  const std::int32_t rebias = magnitude >= 31 * kExponent ? 224 * kExponent : 112 * kExponent;
  const float subnormal = std::bit_cast<float>(magnitude + 113 * kExponent) - 0x1p-14f;
  const std::int32_t small = std::bit_cast<std::int32_t>(subnormal);
  return std::bit_cast<float>((magnitude < kExponent ? small : magnitude + rebias) | sign);
}

inline std::uint16_t to_float16(float value) {
  constexpr std::int32_t kExponent = 1 << 23;
  const auto bits = std::bit_cast<std::int32_t>(value);
  const std::int32_t magnitude = bits & 0x7fffffff;
  // Adding 0.5 leaves the rounded subnormal in the lowest bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::int32_t small = std::bit_cast<std::int32_t>(shifted) - 126 * kExponent;
  const std::int32_t normal = (magnitude - 112 * kExponent + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const std::int32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
  const std::int32_t special = magnitude > 255 * kExponent ? nan : 0x7c00;
  const std::int32_t finite = magnitude < 113 * kExponent ? small : normal;
  const std::int32_t result = magnitude >= 143 * kExponent ? special : finite;
  return static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000));
}

#if FUSED_OP_CPU_F16C == 16
constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns inside the intrinsics without a mask
FUSED_OP_CPU_INLINE void load_float16(const Float16* from, float* to) {
  _mm512_storeu_ps(
      to, _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
FUSED_OP_CPU_INLINE void store_float16(const float* from, Float16* to) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to),
      _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#elif FUSED_OP_CPU_F16C == 8
FUSED_OP_CPU_INLINE void load_float16(const Float16* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
FUSED_OP_CPU_INLINE void store_float16(const float* from, Float16* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#endif

template <int kLanes, typename E, typename A>
constexpr bool kByF16C = std::is_same_v<E, Float16> && std::is_same_v<A, float> &&
                         FUSED_OP_CPU_F16C > 0 && kLanes % std::max(FUSED_OP_CPU_F16C, 1) == 0;

template <typename A, typename E>
FUSED_OP_CPU_INLINE A widened(E element) {
  if constexpr (std::is_same_v<E, Float16>) {
    return static_cast<A>(from_float16(element.bits));
  } else if constexpr (std::is_same_v<E, BFloat16>) {
    return static_cast<A>(from_bfloat16(element.bits));
  } else {
    return static_cast<A>(element);
  }
}
template <typename E, typename A>
FUSED_OP_CPU_INLINE E rounded(A value) {
  if constexpr (std::is_same_v<E, Float16>) {
    return {to_float16(static_cast<float>(value))};
  } else if constexpr (std::is_same_v<E, BFloat16>) {
    return {to_bfloat16(static_cast<float>(value))};
  } else {
    return static_cast<E>(value);
  }
}

template <int kLanes, typename E, typename A>
FUSED_OP_CPU_INLINE void load_pack(const E* __restrict from, A* __restrict to) {
  if constexpr (kByF16C<kLanes, E, A>) {
    for (int j = 0; j < kLanes; j += FUSED_OP_CPU_F16C) {
      load_float16(from + j, to + j);
    }
  } else {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) {
      to[j] = widened<A>(from[j]);
    }
  }
}

// This rounds, once.
template <int kLanes, typename E, typename A>
FUSED_OP_CPU_INLINE void store_pack(const A* __restrict from, E* __restrict to) {
  if constexpr (kByF16C<kLanes, E, A>) {
    for (int j = 0; j < kLanes; j += FUSED_OP_CPU_F16C) {
      store_float16(from + j, to + j);
    }
  } else {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) {
      to[j] = rounded<E>(from[j]);
    }
  }
}

// kLanes elements as accumulators. Each is converted where it is used, or all at once, in
// registers, if there is an instruction for that.
template <int kLanes, typename E, typename A, bool kAtOnce = kByF16C<kLanes, E, A>>
class Pack {
 public:
  explicit FUSED_OP_CPU_INLINE Pack(const E* from) : from_(from) {}
  FUSED_OP_CPU_INLINE A operator[](int lane) const { return widened<A>(from_[lane]); }

 private:
  const E* const __restrict from_;
};
template <int kLanes, typename E, typename A>
class Pack<kLanes, E, A, true> {
 public:
  explicit FUSED_OP_CPU_INLINE Pack(const E* from) { load_pack<kLanes>(from, values_); }
  FUSED_OP_CPU_INLINE A operator[](int lane) const { return values_[lane]; }

 private:
  A values_[kLanes];
};

// Stores result(lane) for each lane. This rounds, once.
template <int kLanes, typename A, typename E, typename Result>
FUSED_OP_CPU_INLINE void store_results(const Result& result, E* __restrict to) {
  if constexpr (kByF16C<kLanes, E, A>) {
    A values[kLanes];
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) {
      values[j] = result(j);
    }
    store_pack<kLanes>(values, to);
  } else {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) {
      to[j] = rounded<E>(result(j));
    }
  }
}

template <typename E, typename A>
FUSED_OP_CPU_SHARED void read(const void* data, std::int64_t first, std::int64_t count, A* to) {
  constexpr int kLanes = 16;
  const E* const from = static_cast<const E*>(data) + first;
  if constexpr (std::is_same_v<E, A>) {
    std::copy_n(from, count, to);
    return;
  }
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    load_pack<kLanes>(from + i, to + i);
  }
  for (; i < count; ++i) {
    to[i] = widened<A>(from[i]);
  }
}
template <typename E, typename A>
FUSED_OP_CPU_SHARED void write(const A* from, void* data, std::int64_t first, std::int64_t count) {
  constexpr int kLanes = 16;
  E* const to = static_cast<E*>(data) + first;
  if constexpr (std::is_same_v<E, A>) {
    std::copy_n(from, count, to);
    return;
  }
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store_pack<kLanes>(from + i, to + i);
  }
  for (; i < count; ++i) {
    to[i] = rounded<E>(from[i]);
  }
}

// x̂ as the weight multiplies it: see Rounding in core/norm_args.h.
struct Exact {
  template <typename A>
  FUSED_OP_CPU_INLINE A operator()(A xhat) const {
    return xhat;
  }
};
// As from_float16(to_float16(xhat)), in half as many instructions.
struct AsFloat16 {
  FUSED_OP_CPU_INLINE float operator()(float xhat) const {
    constexpr std::int32_t kExponent = 1 << 23;
    const auto bits = std::bit_cast<std::int32_t>(xhat);
    const std::int32_t magnitude = bits & 0x7fffffff;
    // The spacing of floats between 0.5 and 1 is that of subnormal numbers.
    const float subnormal = (std::bit_cast<float>(magnitude) + 0.5f) - 0.5f;
    const std::int32_t small = std::bit_cast<std::int32_t>(subnormal);
    const std::int32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fff;
    const std::int32_t finite = magnitude < 113 * kExponent ? small : normal;
    const std::int32_t special = std::max(magnitude, 255 * kExponent);  // infinity, or a NaN
    const std::int32_t result = finite >= 143 * kExponent ? 255 * kExponent : finite;
    const std::int32_t kept = magnitude >= 143 * kExponent ? special : result;
    return std::bit_cast<float>(kept | (bits & ~0x7fffffff));
  }
};
struct AsBFloat16 {
  FUSED_OP_CPU_INLINE float operator()(float xhat) const {
    return from_bfloat16(to_bfloat16(xhat));
  }
};

struct Unwanted : Exact {};  // the gradient of the weight is not wanted
struct Biased : Exact {};    // in forward of an RMS norm with a bias, which never rounds x̂

// Calls function(met) with the struct for a call. `input` is the dtype of its input; if rows are
// read in 16 bits, it is X.
template <typename X, typename Function>
inline void with_rounding(Rounding rounding, DType input, const Function& function) {
  if (std::is_same_v<X, double> || !rounds_first(rounding, input)) {
    function(Exact());
  } else if constexpr (std::is_same_v<X, Float16>) {
    function(AsFloat16());
  } else if constexpr (std::is_same_v<X, BFloat16>) {
    function(AsBFloat16());
  } else if constexpr (std::is_same_v<X, float>) {
    input == DType::kFloat16 ? function(AsFloat16()) : function(AsBFloat16());
  }
}

// Calls function<A>() with the accumulators of a dtype.
template <typename Function>
void with_accumulators(DType dtype, const Function& function) {
  if (dtype == DType::kFloat64) {
    function.template operator()<double>();
  } else {
    function.template operator()<float>();
  }
}

// Reads `count` elements, beginning at element `first`.
template <typename A>
FUSED_OP_CPU_SHARED void read_elements(const void* from, DType dtype, std::int64_t first,
                                       std::int64_t count, A* to) {
  switch (dtype) {
    case DType::kFloat16:
      return read<Float16>(from, first, count, to);
    case DType::kBFloat16:
      return read<BFloat16>(from, first, count, to);
    case DType::kFloat32:
      return read<float>(from, first, count, to);
    case DType::kFloat64:
      return read<double>(from, first, count, to);
  }
}
template <typename A>
FUSED_OP_CPU_SHARED void write_elements(const A* from, void* to, DType dtype, std::int64_t first,
                                        std::int64_t count) {
  switch (dtype) {
    case DType::kFloat16:
      return write<Float16>(from, to, first, count);
    case DType::kBFloat16:
      return write<BFloat16>(from, to, first, count);
    case DType::kFloat32:
      return write<float>(from, to, first, count);
    case DType::kFloat64:
      return write<double>(from, to, first, count);
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
