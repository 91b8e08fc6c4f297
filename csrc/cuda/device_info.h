// What plans and launches know about a GPU, as plain integers. Host code without CUDA or torch, so
// that layouts can be checked for GPUs that are not present.
#pragma once

namespace fused_op::cuda {

constexpr int kMaxDevices = 64;

struct DeviceInfo {
  int index;
  int multiprocessors;
  int shared_bytes;         // the most that a CTA may opt in to
  int max_cluster;          // CTAs of a cluster; 0 before sm_90
  int arch = 0;             // ten times the compute capability: 90 for 9.0
  bool fast_memory = true;  // many bytes a second for each multiprocessor: kFastMemory
};

// GB/s of memory for each multiprocessor. An H100 has 25, an H200 37.
constexpr int kFastMemory = 32;

// Follows from `arch`, ten times the compute capability.
constexpr int max_cluster_of(int arch) { return arch < 90 ? 0 : arch < 110 ? 16 : 8; }

// The shared memory that a launch may request for a CTA: the limit less what the kernel declares.
constexpr int most_dynamic_shared(const DeviceInfo& device) { return device.shared_bytes - 1024; }

}  // namespace fused_op::cuda
