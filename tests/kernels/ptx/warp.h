// A running warp: its registers, and its lanes in groups that are at the same instruction. Used by
// the functions that execute instructions.
//
// Each lane has its own place in the program, as on sm_70 and later. The group at the lowest
// instruction runs first, so that lanes that took different branches meet again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "module.h"
#include "races.h"

namespace ptx {

class Cta;

// Lanes at the same instruction that will return to the same ones.
struct Group {
  std::uint32_t mask = 0;
  std::uint32_t at = 0;
  std::uint32_t depth = 0;
  std::array<std::uint32_t, 4> returns{};
  bool waits = false;       // as far as it is known
  bool arrived = false;     // at the barrier that it waits for
  std::uint64_t phase = 0;  // of that barrier, when it arrived
};

// A cp.async that has begun and that nothing has waited for yet.
struct AsyncCopy {
  int lane;
  std::uint32_t group;
  std::uint32_t to;
  const std::byte* from;
  std::uint32_t bytes;
};

class Warp {
 public:
  // `number`: which of the cluster's `warps` this is.
  Warp(const Module& module, Cta& cta, std::uint32_t first_thread, std::uint32_t number,
       std::uint32_t warps);

  // Starts at the kernel's first instruction, with as many threads as the CTA has left.
  void start(std::uint32_t threads);
  // Runs until all lanes wait for other warps or have ended. Returns whether anything was run.
  bool run();
  bool ended() const { return groups_.empty(); }
  // Where the lanes wait, for a message.
  std::string describe() const;

  template <typename T>
  T* lanes(std::uint32_t slot) {
    return reinterpret_cast<T*>(file_.get() + slot);
  }
  std::uint32_t& predicate(std::uint32_t slot) { return *lanes<std::uint32_t>(slot); }

  // Checks a lane's load or store and returns the host memory of these `bytes` bytes.
  std::byte* place(Space space, std::uint64_t address, int lane, std::uint32_t bytes,
                   bool is_store);
  std::uint64_t address(const Address& of, int lane) {
    const auto base = of.is_wide ? lanes<std::uint64_t>(of.slot)[lane]
                                 : std::uint64_t{lanes<std::uint32_t>(of.slot)[lane]};
    return base + static_cast<std::uint64_t>(of.offset);
  }

  Cta& cta() const { return cta_; }
  std::uint32_t alive() const { return alive_; }  // lanes that have not ended
  std::uint32_t thread(int lane) const { return first_thread_ + static_cast<std::uint32_t>(lane); }

  std::uint64_t cluster_phase = 0;  // of the barrier of the cluster, when the warp arrived
  // Orders what the warp has done so far before what those do who acquire the clock.
  void release(Clock& into) {
    into.join(clock);
    clock.tick(number);
  }
  void acquire(const Clock& from) { clock.join(from); }
  const std::uint32_t number;
  Clock clock;

  std::uint32_t awaited = 0;  // lanes that have waited for the kernels before this one
  std::vector<AsyncCopy> copies;
  std::array<std::uint32_t, kLanes> copy_group{};  // the group that each lane fills now
  void finish_copies(std::uint32_t mask, std::uint32_t left);

  std::uint64_t executed = 0;  // instructions, counted for each lane

 private:
  void merge();
  void run_group(std::size_t index);
  void split(std::size_t index, std::uint32_t mask, std::uint32_t at);
  void end_lanes(std::size_t index, std::uint32_t mask);
  void call(Group& group, const Instruction& instruction);
  [[noreturn]] void explain(const Group& group, const Fault& fault) const;

  const Module& module_;
  Cta& cta_;
  std::uint32_t first_thread_;
  std::uint32_t alive_ = 0;
  std::vector<Group> groups_;
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte[], Free> file_;
  std::vector<std::byte> lane_memory_;
};

// Calls f(lane) for the lanes of the mask.
template <typename F>
inline void each_lane(std::uint32_t mask, F f) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) {
      f(lane);
    }
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    f(__builtin_ctz(mask));
  }
}

}  // namespace ptx
