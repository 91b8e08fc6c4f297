// The output of a forward to 8 bits and scales: core/quantize.h over rows. Included only by a
// level: level.h.
#pragma once

#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Quantises contiguous rows of `output`. A part of a row is converted at a time.
template <Format kFormat, bool kDivides>
class Quantizer {
 public:
  Quantizer(const Quantization& quantization, const void* output, DType dtype, std::int64_t cols)
      : to_(quantization), output_(output), dtype_(dtype), cols_(cols) {}

  void run(std::int64_t first_row, std::int64_t last_row) {
    for (std::int64_t row = first_row; row < last_row; ++row) {
      first_ = (row - first_row) * cols_;
      switch (to_.rule.scheme) {
        case Scheme::kTensor:
          write_row(row, given_scale(*to_.given, to_.rule));
          break;
        case Scheme::kToken:
          run_token(row);
          break;
        case Scheme::kBlock128:
          run_blocks(row);
          break;
      }
    }
  }

 private:
  void run_token(std::int64_t row) {
    std::uint32_t amax = 0;
    for (std::int64_t col = 0; col < cols_; col += kPart) {
      const std::int64_t count = read(col, kPart);
      amax = std::max(amax, largest(count));
    }
    write_row(row, scale(row, 0, amax));
  }
  void run_blocks(std::int64_t row) {
    for (std::int64_t col = 0; col < cols_; col += kBlockCols) {
      const std::int64_t count = read(col, kBlockCols);
      write(row, col, count, scale(row, col / kBlockCols, largest(count)));
    }
  }
  void write_row(std::int64_t row, const Scale& scale) {
    for (std::int64_t col = 0; col < cols_; col += kPart) {
      const std::int64_t count = read(col, kPart);
      write(row, col, count, scale);
    }
  }

  std::int64_t read(std::int64_t col, std::int64_t most) {
    const std::int64_t count = std::min(most, cols_ - col);
    read_elements(output_, dtype_, first_ + col, count, values_);
    return count;
  }
  std::uint32_t largest(std::int64_t count) const {
    std::uint32_t amax = 0;
#pragma omp simd reduction(max : amax)
    for (std::int64_t j = 0; j < count; ++j) {
      amax = std::max(amax, magnitude_bits(values_[j]));
    }
    return amax;
  }
  // Computes a scale and stores it.
  Scale scale(std::int64_t row, std::int64_t block, std::uint32_t amax) const {
    const Scale scale = scale_of(float_of(amax), to_.rule, dtype_);
    const std::int64_t place = row * to_.row_stride + block * to_.block_stride;
    if (to_.exponents) {
      static_cast<std::uint8_t*>(to_.scales)[place] = exponent_of(scale.decode);
    } else {
      static_cast<float*>(to_.scales)[place] = scale.decode;
    }
    return scale;
  }
  void write(std::int64_t row, std::int64_t col, std::int64_t count, const Scale& scale) const {
    std::uint8_t* const to = static_cast<std::uint8_t*>(to_.quantized) + row * cols_ + col;
    const float by = kDivides ? scale.decode : scale.factor;
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) {
      to[j] = quantized<kFormat>(kDivides ? values_[j] / by : values_[j] * by);
    }
  }

  static constexpr std::int64_t kPart = 1024;

  const Quantization& to_;
  const void* const output_;
  const DType dtype_;
  const std::int64_t cols_;
  std::int64_t first_ = 0;  // the first element, within the row
  float values_[kPart];
};

inline void quantize(const Quantization& quantization, const void* output, DType dtype,
                     std::int64_t cols, std::int64_t first_row, std::int64_t last_row) {
  const auto run = [&](auto&& quantizer) { quantizer.run(first_row, last_row); };
  switch (quantization.rule.format) {
    case Format::kE4M3:
      divides(quantization.rule)
          ? run(Quantizer<Format::kE4M3, true>(quantization, output, dtype, cols))
          : run(Quantizer<Format::kE4M3, false>(quantization, output, dtype, cols));
      break;
    case Format::kE5M2:
      run(Quantizer<Format::kE5M2, false>(quantization, output, dtype, cols));
      break;
    case Format::kInt8:
      run(Quantizer<Format::kInt8, false>(quantization, output, dtype, cols));
      break;
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
