// Backward of the group norm: core/group_norm.h has the formulas. Included only by a level:
// level.h.
#pragma once

#include "core/group_norm.h"
#include "cpu/group_pieces.h"
#include "cpu/level.h"
#include "cpu/sums.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// A and B of core/group_norm.h.
struct ChannelSums {
  double dn = 0;
  double dn_xhat = 0;
};

// Of the pixels of a channel in a piece, in an order that depends only on their number.
template <int kLanes, typename X, typename D, typename A>
FUSED_OP_CPU_INLINE ChannelSums add_in_lanes(const X* __restrict x, const D* __restrict dn,
                                             std::int64_t count, const Normalizer<A>& normalizer) {
  const A scale = normalizer.scale, mean = normalizer.mean, rstd = normalizer.rstd;
  const auto xhat = [&](std::int64_t j) { return (widened<A>(x[j]) * scale - mean) * rstd; };
  ChannelSums sums;
  std::int64_t j = 0;
  if (count >= kLanes) {
    A ones[kLanes] = {}, products[kLanes] = {};
    for (; j + kLanes <= count; j += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) {
        const A grad = widened<A>(dn[j + lane]);
        ones[lane] += grad;
        products[lane] += grad * xhat(j + lane);
      }
    }
    sums = {static_cast<double>(add_lanes(ones)), static_cast<double>(add_lanes(products))};
  }
  for (; j < count; ++j) {
    const A grad = widened<A>(dn[j]);
    sums.dn += static_cast<double>(grad);
    sums.dn_xhat += static_cast<double>(grad * xhat(j));
  }
  return sums;
}

template <typename X, typename D, typename A>
FUSED_OP_CPU_INLINE ChannelSums add_pixels(const X* x, const D* dn, std::int64_t count,
                                           const Normalizer<A>& normalizer) {
  constexpr int kMost = 64 / sizeof(A);
  return count >= 8 * kMost ? add_in_lanes<kMost>(x, dn, count, normalizer)
                            : add_in_lanes<kMost / 2>(x, dn, count, normalizer);
}

// The means over a group that its gradients need: of dn · factor, and of that times x̂.
template <typename A>
struct GroupMeans {
  A grad;
  A along;  // times rstd
};

// dx = (dn · factor - mean) · rstd - x̂ · along, of a channel. dx may be dn.
template <typename X, typename D, typename A, typename Y>
FUSED_OP_CPU_INLINE void pull_back(const X* x, const D* dn, std::int64_t count, A factor,
                                   const Normalizer<A>& normalizer, const GroupMeans<A>& means,
                                   Y* dx) {
  const A scale = normalizer.scale, mean = normalizer.mean;
  const A rstd = normalizer.rstd, true_rstd = normalizer.true_rstd();
  const A grad_mean = means.grad, along = means.along;
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const A xhat = (widened<A>(x[j]) * scale - mean) * rstd;
    const A centered = widened<A>(dn[j]) * factor - grad_mean;
    dx[j] = rounded<Y>(multiply_add(-xhat, along, centered * true_rstd));
  }
}

// For many channels with one pixel.
template <typename X, typename D, typename A>
FUSED_OP_CPU_INLINE void store_sums(const X* __restrict x, const D* __restrict dn,
                                    std::int64_t count, const Normalizer<A>& normalizer,
                                    double* __restrict sums, double* __restrict products) {
  const A scale = normalizer.scale, mean = normalizer.mean, rstd = normalizer.rstd;
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const A grad = widened<A>(dn[j]);
    sums[j] = static_cast<double>(grad);
    products[j] = static_cast<double>(grad * ((widened<A>(x[j]) * scale - mean) * rstd));
  }
}
template <typename X, typename D, typename A, typename Y>
FUSED_OP_CPU_INLINE void pull_back_channels(const X* x, const D* dn, std::int64_t count,
                                            const A* factors, const Normalizer<A>& normalizer,
                                            const GroupMeans<A>& means, Y* dx) {
  const A scale = normalizer.scale, mean = normalizer.mean;
  const A rstd = normalizer.rstd, true_rstd = normalizer.true_rstd();
  const A grad_mean = means.grad, along = means.along;
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const A xhat = (widened<A>(x[j]) * scale - mean) * rstd;
    const A centered = widened<A>(dn[j]) * factors[j] - grad_mean;
    dx[j] = rounded<Y>(multiply_add(-xhat, along, centered * true_rstd));
  }
}

// What the two passes do with a piece. `sums` and `products` are those of its first channel,
// `parts` apart.
template <typename X, typename D, typename A>
FUSED_OP_CPU_SHARED void add_piece(const GroupPiece& piece, bool of_one_pixel,
                                   const Normalizer<A>& normalizer, const X* x, const D* dn,
                                   std::int64_t parts, double* sums, double* products) {
  if (of_one_pixel) {
    store_sums(x, dn, piece.channels, normalizer, sums, products);
    return;
  }
  for (std::int64_t c = 0; c < piece.channels; ++c) {
    const std::int64_t first = c * piece.pixels;
    const ChannelSums found = add_pixels(x + first, dn + first, piece.pixels, normalizer);
    sums[c * parts] += found.dn;
    products[c * parts] += found.dn_xhat;
  }
}
template <typename X, typename D, typename A, typename Y>
FUSED_OP_CPU_SHARED void pull_back_piece(const GroupPiece& piece, const Normalizer<A>& normalizer,
                                         const GroupMeans<A>& means, const A* factors, const X* x,
                                         const D* dn, Y* dx) {
  if (piece.pixels == 1) {
    pull_back_channels(x, dn, piece.channels, factors, normalizer, means, dx);
    return;
  }
  for (std::int64_t c = 0; c < piece.channels; ++c) {
    const std::int64_t first = c * piece.pixels;
    pull_back(x + first, dn + first, piece.pixels, factors[c], normalizer, means, dx + first);
  }
}

template <typename E, typename A>
class GroupBackward {
 public:
  GroupBackward(const GroupNormBackwardArgs& call, double* work)
      : args_(call),
        chunks_(call),
        channels_(call.group_channels()),
        elements_(call.group_elements()),
        sums_(work),
        products_(work + channel_parts(call)),
        group_means_(work + 2 * channel_parts(call)),
        factors_(call) {}

  void run(GroupStep step, std::int64_t first, std::int64_t last) {
    if constexpr (!std::is_same_v<E, A>) {
      const bool keeps = step == GroupStep::kAll && args_.silu && elements_ <= kMostKept;
      kept_.reset(keeps ? new A[elements_] : nullptr);
    }
    run_group_step(*this, step, first, last, chunks_.of_group());
  }

  void sum(std::int64_t number) {
    const GroupChunk chunk = chunks_[number];
    const Normalizer<A> normalizer = normalizer_of(chunk.group);
    const std::int64_t parts = chunks_.parts();
    const std::int64_t first_sum = first_sum_of(chunk.group) + chunk.part;
    for (std::int64_t c = 0; c < chunk.channels; ++c) {
      const std::int64_t at = first_sum + (chunk.first_channel + c) * parts;
      sums_[at] = products_[at] = 0;
    }
    for_gradients(chunk, false, [&](const GroupPiece& piece, const auto* x, const auto* dn) {
      const std::int64_t at = first_sum + piece.channel * parts;
      add_piece(piece, args_.pixels == 1, normalizer, x, dn, parts, sums_ + at, products_ + at);
    });
  }

  // Adds the parts of each channel up, and computes the means of the group.
  void finish(std::int64_t group) {
    const std::int64_t parts = chunks_.parts();
    double mean = 0, along = 0;
    factors_.begin(group);
    for (std::int64_t first = 0; first < channels_; first += kPiece) {
      const std::int64_t count = std::min(kPiece, channels_ - first);
      factors_.load(first, count);
      for (std::int64_t c = 0; c < count; ++c) {
        const std::int64_t at = first_sum_of(group) + (first + c) * parts;
        for (std::int64_t part = 1; part < parts; ++part) {
          sums_[at] += sums_[at + part];
          products_[at] += products_[at + part];
        }
        mean += static_cast<double>(factors_.factor[c]) * sums_[at];
        along += static_cast<double>(factors_.factor[c]) * products_[at];
      }
    }
    group_means_[2 * group] = mean / static_cast<double>(elements_);
    group_means_[2 * group + 1] = along / static_cast<double>(elements_);
  }

  void apply(std::int64_t number) {
    if (args_.grad_input == nullptr) {
      return;
    }
    const GroupChunk chunk = chunks_[number];
    const Normalizer<A> normalizer = normalizer_of(chunk.group);
    const double* const saved = group_means_ + 2 * chunk.group;
    const GroupMeans<A> means{static_cast<A>(saved[0]),
                              static_cast<A>(saved[1]) * normalizer.true_rstd()};
    E* const grad_input = static_cast<E*>(args_.grad_input) + first_of(chunk);
    for_gradients(chunk, true, [&](const GroupPiece& piece, const auto* x, const auto* dn) {
      E* const to = grad_input + piece.offset;
      auto* const dx = result_piece(to, piece_buffer<A>(10));
      pull_back_piece(piece, normalizer, means, factors_.factor, x, dn, dx);
      write_piece<A>(dx, to, piece.elements());
    });
  }

 private:
  // Elements of a group whose dn is kept from sums to apply, in the L2 cache.
  static constexpr std::int64_t kMostKept = 65536;

  std::int64_t first_of(const GroupChunk& chunk) const {
    return chunk.group * elements_ + chunk.first_channel * args_.pixels + chunk.first_pixel;
  }
  Normalizer<A> normalizer_of(std::int64_t group) const {
    return LayerNorm::saved(static_cast<const A*>(args_.stats), group, args_.all_groups())
        .normalizer();
  }
  std::int64_t first_sum_of(std::int64_t group) const {
    return group * channels_ * chunks_.parts();
  }

  // Where dn can stay from sums to apply, or null: where grad_input will be, if that is as wide.
  A* place_of(const GroupChunk& chunk, const GroupPiece& piece) const {
    if constexpr (std::is_same_v<E, A>) {
      return args_.grad_input == nullptr
                 ? nullptr
                 : static_cast<A*>(args_.grad_input) + first_of(chunk) + piece.offset;
    } else {
      return kept_ == nullptr
                 ? nullptr
                 : kept_.get() + (first_of(chunk) - chunk.group * elements_) + piece.offset;
    }
  }

  // Calls function(piece, x, dn) for the pieces of a chunk.
  template <typename Function>
  FUSED_OP_CPU_INLINE void for_gradients(const GroupChunk& chunk, bool is_apply,
                                         const Function& function) {
    const Normalizer<A> normalizer = normalizer_of(chunk.group);
    const E* const input = static_cast<const E*>(args_.input) + first_of(chunk);
    const E* const grad_output = static_cast<const E*>(args_.grad_output) + first_of(chunk);
    factors_.begin(chunk.group);
    for_pieces(chunk, [&](const GroupPiece& piece) {
      const std::int64_t count = piece.elements();
      if (is_apply || args_.silu) {
        factors_.load(piece.channel, piece.channels);
      }
      const auto* const x = read_piece(input + piece.offset, count, piece_buffer<A>(6));
      A* const place = args_.silu ? place_of(chunk, piece) : nullptr;
      if (is_apply && place != nullptr) {
        function(piece, x, static_cast<const A*>(place));
        return;
      }
      const auto* const dy = read_piece(grad_output + piece.offset, count, piece_buffer<A>(7));
      if (args_.silu) {
        A* const n = piece_buffer<A>(8);
        A* const dn = place != nullptr ? place : piece_buffer<A>(9);
        affine_piece(x, piece, normalizer, factors_, n);
        multiply_by_slope(dy, n, count, dn);
        function(piece, x, static_cast<const A*>(dn));
      } else {
        function(piece, x, dy);
      }
    });
  }

  const GroupNormBackwardArgs& args_;
  const GroupChunks chunks_;
  const std::int64_t channels_;
  const std::int64_t elements_;
  double* const sums_;      // of dn, for each part of each channel
  double* const products_;  // of dn · x̂, likewise
  double* const group_means_;
  ChannelFactors<A> factors_;
  std::unique_ptr<A[]> kept_;
};

// The gradients of weight, bias, scale and shift, from the sums that finish has added up.
template <typename A>
class GroupParameterGradients {
 public:
  GroupParameterGradients(const GroupNormBackwardArgs& call, const double* work)
      : args_(call),
        sums_(work),
        products_(work + channel_parts(call)),
        parts_(GroupChunks(call).parts()) {}

  // Of a range of channels.
  void run(std::int64_t first, std::int64_t last) const {
    for (std::int64_t channel = first; channel < last; channel += kPiece) {
      sum_samples(channel, std::min(kPiece, last - channel));
    }
  }

 private:
  void sum_samples(std::int64_t first, std::int64_t count) const {
    const ChannelArgs& channel = args_.channel;
    A* const weight = piece_buffer<A>(0);
    A* const bias = piece_buffer<A>(1);
    A* const scale = piece_buffer<A>(2);
    double* const dweight = piece_buffer<double>(6);
    double* const dbias = piece_buffer<double>(7);
    read_or(channel.weight, channel.param_dtype, first, count, A(1), weight);
    read_or(channel.bias, channel.param_dtype, first, count, A(0), bias);
    std::fill_n(dweight, count, 0.0);
    std::fill_n(dbias, count, 0.0);
    for (std::int64_t sample = 0; sample < args_.samples; ++sample) {
      const std::int64_t entry = sample * args_.channels + first;
      const double* const sums = found(sums_, entry, count, piece_buffer<double>(8));
      const double* const products = found(products_, entry, count, piece_buffer<double>(9));
      read_or(channel.scale, channel.entry_dtype, sample * channel.entry_stride + first, count,
              A(0), scale);
#pragma omp simd
      for (std::int64_t c = 0; c < count; ++c) {
        const double more = 1 + static_cast<double>(scale[c]);
        dbias[c] += more * sums[c];
        dweight[c] += more * products[c];
      }
      write_entries(entry, count, sums, products, weight, bias);
    }
    write_sums(dweight, args_.grad_weight, first, count);
    write_sums(dbias, args_.grad_bias, first, count);
  }

  // Those of the first parts, side by side.
  const double* found(const double* from, std::int64_t channel, std::int64_t count,
                      double* buffer) const {
    if (parts_ == 1) {
      return from + channel;
    }
    for (std::int64_t c = 0; c < count; ++c) {
      buffer[c] = from[(channel + c) * parts_];
    }
    return buffer;
  }

  void write_entries(std::int64_t entry, std::int64_t count, const double* sums,
                     const double* products, const A* weight, const A* bias) const {
    A* const gradients = piece_buffer<A>(3);
    if (args_.grad_scale != nullptr) {
#pragma omp simd
      for (std::int64_t c = 0; c < count; ++c) {
        gradients[c] = static_cast<A>(static_cast<double>(weight[c]) * products[c] +
                                      static_cast<double>(bias[c]) * sums[c]);
      }
      write_elements(gradients, args_.grad_scale, args_.channel.entry_dtype, entry, count);
    }
    if (args_.grad_shift != nullptr) {
      std::transform(sums, sums + count, gradients, [](double sum) { return static_cast<A>(sum); });
      write_elements(gradients, args_.grad_shift, args_.channel.entry_dtype, entry, count);
    }
  }
  void write_sums(const double* sums, void* to, std::int64_t first, std::int64_t count) const {
    if (to != nullptr) {
      A* const gradients = piece_buffer<A>(3);
      std::transform(sums, sums + count, gradients, [](double sum) { return static_cast<A>(sum); });
      write_elements(gradients, to, args_.channel.param_dtype, first, count);
    }
  }

  const GroupNormBackwardArgs& args_;
  const double* const sums_;
  const double* const products_;
  const std::int64_t parts_;  // of a channel
};

inline void group_norm_backward(const GroupNormBackwardArgs& args, double* work, GroupStep step,
                                std::int64_t first, std::int64_t last) {
  with_group_elements(args.dtype, [&]<typename E, typename A>() {
    GroupBackward<E, A>(args, work).run(step, first, last);
  });
}
inline void group_norm_channels(const GroupNormBackwardArgs& args, double* work,
                                std::int64_t first_channel, std::int64_t last_channel) {
  with_accumulators(args.dtype, [&]<typename A>() {
    GroupParameterGradients<A>(args, work).run(first_channel, last_channel);
  });
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
