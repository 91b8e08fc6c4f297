#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "cuda/fused_op_kernel.h"

namespace fused_op::cuda {
namespace {

// The peak of the memory in GB/s; 0 if it is not known.
int memory_gb_per_s(int device) {
  int khz = 0;
  int bits = 0;
  cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device);
  cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device);
  return static_cast<int>(std::int64_t{2} * khz * bits / 8 / 1'000'000);
}

// FUSED_OP_FAST_MEMORY=0 or 1 has tests take the kernels of either memory on one GPU.
bool has_fast_memory(int device, int multiprocessors) {
  const char* const told = std::getenv("FUSED_OP_FAST_MEMORY");
  return told != nullptr ? *told == '1' : memory_gb_per_s(device) >= kFastMemory * multiprocessors;
}

}  // namespace

DeviceInfo read_device_info(int device) {
  DeviceInfo info{};
  info.index = device;
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&info.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&info.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  info.arch = 10 * major + minor;
  info.max_cluster = max_cluster_of(info.arch);
  info.fast_memory = has_fast_memory(device, info.multiprocessors);
  return info;
}

namespace {

// The current device, read once.
const DeviceInfo& device_info() {
  static std::array<DeviceInfo, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> once;
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kMaxDevices) {
    throw KernelError("fused_op: no kernel runs on device " + std::to_string(device) +
                      ", only on the first " + std::to_string(kMaxDevices));
  }
  std::call_once(once[device], [&] { known[device] = read_device_info(device); });
  return known[device];
}

std::uint64_t key_of(const Variant* variant) { return variant != nullptr ? variant->key() : 0; }

}  // namespace

KeyBits& KeyBits::add(std::uint64_t value, int bits) {
  used_ += bits;
  if (value >> bits != 0 || used_ > 128) {
    throw std::logic_error("fused_op: a plan does not fit into the key of its kernel");
  }
  key_.high = key_.high << bits | key_.low >> (64 - bits);
  key_.low = key_.low << bits | value;
  return *this;
}
KeyBits& KeyBits::add(const ForwardSpec& spec) {
  return add(bits(spec.norm), 3)
      .add(spec.adds, 1)
      .add(spec.dropout, 1)
      .add(spec.split, 1)
      .add(spec.rounds_first, 1)
      .add(bits(spec.input), 2)
      .add(spec.adds ? bits(spec.residual) : 0, 2)
      .add(bits(spec.row), 2)
      .add(bits(spec.parameters), 2)
      .add(bits(spec.output), 2)
      .add(key_of(spec.variant), 20);
}
KeyBits& KeyBits::add(const ForwardPlan& plan) {
  return add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.vectors), 5)
      .add(bits(plan.ahead), 5)
      .add(plan.few, 1)
      .add(plan.core, 1)
      .add(plan.words, 1)
      .add(bits(plan.flat_threads), 6)
      .add(bits(plan.flat_rows), 6)
      .add(bits(plan.vector_rows), 4)
      .add(bits(plan.most_threads), 10)
      .add(bits(plan.ctas_per_sm), 6)
      .add(bits(plan.width), 20);
}
KeyBits& KeyBits::add(const BackwardSpec& spec) {
  return add(bits(spec.norm), 3)
      .add(spec.adds, 1)
      .add(spec.drops_input, 1)
      .add(spec.drops_output, 1)
      .add(spec.recovers, 1)
      .add(spec.split, 1)
      .add(spec.rounds_first, 1)
      .add(bits(spec.input), 2)
      .add(spec.adds ? bits(spec.residual) : 0, 2)
      .add(bits(spec.row), 2)
      .add(bits(spec.parameters), 2)
      .add(bits(spec.grad_output), 2)
      .add(key_of(spec.variant), 20);
}

cudaError_t launch(const Kernel& kernel, const LaunchShape& shape,
                   std::initializer_list<const void*> arguments, const DeviceInfo& device,
                   cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device.arch < 90 ? 0 : shape.cluster > 0 ? 2 : 1;
  void* pointers[8];
  std::transform(arguments.begin(), arguments.end(), pointers,
                 [](const void* argument) { return const_cast<void*>(argument); });
  return cudaLaunchKernelExC(&config, kernel.function(), pointers);
}

bool launch_clusters(const Kernel& kernel, const LaunchShape& shape,
                     std::initializer_list<const void*> arguments, const DeviceInfo& device,
                     cudaStream_t stream) {
  if (launch(kernel, shape, arguments, device, stream) != cudaErrorInvalidClusterSize) {
    return true;
  }
  cudaGetLastError();  // clears the error
  return false;
}

cudaError_t norm_forward(const NormForwardArgs& args, const Variant* variant, cudaStream_t stream) {
  launch_forward(args, variant, device_info(), stream);
  return cudaGetLastError();
}

cudaError_t norm_quantized(const NormForwardArgs& args, const Quantization& to,
                           cudaStream_t stream) {
  QuantizedForwardArgs all{args, to};
  launch_quantized(all, device_info(), stream);
  return cudaGetLastError();
}

std::optional<cudaError_t> post_add_pre_forward(PostAddPreForwardArgs& args, cudaStream_t stream) {
  if (!launch_post_add_pre(args, device_info(), stream)) {
    return std::nullopt;
  }
  return cudaGetLastError();
}

cudaError_t channels_first_forward(const ChannelsFirstForwardArgs& args, cudaStream_t stream) {
  launch_channels_first(args, device_info(), stream);
  return cudaGetLastError();
}

std::size_t channels_first_workspace(const ChannelsFirstBackwardArgs& args) {
  return static_cast<std::size_t>(plan_channels_first(args, device_info()).partials_bytes);
}

cudaError_t channels_first_backward(const ChannelsFirstBackwardArgs& args, cudaStream_t stream) {
  launch_channels_first(args, device_info(), stream);
  return cudaGetLastError();
}

bool reads_nhwc(const GroupNormArgs& args) { return plan_group_norm_nhwc(args).has_value(); }

std::size_t group_norm_workspace(const GroupNormForwardArgs& args) {
  return static_cast<std::size_t>(group_norm_workspace_bytes(args));
}

cudaError_t group_norm_forward(const GroupNormForwardArgs& args, cudaStream_t stream) {
  launch_group_norm(args, device_info(), stream);
  return cudaGetLastError();
}

std::size_t group_norm_workspace(const GroupNormBackwardArgs& args) {
  return static_cast<std::size_t>(group_norm_workspace_bytes(args));
}

cudaError_t group_norm_backward(const GroupNormBackwardArgs& args, cudaStream_t stream) {
  launch_group_norm(args, device_info(), stream);
  return cudaGetLastError();
}

std::size_t norm_backward_workspace(const NormBackwardArgs& args, const Variant* variant) {
  return backward_workspace(args, variant, device_info());
}

cudaError_t norm_backward(const NormBackwardArgs& args, const Variant* variant,
                          cudaStream_t stream) {
  launch_backward(args, variant, device_info(), stream);
  return cudaGetLastError();
}

}  // namespace fused_op::cuda
