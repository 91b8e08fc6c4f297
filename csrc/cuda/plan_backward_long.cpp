#include <algorithm>

#include "cuda/backward_long.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

// Fewer rows do not gain from clusters. us with two kernels and with clusters: 11.8 16.3 at
// 16x65536, 28.3 22.3 at 32x65536 (bf16, H200).
constexpr std::int64_t kFewestClusterRows = 32;

// The fewest rows of a chunk. With fewer, partial sums and their addition cost more than they save.
constexpr std::int64_t kFewestChunkRows = 16;
constexpr std::int64_t kMostChunks = 65535;  // of a grid
constexpr int kCtasPerSm = 8;

// Elements of a unit: 16 bytes of the widest stream.
int piece_unit_of(const BackwardSpec& spec) {
  int widest = std::max({size_of(read_as_x(spec)), size_of(spec.grad_output), size_of(spec.row),
                         size_of(spec.input)});
  if (spec.variant != nullptr) {
    widest = std::max({widest, spec.variant->widest, size_of(spec.variant->beside.dtype)});
  }
  return kVectorBytes / (spec.adds ? std::max(widest, size_of(spec.residual)) : widest);
}

// Many rows go through clusters, if there is room for the rows in flight and the parameters.
void plan_clusters(BackwardLongPlan& plan, const BackwardSpec& spec, std::int64_t rows,
                   const DeviceInfo& device) {
  if (plan.move != Move::kVectors || spec.adds || spec.variant != nullptr ||
      rows < kFewestClusterRows || plan.pieces < 2 ||
      plan.pieces > std::min(device.max_cluster, kMostCluster)) {
    return;
  }
  const int stage = kPieceThreads * kPieceUnits * plan.pack *
                    (size_of(read_as_x(spec)) + size_of(spec.grad_output));
  const int parameters =
      std::max(plan.pack * size_of(spec.parameters), 4) * (spec.recovers ? 2 : 1);
  const int kept = parameter_bytes(kPieceThreads, kPieceUnits, parameters);
  for (const int stages : {3, 2}) {
    if (stages * stage + kept <= most_dynamic_shared(device)) {
      plan.cluster = static_cast<int>(plan.pieces);
      plan.stages = stages;
      plan.cluster_shared_bytes = stages * stage + kept;
      plan.clusters = std::clamp<std::int64_t>(device.multiprocessors / plan.cluster, 1, rows);
      return;
    }
  }
}

std::string long_tile(const BackwardLongPlan& plan) {
  return "fused_op::cuda::ColumnsTile" + joined({number(plan.pack), number(plan.vectors)});
}

}  // namespace

BackwardLongPlan plan_backward_long(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                    Move most_aligned, bool wants_sums, bool adds_sums,
                                    const DeviceInfo& device) {
  const int unit = piece_unit_of(spec);
  const bool odd = cols % unit != 0;
  const bool halves = size_of(spec.row) == 2 && size_of(read_as_x(spec)) == 2;
  BackwardLongPlan plan{};
  plan.pack = odd ? (halves ? 2 : 1) : unit;
  plan.vectors = unit / plan.pack;
  plan.move = odd || most_aligned != Move::kVectors ? Move::kWords : Move::kVectors;
  plan.pieces = row_pieces(cols, unit);
  plan.slabs = ceil_div(ceil_div(cols, unit), kColumnThreads);
  plan.chunks =
      std::clamp<std::int64_t>(std::int64_t{device.multiprocessors} * kCtasPerSm / plan.slabs, 1,
                               std::clamp<std::int64_t>(rows / kFewestChunkRows, 1, kMostChunks));
  const std::int64_t sums = rows * plan.pieces * (is_double(spec) ? 16 : 8);
  plan.row_sums_bytes = ceil_div(sums, kVectorBytes) * kVectorBytes;
  plan.partials_bytes = partials_bytes(spec, plan.chunks, cols, wants_sums, adds_sums);
  plan_clusters(plan, spec, rows, device);
  if (plan.cluster > 0) {
    plan.cluster_partials_bytes = partials_bytes(spec, plan.clusters, cols, wants_sums, adds_sums);
  }
  return plan;
}

BackwardLongPlan plan_backward_long(const NormBackwardArgs& args, const BackwardSpec& spec,
                                    const DeviceInfo& device) {
  const bool wants_sums = args.wants_sums();
  return plan_backward_long(spec, args.rows, args.cols, most_aligned(args, spec), wants_sums,
                            args.add_grads, device);
}

BackwardSpec row_sums_spec(const BackwardSpec& spec) {
  BackwardSpec sums = spec;
  if (spec.variant != nullptr) {
    return sums;
  }
  sums.adds = sums.drops_input = sums.rounds_first = false;
  sums.input = sums.residual = spec.row;
  return sums;
}

std::string row_sums_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan) {
  return "fused_op::cuda::backward_row_sums_kernel<" + op_name(row_sums_spec(spec), plan.move) +
         ", " + long_tile(plan) + ">";
}
std::string columns_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan) {
  return "fused_op::cuda::backward_columns_kernel<" + op_name(spec, plan.move) + ", " +
         long_tile(plan) + ">";
}
std::string cluster_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan) {
  return "fused_op::cuda::backward_cluster_kernel<" + op_name(spec, plan.move) +
         ", fused_op::cuda::ClusterTile" + joined({number(plan.pack), number(plan.stages)}) + ">";
}

}  // namespace fused_op::cuda
