// Makes the plan of forward for every width, many numbers of rows, all element types and GPUs of 1
// to 192 multiprocessors, and prints those that break a rule. Compiled with csrc/cuda/plan.cpp of
// the checkout: g++ -std=c++20 -Icsrc tests/plans.cpp csrc/cuda/plan.cpp
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/plan.h"

using namespace fused_op;
using namespace fused_op::cuda;

namespace {

int found = 0;
long long walked = 0;

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

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
        const char* const rule = broken_rule(spec, plan, rows, cols, first);
        if (rule != nullptr && ++found <= 20) {
          std::printf("%s: %s, %lld rows of %lld columns, %d multiprocessors\n", rule,
                      kernel_name(spec, plan).c_str(), static_cast<long long>(rows),
                      static_cast<long long>(cols), multiprocessors);
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

}  // namespace

int main() {
  for (const ForwardSpec& spec : all_specs()) {
    const std::int64_t most = most_forward_cols(spec);
    for (std::int64_t cols = 1; cols <= most; cols += cols < 2100 ? 1 : 7) {
      check(spec, cols);
    }
    check(spec, most);
  }
  std::printf("%lld plans, %d broken\n", walked, found);
  return found == 0 ? 0 : 1;
}
