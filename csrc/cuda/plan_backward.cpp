#include <algorithm>
#include <initializer_list>

#include "core/pack.h"
#include "cuda/backward_tile.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMostThreads = 512;  // of a CTA: 128 registers a thread
constexpr int kMostWarps = kMostThreads / kWarpSize;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_double(const BackwardSpec& spec) { return spec.row == DType::kFloat64; }
DType read_as_x(const BackwardSpec& spec) { return spec.recovers ? spec.grad_output : spec.row; }

// The dtypes of what a row is read from: x, dy, and what arrives through the sum.
struct Streams {
  DType dtypes[3];
  int count;
};
Streams streams_of(const BackwardSpec& spec) {
  return {{read_as_x(spec), spec.grad_output, spec.row}, spec.adds ? 3 : 2};
}
int widest(const BackwardSpec& spec) {
  const Streams streams = streams_of(spec);
  int size = std::max(size_of(spec.input), spec.adds ? size_of(spec.residual) : 0);
  for (int s = 0; s < streams.count; ++s) {
    size = std::max(size, size_of(streams.dtypes[s]));
  }
  return size;
}

// Elements that a lane takes as one pack or several.
int unit_of(const BackwardSpec& spec) { return is_double(spec) ? 2 : 8; }
bool by_words(const BackwardSpec& spec, std::int64_t cols) { return cols % unit_of(spec) != 0; }
int pack_of(const BackwardSpec& spec, bool odd) {
  if (odd) {
    return size_of(spec.row) == 2 && size_of(read_as_x(spec)) == 2 ? 2 : 1;
  }
  return kVectorBytes / widest(spec);
}

// A row's lanes, the units of each, and its warps.
struct Grid {
  int lanes;
  int units;
  int warps;
};

// How good so many units a lane are: the share of a CTA's lanes that have work, less where only one
// row fits, since its barriers then stop the whole SM, and less where a thread has too much to keep
// the row in registers.
std::int64_t merit(std::int64_t units, int per_lane) {
  const std::int64_t warps = ceil_div(units, std::int64_t{kWarpSize} * per_lane);
  const std::int64_t rows = kMostWarps / warps;
  return rows * units * (rows == 1 ? 9 : 10) * (per_lane == 2 ? 4 : 3) * (12 / per_lane);
}

int lanes_for(std::int64_t units) {
  int lanes = 1;
  while (lanes < units) {
    lanes *= 2;
  }
  return lanes;
}

// `light`: as few units a lane as possible.
Grid best_grid(std::int64_t units, bool light) {
  if (light && units <= kMostThreads) {
    return {std::min(lanes_for(units), kWarpSize), 1, static_cast<int>(ceil_div(units, kWarpSize))};
  }
  if (units <= kWarpSize) {
    return {lanes_for(units), 1, 1};
  }
  int best = 2;
  for (int per_lane = 3; per_lane <= 4; ++per_lane) {
    best = merit(units, per_lane) > merit(units, best) ? per_lane : best;
  }
  return {kWarpSize, best, static_cast<int>(ceil_div(units, std::int64_t{kWarpSize} * best))};
}

// Shared memory of the lanes that share a warp and a row.
std::int64_t group_bytes(const BackwardSpec& spec, const BackwardPlan& plan) {
  const Streams streams = streams_of(spec);
  std::int64_t stage = 0;
  for (int s = 0; s < streams.count; ++s) {
    stage += staged_bytes(plan.move != Move::kVectors, plan.pack, plan.lanes, plan.vectors,
                          size_of(streams.dtypes[s]));
  }
  const int parameters =
      std::max(plan.pack * size_of(spec.parameters), 4) * (spec.recovers ? 2 : 1);
  return plan.stages * stage +
         (plan.parameters_stay ? 0 : parameter_bytes(plan.lanes, plan.vectors, parameters));
}

// The tile of a row that moves so.
BackwardPlan tile_of(const BackwardSpec& spec, std::int64_t cols, Move move) {
  const bool odd = by_words(spec, cols);
  const bool drops = spec.drops_input || spec.drops_output;
  const int unit = unit_of(spec);
  // Philox takes registers, and by words one call for a pack of two elements or one.
  const Grid grid = best_grid(ceil_div(cols, unit), drops && odd);
  const int own = grid.units * unit;  // elements of a lane
  BackwardPlan plan{};
  plan.pack = pack_of(spec, odd);
  plan.lanes = grid.lanes;
  plan.vectors = own / plan.pack;
  plan.width = static_cast<int>(cols);
  plan.move = odd && move == Move::kVectors ? Move::kWholeWords : move;
  plan.row_threads = grid.lanes * grid.warps;
  const bool light = grid.units == 1 && plan.row_threads <= 256 && !is_double(spec);
  const bool tight = drops && (spec.adds || plan.pack < 8 || plan.move != Move::kVectors);
  const bool three = plan.move == Move::kVectors && !spec.adds && !spec.recovers && !tight;
  plan.most_threads = light ? 256 : kMostThreads;
  plan.ctas_per_sm = !light ? 1 : three ? 3 : 2;
  const bool room_for_values = own * (is_double(spec) ? 8 : 4) <= 64;
  plan.keep = room_for_values && !tight ? kKeepValues : kKeepNothing;
  const int parameter_size = own * size_of(spec.parameters) * (spec.recovers ? 2 : 1);
  plan.parameters_stay = parameter_size <= 32 && !(drops && own > 8);
  plan.stats_ahead = true;
  return plan;
}

// Threads of a CTA, for whole rows, as far as shared memory suffices; 0 if for none.
std::int64_t threads_with_room(const BackwardPlan& plan, const BackwardSpec& spec,
                               const DeviceInfo& device) {
  const std::int64_t room = most_dynamic_shared(device) / plan.ctas_per_sm;
  const std::int64_t threads =
      std::min<std::int64_t>(plan.most_threads, room / group_bytes(spec, plan) * plan.lanes);
  const int unit = std::max(plan.row_threads, kWarpSize);
  return threads / unit * unit;
}

// Rows in flight: three where all threads of the CTAs of an SM have room for them.
void fit_shared(BackwardPlan& plan, const BackwardSpec& spec, const DeviceInfo& device) {
  plan.stages = 3;
  const std::int64_t groups = plan.most_threads / plan.lanes;
  if (groups * group_bytes(spec, plan) * plan.ctas_per_sm > most_dynamic_shared(device)) {
    plan.stages = 2;
  }
  if (threads_with_room(plan, spec, device) == 0) {
    plan.ctas_per_sm = 1;
  }
}

// Whether rows of any address have room: which kernel takes a row does not depend on its address,
// and by words a row needs the most.
bool has_room(const BackwardSpec& spec, std::int64_t cols, const DeviceInfo& device) {
  if (cols > std::int64_t{kMostThreads} * 4 * unit_of(spec)) {
    return false;
  }
  BackwardPlan plan = tile_of(spec, cols, Move::kWords);
  fit_shared(plan, spec, device);
  return threads_with_room(plan, spec, device) > 0;
}

}  // namespace

BackwardSpec spec_of(const NormBackwardArgs& args) {
  const bool one_type =
      args.grad_input.dtype == args.dtype && args.grad_residual.dtype == args.dtype;
  const bool drops_input = args.dropout.active && args.drops_input;
  // One gradient of the row's own type, and nothing to add to it: as without a residual.
  const bool plain =
      args.grad_sum.data == nullptr && (!args.has_residual || (one_type && !drops_input));
  return {.norm = args.kind,
          .adds = !plain,
          .drops_input = drops_input,
          .drops_output = args.dropout.active && !args.drops_input,
          .recovers = args.x_is_output,
          .split = args.x.split.inner != 0 || args.grad_output.split.inner != 0,
          .input = args.grad_input.dtype,
          .residual = args.grad_residual.dtype,
          .row = args.x_is_output ? args.grad_input.dtype : args.dtype,
          .parameters = args.param_dtype,
          .grad_output = args.grad_output.dtype};
}

Move most_aligned(const NormBackwardArgs& args, const BackwardSpec& spec) {
  const ConstRows rows[] = {args.x, args.grad_output, args.grad_sum,
                            dense(args.grad_input.data, args.grad_input.dtype, args.cols),
                            dense(args.grad_residual.data, args.grad_residual.dtype, args.cols)};
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
  if (!has_room(spec, cols, device)) {
    return {};
  }
  BackwardPlan plan = tile_of(spec, cols, most_aligned);
  fit_shared(plan, spec, device);
  const std::int64_t most = threads_with_room(plan, spec, device);
  const int unit = std::max(plan.row_threads, kWarpSize);
  // One CTA where it holds all rows, and needs no partial sums then. Else a CTA for every SM comes
  // first, and then as many rows side by side as it holds.
  const std::int64_t rows_of_cta =
      rows <= most / plan.row_threads ? rows : ceil_div(rows, device.multiprocessors);
  const std::int64_t units =
      std::clamp<std::int64_t>(ceil_div(rows_of_cta * plan.row_threads, unit), 1, most / unit);
  const std::int64_t threads = units * unit;
  plan.side_by_side = static_cast<int>(threads / plan.row_threads);
  plan.ctas = std::min<std::int64_t>(std::int64_t{device.multiprocessors} * plan.ctas_per_sm,
                                     ceil_div(rows, plan.side_by_side));
  plan.shared_bytes = threads / plan.lanes * group_bytes(spec, plan);
  if (wants_sums && (plan.ctas > 1 || adds_sums)) {
    const int grads = spec.norm == NormKind::kLayerNorm ? 2 : 1;
    plan.partials_bytes = plan.ctas * grads * partials_stride(cols) * (is_double(spec) ? 8 : 4);
  }
  return plan;
}

BackwardPlan plan_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                           const DeviceInfo& device) {
  // The tables of backward take what has no option, and rows at two strides.
  if (!is_flexible(args) || is_vector_dropout(args) || spec.split) {
    return {};
  }
  // A kernel reads x in the dtype of the gradient that leaves, or of dy where x̂ is recovered. A
  // hook on saved tensors may have changed it.
  const bool x_has_its_type =
      spec.recovers ? args.dtype == spec.grad_output : spec.adds || args.dtype == spec.input;
  if (!x_has_its_type) {
    return {};
  }
  const bool wants_sums = args.grad_weight != nullptr || args.grad_bias != nullptr;
  return plan_backward(spec, args.rows, args.cols, most_aligned(args, spec), wants_sums,
                       args.add_grads, device);
}

std::string kernel_name(const BackwardSpec& spec, const BackwardPlan& plan) {
  const std::string source =
      spec.adds ? "fused_op::AddResidual" + joined({type(spec.input), type(spec.residual),
                                                    type(spec.row), flag(spec.drops_input)})
                : "fused_op::Plain" + joined({type(spec.input), flag(spec.split)});
  const std::string epilogue =
      "fused_op::Affine" + joined({type(spec.parameters), type(spec.grad_output),
                                   flag(spec.drops_output), flag(spec.recovers)});
  const std::string access = plan.move == Move::kVectors ? "fused_op::cuda::Vectors"
                             : plan.move == Move::kWords ? "fused_op::cuda::Words"
                                                         : "fused_op::cuda::WholeWords";
  const std::string tile =
      "fused_op::cuda::BackwardTile" +
      joined({number(plan.pack), number(plan.lanes), number(plan.vectors),
              number(plan.most_threads), number(plan.ctas_per_sm), number(plan.stages),
              number(plan.keep), flag(plan.parameters_stay), flag(plan.stats_ahead),
              number(plan.width)});
  return "fused_op::cuda::backward_kernel<fused_op::cuda::BackwardOp" +
         joined({norm_name(spec.norm), source, epilogue, access}) + ", " + tile + ">";
}

std::string partials_kernel_name(const BackwardSpec& spec) {
  return "fused_op::cuda::add_partials_kernel" +
         joined({type(spec.parameters), is_double(spec) ? "double" : "float"});
}

}  // namespace fused_op::cuda
