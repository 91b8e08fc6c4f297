#include <algorithm>

#include "cuda/backward_tile.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

// Calls this small gain by reading x and dy twice. us with partial sums and this way: 4.4 4.2 at
// 256x1024, 10.1 10.4 at 512x4096 (bf16, H200).
constexpr std::int64_t kMostRows = 256;
constexpr std::int64_t kMostBytes = 2 << 20;  // of x

constexpr int kThreads = 256;  // of a CTA at most, unless a row needs more
constexpr int kMostThreads = 512;
// How many words a lane can hold in registers. Rows moved by words spill with 96, and beside Philox
// with 72.
constexpr int kMostHeldWords = 80;
constexpr int kMostDroppingWords = 64;

// The words of a row and of its parameters that a lane holds in registers.
int held_words(const BackwardSpec& spec, const BackwardPlan& rows) {
  const int bytes = size_of(read_as_x(spec)) + size_of(spec.grad_output) +
                    (spec.adds ? size_of(spec.row) : 0) +
                    size_of(spec.parameters) * (spec.recovers ? 2 : 1);
  return rows.pack * rows.vectors * bytes / 4;
}

}  // namespace

BackwardFewPlan plan_backward_few(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                  Move most_aligned, bool wants_rows, bool wants_sums,
                                  const DeviceInfo& device) {
  if (rows > kMostRows || rows * cols * size_of(read_as_x(spec)) > kMostBytes ||
      (!wants_rows && !wants_sums)) {
    return {};
  }
  const BackwardPlan many = plan_backward(spec, rows, cols, most_aligned, false, false, device);
  const bool drops = spec.drops_input || spec.drops_output;
  if (many.lanes == 0 || many.row_threads > kMostThreads ||
      held_words(spec, many) > (drops ? kMostDroppingWords : kMostHeldWords)) {
    return {};
  }
  BackwardFewPlan plan{};
  plan.pack = many.pack;
  plan.lanes = many.lanes;
  plan.vectors = many.vectors;
  plan.keep = many.keep;
  plan.move = many.move == Move::kVectors ? Move::kVectors : Move::kWords;
  plan.row_threads = many.row_threads;
  // No more warps than slabs have rows for: those without a row only make the others wait. But
  // enough threads to store the sums of a slab at once: 1.41 1.33 us at 1x1024 with 64 and with 128
  // (bf16, LayerNorm, H200).
  constexpr std::int64_t kSlabSums = 128;
  const std::int64_t busy =
      std::max(ceil_div(rows * kSlabLanes, kWarpSize) * kWarpSize, kSlabSums);  // threads
  plan.side_by_side = static_cast<int>(std::min<std::int64_t>(
      ceil_div(busy, many.row_threads), std::max(kThreads / many.row_threads, 1)));
  plan.row_ctas = wants_rows ? ceil_div(rows, plan.side_by_side) : 0;
  const int widest = std::max(size_of(read_as_x(spec)), size_of(spec.grad_output));
  const int own = slab_columns(plan.move != Move::kVectors, plan.pack, widest);
  plan.slabs = wants_sums ? ceil_div(cols, kSlabLanes * own) : 0;
  return plan;
}

BackwardFewPlan plan_backward_few(const NormBackwardArgs& args, const BackwardSpec& spec,
                                  const DeviceInfo& device) {
  const bool wants_rows = args.grad_input.data != nullptr || args.grad_residual.data != nullptr;
  const bool wants_sums = args.wants_sums();
  return plan_backward_few(spec, args.rows, args.cols, most_aligned(args, spec), wants_rows,
                           wants_sums, device);
}

std::string kernel_name(const BackwardSpec& spec, const BackwardFewPlan& plan) {
  // 512 threads have 128 registers each. There are no stages, and the parameters stay in registers.
  const std::string tile = "fused_op::cuda::BackwardTile" +
                           joined({number(plan.pack), number(plan.lanes), number(plan.vectors),
                                   number(kMostThreads), number(1), number(2), flag(plan.keep),
                                   flag(true), flag(false), number(0), flag(false)});
  return "fused_op::cuda::backward_few_kernel<" + op_name(spec, plan.move) + ", " + tile + ">";
}

}  // namespace fused_op::cuda
