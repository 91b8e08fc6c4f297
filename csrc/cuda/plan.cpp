#include "cuda/plan.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "core/pack.h"
#include "cuda/core_table.h"
#include "cuda/forward_layout.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {

// Units of 16 bytes of the row where all streams have its type. Wider streams beside a 16-bit row
// halve the packs, so that no lane moves more than 16 bytes at a time: a warp's accesses stay
// dense. A float row beside narrower streams has units of 8 elements, since the work of a row
// should not weigh more than its bytes.
Deal deal_of(const ForwardSpec& spec) {
  if (spec.row == DType::kFloat64) {
    return {4, 2};
  }
  int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output)});
  int narrowest = std::min({size_of(spec.input), size_of(spec.row), size_of(spec.output)});
  if (spec.adds) {
    widest = std::max(widest, size_of(spec.residual));
    narrowest = std::min(narrowest, size_of(spec.residual));
  }
  return {kVectorBytes / narrowest, kVectorBytes / widest};
}

bool by_words(const ForwardSpec& spec, std::int64_t cols) { return cols % deal_of(spec).unit != 0; }

namespace {

// A row's lanes, the units of each, and its warps.
struct Grid {
  int lanes;
  int units;
  int warps;
};

// What a lane may have.
struct Limits {
  int fewest;  // units, where a row has several warps
  int most;    // units
  int many;    // units: more pay where nothing else fits
  int liked;   // units: fewer make a row's own work weigh more, more take registers from other rows
  const int* sm_threads;       // of an SM that share its registers, by units
  const int* sm_threads_wide;  // the same where a row has several warps
};

int resident_threads(const Limits& limits, int units, int warps) {
  return (warps > 1 ? limits.sm_threads_wide : limits.sm_threads)[units];
}

// The layout that wastes the fewest lanes and threads of an SM, and of those the one nearest to
// what is liked.
Grid best_grid(std::int64_t units, const Limits& limits, bool odd) {
  Grid best{};
  std::int64_t best_cost = 0;
  const auto consider = [&](int lanes, int warps) {
    const auto per_lane = static_cast<int>(ceil_div(units, std::int64_t{lanes} * warps));
    const bool last_is_empty = std::int64_t{warps - 1} * lanes * per_lane >= units;
    if (per_lane > limits.most || (warps > 1 && per_lane < limits.fewest) || last_is_empty) {
      return;
    }
    // The loads of neighbouring lanes.
    const bool apart =
        odd ? lanes < 16 && per_lane > 12 : (lanes == 1 && units > 1) || (lanes == 2 && units > 7);
    // 0.92 and 0.88 of copy with 4 and with 7 units at 335544x200; 0.98 and 0.90 at 4681x14336
    const bool heavy = per_lane > limits.many && (lanes < 8 || (lanes == kWarpSize && warps < 4));
    if (apart || heavy) {
      return;
    }
    const int wanted = resident_threads(limits, per_lane, warps);
    const int threads = warps * kWarpSize;
    const int resident = std::min(std::max(wanted / threads, 1) * threads, wanted);
    const int distance = std::abs(per_lane - limits.liked);
    const std::int64_t slots = std::int64_t{lanes} * per_lane * warps;
    const std::int64_t cost =
        slots * 1024 * wanted / resident + slots * (2 * distance + (per_lane > limits.liked));
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

int word_pack(const ForwardSpec& spec) { return size_of(spec.row) == 2 ? 2 : 1; }

// Threads of an SM, by units or words of a lane: as many as registers suffice for. Rows of several
// warps, whose barriers more rows hide, may have fewer registers.
constexpr int kSmThreads[] = {0, 1536, 1280, 1024, 1024, 896, 768, 640, 640};
constexpr int kSmThreadsWide[] = {0, 1536, 1280, 1280, 1024, 896, 768, 768, 640};
// With a residual, dropout, parameters wider than the row, or vectors that are moved by words.
constexpr int kSmThreadsMore[] = {0, 1024, 1024, 1024, 768, 640, 640, 512, 512};
constexpr int kSmThreadsDouble[] = {0, 1024, 1024, 768, 768, 512, 512, 512, 512};
constexpr int kSmThreadsWords[] = {0,    1280, 1280, 1280, 1280, 1280, 1280, 1280, 1280, 1024, 1024,
                                   1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024};
constexpr int kSmThreadsMoreWords[] = {0,   768, 768, 768, 768, 768, 768, 768, 768, 512, 512,
                                       512, 512, 512, 512, 512, 512, 512, 512, 512, 512};

// The same for all calls of a type: which lane has an element does not depend on a residual.
Limits limits_of(const ForwardSpec& spec, bool odd) {
  if (odd) {
    return {8, 20, 16, 16, kSmThreadsWords, kSmThreadsWords};
  }
  return spec.row == DType::kFloat64 ? Limits{3, 4, 4, 4, kSmThreadsDouble, kSmThreadsDouble}
                                     : Limits{3, 8, 6, 4, kSmThreads, kSmThreadsWide};
}

int threads_of_sm(const ForwardSpec& spec, bool odd, bool aligned, const Grid& grid, bool full) {
  const bool more = spec.adds || spec.dropout || (!odd && !aligned) ||
                    size_of(spec.parameters) > size_of(spec.row);
  if (odd) {
    return (more || spec.row == DType::kFloat64 ? kSmThreadsMoreWords
                                                : kSmThreadsWords)[grid.units];
  }
  if (spec.row == DType::kFloat64) {
    return kSmThreadsDouble[grid.units];
  }
  // Dropout of 16-bit rows that fill their lanes: 0.81 of copy, with 768 threads 0.74, at 8192x8192
  const bool fits_dropout = spec.dropout && !spec.adds && aligned && full && grid.units == 4 &&
                            size_of(spec.row) + size_of(spec.parameters) == 4 &&
                            size_of(spec.output) == 2;
  if (more && !fits_dropout) {
    return kSmThreadsMore[grid.units];
  }
  // 1152 threads, 1024: 0.98, 0.94 of copy at 20971x3200; 0.99, 1.00 at 16384x4096
  const bool even = full && (grid.warps & (grid.warps - 1)) == 0;
  return grid.units == 4 && grid.warps > 1 && !even
             ? 1152
             : (grid.warps > 1 ? kSmThreadsWide : kSmThreads)[grid.units];
}

// The tile of the core table that a row of so many vectors of 16 bytes fills; -1: there is none.
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
std::int64_t vectors_of(const ForwardSpec& spec, std::int64_t cols) {
  return cols * size_of(spec.row) / kVectorBytes;
}

// Longer rows are faster where their width is a constant. H200, bf16, LayerNorm, share of copy with
// it and without: 0.99 0.98 at 8192x8192, 1.01 1.01 at 16384x4096.
constexpr std::int64_t kMostCoreCols = 4096;

// Whether a row is no longer than a vector.
bool is_short(const ForwardSpec& spec, std::int64_t cols) {
  return spec.row != DType::kFloat64 && cols * size_of(spec.row) <= kVectorBytes;
}

// How the lanes of a row take its units, whatever its address.
Grid grid_of(const ForwardSpec& spec, std::int64_t cols) {
  if (is_core(spec, cols)) {
    const std::int64_t vectors = vectors_of(spec, cols);
    const CoreForwardTile& tile = kCoreForwardTiles[core_tile(vectors, false)];
    return {tile.lanes, tile.vectors,
            static_cast<int>(ceil_div(vectors, std::int64_t{tile.lanes} * tile.vectors))};
  }
  const bool odd = by_words(spec, cols);
  if (is_short(spec, cols)) {  // as forward_flat_kernel has it
    return {1, static_cast<int>(ceil_div(cols, odd ? word_pack(spec) : deal_of(spec).unit)), 1};
  }
  return best_grid(ceil_div(cols, odd ? word_pack(spec) : deal_of(spec).unit), limits_of(spec, odd),
                   odd);
}

}  // namespace

ForwardSpec spec_of(const NormForwardArgs& args) {
  return {.norm = args.kind,
          .adds = args.sum != nullptr,
          .dropout = args.dropout.active,
          .split = args.input.split.inner != 0,
          .input = args.input.dtype,
          .residual = args.residual.dtype,
          .row = args.dtype,
          .parameters = args.param_dtype,
          .output = args.output.dtype};
}

bool is_core(const ForwardSpec& spec, std::int64_t cols) {
  const bool one_type = spec.input == spec.row && spec.output == spec.row &&
                        (!spec.adds || spec.residual == spec.row) &&
                        is_tuned_pair(spec.row, spec.parameters) && spec.row != DType::kFloat64;
  return one_type && !spec.dropout && !spec.split && cols <= kMostCoreCols &&
         cols * size_of(spec.row) % kVectorBytes == 0 &&
         core_tile(vectors_of(spec, cols), false) >= 0;
}

std::int64_t most_forward_cols(const ForwardSpec& spec) {
  return std::int64_t{kMaxRowWarps} * kWarpSize * 4 * kVectorBytes / size_of(spec.row);
}

ForwardPlan plan_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                         RowPlaces places, const DeviceInfo& device) {
  const bool aligned = places.aligned;
  const Deal deal = deal_of(spec);
  const bool odd = by_words(spec, cols);
  const Grid grid = grid_of(spec, cols);
  const int row_threads = grid.lanes * grid.warps;
  const bool few = rows * row_threads <= std::int64_t{device.multiprocessors} * 512;
  ForwardPlan plan{};
  if (aligned && is_core(spec, cols)) {
    plan = core_forward_plan(core_tile(vectors_of(spec, cols), few), spec.adds,
                             size_of(spec.parameters) > size_of(spec.row));
  } else {
    plan.lanes = grid.lanes;
    plan.vectors = odd ? grid.units : grid.units * (deal.unit / deal.pack);
    plan.few = few;
    plan.width = static_cast<int>(cols);
    plan.ahead = few   ? plan.vectors
                 : odd ? (grid.units == 16 ? 4 : 8)
                       : (grid.units < 3 || grid.units > 6 ? 1 : 2);
    plan.ahead = std::min(plan.ahead, plan.vectors);
  }
  plan.pack = odd ? word_pack(spec) : deal.pack;
  plan.words = odd || !aligned;
  plan.threads = row_threads > kWarpSize ? row_threads : grid.units < 3 ? 128 : 64;
  if (plan.width != 0) {
    const std::int64_t units = ceil_div(cols, odd ? word_pack(spec) : deal.unit);
    const bool full = units == std::int64_t{grid.lanes} * grid.units * grid.warps;
    const int sm_threads = threads_of_sm(spec, odd, aligned, grid, full);
    plan.most_threads = plan.threads;
    plan.ctas_per_sm = few ? 1 : std::max(sm_threads / plan.threads, 1);
  }
  if (places.one_span && is_short(spec, cols) && !spec.adds && !spec.dropout && !spec.split &&
      size_of(spec.output) == size_of(spec.row)) {
    plan.flat_rows = cols <= (size_of(spec.row) == 2 ? 4 : 1) ? 8 : 4;
    plan.threads = kFlatThreads;
    plan.words = false;
    plan.ctas = ceil_div(rows, std::int64_t{plan.threads} * plan.flat_rows);
    return plan;
  }
  plan.ctas = ceil_div(rows, plan.threads / row_threads);
  return plan;
}

RowPlaces places_of(const NormForwardArgs& args, const ForwardSpec& spec) {
  const int pack = deal_of(spec).pack;
  const bool aligned = packs_aligned(args.input, pack) &&
                       (!spec.adds || packs_aligned(args.residual, pack)) &&
                       packs_aligned(dense(args.output.data, spec.output, args.cols), pack) &&
                       packs_aligned(dense(args.sum, spec.row, args.cols), pack);
  const auto address = reinterpret_cast<std::uintptr_t>(args.input.data);
  return {aligned, args.input.stride == args.cols && address % kVectorBytes == 0};
}

std::string op_name(const ForwardSpec& spec, bool words) {
  const std::string source =
      spec.adds
          ? "fused_op::AddResidual" +
                joined({type(spec.input), type(spec.residual), type(spec.row), flag(spec.dropout)})
          : "fused_op::Plain" + joined({type(spec.input), flag(spec.split)});
  const std::string epilogue =
      "fused_op::Affine" +
      joined({type(spec.parameters), type(spec.output), flag(spec.dropout && !spec.adds)});
  const std::string access = words ? "fused_op::cuda::Words" : "fused_op::cuda::Vectors";
  return "fused_op::cuda::ForwardOp" + joined({norm_name(spec.norm), source, epilogue, access});
}

std::string kernel_name(const ForwardSpec& spec, const ForwardPlan& plan) {
  const std::string op = op_name(spec, plan.words);
  if (plan.flat_rows > 0) {
    const std::string tile =
        joined({number(plan.pack), number(plan.flat_rows), number(plan.width)});
    return "fused_op::cuda::forward_flat_kernel<" + op + ", fused_op::cuda::FlatTile" + tile + ">";
  }
  const std::string tile = "fused_op::cuda::ForwardTile" +
                           joined({number(plan.pack), number(plan.lanes), number(plan.vectors),
                                   number(plan.ahead), flag(plan.few), number(plan.most_threads),
                                   number(plan.ctas_per_sm), number(plan.width), flag(plan.core)});
  return "fused_op::cuda::forward_kernel<" + op + ", " + tile + ">";
}

}  // namespace fused_op::cuda
