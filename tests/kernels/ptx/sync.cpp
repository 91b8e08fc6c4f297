// Instructions with which threads meet, exchange values, and move memory asynchronously.
#include <algorithm>
#include <bit>
#include <cstring>

#include "decode.h"
#include "grid.h"

namespace ptx {
namespace {

// --- Within a warp -------------------------------------------------------------------------------

// The lanes of the group whose partners, by the masks in `slot`, have all arrived.
std::uint32_t complete_lanes(Warp& warp, const Group& group, std::uint32_t slot) {
  const std::uint32_t* const members = warp.lanes<std::uint32_t>(slot);
  std::uint32_t complete = 0;
  each_lane(group.mask, [&](int lane) {
    if ((members[lane] >> lane & 1) == 0) {
      throw Fault("a lane is not in its own mask of members");
    }
    if ((members[lane] & warp.alive() & ~group.mask) == 0) {
      complete |= std::uint32_t{1} << lane;
    }
  });
  // The members of a set have the same mask, so all of them are complete or none is.
  return complete;
}

enum class Shuffle { kUp, kDown, kXor, kIndex };

template <Shuffle kMode>
std::uint32_t shuffle(Warp& warp, Group& group, const Instruction& in) {
  const std::uint32_t mask = complete_lanes(warp, group, in.from[3]);
  const std::array values = std::to_array(*reinterpret_cast<std::uint32_t (*)[kLanes]>(
      warp.lanes<std::uint32_t>(in.from[0])));  // a copy, because the source may be the destination
  const std::uint32_t* const bs = warp.lanes<std::uint32_t>(in.from[1]);
  const std::uint32_t* const cs = warp.lanes<std::uint32_t>(in.from[2]);
  std::uint32_t* const to = warp.lanes<std::uint32_t>(in.to[0]);
  std::uint32_t in_range = 0;
  each_lane(mask, [&](int lane) {
    const int segment = static_cast<int>(cs[lane] >> 8 & 31);
    const int clamp = static_cast<int>(cs[lane] & 31);
    const int b = static_cast<int>(bs[lane] & 31);
    const int least = lane & segment;
    const int most = least | (clamp & ~segment);
    int from = kMode == Shuffle::kUp     ? lane - b
               : kMode == Shuffle::kDown ? lane + b
               : kMode == Shuffle::kXor  ? lane ^ b
                                         : least | (b & ~segment);
    const bool inside = kMode == Shuffle::kUp ? from >= most : from <= most;
    from = inside ? from : lane;
    if ((mask >> from & 1) == 0) {
      throw Fault("a shuffle reads lane " + std::to_string(from) + ", which takes no part");
    }
    to[lane] = values[static_cast<std::size_t>(from)];
    in_range |= std::uint32_t{inside} << lane;
  });
  if (in.to[1] != kNone) {
    std::uint32_t& predicate = warp.predicate(in.to[1]);
    predicate = (predicate & ~mask) | in_range;
  }
  return mask;
}

enum class Vote { kAll, kAny, kBallot };

template <Vote kMode>
std::uint32_t vote(Warp& warp, Group& group, const Instruction& in) {
  const std::uint32_t mask = complete_lanes(warp, group, in.from[1]);
  const std::uint32_t votes = warp.predicate(in.from[0]);
  const std::uint32_t* const members = warp.lanes<std::uint32_t>(in.from[1]);
  each_lane(mask, [&](int lane) {
    const std::uint32_t asked = members[lane] & mask;
    if (kMode == Vote::kBallot) {
      warp.lanes<std::uint32_t>(in.to[0])[lane] = votes & asked;
      return;
    }
    const bool found = kMode == Vote::kAll ? (votes & asked) == asked : (votes & asked) != 0;
    std::uint32_t& to = warp.predicate(in.to[0]);
    to = (to & ~(std::uint32_t{1} << lane)) | std::uint32_t{found} << lane;
  });
  return mask;
}

std::uint32_t reduce_max(Warp& warp, Group& group, const Instruction& in) {
  const std::uint32_t mask = complete_lanes(warp, group, in.from[1]);
  const std::array values = std::to_array(*reinterpret_cast<std::uint32_t (*)[kLanes]>(
      warp.lanes<std::uint32_t>(in.from[0])));  // a copy, because the source may be the destination
  const std::uint32_t* const members = warp.lanes<std::uint32_t>(in.from[1]);
  each_lane(mask, [&](int lane) {
    std::uint32_t most = 0;
    each_lane(members[lane] & mask,
              [&](int other) { most = std::max(most, values[static_cast<std::size_t>(other)]); });
    warp.lanes<std::uint32_t>(in.to[0])[lane] = most;
  });
  return mask;
}

std::uint32_t warp_barrier(Warp& warp, Group& group, const Instruction& in) {
  const std::uint32_t mask = complete_lanes(warp, group, in.from[0]);
  if (mask == warp.alive()) {
    warp.clock.tick(warp.number);
  }
  return mask;
}

// --- Within a CTA --------------------------------------------------------------------------------

// The value of a register in which all lanes must agree.
std::uint32_t uniform(Warp& warp, const Group& group, std::uint32_t slot) {
  const std::uint32_t* const values = warp.lanes<std::uint32_t>(slot);
  const std::uint32_t value = values[std::countr_zero(group.mask)];
  each_lane(group.mask, [&](int lane) {
    if (values[lane] != value) {
      throw Fault("the lanes of a warp are at different barriers");
    }
  });
  return value;
}

// Whether the group has all lanes of its warp, as ".aligned" demands. If lanes have ended, the
// barrier misses them and never opens.
bool is_aligned(const Warp& warp, const Group& group) { return group.mask == warp.alive(); }

std::uint32_t cta_barrier(Warp& warp, Group& group, std::uint32_t id, std::uint32_t threads) {
  if (id >= warp.cta().barriers.size() || threads % kLanes != 0 || threads == 0) {
    throw Fault("barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads");
  }
  Barrier& barrier = warp.cta().barriers[id];
  if (!group.arrived) {
    if (!is_aligned(warp, group)) {
      return 0;
    }
    if (barrier.arrived > 0 && barrier.wanted != threads) {
      throw Fault("a barrier of another number of threads than those who wait at it");
    }
    group.arrived = true;
    group.phase = barrier.phase;
    barrier.wanted = threads;
    barrier.arrived += static_cast<std::uint32_t>(std::popcount(group.mask));
    warp.release(barrier.arriving);
    if (barrier.arrived > threads) {
      throw Fault("more threads at a barrier than it is for");
    }
    if (barrier.arrived == threads) {
      barrier.arrived = 0;
      barrier.opened = barrier.arriving;
      ++barrier.phase;
    }
  }
  if (barrier.phase == group.phase) {
    return 0;
  }
  warp.acquire(barrier.opened);
  return group.mask;
}
std::uint32_t whole_cta_barrier(Warp& warp, Group& group, const Instruction& in) {
  const std::uint32_t threads = (warp.cta().threads + kLanes - 1) / kLanes * kLanes;
  if (warp.cta().threads != threads) {
    throw Fault("a barrier of a CTA whose last warp is not full");
  }
  return cta_barrier(warp, group, uniform(warp, group, in.from[0]), threads);
}
std::uint32_t part_barrier(Warp& warp, Group& group, const Instruction& in) {
  return cta_barrier(warp, group, uniform(warp, group, in.from[0]),
                     uniform(warp, group, in.from[1]));
}

// --- Within a cluster ----------------------------------------------------------------------------

template <bool kReleases>
std::uint32_t cluster_arrive(Warp& warp, Group& group, const Instruction&) {
  if (!is_aligned(warp, group)) {
    return 0;
  }
  Cluster& cluster = warp.cta().cluster;
  if (kReleases) {
    warp.release(cluster.arriving);
  }
  warp.cluster_phase = cluster.phase;
  cluster.arrived += static_cast<std::uint32_t>(std::popcount(group.mask));
  if (cluster.arrived == warp.cta().threads * warp.cta().shape.cluster) {
    cluster.arrived = 0;
    cluster.opened = cluster.arriving;
    ++cluster.phase;
  }
  return group.mask;
}
std::uint32_t cluster_wait(Warp& warp, Group& group, const Instruction&) {
  if (!is_aligned(warp, group) || warp.cta().cluster.phase == warp.cluster_phase) {
    return 0;
  }
  warp.acquire(warp.cta().cluster.opened);
  return group.mask;
}

void map_shared(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const std::uint32_t rank = warp.lanes<std::uint32_t>(in.from[1])[lane];
    warp.cta().cluster.cta(rank);  // throws if there is none
    warp.lanes<std::uint32_t>(in.to[0])[lane] =
        (rank + 1) << 24 | (warp.lanes<std::uint32_t>(in.from[0])[lane] & 0xffffff);
  });
}

// The CTA and the place within it of a shared::cluster address.
std::pair<Cta*, std::uint32_t> find_shared(Warp& warp, const Instruction& in, std::size_t address,
                                           int lane) {
  const auto at = static_cast<std::uint32_t>(warp.address(in.addresses[address], lane));
  Cta& cta = at >> 24 == 0 ? warp.cta() : warp.cta().cluster.cta((at >> 24) - 1);
  return {&cta, at & 0xffffff};
}

// --- mbarrier ------------------------------------------------------------------------------------

void init_barrier(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    warp.cta().make_barrier(static_cast<std::uint32_t>(warp.address(in.addresses[0], lane)),
                            warp.lanes<std::uint32_t>(in.from[0])[lane]);
  });
}
void arrive_and_expect(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    MemoryBarrier& barrier =
        warp.cta().barrier_at(static_cast<std::uint32_t>(warp.address(in.addresses[0], lane)));
    barrier.bytes += static_cast<std::int32_t>(warp.lanes<std::uint32_t>(in.from[0])[lane]);
    warp.release(barrier.clock);
    if (--barrier.pending < 0) {
      throw Fault("more arrivals at an mbarrier than it is for");
    }
    barrier.settle();
  });
}
// Waits here. A GPU would return false after a while and let the program ask again.
std::uint32_t await_parity(Warp& warp, Group& group, const Instruction& in) {
  Cta& cta = warp.cta();
  bool open = true;
  each_lane(group.mask, [&](int lane) {
    const auto at = static_cast<std::uint32_t>(warp.address(in.addresses[0], lane));
    const std::uint32_t parity = warp.lanes<std::uint32_t>(in.from[0])[lane] & 1;
    cta.finish_bulk_copies(at);
    open &= (cta.barrier_at(at).phase & 1) != parity;
  });
  if (open) {
    each_lane(group.mask, [&](int lane) {
      const auto at = static_cast<std::uint32_t>(warp.address(in.addresses[0], lane));
      warp.acquire(cta.barrier_at(at).clock);
    });
    warp.predicate(in.to[0]) |= group.mask;
  }
  return open ? group.mask : 0;
}

void store_async(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const auto [cta, at] = find_shared(warp, in, 0, lane);
    const auto [signalled, barrier] = find_shared(warp, in, 1, lane);
    const std::uint32_t bytes = in.count * 4u;
    std::byte* const to = cta->check_shared(warp, lane, at, bytes, true);
    if (at % bytes != 0) {
      throw Fault("a store to a misaligned place");
    }
    for (std::size_t i = 0; i < in.count; ++i) {
      std::memcpy(to + 4 * i, warp.lanes<std::uint32_t>(in.from[i]) + lane, 4);
    }
    MemoryBarrier& reached = signalled->barrier_at(barrier);
    reached.bytes -= bytes;
    warp.release(reached.clock);
    reached.settle();
  });
}

// --- Copies --------------------------------------------------------------------------------------

void begin_copy(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const auto to = static_cast<std::uint32_t>(warp.address(in.addresses[0], lane));
    const std::uint32_t bytes = warp.lanes<std::uint32_t>(in.from[0])[lane];
    if (to % bytes != 0) {
      throw Fault("a copy to a misaligned place in shared memory");
    }
    const std::byte* const from =
        warp.place(Space::kGlobal, warp.address(in.addresses[1], lane), lane, bytes, false);
    warp.cta().mark(to, bytes, ByteState::kInFlight);
    warp.cta().check_race(warp, lane, to, bytes, true);
    warp.copies.push_back({lane, warp.copy_group[static_cast<std::size_t>(lane)], to, from, bytes});
  });
}
void end_copy_group(Warp& warp, const Instruction&, std::uint32_t mask) {
  each_lane(mask, [&](int lane) { ++warp.copy_group[static_cast<std::size_t>(lane)]; });
}
void await_copies(Warp& warp, const Instruction& in, std::uint32_t mask) {
  const std::uint32_t left = warp.lanes<std::uint32_t>(in.from[0])[0];
  warp.finish_copies(mask, left);
}

void begin_bulk_copy(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const auto [cta, to] = find_shared(warp, in, 0, lane);
    const auto barrier = static_cast<std::uint32_t>(warp.address(in.addresses[2], lane));
    const std::uint32_t bytes = warp.lanes<std::uint32_t>(in.from[0])[lane];
    const std::uint64_t from = warp.address(in.addresses[1], lane);
    if (bytes % 16 != 0 || to % 16 != 0 || from % 16 != 0) {
      throw Fault("a bulk copy of what are no blocks of 16 bytes");
    }
    cta->barrier_at(barrier);  // throws if there is none
    if (bytes == 0) {
      return;
    }
    for (std::uint32_t at = 0; at < bytes; at += 16) {
      warp.place(Space::kGlobal, from + at, lane, 16, false);
    }
    cta->mark(to, bytes, ByteState::kInFlight);
    cta->check_race(warp, lane, to, bytes, true);
    warp.release(cta->barrier_at(barrier).clock);
    cta->bulk_copies.push_back({to, reinterpret_cast<const std::byte*>(from), bytes, barrier});
  });
}

// --- The rest ------------------------------------------------------------------------------------

void await_kernels(Warp& warp, const Instruction&, std::uint32_t mask) { warp.awaited |= mask; }
void nothing(Warp&, const Instruction&, std::uint32_t) {}
void make_policy(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) { warp.lanes<std::uint64_t>(in.to[0])[lane] = kPolicy; });
}

constexpr Special kSpecials[] = {
    {"shfl.sync.up.b32", nullptr, &shuffle<Shuffle::kUp>, "Drrrr"},
    {"shfl.sync.down.b32", nullptr, &shuffle<Shuffle::kDown>, "Drrrr"},
    {"shfl.sync.bfly.b32", nullptr, &shuffle<Shuffle::kXor>, "Drrrr"},
    {"shfl.sync.idx.b32", nullptr, &shuffle<Shuffle::kIndex>, "Drrrr"},
    {"vote.sync.all.pred", nullptr, &vote<Vote::kAll>, "Qpr"},
    {"vote.sync.any.pred", nullptr, &vote<Vote::kAny>, "Qpr"},
    {"vote.sync.ballot.b32", nullptr, &vote<Vote::kBallot>, "Rpr"},
    {"redux.sync.max.u32", nullptr, &reduce_max, "Rrr"},
    {"bar.warp.sync", nullptr, &warp_barrier, "r"},
    {"bar.sync", nullptr, &whole_cta_barrier, "r"},
    {"bar.sync", nullptr, &part_barrier, "rr"},
    {"barrier.sync", nullptr, &whole_cta_barrier, "r"},
    {"barrier.sync", nullptr, &part_barrier, "rr"},
    {"barrier.cluster.arrive.aligned", nullptr, &cluster_arrive<true>, ""},
    {"barrier.cluster.arrive.relaxed.aligned", nullptr, &cluster_arrive<false>, ""},
    {"barrier.cluster.wait.aligned", nullptr, &cluster_wait, ""},
    {"mapa.shared::cluster.u32", &map_shared, nullptr, "Rrr"},
    {"mbarrier.init.shared::cta.b64", &init_barrier, nullptr, "mr"},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", &arrive_and_expect, nullptr, "_mr"},
    {"mbarrier.try_wait.parity.shared::cta.b64", nullptr, &await_parity, "Qmr"},
    {"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", nullptr, &await_parity, "Qmr"},
    {"st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32", &store_async, nullptr, "mvm"},
    {"st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32", &store_async, nullptr, "mvm"},
    {"cp.async.cg.shared.global", &begin_copy, nullptr, "mmr"},
    {"cp.async.cg.shared.global.L2::128B", &begin_copy, nullptr, "mmr"},
    {"cp.async.ca.shared.global", &begin_copy, nullptr, "mmr"},
    {"cp.async.commit_group", &end_copy_group, nullptr, ""},
    {"cp.async.wait_group", &await_copies, nullptr, "r"},
    {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
     &begin_bulk_copy, nullptr, "mmrml"},
    {"griddepcontrol.wait", &await_kernels, nullptr, ""},
    {"griddepcontrol.launch_dependents", &nothing, nullptr, ""},
    {"prefetch.global.L1", &nothing, nullptr, "m"},
    {"prefetch.global.L2", &nothing, nullptr, "m"},
    {"prefetch.global.L2::evict_last", &nothing, nullptr, "m"},
    {"fence.mbarrier_init.release.cluster", &nothing, nullptr, ""},
    {"membar.cta", &nothing, nullptr, ""},
    {"membar.gl", &nothing, nullptr, ""},
    {"createpolicy.fractional.L2::evict_last.b64", &make_policy, nullptr, "Lr"},
};

}  // namespace

const Special* find_special(std::string_view opcode, std::size_t operands) {
  for (const Special& special : kSpecials) {
    if (special.opcode == opcode && std::string_view(special.operands).size() == operands) {
      return &special;
    }
  }
  return nullptr;
}

}  // namespace ptx
