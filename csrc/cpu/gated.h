// The gated RMS norm of a range of rows: core/gated.h. A row, or a part of a long one, is converted
// to accumulators and then processed by short loops, within the cache. Included only by a level:
// level.h.
#pragma once

#include "cpu/backward.h"
#include "cpu/elements.h"
#include "cpu/level.h"
#include "cpu/sums.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// e^-|z| from the bits of |z|; 0 if the result is subnormal. The error is at most 0.9 units in the
// last place. (std::exp is a call, which keeps loops scalar.)
FUSED_OP_CPU_INLINE float exp_of_negative(std::uint32_t magnitude) {
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits: times n it is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // the lowest bits of kRound + a value are an integer
  constexpr auto kMost = std::bit_cast<std::uint32_t>(88.0f);
  const float x = -std::bit_cast<float>(std::min(magnitude, kMost));
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 0x1.6a8p-10f;
  p = p * r + 0x1.11bp-7f;
  p = p * r + 0x1.5555p-5f;
  p = p * r + 0x1.55553cp-3f;
  p = p * r + 0.5f;
  // The exponent n, or a power of 0.
  const auto power = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
  return (r + r * r * p + 1.0f) * power;
}

// Chooses between bits. Comparisons of floats would be branches, which keep loops scalar.
template <bool kSigmoid>
FUSED_OP_CPU_INLINE Activation<float> activation_of(float z) {
  const auto bits = std::bit_cast<std::uint32_t>(z);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t negative = 0u - (bits >> 31);
  const std::uint32_t nan = (0u - ((0x7f800000u - magnitude) >> 31)) & 0x7fc00000u;
  const float e = exp_of_negative(magnitude);
  const float larger = 1.0f / (1.0f + e);  // the larger of σ(z) and σ(-z)
  const auto high = std::bit_cast<std::uint32_t>(larger) | nan;
  const auto low = std::bit_cast<std::uint32_t>(e * larger) | nan;
  const auto sigma = std::bit_cast<float>((low & negative) | (high & ~negative));
  const auto rest = std::bit_cast<float>((high & negative) | (low & ~negative));
  return activation<kSigmoid>(z, sigma, rest);
}
template <bool kSigmoid>
FUSED_OP_CPU_INLINE Activation<double> activation_of(double z) {
  return activation<kSigmoid>(z);
}

template <bool kSigmoid, typename A>
FUSED_OP_CPU_SHARED void activate(const A* __restrict z, std::int64_t count, A* __restrict value,
                                  A* __restrict slope) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const Activation<A> at = activation_of<kSigmoid>(z[j]);
    value[j] = at.value;
    slope[j] = at.slope;
  }
}

// SiLU behind a norm over channels.
template <typename A, typename Y>
FUSED_OP_CPU_SHARED void silu(const A* __restrict n, std::int64_t count, Y* __restrict y) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    y[j] = rounded<Y>(activation_of<false>(n[j]).value);
  }
}

// dn = dy · silu'(n)
template <typename D, typename A>
FUSED_OP_CPU_SHARED void multiply_by_slope(const D* __restrict dy, const A* __restrict n,
                                           std::int64_t count, A* __restrict dn) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    dn[j] = widened<A>(dy[j]) * activation_of<false>(n[j]).slope;
  }
}

template <typename A>
void multiply(const A* __restrict by, std::int64_t count, A* __restrict values) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    values[j] *= by[j];
  }
}

template <typename A>
void add_products(const A* __restrict a, const A* __restrict b, std::int64_t count,
                  A* __restrict sums) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    sums[j] += a[j] * b[j];
  }
}

// To 16 bits and back.
template <typename A>
void round_values(DType dtype, std::int64_t count, A* values) {
  with_rounding<A>(Rounding::kBeforeWeight, dtype, [&]<typename Met>(Met met) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) {
      values[j] = met(values[j]);
    }
  });
}

// From the gradient of x̂ to that of the row, in its place.
template <typename A>
void pull_back_values(const Pullback<RmsNorm, A> pullback, const A* __restrict xhat,
                      std::int64_t count, A* __restrict grad) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    grad[j] = pullback(grad[j], xhat[j]);
  }
}

// In a fixed order, whatever the instruction set.
template <typename A>
double sum_of_products(const A* __restrict a, const A* __restrict b, std::int64_t count) {
  constexpr int kLanes = 16;
  double total = 0;
  for (std::int64_t first = 0; first < count; first += kSumCols) {
    const std::int64_t last = std::min(first + kSumCols, count);
    A sums[kLanes] = {};
    std::int64_t j = first;
    for (; j + kLanes <= last; j += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) {
        sums[lane] += a[j + lane] * b[j + lane];
      }
    }
    for (int lane = 0; j < last; ++j, ++lane) {
      sums[lane] += a[j] * b[j];
    }
    total += static_cast<double>(fold(sums));
  }
  return total;
}

// The normaliser of a row from its sum of squares, found.second. Saves the statistics.
template <typename A>
Normalizer<A> rms_normalizer(const NormForwardArgs& args, std::int64_t row, Moments<A> found,
                             A scale) {
  found.second = static_cast<A>(static_cast<double>(found.second) / static_cast<double>(args.cols));
  const auto normalizer = RmsNorm::normalizer(found, scale, A(1), static_cast<A>(args.eps));
  if (args.stats != nullptr) {
    RmsNorm::save(normalizer, found, static_cast<A*>(args.stats), row, args.rows);
  }
  return normalizer;
}

// Backward of a range of chunks, row by row. Chunks consist of rows of the tensors, which contain
// all groups: the sums of the groups lie side by side. `sums` is where those of the chunk are; it
// stays null if they are not wanted.
template <typename A, typename Args, typename Function>
void run_chunks(const Args& args, std::int64_t first_chunk, std::int64_t last_chunk,
                std::int64_t chunks, A*& sums, const Function& run_row) {
  const std::int64_t groups = args.groups;
  const std::int64_t rows = args.rows / groups;
  for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    if (args.grad_weight != nullptr) {
      sums = static_cast<A*>(args.workspace) + chunk * groups * args.cols;
      std::fill_n(sums, groups * args.cols, A(0));
    }
    const std::int64_t last = rows * (chunk + 1) / chunks * groups;
    for (std::int64_t row = rows * chunk / chunks * groups; row < last; ++row) {
      run_row(row);
    }
  }
}

// What forward and backward do with the columns of a row that are in the buffers.
template <typename A, typename Args>
class GatedColumns {
 public:
  explicit GatedColumns(const Args& call)
      : args_(call),
        cols_(call.cols),
        rounds_(rounds_first(call.rounding, dtype_of_output(call))),
        rounds_product_(rounds_ && size_of(call.param_dtype) == 2),
        dtype_(dtype_of_output(call)) {}

 protected:
  static DType dtype_of_output(const GatedForwardArgs& args) { return args.input.dtype; }
  static DType dtype_of_output(const GatedBackwardArgs& args) { return args.grad_input.dtype; }

  // A tile has room for two buffers.
  static A* buffer(int number) { return tile_buffer<A>(number / 2) + number % 2 * (kTileSize / 2); }
  // Rows longer than a buffer are processed in parts, and read again for each pass.
  bool is_whole() const { return cols_ <= kTileSize / 2; }
  template <typename Function>
  void for_parts(const Function& function) const {
    for (std::int64_t col = 0, count = 0; col < cols_; col += count) {
      count = is_whole() ? cols_ : piece(col, cols_, kTileCols);
      function(col, count);
    }
  }

  static void read_part(const ConstRows& rows, std::int64_t row, std::int64_t col,
                        std::int64_t count, A* to) {
    read_elements(rows.data, rows.dtype, rows.split.offset(row, rows.stride) + col, count, to);
  }
  void write_part(const A* from, const Rows& rows, std::int64_t row, std::int64_t col,
                  std::int64_t count) const {
    if (rows.data != nullptr) {
      write_elements(from, rows.data, rows.dtype, row * cols_ + col, count);
    }
  }
  // Reads the weight of the row's group.
  void read_weight(std::int64_t row, std::int64_t col, std::int64_t count, A* to) const {
    if (args_.weight == nullptr) {
      std::fill_n(to, count, A(1));
    } else {
      const std::int64_t first = row % args_.gate.groups * cols_ + col;
      read_elements(args_.weight, args_.param_dtype, first, count, to);
    }
  }
  // φ(z) and φ'(z).
  void read_gate(std::int64_t row, std::int64_t col, std::int64_t count, A* value, A* slope) const {
    A* const z = buffer(7);
    read_part(args_.gate.rows, row, col, count, z);
    if (args_.gate.sigmoid) {
      activate<true>(z, count, value, slope);
    } else {
      activate<false>(z, count, value, slope);
    }
  }
  void round(std::int64_t count, A* values) const { round_values(dtype_, count, values); }
  // Turns x̂, rounded or not, into n.
  void scale(const A* weight, std::int64_t count, A* values) const {
    multiply(weight, count, values);
    if (rounds_product_) {
      round(count, values);
    }
  }

  const Args& args_;
  const std::int64_t cols_;
  const bool rounds_;
  const bool rounds_product_;  // the weight has 16 bits, so its product with x̂ is rounded
  const DType dtype_;
};

template <typename A>
class GatedForward : GatedColumns<A, GatedForwardArgs> {
  using Columns = GatedColumns<A, GatedForwardArgs>;
  using Columns::args_;
  using Columns::cols_;

 public:
  using Columns::Columns;

  void run(std::int64_t first_row, std::int64_t last_row) {
    for (std::int64_t row = first_row; row < last_row; ++row) {
      const Normalizer<A> normalizer = normalizer_of(row);
      this->for_parts([&](std::int64_t col, std::int64_t count) {
        if (!this->is_whole()) {
          read(row, col, count);
        }
        write(row, col, count, normalizer);
      });
    }
  }

 private:
  // Reads the columns that are normalised, and φ(z).
  void read(std::int64_t row, std::int64_t col, std::int64_t count) {
    this->read_part(args_.input, row, col, count, x_);
    this->read_gate(row, col, count, gate_, ignored_);
    if (args_.gate.first) {
      multiply(gate_, count, x_);
    }
  }
  A second_moment(std::int64_t row, A scale) {
    double total = 0;
    this->for_parts([&](std::int64_t col, std::int64_t count) {
      read(row, col, count);
      if (scale == A(1)) {
        total += sum_of_products(x_, x_, count);
        return;
      }
      for (std::int64_t j = 0; j < count; ++j) {
        weight_[j] = x_[j] * scale;
      }
      total += sum_of_products(weight_, weight_, count);
    });
    return static_cast<A>(total);
  }
  Normalizer<A> normalizer_of(std::int64_t row) {
    A scale = A(1);
    Moments<A> found{A(0), A(0), second_moment(row, scale)};
    if (overflowed(found)) {
      scale = Limits<A>::kScale;
      found.second = second_moment(row, scale);
      unscale(found, scale);
    }
    return rms_normalizer(args_, row, found, scale);
  }
  void write(std::int64_t row, std::int64_t col, std::int64_t count,
             const Normalizer<A>& normalizer) {
    normalize_row<RmsNorm>(normalizer, count, x_);
    if (this->rounds_) {
      this->round(count, x_);
    }
    this->read_weight(row, col, count, weight_);
    this->scale(weight_, count, x_);
    if (!args_.gate.first) {
      multiply(gate_, count, x_);
    }
    this->write_part(x_, args_.output, row, col, count);
  }

  A* const x_ = Columns::buffer(0);
  A* const gate_ = Columns::buffer(1);
  A* const ignored_ = Columns::buffer(2);
  A* const weight_ = Columns::buffer(3);
};

template <typename A>
class GatedBackward : GatedColumns<A, GatedBackwardArgs> {
  using Columns = GatedColumns<A, GatedBackwardArgs>;
  using Columns::args_;
  using Columns::cols_;

 public:
  using Columns::Columns;

  void run(std::int64_t first_chunk, std::int64_t last_chunk, std::int64_t chunks) {
    run_chunks(args_, first_chunk, last_chunk, chunks, sums_,
               [this](std::int64_t row) { run_row(row); });
  }

 private:
  void run_row(std::int64_t row) {
    const Normalizer<A> normalizer =
        RmsNorm::saved(static_cast<const A*>(args_.stats), row, args_.rows).normalizer();
    double total = 0;
    this->for_parts([&](std::int64_t col, std::int64_t count) {
      read(row, col, count, normalizer, true);
      total += sum_of_products(grad_, xhat_, count);
    });
    if (args_.grad_input.data == nullptr &&
        (args_.grad_gate.data == nullptr || !args_.gate.first)) {
      return;
    }
    const PullbackSums<A> sums{static_cast<A>(total), A(0)};
    const Pullback<RmsNorm, A> pullback(sums, normalizer, A(1) / static_cast<A>(cols_));
    this->for_parts([&](std::int64_t col, std::int64_t count) {
      if (!this->is_whole()) {
        read(row, col, count, normalizer, false);
      }
      write(row, col, count, pullback);
    });
  }
  // Computes x̂ and its gradient. In the `first` of two passes, also everything that does not need
  // the sums of the row.
  void read(std::int64_t row, std::int64_t col, std::int64_t count, const Normalizer<A>& normalizer,
            bool first) {
    this->read_part(args_.x, row, col, count, x_);
    this->read_part(args_.grad_output, row, col, count, grad_);
    this->read_gate(row, col, count, gate_, slope_);
    this->read_weight(row, col, count, weight_);
    std::copy_n(x_, count, xhat_);
    if (args_.gate.first) {
      multiply(gate_, count, xhat_);
    }
    normalize_row<RmsNorm>(normalizer, count, xhat_);
    std::copy_n(xhat_, count, met_);
    if (this->rounds_) {
      this->round(count, met_);
    }
    if (!args_.gate.first) {
      if (first) {
        leave_gate(row, col, count);
      }
      multiply(gate_, count, grad_);
    }
    if (first && sums_ != nullptr) {
      add_products(grad_, met_, count, sums_ + row % args_.gate.groups * cols_ + col);
    }
    multiply(weight_, count, grad_);
  }
  // dz = dy·n·φ'(z).
  void leave_gate(std::int64_t row, std::int64_t col, std::int64_t count) {
    A* const gradient = Columns::buffer(7);
    std::copy_n(met_, count, gradient);
    this->scale(weight_, count, gradient);
    multiply(grad_, count, gradient);
    multiply(slope_, count, gradient);
    this->write_part(gradient, args_.grad_gate, row, col, count);
  }
  void write(std::int64_t row, std::int64_t col, std::int64_t count,
             const Pullback<RmsNorm, A>& pullback) {
    pull_back_values(pullback, xhat_, count, grad_);
    if (args_.gate.first) {
      multiply(grad_, count, x_);
      multiply(slope_, count, x_);
      this->write_part(x_, args_.grad_gate, row, col, count);
      multiply(gate_, count, grad_);
    }
    this->write_part(grad_, args_.grad_input, row, col, count);
  }

  A* sums_ = nullptr;  // of the chunk; null: not wanted
  A* const x_ = Columns::buffer(0);
  A* const grad_ = Columns::buffer(1);  // of y, of x̂, of the row
  A* const gate_ = Columns::buffer(2);
  A* const slope_ = Columns::buffer(3);
  A* const weight_ = Columns::buffer(4);
  A* const xhat_ = Columns::buffer(5);
  A* const met_ = Columns::buffer(6);
};

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
