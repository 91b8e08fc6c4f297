// Makes the plans of forward and backward for every width, many numbers of rows, all element types
// and GPUs of 1 to 192 SMs, and prints those that break a rule. Compiled with the planner of the
// checkout: g++ -std=c++20 -Icsrc tests/kernels/plans*.cpp csrc/cuda/plan*.cpp
#include "plans.h"

#include <array>
#include <cstdio>

namespace fused_op::cuda {

void report(const char* rule, const std::string& name, std::int64_t rows, std::int64_t cols,
            const DeviceInfo& device) {
  if (++counts.broken <= 20) {
    std::printf("%s: %s, %lld rows of %lld columns, %d SMs of %d bytes\n", rule, name.c_str(),
                static_cast<long long>(rows), static_cast<long long>(cols), device.multiprocessors,
                device.shared_bytes);
  }
}

}  // namespace fused_op::cuda

int main() {
  using namespace fused_op::cuda;
  std::array<long long, 7> walked{};
  int i = 0;
  for (void (*walk)() : {walk_forward, walk_variants, walk_long_forward, walk_backward,
                         walk_long_backward, walk_channels_first, walk_group_norm}) {
    const long long before = counts.walked;
    walk();
    walked[i++] = counts.walked - before;
  }
  std::printf(
      "%lld plans of forward, %lld of variants, %lld of long rows, "
      "%lld of backward, %lld of long rows, "
      "%lld of channels, %lld of groups, %d broken; "
      "%lld calls had few rows, %lld clusters\n",
      walked[0], walked[1], walked[2], walked[3], walked[4], walked[5], walked[6], counts.broken,
      counts.few, counts.clustered);
  return counts.broken == 0 && counts.few > 0 && counts.clustered > 0 ? 0 : 1;
}
