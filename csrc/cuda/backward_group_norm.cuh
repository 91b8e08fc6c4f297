// Backward of the group norm of images (core/group_norm.h). As in forward, a cluster reads a group
// twice: once for its sums, with which the sums of each channel leave for the workspace, and once
// for dx. A second kernel adds up the sums of channels. Compiled by NVRTC; torch-free.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/group_norm_slots.cuh"

namespace fused_op::cuda {

// Σ dn and Σ dn·x̂ over some pixels of a channel.
template <typename A>
struct PlaneSums {
  A dn;
  A dn_xhat;
};

// The sums over lanes whose numbers differ in some bits: from that of `largest` down to that of
// `smallest`.
template <typename A>
__device__ __forceinline__ PlaneSums<A> sum_of_lanes(PlaneSums<A> sums, int largest, int smallest) {
  for (int offset = largest; offset >= smallest; offset /= 2) {
    sums.dn += __shfl_xor_sync(kAllLanes, sums.dn, offset);
    sums.dn_xhat += __shfl_xor_sync(kAllLanes, sums.dn_xhat, offset);
  }
  return sums;
}

template <typename Op>
struct GroupBackward {
  using A = typename Op::A;
  using E = typename Op::E;
  using Packs = Pack<E, Op::N>;
  static constexpr int N = Op::N;
  static constexpr int kAtOnce = Op::kAtOnce;
  static constexpr int kThreads = kGroupBackwardWarps * kWarpSize;  // of a CTA, at most

  const GroupNormBackwardArgs& args;
  const GroupNormSteps& steps;
  const GroupPlace& place;
  KeptPacks<Op, 2> input;  // x, and dy
  GroupMaps<A> maps;
  Normalizer<A> normalizer;

  // Computes x̂ and dn.
  __device__ __forceinline__ void take(const Packs& x_pack, const Packs& dy_pack,
                                       const ChannelMap<A>& map, A (&xhat)[N], A (&dn)[N]) const {
    to_values(x_pack, xhat);
    to_values(dy_pack, dn);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[j] = LayerNorm::normalized(xhat[j], normalizer);
      if constexpr (Op::kSilu) {
        dn[j] *= silu<E>(multiply_add(xhat[j], map.factor, map.offset)).slope;
      }
    }
  }

  __device__ __forceinline__ SlotLane<Op> lane_of(int k) const {
    return {GroupSlot(steps, place.first_slot + k), steps, args.pixels};
  }

  // Stores the sums of a plane, which its lanes share.
  __device__ __forceinline__ void leave(int plane, bool has_plane, int turn,
                                        PlaneSums<A> sums) const {
    sums = sum_of_lanes(sums, steps.lanes / 2, 1);
    if (has_plane && SlotLane<Op>::lane() % steps.lanes == 0) {
      const std::int64_t channel = place.sample * args.channels + place.channel + plane;
      static_cast<PlaneSums<A>*>(args.workspace)[channel * steps.slots_of_plane + turn] = sums;
    }
  }

  // Calls use(x, dy, step) for the packs of a plane that this lane has. first: as for read().
  template <typename Use>
  __device__ __forceinline__ static void packs_of_plane(bool first, const KeptPacks<Op, 2>& from,
                                                        const SlotLane<Op>& mine,
                                                        const PlanePart& part, Use&& use) {
#pragma unroll 1
    for (int step = 0; step < mine.steps; step += kAtOnce) {
      Packs packs[2][kAtOnce];
      from.read(first, mine, part, step, packs);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (step + i < part.own_steps) {
          use(packs[0][i], packs[1][i], step + i);
        }
      }
    }
  }

  // The sums of a slot, valid in every lane of the warp.
  __device__ __forceinline__ PullbackSums<A> add_slot(int k) const {
    const SlotLane<Op> mine = lane_of(k);
    A totals[2] = {};
    mine.planes([&](const PlanePart& part) {
      const bool has_plane = part.plane < mine.slot.first_plane + mine.slot.planes;
      const ChannelMap<A> map = has_plane ? maps.at(part.plane) : ChannelMap<A>{};
      PlaneSums<A> of_plane{};
      packs_of_plane(true, input.of_slot(k), mine, part,
                     [&](const Packs& x_pack, const Packs& dy_pack, int) {
                       A xhat[N], dn[N];
                       take(x_pack, dy_pack, map, xhat, dn);
                       PlaneSums<A> of_pack{};
#pragma unroll
                       for (int j = 0; j < N; ++j) {
                         of_pack.dn += dn[j];
                         of_pack.dn_xhat = multiply_add(dn[j], xhat[j], of_pack.dn_xhat);
                       }
                       of_plane.dn += of_pack.dn;
                       of_plane.dn_xhat += of_pack.dn_xhat;
                     });
      totals[0] = multiply_add(map.factor, of_plane.dn_xhat, totals[0]);
      totals[1] = multiply_add(map.factor, of_plane.dn, totals[1]);
      if (args.wants_sums()) {
        leave(part.plane, has_plane, mine.slot.turn, of_plane);
      }
    });
    lane_sums<kWarpSize>(totals);
    return {totals[0], totals[1]};
  }

  __device__ __forceinline__ void write_slot(int k, const Pullback<LayerNorm, A>& pullback) const {
    const SlotLane<Op> mine = lane_of(k);
    E* const grad_input = static_cast<E*>(args.grad_input) + place.first;
    mine.planes([&](const PlanePart& part) {
      const ChannelMap<A> map = part.own_steps > 0 ? maps.at(part.plane) : ChannelMap<A>{};
      packs_of_plane(false, input.of_slot(k), mine, part,
                     [&](const Packs& x_pack, const Packs& dy_pack, int step) {
                       A xhat[N], dn[N];
                       take(x_pack, dy_pack, map, xhat, dn);
#pragma unroll
                       for (int j = 0; j < N; ++j) {
                         dn[j] = pullback(dn[j] * map.factor, xhat[j]);
                       }
                       store_bytes_if<sizeof(E) * N>(true, mine.pack_at(grad_input, part, step),
                                                     rounded<E>(dn).words);
                     });
    });
  }
};

// The sums of a group, from those of its slots; valid in every lane.
template <typename A>
__device__ __forceinline__ PullbackSums<A> sums_of_slots(const PullbackSums<A>* slots, int count) {
  A sums[2] = {};
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x) % kWarpSize; slot < count; slot += kWarpSize) {
    sums[0] += slots[slot].wdy_xhat;
    sums[1] += slots[slot].wdy;
  }
  lane_sums<kWarpSize>(sums);
  return {sums[0], sums[1]};
}

// grid: steps.cluster CTAs a group; block: whole warps.
template <typename Op>
__global__ void __launch_bounds__(GroupBackward<Op>::kThreads, kGroupCtasPerSm)
    group_norm_backward_kernel(const __grid_constant__ GroupNormBackwardArgs args,
                               const __grid_constant__ GroupNormSteps steps) {
  using A = typename Op::A;
  using E = typename Op::E;
  extern __shared__ uint4 dynamic[];
  alignas(16) __shared__ PullbackSums<A> slots[kGroupSlots];
  __shared__ std::uint64_t arrival;
  const GroupPlace place(args, steps);
  const SlotExchange<PullbackSums<A>> exchange{slots, &arrival, steps.slots, steps.cluster};
  exchange.begin();
  await_kernels_before();
  const A* const stats = static_cast<const A*>(args.stats);
  auto* const maps = reinterpret_cast<ChannelMap<A>*>(dynamic);
  auto* const kept = reinterpret_cast<Pack<E, Op::N>*>(maps + (steps.mapped + 1) / 2 * 2);
  const GroupBackward<Op> backward{
      args,
      steps,
      place,
      {{static_cast<const E*>(args.input) + place.first,
        static_cast<const E*>(args.grad_output) + place.first},
       kept + SlotLane<Op>::lane(),
       steps.kept},
      {args.channel, maps, steps.mapped, place.sample, place.channel},
      LayerNorm::saved(stats, place.group, args.samples * args.groups).normalizer()};
  backward.maps.fill();
  exchange.ready();
  __syncthreads();
#pragma unroll 1
  for (int k = place.warp(); k < place.slots; k += place.warps()) {
    exchange.put(place.first_slot + k, backward.add_slot(k));
  }
  exchange.await();
  if (args.grad_input == nullptr) {
    return;
  }
  const A inverse = reciprocal(static_cast<A>(steps.channels * args.pixels));
  const Pullback<LayerNorm, A> pullback(sums_of_slots(slots, steps.slots), backward.normalizer,
                                        inverse);
#pragma unroll 1
  for (int k = place.warp(); k < place.slots; k += place.warps()) {
    backward.write_slot(k, pullback);
  }
}

// Adds up the sums of channels, [samples, channels, slices], and writes the gradients of the
// parameters. A CTA has a channel. `lanes` neighbouring threads, a power of two, share a sample.
template <typename A>
__global__ void __launch_bounds__(kGroupSumsThreads)
    group_norm_sums_kernel(const __grid_constant__ GroupNormBackwardArgs args, int slices,
                           int lanes) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t channel = blockIdx.x;
  const ChannelArgs& given = args.channel;
  const int at_once = kGroupSumsThreads / lanes;
  await_kernels_before();
  PlaneSums<A> totals{};
  for (std::int64_t first = 0; first < args.samples; first += at_once) {
    const std::int64_t sample = first + thread / lanes;
    const bool live = sample < args.samples;
    const std::int64_t entry = sample * args.channels + channel;
    const auto* const parts = static_cast<const PlaneSums<A>*>(args.workspace) + entry * slices;
    PlaneSums<A> sums{};
    for (int slice = thread % lanes; live && slice < slices; slice += lanes) {
      sums.dn += parts[slice].dn;
      sums.dn_xhat += parts[slice].dn_xhat;
    }
    sums = sum_of_lanes(sums, lanes / 2, 1);
    if (live) {
      const A factor = A(1) + read_parameter<A>(given.scale, given.entry_dtype,
                                                sample * given.entry_stride + channel, 0);
      totals.dn = multiply_add(factor, sums.dn, totals.dn);
      totals.dn_xhat = multiply_add(factor, sums.dn_xhat, totals.dn_xhat);
      if (thread % lanes == 0) {
        const A weight = read_parameter<A>(given.weight, given.param_dtype, channel, 1);
        const A bias = read_parameter<A>(given.bias, given.param_dtype, channel, 0);
        const A scale = multiply_add(weight, sums.dn_xhat, bias * sums.dn);
        write_parameter(args.grad_scale, given.entry_dtype, entry, scale);
        write_parameter(args.grad_shift, given.entry_dtype, entry, sums.dn);
      }
    }
  }
  __shared__ PlaneSums<A> of_warps[kGroupSumsThreads / kWarpSize];
  totals = sum_of_lanes(totals, kWarpSize / 2, lanes);
  if (thread % kWarpSize == 0) {
    of_warps[thread / kWarpSize] = totals;
  }
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < kGroupSumsThreads / kWarpSize; ++warp) {
      totals.dn += of_warps[warp].dn;
      totals.dn_xhat += of_warps[warp].dn_xhat;
    }
    write_parameter(args.grad_weight, given.param_dtype, channel, totals.dn_xhat);
    write_parameter(args.grad_bias, given.param_dtype, channel, totals.dn);
  }
}

}  // namespace fused_op::cuda
