// The rules that plans of forward keep, and the calls that are checked against them. Run by
// plans.cpp.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cuda/plan_names.h"
#include "plans.h"

namespace fused_op::cuda {
namespace {

int row_threads(const ForwardPlan& plan, std::int64_t cols) {
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const std::int64_t warps = plan.lanes < 32 ? 1 : (cols + warp_cols - 1) / warp_cols;
  return static_cast<int>(warps) * plan.lanes;
}

// Bytes of the widest element that a variant reads beside the row, or as parameters of its own.
int widest_beside(const ForwardSpec& spec) {
  int widest = 0;
  if (spec.variant != nullptr) {
    for (const ConstRows* rows : read_in_packs(*spec.variant)) {
      widest = std::max(widest, size_of(rows->dtype));
    }
  }
  return widest;
}

const char* broken_rule(const ForwardSpec& spec, const ForwardPlan& plan, std::int64_t rows,
                        std::int64_t cols, const ForwardPlan& first) {
  const int threads = row_threads(plan, cols);
  const std::int64_t warp_cols = std::int64_t{plan.lanes} * plan.vectors * plan.pack;
  const int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output),
                               spec.adds ? size_of(spec.residual) : 0, widest_beside(spec)});
  if (plan.pack < 1 || plan.lanes < 1 || plan.vectors < 1) return "no plan";
  // Words of two elements go to the next lane by shuffles among a power of two of them.
  const bool groups = (plan.lanes & (plan.lanes - 1)) != 0;
  if (plan.lanes > 32 || (groups && (plan.flat_rows > 0 || cols % plan.pack != 0))) return "lanes";
  if (plan.lanes < 32 && warp_cols < cols) return "a row is not covered";
  if (plan.lanes == 32 && (threads / 32 - 1) * warp_cols >= cols) {
    return "an empty warp";
  }
  if (!same_lanes(plan, first, cols)) {
    return "the lane of an element depends on rows or options";
  }
  if (plan.flat_rows > 0) {
    const std::int64_t cta_rows = std::int64_t{256 / plan.flat_threads} * plan.flat_rows;
    const std::int64_t bytes = cols * size_of(spec.row);
    if (plan.flat_threads > plan.lanes || plan.lanes % plan.flat_threads != 0) return "flat rows";
    if (threads > 32 || plan.flat_rows > 32 || plan.threads != 256) return "flat rows";
    if (cols > (plan.pack * size_of(spec.row) == 16 ? 48 : 256)) return "flat rows";
    if (plan.ctas_per_sm < 1 || plan.ctas_per_sm > 5) return "CTAs of an SM";
    if (plan.vector_rows > 0) {
      if (plan.vector_rows * bytes != 16 || plan.flat_threads > 1) return "rows of a vector";
      if (plan.flat_rows % plan.vector_rows != 0) return "a vector in part";
    }
    if (cta_rows * bytes > 32 << 10) return "shared memory of flat rows";
    if (cta_rows * bytes % 16 != 0) return "the first row of a CTA";
    if (plan.ctas * cta_rows < rows || (plan.ctas - 1) * cta_rows >= rows) return "CTAs";
    return plan.width == cols ? nullptr : "width";
  }
  if (!plan.words && (cols % plan.pack != 0 || plan.pack * widest > 16)) return "vectors";
  if (plan.threads % 32 != 0 || plan.threads > plan.most_threads || plan.most_threads > 512) {
    return "threads";
  }
  if (threads > 32 && plan.threads != threads) return "several rows of several warps";
  if (plan.ctas_per_sm < 1 || plan.ctas_per_sm * plan.most_threads > 1536) return "CTAs of an SM";
  if (plan.ctas_per_sm > 32) return "CTAs of an SM";
  if (plan.ahead < 1 || plan.ahead > plan.vectors) return "packs ahead";
  const int cta_rows = threads > 32 ? 1 : plan.threads / 32 * (32 / threads);
  if (plan.ctas * cta_rows < rows || (plan.ctas - 1) * cta_rows >= rows) return "CTAs";
  if (plan.words && threads < 32 && plan.threads % 64 != 0) return "an odd number of warps";
  if (plan.core && (plan.words || cols % (plan.lanes * plan.vectors * plan.pack) != 0))
    return "full";
  if (plan.width != (plan.core ? 0 : cols)) return "width";
  return nullptr;
}

bool has_one_type(const ForwardSpec& spec) {
  return spec.input == spec.row && (!spec.adds || spec.residual == spec.row);
}

// A call of the same types that does nothing but normalise.
ForwardSpec without_options(ForwardSpec spec) {
  spec.adds = spec.dropout = spec.split = false;
  return spec;
}

}  // namespace

bool same_lanes(const ForwardPlan& a, const ForwardPlan& b, std::int64_t cols) {
  return (a.pack == b.pack || cols == 1) && a.lanes == b.lanes && a.vectors == b.vectors;
}

void check_forward(const ForwardSpec& spec, std::int64_t cols) {
  static const std::vector<std::int64_t> kRows = {1, 2, 7, 33, 512, 4097, 100'003, 8'000'001};
  // Only whether the GPU holds all rows depends on the SMs, so each width takes two sizes in turn.
  static constexpr std::array kSms = {1, 2, 14, 78, 108, 132, 148, 192};
  ForwardPlan first{};
  if (spec.variant == nullptr && has_one_type(spec)) {
    first = plan_forward(without_options(spec), 1, cols, {true, true}, DeviceInfo{});
  }
  for (const std::int64_t turn : {cols % 7 % 4, 4 + cols % 7 % 4}) {  // widths are often even
    DeviceInfo device{};
    device.multiprocessors = kSms[turn];
    for (const std::int64_t rows : kRows) {
      for (const int place : {0, 1, 2, 3}) {
        const RowPlaces places{place % 2 == 0, place < 2, (rows + place) % 2 == 0};
        const ForwardPlan plan = plan_forward(spec, rows, cols, places, device);
        if (first.lanes == 0) first = plan;
        ++counts.walked;
        if (const char* const rule = broken_rule(spec, plan, rows, cols, first)) {
          report(rule, kernel_name(spec, plan), rows, cols, device);
        }
      }
    }
  }
}

namespace {

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
          for (const bool split : {false, true}) {
            if (input == row) {
              specs.push_back({NormKind::kLayerNorm, false, dropout, split, false, input, row, row,
                               row, output});
            }
          }
          for (const DType residual : kTypes) {
            if ((residual == DType::kFloat64) != (row == DType::kFloat64)) continue;
            const bool halves = size_of(input) == 2 && !dropout;  // those that round x̂ first
            specs.push_back({NormKind::kRmsNorm, true, dropout, false, halves, input, residual, row,
                             row, output});
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
  if (plan.row_parts > 0) {
    const std::int64_t part = std::int64_t{32} * plan.pack * plan.vectors;
    if (plan.form != LongForm::kInTurn || plan.words) return "whole parts";
    if (plan.row_parts * part != cols || plan.row_parts % plan.cta_parts != 0) return "whole parts";
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
  // Static shared memory holds the moments of the parts, and barriers.
  const int slot_bytes = spec.row == DType::kFloat64 ? 32 : 16;
  if (plan.form == LongForm::kInTurn) {
    const std::int64_t staged =
        std::int64_t{plan.ahead} * plan.cta_parts * part_cols * size_of(spec.row);
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
        DeviceInfo device{0, multiprocessors, shared_kib << 10, max_cluster};
        for (const std::int64_t rows : row_counts) {
          device.fast_memory = (rows + cols) % 2 == 0;  // decides nothing about a row's parts
          for (const bool aligned : {true, false}) {
            const LongForwardPlan plan = plan_long_forward(spec, rows, cols, aligned, device);
            if (first.pack == 0) first = plan;
            ++counts.walked;
            const char* rule = broken_layout(spec, plan, cols, aligned, first);
            rule = rule == nullptr ? broken_launch(spec, plan, rows, cols, device) : rule;
            if (rule != nullptr) report(rule, kernel_name(spec, plan), rows, cols, device);
          }
        }
      }
    }
  }
}

// A part has some hundred columns, and a plan changes where the number of parts does. Hence the
// widths around multiples of 256 columns: many at first, and then ever fewer.
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
    // Every number of parts that the slots suffice for, and a few more, with every share of the GPU
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

}  // namespace

void walk_forward() {
  for (const ForwardSpec& spec : all_specs()) {
    const std::int64_t most = most_forward_cols(spec);
    for (std::int64_t cols = 1; cols <= most; cols += cols < 2100 ? 1 : 7) {
      check_forward(spec, cols);
    }
    check_forward(spec, most);
  }
}

void walk_long_forward() {
  bool dense = true;  // for the first two specs: all depends on sizes alone
  for (const ForwardSpec& spec : all_specs()) {
    check_long(spec, dense);
    dense = spec.norm == NormKind::kLayerNorm && spec.row == DType::kFloat16 && dense;
  }
}

}  // namespace fused_op::cuda
