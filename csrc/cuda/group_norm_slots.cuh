// What the kernels of group norms are made of: how a warp walks over its slots, how CTAs share what
// they know of a group, and what is read for each channel. Device code; torch-free.
#pragma once

#include "core/convert.h"
#include "core/gated.h"
#include "core/norm_math.h"
#include "cuda/access.cuh"
#include "cuda/channel_parameters.cuh"
#include "cuda/cluster_exchange.cuh"
#include "cuda/group_norm.h"
#include "cuda/row_sum.cuh"

namespace fused_op::cuda {

// What a kernel is compiled for. E: the elements that it reads and writes. kAtOnce: packs of a
// plane that a lane reads of each tensor before it computes with the first of them.
template <typename E_, int kPack, int kAtOnce_, bool kSilu_>
struct GroupNormOp {
  using E = E_;
  using A = Accumulator<E>;
  static constexpr int N = kPack;
  static constexpr int kAtOnce = kAtOnce_;
  static constexpr bool kSilu = kSilu_;
};

__device__ __forceinline__ int log2_of(int power) { return 31 - __clz(power); }

// The planes of a slot, and its turn in each of them.
struct GroupSlot {
  int first_plane;
  int planes;
  int turn;

  __device__ __forceinline__ GroupSlot(const GroupNormSteps& steps, int slot)
      : first_plane((slot >> log2_of(steps.slots_of_plane)) * steps.planes),
        planes(min(steps.channels - first_plane, steps.planes)),
        turn(slot & (steps.slots_of_plane - 1)) {}

  // In a plane.
  __device__ __forceinline__ int turns(const GroupNormSteps& steps) const {
    return (steps.turns - turn + steps.slots_of_plane - 1) >> log2_of(steps.slots_of_plane);
  }
  __device__ __forceinline__ bool has_last_turn(const GroupNormSteps& steps) const {
    return ((steps.turns - 1 - turn) & (steps.slots_of_plane - 1)) == 0;
  }
  template <typename A>
  __device__ __forceinline__ A packs(const GroupNormSteps& steps) const {
    const int absent = has_last_turn(steps) ? steps.lanes - steps.last_turn : 0;
    const std::int64_t of_plane = std::int64_t{turns(steps)} * steps.lanes - absent;
    return static_cast<A>(planes) * static_cast<A>(of_plane);
  }
};

// What a lane has of a plane.
struct PlanePart {
  int plane;
  int own_steps;         // of this lane
  std::int64_t element;  // of the first step, in the group
  int before;            // steps of its warp in the planes before it
};

// What a lane has of a slot: in every `teams`-th plane, every step-th pack. All lanes of a warp
// take the same number of steps.
template <typename Op>
struct SlotLane {
  GroupSlot slot;
  int team;  // of lanes that share a plane
  int teams;
  int steps;       // in a plane
  int own_steps;   // of this lane
  int next_pack;   // elements from one to the next
  int first_pack;  // element of the first one in a plane
  std::int64_t pixels;

  __device__ __forceinline__ SlotLane(const GroupSlot& its_slot, const GroupNormSteps& shape,
                                      std::int64_t all_pixels)
      : slot(its_slot),
        team(lane() >> log2_of(shape.lanes)),
        teams(kWarpSize >> log2_of(shape.lanes)),
        steps(its_slot.turns(shape)),
        own_steps(steps),
        next_pack(shape.slots_of_plane * shape.lanes * Op::N),
        pixels(all_pixels) {
    const int member = lane() & (shape.lanes - 1);
    first_pack = (slot.turn * shape.lanes + member) * Op::N;
    own_steps -= member >= shape.last_turn && slot.has_last_turn(shape);
  }

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  // The pack of a step, in one of the group's tensors. One instruction; the compiler would multiply
  // 64-bit numbers.
  template <typename E>
  __device__ __forceinline__ E* pack_at(E* group, const PlanePart& part, int step) const {
    E* at;
    asm("mad.wide.s32 %0, %1, %2, %3;"
        : "=l"(at)
        : "r"(step), "r"(next_pack * static_cast<int>(sizeof(E))), "l"(group + part.element));
    return at;
  }

  // Calls visit(PlanePart) for each plane of the slot; a lane without one there has no steps.
  template <typename Visit>
  __device__ __forceinline__ void planes(Visit&& visit) const {
    int packs = 0;
#pragma unroll 1
    for (int first = 0; first < slot.planes; first += teams) {
      const bool has_plane = first + team < slot.planes;
      const int plane = slot.first_plane + first + team;
      visit(PlanePart{plane, has_plane ? own_steps : 0, plane * pixels + first_pack, packs});
      packs += steps;
    }
  }
};

// Packs of the tensors that a kernel reads, which a warp keeps in shared memory: each lane its own.
template <typename Op, int kTensors>
struct KeptPacks {
  using E = typename Op::E;
  using Packs = Pack<E, Op::N>;
  static constexpr int kBytes = sizeof(E) * Op::N;

  const E* group[kTensors];  // in global memory
  Packs* kept;               // of this lane; the pack of a step is kWarpSize · step further
  int count;                 // of each tensor in a slot, one tensor behind the other

  // Of the slot that is the k-th of its CTA.
  __device__ __forceinline__ KeptPacks of_slot(int k) const {
    KeptPacks slot = *this;
    slot.kept += static_cast<std::int64_t>(k) * kTensors * count * kWarpSize;
    return slot;
  }

  // Reads those of a few packs that this lane has, from a step of a plane on. When they are read
  // first, they are kept if there is room for all.
  template <int kCount>
  __device__ __forceinline__ void read(bool first, const SlotLane<Op>& mine, const PlanePart& part,
                                       int step, Packs (&packs)[kTensors][kCount]) const {
    const bool all_kept = part.before + min(mine.steps, step + kCount) <= count;
    Packs* const there = kept + (part.before + step) * kWarpSize;
    if (all_kept && !first) {
      each(part.own_steps - step, packs,
           [&](Packs& pack, int tensor, int i) { pack = there[(tensor * count + i) * kWarpSize]; });
      return;
    }
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        clear(packs[tensor][i]);
        load_bytes_if<kBytes, false>(step + i < part.own_steps,
                                     mine.pack_at(group[tensor], part, step + i),
                                     packs[tensor][i].words);
      }
    }
    if (all_kept) {
      each(part.own_steps - step, packs, [&](const Packs& pack, int tensor, int i) {
        there[(tensor * count + i) * kWarpSize] = pack;
      });
    }
  }

 private:
  template <int kCount, typename Use>
  __device__ __forceinline__ static void each(int valid, Packs (&packs)[kTensors][kCount],
                                              Use&& use) {
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < valid) {
          use(packs[tensor][i], tensor, i);
        }
      }
    }
  }
};

// How the CTAs of a group share one value for each slot, once. Before sm_90, a group has one CTA.
template <typename Value>
struct SlotExchange {
  Value* values;           // at the same place in every CTA
  std::uint64_t* arrival;  // likewise
  int slots;
  int ctas;

  __device__ __forceinline__ void begin() const {
    in_cluster([](const auto& exchange) { exchange.begin(); });
  }
  __device__ __forceinline__ void ready() const {
    in_cluster([](const auto& exchange) { exchange.ready(); });
  }
  // All lanes of a warp call it.
  __device__ __forceinline__ void put(int slot, const Value& value) const {
    in_cluster([&](const auto& exchange) { exchange.send(0, slot, value); });
    if (ctas == 1 && threadIdx.x % kWarpSize == 0) {
      values[slot] = value;
    }
  }
  // All threads of the CTA have put their values, and those of the other CTAs are here.
  __device__ __forceinline__ void await() const {
    in_cluster([](const auto& exchange) { exchange.await(0); });
    __syncthreads();
  }

 private:
  template <typename Call>
  __device__ __forceinline__ void in_cluster(Call&& call) const {
#if __CUDA_ARCH__ >= 900
    if (ctas > 1) {
      call(ClusterExchange<Value, 1>{values, arrival, slots, ctas, 1});
    }
#endif
  }
};

// A parameter of any dtype, known at run time: there is one for many pixels. It is converted only
// by value(), so that the loads of several are not waited for one by one.
template <typename A>
struct LoadedParameter {
  std::uint32_t words[sizeof(A) / 4];
  DType dtype;
  bool given;

  __device__ __forceinline__ LoadedParameter(const void* data, DType its_dtype, std::int64_t i)
      : dtype(its_dtype), given(data != nullptr) {
    words[0] = 0;
    if constexpr (sizeof(A) == 8) {
      words[1] = 0;
      load_if<2>(given, static_cast<const double*>(data) + i, words);
    } else {
      const bool single = dtype == DType::kFloat32;
      load_if<1>(given & single, static_cast<const float*>(data) + i, words);
      load_half_if(given & !single, static_cast<const std::uint16_t*>(data) + i, words);
    }
  }
  __device__ __forceinline__ A value(float absent) const {
    A found[1];
    if constexpr (sizeof(A) == 8) {
      to_values(Pack<double, 1>{{words[0], words[1]}}, found);
    } else if (dtype == DType::kFloat32) {
      to_values(Pack<float, 1>{{words[0]}}, found);
    } else if (dtype == DType::kFloat16) {
      to_values(Pack<Float16, 1>{{words[0]}}, found);
    } else {
      to_values(Pack<BFloat16, 1>{{words[0]}}, found);
    }
    return given ? found[0] : static_cast<A>(absent);
  }
};
template <typename A>
__device__ __forceinline__ A read_parameter(const void* data, DType dtype, std::int64_t i,
                                            float absent) {
  return LoadedParameter<A>(data, dtype, i).value(absent);
}
template <typename A>
__device__ __forceinline__ void write_parameter(void* data, DType dtype, std::int64_t i, A value) {
  const auto as = [&]<typename T>(T) { store_value(static_cast<T*>(data) + i, value); };
  if (data == nullptr) {
    return;
  }
  if constexpr (sizeof(A) == 8) {
    as(double{});
  } else if (dtype == DType::kFloat32) {
    as(float{});
  } else if (dtype == DType::kFloat16) {
    as(Float16{});
  } else {
    as(BFloat16{});
  }
}

// n in one channel of a sample.
template <typename A>
__device__ __forceinline__ ChannelMap<A> map_of(const ChannelArgs& args, std::int64_t sample,
                                                std::int64_t channel) {
  const std::int64_t entry = sample * args.entry_stride + channel;
  const LoadedParameter<A> scale(args.scale, args.entry_dtype, entry);
  const LoadedParameter<A> shift(args.shift, args.entry_dtype, entry);
  const LoadedParameter<A> weight(args.weight, args.param_dtype, channel);
  const LoadedParameter<A> bias(args.bias, args.param_dtype, channel);
  const A factor = A(1) + scale.value(0);
  return {weight.value(1) * factor, multiply_add(bias.value(0), factor, shift.value(0))};
}

// The maps of a group's channels. Those of the first ones are in shared memory.
template <typename A>
struct GroupMaps {
  const ChannelArgs& args;
  ChannelMap<A>* maps;
  int mapped;
  std::int64_t sample;
  std::int64_t channel;  // the first of the group

  // All threads of the CTA call it, and synchronise before they call at().
  __device__ __forceinline__ void fill() const {
    for (int i = static_cast<int>(threadIdx.x); i < mapped; i += static_cast<int>(blockDim.x)) {
      maps[i] = map_of<A>(args, sample, channel + i);
    }
  }
  __device__ __forceinline__ ChannelMap<A> at(int i) const {
    return i < mapped ? maps[i] : map_of<A>(args, sample, channel + i);
  }
};

// Which group a CTA works on, and which of its slots.
struct GroupPlace {
  int group;  // counted over all samples
  int sample;
  int channel;         // its first one
  std::int64_t first;  // its first element
  int rank;            // of the CTA in its cluster
  int first_slot;
  int slots;  // of this CTA

  __device__ __forceinline__ GroupPlace(const GroupNormArgs& args, const GroupNormSteps& steps)
      : group(static_cast<int>(steps.cluster == 1 ? blockIdx.x : cluster_of_cta())),
        sample(
            static_cast<int>(static_cast<unsigned>(group) / static_cast<unsigned>(steps.groups))),
        channel((group - sample * steps.groups) * steps.channels),
        first((sample * args.channels + channel) * args.pixels),
        rank(static_cast<int>(blockIdx.x) - group * steps.cluster),
        first_slot(steps.slots_of_cta * rank),
        slots(min(steps.slots - first_slot, steps.slots_of_cta)) {}
  __device__ __forceinline__ static unsigned cluster_of_cta() {
#if __CUDA_ARCH__ >= 900
    return cluster_id();
#else
    return blockIdx.x;
#endif
  }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ __forceinline__ static int warps() { return static_cast<int>(blockDim.x) / kWarpSize; }
};

}  // namespace fused_op::cuda
