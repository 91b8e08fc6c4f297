// What plans and launches know of a GPU, as plain integers. Host code without CUDA or torch, so
// that layouts can be checked for GPUs that are not there.
#pragma once

namespace fused_op::cuda {

constexpr int kMaxDevices = 64;

struct DeviceInfo {
  int index;
  int multiprocessors;
  int shared_bytes;  // of one CTA, opted in
  bool sm_90;        // or newer: clusters, programmatic dependent launch
  int max_cluster;   // CTAs of a cluster; 0 before sm_90
  int arch = 0;      // ten times the compute capability: 90 for 9.0
};

// What follows from the compute capability, which `arch` is ten times.
constexpr int max_cluster_of(int arch) { return arch < 90 ? 0 : arch < 110 ? 16 : 8; }

// Shared memory that a CTA may ask for at its launch: less what its kernel declares.
constexpr int most_dynamic_shared(const DeviceInfo& device) { return device.shared_bytes - 1024; }

}  // namespace fused_op::cuda
