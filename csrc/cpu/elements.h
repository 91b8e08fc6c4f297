// Elements of any dtype to accumulators and back. Included by a level alone: level.h.
//
// Each level gives the same bits. F16C converts eight f16 at once where a level has it; all else is
// integer arithmetic without branches, which compilers vectorise, as they do not c10's conversions.
#pragma once

#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <typename A>
constexpr DType kDTypeOf = sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32;

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
  // Inf and NaN keep an exponent of ones.
  const std::int32_t rebias = magnitude >= 31 * kExponent ? 224 * kExponent : 112 * kExponent;
  const float subnormal = std::bit_cast<float>(magnitude + 113 * kExponent) - 0x1p-14f;
  const std::int32_t small = std::bit_cast<std::int32_t>(subnormal);
  return std::bit_cast<float>((magnitude < kExponent ? small : magnitude + rebias) | sign);
}

inline std::uint16_t to_float16(float value) {
  constexpr std::int32_t kExponent = 1 << 23;
  const auto bits = std::bit_cast<std::int32_t>(value);
  const std::int32_t magnitude = bits & 0x7fffffff;
  // Adding 0.5 leaves a subnormal in the lowest bits, rounded.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::int32_t small = std::bit_cast<std::int32_t>(shifted) - 126 * kExponent;
  const std::int32_t normal = (magnitude - 112 * kExponent + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const std::int32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
  const std::int32_t special = magnitude > 255 * kExponent ? nan : 0x7c00;
  const std::int32_t finite = magnitude < 113 * kExponent ? small : normal;
  const std::int32_t result = magnitude >= 143 * kExponent ? special : finite;
  return static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000));
}

template <typename A>
inline void read_float16(const std::uint16_t* __restrict from, std::int64_t count,
                         A* __restrict to) {
  std::int64_t i = 0;
#if FUSED_OP_CPU_F16C
  for (; sizeof(A) == 4 && i + 8 <= count; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i), _mm256_cvtph_ps(eight));
  }
#endif
  for (; i < count; ++i) {
    to[i] = static_cast<A>(from_float16(from[i]));
  }
}

template <typename A>
inline void write_float16(const A* __restrict from, std::int64_t count,
                          std::uint16_t* __restrict to) {
  std::int64_t i = 0;
#if FUSED_OP_CPU_F16C
  for (; sizeof(A) == 4 && i + 8 <= count; i += 8) {
    const __m256 eight = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < count; ++i) {
    to[i] = to_float16(static_cast<float>(from[i]));
  }
}

template <typename A>
inline void read_bfloat16(const std::uint16_t* __restrict from, std::int64_t count,
                          A* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<A>(from_bfloat16(from[i]));
  }
}

template <typename A>
inline void write_bfloat16(const A* __restrict from, std::int64_t count,
                           std::uint16_t* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = to_bfloat16(static_cast<float>(from[i]));
  }
}

template <typename From, typename To>
inline void convert(const From* __restrict from, std::int64_t count, To* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<To>(from[i]);
  }
}

// `count` elements, from element `first` on.
template <typename A>
void read_elements(const void* from, DType dtype, std::int64_t first, std::int64_t count, A* to) {
  switch (dtype) {
    case DType::kFloat16:
      return read_float16(static_cast<const std::uint16_t*>(from) + first, count, to);
    case DType::kBFloat16:
      return read_bfloat16(static_cast<const std::uint16_t*>(from) + first, count, to);
    case DType::kFloat32:
      return convert(static_cast<const float*>(from) + first, count, to);
    case DType::kFloat64:
      return convert(static_cast<const double*>(from) + first, count, to);
  }
}

// The one rounding.
template <typename A>
void write_elements(const A* from, void* to, DType dtype, std::int64_t first, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat16:
      return write_float16(from, count, static_cast<std::uint16_t*>(to) + first);
    case DType::kBFloat16:
      return write_bfloat16(from, count, static_cast<std::uint16_t*>(to) + first);
    case DType::kFloat32:
      return convert(from, count, static_cast<float*>(to) + first);
    case DType::kFloat64:
      return convert(from, count, static_cast<double*>(to) + first);
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
