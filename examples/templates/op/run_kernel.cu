// The kernel alone, without PyTorch: a change is compiled and timed within seconds.
//   nvcc -std=c++20 -O3 -arch=native run_kernel.cu csrc/kernel.cu -o run_kernel && ./run_kernel
// It is also the shortest program to put under a profiler: ncu --set full ./run_kernel
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "csrc/kernel.h"

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
  }
}

}  // namespace

int main() {
  using template_op::DType;
  using template_op::ForwardArgs;

  // YOUR OP: its arguments. As much data as leaves the L2 cache no chance: 1 GiB in, 1 GiB out.
  const std::int64_t count = std::int64_t{1} << 28;
  const std::size_t bytes = count * sizeof(float);
  void *input = nullptr, *output = nullptr;
  check(cudaMalloc(&input, bytes), "cudaMalloc");
  check(cudaMalloc(&output, bytes), "cudaMalloc");
  check(cudaMemset(input, 0, bytes), "cudaMemset");
  const ForwardArgs args{DType::kFloat32, count, 1.5, input, output};

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto median_ms = [&](auto&& run) {
    std::vector<float> times(21);
    for (float& time : times) {
      check(cudaEventRecord(begin), "cudaEventRecord");
      check(run(), "launch");
      check(cudaEventRecord(end), "cudaEventRecord");
      check(cudaEventSynchronize(end), "kernel");
      check(cudaEventElapsedTime(&time, begin, end), "cudaEventElapsedTime");
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  const float ours = median_ms([&] { return template_op::cuda::forward(args, nullptr); });
  const float copy = median_ms(
      [&] { return cudaMemcpyAsync(output, input, bytes, cudaMemcpyDeviceToDevice, nullptr); });
  std::printf("kernel %.3f ms, %.0f GB/s; copy of the same bytes %.3f ms: %.0f %% of the limit\n",
              ours, 2 * bytes / ours / 1e6, copy, 100 * copy / ours);
  return 0;
}
