// Makes the plans of forward and backward for every width, many numbers of rows, all element types
// and GPUs of 1 to 192 SMs, and prints those that break a rule. Compiled with the planner of the
// checkout: g++ -std=c++20 -Icsrc tests/plans.cpp csrc/cuda/plan.cpp csrc/cuda/plan_backward.cpp
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/backward_tile.h"
#include "cuda/plan.h"

using namespace fused_op;
using namespace fused_op::cuda;

namespace {

int found = 0;
long long walked = 0;

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void report(const char* rule, const std::string& name, std::int64_t rows, std::int64_t cols,
            const DeviceInfo& device) {
  if (rule != nullptr && ++found <= 20) {
    std::printf("%s: %s, %lld rows of %lld columns, %d SMs of %d bytes\n", rule, name.c_str(),
                static_cast<long long>(rows), static_cast<long long>(cols), device.multiprocessors,
                device.shared_bytes);
  }
}

// --- Forward -------------------------------------------------------------------------------------

int row_threads(const ForwardPlan& plan, std::int64_t cols) {
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const std::int64_t warps = plan.lanes < 32 ? 1 : (cols + warp_cols - 1) / warp_cols;
  return static_cast<int>(warps) * plan.lanes * plan.spread;
}

// Which lane of which warp has an element, as numbers.
bool same_lanes(const ForwardPlan& a, const ForwardPlan& b) {
  return a.pack == b.pack && a.lanes == b.lanes && a.vectors * a.spread == b.vectors * b.spread;
}

const char* broken_rule(const ForwardSpec& spec, const ForwardPlan& plan, std::int64_t rows,
                        std::int64_t cols, const ForwardPlan& first) {
  const int threads = row_threads(plan, cols);
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output),
                               spec.adds ? size_of(spec.residual) : 0});
  if (plan.pack < 1 || plan.lanes < 1 || plan.vectors < 1 || plan.spread < 1) return "no plan";
  if (plan.lanes > 32 || (plan.lanes & (plan.lanes - 1)) != 0) return "lanes";
  if (plan.lanes < 32 && warp_cols < cols) return "a row is not covered";
  if (plan.lanes == 32 && (threads / 32 / plan.spread - 1) * warp_cols * plan.spread >= cols) {
    return "an empty warp";
  }
  if (!plan.words && (cols % plan.pack != 0 || plan.pack * widest > 16)) return "vectors";
  if (plan.threads % 32 != 0 || plan.threads > 512 || plan.threads % threads != 0) return "threads";
  if (threads > 32 && plan.threads != threads) return "several rows of several warps";
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.threads > 1536) return "CTAs of an SM";
  if (plan.ctas_per_sm > 32) return "CTAs of an SM";
  if (plan.ahead < 1 || plan.ahead > plan.vectors) return "packs ahead";
  const std::int64_t cta_rows = plan.threads / threads;
  if (plan.ctas * cta_rows < rows || (plan.ctas - 1) * cta_rows >= rows) return "CTAs";
  if (plan.width != cols) return "width";
  if (!same_lanes(plan, first)) return "the lane of an element depends on the rows";
  return nullptr;
}

void check(const ForwardSpec& spec, std::int64_t cols) {
  static const std::vector<std::int64_t> kRows = {1, 2, 7, 33, 512, 4097, 100'003, 8'000'001};
  ForwardPlan first{};
  for (const int multiprocessors : {1, 2, 14, 78, 108, 132, 148, 192}) {
    DeviceInfo device{};
    device.multiprocessors = multiprocessors;
    for (const std::int64_t rows : kRows) {
      for (const bool aligned : {true, false}) {
        const ForwardPlan plan = plan_forward(spec, rows, cols, aligned, device);
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

// --- Backward ------------------------------------------------------------------------------------

// What a call has beside its types.
struct Call {
  std::int64_t rows;
  std::int64_t cols;
  Move move;
  bool wants_sums;
  bool adds_sums;
};

DType read_as_x(const BackwardSpec& spec) { return spec.recovers ? spec.grad_output : spec.row; }

// Bytes of a column in shared memory, of one row.
int staged_column(const BackwardSpec& spec) {
  return size_of(read_as_x(spec)) + size_of(spec.grad_output) + (spec.adds ? size_of(spec.row) : 0);
}

int widest_stream(const BackwardSpec& spec) {
  int widest = std::max({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.input)});
  return spec.adds ? std::max({widest, size_of(spec.row), size_of(spec.residual)}) : widest;
}

// Whether a row need not fit: it is longer than the kernel has lanes for, or two rows in flight
// leave no room in the share of a CTA. The grid of lanes and the parameters take a third on top.
bool may_be_too_long(const BackwardSpec& spec, std::int64_t cols, const DeviceInfo& device) {
  const std::int64_t most_cols = spec.row == DType::kFloat64 ? 4096 : 16384;
  const int parameters = std::max(size_of(spec.parameters), 4) * (spec.recovers ? 2 : 1);
  const std::int64_t bytes = (2 * staged_column(spec) + parameters) * cols * 4 / 3;
  return cols > most_cols || bytes > most_dynamic_shared(device);
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
  if (plan.width != call.cols) return "width";
  const bool whole = call.cols % plan.pack == 0 && plan.pack * widest_stream(spec) <= 16;
  if (plan.move == Move::kVectors && !whole) return "vectors";
  const bool odd = call.cols % 8 != 0 && call.move == Move::kVectors;
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
  if (plan.most_threads % 32 != 0 || plan.most_threads > 512) return "threads of a tile";
  if (threads < 32 || threads % 32 != 0 || threads > plan.most_threads) return "threads";
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.most_threads > 1024) return "CTAs of an SM";
  if (plan.keep != kKeepNothing && plan.keep != kKeepPacks && plan.keep != kKeepValues) {
    return "what is kept";
  }
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

DeviceInfo gpu(int multiprocessors, int shared_kib) {
  DeviceInfo device{};
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_kib << 10;
  return device;
}

void check(const BackwardSpec& spec, std::int64_t cols) {
  static const std::vector<DeviceInfo> kDevices = {gpu(1, 64),   gpu(14, 64),   gpu(40, 99),
                                                   gpu(78, 163), gpu(108, 163), gpu(132, 227),
                                                   gpu(192, 99), gpu(192, 227)};
  BackwardPlan first{};
  for (const DeviceInfo& device : kDevices) {
    int plans = 0;
    int calls = 0;
    for (const std::int64_t rows : {1, 7, 33, 512, 4097, 8'000'001}) {
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
  for (const BackwardSpec& spec : all_backward_specs()) {
    for (std::int64_t cols = 1; cols <= 17'000; ++cols) {
      check(spec, cols);
    }
  }
  std::printf("%lld plans of forward, %lld of backward, %d broken\n", forward, walked - forward,
              found);
  return found == 0 ? 0 : 1;
}
