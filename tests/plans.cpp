// Makes the plans of forward and backward for every width, many numbers of rows, all element types
// and GPUs of 1 to 192 SMs, and prints those that break a rule. Compiled with the planner of the
// checkout: g++ -std=c++20 -Icsrc tests/plans.cpp csrc/cuda/plan*.cpp
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/backward_long.h"
#include "cuda/backward_tile.h"
#include "cuda/core_table.h"
#include "cuda/plan.h"

using namespace fused_op;
using namespace fused_op::cuda;

namespace {

int found = 0;
long long walked = 0;
long long fews = 0;
long long clustered = 0;

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void report(const char* rule, const std::string& name, std::int64_t rows, std::int64_t cols,
            const DeviceInfo& device) {
  if (++found <= 20) {
    std::printf("%s: %s, %lld rows of %lld columns, %d SMs of %d bytes\n", rule, name.c_str(),
                static_cast<long long>(rows), static_cast<long long>(cols), device.multiprocessors,
                device.shared_bytes);
  }
}

// --- Forward -------------------------------------------------------------------------------------

int row_threads(const ForwardPlan& plan, std::int64_t cols) {
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const std::int64_t warps = plan.lanes < 32 ? 1 : (cols + warp_cols - 1) / warp_cols;
  return static_cast<int>(warps) * plan.lanes;
}

// Which lane of which warp has an element, as numbers.
bool same_lanes(const ForwardPlan& a, const ForwardPlan& b) {
  return a.pack == b.pack && a.lanes == b.lanes && a.vectors == b.vectors;
}

const char* broken_rule(const ForwardSpec& spec, const ForwardPlan& plan, std::int64_t rows,
                        std::int64_t cols, const ForwardPlan& first) {
  const int threads = row_threads(plan, cols);
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output),
                               spec.adds ? size_of(spec.residual) : 0});
  if (plan.pack < 1 || plan.lanes < 1 || plan.vectors < 1) return "no plan";
  if (plan.lanes > 32 || (plan.lanes & (plan.lanes - 1)) != 0) return "lanes";
  if (plan.lanes < 32 && warp_cols < cols) return "a row is not covered";
  if (plan.lanes == 32 && (threads / 32 - 1) * warp_cols >= cols) {
    return "an empty warp";
  }
  if (!same_lanes(plan, first)) return "the lane of an element depends on the rows";
  if (plan.flat_rows > 0) {
    const std::int64_t cta_rows = std::int64_t{256} * plan.flat_rows;
    if (plan.lanes != 1 || plan.threads != 256 || cols * size_of(spec.row) > 16) return "flat rows";
    if (cta_rows * cols * size_of(spec.row) > 48 << 10) return "shared memory of flat rows";
    if (plan.ctas * cta_rows < rows || (plan.ctas - 1) * cta_rows >= rows) return "CTAs";
    return plan.width == cols ? nullptr : "width";
  }
  if (!plan.words && (cols % plan.pack != 0 || plan.pack * widest > 16)) return "vectors";
  if (plan.threads % 32 != 0 || plan.threads > plan.most_threads || plan.most_threads > 512 ||
      plan.threads % threads != 0) {
    return "threads";
  }
  if (threads > 32 && plan.threads != threads) return "several rows of several warps";
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.most_threads > 1536) return "CTAs of an SM";
  if (plan.ctas_per_sm > 32) return "CTAs of an SM";
  if (plan.ahead < 1 || plan.ahead > plan.vectors) return "packs ahead";
  const std::int64_t cta_rows = plan.threads / threads;
  if (plan.ctas * cta_rows < rows || (plan.ctas - 1) * cta_rows >= rows) return "CTAs";
  if (plan.core && (plan.words || cols % (plan.lanes * plan.vectors * plan.pack) != 0))
    return "full";
  if (plan.width != (plan.core ? 0 : cols)) return "width";
  return nullptr;
}

void check(const ForwardSpec& spec, std::int64_t cols) {
  static const std::vector<std::int64_t> kRows = {1, 2, 7, 33, 512, 4097, 100'003, 8'000'001};
  // Only whether the GPU holds all rows depends on the SMs: two sizes for each width, in turn.
  static constexpr std::array kSms = {1, 2, 14, 78, 108, 132, 148, 192};
  ForwardPlan first{};
  for (const std::int64_t turn : {cols % 7 % 4, 4 + cols % 7 % 4}) {  // widths are often even
    DeviceInfo device{};
    device.multiprocessors = kSms[turn];
    for (const std::int64_t rows : kRows) {
      for (const int place : {0, 1, 2, 3}) {
        const RowPlaces places{place % 2 == 0, place < 2};
        const ForwardPlan plan = plan_forward(spec, rows, cols, places, device);
        if (first.lanes == 0) first = plan;
        ++walked;
        if (const char* const rule = broken_rule(spec, plan, rows, cols, first)) {
          report(rule, kernel_name(spec, plan), rows, cols, device);
        }
      }
    }
  }
}

// Every combination of element types that an op may have.
std::vector<ForwardSpec> all_specs() {
  std::vector<ForwardSpec> specs;
  for (const DType row : kTypes) {
    for (const DType input : kTypes) {
      for (const DType output : kTypes) {
        const int doubles =
            (row == DType::kFloat64) + (input == DType::kFloat64) + (output == DType::kFloat64);
        if (doubles != 0 && doubles != 3) continue;
        for (const bool dropout : {false, true}) {
          if (input == row) {
            specs.push_back(
                {NormKind::kLayerNorm, false, dropout, false, input, row, row, row, output});
          }
          for (const DType residual : kTypes) {
            if ((residual == DType::kFloat64) != (row == DType::kFloat64)) continue;
            specs.push_back(
                {NormKind::kRmsNorm, true, dropout, false, input, residual, row, row, output});
          }
        }
      }
    }
  }
  return specs;
}

// --- Forward of long rows ------------------------------------------------------------------------

const char* broken_layout(const ForwardSpec& spec, const LongForwardPlan& plan, std::int64_t cols,
                          bool aligned, const LongForwardPlan& first) {
  const int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output),
                               spec.adds ? size_of(spec.residual) : 0});
  if (plan.pack < 1 || plan.pack > 8 || plan.vectors < 1 || plan.vectors > 16) return "no plan";
  if (!plan.words && (!aligned || cols % plan.pack != 0 || plan.pack * widest > 16))
    return "vectors";
  if (plan.parts < 1 || plan.ahead < 1 || plan.ahead > plan.vectors) return "packs";
  if (plan.pack != first.pack || plan.vectors != first.vectors) {
    return "the part of an element depends on rows, device or addresses";
  }
  return nullptr;
}

const char* broken_launch(const ForwardSpec& spec, const LongForwardPlan& plan, std::int64_t rows,
                          std::int64_t cols, const DeviceInfo& device) {
  const std::int64_t part_cols = std::int64_t{32} * plan.pack * plan.vectors;
  const std::int64_t parts = (cols + part_cols - 1) / part_cols;
  const int warps = plan.threads / 32;
  if (plan.threads < 32 || plan.threads % 32 != 0 || plan.threads > plan.most_threads ||
      plan.most_threads > 512) {
    return "threads";
  }
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.most_threads > 1024) return "CTAs of an SM";
  if (plan.form == LongForm::kStreamed) {
    return plan.threads != 512      ? "warps that share slots"
           : plan.cluster != 0      ? "a streamed row of a cluster"
           : plan.ctas != rows      ? "CTAs"
           : plan.shared_bytes != 0 ? "shared memory"
                                    : nullptr;
  }
  if (parts > 256) return "more parts than slots";
  if (plan.cluster < 1 || plan.cluster > device.max_cluster) return "CTAs of a cluster";
  if (std::int64_t{plan.cluster} * plan.cta_parts < parts) return "a row is not covered";
  if (std::int64_t{plan.cluster - 1} * plan.cta_parts >= parts) return "an empty CTA";
  if (warps * plan.parts != plan.cta_parts) return "warps of a CTA";
  // Static shared memory: the moments of the parts, and barriers.
  const int slot_bytes = spec.row == DType::kFloat64 ? 32 : 16;
  if (plan.form == LongForm::kInTurn) {
    const std::int64_t staged = 4 * plan.cta_parts * part_cols * size_of(spec.row);
    if (spec.adds || plan.words || plan.parts != 1) return "rows that cannot come in turn";
    if (plan.shared_bytes != staged) return "shared memory that rows do not fit into";
    if (staged + 4 * 256 * slot_bytes + 1024 > device.shared_bytes) return "shared memory";
    for (const int active : {1, 7, device.multiprocessors}) {
      const std::int64_t ctas = ctas_in_turn(plan, rows, active);
      if (ctas < plan.cluster || ctas % plan.cluster != 0) return "CTAs in turn";
      if (ctas / plan.cluster > rows) return "a cluster without a row";
    }
    return nullptr;
  }
  if (256 * slot_bytes + 1024 > 48 << 10) return "shared memory";
  return plan.ctas == rows * plan.cluster ? nullptr : "CTAs";
}

void check_long(const ForwardSpec& spec, std::int64_t cols, const std::vector<int>& sms,
                const std::vector<std::int64_t>& row_counts = {1, 2, 7, 19, 33, 67, 265, 530, 2113,
                                                               100'003}) {
  LongForwardPlan first{};
  for (const int max_cluster : {0, 8, 16}) {
    for (const int shared_kib : {64, 99, 227}) {
      for (const int multiprocessors : sms) {
        const DeviceInfo device{0, multiprocessors, shared_kib << 10, max_cluster > 0, max_cluster};
        for (const std::int64_t rows : row_counts) {
          for (const bool aligned : {true, false}) {
            const LongForwardPlan plan = plan_long_forward(spec, rows, cols, aligned, device);
            if (first.pack == 0) first = plan;
            ++walked;
            const char* rule = broken_layout(spec, plan, cols, aligned, first);
            rule = rule == nullptr ? broken_launch(spec, plan, rows, cols, device) : rule;
            if (rule != nullptr) report(rule, kernel_name(spec, plan), rows, cols, device);
          }
        }
      }
    }
  }
}

// A part has some hundred columns, and a plan changes where their number does: widths around
// multiples of 256 columns, densely, and then ever fewer.
void check_long(const ForwardSpec& spec, bool dense) {
  const std::int64_t most = dense ? 70'000 : 40'000;
  const std::int64_t begin = most_forward_cols(spec);
  static const std::vector<int> kSms = {1, 78, 132, 192};
  for (std::int64_t cols = begin + 1; cols <= most; cols += dense ? 1 : 250) {
    check_long(spec, cols, {kSms[cols % 7 % 4]});
    check_long(spec, cols + cols % 7, {kSms[3 - cols % 7 % 4]});
  }
  for (std::int64_t cols = begin / 256 * 256 + 256; cols <= 300'000; cols += 256) {
    for (const std::int64_t near : {-1, 0, 8}) check_long(spec, cols + near, {132});
  }
  for (std::int64_t cols = 300'000; cols <= 4 << 20; cols += cols / 50) {
    check_long(spec, cols, {132});
  }
  if (dense) {
    // Every number of parts that slots suffice for, and a few more, beside every share of the GPU
    // that a row may get.
    std::vector<std::int64_t> row_counts;
    for (std::int64_t rows = 1; rows <= 132; rows += rows < 20 ? 1 : 4) row_counts.push_back(rows);
    for (int ctas = 1; ctas <= 16; ++ctas) {  // of a cluster: the most rows that are few, one more
      for (const int more : {0, 1}) row_counts.push_back(132 * 4 / ctas + more);
    }
    const LongForwardPlan any = plan_streamed(spec, 1, begin + 8, true);
    const std::int64_t part_cols = std::int64_t{32} * any.pack * any.vectors;
    for (std::int64_t parts = begin / part_cols + 1; parts <= 256 + 64; ++parts) {
      check_long(spec, parts * part_cols, {132}, row_counts);
      check_long(spec, parts * part_cols - part_cols + 1, {132}, row_counts);
    }
    for (int sms = 1; sms <= 192; ++sms) {
      for (const std::int64_t cols : {16'392, 20'480, 65'536, 131'071, 262'144}) {
        if (cols > begin) check_long(spec, cols, {sms});
      }
    }
  }
}

// --- Backward ------------------------------------------------------------------------------------

// What a call has beside its types.
struct Call {
  std::int64_t rows;
  std::int64_t cols;
  Move move;
  bool wants_sums;
  bool adds_sums;
};

// Bytes of a column in shared memory, of one row.
int staged_column(const BackwardSpec& spec) {
  return size_of(read_as_x(spec)) + size_of(spec.grad_output) + (spec.adds ? size_of(spec.row) : 0);
}

int widest_stream(const BackwardSpec& spec) {
  int widest = std::max({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.input)});
  return spec.adds ? std::max({widest, size_of(spec.row), size_of(spec.residual)}) : widest;
}

// Columns of 16 bytes of the narrowest stream.
int unit(const BackwardSpec& spec) {
  int narrowest =
      std::min({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.input)});
  if (spec.adds) {
    narrowest = std::min({narrowest, size_of(spec.row), size_of(spec.residual)});
  }
  return 16 / narrowest;
}

// Whether a row need not fit: it is longer than the kernel has lanes for, or two rows in flight
// leave no room in the share of a CTA. The grid of lanes and the parameters take a third on top.
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
  if (plan.width != call.cols && !is_core(spec, plan, call)) return "width";
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
  if (plan.ctas < 1 || plan.ctas > most_ctas) return "CTAs";
  if ((plan.ctas - 1) * plan.side_by_side >= call.rows) return "an empty CTA";
  if (plan.ctas < most_ctas && plan.ctas * plan.side_by_side < call.rows) return "an idle SM";
  const int grads = spec.norm == NormKind::kLayerNorm ? 2 : 1;
  const bool partials = call.wants_sums && (plan.ctas > 1 || call.adds_sums);
  const std::int64_t bytes =
      plan.ctas * grads * ((call.cols + 7) / 8 * 8) * (spec.row == DType::kFloat64 ? 8 : 4);
  return plan.partials_bytes == (partials ? bytes : 0) ? nullptr : "bytes of partial sums";
}

// Few rows, beside the plan of many of the same width.
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
  if (threads < 128 || threads > 512 || threads % 32 != 0) return "threads of few rows";
  if (plan.lanes < 32 && plan.row_threads != plan.lanes) return "rows that share a warp";
  if (plan.move == Move::kWholeWords) return "move of few rows";
  if ((plan.move == Move::kVectors) != (many.move == Move::kVectors)) return "move of few rows";
  const std::int64_t rows = plan.row_ctas * plan.side_by_side;
  if (wants_rows ? rows < call.rows || rows - plan.side_by_side >= call.rows : rows != 0) {
    return "CTAs of few rows";
  }
  const int own = 16 / std::max(size_of(read_as_x(spec)), size_of(spec.grad_output));
  if (own % plan.pack != 0) return "packs of a slab";
  const std::int64_t cols = plan.slabs * 8 * own;
  if (call.wants_sums ? cols < call.cols || cols - 8 * own >= call.cols : cols != 0) return "slabs";
  return plan.row_ctas + plan.slabs > 0 ? nullptr : "an empty grid";
}

// Rows of any length, those that fit into a CTA too.
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

void check(const BackwardSpec& spec, std::int64_t cols) {
  // Shared memory decides the tile, SMs and rows how many rows a CTA has: two GPUs of each size of
  // shared memory and four numbers of rows, in turn.
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
    const DeviceInfo& device = of_size[cols % 7 % 2];
    int plans = 0;
    int calls = 0;
    for (const std::int64_t rows : kRows[cols % 5 % 2]) {
      for (const Move move : {Move::kVectors, Move::kWords, Move::kWholeWords}) {
        // What the two decide does not depend on the row: in turn.
        const Call call{rows, cols, move, cols % 2 == 0, cols % 3 == 0};
        const BackwardPlan plan =
            plan_backward(spec, rows, cols, move, call.wants_sums, call.adds_sums, device);
        ++walked;
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
          fews += few.lanes > 0 ? 1 : 0;
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

// Long rows, and what a launch makes of them on GPUs with clusters of 16 CTAs, of 8, and without.
void check_long(const BackwardSpec& spec, std::int64_t cols) {
  BackwardLongPlan first{};
  for (const auto [multiprocessors, shared_kib, most_cluster] :
       {std::array{1, 64, 0}, std::array{40, 99, 0}, std::array{108, 163, 0},
        std::array{132, 227, 16}, std::array{148, 227, 16}, std::array{192, 99, 8},
        std::array{2, 227, 16}}) {
    DeviceInfo device = gpu(multiprocessors, shared_kib);
    device.max_cluster = most_cluster;
    device.sm_90 = most_cluster > 0;
    for (const std::int64_t rows : {1, 7, 31, 32, 200, 4097, 8'000'001}) {
      for (const Move move : {Move::kVectors, Move::kWords, Move::kWholeWords}) {
        const Call call{rows, cols, move, cols % 3 != 0 || rows % 2 == 0, rows % 3 == 0};
        const BackwardLongPlan plan =
            plan_backward_long(spec, rows, cols, move, call.wants_sums, call.adds_sums, device);
        if (first.pack == 0) first = plan;
        ++walked;
        clustered += plan.cluster > 0 ? 1 : 0;
        if (const char* const rule = broken_rule(spec, plan, call, device, first)) {
          report(rule, columns_kernel_name(spec, plan), rows, cols, device);
        }
      }
    }
  }
}

// Every combination of element types and options. float16 is left out: plans know sizes alone.
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

int main() {
  for (const ForwardSpec& spec : all_specs()) {
    const std::int64_t most = most_forward_cols(spec);
    for (std::int64_t cols = 1; cols <= most; cols += cols < 2100 ? 1 : 7) {
      check(spec, cols);
    }
    check(spec, most);
  }
  const long long forward = walked;
  bool dense = true;  // of the first two: all depends on sizes alone
  for (const ForwardSpec& spec : all_specs()) {
    check_long(spec, dense);
    dense = spec.norm == NormKind::kLayerNorm && spec.row == DType::kFloat16 && dense;
  }
  const long long of_long_rows = walked - forward;
  for (const BackwardSpec& spec : all_backward_specs()) {
    for (std::int64_t cols = 1; cols <= 17'000; ++cols) {
      check(spec, cols);
    }
  }
  const long long backward = walked - forward - of_long_rows;
  for (const BackwardSpec& spec : all_backward_specs()) {
    for (std::int64_t cols = 1; cols <= 600'000; cols += cols < 200      ? 1
                                                         : cols < 40'000 ? 127
                                                                         : 2039) {
      check_long(spec, cols);
      check_long(spec, (cols + 15) / 16 * 16);
    }
    check_long(spec, 5'000'000'000);
  }
  std::printf(
      "%lld plans of forward, %lld of long rows, %lld of backward, %lld of long rows, %d broken; "
      "%lld calls had few rows, %lld clusters\n",
      forward, of_long_rows, backward, walked - forward - of_long_rows - backward, found, fews,
      clustered);
  return found == 0 && fews > 0 && clustered > 0 ? 0 : 1;
}
