// Forward of the group norm of images (core/group_norm.h). The CTAs of a cluster share a group.
// They read it once for its moments, and keep as much of it in shared memory as there is room for;
// the rest they read again. Compiled by NVRTC; torch-free.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/group_norm_slots.cuh"

namespace fused_op::cuda {

template <typename Op>
struct GroupForward {
  using A = typename Op::A;
  using E = typename Op::E;
  using Packs = Pack<E, Op::N>;
  static constexpr int N = Op::N;
  static constexpr int kAtOnce = Op::kAtOnce;
  static constexpr int kThreads = kGroupForwardWarps * kWarpSize;  // of a CTA, at most

  const GroupNormForwardArgs& args;
  const GroupNormSteps& steps;
  const GroupPlace& place;
  KeptPacks<Op, 1> input;
  GroupMaps<A> maps;

  __device__ __forceinline__ static void add_pack(const Packs& pack, A scale, A pivot,
                                                  A (&sums)[2]) {
    A values[N];
    A terms[2] = {};
    to_values(pack, values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A deviation = multiply_add(values[j], scale, -pivot);
      terms[0] += deviation;
      terms[1] = multiply_add(deviation, deviation, terms[1]);
    }
    sums[0] += terms[0];
    sums[1] += terms[1];
  }

  __device__ __forceinline__ SlotLane<Op> lane_of(int k) const {
    return {GroupSlot(steps, place.first_slot + k), steps, args.pixels};
  }

  // The moments of a slot's elements, times `scale`, valid in every lane of the warp. They are seen
  // as deviations from one of them, as in moments_of_part() of long_rows.cuh.
  __device__ __forceinline__ WarpMoments<A> moments_of_slot(int k, A scale, bool first) const {
    const SlotLane<Op> mine = lane_of(k);
    const KeptPacks<Op, 1> from = input.of_slot(k);
    WarpMoments<A> made{mine.slot.template packs<A>(steps) * N, {}};
    A pivot = 0;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      A sums[2] = {};
      mine.planes([&](const PlanePart& part) {
#pragma unroll 1
        for (int step = 0; step < mine.steps; step += kAtOnce) {
          Packs packs[1][kAtOnce];
          from.read(first && attempt == 0, mine, part, step, packs);
          if (attempt == 0 && part.before + step == 0) {
            A values[N] = {};
            if (part.own_steps > 0) {
              to_values(packs[0][0], values);
            }
            pivot = __shfl_sync(kAllLanes, values[0], 0) * scale;
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (step + i < part.own_steps) {
              add_pack(packs[0][i], scale, pivot, sums);
            }
          }
        }
      });
      lane_sums<kWarpSize>(sums);
      if (moments_of(sums, pivot, reciprocal(made.count), made.moments)) {
        break;
      }
      pivot = made.moments.mean;
    }
    return made;
  }

  __device__ __forceinline__ Moments<A> merged(const WarpMoments<A>* slots) const {
    const A elements = static_cast<A>(steps.channels * args.pixels);
    return merge_parts<true, kGroupSlots>(slots, steps.slots, reciprocal(elements));
  }

  __device__ __forceinline__ void write_slot(int k, const Normalizer<A>& normalizer) const {
    const SlotLane<Op> mine = lane_of(k);
    const KeptPacks<Op, 1> from = input.of_slot(k);
    E* const output = static_cast<E*>(args.output) + place.first;
    mine.planes([&](const PlanePart& part) {
      ChannelMap<A> map = part.own_steps > 0 ? maps.at(part.plane) : ChannelMap<A>{};
      map = {normalizer.rstd * map.factor,
             multiply_add(normalizer.shift, map.factor, map.offset)};  // of x - mean
#pragma unroll 1
      for (int step = 0; step < mine.steps; step += kAtOnce) {
        Packs packs[1][kAtOnce];
        from.read(false, mine, part, step, packs);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (step + i < part.own_steps) {
            write(packs[0][i], normalizer, map, mine.pack_at(output, part, step + i));
          }
        }
      }
    });
  }
  __device__ __forceinline__ static void write(const Packs& pack, const Normalizer<A>& normalizer,
                                               const ChannelMap<A>& map, E* to) {
    A values[N];
    to_values(pack, values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A deviation = multiply_add(values[j], normalizer.scale, -normalizer.mean);
      const A n = multiply_add(deviation, map.factor, map.offset);
      values[j] = Op::kSilu ? silu<E>(n).value : n;
    }
    store_bytes_if<sizeof(E) * N>(true, to, rounded<E>(values).words);
  }

  // Writes the slots of this CTA, and the statistics.
  __device__ __forceinline__ void finish(const Moments<A>& moments, A scale) const {
    const A inverse = reciprocal(static_cast<A>(steps.channels * args.pixels));
    const Normalizer<A> normalizer =
        LayerNorm::normalizer(moments, scale, inverse, static_cast<A>(args.eps));
    if (args.stats != nullptr && place.rank == 0 && threadIdx.x == 0) {
      LayerNorm::save(normalizer, moments, static_cast<A*>(args.stats), place.group,
                      args.samples * args.groups);
    }
#pragma unroll 1
    for (int k = place.warp(); k < place.slots; k += place.warps()) {
      write_slot(k, normalizer);
    }
  }
};

template <typename Op>
__device__ __forceinline__ GroupForward<Op> forward_of(const GroupNormForwardArgs& args,
                                                       const GroupNormSteps& steps,
                                                       const GroupPlace& place) {
  using E = typename Op::E;
  extern __shared__ uint4 dynamic[];
  auto* const maps = reinterpret_cast<ChannelMap<typename Op::A>*>(dynamic);
  auto* const kept = reinterpret_cast<Pack<E, Op::N>*>(maps + (steps.mapped + 1) / 2 * 2);
  return {
      args,
      steps,
      place,
      {{static_cast<const E*>(args.input) + place.first}, kept + SlotLane<Op>::lane(), steps.kept},
      {args.channel, maps, steps.mapped, place.sample, place.channel}};
}

// Finishes a group whose squares overflowed: its moments are computed again, of elements times
// Limits::kScale. All CTAs of the cluster call it. It is a function of its own, and finds its place
// again, so that the common path pays no registers for it.
template <typename Op, typename A>
__device__ __noinline__ void finish_overflowed(const GroupNormForwardArgs& args,
                                               const GroupNormSteps& steps, WarpMoments<A>* slots) {
  const GroupPlace place(args, steps);
  const GroupForward<Op> forward = forward_of<Op>(args, steps, place);
  A scale = Limits<A>::kScale;
  const auto repeat = [&](const auto& exchange) {
    exchange.barrier();  // all have read the slots
#pragma unroll 1
    for (int k = place.warp(); k < place.slots; k += place.warps()) {
      exchange.put(place.first_slot + k, forward.moments_of_slot(k, scale, false));
    }
    exchange.barrier();
  };
  if (steps.cluster == 1) {
    repeat(CtaExchange<A>{slots});
  } else {
#if __CUDA_ARCH__ >= 900
    repeat(ClusterParts<A>{slots, steps.cluster});
#endif
  }
  Moments<A> moments = forward.merged(slots);
  unscale(moments, scale);
  forward.finish(moments, scale);
}

// grid: steps.cluster CTAs a group; block: whole warps.
template <typename Op>
__global__ void __launch_bounds__(GroupForward<Op>::kThreads, kGroupCtasPerSm)
    group_norm_forward_kernel(const __grid_constant__ GroupNormForwardArgs args,
                              const __grid_constant__ GroupNormSteps steps) {
  using A = typename Op::A;
  alignas(16) __shared__ WarpMoments<A> slots[kGroupSlots];
  __shared__ std::uint64_t arrival;
  const GroupPlace place(args, steps);
  const SlotExchange<WarpMoments<A>> exchange{slots, &arrival, steps.slots, steps.cluster};
  const GroupForward<Op> forward = forward_of<Op>(args, steps, place);
  exchange.begin();
  await_kernels_before();
  exchange.ready();
#pragma unroll 1
  for (int k = place.warp(); k < place.slots; k += place.warps()) {
    exchange.put(place.first_slot + k, forward.moments_of_slot(k, A(1), true));
  }
  forward.maps.fill();
  exchange.await();
  const Moments<A> moments = forward.merged(slots);
  if (overflowed(moments)) {  // all CTAs of the cluster decide the same
    finish_overflowed<Op>(args, steps, slots);
    return;
  }
  forward.finish(moments, A(1));
}

}  // namespace fused_op::cuda
