// Which elements dropout keeps, as a function of (seed, offset, row, column) alone. Forward and
// backward have the same mask, on CPU and GPU and in every tiling, and it is never stored.
// Torch-free.
//
// Source: Philox4x32-10 of Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as
// 1, 2, 3". Its 128 bits decide on eight neighbouring columns, 16 bits each. p is therefore rounded
// to a multiple of 2^-16, and to 1 only if it is 1. (With 32 bits each, a vector of eight columns
// would take two calls: about 180 instructions on sm_90.)
#pragma once

#include <cstdint>

#include "core/pack.h"

namespace fused_op {

// Plain values, which the op layer computes from p and the state.
struct Dropout {
  bool active = false;
  std::uint32_t threshold = 0;  // 2^16·p, rounded: elements whose 16 bits are below are dropped
  float scale = 1;              // of the elements kept: 1 / (1 - p), of the rounded p
  double wide_scale = 1;        // the same, for double
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::int64_t* state = nullptr;  // seed and offset in device memory; null: as above
};

// Seed and offset; each thread reads them once.
struct DropoutState {
  std::uint64_t seed;
  std::uint64_t offset;

  FUSED_OP_HD explicit DropoutState(const Dropout& dropout)
      : seed(dropout.seed), offset(dropout.offset) {
    if (dropout.state != nullptr) {
      seed = static_cast<std::uint64_t>(dropout.state[0]);
      offset = static_cast<std::uint64_t>(dropout.state[1]);
    }
  }
};

// One of the ten rounds.
FUSED_OP_HD void philox_round(std::uint32_t (&words)[4], std::uint32_t low, std::uint32_t high) {
  const std::uint64_t a = std::uint64_t{0xD2511F53u} * words[0];
  const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * words[2];
  words[0] = static_cast<std::uint32_t>(b >> 32) ^ words[1] ^ low;
  words[1] = static_cast<std::uint32_t>(b);
  words[2] = static_cast<std::uint32_t>(a >> 32) ^ words[3] ^ high;
  words[3] = static_cast<std::uint32_t>(a);
}

struct Philox {
  std::uint32_t words[4];

  // Ten rounds: counter and key to four random words.
  FUSED_OP_HD Philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                     std::uint64_t key)
      : words{c0, c1, c2, c3} {
    auto low = static_cast<std::uint32_t>(key);
    auto high = static_cast<std::uint32_t>(key >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
      philox_round(words, low, high);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }
};

constexpr int kMaskCols = 8;  // decided by one call of Philox

// The mask of one row.
struct DropoutRow {
  std::uint64_t key;
  std::uint64_t offset;
  std::uint32_t row;

  // A row number has 64 bits; the upper half is folded into the key.
  FUSED_OP_HD DropoutRow(const DropoutState& state, std::int64_t row_number)
      : key(state.seed ^ (static_cast<std::uint64_t>(row_number) >> 32 << 32)),
        offset(state.offset),
        row(static_cast<std::uint32_t>(row_number)) {}

  // For columns `col` to col + N: multiplies the kept elements by the scale and sets the others to
  // zero, even where they are inf or NaN. N is 8, 4, 2 or 1, and `col` is a multiple of it.
  template <int N, typename A, typename Col>
  FUSED_OP_HD void apply(const Dropout& dropout, Col col, A (&values)[N]) const {
    static_assert(N == 8 || N == 4 || N == 2 || N == 1);
    Philox random(static_cast<std::uint32_t>(col / kMaskCols), row,
                  static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32),
                  key);
    if (N < 8 && col % 8 >= 4) {
      random.words[0] = random.words[2];
      random.words[1] = random.words[3];
    }
    if (N < 4 && col % 4 >= 2) {
      random.words[0] = random.words[1];
    }
    if (N < 2 && col % 2 == 1) {
      random.words[0] >>= 16;
    }
    const A scale = sizeof(A) == 8 ? static_cast<A>(dropout.wide_scale) : A(dropout.scale);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int j = 0; j < N; ++j) {
      const std::uint32_t bits =
          j % 2 == 0 ? random.words[j / 2] & 0xffffu : random.words[j / 2] >> 16;
      values[j] = bits >= dropout.threshold ? values[j] * scale : A(0);
    }
  }
};

// The masks of a lane's packs, which begin at `col` and are `step` columns apart. They are drawn in
// twos, which share the ten keys.
struct DropoutPacks {
  DropoutRow row;
  int col;
  int step;
  std::uint32_t random[2][4];

  FUSED_OP_HD DropoutPacks(const Dropout& dropout, std::int64_t row_number, int first, int apart)
      : row(DropoutState(dropout), row_number), col(first), step(apart) {}

  // Applies the mask to pack i; called for 0, 1, 2 and so on. Multiplies the kept elements by the
  // scale and sets the others to zero, even where they are inf or NaN. N is 8, 4, 2 or 1, and
  // divides `col` and `step`.
  template <int N, typename A>
  FUSED_OP_HD void apply(const Dropout& dropout, int i, A (&values)[N]) {
    if (i % 2 == 0) {
      draw(i);
    }
    std::uint32_t (&words)[4] = random[i % 2];
    const int within = (col + i * step) & (kMaskCols - 1);  // also when `col` wraps at 2^31
    if (N < 8 && within >= 4) {
      words[0] = words[2];
      words[1] = words[3];
    }
    if (N < 4 && within % 4 >= 2) {
      words[0] = words[1];
    }
    if (N < 2 && within % 2 == 1) {
      words[0] >>= 16;
    }
    const bool none = dropout.threshold > 0xffffu;  // p is 1
    const std::uint32_t least = dropout.threshold << 16;
    const A scale = sizeof(A) == 8 ? static_cast<A>(dropout.wide_scale) : A(dropout.scale);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int j = 0; j < N; ++j) {
      const std::uint32_t bits = j % 2 == 0 ? words[j / 2] << 16 : words[j / 2];
      values[j] = !none && bits >= least ? values[j] * scale : A(0);
    }
  }

 private:
  FUSED_OP_HD void draw(int i) {
    for (int k = 0; k < 2; ++k) {
      random[k][0] = static_cast<std::uint32_t>(col + (i + k) * step) / kMaskCols;
      random[k][1] = row.row;
      random[k][2] = static_cast<std::uint32_t>(row.offset);
      random[k][3] = static_cast<std::uint32_t>(row.offset >> 32);
    }
    auto low = static_cast<std::uint32_t>(row.key);
    auto high = static_cast<std::uint32_t>(row.key >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
      philox_round(random[0], low, high);
      philox_round(random[1], low, high);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }
};

}  // namespace fused_op
