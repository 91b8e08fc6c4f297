#include "cuda/plan_backward_grid.h"

#include <algorithm>

#include "core/pack.h"
#include "cuda/core_table.h"

namespace fused_op::cuda {
namespace {

constexpr std::int64_t kMostCoreBytes = 8192;  // of a row of the core table

// The merit of a number of units a lane: the share of a CTA's lanes that have work. It is lower if
// only one row fits, whose barriers then stop the whole SM, and if a thread cannot keep the row in
// registers. Rows that move by words wait longer. H100, bf16, LayerNorm, share of add with one row
// of two units and with two rows of four: 0.79 0.83 at 8193x8191.
std::int64_t merit(std::int64_t units, int per_lane, bool odd, int threads = kMostBackwardThreads) {
  const std::int64_t warps = ceil_div(units, std::int64_t{kWarpSize} * per_lane);
  const std::int64_t rows = threads / kWarpSize / warps;
  const bool keeps = per_lane == 2 && threads == kMostBackwardThreads;
  const int weight = keeps ? 40 : threads > kMostBackwardThreads ? 34 : 30;
  return rows * units *
         (rows > 1 ? 10
          : odd    ? 7
                   : 9) *
         weight * (12 * 10240 / threads / per_lane);  // divisible by all numbers of units
}

int lanes_for(std::int64_t units) {
  int lanes = 1;
  while (lanes < units) {
    lanes *= 2;
  }
  return lanes;
}

// Rows that share a warp have three units a lane, or two, if one would leave lanes idle. H200,
// bf16, LayerNorm, us with one and two: 128 122 at 1677721x40, 114 105 at 335544x200; with two and
// three: 120 127 at 932067x72, 122 110 at 493447x136. By words, share of add with two and three:
// 0.90 0.84 at 201528x333 (H100). If one leaves no lane idle, longer rows have two. us with one and
// two: 101.8 97.4 at 524288x128, 102.5 96.5 at 262144x256, with a residual 145.8 126.2; but 3.2 3.6
// at 4096x64 (H200). By words: 128 157 at 528416x127; a gated norm's share of add: 0.95 0.90.
BackwardGrid shared_warp_grid(const BackwardSpec& spec, std::int64_t units, bool odd) {
  for (int lanes = 8; lanes < kWarpSize && !odd; lanes *= 2) {
    if (units > 2 * lanes && units <= 3 * lanes) {
      return {lanes, 3, 1};
    }
  }
  const int lanes = lanes_for(units);
  const bool plain = !odd && (spec.variant == nullptr || spec.variant->shares_entries);
  const bool two = units < lanes ? units > 4 : plain && units >= 16;
  return two ? BackwardGrid{lanes / 2, 2, 1} : BackwardGrid{lanes, 1, 1};
}

// The layout of a row of `units`; `odd` if they are not whole vectors.
BackwardGrid best_grid(const BackwardSpec& spec, std::int64_t units, bool odd) {
  // H200, bf16, 128 columns, share of add with one unit a lane and with both halves' two: 0.76 0.91
  // for 32 heads of 32768 tokens.
  const bool pairs = spec.variant != nullptr && spec.variant->pairs_halves && !odd;
  if (pairs && units >= 4 && units <= 2 * kWarpSize && units == lanes_for(units)) {
    return {static_cast<int>(units / 2), 2, 1};
  }
  const bool drops = spec.drops_input || spec.drops_output;
  // Philox takes registers. By words, it is called for every pack of two elements or one.
  if (drops && odd && units <= kMostBackwardThreads) {
    return {std::min(lanes_for(units), kWarpSize), 1, static_cast<int>(ceil_div(units, kWarpSize))};
  }
  if (units < 3 * kWarpSize / 2) {
    return shared_warp_grid(spec, units, odd);
  }
  const auto grid = [&](int per_lane, int threads = kMostBackwardThreads) {
    return BackwardGrid{kWarpSize, per_lane,
                        static_cast<int>(ceil_div(units, std::int64_t{kWarpSize} * per_lane)),
                        threads};
  };
  const std::int64_t two = merit(units, 2, odd);
  // A variant with a sum would spill 20 bytes at 3072 columns (16 bits, sm_90).
  const bool fits_wide = !odd && !drops && !(spec.adds && spec.variant != nullptr);
  const std::int64_t wide = fits_wide ? merit(units, 2, odd, kWideBackwardThreads) : 0;
  const std::int64_t three = merit(units, 3, odd);
  const std::int64_t four = merit(units, 4, odd);
  // If the merits are equal, three units are better, because two then leave lanes idle: two 0.90,
  // three 0.92 of add at 174762x768 (H200, bf16). With the gradient of a sum two are better, and by
  // words, if they leave no more lanes idle: two 0.91, three 0.86 at 22362x3001 (H100, bf16).
  const bool as_full = 2 * grid(2).warps <= 3 * grid(3).warps;
  const bool two_at_tie = odd ? as_full : spec.adds;
  if (two >= wide && two >= four && (two_at_tie ? two >= three : two > three)) {
    return grid(2);
  }
  if (wide >= three && wide >= four) {
    return grid(2, kWideBackwardThreads);
  }
  return grid(three >= four ? 3 : 4);
}

}  // namespace

BackwardStreams streams_of(const BackwardSpec& spec) {
  const bool beside = spec.variant != nullptr && spec.variant->beside.data != nullptr;
  return {{read_as_x(spec), spec.grad_output, beside ? spec.variant->beside.dtype : spec.row},
          spec.adds || beside ? 3 : 2};
}

int unit_of(const BackwardSpec& spec) {
  const BackwardStreams streams = streams_of(spec);
  int size = std::min(size_of(spec.input), spec.adds ? size_of(spec.residual) : 8);
  for (int s = 0; s < streams.count; ++s) {
    size = std::min(size, size_of(streams.dtypes[s]));
  }
  return kVectorBytes / size;
}

int core_tile(const BackwardSpec& spec, std::int64_t cols) {
  const bool one_type = spec.input == spec.row && spec.grad_output == spec.row &&
                        (!spec.adds || spec.residual == spec.row) &&
                        is_tuned_pair(spec.row, spec.parameters) && !is_double(spec);
  const bool options = spec.drops_input || spec.drops_output || spec.recovers || spec.split ||
                       spec.variant != nullptr;
  const std::int64_t bytes = cols * size_of(spec.row);
  if (!one_type || options || bytes % kVectorBytes != 0 || bytes > kMostCoreBytes) {
    return -1;
  }
  const std::int64_t vectors = bytes / kVectorBytes;
  for (int i = spec.adds ? kFirstWithSum : 0; i < kCoreBackwardCount; ++i) {
    const CoreBackwardTile& tile = kCoreBackwardTiles[i];
    const int of_tile = tile.lanes * tile.vectors;
    const bool several = tile.lanes == kWarpSize;  // warps
    if (tile.stages == 3 && (vectors == of_tile || (several && vectors % of_tile == 0))) {
      return i;
    }
  }
  return -1;
}

BackwardGrid grid_of(const BackwardSpec& spec, std::int64_t cols) {
  const std::int64_t units = ceil_div(cols, unit_of(spec));
  const int tile = core_tile(spec, cols);
  if (tile >= 0) {
    const CoreBackwardTile& core = kCoreBackwardTiles[tile];
    const std::int64_t of_warp = std::int64_t{core.lanes} * core.vectors;
    return {core.lanes, core.vectors, static_cast<int>(ceil_div(units, of_warp))};
  }
  return best_grid(spec, units, by_words(spec, cols));
}

}  // namespace fused_op::cuda
