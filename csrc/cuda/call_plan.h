// What a call would launch, said without a GPU and without its tensors: for `python -m fused_op
// plan` and `compile`, and the tests. Decided by the functions that the launches ask. Host code
// without CUDA or torch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/norm_args.h"
#include "cuda/compile.h"
#include "cuda/device_info.h"

namespace fused_op::cuda {

// A call of an op, forward or backward. All gradients are wanted; with a residual, one arrives
// through the sum.
struct CallShape {
  NormKind norm = NormKind::kLayerNorm;
  bool backward = false;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  DType input = DType::kFloat32;
  DType residual = DType::kFloat32;
  DType sum = DType::kFloat32;  // of what is normalised: that of the input without a residual
  DType parameters = DType::kFloat32;
  DType output = DType::kFloat32;
  bool adds = false;
  bool dropout = false;
  bool memory_efficient = false;  // backward reads the output
  Rounding rounding = Rounding::kOnce;
  bool aligned = true;  // the input begins where vectors may
};

struct PlannedKernel {
  KernelSource source;
  bool core;  // it was compiled with the extension
};
struct CallPlan {
  std::vector<std::pair<std::string, std::int64_t>> integers;  // of its plan, by name
  std::vector<PlannedKernel> kernels;                          // in the order of their launches
};
CallPlan plan_call(const CallShape& call, const DeviceInfo& device);

}  // namespace fused_op::cuda
