// The CPU backend. Of torch it sees only the 16-bit types.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "op.h"

namespace reduce_sum::cpu {
namespace {

struct CpuTypes {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

// Sums that run beside each other, as the threads of the GPU do: a compiler may not reorder one
// sum, but it turns 16 independent ones into vector instructions. The rounding errors shrink, too.
constexpr int kLanes = 16;

template <typename T>
Accumulator<T> sum(const T* values, std::int64_t count) {
  using A = Accumulator<T>;
  A lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      lanes[j] += static_cast<A>(values[i + j]);
    }
  }
  for (int j = 0; i + j < count; ++j) {
    lanes[j] += static_cast<A>(values[i + j]);
  }
  A total = 0;
  for (const A lane : lanes) {
    total += lane;
  }
  return total;
}

}  // namespace

void sum_parts(const SumArgs& args, std::int64_t first, std::int64_t last) {
  with_dtypes<CpuTypes>(args, [&]<typename In, typename Out>() {
    for (std::int64_t index = first; index < last; ++index) {
      const std::int64_t begin = index % args.parts * args.part;
      const In* row = static_cast<const In*>(args.input) + index / args.parts * args.cols;
      const std::int64_t count = std::min(args.part, args.cols - begin);
      static_cast<Out*>(args.output)[index] = static_cast<Out>(sum(row + begin, count));
    }
  });
}

}  // namespace reduce_sum::cpu
