// Rounds packs of an output to 8 bits, and finds the largest magnitude of lanes: what the kernels
// that quantise share. Compiled by nvcc and by NVRTC; torch-free.
#pragma once

#include "core/convert.h"
#include "core/quantize.h"
#include "cuda/quantized_plan.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// A rule as a type; its numbers are those of the enumerations.
template <int kFormat_, int kConvention_, int kScheme_, bool kPowerOfTwo_>
struct QuantizeAs {
  static constexpr Format kFormat = static_cast<Format>(kFormat_);
  static constexpr Scheme kScheme = static_cast<Scheme>(kScheme_);

  FUSED_OP_HD static constexpr QuantizeRule rule() {
    return {kFormat, static_cast<Convention>(kConvention_), kScheme, kPowerOfTwo_};
  }
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<Float16> {
  static constexpr DType kValue = DType::kFloat16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType kValue = DType::kBFloat16;
};
template <>
struct DTypeOf<float> {
  static constexpr DType kValue = DType::kFloat32;
};

// The largest magnitude of a pack and of `so_far`, as bits, which compare as magnitudes do. With
// elements of 16 bits, each half of the word has a maximum of its own.
template <typename Y, int N>
__device__ __forceinline__ std::uint32_t largest_of_pack(const Pack<Y, N>& pack,
                                                         std::uint32_t so_far) {
  constexpr std::uint32_t kMagnitudes = sizeof(Y) == 2 ? 0x7fff7fffu : kMagnitudeBits;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(pack) / 4); ++k) {
    const std::uint32_t word = pack.words[k] & kMagnitudes;
    if constexpr (sizeof(Y) == 2) {
#if __CUDA_ARCH__ >= 900
      asm("max.u16x2 %0, %0, %1;" : "+r"(so_far) : "r"(word));
#else
      so_far = max(so_far & 0xffffu, word & 0xffffu) | max(so_far >> 16, word >> 16) << 16;
#endif
    } else {
      so_far = max(so_far, word);
    }
  }
  return so_far;
}

// The largest of kLanes neighbouring lanes, as a float, valid in each of them. All 32 lanes call
// it.
template <typename Y, int kLanes>
__device__ __forceinline__ float largest_of_lanes(std::uint32_t largest) {
  if constexpr (sizeof(Y) == 2) {
    largest = max(largest & 0xffffu, largest >> 16);
  }
#if __CUDA_ARCH__ >= 800
  if constexpr (kLanes == kWarpSize) {
    largest = __reduce_max_sync(kAllLanes, largest);
  } else
#endif
  {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    }
  }
  if constexpr (sizeof(Y) == 2) {
    float values[2];
    Pack<Y, 2> pack;
    pack.words[0] = largest;
    to_values(pack, values);
    return values[0];
  } else {
    return __uint_as_float(largest);
  }
}

// What is done to each value that a scale covers.
struct Scaler {
  float divisor;
  float factor;
};

__device__ __forceinline__ Scaler scaler_of(const Scale& scale) {
  // For an infinite divisor, the quotient below takes the largest finite one. The factor is 0 then,
  // and so is the quotient of all finite values.
  return {fminf(scale.decode, 0x1.fffffep127f), scale.factor};
}

// value · factor, or value / divisor to the last bit: a fused multiplication and addition gives the
// quotient's error exactly, and the factor is the divisor's rounded inverse (Markstein 1990).
// Values too small for that become 0 in 8 bits. With the signs as they are here, -0 stays -0.
template <typename As>
__device__ __forceinline__ float scaled(float value, const Scaler& scaler) {
  const float quotient = value * scaler.factor;
  if constexpr (divides(As::rule())) {
    return fmaf(-fmaf(quotient, scaler.divisor, -value), scaler.factor, quotient);
  } else {
    return quotient;
  }
}

// Two values in 8 bits, the first in the lowest byte.
template <Format kFormat>
__device__ __forceinline__ std::uint32_t quantized_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kFormat == Format::kE4M3) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  } else if constexpr (kFormat == Format::kE5M2) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  } else
#endif
      if constexpr (kFormat == Format::kInt8) {
    const auto byte = [](float value) {
      return static_cast<std::uint32_t>(max(min(__float2int_rn(value), 127), -128)) & 0xffu;
    };
    return byte(low) | byte(high) << 8;
  } else {
    return quantized<kFormat>(low) | static_cast<std::uint32_t>(quantized<kFormat>(high)) << 8;
  }
}

// An element in 8 bits.
struct Byte {
  std::uint8_t bits;
};

template <typename As, typename Y, int N>
__device__ __forceinline__ Pack<Byte, N> quantized_pack(const Pack<Y, N>& pack,
                                                        const Scaler& scaler) {
  static_assert(N % 4 == 0);
  float values[N];
  to_values(pack, values);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values[j] = scaled<As>(values[j], scaler);
  }
  Pack<Byte, N> bytes;
#pragma unroll
  for (int k = 0; k < N / 4; ++k) {
    bytes.words[k] = quantized_pair<As::kFormat>(values[4 * k], values[4 * k + 1]) |
                     quantized_pair<As::kFormat>(values[4 * k + 2], values[4 * k + 3]) << 16;
  }
  return bytes;
}

// Stores a scale where its consumer looks for it.
__device__ __forceinline__ void store_scale(const Quantization& to, std::int64_t row,
                                            std::int64_t block, const Scale& scale) {
  const std::int64_t place = row * to.row_stride + block * to.block_stride;
  if (to.exponents) {
    static_cast<std::uint8_t*>(to.scales)[place] = exponent_of(scale.decode);
  } else {
    static_cast<float*>(to.scales)[place] = scale.decode;
  }
}

}  // namespace fused_op::cuda
