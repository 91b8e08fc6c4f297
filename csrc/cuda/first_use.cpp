#include "cuda/first_use.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>

#include "core/pack.h"
#include "cuda/backward_tile.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"

namespace fused_op::cuda {
namespace {

// Packs fields into the bits of a kernel's key. A value that its bits do not hold throws.
class KeyBits {
 public:
  KeyBits& add(std::uint64_t value, int bits) {
    if (value >> bits != 0) {
      throw std::logic_error("fused_op: a plan does not fit into the key of its kernel");
    }
    if (used_ + bits > 64) {
      key_.high = key_.low;
      key_.low = 0;
      used_ = 0;
    }
    key_.low = key_.low << bits | value;
    used_ += bits;
    return *this;
  }
  KernelKey key() const { return key_; }

 private:
  KernelKey key_{};
  int used_ = 0;
};

std::uint64_t bits(auto value) { return static_cast<std::uint64_t>(value); }

enum class KernelKind { kForward, kBackward, kPartials };

KernelKey key_of(const ForwardSpec& spec, const ForwardPlan& plan) {
  return KeyBits()
      .add(bits(KernelKind::kForward), 2)
      .add(bits(spec.norm), 1)
      .add(spec.adds, 1)
      .add(spec.dropout, 1)
      .add(spec.split, 1)
      .add(bits(spec.input), 2)
      .add(spec.adds ? bits(spec.residual) : 0, 2)
      .add(bits(spec.row), 2)
      .add(bits(spec.parameters), 2)
      .add(bits(spec.output), 2)
      .add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.vectors), 5)
      .add(bits(plan.spread), 4)
      .add(bits(plan.ahead), 5)
      .add(plan.few, 1)
      .add(plan.words, 1)
      .add(bits(plan.threads), 10)
      .add(bits(plan.ctas_per_sm), 6)
      .add(bits(plan.width), 32)
      .key();
}

KernelKey key_of(const BackwardSpec& spec, const BackwardPlan& plan) {
  return KeyBits()
      .add(bits(KernelKind::kBackward), 2)
      .add(bits(spec.norm), 1)
      .add(spec.adds, 1)
      .add(spec.drops_input, 1)
      .add(spec.drops_output, 1)
      .add(spec.recovers, 1)
      .add(spec.split, 1)
      .add(bits(spec.input), 2)
      .add(spec.adds ? bits(spec.residual) : 0, 2)
      .add(bits(spec.row), 2)
      .add(bits(spec.parameters), 2)
      .add(bits(spec.grad_output), 2)
      .add(bits(plan.pack), 4)
      .add(bits(plan.lanes), 6)
      .add(bits(plan.vectors), 6)
      .add(bits(plan.most_threads), 10)
      .add(bits(plan.ctas_per_sm), 3)
      .add(bits(plan.stages), 2)
      .add(bits(plan.keep), 2)
      .add(plan.parameters_stay, 1)
      .add(bits(plan.move), 2)
      .add(bits(plan.width), 32)
      .key();
}
KernelKey partials_key(const BackwardSpec& spec) {
  return KeyBits()
      .add(bits(KernelKind::kPartials), 2)
      .add(bits(spec.parameters), 2)
      .add(spec.row == DType::kFloat64, 1)
      .key();
}

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), placed while the kernel before it
// still runs (sm_90).
cudaError_t launch(const Kernel& kernel, dim3 grid, dim3 block, std::int64_t shared_bytes,
                   std::initializer_list<const void*> arguments, const DeviceInfo& device,
                   cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device.sm_90 ? 1 : 0;
  void* pointers[8];
  std::transform(arguments.begin(), arguments.end(), pointers,
                 [](const void* argument) { return const_cast<void*>(argument); });
  return cudaLaunchKernelExC(&config, kernel.function(), pointers);
}

const Kernel* find(const BackwardSpec& spec, const BackwardPlan& plan, const DeviceInfo& device) {
  const Kernel* const kernel = find_kernel(key_of(spec, plan), device, [&] {
    return KernelSource{.header = kBackwardHeader, .name = kernel_name(spec, plan)};
  });
  const bool has_room =
      kernel != nullptr && kernel->allow_shared(static_cast<int>(plan.shared_bytes), device);
  return has_room ? kernel : nullptr;
}
const Kernel* find_partials(const BackwardSpec& spec, const DeviceInfo& device) {
  return find_kernel(partials_key(spec), device, [&] {
    return KernelSource{.header = kPartialsHeader, .name = partials_kernel_name(spec)};
  });
}

// Where add_partials_kernel puts the gradients: PartialsTargets of cuda/add_partials.cuh.
struct PartialsTargets {
  void* data[2];
  bool add;
};

// As many columns as a CTA of add_partials_kernel adds, and the shared memory it has of its own.
struct PartialsShape {
  static constexpr int kLanes = 8;
  static constexpr int kRows = 16;
  int cols;
  int own_bytes;

  explicit PartialsShape(int size)
      : cols(kLanes * kVectorBytes / size), own_bytes(kRows * cols * size) {}
};

void launch_partials(const Kernel& kernel, const NormBackwardArgs& args, const BackwardSpec& spec,
                     const BackwardPlan& plan, const DeviceInfo& device, cudaStream_t stream) {
  const int size = spec.row == DType::kFloat64 ? 8 : 4;
  const PartialsShape shape(size);
  const int grads = spec.norm == NormKind::kLayerNorm ? 2 : 1;
  const dim3 grid(static_cast<unsigned>((args.cols + shape.cols - 1) / shape.cols),
                  static_cast<unsigned>(grads));
  // With programmatic launch its CTAs start on whichever SMs free up first, and pile up there.
  // Unused shared memory limits each SM to its share.
  const int ctas = static_cast<int>(grid.x * grid.y);
  const int per_sm = (ctas + device.multiprocessors - 1) / device.multiprocessors;
  const int most = device.shared_bytes - shape.own_bytes - 2048;
  const int unused = std::clamp(device.shared_bytes / per_sm - shape.own_bytes - 2048, 0, most);
  const int shared_bytes = kernel.allow_shared(unused, device) ? unused : 0;
  const PartialsTargets targets{{args.grad_weight, args.grad_bias}, args.add_grads};
  const int parts = static_cast<int>(plan.ctas);
  const std::int64_t stride = partials_stride(args.cols);
  launch(kernel, grid, dim3(PartialsShape::kLanes, PartialsShape::kRows), shared_bytes,
         {&args.workspace, &parts, &grads, &stride, &args.cols, &targets}, device, stream);
}

thread_local bool is_missing = false;

void note_missing() { is_missing = jit_mode() != Jit::kOff; }

}  // namespace

bool launch_first_use(const NormForwardArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  const ForwardSpec spec = spec_of(args);
  if (!has_plan(spec, args.cols)) {
    return false;
  }
  const ForwardPlan plan =
      plan_forward(spec, args.rows, args.cols, rows_aligned(args, spec), device);
  const Kernel* const kernel = find_kernel(key_of(spec, plan), device, [&] {
    return KernelSource{.header = kForwardHeader, .name = kernel_name(spec, plan)};
  });
  if (kernel == nullptr) {
    note_missing();
    return false;
  }
  launch(*kernel, dim3(static_cast<unsigned>(plan.ctas)), dim3(static_cast<unsigned>(plan.threads)),
         0, {&args}, device, stream);
  return true;
}

std::size_t first_use_workspace(const NormBackwardArgs& args, const DeviceInfo& device) {
  const BackwardSpec spec = spec_of(args);
  return static_cast<std::size_t>(plan_backward(args, spec, device).partials_bytes);
}

bool launch_first_use(const NormBackwardArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  const BackwardSpec spec = spec_of(args);
  const BackwardPlan plan = plan_backward(args, spec, device);
  if (plan.lanes == 0) {
    return false;
  }
  const Kernel* const kernel = find(spec, plan, device);
  const Kernel* const partials =
      kernel != nullptr && plan.partials_bytes > 0 ? find_partials(spec, device) : nullptr;
  if (kernel == nullptr || (plan.partials_bytes > 0 && partials == nullptr)) {
    note_missing();
    return false;
  }
  const std::int64_t rows = plan.ctas * plan.side_by_side;
  const auto bytes = [&](const ConstRows& of) { return rows * of.stride * size_of(of.dtype); };
  const BackwardSteps steps{rows,
                            (plan.stages - 1) * rows,
                            {bytes(args.x), bytes(args.grad_output), bytes(args.grad_sum)}};
  const void* const sums = plan.partials_bytes > 0 ? args.workspace : nullptr;
  const dim3 block(static_cast<unsigned>(plan.row_threads),
                   static_cast<unsigned>(plan.side_by_side));
  const cudaError_t status = launch(*kernel, dim3(static_cast<unsigned>(plan.ctas)), block,
                                    plan.shared_bytes, {&args, &steps, &sums}, device, stream);
  if (partials != nullptr && status == cudaSuccess) {
    launch_partials(*partials, args, spec, plan, device, stream);
  }
  return true;
}

const std::string* take_missing_kernel() {
  const bool missing = is_missing;
  is_missing = false;
  return missing ? &why_no_kernel() : nullptr;
}

}  // namespace fused_op::cuda
