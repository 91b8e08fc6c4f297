// The rules that plans of backward keep, and the calls that are checked against them. Run by
// plans.cpp.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cuda/backward_long.h"
#include "cuda/backward_tile.h"
#include "cuda/core_table.h"
#include "plans.h"

namespace fused_op::cuda {
namespace {

// What a call has besides its types.
struct Call {
  std::int64_t rows;
  std::int64_t cols;
  Move move;
  bool wants_sums;
  bool adds_sums;
};

// Bytes of shared memory for one column of one row.
int staged_column(const BackwardSpec& spec) {
  const bool beside = spec.variant != nullptr && spec.variant->beside.data != nullptr;
  const int third = beside      ? size_of(spec.variant->beside.dtype)
                    : spec.adds ? size_of(spec.row)
                                : 0;
  return size_of(read_as_x(spec)) + size_of(spec.grad_output) + third;
}

int widest_stream(const BackwardSpec& spec) {
  int widest = std::max({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.input)});
  if (spec.variant != nullptr) {
    widest = std::max(widest, size_of(spec.variant->beside.dtype));
  }
  return spec.adds ? std::max({widest, size_of(spec.row), size_of(spec.residual)}) : widest;
}

// How many columns 16 bytes of the narrowest stream hold.
int unit(const BackwardSpec& spec) {
  int narrowest =
      std::min({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.input)});
  if (spec.variant != nullptr) {
    narrowest = std::min(narrowest, size_of(spec.variant->beside.dtype));
  }
  if (spec.adds) {
    narrowest = std::min({narrowest, size_of(spec.row), size_of(spec.residual)});
  }
  return 16 / narrowest;
}

// Whether a row need not fit: it is longer than the lanes of the kernel can hold, or two rows in
// flight and the parameters may exceed the shared memory of a CTA. The grid of lanes may add a
// third to their bytes.
bool may_be_too_long(const BackwardSpec& spec, std::int64_t cols, const DeviceInfo& device) {
  const std::int64_t most_cols = 2048 * unit(spec);
  const int parameters = std::max(size_of(spec.parameters), 4) * (spec.recovers ? 2 : 1);
  const std::int64_t bytes = (2 * staged_column(spec) + parameters) * cols * 4 / 3;
  return cols > most_cols || bytes > most_dynamic_shared(device);
}

// Whether a kernel of the core table takes the call, and no lane of it is idle.
bool is_core(const BackwardSpec& spec, const BackwardPlan& plan, const Call& call) {
  const int size = size_of(spec.row);
  const bool tuned = spec.parameters == spec.row || spec.parameters == DType::kFloat32;
  const bool options = spec.drops_input || spec.drops_output || spec.recovers || spec.split;
  if (options || !tuned || size == 8 || widest_stream(spec) != size || unit(spec) * size != 16 ||
      plan.width != 0 || plan.move != Move::kVectors ||
      call.cols != std::int64_t{plan.row_threads} * plan.vectors * plan.pack) {
    return false;
  }
  for (int i = spec.adds ? kFirstWithSum : 0; i < kCoreBackwardCount; ++i) {
    const BackwardPlan core = core_backward_plan(i, size, spec.adds);
    if (core.lanes == plan.lanes && core.vectors == plan.vectors && core.stages == plan.stages) {
      return core.pack == plan.pack && core.most_threads == plan.most_threads &&
             core.ctas_per_sm >= plan.ctas_per_sm;
    }
  }
  return false;
}

const char* broken_layout(const BackwardSpec& spec, const BackwardPlan& plan, const Call& call,
                          const BackwardPlan& first) {
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const int warps = plan.row_threads / plan.lanes;
  if (plan.pack < 1 || plan.vectors < 1 || plan.lanes > 32) return "no plan";
  if ((plan.lanes & (plan.lanes - 1)) != 0) return "lanes";
  if (plan.row_threads != warps * plan.lanes || (plan.lanes < 32 && warps != 1)) return "warps";
  if (warps * warp_cols < call.cols) return "a row is not covered";
  if ((warps - 1) * warp_cols >= call.cols) return "an empty warp";
  const bool told_at_run_time = plan.width == 0 && spec.drops_input && plan.vectors > 1;
  if (plan.width != call.cols && !told_at_run_time && !is_core(spec, plan, call)) return "width";
  const bool whole = call.cols % plan.pack == 0 && plan.pack * widest_stream(spec) <= 16;
  if (plan.move == Move::kVectors && !whole) return "vectors";
  const bool odd = call.cols % unit(spec) != 0 && call.move == Move::kVectors;
  if (plan.move != call.move && !(odd && plan.move == Move::kWholeWords)) return "move";
  if (plan.pack != first.pack || plan.lanes != first.lanes || plan.vectors != first.vectors ||
      plan.row_threads != first.row_threads) {
    return "the lane of an element depends on rows, device or addresses";
  }
  return nullptr;
}

const char* broken_launch(const BackwardSpec& spec, const BackwardPlan& plan, const Call& call,
                          const DeviceInfo& device) {
  const int threads = plan.row_threads * plan.side_by_side;
  if (plan.most_threads % 32 != 0 || plan.most_threads > 640) return "threads of a tile";
  if (threads < 32 || threads % 32 != 0 || threads > plan.most_threads) return "threads";
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.most_threads > 1024) return "CTAs of an SM";
  if (plan.stages < 2 || plan.stages > 3) return "stages";
  const std::int64_t staged =
      std::int64_t{threads} * plan.vectors * plan.pack * staged_column(spec) * plan.stages;
  if (plan.shared_bytes < staged) return "shared memory that rows do not fit into";
  if (plan.shared_bytes * plan.ctas_per_sm > most_dynamic_shared(device)) return "shared memory";
  const std::int64_t most_ctas = std::int64_t{device.multiprocessors} * plan.ctas_per_sm;
  if (!device.fast_memory) {
    if (plan.tail_ctas > 0) return "a tail, though memory is not fast";
    if (plan.width != call.cols && !is_core(spec, plan, call)) return "a width told at run time";
  }
  const std::int64_t ctas = plan.ctas - plan.tail_ctas;
  const std::int64_t step = ctas * plan.side_by_side;
  if (ctas < 1 || ctas > most_ctas) return "CTAs";
  if (step - plan.side_by_side >= call.rows) return "an empty CTA";
  if (ctas < most_ctas && step < call.rows) return "an idle SM";
  if (plan.tail_ctas > 0) {
    if (plan.tail_ctas != ctas) return "CTAs of the tail";
    if (plan.tail_row % step != 0 || plan.tail_row >= call.rows) return "where the tail begins";
    if (plan.tail_row + 2 * step > call.rows) return "a tail of few rows";
    if (call.rows - plan.tail_row > call.rows / 20 + 2 * step) return "a long tail";
  }
  const int grads = spec.norm == NormKind::kLayerNorm ? 2 : 1;
  const bool partials = call.wants_sums && (plan.ctas > 1 || call.adds_sums);
  const std::int64_t bytes =
      plan.ctas * grads * ((call.cols + 7) / 8 * 8) * (spec.row == DType::kFloat64 ? 8 : 4);
  return plan.partials_bytes == (partials ? bytes : 0) ? nullptr : "bytes of partial sums";
}

// A plan of few rows, compared with the plan of many rows of the same width.
const char* broken_rule(const BackwardSpec& spec, const BackwardFewPlan& plan,
                        const BackwardPlan& many, const Call& call, bool wants_rows) {
  if (many.pack != plan.pack || many.lanes != plan.lanes || many.vectors != plan.vectors ||
      many.row_threads != plan.row_threads) {
    return "the lane of an element differs with few rows";
  }
  if (call.rows > 256 || call.rows * call.cols * size_of(read_as_x(spec)) > 2 << 20) {
    return "rows that are not few";
  }
  const int threads = plan.row_threads * plan.side_by_side;
  if (threads < 32 || threads > 512 || threads % 32 != 0) return "threads of few rows";
  const std::int64_t busy = std::max<std::int64_t>(
      128, (8 * call.rows + 31) / 32 * 32);  // that store a sum, or have a row of a slab
  if (threads < busy && threads + plan.row_threads <= 256) return "rows that wait for others";
  if (threads - plan.row_threads >= busy) return "idle threads";
  if (plan.lanes < 32 && plan.row_threads != plan.lanes) return "rows that share a warp";
  if (plan.move == Move::kWholeWords) return "move of few rows";
  if ((plan.move == Move::kVectors) != (many.move == Move::kVectors)) return "move of few rows";
  const std::int64_t rows = plan.row_ctas * plan.side_by_side;
  if (wants_rows ? rows < call.rows || rows - plan.side_by_side >= call.rows : rows != 0) {
    return "CTAs of few rows";
  }
  const int widest = std::max(size_of(read_as_x(spec)), size_of(spec.grad_output));
  const int own = plan.move == Move::kVectors ? 16 / widest : 2 * plan.pack;
  if (own % plan.pack != 0) return "packs of a slab";
  const std::int64_t cols = plan.slabs * 8 * own;
  if (call.wants_sums ? cols < call.cols || cols - 8 * own >= call.cols : cols != 0) return "slabs";
  return plan.row_ctas + plan.slabs > 0 ? nullptr : "an empty grid";
}

// Rows of any length, including those that fit into a CTA.
const char* broken_rule(const BackwardSpec& spec, const BackwardLongPlan& plan, const Call& call,
                        const DeviceInfo& device, const BackwardLongPlan& first) {
  const int unit = plan.pack * plan.vectors;
  const int widest = widest_stream(spec);
  if (unit * widest != 16) return "a unit";
  if (plan.pack != first.pack || plan.vectors != first.vectors || plan.pieces != first.pieces) {
    return "the thread of an element depends on rows, device or addresses";
  }
  const bool whole = call.cols % plan.pack == 0 && plan.vectors == 1;
  if (plan.move == Move::kVectors && !(whole && call.move == Move::kVectors)) return "vectors";
  if (plan.move == Move::kWholeWords) return "move";
  if (plan.pack * size_of(spec.row) < 4 && plan.pack != 1) return "words";
  const std::int64_t piece = std::int64_t{kPieceThreads} * kPieceUnits * unit;
  if (plan.pieces * piece < call.cols || (plan.pieces - 1) * piece >= call.cols) return "pieces";
  const std::int64_t slab = std::int64_t{kColumnThreads} * unit;
  if (plan.slabs * slab < call.cols || (plan.slabs - 1) * slab >= call.cols) return "slabs";
  if (plan.chunks < 1 || plan.chunks > 65535 || plan.chunks > call.rows) return "an empty chunk";
  const int size = spec.row == DType::kFloat64 ? 8 : 4;
  if (plan.row_sums_bytes < call.rows * plan.pieces * 2 * size || plan.row_sums_bytes % 16 != 0) {
    return "bytes of row sums";
  }
  const int grads = spec.norm == NormKind::kLayerNorm ? 2 : 1;
  const auto partials = [&](std::int64_t parts) {
    return call.wants_sums && (parts > 1 || call.adds_sums)
               ? parts * grads * ((call.cols + 7) / 8 * 8) * size
               : 0;
  };
  if (plan.partials_bytes != partials(plan.chunks)) return "bytes of partial sums";
  if (plan.cluster == 0) {
    return plan.clusters == 0 && plan.cluster_partials_bytes == 0 ? nullptr : "no cluster";
  }
  if (plan.move != Move::kVectors || spec.adds || call.rows < 32) return "a cluster";
  if (plan.cluster != plan.pieces || plan.cluster < 2) return "a cluster with an empty CTA";
  if (plan.cluster > device.max_cluster || plan.cluster > kMostCluster) return "a large cluster";
  if (plan.clusters < 1 || plan.clusters > call.rows) return "a cluster without a row";
  const std::int64_t staged =
      plan.stages * piece * (size_of(read_as_x(spec)) + size_of(spec.grad_output));
  if (plan.stages < 2 || plan.stages > 3) return "stages of a cluster";
  if (plan.cluster_shared_bytes < staged + piece * size_of(spec.parameters) ||
      plan.cluster_shared_bytes > most_dynamic_shared(device)) {
    return "shared memory of a cluster";
  }
  return plan.cluster_partials_bytes == partials(plan.clusters) ? nullptr
                                                                : "partial sums of clusters";
}

DeviceInfo gpu(int multiprocessors, int shared_kib) {
  DeviceInfo device{};
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_kib << 10;
  return device;
}

}  // namespace

void check_backward(const BackwardSpec& spec, std::int64_t cols) {
  // Shared memory decides the tile; SMs and rows decide how many rows a CTA has. The two GPUs of
  // each size of shared memory and the four numbers of rows therefore take turns.
  static const std::array<std::array<DeviceInfo, 2>, 4> kDevices = {{
      {gpu(1, 64), gpu(14, 64)},
      {gpu(40, 99), gpu(192, 99)},
      {gpu(78, 163), gpu(108, 163)},
      {gpu(132, 227), gpu(192, 227)},
  }};
  static constexpr std::array<std::array<std::int64_t, 4>, 2> kRows = {
      {{1, 33, 512, 8'000'001}, {1, 7, 4097, 8'000'001}}};
  BackwardPlan first{};
  for (const auto& of_size : kDevices) {
    DeviceInfo device = of_size[cols % 7 % 2];
    int plans = 0;
    int calls = 0;
    for (const std::int64_t rows : kRows[cols % 5 % 2]) {
      device.fast_memory = (rows + cols) % 2 == 0;  // decides nothing about a row's lanes
      for (const Move move : {Move::kVectors, Move::kWords, Move::kWholeWords}) {
        // wants_sums and adds_sums decide nothing that depends on the row, so they take turns.
        const Call call{rows, cols, move, cols % 2 == 0, cols % 3 == 0};
        const BackwardPlan plan =
            plan_backward(spec, rows, cols, move, call.wants_sums, call.adds_sums, device);
        ++counts.walked;
        ++calls;
        plans += plan.lanes > 0 ? 1 : 0;
        if (plan.lanes == 0) {
          if (!may_be_too_long(spec, cols, device)) {
            report("no plan", kernel_name(spec, plan), rows, cols, device);
          }
          continue;
        }
        if (first.lanes == 0) first = plan;
        const char* rule = broken_layout(spec, plan, call, first);
        rule = rule == nullptr ? broken_launch(spec, plan, call, device) : rule;
        if (rows <= 512 && rule == nullptr) {
          const bool wants_rows = cols % 5 != 0 || !call.wants_sums;
          const BackwardFewPlan few =
              plan_backward_few(spec, rows, cols, move, wants_rows, call.wants_sums, device);
          counts.few += few.lanes > 0 ? 1 : 0;
          rule = few.lanes > 0 ? broken_rule(spec, few, plan, call, wants_rows) : nullptr;
        }
        if (rule != nullptr) {
          report(rule, kernel_name(spec, plan), rows, cols, device);
        }
      }
    }
    if (plans != 0 && plans != calls) {
      report("a plan for some rows or addresses alone", kernel_name(spec, first), 0, cols, device);
    }
  }
}

namespace {

// Long rows, and what a launch makes of them on GPUs with clusters of 16 CTAs, of 8 CTAs, and
// without clusters.
void check_long(const BackwardSpec& spec, std::int64_t cols) {
  BackwardLongPlan first{};
  for (const auto [multiprocessors, shared_kib, most_cluster] :
       {std::array{1, 64, 0}, std::array{40, 99, 0}, std::array{108, 163, 0},
        std::array{132, 227, 16}, std::array{148, 227, 16}, std::array{192, 99, 8},
        std::array{2, 227, 16}}) {
    DeviceInfo device = gpu(multiprocessors, shared_kib);
    device.max_cluster = most_cluster;
    for (const std::int64_t rows : {1, 7, 31, 32, 200, 4097, 8'000'001}) {
      for (const Move move : {Move::kVectors, Move::kWords, Move::kWholeWords}) {
        const Call call{rows, cols, move, cols % 3 != 0 || rows % 2 == 0, rows % 3 == 0};
        const BackwardLongPlan plan =
            plan_backward_long(spec, rows, cols, move, call.wants_sums, call.adds_sums, device);
        if (first.pack == 0) first = plan;
        ++counts.walked;
        counts.clustered += plan.cluster > 0 ? 1 : 0;
        if (const char* const rule = broken_rule(spec, plan, call, device, first)) {
          report(rule, columns_kernel_name(spec, plan), rows, cols, device);
        }
      }
    }
  }
}

// Every combination of element types and options. float16 is left out, because plans know only
// sizes.
std::vector<BackwardSpec> all_backward_specs() {
  std::vector<BackwardSpec> specs;
  const auto add = [&](BackwardSpec spec) {
    spec.norm = specs.size() % 2 == 0 ? NormKind::kLayerNorm : NormKind::kRmsNorm;
    specs.push_back(spec);
  };
  const auto with_types = [&](DType row, DType parameters, DType grad_output,
                              const std::vector<DType>& types) {
    BackwardSpec spec{};
    spec.input = spec.residual = spec.row = row;
    spec.parameters = parameters;
    spec.grad_output = grad_output;
    add(spec);
    spec.drops_output = true;
    add(spec);
    spec.drops_output = false;
    spec.recovers = true;
    add(spec);
    spec.recovers = false;
    spec.adds = true;
    for (const DType input : types) {
      for (const DType residual : types) {
        for (const bool drops : {false, true}) {
          spec.input = input;
          spec.residual = residual;
          spec.drops_input = drops;
          add(spec);
        }
      }
    }
  };
  const std::vector<DType> types = {DType::kBFloat16, DType::kFloat32};
  for (const DType row : types) {
    for (const DType parameters : types) {
      for (const DType grad_output : types) {
        with_types(row, parameters, grad_output, types);
      }
    }
  }
  with_types(DType::kFloat64, DType::kFloat64, DType::kFloat64, {DType::kFloat64});
  return specs;
}

}  // namespace

void walk_backward() {
  for (const BackwardSpec& spec : all_backward_specs()) {
    for (std::int64_t cols = 1; cols <= 17'000; ++cols) {
      check_backward(spec, cols);
    }
  }
}

void walk_long_backward() {
  for (const BackwardSpec& spec : all_backward_specs()) {
    for (std::int64_t cols = 1; cols <= 600'000; cols += cols < 200      ? 1
                                                         : cols < 40'000 ? 127
                                                                         : 2039) {
      check_long(spec, cols);
      check_long(spec, (cols + 15) / 16 * 16);
    }
    check_long(spec, 5'000'000'000);
  }
}

}  // namespace fused_op::cuda
