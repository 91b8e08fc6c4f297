// The RMS norm with rotary embedding of heads, for a range of rows: core/rope.h. A row is converted
// to accumulators and then processed by short loops, within the cache. Included only by a level:
// level.h.
#pragma once

#include "core/rope.h"
#include "cpu/elements.h"
#include "cpu/gated.h"
#include "cpu/level.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// What forward and backward do with a row.
template <typename A, typename Args>
class RopeRows {
 public:
  explicit RopeRows(const Args& call)
      : args_(call),
        cols_(call.cols),
        pairs_(call.rotation.half),
        rounds_(rounds_first(call.rounding, dtype_of(call))),
        dtype_(dtype_of(call)),
        own_(cols_ > kTileSize / 2 ? new A[kBuffers * cols_] : nullptr) {}

 protected:
  static constexpr int kBuffers = 6;
  static DType dtype_of(const RopeForwardArgs& args) { return args.input.dtype; }
  static DType dtype_of(const RopeBackwardArgs& args) { return args.x.dtype; }

  // A tile has room for two buffers. Heads longer than any model's have memory of their own.
  A* buffer(int number) const {
    return own_ != nullptr ? own_.get() + number * cols_
                           : tile_buffer<A>(number / 2) + number % 2 * (kTileSize / 2);
  }
  void read_row(const ConstRows& rows, std::int64_t row, A* to) const {
    read_elements(rows.data, rows.dtype, rows.split.offset(row, rows.stride), cols_, to);
  }
  // Reads the weight of the row's group, which is usually that of the previous row.
  void read_weight(std::int64_t row, A* to) {
    const std::int64_t first = args_.rotation.first_parameter(row, cols_);
    if (first != first_parameter_ && args_.weight == nullptr) {
      std::fill_n(to, cols_, A(1));
    } else if (first != first_parameter_) {
      read_elements(args_.weight, args_.param_dtype, first, cols_, to);
    }
    first_parameter_ = first;
  }
  // Reads cos and sin of the row's token, which the previous row usually shares.
  void read_angles(std::int64_t row, A* cos, A* sin) {
    const std::int64_t token = args_.rotation.token_of(row);
    if (token != token_) {
      for (const auto& [rows, to] :
           {std::pair(args_.rotation.cos, cos), std::pair(args_.rotation.sin, sin)}) {
        read_elements(rows.data, rows.dtype, rows.split.offset(token, rows.stride), pairs_, to);
      }
      token_ = token;
    }
  }
  void round(A* values) const { round_values(dtype_, cols_, values); }
  // Rotates all pairs of a row. `met` is applied to each product. kSign is the sign of the angle.
  template <int kSign, typename Met>
  void turn(const Met& met, const A* __restrict cos, const A* __restrict sin,
            A* __restrict values) const {
    const std::int64_t step = args_.rotation.adjacent ? 2 : 1;
    const std::int64_t apart = args_.rotation.adjacent ? 1 : pairs_;
#pragma omp simd
    for (std::int64_t j = 0; j < pairs_; ++j) {
      const A a = values[j * step];
      const A b = values[j * step + apart];
      const A s = A(kSign) * sin[j];
      values[j * step] = met(a * cos[j]) - met(b * s);
      values[j * step + apart] = met(b * cos[j]) + met(a * s);
    }
  }

  const Args& args_;
  const std::int64_t cols_;
  const std::int64_t pairs_;
  const bool rounds_;
  const DType dtype_;

 private:
  const std::unique_ptr<A[]> own_;
  std::int64_t token_ = -1;            // whose angles are in the buffers
  std::int64_t first_parameter_ = -1;  // of the weight in the buffer
};

template <typename A>
class RopeForward : RopeRows<A, RopeForwardArgs> {
  using Rows = RopeRows<A, RopeForwardArgs>;
  using Rows::args_;
  using Rows::cols_;

 public:
  using Rows::Rows;

  void run(std::int64_t first_row, std::int64_t last_row) {
    for (std::int64_t row = first_row; row < last_row; ++row) {
      this->read_row(args_.input, row, x_);
      normalize_row<RmsNorm>(normalizer_of(row), cols_, x_);
      if (this->rounds_) {
        this->round(x_);
      }
      this->read_weight(row, weight_);
      multiply(weight_, cols_, x_);
      if (args_.rotation.rounds_norm) {
        this->round(x_);
      }
      this->read_angles(row, cos_, sin_);
      with_rounding<A>(args_.rotation.rounds_products ? Rounding::kBeforeWeight : Rounding::kOnce,
                       this->dtype_,
                       [&](const auto& met) { this->template turn<1>(met, cos_, sin_, x_); });
      write_elements(x_, args_.output.data, args_.output.dtype, row * cols_, cols_);
    }
  }

 private:
  Normalizer<A> normalizer_of(std::int64_t row) {
    A scale = A(1);
    Moments<A> found{A(0), A(0), static_cast<A>(sum_of_products(x_, x_, cols_))};
    if (overflowed(found)) {
      scale = Limits<A>::kScale;
      for (std::int64_t j = 0; j < cols_; ++j) {
        other_[j] = x_[j] * scale;
      }
      found.second = static_cast<A>(sum_of_products(other_, other_, cols_));
      unscale(found, scale);
    }
    return rms_normalizer(args_, row, found, scale);
  }

  A* const x_ = Rows::buffer(0);
  A* const other_ = Rows::buffer(1);
  A* const cos_ = Rows::buffer(2);
  A* const sin_ = Rows::buffer(3);
  A* const weight_ = Rows::buffer(4);
};

template <typename A>
class RopeBackward : RopeRows<A, RopeBackwardArgs> {
  using Rows = RopeRows<A, RopeBackwardArgs>;
  using Rows::args_;
  using Rows::cols_;

 public:
  using Rows::Rows;

  void run(std::int64_t first_chunk, std::int64_t last_chunk, std::int64_t chunks) {
    run_chunks(args_, first_chunk, last_chunk, chunks, sums_,
               [this](std::int64_t row) { run_row(row); });
  }

 private:
  void run_row(std::int64_t row) {
    const Normalizer<A> normalizer =
        RmsNorm::saved(static_cast<const A*>(args_.stats), row, args_.rows).normalizer();
    this->read_row(args_.grad_output, row, grad_);
    this->read_angles(row, cos_, sin_);
    this->template turn<-1>(Exact(), cos_, sin_, grad_);
    this->read_row(args_.x, row, xhat_);
    normalize_row<RmsNorm>(normalizer, cols_, xhat_);
    if (sums_ != nullptr) {
      std::copy_n(xhat_, cols_, other_);
      if (this->rounds_) {
        this->round(other_);
      }
      add_products(grad_, other_, cols_, sums_ + args_.rotation.first_parameter(row, cols_));
    }
    if (args_.grad_input.data == nullptr) {
      return;
    }
    this->read_weight(row, weight_);
    multiply(weight_, cols_, grad_);
    const PullbackSums<A> sums{static_cast<A>(sum_of_products(grad_, xhat_, cols_)), A(0)};
    const Pullback<RmsNorm, A> pullback(sums, normalizer, A(1) / static_cast<A>(cols_));
    pull_back_values(pullback, xhat_, cols_, grad_);
    write_elements(grad_, args_.grad_input.data, args_.grad_input.dtype,
                   args_.grad_split.offset(row, args_.grad_stride), cols_);
  }

  A* sums_ = nullptr;                // of the chunk; null: not wanted
  A* const grad_ = Rows::buffer(0);  // of y, of n, of x̂, of the row
  A* const xhat_ = Rows::buffer(1);
  A* const other_ = Rows::buffer(2);
  A* const cos_ = Rows::buffer(3);
  A* const sin_ = Rows::buffer(4);
  A* const weight_ = Rows::buffer(5);
};

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
