#include "grid.h"

#include <algorithm>

namespace ptx {

Cta::Cta(const Module& module, const LaunchShape& launch, Cluster& of, std::uint32_t number)
    : shape(launch),
      cluster(of),
      rank(number),
      threads(launch.block[0] * launch.block[1] * launch.block[2]),
      module_(module) {
  std::uint32_t end = kDynamicBase + launch.shared_bytes + kSharedGap;
  for (const Variable& variable : module.shared) {
    end = std::max(end, static_cast<std::uint32_t>(variable.address) + variable.bytes);
  }
  shared_.resize(end);
  states_.resize(end);
  accesses_.resize(end);
  const std::uint32_t own = (threads + kLanes - 1) / kLanes;
  for (std::uint32_t i = 0; i < own; ++i) {
    warps.push_back(
        std::make_unique<Warp>(module, *this, i * kLanes, rank * own + i, launch.cluster * own));
  }
}

void Cta::start(std::array<std::uint32_t, 3> place) {
  index = place;
  running = threads;
  for (Barrier& barrier : barriers) {
    barrier = {};
    barrier.arriving.counts.resize(warps[0]->clock.counts.size());
    barrier.opened = barrier.arriving;
  }
  bulk_copies.clear();
  memory_barriers_.clear();
  std::fill(shared_.begin(), shared_.end(), std::byte{0xff});
  std::fill(states_.begin(), states_.end(), ByteState::kOutside);
  for (const Variable& variable : module_.shared) {
    const std::uint32_t bytes = variable.is_dynamic ? shape.shared_bytes : variable.bytes;
    std::fill_n(states_.begin() + static_cast<std::ptrdiff_t>(variable.address), bytes,
                ByteState::kVariable);
  }
  for (std::uint32_t i = 0; i < warps.size(); ++i) {
    warps[i]->start(threads - i * kLanes);
  }
}

bool Cta::run(bool backwards) {
  bool any = false;
  for (std::size_t i = 0; i < warps.size(); ++i) {
    Warp& warp = *warps[backwards ? warps.size() - 1 - i : i];
    any |= !warp.ended() && warp.run();
  }
  return any;
}

MemoryBarrier& Cta::barrier_at(std::uint32_t at) {
  for (MemoryBarrier& barrier : memory_barriers_) {
    if (barrier.at == at) {
      return barrier;
    }
  }
  throw Fault("there is no mbarrier at " + std::to_string(at));
}

void Cta::make_barrier(std::uint32_t at, std::uint32_t count) {
  if (at % 8 != 0) {
    throw Fault("a misaligned mbarrier");
  }
  mark(at, 8, ByteState::kBarrier);
  memory_barriers_.push_back({.at = at, .count = count, .pending = count});
  memory_barriers_.back().clock.counts.resize(warps[0]->clock.counts.size());
}

Cluster::Cluster(const Module& module, const LaunchShape& shape, GlobalMemory& global,
                 std::span<const std::byte> parameters)
    : memory(global), shape_(shape) {
  for (std::uint32_t rank = 0; rank < shape.cluster; ++rank) {
    ctas_.push_back(std::make_unique<Cta>(module, shape, *this, rank));
    ctas_.back()->parameters = parameters;
  }
}

void Cluster::start(std::uint32_t number) {
  arrived = 0;
  phase = 0;
  // All that the clusters before this one did is over.
  Clock all = ctas_[0]->warps[0]->clock;
  for (const auto& cta : ctas_) {
    for (const auto& warp : cta->warps) {
      warp->clock.tick(warp->number);
      all.join(warp->clock);
    }
  }
  for (const auto& cta : ctas_) {
    for (const auto& warp : cta->warps) {
      warp->clock = all;
      warp->clock.tick(warp->number);
    }
  }
  arriving.counts.assign(all.counts.size(), 0);
  opened = arriving;
  for (std::uint32_t rank = 0; rank < ctas_.size(); ++rank) {
    const std::uint32_t cta = number * shape_.cluster + rank;
    ctas_[rank]->start({cta % shape_.grid[0], cta / shape_.grid[0] % shape_.grid[1],
                        cta / (shape_.grid[0] * shape_.grid[1])});
  }
}

Cta& Cluster::cta(std::uint32_t rank) {
  if (rank >= ctas_.size()) {
    throw Fault("an address in CTA " + std::to_string(rank) + " of a cluster of " +
                std::to_string(ctas_.size()));
  }
  if (ctas_[rank]->ended()) {
    throw Fault("an address in CTA " + std::to_string(rank) + " of the cluster, which has ended");
  }
  return *ctas_[rank];
}

void Cluster::run(bool backwards) {
  for (;;) {
    bool any = false, all = true;
    for (std::size_t i = 0; i < ctas_.size(); ++i) {
      Cta& cta = *ctas_[backwards ? ctas_.size() - 1 - i : i];
      any |= cta.run(backwards);
      all &= cta.ended();
    }
    if (all) {
      return;
    }
    if (!any) {
      std::string where;
      for (const auto& cta : ctas_) {
        for (const auto& warp : cta->warps) {
          where += warp->describe();
        }
      }
      throw Fault("threads wait for ever:" + where.substr(0, 4000));
    }
  }
}

std::uint64_t Cluster::executed() const {
  std::uint64_t sum = 0;
  for (const auto& cta : ctas_) {
    for (const auto& warp : cta->warps) {
      sum += warp->executed;
    }
  }
  return sum;
}

std::uint64_t run(const Module& module, const LaunchShape& shape,
                  std::span<const std::byte> parameters, GlobalMemory& memory, bool backwards) {
  const std::uint32_t ctas = shape.grid[0] * shape.grid[1] * shape.grid[2];
  const std::uint32_t threads = shape.block[0] * shape.block[1] * shape.block[2];
  if (ctas == 0 || threads == 0 || threads > module.most_threads ||
      shape.grid[0] % shape.cluster != 0) {
    throw Fault("a launch of " + std::to_string(ctas) + " CTAs of " + std::to_string(threads) +
                " threads, in clusters of " + std::to_string(shape.cluster) + ": " + module.name +
                " takes " + std::to_string(module.most_threads) + " threads");
  }
  Cluster cluster(module, shape, memory, parameters);
  const std::uint32_t clusters = ctas / shape.cluster;
  for (std::uint32_t i = 0; i < clusters; ++i) {
    cluster.start(backwards ? clusters - 1 - i : i);
    cluster.run(backwards);
  }
  return cluster.executed();
}

}  // namespace ptx
