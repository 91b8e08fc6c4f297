// Loads and stores, and the checks of their addresses.
#include <algorithm>
#include <cstring>

#include "decode.h"
#include "grid.h"

namespace ptx {
namespace {

std::string hex(std::uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}
std::string access(std::uint32_t bytes, bool is_store) {
  return (is_store ? "a store of " : "a load of ") + std::to_string(bytes) + " bytes ";
}

void check_policy(Warp& warp, const Instruction& in, int lane) {
  if (in.from[4] != kNone && warp.lanes<std::uint64_t>(in.from[4])[lane] != kPolicy) {
    throw Fault("a policy that createpolicy has not made");
  }
}

// The elements in memory may be narrower than the registers.
template <typename Element, typename Register>
void load(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const std::uint64_t address = warp.address(in.addresses[0], lane);
    check_policy(warp, in, lane);
    const std::byte* const from = warp.place(in.space, address, lane, in.bytes, false);
    for (std::size_t i = 0; i < in.count; ++i) {
      Element value;
      std::memcpy(&value, from + i * sizeof(value), sizeof(value));
      if (in.to[i] != kNone) {
        warp.lanes<Register>(in.to[i])[lane] = static_cast<Register>(value);
      }
    }
  });
}
template <typename Element, typename Register>
void store(Warp& warp, const Instruction& in, std::uint32_t mask) {
  each_lane(mask, [&](int lane) {
    const std::uint64_t address = warp.address(in.addresses[0], lane);
    check_policy(warp, in, lane);
    std::byte* const to = warp.place(in.space, address, lane, in.bytes, true);
    for (std::size_t i = 0; i < in.count; ++i) {
      const auto value = static_cast<Element>(warp.lanes<Register>(in.from[i])[lane]);
      std::memcpy(to + i * sizeof(value), &value, sizeof(value));
    }
  });
}

template <typename Element>
Run load_into(int register_bytes) {
  switch (register_bytes) {
    case 2:
      return &load<Element, std::uint16_t>;
    case 4:
      return &load<Element, std::uint32_t>;
    case 8:
      return &load<Element, std::uint64_t>;
    default:
      return nullptr;
  }
}
template <typename Element>
Run store_from(int register_bytes) {
  switch (register_bytes) {
    case 2:
      return &store<Element, std::uint16_t>;
    case 4:
      return &store<Element, std::uint32_t>;
    case 8:
      return &store<Element, std::uint64_t>;
    default:
      return nullptr;
  }
}

}  // namespace

Run find_load(int bytes, bool is_signed, int register_bytes) {
  switch (bytes) {
    case 1:
      return is_signed ? load_into<std::int8_t>(register_bytes)
                       : load_into<std::uint8_t>(register_bytes);
    case 2:
      return is_signed ? load_into<std::int16_t>(register_bytes)
                       : load_into<std::uint16_t>(register_bytes);
    case 4:
      return is_signed ? load_into<std::int32_t>(register_bytes)
                       : load_into<std::uint32_t>(register_bytes);
    case 8:
      return load_into<std::uint64_t>(register_bytes);
    default:
      return nullptr;
  }
}
Run find_store(int bytes, int register_bytes) {
  switch (bytes) {
    case 1:
      return store_from<std::uint8_t>(register_bytes);
    case 2:
      return store_from<std::uint16_t>(register_bytes);
    case 4:
      return store_from<std::uint32_t>(register_bytes);
    case 8:
      return store_from<std::uint64_t>(register_bytes);
    default:
      return nullptr;
  }
}

// --- Addresses -----------------------------------------------------------------------------------

std::byte* Warp::place(Space space, std::uint64_t address, int lane, std::uint32_t bytes,
                       bool is_store) {
  if (address % bytes != 0) {
    throw Fault(access(bytes, is_store) + "at " + hex(address) + ", which is misaligned");
  }
  const std::uint64_t window = address & kWindowMask;
  if (space == Space::kShared || (space == Space::kGeneric && window == kSharedWindow)) {
    return cta_.check_shared(*this, lane, static_cast<std::uint32_t>(address), bytes, is_store);
  }
  if (space == Space::kCluster) {
    const auto rank = static_cast<std::uint32_t>(address) >> 24;  // as mapa makes it
    Cta& of = rank == 0 ? cta_ : cta_.cluster.cta(rank - 1);
    return of.check_shared(*this, lane, static_cast<std::uint32_t>(address) & 0xffffff, bytes,
                           is_store);
  }
  const std::uint64_t offset = address & ~kWindowMask;
  if (window == kParamWindow && space != Space::kGlobal) {
    if (is_store || offset + bytes > cta_.parameters.size()) {
      throw Fault(access(bytes, is_store) + "outside of the parameters");
    }
    return const_cast<std::byte*>(cta_.parameters.data()) + offset;
  }
  if (window == kLaneWindow && space != Space::kGlobal) {
    if (offset + bytes > module_.lane_bytes) {
      throw Fault(access(bytes, is_store) + "outside of local memory");
    }
    return lane_memory_.data() + static_cast<std::size_t>(lane) * module_.lane_bytes + offset;
  }
  if ((awaited >> lane & 1) == 0) {
    throw Fault(access(bytes, is_store) + "of global memory before griddepcontrol.wait");
  }
  return cta_.cluster.memory.check(address, bytes, is_store);
}

void GlobalMemory::add(Allocation made) { allocations_.push_back(std::move(made)); }

Allocation* GlobalMemory::find(std::uint64_t address, std::uint32_t bytes) {
  constexpr std::uint64_t kBlock = 15;
  const auto holds = [&](const Allocation& of) {
    return address >= (of.begin & ~kBlock) && address + bytes <= ((of.end + kBlock) & ~kBlock);
  };
  if (last_ < allocations_.size() && holds(allocations_[last_])) {
    return &allocations_[last_];
  }
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    if (holds(allocations_[i])) {
      last_ = i;
      return &allocations_[i];
    }
  }
  return nullptr;
}

std::byte* GlobalMemory::check(std::uint64_t address, std::uint32_t bytes, bool is_store) {
  Allocation* const of = find(address, bytes);
  if (of == nullptr) {
    std::string known;
    for (const Allocation& each : allocations_) {
      known += "; " + each.name + " is at " + hex(each.begin) + " to " + hex(each.end);
    }
    throw Fault(access(bytes, is_store) + "at " + hex(address) + ", where there is no memory" +
                known);
  }
  if (is_store && (!of->is_writable || address < of->begin || address + bytes > of->end)) {
    throw Fault(access(bytes, is_store) + "at " + hex(address) + ", " +
                (of->is_writable ? "past an end of " : "to the input ") + of->name + ", at " +
                hex(of->begin) + " to " + hex(of->end));
  }
  if (!of->written.empty()) {
    const std::uint64_t first = std::max<std::uint64_t>(address, of->begin);
    const std::uint64_t last = std::min<std::uint64_t>(address + bytes, of->end);
    for (std::uint64_t at = first; at < last; ++at) {
      std::uint8_t& written = of->written[at - of->begin];
      if (!is_store && written == 0) {
        throw Fault(access(bytes, is_store) + "of " + of->name + " at byte " +
                    std::to_string(at - of->begin) + ", which nothing has written");
      }
      written |= is_store;
    }
  }
  return reinterpret_cast<std::byte*>(address);
}

std::string GlobalMemory::unwritten() const {
  for (const Allocation& of : allocations_) {
    const auto first = std::find(of.written.begin(), of.written.end(), 0);
    if (first != of.written.end() && of.name != "workspace") {
      return "nothing has written byte " + std::to_string(first - of.written.begin()) + " of " +
             of.name;
    }
  }
  return "";
}

std::byte* Cta::check_shared(Warp& warp, int lane, std::uint32_t at, std::uint32_t bytes,
                             bool is_store) {
  if (std::uint64_t{at} + bytes > shared_.size()) {
    throw Fault(access(bytes, is_store) + "outside of shared memory, at " + hex(at));
  }
  for (std::uint32_t i = at; i < at + bytes; ++i) {
    const ByteState state = states_[i];
    if (state == ByteState::kOutside || state == ByteState::kBarrier) {
      throw Fault(access(bytes, is_store) + "of shared memory at " + hex(at) +
                  (state == ByteState::kBarrier ? ", a barrier" : ", outside of its variables"));
    }
    if (state == ByteState::kInFlight) {
      throw Fault(access(bytes, is_store) + "of shared memory at " + hex(at) +
                  ", where a copy has not arrived");
    }
  }
  check_race(warp, lane, at, bytes, is_store);
  return shared_.data() + at;
}

void Cta::check_race(Warp& warp, int lane, std::uint32_t at, std::uint32_t bytes, bool is_store) {
  const Access now{warp.clock.counts[warp.number], static_cast<std::uint16_t>(warp.number),
                   static_cast<std::uint8_t>(lane)};
  for (std::uint32_t i = at; i < at + bytes; ++i) {
    auto& [store, load] = accesses_[i];
    const bool after_store = store.is_before(warp.number, lane, warp.clock);
    if (!after_store || (is_store && !load.is_before(warp.number, lane, warp.clock))) {
      const Access& other = after_store ? load : store;
      throw Fault(access(bytes, is_store) + "of shared memory at " + hex(at) + " by warp " +
                  std::to_string(warp.number) + ", lane " + std::to_string(lane) +
                  ", in a race with a " + (after_store ? "load" : "store") + " by warp " +
                  std::to_string(other.warp) + ", lane " + std::to_string(other.lane));
    }
    (is_store ? store : load) = now;
  }
}

void Cta::mark(std::uint32_t at, std::uint32_t bytes, ByteState state) {
  if (std::uint64_t{at} + bytes > shared_.size()) {
    throw Fault("a copy of " + std::to_string(bytes) + " bytes to " + hex(at) +
                ", outside of shared memory");
  }
  for (std::uint32_t i = at; i < at + bytes; ++i) {
    if (states_[i] == ByteState::kOutside || states_[i] == ByteState::kBarrier) {
      throw Fault("a copy of " + std::to_string(bytes) + " bytes to shared memory at " + hex(at) +
                  ", outside of its variables");
    }
    states_[i] = state;
  }
}

// --- Copies into shared memory that arrive later -------------------------------------------------

void Warp::finish_copies(std::uint32_t mask, std::uint32_t left) {
  std::erase_if(copies, [&](const AsyncCopy& copy) {
    const bool is_due = (mask >> copy.lane & 1) != 0 &&
                        copy.group + left < copy_group[static_cast<std::size_t>(copy.lane)];
    if (is_due) {
      cta_.mark(copy.to, copy.bytes, ByteState::kVariable);
      cta_.check_race(*this, copy.lane, copy.to, copy.bytes, true);
      std::memcpy(cta_.shared(copy.to), copy.from, copy.bytes);
    }
    return is_due;
  });
}

void Cta::finish_bulk_copies(std::uint32_t barrier) {
  std::erase_if(bulk_copies, [&](const BulkCopy& copy) {
    if (copy.barrier == barrier) {
      mark(copy.to, copy.bytes, ByteState::kVariable);
      std::memcpy(shared(copy.to), copy.from, copy.bytes);
      barrier_at(barrier).bytes -= copy.bytes;
      barrier_at(barrier).settle();
    }
    return copy.barrier == barrier;
  });
}

}  // namespace ptx
