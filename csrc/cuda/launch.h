// What the launches share: a kernel's key, and the launch itself. Host code without torch.
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
};

// Packs fields into the bits of a kernel's key. A value that its bits do not hold throws.
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

// The kernel of that key (see find_kernel). Throws KernelError if it cannot be had: there is no
// slower one that takes its calls.
template <typename Source>
const Kernel& require_kernel(const KernelKey& key, const DeviceInfo& device, Source&& source) {
  if (const Kernel* const kernel = find_kernel(key, device, source)) [[likely]] {
    return *kernel;
  }
  throw KernelError("a kernel cannot be had: " + why_no_kernel());
}

// A kernel for each width is faster, and costs half a second and some memory. A process that has
// max_kernels() sees widths that change all the time: new ones take kernels whose width is known at
// run time, with the same bits. (Not where none are compiled: the package has those of a width.)
inline bool has_too_many_kernels(const KernelKey& next, const DeviceInfo& device) {
  return kernel_count.load(std::memory_order_relaxed) >= max_kernels() && jit_mode() != Jit::kOff &&
         look_up(next, device.arch) == nullptr;
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::int64_t shared_bytes = 0;
  int cluster = 0;  // CTAs; 0: no clusters
};

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), placed while the kernel before it
// still runs (sm_90).
cudaError_t launch(const Kernel& kernel, const LaunchShape& shape,
                   std::initializer_list<const void*> arguments, const DeviceInfo& device,
                   cudaStream_t stream);
// The same of a kernel with clusters. False, and no error, where the part of the GPU that this
// context has (a green context, a MIG slice) has no place for one of that size.
bool launch_clusters(const Kernel& kernel, const LaunchShape& shape,
                     std::initializer_list<const void*> arguments, const DeviceInfo& device,
                     cudaStream_t stream);

// Where a kernel's structs are that are not the library's own.
inline std::string structs_of(const Variant* variant) {
  return variant != nullptr ? variant->header : "";
}

// With a variant, `args` are the base of what its kernels take.
void launch_forward(const NormForwardArgs& args, const Variant* variant, const DeviceInfo& device,
                    cudaStream_t stream);
// And the output in 8 bits, of which the output itself is null or, unless
// quantizes_in_registers(), is not.
void launch_quantized(const QuantizedForwardArgs& args, const DeviceInfo& device,
                      cudaStream_t stream);

// False, and nothing is launched, where no kernel takes both norms. Fills in what is null.
bool launch_post_add_pre(PostAddPreForwardArgs& args, const DeviceInfo& device,
                         cudaStream_t stream);

std::size_t backward_workspace(const NormBackwardArgs& args, const Variant* variant,
                               const DeviceInfo& device);
void launch_backward(const NormBackwardArgs& args, const Variant* variant, const DeviceInfo& device,
                     cudaStream_t stream);

// Of rows that are too long for a CTA.
void launch_long_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                          const DeviceInfo& device, cudaStream_t stream);

// Adds partial sums, [parts, 1 or 2, partials_stride(cols)], up to the parameters' gradients. The
// kernel is asked for first: nothing is launched where it cannot be had.
const Kernel& add_partials_kernel(const BackwardSpec& spec, const DeviceInfo& device);
void launch_add_partials(const Kernel& kernel, const NormBackwardArgs& args,
                         const BackwardSpec& spec, const void* partials, std::int64_t parts,
                         const DeviceInfo& device, cudaStream_t stream);

}  // namespace fused_op::cuda
