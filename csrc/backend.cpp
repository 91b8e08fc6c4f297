// The one place where torch meets CUDA and threads: device guard, current stream, launch errors,
// at::parallel_for. It does not include ATen/cuda/CUDAContext.h, which needs the headers of cuBLAS
// and cuSPARSE; nvcc alone does not bring them.
#include "backend.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>

#include "cpu/fused_op_cpu.h"

#ifdef FUSED_OP_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/fused_op_kernel.h"
#elif !defined(FUSED_OP_NO_CUDA_REASON)
#define FUSED_OP_NO_CUDA_REASON "the build did not say why"
#endif

namespace fused_op::backend {
namespace {

// For fewer elements than this, waking a thread costs more than its share of the work.
constexpr std::int64_t kElementsPerThread = 32768;

// A forked child inherits the parent's OpenMP runtime, but none of its threads: a parallel region
// there waits for them forever.
bool in_forked_child = false;
[[maybe_unused]] const int fork_handler_status =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

// The scratch memory of a call. It lives until the kernels have been queued.
class Workspace {
 public:
  explicit Workspace(at::Device device) : device_(device) {}

  void* allocate(std::size_t bytes) {  // null for none
    if (bytes == 0) {
      return nullptr;
    }
    memory_ = empty({static_cast<std::int64_t>(bytes)}, at::kByte, device_);
    return memory_.mutable_data_ptr();
  }

 private:
  at::Device device_;
  at::Tensor memory_;
};

// The loops for this CPU. FUSED_OP_CPU overrides the choice, for tests and measurements.
const cpu::Level& loops() {
  static const cpu::Level& level = []() -> const cpu::Level& {
    const char* const name = std::getenv("FUSED_OP_CPU");
    const bool is_given = name != nullptr && *name != '\0';
    const cpu::Level* const found = cpu::find_level(is_given ? name : nullptr);
    TORCH_CHECK_VALUE(found != nullptr,
                      "fused_op: FUSED_OP_CPU must be default, avx2 or avx512, and this CPU must "
                      "have the instructions; got '",
                      name, "'");
    return *found;
  }();
  return level;
}

// Calls work(first, last) on ranges that together cover [0, count). Each item has `elements`
// elements.
template <typename Work>
void parallel_for(std::int64_t count, std::int64_t elements, const Work& work) {
  if (in_forked_child) {
    work(0, count);
    return;
  }
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerThread / elements);
  at::parallel_for(0, count, grain, work);
}

// The steps of a group norm. A thread takes whole groups, each while it is in the cache; if there
// are fewer groups than threads, the chunks of all groups, step by step. The bits are the same.
template <typename Args>
void run_groups(const Args& args, double* work,
                void (*run)(const Args&, double*, cpu::GroupStep, std::int64_t, std::int64_t)) {
  using cpu::GroupStep;
  const std::int64_t chunks = cpu::GroupChunks(args).of_group();
  const std::int64_t groups = args.all_groups();
  if (groups >= at::get_num_threads() || chunks == 1) {
    parallel_for(groups, args.group_elements(), [&](std::int64_t first, std::int64_t last) {
      run(args, work, GroupStep::kAll, first, last);
    });
    return;
  }
  const auto run_chunks = [&](GroupStep step) {
    parallel_for(
        groups * chunks, args.group_elements() / chunks,
        [&](std::int64_t first, std::int64_t last) { run(args, work, step, first, last); });
  };
  run_chunks(GroupStep::kSums);
  run(args, work, GroupStep::kFinish, 0, groups);
  run_chunks(GroupStep::kApply);
}

#ifdef FUSED_OP_WITH_CUDA
void check_launch(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, "fused_op: the ", what,
              " kernel could not be launched: ", cudaGetErrorString(status), " (",
              cudaGetErrorName(status),
              "). The cause may be an earlier kernel; CUDA_LAUNCH_BLOCKING=1 shows which.");
}

at::PhiloxCudaState draw_philox_state(at::Device device) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(/*increment=*/4);
}

// In a CUDA graph, every replay has its own seed and offset. The generator writes them to device
// memory first.
at::Tensor captured_state(const at::PhiloxCudaState& drawn, at::Device device) {
  const auto value_at = [device](std::int64_t* pointer) {
    const auto options = at::TensorOptions(at::kLong).device(device);
    return at::for_blob(pointer, {1}).options(options).target_device(device).make_tensor();
  };
  const at::Tensor state = empty({2}, at::kLong, device);
  state.narrow(0, 0, 1).copy_(value_at(drawn.seed_.ptr));
  const at::Tensor offset = state.narrow(0, 1, 1).copy_(value_at(drawn.offset_.ptr));
  offset.add_(static_cast<std::int64_t>(drawn.offset_intragraph_));
  return state;
}

at::Tensor known_state(const at::PhiloxCudaState& drawn, at::Device device, bool on_device) {
  const auto seed = static_cast<std::int64_t>(drawn.seed_.val);
  const auto offset = static_cast<std::int64_t>(drawn.offset_.val);
  const at::Tensor state = empty({2}, at::kLong, on_device ? device : at::Device(at::kCPU));
  if (on_device) {  // by kernels: a copy from the CPU would wait for the GPU
    state.narrow(0, 0, 1).fill_(seed);
    state.narrow(0, 1, 1).fill_(offset);
  } else {
    auto* const values = state.mutable_data_ptr<std::int64_t>();
    values[0] = seed;
    values[1] = offset;
  }
  return state;
}
#else
[[noreturn]] void fail_without_cuda() {
  TORCH_CHECK(false, "fused_op was built without CUDA: ", FUSED_OP_NO_CUDA_REASON);
}
#endif

}  // namespace

const char* cpu_level() { return loops().name; }

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (device.is_cpu()) {
    return at::Tensor(at::detail::empty_cpu(sizes, dtype));
  }
#ifdef FUSED_OP_WITH_CUDA
  return at::Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
#else
  fail_without_cuda();
#endif
}

at::Tensor dropout_state(at::Device device, [[maybe_unused]] bool on_device) {
#ifdef FUSED_OP_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const at::PhiloxCudaState drawn = draw_philox_state(device);
    return drawn.captured_ ? captured_state(drawn, device) : known_state(drawn, device, on_device);
  }
#endif
  return empty({2}, at::kLong, device).random_();
}

void norm_forward(const NormForwardArgs& args, at::Device device, const Variant* variant) {
  if (device.is_cpu()) {
    const cpu::Level& level = loops();
    parallel_for(args.rows, args.cols, [&](std::int64_t first_row, std::int64_t last_row) {
      if (variant != nullptr) {
        level.variant_forward(variant->id, args, first_row, last_row);
      } else {
        level.forward(args, first_row, last_row);
      }
    });
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  check_launch(cuda::norm_forward(args, variant, c10::cuda::getCurrentCUDAStream()), "forward");
#else
  fail_without_cuda();
#endif
}

void norm_quantized(const NormForwardArgs& args, const Quantization& quantization,
                    at::Device device) {
  if (device.is_cpu()) {
    const cpu::Level& level = loops();
    parallel_for(args.rows, args.cols, [&](std::int64_t first_row, std::int64_t last_row) {
      cpu::norm_quantized(level, args, quantization, first_row, last_row);
    });
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  NormForwardArgs all = args;
  at::Tensor output;
  if (args.output.data == nullptr && !cuda::quantizes_in_registers(args)) {
    output = empty({args.rows * args.cols * size_of(args.output.dtype)}, at::kByte, device);
    all.output.data = output.mutable_data_ptr();
  }
  check_launch(cuda::norm_quantized(all, quantization, c10::cuda::getCurrentCUDAStream()),
               "quantised forward");
#else
  fail_without_cuda();
#endif
}

void norm_backward(NormBackwardArgs& args, at::Device device, const Variant* variant) {
  Workspace workspace(device);
  if (device.is_cpu()) {
    const cpu::BackwardWork work = cpu::backward_work(args, variant);
    args.workspace = workspace.allocate(work.workspace_bytes(args.dtype));
    const cpu::Level& level = loops();
    parallel_for(
        work.chunks, work.chunk_elements, [&](std::int64_t first_chunk, std::int64_t last_chunk) {
          if (variant != nullptr) {
            level.variant_backward_rows(variant->id, args, first_chunk, last_chunk, work.chunks);
          } else {
            level.backward_rows(args, first_chunk, last_chunk);
          }
        });
    if (work.cols > 0) {
      parallel_for(work.cols, work.chunks, [&](std::int64_t first_col, std::int64_t last_col) {
        if (variant != nullptr) {
          level.variant_backward_columns(variant->id, args, first_col, last_col, work.chunks);
        } else {
          level.backward_columns(args, first_col, last_col);
        }
      });
    }
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  args.workspace = workspace.allocate(cuda::norm_backward_workspace(args, variant));
  check_launch(cuda::norm_backward(args, variant, c10::cuda::getCurrentCUDAStream()), "backward");
#else
  fail_without_cuda();
#endif
}

bool post_add_pre_forward(PostAddPreForwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    const cpu::Level& level = loops();
    parallel_for(args.rows, args.cols, [&](std::int64_t first_row, std::int64_t last_row) {
      cpu::post_add_pre_forward(level, args, first_row, last_row);
    });
    return true;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  const auto status = cuda::post_add_pre_forward(args, c10::cuda::getCurrentCUDAStream());
  if (status.has_value()) {
    check_launch(*status, "forward");
  }
  return status.has_value();
#else
  fail_without_cuda();
#endif
}

void channels_first_forward(const ChannelsFirstForwardArgs& args, at::Device device) {
  if (device.is_cpu()) {
    const cpu::Level& level = loops();
    parallel_for(cpu::channels_first_tiles(args.rows, args.pixels),
                 cpu::tile_pixels(args.pixels) * args.cols,
                 [&](std::int64_t first_tile, std::int64_t last_tile) {
                   level.channels_first_forward(args, first_tile, last_tile);
                 });
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  check_launch(cuda::channels_first_forward(args, c10::cuda::getCurrentCUDAStream()), "forward");
#else
  fail_without_cuda();
#endif
}

void channels_first_backward(ChannelsFirstBackwardArgs& args, at::Device device) {
  Workspace workspace(device);
  if (device.is_cpu()) {
    const cpu::BackwardWork work = cpu::channels_first_work(args);
    args.workspace = workspace.allocate(work.workspace_bytes(args.dtype));
    const cpu::Level& level = loops();
    parallel_for(work.chunks, work.chunk_elements,
                 [&](std::int64_t first_chunk, std::int64_t last_chunk) {
                   level.channels_first_backward(args, first_chunk, last_chunk, work.chunks);
                 });
    if (work.cols > 0) {
      parallel_for(work.cols, work.chunks, [&](std::int64_t first_col, std::int64_t last_col) {
        level.add_chunks(args, work.chunks, first_col, last_col);
      });
    }
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  args.workspace = workspace.allocate(cuda::channels_first_workspace(args));
  check_launch(cuda::channels_first_backward(args, c10::cuda::getCurrentCUDAStream()), "backward");
#else
  fail_without_cuda();
#endif
}

bool reads_nhwc([[maybe_unused]] const GroupNormArgs& args, [[maybe_unused]] at::Device device) {
#ifdef FUSED_OP_WITH_CUDA
  return !device.is_cpu() && cuda::reads_nhwc(args);
#else
  return false;
#endif
}

void group_norm_forward(GroupNormForwardArgs& args, at::Device device) {
  Workspace workspace(device);
  if (device.is_cpu()) {
    const auto bytes = static_cast<std::size_t>(cpu::forward_doubles(args)) * sizeof(double);
    run_groups(args, static_cast<double*>(workspace.allocate(bytes)), loops().group_norm_forward);
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  args.workspace = workspace.allocate(cuda::group_norm_workspace(args));
  check_launch(cuda::group_norm_forward(args, c10::cuda::getCurrentCUDAStream()), "forward");
#else
  fail_without_cuda();
#endif
}

void group_norm_backward(GroupNormBackwardArgs& args, at::Device device) {
  Workspace workspace(device);
  if (device.is_cpu()) {
    args.workspace =
        workspace.allocate(static_cast<std::size_t>(cpu::backward_doubles(args)) * sizeof(double));
    double* const work = static_cast<double*>(args.workspace);
    const cpu::Level& level = loops();
    run_groups(args, work, level.group_norm_backward);
    if (args.wants_sums()) {
      parallel_for(args.channels, args.samples,
                   [&](std::int64_t first_channel, std::int64_t last_channel) {
                     level.group_norm_channels(args, work, first_channel, last_channel);
                   });
    }
    return;
  }
#ifdef FUSED_OP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  args.workspace = workspace.allocate(cuda::group_norm_workspace(args));
  check_launch(cuda::group_norm_backward(args, c10::cuda::getCurrentCUDAStream()), "backward");
#else
  fail_without_cuda();
#endif
}

}  // namespace fused_op::backend
