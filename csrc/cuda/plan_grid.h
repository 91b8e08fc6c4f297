// How forward deals the elements of a row to lanes. Which lane has an element depends on the width
// and the dtypes of a call alone. Host; torch-free.
#pragma once

#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"

namespace fused_op::cuda {

// The lanes of a row, the units of each lane, and the warps of a row.
struct ForwardGrid {
  int lanes;
  int units;
  int warps;
};

// How the units of a row are dealt to its lanes, whatever its address.
ForwardGrid grid_of(const ForwardSpec& spec, std::int64_t cols);

// The threads of an SM for a tile of these lanes. `full`: no lane has a unit past the end of a row.
int threads_of_sm(const ForwardSpec& spec, bool odd, bool aligned, const ForwardGrid& grid,
                  bool full);

// The elements of a pack that moves by words.
inline int word_pack(const ForwardSpec& spec) { return size_of(spec.row) == 2 ? 2 : 1; }

inline std::int64_t vectors_of(const ForwardSpec& spec, std::int64_t cols) {
  return cols * size_of(spec.row) / kVectorBytes;
}

// Whether a row is no longer than a vector.
inline bool is_short(const ForwardSpec& spec, std::int64_t cols) {
  return spec.row != DType::kFloat64 && cols * size_of(spec.row) <= kVectorBytes;
}

// The tile of the core table that a row of this many 16-byte vectors fills; -1 if there is none.
int core_tile(std::int64_t vectors, bool few);
// Whether a row is dealt to lanes as in the core table. It may still have another kernel: which
// lane holds an element must not depend on an option.
bool fills_core_tile(const ForwardSpec& spec, std::int64_t cols);

}  // namespace fused_op::cuda
