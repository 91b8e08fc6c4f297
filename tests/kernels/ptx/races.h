// Races on shared memory: two threads access the same byte, at least one of them writes, and
// nothing orders them.
//
// Each warp counts its releases. Its clock says, for every warp of the cluster, how many of that
// warp's releases it has acquired; barriers pass clocks on. Only the last store to a byte and the
// last load from it are known, so a writer is checked against one of several readers. Running the
// threads in the other order checks another one.
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

// Who accessed a byte last, and when.
struct Access {
  std::uint32_t count = 0;  // the warp's own count; 0: nobody yet
  std::uint16_t warp = 0;
  std::uint8_t lane = 0;

  // Whether this access is ordered before what a lane does now. Accesses by lanes of one warp that
  // have not met since are not.
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
