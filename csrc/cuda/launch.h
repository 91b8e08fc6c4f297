// What the launches share: the key of a kernel, and the launch itself. Host code without torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"
#include "cuda/quantized_plan.h"

namespace fused_op::cuda {

// What plans know about a GPU that is here.
DeviceInfo read_device_info(int device);

enum class KernelKind {
  kForward,
  kLongForward,
  kBackward,
  kFewBackward,
  kRowSums,
  kColumns,
  kClusters,
  kPartials,
  kQuantizedForward,
  kQuantizeRows,
  kPostAddPre,
  kChannelsFirstForward,
  kChannelsFirstBackward,
  kGroupNorm,
  kGroupNormSums,
  kGroupNormNhwc,
};

// Packs fields into the bits of a kernel's key. Throws if a value does not fit into its bits, or
// all of them not into the key.
class KeyBits {
 public:
  explicit KeyBits(KernelKind kind) { add(static_cast<std::uint64_t>(kind), 4); }

  KeyBits& add(std::uint64_t value, int bits);
  KeyBits& add(const ForwardSpec& spec);
  KeyBits& add(const ForwardPlan& plan);
  KeyBits& add(const BackwardSpec& spec);
  KernelKey key() const { return key_; }

 private:
  KernelKey key_{};
  int used_ = 0;
};

inline std::uint64_t bits(auto value) { return static_cast<std::uint64_t>(value); }

// The kernel of that key (see find_kernel). Throws KernelError if it is not available, because no
// slower kernel takes its calls.
template <typename Source>
const Kernel& require_kernel(const KernelKey& key, const DeviceInfo& device, Source&& source) {
  if (const Kernel* const kernel = find_kernel(key, device, source)) [[likely]] {
    return *kernel;
  }
  throw KernelError("a kernel is not available: " + why_no_kernel());
}

// A kernel for each width is faster, but costs half a second and some memory. A process with more
// than max_kernels() sees widths that keep changing. New widths then take kernels that read the
// width at run time, with the same bits. (Not if nothing is compiled: the package has kernels for
// single widths.)
inline bool has_too_many_kernels(const KernelKey& next, const DeviceInfo& device) {
  return kernel_count.load(std::memory_order_relaxed) >= max_kernels() && jit_mode() != Jit::kOff &&
         look_up(next, device.arch) == nullptr;
}

// The key of a plan. In a process with too many kernels, `constant`, which the kernel would be
// compiled for (the width, or the number of a row's parts), becomes 0 first.
template <typename KeyOf>
KernelKey key_of_plan(int& constant, const DeviceInfo& device, KeyOf&& key_of) {
  const KernelKey key = key_of();
  if (constant == 0 || !has_too_many_kernels(key, device)) {
    return key;
  }
  constant = 0;
  return key_of();
}

// The dimensions of a grid. Throws for more CTAs than one can have, which only rows or groups of a
// few bytes reach.
inline dim3 cta_grid(std::int64_t x, std::int64_t y = 1) {
  if (x > 0x7fffffff || y > 0xffff) {
    throw KernelError("fused_op: a call needs more CTAs than a grid can have");
  }
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::int64_t shared_bytes = 0;
  int cluster = 0;  // CTAs of a cluster; 0: no clusters
};

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...). On sm_90 it is placed while the
// previous kernel still runs.
cudaError_t launch(const Kernel& kernel, const LaunchShape& shape,
                   std::initializer_list<const void*> arguments, const DeviceInfo& device,
                   cudaStream_t stream);
// The same for a kernel with clusters. Returns false, without an error, if this context's part of
// the GPU (a green context, a MIG slice) has no room for a cluster of that size.
bool launch_clusters(const Kernel& kernel, const LaunchShape& shape,
                     std::initializer_list<const void*> arguments, const DeviceInfo& device,
                     cudaStream_t stream);

// The header of a variant's structs; empty for the library's own.
inline std::string structs_of(const Variant* variant) {
  return variant != nullptr ? variant->header : "";
}

// With a variant, `args` is the base of what its kernels take.
void launch_forward(const NormForwardArgs& args, const Variant* variant, const DeviceInfo& device,
                    cudaStream_t stream);
// The same with its output in 8 bits. The unquantised output may be null only if
// quantizes_in_registers().
void launch_quantized(const QuantizedForwardArgs& args, const DeviceInfo& device,
                      cudaStream_t stream);

// Returns false, and launches nothing, if no kernel takes both norms. Fills in `input` and
// `post.output`, which are null.
bool launch_post_add_pre(PostAddPreForwardArgs& args, const DeviceInfo& device,
                         cudaStream_t stream);

// Norms over channels.
void launch_channels_first(const ChannelsFirstForwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream);
void launch_channels_first(const ChannelsFirstBackwardArgs& args, const DeviceInfo& device,
                           cudaStream_t stream);

// Group norms.
void launch_group_norm(const GroupNormForwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream);
void launch_group_norm(const GroupNormBackwardArgs& args, const DeviceInfo& device,
                       cudaStream_t stream);

std::size_t backward_workspace(const NormBackwardArgs& args, const Variant* variant,
                               const DeviceInfo& device);
void launch_backward(const NormBackwardArgs& args, const Variant* variant, const DeviceInfo& device,
                     cudaStream_t stream);

// For rows that are too long for a CTA.
void launch_long_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                          const DeviceInfo& device, cudaStream_t stream);

// Adds partial sums, [parts, 1 or 2, partials_stride(cols)], up to the parameter gradients. The
// kernel is looked up first: nothing is launched if it is not available.
const Kernel& add_partials_kernel(const BackwardSpec& spec, const DeviceInfo& device);
void launch_add_partials(const Kernel& kernel, const NormBackwardArgs& args,
                         const BackwardSpec& spec, const void* partials, std::int64_t parts,
                         const DeviceInfo& device, cudaStream_t stream);

}  // namespace fused_op::cuda
