// What the rules of plans_*.cpp share.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/plan.h"

namespace fused_op::cuda {

struct Counts {
  int broken = 0;
  long long walked = 0;
  long long few = 0;        // calls of few rows
  long long clustered = 0;  // and those that take clusters
};

inline Counts counts;

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void report(const char* rule, const std::string& name, std::int64_t rows, std::int64_t cols,
            const DeviceInfo& device);

// Whether both plans give each element to the same lane of the same warp.
bool same_lanes(const ForwardPlan& a, const ForwardPlan& b, std::int64_t cols);
// Checks the plans of rows that fit into a CTA: with many numbers of rows and GPUs.
void check_forward(const ForwardSpec& spec, std::int64_t cols);
void check_backward(const BackwardSpec& spec, std::int64_t cols);

void walk_forward();
void walk_variants();
void walk_long_forward();
void walk_backward();
void walk_long_backward();
void walk_channels_first();
void walk_group_norm();

}  // namespace fused_op::cuda
