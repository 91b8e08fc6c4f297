// How the CPU cuts a group of core/group_norm.h into chunks, and what its steps leave for one
// another. Both depend only on the shape of a group, so sums have the same order on any number of
// threads. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/group_norm.h"

namespace fused_op::cpu {

// Sums and then apply take the chunks of all groups, in any order and on any thread. Finish, which
// is between them, takes groups. kAll is the three steps of one group after another.
enum class GroupStep { kAll, kSums, kFinish, kApply };

constexpr std::int64_t kChunkElements = 16384;

// A chunk is whole channels of a group, or a part of one channel: it is contiguous.
struct GroupChunk {
  std::int64_t group;  // of all samples
  std::int64_t first_channel;
  std::int64_t channels;
  std::int64_t part;  // of the channel
  std::int64_t first_pixel;
  std::int64_t pixels;

  std::int64_t elements() const { return channels * pixels; }
};

class GroupChunks {
 public:
  explicit GroupChunks(const GroupNormArgs& args)
      : channels_(args.group_channels()),
        pixels_(args.pixels),
        channels_each_(std::max<std::int64_t>(1, kChunkElements / args.pixels)),
        parts_((args.pixels + kChunkElements - 1) / kChunkElements),
        of_group_((channels_ + channels_each_ - 1) / channels_each_ * parts_) {}

  std::int64_t parts() const { return parts_; }  // of a channel
  std::int64_t of_group() const { return of_group_; }
  GroupChunk operator[](std::int64_t number) const {
    if (of_group_ == 1) {
      return {number, 0, channels_, 0, 0, pixels_};
    }
    const std::int64_t in_group = number % of_group_;
    const std::int64_t channel = in_group / parts_ * channels_each_;
    const std::int64_t part = in_group % parts_;
    const std::int64_t pixel = part * kChunkElements;
    return {.group = number / of_group_,
            .first_channel = channel,
            .channels = std::min(channels_each_, channels_ - channel),
            .part = part,
            .first_pixel = pixel,
            .pixels = std::min(kChunkElements, pixels_ - pixel)};
  }

 private:
  std::int64_t channels_;
  std::int64_t pixels_;
  std::int64_t channels_each_;
  std::int64_t parts_;
  std::int64_t of_group_;
};

// The doubles that a call needs in all. Forward: two sums of each chunk, and the normaliser of the
// group. Backward: a sum of each part of each channel of all samples, another one of each, and two
// means of each group.
constexpr std::int64_t kNormalizerDoubles = 4;
inline std::int64_t forward_doubles(const GroupNormArgs& args) {
  return args.all_groups() * (2 * GroupChunks(args).of_group() + kNormalizerDoubles);
}
inline std::int64_t channel_parts(const GroupNormArgs& args) {
  return args.samples * args.channels * GroupChunks(args).parts();
}
inline std::int64_t backward_doubles(const GroupNormArgs& args) {
  return 2 * (channel_parts(args) + args.all_groups());
}

}  // namespace fused_op::cpu
