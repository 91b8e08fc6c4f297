// A GPU that does not exist. The launches, plans and table of kernels of csrc/cuda run as they are;
// this stands in for the driver, the runtime and the compiler below them. The interpreter runs a
// kernel as soon as it is launched. interpreter.py builds this and calls the functions at the end.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/channels_first.h"
#include "core/gated_variant.h"
#include "core/group_norm.h"
#include "core/modulated_variant.h"
#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "core/rope_variant.h"
#include "cuda/device_info.h"
#include "cuda/driver.h"
#include "cuda/fused_op_kernel.h"
#include "cuda/kernel_files.h"
#include "cuda/kernels.h"
#include "grid.h"

namespace {

constexpr int kSharedBytes = 227 << 10;  // of a CTA

struct LoadedKernel {
  std::unique_ptr<ptx::Module> module;
  std::string name;  // the name in C++
};

// The state of the GPU, set by the tests.
int device = 0;
int multiprocessors[fused_op::cuda::kMaxDevices] = {};
bool has_clusters = true;
bool runs_backwards = false;
const char* (*compiler)(const char* header, const char* name) = nullptr;
ptx::GlobalMemory memory;
std::string launched;  // one line for each launch
std::string problem;
cudaError_t last_error = cudaSuccess;

// --- The driver, where a library, its kernel and its function are the same pointer ---------------

CUresult current_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(&device);
  return CUDA_SUCCESS;
}
CUresult error_name(CUresult, const char** name) {
  *name = problem.c_str();
  return CUDA_SUCCESS;
}
CUresult load_library(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                      CUlibraryOption*, void**, unsigned) {
  const std::string text(static_cast<const char*>(code));
  const std::size_t line = text.find('\n');
  try {
    auto* const kernel = new LoadedKernel{ptx::parse(text), text.substr(3, line - 3)};
    *library = reinterpret_cast<CUlibrary>(kernel);
    return CUDA_SUCCESS;
  } catch (const std::exception& error) {
    problem = error.what();
    return CUDA_ERROR_INVALID_PTX;
  }
}
CUresult get_attribute(int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice) {
  const bool is_shared = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
  const auto* const of = reinterpret_cast<const LoadedKernel*>(kernel);
  *value = is_shared ? static_cast<int>(of->module->shared_bytes) : 0;
  return CUDA_SUCCESS;
}
CUresult active_clusters(int* count, CUfunction, const CUlaunchConfig* config) {
  const int size = static_cast<int>(config->attrs[0].value.clusterDim.x);
  *count = has_clusters ? std::max(multiprocessors[device] / size, 1) : 0;
  return CUDA_SUCCESS;
}

// Returns false, and sets `problem`, if something is wrong.
bool launch(const ptx::Module& module, const std::string& name, const ptx::LaunchShape& shape,
            void** arguments) {
  std::vector<std::byte> parameters(module.parameter_bytes);
  for (std::size_t i = 0; i < module.parameters.size(); ++i) {
    const ptx::Parameter& of = module.parameters[i];
    std::memcpy(parameters.data() + of.offset, arguments[i], of.bytes);
  }
  const auto text = [](std::uint64_t value) { return std::to_string(value); };
  try {
    if (shape.shared_bytes + module.shared_bytes > kSharedBytes) {
      throw ptx::Fault("a launch with " + text(shape.shared_bytes) + " bytes of shared memory");
    }
    const std::uint64_t executed = ptx::run(module, shape, parameters, memory, runs_backwards);
    launched += text(shape.grid[0]) + " " + text(shape.grid[1]) + " " + text(shape.block[0]) + " " +
                text(shape.block[1]) + " " + text(shape.cluster) + " " + text(shape.shared_bytes) +
                " " + text(executed) + " " + name + "\n";
    return true;
  } catch (const ptx::Fault& fault) {
    problem = std::string(fault.what()) + "\n  " + name;
    return false;
  }
}

}  // namespace

namespace fused_op::cuda {

const Driver& cuda_driver() {
  static const Driver driver = {
      .context = &current_context,
      .set_context = [](CUcontext) { return CUDA_SUCCESS; },
      .device =
          [](CUdevice* handle, int ordinal) {
            *handle = ordinal;
            return CUDA_SUCCESS;
          },
      .retain_primary_context = [](CUcontext* context,
                                   CUdevice) { return current_context(context); },
      .error_name = &error_name,
      .exchange_capture_mode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; },
      .load_library = &load_library,
      .unload_library = [](CUlibrary) { return CUDA_SUCCESS; },
      .kernel =
          [](CUkernel* kernel, CUlibrary library, const char*) {
            *kernel = reinterpret_cast<CUkernel>(library);
            return CUDA_SUCCESS;
          },
      .kernel_function =
          [](CUfunction* function, CUkernel kernel) {
            *function = reinterpret_cast<CUfunction>(kernel);
            return CUDA_SUCCESS;
          },
      .attribute = &get_attribute,
      .set_attribute = [](CUfunction_attribute, int, CUkernel, CUdevice) { return CUDA_SUCCESS; },
      .active_clusters = &active_clusters,
  };
  return driver;
}

Jit jit_mode() { return Jit::kOn; }
int max_kernels() { return 1 << 20; }
FoundImage find_image(const KernelSource& source, int, std::chrono::milliseconds) {
  const std::string both =
      "#include \"" + source.header + "\"\n#include \"" + source.structs + "\"\n";
  const std::string& header = source.structs.empty() ? source.header : both;
  const char* const text = compiler(header.c_str(), source.name.c_str());
  if (text == nullptr) {
    throw CompileError("it was not compiled");
  }
  return {{"", "// " + source.name + "\n" + text}, Origin::kCompiled};
}
void check_key(const KernelKey& key, const DeviceInfo& device, const std::string& name) {
  static std::map<std::tuple<std::uint64_t, std::uint64_t, int>, std::string> names;
  const std::string& first =
      names.try_emplace({key.low, key.high, device.arch}, name).first->second;
  if (first != name) {
    throw std::logic_error("one key for two kernels: " + first + ", " + name);
  }
}
FoundImage read_cache_or_compile(const KernelSource& source, int arch,
                                 std::chrono::milliseconds patience) {
  return find_image(source, arch, patience);
}

}  // namespace fused_op::cuda

namespace {

// What went wrong in a call; empty if nothing did.
template <typename Call>
const char* outcome(const Call& call) {
  try {
    return call() == cudaSuccess ? "" : problem.c_str();
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

fused_op::Gate gate_of(const fused_op::ConstRows& rows, bool sigmoid, bool first, int groups) {
  fused_op::Gate gate;
  gate.rows = rows;
  gate.sigmoid = sigmoid;
  gate.first = first;
  gate.groups = groups;
  gate.group = fused_op::RowSplit(static_cast<std::uint32_t>(groups), 0);
  return gate;
}

// A rotation, as a test describes it.
struct Turn {
  fused_op::ConstRows cos;  // one row for each token; repeats after `period` tokens
  fused_op::ConstRows sin;
  int period;
  int half;
  int heads;
  bool adjacent;
  bool has_own_weights;
  bool rounds_norm;
  fused_op::ConstRows grad_rows;  // where the gradient of the input goes
};
template <typename Args>
fused_op::Rotation rotation_of(const Turn& turn, const Args& args,
                               std::initializer_list<fused_op::ConstRows> rows) {
  fused_op::AngleTables angles{turn.cos, turn.sin.data, turn.half, turn.adjacent};
  angles.cos.split = fused_op::RowSplit(static_cast<std::uint32_t>(turn.period), 0);
  const bool rounds_xhat = args.rounding == fused_op::Rounding::kBeforeWeight;
  fused_op::Rotation made = fused_op::make_rotation(angles, turn.heads, turn.has_own_weights,
                                                    rounds_xhat, turn.rounds_norm, args);
  fused_op::set_packs(made, rows, args.cols);
  return made;
}

}  // namespace

// --- The runtime ---------------------------------------------------------------------------------

extern "C" {

cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? multiprocessors[device]
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedBytes
           : attribute == cudaDevAttrComputeCapabilityMajor       ? 9
           : attribute == cudaDevAttrMemoryClockRate              ? 3'201'000  // as of an H200
           : attribute == cudaDevAttrGlobalMemoryBusWidth         ? 6144
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorInvalidValue; }
const char* cudaGetErrorName(cudaError_t) { return problem.c_str(); }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  const auto& [module, name] = *static_cast<const LoadedKernel*>(function);
  ptx::LaunchShape shape;
  shape.grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  shape.block = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  shape.shared_bytes = static_cast<std::uint32_t>(config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      shape.cluster = config->attrs[i].val.clusterDim.x;
    }
  }
  if (shape.cluster > 1 && !has_clusters) {
    return last_error = cudaErrorInvalidClusterSize;
  }
  return launch(*module, name, shape, arguments) ? cudaSuccess
                                                 : last_error = cudaErrorLaunchFailure;
}

// --- For interpreter.py --------------------------------------------------------------------------

void gpu_set(int index, int sms, bool clusters, bool backwards,
             const char* (*compile)(const char*, const char*)) {
  device = index;
  multiprocessors[index] = sms;
  has_clusters = clusters;
  runs_backwards = backwards;
  compiler = compile;
  memory.clear();
  launched.clear();
  problem.clear();
}

// If `is_empty`, a read of memory that nothing has written is a fault.
void gpu_allow(const char* name, void* begin, std::int64_t bytes, bool is_writable, bool is_empty) {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  ptx::Allocation made{first, first + static_cast<std::uintptr_t>(bytes), is_writable, name};
  made.written.resize(is_empty ? static_cast<std::size_t>(bytes) : 0);
  memory.add(std::move(made));
}

// Returns what went wrong; empty if nothing did.
const char* gpu_forward(const fused_op::NormForwardArgs* args) {
  return outcome([&] { return fused_op::cuda::norm_forward(*args, nullptr, nullptr); });
}
const char* gpu_gated_forward(const fused_op::NormForwardArgs* args,
                              const fused_op::ConstRows* gate, bool sigmoid, bool first,
                              int groups) {
  return outcome([&] {
    fused_op::GatedForwardArgs all;
    static_cast<fused_op::NormForwardArgs&>(all) = *args;
    all.gate = gate_of(*gate, sigmoid, first, groups);
    fused_op::GatedVariant variant(all.gate, all.dtype, all.param_dtype, all.rounding);
    variant.split = all.input.split.inner != 0 || gate->split.inner != 0;
    return fused_op::cuda::norm_forward(all, &variant, nullptr);
  });
}
// With `bytes`, stores the size that the workspace must have, and launches nothing.
const char* gpu_gated_backward(const fused_op::NormBackwardArgs* args,
                               const fused_op::ConstRows* gate, const fused_op::Rows* grad_gate,
                               bool sigmoid, bool first, int groups, std::int64_t* bytes) {
  return outcome([&] {
    fused_op::GatedBackwardArgs all;
    static_cast<fused_op::NormBackwardArgs&>(all) = *args;
    all.gate = gate_of(*gate, sigmoid, first, groups);
    all.groups = groups;
    all.grad_gate = *grad_gate;
    fused_op::GatedVariant variant(all.gate, all.dtype, all.param_dtype, all.rounding);
    variant.split =
        all.x.split.inner != 0 || gate->split.inner != 0 || all.grad_output.split.inner != 0;
    variant.grad_beside = *grad_gate;
    if (bytes != nullptr) {
      *bytes = static_cast<std::int64_t>(fused_op::cuda::norm_backward_workspace(all, &variant));
      return cudaSuccess;
    }
    return fused_op::cuda::norm_backward(all, &variant, nullptr);
  });
}
const char* gpu_modulated_forward(const fused_op::NormForwardArgs* args,
                                  const fused_op::Modulation* modulation) {
  return outcome([&] {
    fused_op::ModulatedForwardArgs all;
    static_cast<fused_op::NormForwardArgs&>(all) = *args;
    all.modulation = *modulation;
    const fused_op::ModulatedVariant variant(all);
    return fused_op::cuda::norm_forward(all, &variant, nullptr);
  });
}
// `bytes` as above. `groups`: how many entries rows share; 1 if each row has its own.
const char* gpu_modulated_backward(const fused_op::NormBackwardArgs* args,
                                   const fused_op::Modulation* modulation,
                                   const fused_op::Rows* grad_scale, int groups,
                                   std::int64_t* bytes) {
  return outcome([&] {
    fused_op::ModulatedBackwardArgs all;
    static_cast<fused_op::NormBackwardArgs&>(all) = *args;
    all.modulation = *modulation;
    all.grad_scale = *grad_scale;
    all.groups = groups;
    const fused_op::ModulatedVariant variant(all);
    if (bytes != nullptr) {
      *bytes = static_cast<std::int64_t>(fused_op::cuda::norm_backward_workspace(all, &variant));
      return cudaSuccess;
    }
    return fused_op::cuda::norm_backward(all, &variant, nullptr);
  });
}
const char* gpu_rope_forward(const fused_op::NormForwardArgs* args, const Turn* turn) {
  return outcome([&] {
    fused_op::RopeForwardArgs all;
    static_cast<fused_op::NormForwardArgs&>(all) = *args;
    all.rotation = rotation_of(*turn, all, {all.input});
    fused_op::RopeVariant variant(all.rotation, all.dtype, all.param_dtype, all.cols, all.rounding);
    variant.split = all.input.split.inner != 0;
    return fused_op::cuda::norm_forward(all, &variant, nullptr);
  });
}
// `bytes` as above.
const char* gpu_rope_backward(const fused_op::NormBackwardArgs* args, const Turn* turn,
                              std::int64_t* bytes) {
  return outcome([&] {
    fused_op::RopeBackwardArgs all;
    static_cast<fused_op::NormBackwardArgs&>(all) = *args;
    all.rotation = rotation_of(*turn, all, {all.x, all.grad_output});
    all.groups = all.rotation.groups;
    all.grad_stride = turn->grad_rows.stride;
    all.grad_split = turn->grad_rows.split;
    fused_op::RopeVariant variant(all.rotation, all.dtype, all.param_dtype, all.cols, all.rounding);
    variant.split = all.x.split.inner != 0 || all.grad_output.split.inner != 0;
    if (bytes != nullptr) {
      *bytes = static_cast<std::int64_t>(fused_op::cuda::norm_backward_workspace(all, &variant));
      return cudaSuccess;
    }
    return fused_op::cuda::norm_backward(all, &variant, nullptr);
  });
}
// `post` has no output and `pre` no input. Sets `together` if one kernel took both.
const char* gpu_post_add_pre(const fused_op::NormForwardArgs* post,
                             const fused_op::NormForwardArgs* pre, bool* together) {
  return outcome([&] {
    fused_op::PostAddPreForwardArgs args{*pre, *post};
    const auto status = fused_op::cuda::post_add_pre_forward(args, nullptr);
    *together = status.has_value();
    return status.value_or(cudaSuccess);
  });
}
bool gpu_quantizes_in_registers(const fused_op::NormForwardArgs* args) {
  return fused_op::cuda::quantizes_in_registers(*args);
}
const char* gpu_quantized(const fused_op::NormForwardArgs* args, const fused_op::Quantization* to) {
  return outcome([&] { return fused_op::cuda::norm_quantized(*args, *to, nullptr); });
}
const char* gpu_channels_first_forward(const fused_op::NormForwardArgs* args, std::int64_t pixels,
                                       bool silu) {
  return outcome(
      [&] { return fused_op::cuda::channels_first_forward({*args, pixels, silu}, nullptr); });
}
std::int64_t gpu_channels_first_workspace(const fused_op::NormBackwardArgs* args,
                                          std::int64_t pixels, bool silu) {
  return static_cast<std::int64_t>(fused_op::cuda::channels_first_workspace({*args, pixels, silu}));
}
const char* gpu_channels_first_backward(const fused_op::NormBackwardArgs* args, std::int64_t pixels,
                                        bool silu) {
  return outcome(
      [&] { return fused_op::cuda::channels_first_backward({*args, pixels, silu}, nullptr); });
}
const char* gpu_group_norm_forward(const fused_op::GroupNormForwardArgs* args) {
  return outcome([&] { return fused_op::cuda::group_norm_forward(*args, nullptr); });
}
bool gpu_reads_nhwc(const fused_op::GroupNormForwardArgs* args) {
  return fused_op::cuda::reads_nhwc(*args);
}
std::int64_t gpu_group_norm_forward_workspace(const fused_op::GroupNormForwardArgs* args) {
  return static_cast<std::int64_t>(fused_op::cuda::group_norm_workspace(*args));
}
std::int64_t gpu_group_norm_workspace(const fused_op::GroupNormBackwardArgs* args) {
  return static_cast<std::int64_t>(fused_op::cuda::group_norm_workspace(*args));
}
const char* gpu_group_norm_backward(const fused_op::GroupNormBackwardArgs* args) {
  return outcome([&] { return fused_op::cuda::group_norm_backward(*args, nullptr); });
}
std::int64_t gpu_workspace(const fused_op::NormBackwardArgs* args) {
  return static_cast<std::int64_t>(fused_op::cuda::norm_backward_workspace(*args, nullptr));
}
const char* gpu_backward(const fused_op::NormBackwardArgs* args) {
  return outcome([&] { return fused_op::cuda::norm_backward(*args, nullptr, nullptr); });
}
// Names an argument of gpu_allow that was not written completely; empty if there is none. A
// workspace need not be.
const char* gpu_unwritten() {
  problem = memory.unwritten();
  return problem.c_str();
}
// Runs any kernel, for tests of the interpreter.
const char* gpu_run(const char* text, std::uint32_t ctas, std::uint32_t threads,
                    std::uint32_t cluster, std::uint32_t shared_bytes, void** arguments) {
  try {
    const auto module = ptx::parse(text);
    const ptx::LaunchShape shape{{ctas, 1, 1}, {threads, 1, 1}, cluster, shared_bytes};
    return launch(*module, module->name, shape, arguments) ? "" : problem.c_str();
  } catch (const ptx::Fault& fault) {
    problem = fault.what();
    return problem.c_str();
  }
}
const char* gpu_launched() { return launched.c_str(); }

}  // extern "C"
