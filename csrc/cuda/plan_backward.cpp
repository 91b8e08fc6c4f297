#include <algorithm>
#include <initializer_list>

#include "core/pack.h"
#include "cuda/backward_tile.h"
#include "cuda/core_table.h"
#include "cuda/plan_backward_grid.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

// How many parameters of a column backward holds.
int parameters_of(const BackwardSpec& spec) {
  return spec.recovers ? 2 : spec.variant != nullptr ? spec.variant->parameters_of_column : 1;
}
int widest(const BackwardSpec& spec) {
  const BackwardStreams streams = streams_of(spec);
  int size = std::max(size_of(spec.input), spec.adds ? size_of(spec.residual) : 0);
  if (spec.variant != nullptr) {
    size = std::max({size, spec.variant->widest, size_of(spec.variant->beside.dtype)});
  }
  for (int s = 0; s < streams.count; ++s) {
    size = std::max(size, size_of(streams.dtypes[s]));
  }
  return size;
}

int pack_of(const BackwardSpec& spec, bool odd) {
  if (odd) {
    return size_of(spec.row) == 2 && size_of(read_as_x(spec)) == 2 ? 2 : 1;
  }
  return kVectorBytes / widest(spec);
}

// Shared memory for the lanes of one row within a warp.
std::int64_t group_bytes(const BackwardSpec& spec, const BackwardPlan& plan) {
  const BackwardStreams streams = streams_of(spec);
  int stage = 0;
  for (int s = 0; s < streams.count; ++s) {
    stage += staged_bytes(plan.move != Move::kVectors, plan.pack, plan.lanes, plan.vectors,
                          size_of(streams.dtypes[s]));
  }
  const int parameters = std::max(plan.pack * size_of(spec.parameters), 4) * parameters_of(spec);
  return std::int64_t{plan.stages} * stage +
         (plan.parameters_stay ? 0 : parameter_bytes(plan.lanes, plan.vectors, parameters));
}

// Whether a lane has registers to keep the values of its `own` elements between the two passes over
// a row. H200, bf16, LayerNorm, share of add without and with: 0.84 0.88 at 87381x768.
bool keeps_values(const BackwardSpec& spec, std::int64_t cols, const BackwardPlan& plan, int own) {
  if (own * (is_double(spec) ? 8 : 4) <= 64) {
    return true;
  }
  const bool plain = plan.pack == 8 && plan.move == Move::kVectors && !spec.recovers &&
                     !spec.drops_input && !spec.drops_output && spec.variant == nullptr;
  const bool full = cols == std::int64_t{plan.row_threads} * own;  // no bounds are checked
  return plain && own <= 24 && plan.row_threads <= kWarpSize &&
         (spec.norm != NormKind::kLayerNorm || (full && !spec.adds));
}

// The tile of rows that move in this way.
BackwardPlan tile_of(const BackwardSpec& spec, std::int64_t cols, Move move) {
  const bool odd = by_words(spec, cols);
  const BackwardGrid grid = grid_of(spec, cols);
  const int core = core_tile(spec, cols);
  BackwardPlan plan{};
  const bool is_there = core_has(spec.norm, spec.rounds_first, spec.row, spec.parameters);
  if (core >= 0 && move == Move::kVectors && is_there) {
    plan = core_backward_plan(core, size_of(spec.row), spec.adds);
    plan.move = move;
    plan.row_threads = grid.lanes * grid.warps;
    return plan;
  }
  const int own = grid.units * unit_of(spec);  // elements of a lane
  plan.pack = pack_of(spec, odd);
  plan.lanes = grid.lanes;
  plan.vectors = own / plan.pack;
  plan.width = static_cast<int>(cols);
  plan.move = odd && move == Move::kVectors ? Move::kWholeWords : move;
  plan.row_threads = grid.lanes * grid.warps;
  const bool drops = spec.drops_input || spec.drops_output;
  const bool light = grid.units == 1 && !odd && plan.row_threads <= 256 && !is_double(spec);
  const bool tight = drops && (spec.adds || plan.pack < 8 || plan.move != Move::kVectors);
  const bool three = plan.move == Move::kVectors && !spec.adds && !spec.recovers && !tight &&
                     spec.variant == nullptr;
  const bool wide = grid.threads == kWideBackwardThreads;
  plan.most_threads = light ? 256 : grid.threads;
  plan.ctas_per_sm = !light ? 1 : three ? 3 : 2;
  plan.keep = !tight && !wide && keeps_values(spec, cols, plan, own);
  const int parameter_size = own * size_of(spec.parameters) * parameters_of(spec);
  plan.parameters_stay = parameter_size <= 32 && !(drops && own > 8);
  return plan;
}

// The threads of a CTA for which shared memory suffices, in whole rows; 0 if not even for one.
std::int64_t threads_with_room(const BackwardPlan& plan, const BackwardSpec& spec,
                               const DeviceInfo& device) {
  const std::int64_t room = most_dynamic_shared(device) / plan.ctas_per_sm;
  const std::int64_t threads =
      std::min<std::int64_t>(plan.most_threads, room / group_bytes(spec, plan) * plan.lanes);
  const int unit = std::max(plan.row_threads, kWarpSize);
  return threads / unit * unit;
}

// Sets the rows in flight: three if all threads of an SM's CTAs have room for them, and always in
// the core table's tiles with one vector a lane. By words, two: share of add with three and with
// two at 43662x1537: 0.81 0.87 (H100, bf16, RMSNorm).
void fit_shared(BackwardPlan& plan, const BackwardSpec& spec, const DeviceInfo& device) {
  plan.stages = plan.width % unit_of(spec) == 0 ? 3 : 2;
  const std::int64_t groups = plan.most_threads / plan.lanes;
  const bool all =
      groups * group_bytes(spec, plan) * plan.ctas_per_sm <= most_dynamic_shared(device);
  if (!all && (plan.width > 0 || plan.vectors > 1)) {
    plan.stages = 2;
  }
  if (threads_with_room(plan, spec, device) == 0) {
    plan.ctas_per_sm = 1;
  }
}

// Whether there is room for rows at any address. Which kernel takes a row must not depend on its
// address, and rows moved by words need the most room.
bool has_room(const BackwardSpec& spec, std::int64_t cols, const DeviceInfo& device) {
  if (cols > std::int64_t{kMostBackwardThreads} * 4 * unit_of(spec)) {
    return false;
  }
  BackwardPlan plan = tile_of(spec, cols, Move::kWords);
  fit_shared(plan, spec, device);
  return threads_with_room(plan, spec, device) > 0;
}

// If a team of threads has fewer rows than this, the time before its first row and after its last
// one matters.
constexpr std::int64_t kFewSteps = 16;

// The number of CTAs for each group: the one that leaves the fewest steps to the busiest SM,
// counting the few that each CTA needs to fill its stages. 81 groups of many rows have 13 CTAs each
// on 132 SMs, in eight waves; one each would leave 51 SMs idle.
std::int64_t ctas_of_group(std::int64_t groups, std::int64_t steps, std::int64_t slots) {
  constexpr std::int64_t kFirstSteps = 2, kMostWaves = 8;
  std::int64_t best = 1, fewest = 0;
  for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const std::int64_t ctas = std::clamp<std::int64_t>(waves * slots / groups, 1, steps);
    const std::int64_t all = ceil_div(groups * ctas, slots) * (ceil_div(steps, ctas) + kFirstSteps);
    if (waves == 1 || all < fewest) {
      best = ctas;
      fewest = all;
    }
  }
  return best;
}

// How many rows a CTA takes side by side, and how many CTAs there are. The rows of a CTA belong to
// one group, if there are groups.
void lay_rows(BackwardPlan& plan, const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
              const DeviceInfo& device) {
  const int groups = groups_of(spec);
  const std::int64_t multiprocessors = std::max(device.multiprocessors / groups, 1);
  rows /= groups;
  std::int64_t most = threads_with_room(plan, spec, device);
  const int unit = std::max(plan.row_threads, kWarpSize);
  // One CTA if it can hold all rows, because it needs no partial sums. Else one CTA for every SM,
  // and then as many rows side by side as it holds.
  const std::int64_t most_rows = most / plan.row_threads;
  const std::int64_t rows_of_cta = rows <= most_rows ? rows : ceil_div(rows, multiprocessors);
  // With many rows and no idle lane, a CTA takes an eighth less of them side by side. Share of add
  // with all rows and with fewer: 0.945 0.957 at 131072x1024, 0.917 0.923 at 262144x256 (H200,
  // bf16).
  const std::int64_t own = std::int64_t{plan.vectors} * plan.pack;
  const bool full = plan.lanes == kWarpSize && plan.move == Move::kVectors &&
                    own <= 2 * unit_of(spec) && cols == plan.row_threads * own;
  if (full && most_rows >= 8 && rows_of_cta > kFewSteps * most_rows) {
    most = most / 8 * 7;
  }
  const std::int64_t units =
      std::clamp<std::int64_t>(ceil_div(rows_of_cta * plan.row_threads, unit), 1, most / unit);
  plan.side_by_side = static_cast<int>(units * unit / plan.row_threads);
  const std::int64_t steps = ceil_div(rows, plan.side_by_side);
  if (spec.variant != nullptr && spec.variant->shares_entries) {
    const std::int64_t slots = std::int64_t{device.multiprocessors} * plan.ctas_per_sm;
    plan.ctas = groups * ctas_of_group(groups, steps, slots);
    return;
  }
  plan.ctas = groups * std::min<std::int64_t>(multiprocessors * plan.ctas_per_sm, steps);
}

// If more bytes than this are on their way to an SM of an H200, the SMs near one half of the L2
// cache get ahead of the others, by up to a tenth. Which half it is changes from call to call.
constexpr std::int64_t kFairBytes = 72 << 10;
constexpr std::int64_t kTailShare = 20;  // the tail is one row of so many

// Leaves the last twentieth of the rows to as many CTAs again, which the SMs that are ahead run.
// us without and with them: LayerNorm 207 198 at 26214x5120, RMSNorm 216 202 at 9709x13824; but 192
// 198 at 14563x9216, with 72 KiB on their way; share of add of gated RMSNorm 0.847 0.872 at
// 131072x1024, 0.859 0.891 at 16384x8192 (H200, bf16).
void leave_tail(BackwardPlan& plan, const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                const DeviceInfo& device) {
  const bool plain = plan.move == Move::kVectors && !plan.core && !spec.adds && !spec.recovers &&
                     !spec.drops_output && groups_of(spec) == 1 &&
                     (spec.variant == nullptr || !spec.variant->shares_entries);
  const BackwardStreams streams = streams_of(spec);
  std::int64_t in_flight = 0;
  for (int s = 0; s < streams.count; ++s) {
    in_flight += (plan.stages - 1) * plan.side_by_side * cols * size_of(streams.dtypes[s]);
  }
  const std::int64_t step = plan.ctas * plan.side_by_side;
  if (plain && device.fast_memory && in_flight > kFairBytes && rows >= 2 * kTailShare * step) {
    plan.tail_row = rows / kTailShare * (kTailShare - 1) / step * step;
    plan.tail_ctas = plan.ctas;
    plan.ctas *= 2;
  }
}

}  // namespace

BackwardSpec spec_of(const NormBackwardArgs& args, const Variant* variant) {
  const DType row = variant != nullptr ? variant->row
                    : args.x_is_output ? args.grad_input.dtype
                                       : args.dtype;
  const bool one_type = args.grad_input.dtype == row && args.grad_residual.dtype == row;
  const bool drops_input = args.dropout.active && args.drops_input;
  // One gradient of the row's own type, to which nothing is added, is the case without a residual.
  // (In that case, a hook on saved tensors may have changed the type of x.)
  const bool plain = args.grad_sum.data == nullptr && one_type && !drops_input;
  return {.norm = args.kind,
          .adds = !plain && (variant == nullptr || variant->shares_entries),
          .drops_input = drops_input,
          .drops_output = args.dropout.active && !args.drops_input,
          .recovers = args.x_is_output,
          .split = variant != nullptr
                       ? variant->split
                       : args.x.split.inner != 0 || args.grad_output.split.inner != 0,
          .rounds_first =
              args.grad_weight != nullptr && rounds_first(args.rounding, args.grad_input.dtype),
          .input = args.grad_input.dtype,
          .residual = args.has_residual ? args.grad_residual.dtype : args.grad_input.dtype,
          .row = row,
          .parameters = args.param_dtype,
          .grad_output = args.grad_output.dtype,
          .variant = variant};
}

Move most_aligned(const NormBackwardArgs& args, const BackwardSpec& spec) {
  const Rows none;
  const Rows& beside = spec.variant != nullptr ? spec.variant->grad_beside : none;
  const ConstRows grad_beside = dense(beside.data, beside.dtype, args.cols);
  const ConstRows rows[] = {
      args.x,
      args.grad_output,
      args.grad_sum,
      dense(args.grad_input.data, args.grad_input.dtype, args.cols),
      dense(args.grad_residual.data, args.grad_residual.dtype, args.cols),
      spec.variant != nullptr ? spec.variant->beside : ConstRows{},
      spec.variant != nullptr ? spec.variant->parameters_of_row[0] : ConstRows{},
      grad_beside};
  const auto all = [&](auto&& aligned) {
    return std::all_of(std::begin(rows), std::end(rows), aligned);
  };
  const int pack = pack_of(spec, false);
  if (all([&](const ConstRows& each) { return packs_aligned(each, pack); })) {
    return Move::kVectors;
  }
  return all([](const ConstRows& each) { return rows_begin_at(each, 4); }) ? Move::kWholeWords
                                                                           : Move::kWords;
}

BackwardPlan plan_backward(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                           Move most_aligned, bool wants_sums, bool adds_sums,
                           const DeviceInfo& device) {
  if ((spec.adds && spec.split) || !has_room(spec, cols, device)) {
    return {};
  }
  BackwardPlan plan = tile_of(spec, cols, most_aligned);
  fit_shared(plan, spec, device);
  // Beside Philox, a constant width makes the kernel slower. us with and without it: 363 337 at
  // 131072x1024, 358 323 at 32768x4096 (H200, bf16, RMSNorm with a residual).
  if (spec.drops_input && spec.variant == nullptr && plan.vectors > 1 && !by_words(spec, cols) &&
      device.fast_memory) {
    plan.width = 0;
  }
  lay_rows(plan, spec, rows, cols, device);
  // If there are few rows, two in flight are better, because the first one then arrives sooner. us
  // with three and with two: 8.1 7.4 at 2000x1024, 48.2 47.4 at 2048x12288 (H200, bf16).
  const std::int64_t steps = ceil_div(rows, plan.ctas * plan.side_by_side);
  if (steps <= kFewSteps && plan.most_threads == kMostBackwardThreads) {
    plan.stages = 2;
  }
  const std::int64_t groups = std::int64_t{plan.row_threads} * plan.side_by_side / plan.lanes;
  plan.shared_bytes = groups * group_bytes(spec, plan);
  leave_tail(plan, spec, rows, cols, device);
  const int groups_here = groups_of(spec);
  plan.partials_bytes =
      partials_bytes(spec, plan.ctas / groups_here, cols * groups_here, wants_sums, adds_sums);
  return plan;
}

std::int64_t partials_bytes(const BackwardSpec& spec, std::int64_t parts, std::int64_t cols,
                            bool wants_sums, bool adds_sums) {
  if (!wants_sums || (parts <= 1 && !adds_sums)) {
    return 0;
  }
  const int grads = grads_of(spec.norm);
  return parts * grads * partials_stride(cols) * (is_double(spec) ? 8 : 4);
}

bool fits_cta(const NormBackwardArgs& args, const BackwardSpec& spec, const DeviceInfo& device) {
  return has_room(spec, args.cols, device);
}

BackwardPlan plan_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                           const DeviceInfo& device) {
  return plan_backward(spec, args.rows, args.cols, most_aligned(args, spec), args.wants_sums(),
                       args.add_grads, device);
}

namespace {

Variant::Types types_of(const BackwardSpec& spec) {
  if (spec.variant != nullptr) {
    return spec.variant->types();
  }
  const std::string source =
      spec.adds ? "fused_op::AddResidual" + joined({type(spec.input), type(spec.residual),
                                                    type(spec.row), flag(spec.drops_input)})
                : "fused_op::Plain" + joined({type(spec.input), flag(spec.split)});
  return {source, epilogue_name({type(spec.parameters), type(spec.grad_output),
                                 flag(spec.drops_output), flag(spec.recovers)},
                                spec.rounds_first, spec.input)};
}

}  // namespace

std::string op_name(const BackwardSpec& spec, Move move) {
  const Variant::Types types = types_of(spec);
  const std::string access = move == Move::kVectors ? "fused_op::cuda::Vectors"
                             : move == Move::kWords ? "fused_op::cuda::Words"
                                                    : "fused_op::cuda::WholeWords";
  return "fused_op::cuda::BackwardOp" +
         joined({norm_name(spec.norm), types.source, types.epilogue, access});
}

std::string kernel_name(const BackwardSpec& spec, const BackwardPlan& plan) {
  const std::string tile = "fused_op::cuda::BackwardTile" +
                           joined({number(plan.pack), number(plan.lanes), number(plan.vectors),
                                   number(plan.most_threads), number(plan.ctas_per_sm),
                                   number(plan.stages), flag(plan.keep), flag(plan.parameters_stay),
                                   flag(plan.tail_ctas > 0), number(plan.width), flag(plan.core)});
  return "fused_op::cuda::backward_kernel<" + op_name(spec, plan.move) + ", " + tile + ">";
}

std::string partials_kernel_name(const BackwardSpec& spec) {
  return "fused_op::cuda::add_partials_kernel" +
         joined({type(spec.parameters), is_double(spec) ? "double" : "float"});
}

}  // namespace fused_op::cuda
