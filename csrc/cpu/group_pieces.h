// What both directions of the group norm do with a chunk of cpu/group_chunks.h: they process it in
// pieces, as accumulators, which stay in the L1 cache. Included only by a level: level.h.
#pragma once

#include "core/group_norm.h"
#include "cpu/elements.h"
#include "cpu/gated.h"
#include "cpu/level.h"
#include "cpu/tiles.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Elements of a piece: whole channels, or a part of one.
constexpr std::int64_t kPiece = 1024;

struct GroupPiece {
  std::int64_t offset;   // of its first element in the chunk
  std::int64_t channel;  // the first one, in the group
  std::int64_t channels;
  std::int64_t pixels;  // of each channel

  std::int64_t elements() const { return channels * pixels; }
};

template <typename Function>
FUSED_OP_CPU_INLINE void for_pieces(const GroupChunk& chunk, const Function& function) {
  const std::int64_t each = std::max<std::int64_t>(1, kPiece / chunk.pixels);
  std::int64_t offset = 0;
  for (std::int64_t c = 0; c < chunk.channels; c += each) {
    const std::int64_t channels = std::min(each, chunk.channels - c);
    for (std::int64_t pixel = 0; pixel < chunk.pixels; pixel += kPiece) {
      const GroupPiece piece{offset, chunk.first_channel + c, channels,
                             std::min(kPiece, chunk.pixels - pixel)};
      function(piece);
      offset += piece.elements();
    }
  }
}

// The buffers of a thread. Each has room for a piece.
template <typename A>
A* piece_buffer(int number) {
  static_assert(kTiles * kTileSize >= 12 * kPiece);
  return tile_buffer<A>(0) + number * kPiece;
}

template <typename A>
void read_or(const void* from, DType dtype, std::int64_t first, std::int64_t count, A absent,
             A* to) {
  if (from == nullptr) {
    std::fill_n(to, count, absent);
  } else {
    read_elements(from, dtype, first, count, to);
  }
}

// What the x̂ of each channel is multiplied by, and what is added then. An absent offset is -0,
// which changes nothing.
template <typename A>
class ChannelFactors {
 public:
  explicit ChannelFactors(const GroupNormArgs& args)
      : args_(args.channel), groups_(args.groups), channels_(args.group_channels()) {}

  void begin(std::int64_t group) {
    sample_ = group / groups_;
    first_ = group % groups_ * channels_;
    count_ = 0;
  }
  // Of channels of the group. Valid until the next call.
  void load(std::int64_t channel, std::int64_t count) {
    if (channel == channel_ && count == count_) {
      return;
    }
    channel_ = channel;
    count_ = count;
    const std::int64_t first = first_ + channel;
    const std::int64_t entry = sample_ * args_.entry_stride + first;
    read_or(args_.weight, args_.param_dtype, first, count, A(1), weight);
    read_or(args_.bias, args_.param_dtype, first, count, A(-0.0), bias);
    read_or(args_.scale, args_.entry_dtype, entry, count, A(0), scale);
    read_or(args_.shift, args_.entry_dtype, entry, count, A(-0.0), shift);
    const bool has_bias = args_.bias != nullptr;  // an absent one times infinity would be NaN
#pragma omp simd
    for (std::int64_t c = 0; c < count; ++c) {
      const A more = A(1) + scale[c];
      factor[c] = weight[c] * more;
      offset[c] = (has_bias ? bias[c] * more : A(-0.0)) + shift[c];
    }
  }

  A* const weight = piece_buffer<A>(0);
  A* const bias = piece_buffer<A>(1);
  A* const scale = piece_buffer<A>(2);
  A* const shift = piece_buffer<A>(3);
  A* const factor = piece_buffer<A>(4);
  A* const offset = piece_buffer<A>(5);

 private:
  const ChannelArgs& args_;
  const std::int64_t groups_;
  const std::int64_t channels_;
  std::int64_t sample_ = 0;
  std::int64_t first_ = 0;
  std::int64_t channel_ = 0;
  std::int64_t count_ = 0;
};

// The type in which loops read and write elements. Float16 goes through buffers, because compilers
// do not vectorise its conversion by F16C.
template <typename E, typename A>
using Direct = std::conditional_t<std::is_same_v<E, Float16>, A, E>;

template <typename A, typename E>
FUSED_OP_CPU_INLINE const Direct<E, A>* read_piece(const E* from, std::int64_t count, A* buffer) {
  if constexpr (std::is_same_v<E, Direct<E, A>>) {
    return from;
  } else {
    FUSED_OP_CPU_LEVEL::read<E>(from, 0, count, buffer);
    return buffer;
  }
}
// Where the results of a piece are computed; write_piece brings them where they belong.
template <typename A, typename E>
FUSED_OP_CPU_INLINE Direct<E, A>* result_piece(E* to, A* buffer) {
  if constexpr (std::is_same_v<E, Direct<E, A>>) {
    return to;
  } else {
    return buffer;
  }
}
template <typename A, typename E>
FUSED_OP_CPU_INLINE void write_piece(const Direct<E, A>* from, E* to, std::int64_t count) {
  if constexpr (!std::is_same_v<E, Direct<E, A>>) {
    write<E>(from, to, 0, count);
  }
}

// (scale · x - mean) · factor + offset: of a channel, and of many with one pixel.
template <typename X, typename A, typename Y>
FUSED_OP_CPU_INLINE void affine_channel(const X* __restrict x, std::int64_t count, A scale, A mean,
                                        A factor, A offset, Y* __restrict y) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    y[j] = rounded<Y>(multiply_add(widened<A>(x[j]) * scale - mean, factor, offset));
  }
}
template <typename X, typename A, typename Y>
FUSED_OP_CPU_INLINE void affine_channels(const X* __restrict x, std::int64_t count,
                                         const Normalizer<A>& normalizer,
                                         const A* __restrict factors, const A* __restrict offsets,
                                         Y* __restrict y) {
  const A scale = normalizer.scale, mean = normalizer.mean;
  const A shift = normalizer.shift, rstd = normalizer.rstd;
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const A deviation = widened<A>(x[j]) * scale - mean;
    y[j] = rounded<Y>(multiply_add(deviation, rstd * factors[j], shift * factors[j] + offsets[j]));
  }
}

// n of a piece.
template <typename X, typename A, typename Y>
FUSED_OP_CPU_SHARED void affine_piece(const X* x, const GroupPiece& piece,
                                      const Normalizer<A>& normalizer,
                                      const ChannelFactors<A>& factors, Y* y) {
  if (piece.pixels == 1) {
    affine_channels(x, piece.channels, normalizer, factors.factor, factors.offset, y);
    return;
  }
  for (std::int64_t c = 0; c < piece.channels; ++c) {
    const A factor = factors.factor[c];
    affine_channel(x + c * piece.pixels, piece.pixels, normalizer.scale, normalizer.mean,
                   normalizer.rstd * factor, normalizer.shift * factor + factors.offset[c],
                   y + c * piece.pixels);
  }
}

// Calls the steps of GroupForward or GroupBackward for a range of groups or chunks.
template <typename Loops>
void run_group_step(Loops& loops, GroupStep step, std::int64_t first, std::int64_t last,
                    std::int64_t chunks_each) {
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t first_chunk = step == GroupStep::kAll ? i * chunks_each : i;
    const std::int64_t last_chunk = step == GroupStep::kAll ? first_chunk + chunks_each : i + 1;
    if (step == GroupStep::kAll || step == GroupStep::kSums) {
      for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
        loops.sum(chunk);
      }
    }
    if (step == GroupStep::kAll || step == GroupStep::kFinish) {
      loops.finish(i);
    }
    if (step == GroupStep::kAll || step == GroupStep::kApply) {
      for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
        loops.apply(chunk);
      }
    }
  }
}

// Calls function<E, A>().
template <typename Function>
void with_group_elements(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function.template operator()<Float16, float>();
    case DType::kBFloat16:
      return function.template operator()<BFloat16, float>();
    case DType::kFloat32:
      return function.template operator()<float, float>();
    case DType::kFloat64:
      return function.template operator()<double, double>();
  }
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
