#include "cuda/plan_grid.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "core/pack.h"
#include "cuda/core_table.h"
#include "cuda/forward_layout.h"

namespace fused_op::cuda {
namespace {

// The number of units that a lane may have.
struct Limits {
  int fewest;  // units of a lane, if a row has several warps
  int most;    // units
  int many;    // units: more are used only if nothing else fits
  int liked;   // units: fewer make the fixed work of a row weigh more; more take registers from
               // other rows
  const int* sm_threads;       // threads of an SM that its registers suffice for, by units
  const int* sm_threads_wide;  // the same if a row has several warps
};

int resident_threads(const Limits& limits, int units, int warps) {
  return (warps > 1 ? limits.sm_threads_wide : limits.sm_threads)[units];
}

// The layout that wastes the fewest lanes and threads of an SM; among equals, the one closest to
// `liked`.
ForwardGrid best_grid(std::int64_t units, const Limits& limits, bool odd) {
  ForwardGrid best{};
  std::int64_t best_cost = 0;
  const auto consider = [&](int lanes, int warps) {
    const auto per_lane = static_cast<int>(ceil_div(units, std::int64_t{lanes} * warps));
    const bool last_is_empty = std::int64_t{warps - 1} * lanes * per_lane >= units;
    if (per_lane > limits.most || (warps > 1 && per_lane < limits.fewest) || last_is_empty) {
      return;
    }
    // With more units a lane, the loads of neighbouring lanes lie far apart. H100, bf16, LayerNorm,
    // share of copy with two lanes and with four: 0.67 1.00 at 1198372x56, 0.29 0.51 at 2033601x33;
    // with four and with eight: 0.93 1.02 at 441505x152, 0.58 0.70 at 849479x79.
    const int most = odd         ? 4 * (std::bit_width(static_cast<unsigned>(lanes)) - 1)
                     : lanes < 8 ? std::min(lanes, 3)
                                 : limits.most;
    const bool heavy = per_lane > limits.many && lanes == kWarpSize && warps < 4;
    if (per_lane > most || heavy) {
      return;
    }
    const int wanted = resident_threads(limits, per_lane, warps);
    const int threads = warps * kWarpSize;
    const int resident = std::min(std::max(wanted / threads, 1) * threads, wanted);
    const int distance = std::abs(per_lane - limits.liked);
    const std::int64_t slots = std::int64_t{lanes} * per_lane * warps;
    const std::int64_t vector_cost = slots * 1024 * wanted / resident;
    // Words that the row's last lane lacks are checked in every lane; each warp takes part in the
    // sums of the row; and idle threads weigh less beside that. H100, bf16, LayerNorm, share of
    // copy at 13104x5121: 0.78 with 8 of 11 words checked, 0.96 with 2 of 14; at 8629x7777: 0.87
    // with 8 warps of 16 words, 0.96 with 7 of 18, 0.79 with 14 of 9.
    const std::int64_t lacking = ceil_div(slots - units, lanes);
    constexpr std::int64_t kSums = 2048, kCheck = 410;  // of a lane; a unit of the row is 1024
    const std::int64_t word_cost =
        (slots * 1024 + vector_cost) / 2 + lanes * warps * (kSums + kCheck * lacking);
    const std::int64_t cost =
        (odd ? word_cost : vector_cost) + slots * (2 * distance + (per_lane > limits.liked));
    if (best.lanes == 0 || cost < best_cost) {
      best = {lanes, per_lane, warps};
      best_cost = cost;
    }
  };
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    consider(lanes, 1);
  }
  for (int warps = 1; warps <= kMaxRowWarps; ++warps) {
    consider(kWarpSize, warps);
  }
  return best;
}

// Threads of an SM that registers suffice for, by the units or words of a lane. Rows of several
// warps may have fewer registers, because more rows hide their barriers.
constexpr int kSmThreads[] = {0, 1536, 1280, 1024, 1024, 896, 768, 640, 640};
constexpr int kSmThreadsWide[] = {0, 1536, 1280, 1280, 1024, 896, 768, 768, 640};
// The same with a residual, dropout, parameters wider than the row, or vectors moved by words.
constexpr int kSmThreadsMore[] = {0, 1024, 1024, 1024, 768, 640, 640, 512, 512};
constexpr int kSmThreadsDouble[] = {0, 1024, 1024, 768, 768};
constexpr int kSmThreadsWords[] = {0,    1280, 1280, 1280, 1280, 1280, 1280, 1280, 1280, 1024, 1024,
                                   1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024};
constexpr int kSmThreadsMoreWords[] = {0,   768, 768, 768, 768, 768, 768, 768, 768, 512, 512,
                                       512, 512, 512, 512, 512, 512, 512, 512, 512, 512};

// These are the same for all calls of a type, because which lane holds an element must not depend
// on a residual.
Limits limits_of(const ForwardSpec& spec, bool odd) {
  if (odd) {
    return {8, 20, 16, 16, kSmThreadsWords, kSmThreadsWords};
  }
  return spec.row == DType::kFloat64 ? Limits{3, 4, 4, 4, kSmThreadsDouble, kSmThreadsDouble}
                                     : Limits{3, 8, 6, 4, kSmThreads, kSmThreadsWide};
}

// Longer rows are faster if their width is a constant. H200, bf16, LayerNorm, share of copy with
// and without: 0.99 0.98 at 8192x8192, 1.01 1.01 at 16384x4096.
constexpr std::int64_t kMostCoreCols = 4096;

}  // namespace

int threads_of_sm(const ForwardSpec& spec, bool odd, bool aligned, const ForwardGrid& grid,
                  bool full) {
  const bool more = spec.adds || spec.dropout || spec.variant != nullptr || (!odd && !aligned) ||
                    size_of(spec.parameters) > size_of(spec.row);
  if (odd) {
    return (more || spec.row == DType::kFloat64 ? kSmThreadsMoreWords
                                                : kSmThreadsWords)[grid.units];
  }
  if (spec.row == DType::kFloat64) {
    return kSmThreadsDouble[grid.units];
  }
  // The addresses of parameters of a row's own take registers, too. Share of copy with 896 and with
  // 1024 threads: 0.95 0.91 at 131072x1024; with 768 and with 896: 0.88 0.82 at 116480x1152.
  if (spec.variant != nullptr && spec.variant->light && !spec.adds && aligned) {
    return grid.warps > 1 ? kSmThreadsWide[grid.units] : kSmThreads[grid.units] * 7 / 8;
  }
  // Dropout of 16-bit rows that fill their lanes: 0.81 of copy at 8192x8192; with 768 threads 0.74.
  const bool fits_dropout = spec.dropout && !spec.adds && aligned && full && grid.units == 4 &&
                            size_of(spec.row) + size_of(spec.parameters) == 4 &&
                            size_of(spec.output) == 2;
  if (more && !fits_dropout) {
    return kSmThreadsMore[grid.units];
  }
  // share of copy with 1152 and with 1024 threads: 0.98, 0.94 at 20971x3200; 0.99, 1.00 at
  // 16384x4096
  const bool even = full && (grid.warps & (grid.warps - 1)) == 0;
  return grid.units == 4 && grid.warps > 1 && !even
             ? 1152
             : (grid.warps > 1 ? kSmThreadsWide : kSmThreads)[grid.units];
}

int core_tile(std::int64_t vectors, bool few) {
  const bool power_of_two = (vectors & (vectors - 1)) == 0;
  int lanes = 0;
  int per_lane = 4;
  if (vectors % 128 == 0) {
    lanes = kWarpSize;
  } else if (vectors % 96 == 0 && vectors <= 288) {
    lanes = kWarpSize;
    per_lane = 3;
  } else if (power_of_two && vectors >= 4 && vectors <= 64) {
    per_lane = vectors < 16 ? 2 : 4;
    lanes = static_cast<int>(vectors) / per_lane;
  }
  for (int i = 0; i < kCoreForwardCount; ++i) {
    const CoreForwardTile& tile = kCoreForwardTiles[i];
    if (tile.lanes == lanes && tile.vectors == per_lane && tile.few == (few && per_lane > 2)) {
      return i;
    }
  }
  return -1;
}

bool fills_core_tile(const ForwardSpec& spec, std::int64_t cols) {
  const bool has_its_vectors =
      spec.row != DType::kFloat64 && deal_of(spec).unit == kVectorBytes / size_of(spec.row);
  return has_its_vectors && cols <= kMostCoreCols && !by_words(spec, cols) &&
         core_tile(vectors_of(spec, cols), false) >= 0;
}

ForwardGrid grid_of(const ForwardSpec& spec, std::int64_t cols) {
  if (fills_core_tile(spec, cols)) {
    const std::int64_t vectors = vectors_of(spec, cols);
    const CoreForwardTile& tile = kCoreForwardTiles[core_tile(vectors, false)];
    return {tile.lanes, tile.vectors,
            static_cast<int>(ceil_div(vectors, std::int64_t{tile.lanes} * tile.vectors))};
  }
  const bool odd = by_words(spec, cols);
  if (is_short(spec, cols)) {  // as in forward_flat_kernel
    return {1, static_cast<int>(ceil_div(cols, odd ? word_pack(spec) : deal_of(spec).unit)), 1};
  }
  const std::int64_t units = ceil_div(cols, odd ? word_pack(spec) : deal_of(spec).unit);
  if (odd || spec.row == DType::kFloat64) {
    return best_grid(units, limits_of(spec, odd), odd);
  }
  // Of eight lanes a quarter would be idle; of 32, five rows of six leave two. H200, LayerNorm,
  // share of copy so and with eight: 0.92 0.83 at 136 columns of bf16, 1.00 0.87 at 144; 0.99 0.85
  // at 68 of float32, 1.02 0.90 at 72. Six rows of five lanes gain less, and lose where a lane has
  // four vectors and a residual: 0.97 0.91 at 160 columns, 0.96 1.01 with a residual.
  if (units == 17 || units == 18) {
    return {6, 3, 1};
  }
  // Two lanes leave none idle, four a quarter. H200, bf16, us with four, in forward_flat_kernel,
  // and with two at 1398101x48: LayerNorm 74.4 63.1, RMSNorm 66.0 63.2; but with a residual 125.0
  // 129.1.
  if (units == 6) {
    return {2, 3, 1};
  }
  return best_grid(units, limits_of(spec, odd), odd);
}

}  // namespace fused_op::cuda
