// All loops of a level. Included only by a level: level.h.
#pragma once

#include "cpu/add.h"
#include "cpu/backward.h"
#include "cpu/channels_first.h"
#include "cpu/forward.h"
#include "cpu/gated.h"
#include "cpu/group_norm.h"
#include "cpu/group_norm_backward.h"
#include "cpu/level.h"
#include "cpu/modulated.h"
#include "cpu/quantize.h"
#include "cpu/rope.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Runs `Loops` over a range, with the accumulators of a dtype.
template <template <typename> class Loops, typename Args, typename... Range>
void run_loops(DType dtype, const Args& args, Range... range) {
  with_accumulators(dtype, [&]<typename A>() { Loops<A>(args).run(range...); });
}

// The sums of all groups lie side by side.
inline void add_chunks_of_groups(NormBackwardArgs args, int groups, std::int64_t chunks,
                                 std::int64_t first_col, std::int64_t last_col) {
  args.cols *= groups;
  add_chunks(args, chunks, first_col, last_col);
}

inline void variant_forward(VariantId id, const NormForwardArgs& args, std::int64_t first_row,
                            std::int64_t last_row) {
  switch (id) {
    case VariantId::kGated:
      return run_loops<GatedForward>(args.input.dtype, static_cast<const GatedForwardArgs&>(args),
                                     first_row, last_row);
    case VariantId::kModulated:
      return modulated_forward(static_cast<const ModulatedForwardArgs&>(args), first_row, last_row);
    case VariantId::kRope:
      return run_loops<RopeForward>(args.input.dtype, static_cast<const RopeForwardArgs&>(args),
                                    first_row, last_row);
  }
}

inline void variant_backward_rows(VariantId id, const NormBackwardArgs& args,
                                  std::int64_t first_chunk, std::int64_t last_chunk,
                                  std::int64_t chunks) {
  switch (id) {
    case VariantId::kGated:
      return run_loops<GatedBackward>(args.x.dtype, static_cast<const GatedBackwardArgs&>(args),
                                      first_chunk, last_chunk, chunks);
    case VariantId::kModulated:
      return modulated_backward(static_cast<const ModulatedBackwardArgs&>(args), first_chunk,
                                last_chunk, chunks);
    case VariantId::kRope:
      return run_loops<RopeBackward>(args.x.dtype, static_cast<const RopeBackwardArgs&>(args),
                                     first_chunk, last_chunk, chunks);
  }
}

inline void variant_backward_columns(VariantId id, const NormBackwardArgs& args,
                                     std::int64_t first_col, std::int64_t last_col,
                                     std::int64_t chunks) {
  switch (id) {
    case VariantId::kGated:
      return add_chunks_of_groups(args, static_cast<const GatedBackwardArgs&>(args).groups, chunks,
                                  first_col, last_col);
    case VariantId::kModulated:
      return modulated_columns(static_cast<const ModulatedBackwardArgs&>(args), first_col, last_col,
                               chunks);
    case VariantId::kRope:
      return add_chunks_of_groups(args, static_cast<const RopeBackwardArgs&>(args).groups, chunks,
                                  first_col, last_col);
  }
}

constexpr Level level_of(const char* name) {
  return {name,
          forward,
          add,
          quantize,
          backward_rows,
          backward_columns,
          variant_forward,
          variant_backward_rows,
          variant_backward_columns,
          channels_first_forward,
          channels_first_backward,
          group_norm_forward,
          group_norm_backward,
          group_norm_channels,
          add_chunks};
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
