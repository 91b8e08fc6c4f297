#include "warp.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "grid.h"

namespace ptx {

void Warp::Free::operator()(std::byte* bytes) const { std::free(bytes); }

Warp::Warp(const Module& module, Cta& cta, std::uint32_t first_thread, std::uint32_t warp,
           std::uint32_t warps)
    : number(warp),
      module_(module),
      cta_(cta),
      first_thread_(first_thread),
      file_(static_cast<std::byte*>(std::aligned_alloc(64, (module.file_bytes + 63) / 64 * 64))),
      lane_memory_(static_cast<std::size_t>(module.lane_bytes) * kLanes) {
  std::memset(file_.get(), 0, module.file_bytes);
  clock.counts.assign(warps, 0);
  for (const Constant& constant : module.constants) {
    switch (constant.bytes) {
      case 0:
        predicate(constant.slot) = static_cast<std::uint32_t>(constant.value);
        break;
      case 2:
        std::fill_n(lanes<std::uint16_t>(constant.slot), kLanes,
                    static_cast<std::uint16_t>(constant.value));
        break;
      case 4:
        std::fill_n(lanes<std::uint32_t>(constant.slot), kLanes,
                    static_cast<std::uint32_t>(constant.value));
        break;
      default:
        std::fill_n(lanes<std::uint64_t>(constant.slot), kLanes, constant.value);
    }
  }
}

void Warp::start(std::uint32_t threads) {
  alive_ = threads >= kLanes ? kAllLanes : (std::uint32_t{1} << threads) - 1;
  groups_.assign(1, {.mask = alive_, .at = module_.entry});
  awaited = 0;
  copies.clear();
  copy_group.fill(0);
  const LaunchShape& shape = cta_.shape;
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    const std::uint32_t thread = first_thread_ + lane;
    const std::uint32_t values[kSpecialCount] = {
        thread % shape.block[0],
        thread / shape.block[0] % shape.block[1],
        thread / (shape.block[0] * shape.block[1]),
        shape.block[0],
        shape.block[1],
        shape.block[2],
        cta_.index[0],
        cta_.index[1],
        cta_.index[2],
        shape.grid[0],
        shape.grid[1],
        shape.grid[2],
        lane,
        cta_.index[0] / shape.cluster,
        cta_.rank,
        shape.cluster,
        cta_.rank,
        shape.grid[0] / shape.cluster,
    };
    for (std::uint32_t i = 0; i < kSpecialCount; ++i) {
      lanes<std::uint32_t>(i * kLanes * 4)[lane] = values[i];
    }
  }
}

bool Warp::run() {
  for (Group& group : groups_) {
    group.waits = false;
  }
  const std::uint64_t before = executed;
  for (std::uint64_t last = before; !groups_.empty();) {
    merge();
    std::size_t lowest = groups_.size();
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      if (!groups_[i].waits && (lowest == groups_.size() || groups_[i].at < groups_[lowest].at)) {
        lowest = i;
      }
    }
    if (lowest < groups_.size()) {
      run_group(lowest);
    } else if (executed == last) {
      break;
    } else {  // lanes that waited for others of this warp may go on now
      last = executed;
      for (Group& group : groups_) {
        group.waits = false;
      }
    }
  }
  return executed != before;
}

// Lanes that have come to the same instruction go on together.
void Warp::merge() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (std::size_t k = groups_.size() - 1; k > i; --k) {
      Group& into = groups_[i];
      const Group& from = groups_[k];
      if (into.at == from.at && into.depth == from.depth && into.returns == from.returns &&
          !into.arrived && !from.arrived) {
        into.mask |= from.mask;
        into.waits = false;
        groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
  }
}

void Warp::split(std::size_t index, std::uint32_t mask, std::uint32_t at) {
  Group part = groups_[index];
  part.mask = mask;
  part.at = at;
  groups_[index].mask &= ~mask;
  groups_.push_back(part);
}

void Warp::end_lanes(std::size_t index, std::uint32_t mask) {
  finish_copies(mask, 0);
  std::erase_if(copies, [&](const AsyncCopy& copy) { return (mask >> copy.lane & 1) != 0; });
  alive_ &= ~mask;
  cta_.running -= static_cast<std::uint32_t>(std::popcount(mask));
  groups_[index].mask &= ~mask;
  if (groups_[index].mask == 0) {
    groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(index));
  }
}

void Warp::call(Group& group, const Instruction& in) {
  if (group.depth == group.returns.size()) {
    throw Fault("calls within calls, more than there is room for");
  }
  for (std::uint32_t i = 0; i < in.count; ++i) {
    const Copy& copy = module_.copies[in.copies + i];
    each_lane(group.mask, [&](int lane) {
      std::byte* const memory =
          lane_memory_.data() + static_cast<std::size_t>(lane) * module_.lane_bytes;
      std::memcpy(memory + (copy.to & ~kWindowMask), memory + (copy.from & ~kWindowMask),
                  copy.bytes);
    });
  }
  group.returns[group.depth++] = group.at + 1;
  group.at = in.target;
}

// Runs a group until it waits, ends, splits, or comes to where another one is.
void Warp::run_group(std::size_t index) {
  // The other groups are at higher instructions, where this one may meet them.
  std::uint32_t limit = kNone;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (i != index && groups_[i].at > groups_[index].at) {
      limit = std::min(limit, groups_[i].at);
    }
  }
  try {
    while (groups_[index].at < limit) {
      Group& group = groups_[index];
      const Instruction& in = module_.code[group.at];
      std::uint32_t mask = group.mask;
      if (in.guard != kNone) {
        mask &= in.guard_negated ? ~predicate(in.guard) : predicate(in.guard);
      }
      if (in.kind == Kind::kRun) {
        if (mask != 0) {
          in.run(*this, in, mask);
          executed += static_cast<std::uint64_t>(std::popcount(mask));
        }
        ++group.at;
        continue;
      }
      if (mask == 0) {
        ++group.at;
        continue;
      }
      if (mask != group.mask) {  // lanes that skip it are a group of their own
        split(index, group.mask & ~mask, group.at + 1);
        if (in.kind == Kind::kBranch) {
          groups_[index].at = in.target;
        }
        executed += static_cast<std::uint64_t>(std::popcount(mask));
        return;
      }
      switch (in.kind) {
        case Kind::kBranch:
          group.at = in.target;
          break;
        case Kind::kCall:
          call(group, in);
          break;
        case Kind::kReturn:
          executed += static_cast<std::uint64_t>(std::popcount(mask));
          if (group.depth == 0) {
            end_lanes(index, mask);
            return;
          }
          group.at = group.returns[--group.depth];
          group.returns[group.depth] = 0;
          continue;
        default: {
          const std::uint32_t done = in.sync(*this, group, in);
          if (done == 0) {
            group.waits = true;
            return;
          }
          executed += static_cast<std::uint64_t>(std::popcount(done));
          group.arrived = false;
          if (done != mask) {
            group.waits = true;
            split(index, done, group.at + 1);
            groups_.back().waits = false;
            return;
          }
          ++group.at;
          continue;
        }
      }
      executed += static_cast<std::uint64_t>(std::popcount(mask));
    }
  } catch (const Fault& fault) {
    explain(groups_[index], fault);
  }
}

void Warp::explain(const Group& group, const Fault& fault) const {
  const auto line = [](std::uint32_t value) { return std::to_string(value); };
  const Instruction& in = module_.code[group.at];
  throw Fault(std::string(fault.what()) + "\n  in CTA (" + line(cta_.index[0]) + ", " +
              line(cta_.index[1]) + "), threads from " + line(first_thread_) +
              " on: " + std::string(in.text) + "\n  of " + module_.name);
}

std::string Warp::describe() const {
  std::string text;
  char hex[16];
  for (const Group& group : groups_) {
    std::snprintf(hex, sizeof(hex), "%08x", group.mask);
    text += "\n  CTA (" + std::to_string(cta_.index[0]) + ", " + std::to_string(cta_.index[1]) +
            "), threads from " + std::to_string(first_thread_) + " on, lanes " + hex + ", at " +
            std::string(module_.code[group.at].text);
  }
  return text;
}

}  // namespace ptx
