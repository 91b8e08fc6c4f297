// What is in hand at a time: some short rows, or a part of a long one, as accumulators. A tile
// stays in the cache while its rows are read several times. Included by a level alone: level.h.
#pragma once

#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// The length of the piece of [first, last) that begins at `first`, where pieces have `size`. The
// last one takes in what would be shorter than the lanes.
inline std::int64_t piece(std::int64_t first, std::int64_t last, std::int64_t size) {
  const std::int64_t rest = last - first;
  return rest < size + kMaxLanes ? rest : size;
}

// Longer rows than a tile are read in parts.
inline bool is_long(std::int64_t cols) { return cols > kWholeCols; }

inline std::int64_t rows_of_tile(std::int64_t cols) {
  return std::clamp<std::int64_t>(kTileElements / cols, 1, kTileRows);
}

struct Tile {
  std::int64_t row;
  std::int64_t rows;
  std::int64_t col;
  std::int64_t cols;
};

template <typename A>
A* tile_buffer(int number) {
  return static_cast<A*>(thread_tiles()) + number * kTileSize;
}

// Where the accumulators of a tile are.
template <typename A>
struct View {
  const A* first = nullptr;
  std::int64_t stride = 0;

  const A* row(std::int64_t number) const { return first + number * stride; }
};

template <typename A>
void copy_tile(const ConstRows& rows, const Tile& tile, A* to) {
  const auto first_of = [&](std::int64_t row) {
    return rows.split.offset(row, rows.stride) + tile.col;
  };
  if (rows.split.inner == 0 && rows.stride == tile.cols) {
    read_elements(rows.data, rows.dtype, first_of(tile.row), tile.rows * tile.cols, to);
    return;
  }
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    read_elements(rows.data, rows.dtype, first_of(tile.row + r), tile.cols, to + r * tile.cols);
  }
}

// Rows of accumulators are read where they lie.
template <typename A>
bool lies_ready(const ConstRows& rows) {
  return rows.dtype == kDTypeOf<A> && rows.split.inner == 0;
}

template <typename A>
View<A> read_tile(const ConstRows& rows, const Tile& tile, A* buffer, bool dense = false) {
  if (lies_ready<A>(rows) && (!dense || rows.stride == tile.cols)) {
    return {static_cast<const A*>(rows.data) + tile.row * rows.stride + tile.col, rows.stride};
  }
  copy_tile(rows, tile, buffer);
  return {buffer, tile.cols};
}

template <typename A>
inline void add_rows(const A* __restrict a, const A* __restrict b, std::int64_t cols,
                     A* __restrict sum) {
#pragma omp simd
  for (std::int64_t col = 0; col < cols; ++col) {
    sum[col] = a[col] + b[col];
  }
}

// `values` are those of a dense tile.
template <typename A>
void write_tile(const A* values, void* data, DType dtype, const Tile& tile, std::int64_t cols) {
  if (data != nullptr) {
    write_elements(values, data, dtype, tile.row * cols + tile.col, tile.rows * tile.cols);
  }
}

template <typename A>
void drop_tile(const Dropout& dropout, const Tile& tile, A* values) {
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const DropoutRow mask(DropoutState(dropout), tile.row + r);
    A* const row = values + r * tile.cols;
    for (std::int64_t col = 0; col < tile.cols; col += kMaskCols) {
      const std::int64_t count = std::min<std::int64_t>(kMaskCols, tile.cols - col);
      A part[kMaskCols] = {};
      std::copy_n(row + col, count, part);
      mask.apply(dropout, tile.col + col, part);
      std::copy_n(part, count, row + col);
    }
  }
}

// Weight or bias; `absent` everywhere where there is none.
template <typename A>
class Parameter {
 public:
  Parameter(const void* data, DType dtype, std::int64_t cols, A absent) {
    if (data != nullptr && dtype == kDTypeOf<A>) {
      values_ = static_cast<const A*>(data);
      return;
    }
    memory_.reset(new A[static_cast<std::size_t>(cols)]);
    values_ = memory_.get();
    if (data != nullptr) {
      read_elements(data, dtype, 0, cols, memory_.get());
    } else {
      std::fill_n(memory_.get(), cols, absent);
    }
  }

  const A* values() const { return values_; }

 private:
  std::unique_ptr<A[]> memory_;
  const A* values_;
};

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
