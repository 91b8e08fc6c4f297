// Forward of the group norm: core/group_norm.h has the formulas. A group is contiguous, and
// processed in chunks. Included only by a level: level.h.
#pragma once

#include "core/group_norm.h"
#include "cpu/forward.h"
#include "cpu/group_pieces.h"
#include "cpu/level.h"
#include "cpu/sums.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <typename E, typename A>
class GroupForward {
 public:
  GroupForward(const GroupNormForwardArgs& call, double* work)
      : args_(call),
        chunks_(call),
        elements_(call.group_elements()),
        sums_(work),
        normalizers_(work + 2 * call.all_groups() * chunks_.of_group()),
        factors_(call) {}

  void run(GroupStep step, std::int64_t first, std::int64_t last) {
    run_group_step(*this, step, first, last, chunks_.of_group());
  }

  void sum(std::int64_t number) const {
    const GroupChunk chunk = chunks_[number];
    const Totals totals = deviations(chunk, A(1), center_of(chunk.group));
    sums_[2 * number] = totals.sum;
    sums_[2 * number + 1] = totals.squares;
  }

  void finish(std::int64_t group) const {
    Totals totals;
    const std::int64_t first = group * chunks_.of_group();
    for (std::int64_t chunk = first; chunk < first + chunks_.of_group(); ++chunk) {
      totals.sum += sums_[2 * chunk];
      totals.squares += sums_[2 * chunk + 1];
    }
    A scale = A(1);
    Moments<A> found = moments_of(center_of(group), totals, static_cast<double>(elements_));
    if (needs_care(found.second)) {
      take_care(group, found, scale);
    }
    const A variance =
        static_cast<A>(static_cast<double>(found.second) / static_cast<double>(elements_));
    const Normalizer<A> normalizer = LayerNorm::normalizer(
        Moments<A>{found.mean, found.rest, variance}, scale, A(1), static_cast<A>(args_.eps));
    if (args_.stats != nullptr) {
      LayerNorm::save(normalizer, found, static_cast<A*>(args_.stats), group, args_.all_groups());
    }
    double* const to = normalizers_ + group * kNormalizerDoubles;
    to[0] = static_cast<double>(normalizer.scale);
    to[1] = static_cast<double>(normalizer.mean);
    to[2] = static_cast<double>(normalizer.shift);
    to[3] = static_cast<double>(normalizer.rstd);
  }

  void apply(std::int64_t number) {
    const GroupChunk chunk = chunks_[number];
    const double* const saved = normalizers_ + chunk.group * kNormalizerDoubles;
    const Normalizer<A> normalizer{static_cast<A>(saved[0]), static_cast<A>(saved[1]),
                                   static_cast<A>(saved[2]), static_cast<A>(saved[3])};
    factors_.begin(chunk.group);
    const E* const input = elements_of(chunk);
    E* const output = static_cast<E*>(args_.output) + first_of(chunk);
    for_pieces(chunk, [&](const GroupPiece& piece) {
      const std::int64_t count = piece.elements();
      factors_.load(piece.channel, piece.channels);
      const auto* const x = read_piece(input + piece.offset, count, piece_buffer<A>(6));
      auto* const y = result_piece(output + piece.offset, piece_buffer<A>(7));
      if (args_.silu) {
        A* const n = piece_buffer<A>(8);
        affine_piece(x, piece, normalizer, factors_, n);
        silu(n, count, y);
      } else {
        affine_piece(x, piece, normalizer, factors_, y);
      }
      write_piece<A>(y, output + piece.offset, count);
    });
  }

 private:
  static constexpr int kLanes = 128 / sizeof(A);

  const E* elements_of(const GroupChunk& chunk) const {
    return static_cast<const E*>(args_.input) + first_of(chunk);
  }
  std::int64_t first_of(const GroupChunk& chunk) const {
    return chunk.group * elements_ + chunk.first_channel * args_.pixels + chunk.first_pixel;
  }

  // Near enough to the mean of a group: a few elements tell where it is.
  A center_of(std::int64_t group) const {
    const E* const x = static_cast<const E*>(args_.input) + group * elements_;
    const std::int64_t few = std::min<std::int64_t>(elements_, 16);
    const std::int64_t stride = elements_ / few;
    const A part = A(1) / static_cast<A>(few);
    A center = 0;
    for (std::int64_t i = 0; i < few; ++i) {
      center += widened<A>(x[i * stride]) * part;
    }
    return center;
  }

  __attribute__((noinline)) Totals deviations(const GroupChunk& chunk, A scale, A center) const {
    Totals totals;
    const E* const x = elements_of(chunk);
    if (chunk.elements() >= kMaxLanes) {
      add_deviations<kLanes, true>(x, chunk.elements(), scale, center, totals);
    } else {
      add_deviations<1, true>(x, chunk.elements(), scale, center, totals);
    }
    return totals;
  }

  // A group whose center was far from its mean, or whose squares overflowed.
  __attribute__((noinline)) void take_care(std::int64_t group, Moments<A>& found, A& scale) const {
    const auto measure = [&](A center) {
      Totals totals;
      const std::int64_t first = group * chunks_.of_group();
      for (std::int64_t chunk = first; chunk < first + chunks_.of_group(); ++chunk) {
        const Totals some = deviations(chunks_[chunk], scale, center);
        totals.sum += some.sum;
        totals.squares += some.squares;
      }
      return moments_of(center, totals, static_cast<double>(elements_), true);
    };
    found = measure(found.mean);
    if (needs_care(found.second)) {
      scale = Limits<A>::kScale;
      found = Moments<A>{};
      for (int i = 0; i < 3; ++i) {
        found = measure(found.mean);
      }
      unscale(found, scale);
    }
  }

  const GroupNormForwardArgs& args_;
  const GroupChunks chunks_;
  const std::int64_t elements_;
  double* const sums_;
  double* const normalizers_;
  ChannelFactors<A> factors_;
};

inline void group_norm_forward(const GroupNormForwardArgs& args, double* work, GroupStep step,
                               std::int64_t first, std::int64_t last) {
  with_group_elements(args.dtype, [&]<typename E, typename A>() {
    GroupForward<E, A>(args, work).run(step, first, last);
  });
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
