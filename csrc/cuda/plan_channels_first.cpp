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
constexpr int kMostPack = 4;        // pixels
constexpr int kLeastBytes = 4;      // of a pack, unless addresses allow only fewer
constexpr int kReadAgainBytes = 8;  // of a pack of channels that are not kept

// How many words of pixels a thread keeps if an SM has so many threads. H200, bf16, LayerNorm,
// share of copy with packs of two and of four pixels: with 1024 threads 0.82 0.85 at 64x128x3136
// (16 and 32 words), 0.79 0.85 at 256x320x784 (20 and 40), 0.60 at 64x512x196 (32); with 512
// threads 0.48 0.55 there (32 and 64), 0.55 0.64 at 256x768x196 (48 and 96).
struct Room {
  int threads;
  int words;
};
constexpr Room kRooms[] = {{1024, 40}, {512, 96}};

// The warps of a group. The order of sums follows from them, so they depend on the channels alone.
int warps_of(std::int64_t channels) {
  int warps = channels > 8 ? 2 : 1;  // 16 channels in one warp would spill
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
// Of the pixels of a lane. Packs of 2 bytes count as 3, because two share a word.
std::int64_t words_of(const Call& call, int pack, int warps) {
  return ceil_div(ceil_div(call.channels, warps) * std::max(pack * size_of(call.dtype), 3), 4);
}

ChannelsFirstPlan plan_of(const Call& call, const DeviceInfo& device) {
  ChannelsFirstPlan plan{};
  plan.warps = warps_of(call.channels);
  plan.groups = std::max(kLeastWarps / plan.warps, 1);
  const int size = size_of(call.dtype), threads = kWarpSize * plan.warps * plan.groups;
  const int least = std::max(kLeastBytes / size, 1);
  const std::int64_t groups = std::int64_t{plan.groups} * device.multiprocessors;
  // The widest pack, up to `pack`, that leaves so many tiles. With fewer, too many SMs would be
  // idle; but 98 tiles of four pixels on 132 SMs were faster than 196 of two: 0.65 0.57 of copy at
  // 8x768x1568 (H200, bf16).
  const auto widest = [&](int pack, std::int64_t tiles) {
    while (pack > 1 && (!allows(call, pack) || (pack > least && tiles_of(call, pack) < tiles))) {
      pack /= 2;
    }
    return pack;
  };
  plan.pack = widest(std::max(kReadAgainBytes / size, 1), 2 * groups);
  plan.ctas_per_sm = kThreadsReadingAgain / threads;
  const int most = widest(std::min(kMostPack, kVectorBytes / size), (groups + 1) / 2);
  for (const Room& room : kRooms) {
    for (int pack = most; pack >= std::min(least, most) && plan.channels == 0; pack /= 2) {
      if (words_of(call, pack, plan.warps) <= room.words) {
        plan.channels = static_cast<int>(call.channels);
        plan.pack = pack;
        plan.ctas_per_sm = room.threads / threads;
      }
    }
  }
  plan.ctas = ceil_div(tiles_of(call, plan.pack), plan.groups);
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
