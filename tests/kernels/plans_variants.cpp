// The plans of variants of the norms: of forward, and of those backwards that may have a tail. Run
// by plans.cpp.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/gated_variant.h"
#include "core/modulated_variant.h"
#include "core/rope_variant.h"
#include "cuda/plan_backward_grid.h"
#include "plans.h"

namespace fused_op::cuda {
namespace {

constexpr std::int64_t kRows = 100'003;

ConstRows rows_of(DType dtype, std::int64_t cols) {
  return {.data = reinterpret_cast<const void*>(4096), .dtype = dtype, .stride = cols, .split = {}};
}

ForwardPlan plan_of(const ForwardSpec& spec, std::int64_t cols) {
  DeviceInfo device{};
  device.multiprocessors = 132;
  return plan_forward(spec, kRows, cols, {true, false}, device);
}

// Rows that share entries, and the same rows with an entry each, have the same bits.
// `branch`: of the rows beside the normalised ones.
void check_modulated(DType row, DType branch, DType entry, bool gated, bool weight,
                     std::int64_t cols) {
  const auto args_of = [&](std::int64_t rows_each) {
    ModulatedForwardArgs args;
    args.kind = NormKind::kLayerNorm;
    args.dtype = args.param_dtype = row;
    args.output.dtype = branch;
    args.input = rows_of(branch, cols);
    args.weight = weight ? args.input.data : nullptr;
    const auto of_entries = [&](DType dtype) {
      return entries(args.input.data, dtype, cols, rows_each, kRows);
    };
    if (gated) {
      args.residual = rows_of(row, cols);
      args.sum = reinterpret_cast<void*>(4096);
      args.modulation.gate = of_entries(row);
    }
    args.modulation.scale = args.modulation.shift = of_entries(entry);
    args.modulation.rows_each = rows_each;
    return args;
  };
  const ModulatedForwardArgs own_args = args_of(1), shared_args = args_of(256);
  const ModulatedVariant own(own_args), shared(shared_args);
  const ForwardSpec own_spec = spec_of(own_args, &own), shared_spec = spec_of(shared_args, &shared);
  check_forward(own_spec, cols);
  check_forward(shared_spec, cols);
  const ForwardPlan plan = plan_of(shared_spec, cols);
  const char* rule = !same_lanes(plan, plan_of(own_spec, cols), cols)
                         ? "the lane of an element depends on who shares its entry"
                         : nullptr;
  const bool reads_words = cols * size_of(entry) % 4 == 0;
  if (shared.shared != reads_words || own.shared) rule = "entries that are parameters";
  if (rule != nullptr) report(rule, kernel_name(shared_spec, plan), kRows, cols, {});
}

void check_modulated_backward(DType row, DType branch, DType entry, bool weight,
                              std::int64_t cols) {
  ModulatedBackwardArgs args;
  args.kind = NormKind::kLayerNorm;
  args.dtype = args.param_dtype = row;
  args.grad_output = rows_of(branch, cols);
  args.grad_input.dtype = args.grad_residual.dtype = row;
  args.x = rows_of(row, cols);
  args.weight = weight ? args.x.data : nullptr;
  args.modulation.scale = entries(args.x.data, entry, cols, 1, kRows);
  const ModulatedVariant variant(args);
  check_backward(spec_of(args, &variant), cols);
}

void check_gated(DType row, DType gate_dtype, bool first, std::int64_t cols) {
  GatedForwardArgs args;
  args.kind = NormKind::kRmsNorm;
  args.dtype = args.param_dtype = args.output.dtype = row;
  args.input = rows_of(row, cols);
  args.gate.rows = rows_of(gate_dtype, cols);
  args.gate.first = first;
  const GatedVariant variant(args.gate, row, row, Rounding::kOnce);
  const ForwardSpec spec = spec_of(args, &variant);
  if (cols <= most_forward_cols(spec)) check_forward(spec, cols);

  NormBackwardArgs backward;
  backward.kind = args.kind;
  backward.dtype = backward.param_dtype = backward.grad_output.dtype = row;
  backward.grad_input.dtype = backward.grad_residual.dtype = row;
  check_backward(spec_of(backward, &variant), cols);
}

void check_rope(DType row, DType table, std::int64_t cols) {
  RopeForwardArgs args;
  args.kind = NormKind::kRmsNorm;
  args.dtype = args.param_dtype = args.output.dtype = row;
  args.input = rows_of(row, cols);
  const int half = static_cast<int>(cols / 2);
  const ConstRows cos = rows_of(table, half);
  args.rotation = make_rotation({cos, cos.data, half, false}, 8, false, false, false, args);
  set_packs(args.rotation, {args.input}, cols);
  const RopeVariant variant(args.rotation, row, row, cols, Rounding::kOnce);
  check_forward(spec_of(args, &variant), cols);

  NormBackwardArgs backward;
  backward.kind = args.kind;
  backward.dtype = backward.param_dtype = backward.grad_output.dtype = row;
  backward.grad_input.dtype = backward.grad_residual.dtype = row;
  const BackwardSpec spec = spec_of(backward, &variant);
  check_backward(spec, cols);
  const BackwardGrid grid = grid_of(spec, cols);
  const std::int64_t units = cols % unit_of(spec) == 0 ? cols / unit_of(spec) : 0;
  const bool has_halves = std::has_single_bit(static_cast<std::uint64_t>(units)) && units >= 4;
  if (has_halves && units <= 2 * kWarpSize && (grid.units != 2 || 2 * grid.lanes != units)) {
    report("no lane has both elements of a pair", "rope", kRows, cols, {});
  }
}

}  // namespace

void walk_variants() {
  for (const DType row : kTypes) {
    for (const DType beside : kTypes) {
      if ((row == DType::kFloat64) != (beside == DType::kFloat64)) continue;
      for (std::int64_t cols = 1; cols <= 16384 * 2 / size_of(row); cols += cols < 1100 ? 1 : 37) {
        for (const bool option : {false, true}) {
          check_modulated(row, row, beside, option, cols % 3 == 0, cols);
          check_gated(row, beside, option, cols);
        }
        check_modulated_backward(row, row, beside, cols % 3 == 0, cols);
        if (row == DType::kFloat32 && size_of(beside) == 2) {
          check_modulated(row, beside, beside, true, cols % 3 == 0, cols);
          check_modulated_backward(row, beside, beside, cols % 3 == 0, cols);
          check_modulated_backward(beside, row, beside, false, cols);  // of the gate
        }
        if (cols <= 1024) check_rope(row, beside, cols);
      }
    }
  }
}

}  // namespace fused_op::cuda
