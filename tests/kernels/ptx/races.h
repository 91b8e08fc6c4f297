// Races on shared memory: two threads at the same byte, one of which writes, and nothing orders
// them.
//
// Each warp counts what it has released; its clock holds, of every warp of the cluster, how much of
// that it has acquired. Barriers pass clocks on. Of a byte, the last store and the last load are
// known, so that of several readers a writer is checked against one: running the threads in the
// other order checks another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ptx {

struct Clock {
  std::vector<std::uint32_t> counts;  // by the number of a warp in its cluster

  void join(const Clock& other) {
    for (std::size_t i = 0; i < other.counts.size(); ++i) {
      counts[i] = std::max(counts[i], other.counts[i]);
    }
  }
  void tick(std::uint32_t warp) { ++counts[warp]; }
};

// Who was at a byte last, and when.
struct Access {
  std::uint32_t count = 0;  // of the warp's own; 0: nobody yet
  std::uint16_t warp = 0;
  std::uint8_t lane = 0;

  // Whether it is ordered before what a lane does now. Lanes of a warp that have not met since are
  // not.
  bool is_before(std::uint32_t other_warp, int other_lane, const Clock& clock) const {
    if (warp == other_warp) {
      return lane == other_lane || count < clock.counts[warp];
    }
    return count <= clock.counts[warp];
  }
};

struct Accesses {
  Access store;
  Access load;
};

}  // namespace ptx
