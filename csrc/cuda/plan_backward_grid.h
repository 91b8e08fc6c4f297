// How backward deals the elements of a row to lanes. Which lane has an element depends on the width
// and the dtypes of a call alone. Host; torch-free.
#pragma once

#include <cstdint>

#include "cuda/plan.h"

namespace fused_op::cuda {

constexpr int kMostBackwardThreads = 512;  // of a CTA: 128 registers a thread
// A larger CTA, whose lanes have two units and keep no values. It is used if three or four units
// would leave lanes or rows idle. H200, bf16, us with three and with two: 104 98 at 21845x3072.
constexpr int kWideBackwardThreads = 640;

// The dtypes of the streams that a row is read from: x, dy, and the gradient of the sum, or the
// rows that a variant reads beside them.
struct BackwardStreams {
  DType dtypes[3];
  int count;
};
BackwardStreams streams_of(const BackwardSpec& spec);

// The elements of a unit, which a lane takes as one pack or several: 16 bytes of the narrowest
// stream.
int unit_of(const BackwardSpec& spec);
// Whether rows move by words, because they are not whole units.
inline bool by_words(const BackwardSpec& spec, std::int64_t cols) {
  return cols % unit_of(spec) != 0;
}

// The lanes of a row, the units of each lane, and the warps of a row, in a CTA of this many
// threads.
struct BackwardGrid {
  int lanes;
  int units;
  int warps;
  int threads = kMostBackwardThreads;
};
// How the units of a row are dealt to its lanes, whatever its address.
BackwardGrid grid_of(const BackwardSpec& spec, std::int64_t cols);

// The tile of the core table that fits a row, with three rows in flight; -1 if there is none.
int core_tile(const BackwardSpec& spec, std::int64_t cols);

}  // namespace fused_op::cuda
