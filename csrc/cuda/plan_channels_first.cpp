// Plans of forward of norms over channels: see channels_first.h. Host code without CUDA or torch.
#include <algorithm>
#include <cstdint>

#include "core/pack.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

constexpr int kMaxWarps = 16;       // of a group
constexpr int kLeastWarps = 8;      // of a CTA
constexpr int kFewestCtas = 2;      // of an SM: wide packs are used only if they leave this many
constexpr int kLeastBytes = 4;      // of a pack, unless addresses allow only fewer
constexpr int kReadAgainBytes = 8;  // of a pack of channels that are not kept
// How many words a thread with 128 registers may keep and compute with. Beyond the second number,
// narrower packs and more threads are faster.
constexpr int kMostWords = 56;
constexpr int kMostWideWords = 48;
constexpr int kValues = 4;  // of a pixel, in registers

// The warps of a group. The order of sums follows from them, so they depend on the channels alone.
int warps_of(std::int64_t channels) {
  int warps = 1;
  while (warps < kMaxWarps && channels > 16 * warps) {
    warps *= 2;
  }
  return warps == kMaxWarps && channels <= 192 ? kMaxWarps / 2 : warps;
}

// A call as a plan sees it.
struct Call {
  DType dtype;
  std::int64_t rows;
  std::int64_t channels;
  std::int64_t pixels;
  std::uintptr_t addresses;  // or'ed
};

bool allows(const Call& call, int pack) {
  return call.pixels % pack == 0 &&
         call.addresses % static_cast<std::uintptr_t>(pack * size_of(call.dtype)) == 0;
}
std::int64_t tiles_of(const Call& call, int pack) {
  return ceil_div(call.rows, std::int64_t{kWarpSize} * pack);
}
std::int64_t words_of(const Call& call, int pack, int warps) {
  const std::int64_t each = ceil_div(call.channels, warps);
  const int words = std::max(pack * size_of(call.dtype) / 4, 1);
  const int value_words = call.dtype == DType::kFloat64 ? 2 : 1;
  return each * words + kValues * pack * value_words;
}

// The threads of an SM that have registers for so many words. H200, bf16, LayerNorm, share of copy
// with 512, 768 and 1024: 0.63 0.75 0.84 at 80 channels (36 words), 0.72 0.83 0.77 at 96 (40), 0.79
// 0.75 0.54 at 64 (48).
int threads_for(std::int64_t words) { return words <= 36 ? 1024 : words <= 40 ? 768 : 512; }

ChannelsFirstPlan plan_of(const Call& call, const DeviceInfo& device) {
  ChannelsFirstPlan plan{};
  plan.warps = warps_of(call.channels);
  plan.groups = std::max(kLeastWarps / plan.warps, 1);
  const int size = size_of(call.dtype);
  const auto is_wide = [&](int pack) {
    return !allows(call, pack) || (pack * size > kLeastBytes &&
                                   tiles_of(call, pack) < std::int64_t{kFewestCtas} * plan.groups *
                                                              device.multiprocessors);
  };
  int pack = kVectorBytes / size;
  while (pack > 1 && (is_wide(pack) || (pack * size > kLeastBytes &&
                                        words_of(call, pack, plan.warps) > kMostWideWords))) {
    pack /= 2;
  }
  const int threads = kWarpSize * plan.warps * plan.groups;
  const std::int64_t words = words_of(call, pack, plan.warps);
  if (words <= kMostWords) {
    plan.channels = static_cast<int>(call.channels);
    plan.ctas_per_sm = threads_for(words) / threads;
  } else {
    plan.ctas_per_sm = kThreadsReadingAgain / threads;
    pack = std::max(kReadAgainBytes / size, 1);
    while (pack > 1 && is_wide(pack)) {
      pack /= 2;
    }
  }
  plan.pack = pack;
  plan.ctas = ceil_div(tiles_of(call, pack), plan.groups);
  return plan;
}

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

ChannelsFirstPlan plan_channels_first(const ChannelsFirstForwardArgs& args,
                                      const DeviceInfo& device) {
  return plan_of({.dtype = args.dtype,
                  .rows = args.rows,
                  .channels = args.cols,
                  .pixels = args.pixels,
                  .addresses = address(args.input.data) | address(args.output.data)},
                 device);
}

std::string kernel_name(const ChannelsFirstForwardArgs& args, const ChannelsFirstPlan& plan) {
  return "fused_op::cuda::channels_first_forward_kernel<fused_op::cuda::ChannelsFirstForwardOp" +
         joined({norm_name(args.kind), type(args.dtype), type(args.param_dtype), number(plan.pack),
                 number(plan.warps), number(plan.groups), number(plan.channels),
                 number(plan.ctas_per_sm), flag(args.silu)}) +
         ">";
}

}  // namespace fused_op::cuda
