// A tile: what is processed at a time, some short rows or a part of a long one, as accumulators. It
// stays in the cache while its rows are read several times. Included only by a level: level.h.
#pragma once

#include "cpu/elements.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// The length of the piece that begins at `first`, if [first, last) is cut into pieces of `size`. A
// rest shorter than the lanes is added to the last piece.
inline std::int64_t piece(std::int64_t first, std::int64_t last, std::int64_t size) {
  const std::int64_t rest = last - first;
  return rest < size + kMaxLanes ? rest : size;
}

// Rows longer than a tile are read in parts.
inline bool is_long(std::int64_t cols) { return cols > kWholeCols; }

// Of long rows as many as stay in the L2 cache: a part of their parameters is then converted once
// for all of them.
inline std::int64_t rows_of_tile(std::int64_t rows, std::int64_t cols, DType dtype) {
  if (is_long(cols)) {
    const int size = size_of(dtype);
    const std::int64_t bytes = size == 2 ? 2 * kLongBytes : kLongBytes;
    return std::clamp<std::int64_t>(bytes / (cols * size), 1, kLongRows);
  }
  const bool is_streamed =
      dtype == DType::kFloat64 && rows * cols > kCachedDoubles && cols > kNarrowCols;
  const std::int64_t elements = is_streamed ? kStreamedDoubles : kTileElements;
  return std::clamp<std::int64_t>(elements / cols, 1, kTileRows);
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

// Where the elements of a tile are.
template <typename E>
struct View {
  const E* first = nullptr;
  std::int64_t stride = 0;

  const E* row(std::int64_t number) const { return first + number * stride; }
};

template <typename A>
FUSED_OP_CPU_SHARED void copy_tile(const ConstRows& rows, const Tile& tile, A* to) {
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

// Rows that can be read in place.
inline bool lies_ready(const ConstRows& rows, DType dtype) {
  return rows.dtype == dtype && rows.split.inner == 0;
}
template <typename E>
View<E> view_tile(const ConstRows& rows, const Tile& tile) {
  return {static_cast<const E*>(rows.data) + tile.row * rows.stride + tile.col, rows.stride};
}

template <typename A>
FUSED_OP_CPU_SHARED View<A> read_tile(const ConstRows& rows, const Tile& tile, A* buffer,
                                      bool dense = false) {
  if (lies_ready(rows, kDTypeOf<A>) && (!dense || rows.stride == tile.cols)) {
    return view_tile<A>(rows, tile);
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

template <typename A>
inline void add_to_rows(const A* __restrict addend, std::int64_t count, A* __restrict sum) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] += addend[i];
  }
}

// `values` is a contiguous tile.
template <typename A>
void write_tile(const A* values, void* data, DType dtype, const Tile& tile, std::int64_t cols) {
  if (data == nullptr) {
    return;
  }
  const bool is_whole = tile.cols == cols;
  const std::int64_t count = is_whole ? tile.rows * cols : tile.cols;
  for (std::int64_t r = 0; r < (is_whole ? 1 : tile.rows); ++r) {
    write_elements(values + r * count, data, dtype, (tile.row + r) * cols + tile.col, count);
  }
}

template <typename A>
FUSED_OP_CPU_SHARED void drop_tile(const Dropout& dropout, const Tile& tile, A* values) {
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

// Weight or bias; if there is none, `absent` for every column. Long rows are converted in parts,
// and so are their parameters: with few rows, converting them as a whole would cost more than the
// rows.
template <typename A>
class Parameter {
 public:
  FUSED_OP_CPU_SHARED Parameter(const void* data, DType dtype, std::int64_t cols, A absent)
      : data_(data), dtype_(dtype), is_long_(is_long(cols)) {
    if (data == nullptr) {
      std::fill_n(values_, std::min(cols, kWholeCols), absent);
    } else if (dtype != kDTypeOf<A> && !is_long_) {
      convert(0, cols);
    }
  }

  // The values from `col` on, `cols` of them: for a long row, no more than a part. Valid until the
  // next call.
  const A* from(std::int64_t col, std::int64_t cols) {
    if (data_ != nullptr && dtype_ == kDTypeOf<A>) {
      return static_cast<const A*>(data_) + col;
    }
    if (!is_long_) {
      return values_ + col;
    }
    if (data_ != nullptr) {
      convert(col, cols);
    }
    return values_;
  }

 private:
  void convert(std::int64_t col, std::int64_t cols) {
    read_elements(data_, dtype_, col, cols, values_);
  }

  const void* const data_;
  const DType dtype_;
  const bool is_long_;
  A values_[kWholeCols];
};

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
