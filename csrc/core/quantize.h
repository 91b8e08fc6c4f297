// Quantised outputs: how a scale follows from the largest magnitude that it covers, and how values
// become 8 bits. The rules are bit for bit those of other libraries, applied to the rounded output
// of the norm. Plain values and formulas for both backends. Torch-free.
//
//   torchao    s = largest / max(amax, 1e-12),           q = y · s,        scale = 1 / s
//   vllm       d = max(amax / largest, floor),           q = y / d,        scale = d
//              int8, and a given d:                      q = y · (1 / d)
//   deep_gemm  d = max(amax, 1e-4) / largest,            q = y · (1 / d),  scale = d
//   te         s = largest / amax, 1 if amax is 0,       q = y · s,        scale = 1 / s
//              infinite or NaN
//
// Powers of two: torchao and te round s down, deep_gemm rounds d up. Sources: torchao
// float8_utils.py, vLLM layernorm_quant_kernels.cu, DeepGEMM utils/math.py, TransformerEngine
// recipe_common.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/norm_args.h"
#include "core/pack.h"

namespace fused_op {

enum class Format : int { kE4M3, kE5M2, kInt8 };
enum class Convention : int { kTorchao, kVllm, kDeepGemm, kTe };
// What a scale covers: the tensor, a row, or 128 columns of a row (fewer in its last block).
enum class Scheme : int { kTensor, kToken, kBlock128 };

constexpr int kBlockCols = 128;

struct QuantizeRule {
  Format format = Format::kE4M3;
  Convention convention = Convention::kTorchao;
  Scheme scheme = Scheme::kToken;
  bool power_of_two = false;
};

// Where the quantised rows and their scales are written. Scale (row, block) is element row ·
// row_stride + block · block_stride: an f32, or only its exponent, as E8M0.
struct Quantization {
  QuantizeRule rule;
  void* quantized = nullptr;     // [rows, cols]
  const float* given = nullptr;  // the scale of the tensor; null: scales are computed
  void* scales = nullptr;        // null: the scale is given
  bool exponents = false;        // scales are E8M0
  std::int64_t row_stride = 0;
  std::int64_t block_stride = 0;
};

FUSED_OP_HD constexpr float largest_of(Format format) {
  return format == Format::kE4M3 ? 448.0f : format == Format::kE5M2 ? 57344.0f : 127.0f;
}

// Whether values are divided by the scale, instead of being multiplied by the factor.
FUSED_OP_HD constexpr bool divides(const QuantizeRule& rule) {
  return rule.convention == Convention::kVllm && rule.scheme != Scheme::kTensor &&
         rule.format != Format::kInt8;
}

FUSED_OP_HD std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}
FUSED_OP_HD float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

constexpr std::uint32_t kMagnitudeBits = 0x7fffffffu;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Magnitudes compare as their bits do, with NaN above infinity. The maximum over a row with a NaN
// is therefore NaN, in any order.
FUSED_OP_HD std::uint32_t magnitude_bits(float value) { return bits_of(value) & kMagnitudeBits; }

struct Scale {
  float decode;  // y ≈ q · decode
  float factor;  // q = y · factor, unless divides()
};

// NaN, infinity and zero are returned unchanged.
FUSED_OP_HD float power_of_two_below(float value) {
  return value == value ? float_of(bits_of(value) & kInfinityBits) : value;
}
// DeepGEMM's rule, whose exponents are clamped to 1 and 254: NaN becomes 2^127.
FUSED_OP_HD float power_of_two_above(float value) {
  const std::uint32_t bits = magnitude_bits(value);
  const std::uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
  return float_of((exponent < 1 ? 1 : exponent > 254 ? 254 : exponent) << 23);
}

// The scale for values of dtype `output` whose largest magnitude is `amax`.
FUSED_OP_HD Scale scale_of(float amax, const QuantizeRule& rule, DType output) {
  const float largest = largest_of(rule.format);
  switch (rule.convention) {
    case Convention::kTorchao: {
      // torchao computes in double from a float: either way, one rounding. 1e-12f is below 1e-12.
      const float exact = amax <= 1e-12f ? static_cast<float>(static_cast<double>(largest) / 1e-12)
                                         : largest / amax;
      const float factor = rule.power_of_two ? power_of_two_below(exact) : exact;
      return {1.0f / factor, factor};
    }
    case Convention::kVllm: {
      const float floor = rule.format == Format::kInt8 ? 0x1p-23f : 1.0f / (largest * 512.0f);
      const float exact = amax / largest;
      const float decode = exact < floor ? floor : exact;  // NaN stays
      return {decode, 1.0f / decode};
    }
    case Convention::kDeepGemm: {
      const float exact = (amax < 1e-4f ? 1e-4f : amax) / largest;
      const float decode = rule.power_of_two ? power_of_two_above(exact) : exact;
      return {decode, 1.0f / decode};
    }
    case Convention::kTe:
      break;
  }
  float factor = 1.0f;
  if (amax > 0.0f && magnitude_bits(amax) < kInfinityBits) {
    factor = largest / amax;
    if (bits_of(factor) == kInfinityBits) {  // use the largest value of the output's dtype
      factor = output == DType::kBFloat16 ? 0x1.fep127f : 0x1.fffffep127f;
    }
    factor = rule.power_of_two ? power_of_two_below(factor) : factor;
  }
  return {1.0f / factor, factor};
}

// A given scale decodes the values, except in te, where it multiplies them.
FUSED_OP_HD Scale given_scale(float given, const QuantizeRule& rule) {
  const float inverse = 1.0f / given;
  return rule.convention == Convention::kTe ? Scale{inverse, given} : Scale{given, inverse};
}

// A scale as E8M0: 2^(byte - 127), 255 for NaN and infinity.
FUSED_OP_HD std::uint8_t exponent_of(float scale) {
  return static_cast<std::uint8_t>(magnitude_bits(scale) >> 23);
}

// Rounds to nearest, ties to even. Values that are too large, and infinity, become the largest
// finite value; NaN becomes 0x7f. The same as the GPU's cvt.rn.satfinite.
template <int kExponentBits, int kMantissaBits>
FUSED_OP_HD std::uint8_t to_float8(float value, float largest) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t exact = bits & kMagnitudeBits;
  const std::uint32_t limit = bits_of(largest);
  const std::uint32_t magnitude = exact < limit ? exact : limit;
  const std::uint32_t normal = (magnitude - (static_cast<std::uint32_t>(127 - kBias) << 23) +
                                ((1u << (kShift - 1)) - 1) + (magnitude >> kShift & 1u)) >>
                               kShift;
  // Adding a power of two whose last bit is the smallest subnormal leaves the rounded subnormal in
  // the lowest bits.
  constexpr std::uint32_t kAnchor = static_cast<std::uint32_t>(127 + 24 - kBias - kMantissaBits)
                                    << 23;
  const std::uint32_t small = bits_of(float_of(magnitude) + float_of(kAnchor)) - kAnchor;
  const bool is_normal = magnitude >= static_cast<std::uint32_t>(128 - kBias) << 23;
  const std::uint32_t finite = (is_normal ? normal : small) | (bits >> 24 & 0x80u);
  return static_cast<std::uint8_t>(exact > kInfinityBits ? 0x7fu : finite);
}

// Rounds to nearest, ties to even, and saturates. NaN becomes 0.
FUSED_OP_HD std::int8_t to_int8(float value) {
  constexpr float kAnchor = 0x1.8p23f;  // the bits below it are those of an integer
  const float low = value > -128.0f ? value : -128.0f;
  const float clamped = low < 127.0f ? low : 127.0f;
  const float nearest = (clamped + kAnchor) - kAnchor;
  return static_cast<std::int8_t>(value == value ? nearest : 0.0f);
}

// One scaled value as 8 bits.
template <Format kFormat>
FUSED_OP_HD std::uint8_t quantized(float scaled) {
  if constexpr (kFormat == Format::kE4M3) {
    return to_float8<4, 3>(scaled, largest_of(kFormat));
  } else if constexpr (kFormat == Format::kE5M2) {
    return to_float8<5, 2>(scaled, largest_of(kFormat));
  } else {
    return static_cast<std::uint8_t>(to_int8(scaled));
  }
}

}  // namespace fused_op
