// A launch: its CTAs, their shared memory and barriers, and the memory that a kernel may touch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "module.h"
#include "warp.h"

namespace ptx {

// Global memory that a kernel may read and, if it is writable, write.
struct Allocation {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool is_writable = false;
  std::string name{};
  // For memory that holds nothing yet: whether each byte was written.
  std::vector<std::uint8_t> written{};
};

class GlobalMemory {
 public:
  void add(Allocation made);
  void clear() { allocations_.clear(); }
  // Throws unless all of it may be read, or written. Reads may reach past the ends of an
  // allocation, within a block of 16 bytes that holds some of it, because the kernels read whole
  // blocks.
  std::byte* check(std::uint64_t address, std::uint32_t bytes, bool is_store);
  // A sentence about a result that was not written completely, or nothing. A workspace need not be.
  std::string unwritten() const;

 private:
  Allocation* find(std::uint64_t address, std::uint32_t bytes);

  std::vector<Allocation> allocations_;
  std::size_t last_ = 0;
};

struct LaunchShape {
  std::array<std::uint32_t, 3> grid{1, 1, 1};
  std::array<std::uint32_t, 3> block{1, 1, 1};
  std::uint32_t cluster = 1;
  std::uint32_t shared_bytes = 0;  // dynamic
};

// bar.sync. It opens when as many threads have arrived as the first of them announced.
struct Barrier {
  std::uint32_t wanted = 0;
  std::uint32_t arrived = 0;
  std::uint64_t phase = 0;
  Clock arriving{};
  Clock opened{};  // of those who had arrived when it opened last
};

// An mbarrier: a phase ends when nothing is pending, neither arrivals nor bytes.
struct MemoryBarrier {
  std::uint32_t at = 0;
  std::int64_t count = 0;  // arrivals of a phase
  std::int64_t pending = 0;
  std::int64_t bytes = 0;  // announced, but not yet arrived
  std::uint64_t phase = 0;
  Clock clock{};

  void settle() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = count;
    }
  }
};

// A bulk copy in flight.
struct BulkCopy {
  std::uint32_t to;
  const std::byte* from;
  std::uint32_t bytes;
  std::uint32_t barrier;
};

// What is known of a byte of shared memory. Bytes that nothing has written may be read, because
// kernels read whole packs at the end of a row. They are NaN in all types, so a result shows them.
enum class ByteState : std::uint8_t { kOutside, kVariable, kInFlight, kBarrier };

class Cluster;

class Cta {
 public:
  Cta(const Module& module, const LaunchShape& shape, Cluster& cluster, std::uint32_t rank);

  void start(std::array<std::uint32_t, 3> index);
  bool run(bool backwards);  // returns whether anything was run
  bool ended() const { return running == 0; }

  std::byte* check_shared(Warp& warp, int lane, std::uint32_t at, std::uint32_t bytes,
                          bool is_store);
  // Throws if the access races with an earlier one. Records it.
  void check_race(Warp& warp, int lane, std::uint32_t at, std::uint32_t bytes, bool is_store);
  void mark(std::uint32_t at, std::uint32_t bytes, ByteState state);
  std::byte* shared(std::uint32_t at) { return shared_.data() + at; }
  MemoryBarrier& barrier_at(std::uint32_t at);
  void make_barrier(std::uint32_t at, std::uint32_t count);
  void finish_bulk_copies(std::uint32_t barrier);

  const LaunchShape& shape;
  Cluster& cluster;
  std::uint32_t rank;
  std::uint32_t threads;
  std::uint32_t running = 0;  // threads that have not ended
  std::array<std::uint32_t, 3> index{};
  std::array<Barrier, 16> barriers;
  std::vector<BulkCopy> bulk_copies;
  std::span<const std::byte> parameters;
  std::vector<std::unique_ptr<Warp>> warps;

 private:
  const Module& module_;
  std::vector<std::byte> shared_;
  std::vector<ByteState> states_;
  std::vector<Accesses> accesses_;
  std::vector<MemoryBarrier> memory_barriers_;
};

class Cluster {
 public:
  Cluster(const Module& module, const LaunchShape& shape, GlobalMemory& memory,
          std::span<const std::byte> parameters);

  void start(std::uint32_t number);
  void run(bool backwards);
  Cta& cta(std::uint32_t rank);
  std::uint64_t executed() const;

  GlobalMemory& memory;
  std::uint32_t arrived = 0;  // threads at the barrier of the cluster
  std::uint64_t phase = 0;
  Clock arriving, opened;

 private:
  const LaunchShape& shape_;
  std::vector<std::unique_ptr<Cta>> ctas_;
};

// Runs the kernel. Returns how many instructions all of its threads have executed. Throws Fault.
std::uint64_t run(const Module& module, const LaunchShape& shape,
                  std::span<const std::byte> parameters, GlobalMemory& memory, bool backwards);

}  // namespace ptx
