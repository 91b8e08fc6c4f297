// What a call would launch, without a GPU and without its tensors, for `python -m fused_op plan`
// and `compile` and for the tests. The functions that decide are those of the launches. Host code
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

// A call of an op, forward or backward. All gradients are wanted. With a residual, a gradient
// arrives at the sum.
struct CallShape {
  NormKind norm = NormKind::kLayerNorm;
  bool backward = false;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  DType input = DType::kFloat32;
  DType residual = DType::kFloat32;
  DType sum = DType::kFloat32;  // of the values that are normalised: the input's without a residual
  DType parameters = DType::kFloat32;
  DType output = DType::kFloat32;
  bool adds = false;
  bool dropout = false;
  bool memory_efficient = false;  // backward reads the output
  Rounding rounding = Rounding::kOnce;
  bool aligned = true;  // the input begins at an address of whole vectors
};

struct PlannedKernel {
  KernelSource source;
  bool core;  // compiled with the extension
};
struct CallPlan {
  std::vector<std::pair<std::string, std::int64_t>> integers;  // those of its plan, by name
  std::vector<PlannedKernel> kernels;                          // in the order of their launches
};
CallPlan plan_call(const CallShape& call, const DeviceInfo& device);

}  // namespace fused_op::cuda
