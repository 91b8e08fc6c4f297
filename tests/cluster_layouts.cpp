// Walks through every layout of a long row over a cluster and prints those that break a rule. The
// layouts are those of the checkout that is compiled: g++ -std=c++20 -Icsrc
// tests/cluster_layouts.cpp
#include <cstdio>
#include <set>

#include "cuda/cluster_layout.h"

using namespace fused_op::cuda;

namespace {

int found = 0;
long long walked = 0;

void check(const char* kernel, const ClusterLayout& layout, std::int64_t parts, std::int64_t rows,
           const DeviceInfo& device, std::int64_t warps, std::int64_t most_warps,
           std::size_t shared_bytes, std::size_t most_shared_bytes) {
  ++walked;
  const bool covered = layout.ctas * layout.cta_parts >= parts;
  const bool none_empty = (layout.ctas - 1) * layout.cta_parts < parts;
  const bool fits = layout.ctas <= device.max_cluster && warps >= 1 && warps <= most_warps &&
                    shared_bytes <= most_shared_bytes;
  if (!(covered && none_empty && fits) && ++found <= 20) {
    std::printf(
        "%s: %lld parts, %lld rows, %d multiprocessors, clusters of up to %d, %d bytes: "
        "%lld CTAs of %lld parts, %lld warps, %zu bytes%s%s%s\n",
        kernel, static_cast<long long>(parts), static_cast<long long>(rows), device.multiprocessors,
        device.max_cluster, device.shared_bytes, static_cast<long long>(layout.ctas),
        static_cast<long long>(layout.cta_parts), static_cast<long long>(warps), shared_bytes,
        covered ? "" : ", not covered", none_empty ? "" : ", an empty CTA",
        fits ? "" : ", over a limit");
  }
}

void check_all(std::int64_t parts, std::int64_t rows, std::size_t slot_bytes,
               const DeviceInfo& device) {
  constexpr std::size_t kUnasked = 48 << 10;  // what a kernel gets without an attribute
  if (const ClusterLayout layout = one_row_layout(parts, rows, device); layout.ctas > 0) {
    check("one row", layout, parts, rows, device, one_row_warps(layout), kClusterWarps,
          one_row_shared_bytes(parts, layout, slot_bytes), kUnasked);
  }
  if (const ClusterLayout layout = in_registers_layout(parts, rows, device); layout.ctas > 0) {
    check("in registers", layout, parts, rows, device, layout.cta_parts / kWarpParts, kPartsWarps,
          parts * slot_bytes, kUnasked);
    if (layout.cta_parts % kWarpParts != 0 && ++found <= 20) {
      std::printf("in registers: %lld parts a CTA\n", static_cast<long long>(layout.cta_parts));
    }
  }
  if (const ClusterLayout layout = in_turn_layout(parts, rows, slot_bytes, device);
      layout.ctas > 0) {
    check("in turn", layout, parts, rows, device, layout.cta_parts, kPipelinedParts,
          pipelined_shared_bytes(parts, layout.cta_parts, kMinStages, slot_bytes),
          most_dynamic_shared(device));
  }
}

}  // namespace

int main() {
  for (const int max_cluster : {8, 16}) {
    for (const int shared_bytes : {101376, 166912, 232448}) {  // sm_120, sm_80, sm_90
      for (int multiprocessors = 1; multiprocessors <= 192; ++multiprocessors) {
        const DeviceInfo device{0, multiprocessors, shared_bytes, true, max_cluster};
        // One row count for each quotient that a layout is made of, and those around the next.
        std::set<std::int64_t> counts{1000000000};
        for (std::int64_t rows = 1; rows <= multiprocessors; ++rows) {
          if (rows == 1 || ceil_div(multiprocessors, rows) != ceil_div(multiprocessors, rows - 1)) {
            counts.insert({rows, rows + 1});
          }
        }
        for (std::int64_t ctas = 1; ctas <= kPartsCluster; ++ctas) {
          counts.insert({multiprocessors * 4 / ctas, multiprocessors * 4 / ctas + 1});
        }
        counts.erase(0);
        for (std::int64_t parts = 1; parts <= kMaxParts + 64; ++parts) {
          for (const std::int64_t rows : counts) {
            for (const std::size_t slot_bytes : {16, 32}) {  // moments in float and in double
              check_all(parts, rows, slot_bytes, device);
            }
          }
        }
      }
    }
  }
  std::printf("%lld layouts, %d of them wrong\n", walked, found);
  return found == 0 ? 0 : 1;
}
