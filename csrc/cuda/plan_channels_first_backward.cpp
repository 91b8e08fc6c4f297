// Plans of backward of norms over channels: see channels_first.h. Host code without CUDA or torch.
#include <algorithm>
#include <cstdint>

#include "core/pack.h"
#include "cuda/backward_tile.h"
#include "cuda/plan.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {
namespace {

// The threads that a CTA should have, and how many it may have so that eight lanes share a tile.
constexpr int kLikedThreads = 128;
constexpr int kMostThreads = 256;
constexpr int kStreams = 2;    // x and dy
constexpr int kTilesOfSm = 4;  // tiles are made narrower if there are fewer

// The order of sums follows from the slices, so they depend on the channels alone. Six channels a
// slice: with fewer, the exchange of sums would cost more; with more, shared memory would have room
// for too few threads.
int slices_of(std::int64_t channels) {
  int slices = 8;
  while (slices < 128 && channels > 6 * slices) {
    slices *= 2;
  }
  return slices;
}

// A call as a plan sees it.
struct Call {
  DType dtype;
  DType param_dtype;
  std::int64_t rows;
  std::int64_t channels;
  std::int64_t pixels;
  bool silu;
  std::int64_t sums;         // of channels
  std::uintptr_t addresses;  // or'ed

  int pixels_of_lane() const { return kVectorBytes / size_of(dtype); }
  int accumulator_bytes() const { return dtype == DType::kFloat64 ? 8 : 4; }
};

std::int64_t tiles_of(const Call& call, int lanes) {
  return ceil_div(call.rows, std::int64_t{lanes} * call.pixels_of_lane());
}

int pack_of(const Call& call) {
  int pack = call.pixels_of_lane();
  while (call.pixels % pack != 0 ||
         call.addresses % static_cast<std::uintptr_t>(pack * size_of(call.dtype)) != 0) {
    pack /= 2;
  }
  return pack;
}

// The shared memory that a CTA needs beside its tiles and the sums of channels.
std::int64_t exchange_bytes(const Call& call, int lanes, int slices) {
  return exchanged_values(lanes * call.pixels_of_lane(), lanes * slices / kWarpSize) *
         call.accumulator_bytes();
}

// The CTAs that an SM has threads and shared memory for; the system takes 1 KiB of each.
std::int64_t ctas_of_sm(const ChannelsFirstBackwardPlan& plan, const Call& call,
                        std::int64_t shared_bytes, const DeviceInfo& device) {
  const int threads = backward_threads(size_of(call.dtype), plan.pack, call.silu);
  return std::clamp<std::int64_t>((device.shared_bytes + 1024) / (shared_bytes + 1024), 1,
                                  std::max(threads / plan.threads(), 1));
}

// Chooses how many channels of how many tiles are in shared memory at once: those of two tiles, if
// as many CTAs then have room as with one; of one tile; or some of one. H200, bf16, LayerNorm,
// share of add with two tiles and with one: 0.67 0.72 at 96 channels, 0.61 0.65 at 192, but 0.64
// 0.61 at 128, where as many CTAs have room. Copies of less than 16 bytes need the L1 cache, which
// has what is left of shared memory: 0.23 0.31 at 64x384x196, 0.49 0.54 at 64x96x3134.
void fit_shared(ChannelsFirstBackwardPlan& plan, const Call& call, int most_lanes,
                const DeviceInfo& device) {
  const auto tile_bytes = [&](int lanes) {
    return kStreams * call.channels * lanes * kVectorBytes;
  };
  const auto room = [&](int lanes) {
    return most_dynamic_shared(device) - exchange_bytes(call, lanes, plan.slices);
  };
  const std::int64_t parameters = channel_slots(call.channels, plan.slices) * (call.silu ? 2 : 1);
  const std::int64_t kept =  // beside a whole tile
      call.sums * call.accumulator_bytes() + parameters * size_of(call.param_dtype);
  plan.whole = true;
  plan.some = call.channels;
  const auto fits = [&](bool alone) {  // whether one CTA may be alone on its SM with one tile
    const std::int64_t bytes = tile_bytes(plan.lanes) + kept;
    if (plan.threads() < kWarpSize || bytes > room(plan.lanes)) {
      return false;
    }
    plan.shared_bytes = bytes + exchange_bytes(call, plan.lanes, plan.slices);
    const std::int64_t with_two = plan.shared_bytes + tile_bytes(plan.lanes);
    const std::int64_t ctas = ctas_of_sm(plan, call, plan.shared_bytes, device);
    const bool fits_two = with_two <= most_dynamic_shared(device) &&
                          ctas_of_sm(plan, call, with_two, device) == ctas &&
                          (ctas == 1 || plan.pack == call.pixels_of_lane());
    plan.stages = fits_two ? 2 : 1;
    plan.shared_bytes = fits_two ? with_two : plan.shared_bytes;
    return fits_two || ctas > 1 || alone;
  };
  for (const bool alone : {false, true}) {
    for (plan.lanes = most_lanes; plan.lanes > 1; plan.lanes /= 2) {
      if (fits(alone)) {
        return;
      }
    }
  }
  plan.whole = false;
  plan.stages = 1;
  plan.lanes = most_lanes;
  const std::int64_t slice_bytes = tile_bytes(plan.lanes) / call.channels * plan.slices;
  plan.some = room(plan.lanes) / slice_bytes * plan.slices;
  plan.shared_bytes =
      plan.some / plan.slices * slice_bytes + exchange_bytes(call, plan.lanes, plan.slices);
}

ChannelsFirstBackwardPlan plan_of(const Call& call, const DeviceInfo& device) {
  ChannelsFirstBackwardPlan plan{};
  plan.pack = pack_of(call);
  plan.slices = slices_of(call.channels);
  int lanes = std::max(kLikedThreads / plan.slices, std::clamp(kMostThreads / plan.slices, 4, 8));
  while (lanes > 4 && tiles_of(call, lanes) < std::int64_t{kTilesOfSm} * device.multiprocessors) {
    lanes /= 2;
  }
  fit_shared(plan, call, lanes, device);
  plan.ctas = std::min(tiles_of(call, plan.lanes),
                       ctas_of_sm(plan, call, plan.shared_bytes, device) * device.multiprocessors);
  return plan;
}

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

ChannelsFirstBackwardPlan plan_channels_first(const ChannelsFirstBackwardArgs& args,
                                              const DeviceInfo& device) {
  const bool sums = args.wants_sums();
  const std::int64_t row = 2 * partials_stride(args.cols);
  ChannelsFirstBackwardPlan plan =
      plan_of({.dtype = args.dtype,
               .param_dtype = args.param_dtype,
               .rows = args.rows,
               .channels = args.cols,
               .pixels = args.pixels,
               .silu = args.silu,
               .sums = sums ? row : 0,
               .addresses = address(args.x.data) | address(args.grad_output.data) |
                            address(args.grad_input.data)},
              device);
  if (sums) {
    plan.partials_bytes = plan.ctas * row * (args.dtype == DType::kFloat64 ? 8 : 4);
  }
  return plan;
}

std::string kernel_name(const ChannelsFirstBackwardArgs& args,
                        const ChannelsFirstBackwardPlan& plan) {
  const std::string staged = plan.whole ? "AllChannels" : "SomeChannels";
  return "fused_op::cuda::channels_first_backward_kernel<fused_op::cuda::ChannelsFirstBackwardOp" +
         joined({norm_name(args.kind), type(args.dtype), type(args.param_dtype), number(plan.pack),
                 number(plan.lanes), number(plan.slices), "fused_op::cuda::" + staged,
                 flag(args.silu)}) +
         ">";
}

}  // namespace fused_op::cuda
