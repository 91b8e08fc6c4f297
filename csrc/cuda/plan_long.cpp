// Plans of the forward of rows too long for the registers of a CTA: see plan.h. Host code without
// CUDA or torch.
#include <algorithm>

#include "core/pack.h"
#include "cuda/forward_layout.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kMaxWarps = 16;  // of a CTA
constexpr int kWarps = 8;      // of a CTA that shares its SM with others

// A lane has four units of a part, or two of float64. If rows move by words, it has the same number
// of elements, but only 16 of a 32-bit row beside narrower streams.
void deal_parts(const ForwardSpec& spec, std::int64_t cols, LongForwardPlan& plan) {
  const Deal deal = deal_of(spec);
  const int size = size_of(spec.row);
  if (by_words(spec, cols)) {
    plan.pack = size == 2 ? 2 : 1;
    plan.vectors = size == 8 ? 8 : 16;
  } else {
    plan.pack = deal.pack;
    plan.vectors = (size == 8 ? 2 : 4) * deal.unit / deal.pack;
  }
}

std::int64_t part_cols(const LongForwardPlan& plan) {
  return std::int64_t{kWarpSize} * plan.pack * plan.vectors;
}

// Whether only the row is read, in vectors of 16 bytes.
bool is_even_plain(const ForwardSpec& spec, const LongForwardPlan& plan) {
  return !plan.words && !spec.adds && plan.pack * size_of(spec.input) == kVectorBytes &&
         spec.output == spec.row;
}

// The fewest CTAs that hold the parts of a row, with at most so many warps. None of them is without
// a part.
bool lay_over_cluster(std::int64_t parts, int most_warps, int most_ctas, LongForwardPlan& plan) {
  const std::int64_t least = ceil_div(parts, std::int64_t{most_warps} * plan.parts);
  if (least > most_ctas) {
    return false;
  }
  const std::int64_t warps = ceil_div(parts, least * plan.parts);
  plan.cta_parts = static_cast<int>(warps) * plan.parts;
  plan.cluster = static_cast<int>(ceil_div(parts, plan.cta_parts));
  plan.threads = static_cast<int>(warps) * kWarpSize;
  return true;
}

// CTAs of 256 threads on an SM, from the registers that a thread needs: with four CTAs it has 64,
// with three 80, with two 128. H200, bf16, us with three and with four: 279 264 at 4096x32768,
// LayerNorm with a residual; 275 222 at 4096x32767, RMSNorm.
int many_ctas_per_sm(const ForwardSpec& spec, std::int64_t parts, bool odd,
                     const LongForwardPlan& plan, const DeviceInfo& device) {
  const bool centred = spec.norm == NormKind::kLayerNorm;
  const bool is_double = spec.row == DType::kFloat64;
  if (plan.parts == 2) {
    const bool narrow = size_of(spec.parameters) == size_of(spec.row);
    const bool fit = spec.row == DType::kFloat32 && !spec.dropout && narrow;  // four
    // A cluster of sixteen needs its place on the SMs of one part of the GPU. Share of copy with
    // four and with three: 0.90 0.94 at 1024x131072, 0.96 0.98 at 8192x16384, but 0.99 0.96 at
    // 4096x32768 (H100, fp32, LayerNorm).
    const std::int64_t ctas = ceil_div(parts, std::int64_t{kWarps} * plan.parts);
    return fit && ctas <= 8 && (ctas > 2 || device.fast_memory) ? 4 : 3;
  }
  const bool mixed = deal_of(spec).unit != deal_of(spec).pack;
  if (plan.words || spec.dropout || is_double || (mixed && spec.adds)) {
    const int extras = int{spec.adds} + int{spec.dropout} + int{plan.words};
    const bool wide_input = spec.input == DType::kFloat32 && size_of(spec.output) == 2;
    const bool heavy = mixed ? extras > 1 || (spec.adds && wide_input) : spec.adds && odd;
    const bool light = odd && !centred && extras == 1 && !is_double && !mixed;
    return light ? 4 : heavy ? 2 : 3;
  }
  return 4;
}

// The plan for many rows. A lane has two parts if it holds nothing else.
bool plan_many(const ForwardSpec& spec, std::int64_t parts, bool odd, const DeviceInfo& device,
               LongForwardPlan& plan) {
  plan.form = LongForm::kCluster;
  plan.parts = is_even_plain(spec, plan) ? 2 : 1;
  // Share of copy with one pack of parameters in flight and with two: 0.95 0.98 at 4096x32768,
  // bf16, RMSNorm.
  plan.ahead = plan.parts == 2 && size_of(spec.row) == 2 && !spec.dropout ? 2 : 1;
  plan.most_threads = kWarps * kWarpSize;
  plan.ctas_per_sm = many_ctas_per_sm(spec, parts, odd, plan, device);
  return lay_over_cluster(parts, kWarps, device.max_cluster, plan);
}

// The plan for few rows, which are each spread over enough CTAs to fill the GPU, with four parts or
// more in each CTA; and for rows that need more than CTAs of 256 threads.
bool plan_few(std::int64_t parts, std::int64_t rows, const DeviceInfo& device,
              LongForwardPlan& plan) {
  plan.form = LongForm::kCluster;
  plan.parts = 1;
  plan.ahead = std::min(plan.vectors, 4);
  plan.most_threads = kMaxWarps * kWarpSize;
  plan.ctas_per_sm = 1;
  const std::int64_t least = ceil_div(parts, kMaxWarps);
  if (least > device.max_cluster) {
    return false;
  }
  // us in clusters of 16 and of 8: 2.52 2.35 at 8x65536 (H200, bf16, LayerNorm).
  const std::int64_t most = std::max(least, std::min<std::int64_t>(8, parts / 4));
  const std::int64_t wanted = std::clamp(ceil_div(device.multiprocessors, rows), least, most);
  return lay_over_cluster(parts, static_cast<int>(ceil_div(parts, wanted)), device.max_cluster,
                          plan);
}

// The plan for rows in turn. Each warp has one part of a row.
bool plan_in_turn(const ForwardSpec& spec, std::int64_t parts, std::int64_t cols, bool few_turns,
                  const DeviceInfo& device, LongForwardPlan& plan) {
  // Rows in shared memory, us with three and with four: RMSNorm 128 133 at 512x262144, LayerNorm
  // 10.3 11.6 at 256x32768, but 145 137 at 2048x65536 (H200, bf16).
  plan.ahead = spec.norm == NormKind::kLayerNorm && !few_turns ? 4 : 3;
  const std::int64_t stage_bytes = plan.ahead * part_cols(plan) * size_of(spec.row);  // of one part
  const std::int64_t room = (most_dynamic_shared(device) - kInTurnOwn) / stage_bytes;
  const std::int64_t most_parts = std::min<std::int64_t>(kMaxWarps, room);
  if (most_parts < 1 || ceil_div(parts, most_parts) > device.max_cluster) {
    return false;
  }
  std::int64_t ctas = ceil_div(parts, most_parts);
  const std::int64_t half = ceil_div(parts, 2 * ctas);
  // Halve the CTAs if that lets more than twice as many run side by side: three of five warps
  // instead of one of ten.
  if (2 * ctas <= device.max_cluster &&
      kMaxWarps / half > 2 * (kMaxWarps / ceil_div(parts, ctas))) {
    ctas *= 2;
  }
  // The GPU runs almost as many clusters of sixteen CTAs as of nine.
  ctas = ctas > 8 ? device.max_cluster : ctas;
  plan.form = LongForm::kInTurn;
  plan.parts = 1;
  plan.most_threads = kMaxWarps * kWarpSize;
  plan.ctas_per_sm = 1;
  lay_over_cluster(parts, static_cast<int>(ceil_div(parts, ctas)), device.max_cluster, plan);
  plan.shared_bytes = stage_bytes * plan.cta_parts;
  // us without a constant and with it: 147 139 at 6553x20480 (H200, bf16, LayerNorm).
  const bool whole = cols % part_cols(plan) == 0 && parts % plan.cta_parts == 0;
  plan.row_parts = whole ? static_cast<int>(parts) : 0;
  return true;
}

// Whether rows in turn are faster than one cluster for each row: if memory is fast, and there is
// much to compute, clusters are large, or there are only enough rows for a few turns. H200, bf16,
// us with a cluster for each row and in turn: 12.3 9.1 at 256x32768; RMSNorm, 9.9 7.3. On an H100,
// share of copy: 1.00 0.89 at 4096x32768; RMSNorm, 1.00 0.94 at 1024x131072.
bool turns_pay(const ForwardSpec& spec, bool few_turns, const LongForwardPlan& many,
               const DeviceInfo& device) {
  const bool can = is_even_plain(spec, many) && !spec.dropout && spec.row != DType::kFloat64;
  const bool centred = spec.norm == NormKind::kLayerNorm && size_of(spec.row) == 2;
  return can && device.fast_memory && (centred || many.cluster >= 8 || few_turns);
}

}  // namespace

LongForwardPlan plan_streamed(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                              bool aligned) {
  LongForwardPlan plan{};
  deal_parts(spec, cols, plan);
  plan.words = by_words(spec, cols) || !aligned;
  plan.form = LongForm::kStreamed;
  plan.parts = 1;
  plan.ahead = 2;
  plan.most_threads = plan.threads = kMaxWarps * kWarpSize;
  plan.ctas_per_sm = 1;
  plan.ctas = rows;
  return plan;
}

LongForwardPlan plan_long_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                  bool aligned, const DeviceInfo& device) {
  const LongForwardPlan streamed = plan_streamed(spec, rows, cols, aligned);
  const std::int64_t parts = ceil_div(cols, part_cols(streamed));
  if (parts > kMaxSlots || device.max_cluster == 0) {
    return streamed;
  }
  LongForwardPlan plan = streamed;
  const bool has_many = plan_many(spec, parts, by_words(spec, cols), device, plan);
  // All rows are on the GPU at once, so latency counts.
  const bool few = has_many && rows * plan.cluster <= std::int64_t{device.multiprocessors} * 2;
  const bool few_turns = rows * plan.cluster <= std::int64_t{device.multiprocessors} * 4;
  if (has_many && !few && turns_pay(spec, few_turns, plan, device)) {
    LongForwardPlan in_turn = streamed;
    if (plan_in_turn(spec, parts, cols, few_turns, device, in_turn)) {
      in_turn.ctas = in_turn.cluster;
      return in_turn;
    }
  }
  if (!has_many || few) {
    LongForwardPlan spread = streamed;
    if (plan_few(parts, rows, device, spread)) {
      plan = spread;
    } else if (!has_many) {
      return streamed;
    }
  }
  plan.ctas = rows * plan.cluster;
  return plan;
}

std::int64_t ctas_in_turn(const LongForwardPlan& plan, std::int64_t rows, int active) {
  std::int64_t clusters = std::int64_t{active} * (kMaxWarps / plan.cta_parts);  // side by side
  // The largest CTAs run in two waves; one begins where the other ends.
  if (plan.cluster <= 2 && plan.cta_parts == kMaxWarps && rows >= clusters * 32) {
    clusters = ceil_div(rows, ceil_div(rows, 2 * clusters));
  }
  return std::min(clusters, rows) * plan.cluster;
}

const char* header_of(const LongForwardPlan& plan) {
  switch (plan.form) {
    case LongForm::kCluster:
      return kForwardClusterHeader;
    case LongForm::kInTurn:
      return kForwardInTurnHeader;
    case LongForm::kStreamed:
      break;
  }
  return kForwardStreamedHeader;
}

std::string kernel_name(const ForwardSpec& spec, const LongForwardPlan& plan) {
  const std::string form = plan.form == LongForm::kCluster  ? "cluster"
                           : plan.form == LongForm::kInTurn ? "in_turn"
                                                            : "streamed";
  const std::string tile =
      "fused_op::cuda::LongTile" +
      joined({number(plan.pack), number(plan.vectors), number(plan.parts), number(plan.ahead),
              number(plan.most_threads), number(plan.ctas_per_sm), number(plan.row_parts)});
  return "fused_op::cuda::forward_" + form + "_kernel<" + op_name(spec, plan.words) + ", " + tile +
         ">";
}

}  // namespace fused_op::cuda
