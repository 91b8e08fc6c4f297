// The norms over channels, of tiles of neighbouring pixels: PixelTile of level.h. Each pixel has a
// lane of its own, in loops over all channels. A tile is read from memory once and then from the
// cache. Included by a level alone.
#pragma once

#include "core/channels_first.h"
#include "cpu/elements.h"
#include "cpu/gated.h"
#include "cpu/level.h"
#include "cpu/pixels.h"
#include "cpu/sums.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

template <typename Norm, int kLanes, typename A>
class ChannelsFirstForward {
 public:
  explicit ChannelsFirstForward(const ChannelsFirstForwardArgs& call)
      : args_(call), parameters_(call) {}

  void run(std::int64_t first_tile, std::int64_t last_tile) {
    for (std::int64_t number = first_tile; number < last_tile; ++number) {
      const PixelTile tile(number, kLanes, args_.cols, args_.pixels);
      Tile x(args_.input.data, args_.dtype, tile, args_.pixels);
      normalize(tile, x);
      apply(tile, x);
    }
  }

 private:
  struct PixelTotals {
    alignas(64) double sum[kLanes] = {};
    alignas(64) double squares[kLanes] = {};
  };
  using Tile = Pixels<kLanes, A>;

  // Near enough to the mean of each pixel: a few channels tell where it is.
  void find_centers(Tile& x, A (&centers)[kLanes]) const {
    std::fill_n(centers, kLanes, A(0));
    if constexpr (Norm::kCentered) {
      const std::int64_t few = std::min<std::int64_t>(args_.cols, 16);
      const A part = A(1) / static_cast<A>(few);
      for (std::int64_t i = 0; i < few; ++i) {
        const std::int64_t channel = i * args_.cols / few;
        x.load(channel, channel + 1);
        const A* const values = x[channel];
#pragma omp simd
        for (int j = 0; j < kLanes; ++j) {
          centers[j] += values[j] * part;
        }
      }
    }
  }

  // Not inlined: pixels that need care share it.
  __attribute__((noinline)) void add_deviations(Tile& x, A scale, const A (&centers)[kLanes],
                                                PixelTotals& totals) const {
    for_channels(args_.cols, [&](std::int64_t first, std::int64_t last) {
      x.load(first, last);
      alignas(64) A sum[kLanes] = {};
      alignas(64) A squares[kLanes] = {};
      for (std::int64_t channel = first; channel < last; ++channel) {
        const A* const values = x[channel];
#pragma omp simd
        for (int j = 0; j < kLanes; ++j) {
          const A deviation = values[j] * scale - centers[j];
          if (Norm::kCentered) {
            sum[j] += deviation;
          }
          squares[j] += deviation * deviation;
        }
      }
#pragma omp simd
      for (int j = 0; j < kLanes; ++j) {
        totals.sum[j] += static_cast<double>(sum[j]);
        totals.squares[j] += static_cast<double>(squares[j]);
      }
    });
  }

  void finish(std::int64_t row, int lane, const Moments<A>& found, A scale) {
    const A mean_square = static_cast<A>(static_cast<double>(found.second) / double_cols_);
    const Normalizer<A> normalizer = Norm::normalizer(
        Moments<A>{found.mean, found.rest, mean_square}, scale, A(1), static_cast<A>(args_.eps));
    normalizers_.put(lane, normalizer);
    if (args_.stats != nullptr) {
      Norm::save(normalizer, found, static_cast<A*>(args_.stats), row, args_.rows);
    }
  }

  void normalize(const PixelTile& tile, Tile& x) {
    alignas(64) A centers[kLanes];
    find_centers(x, centers);
    PixelTotals totals;
    add_deviations(x, A(1), centers, totals);
    for (int j = 0; j < tile.count; ++j) {
      const Moments<A> found =
          moments_of(centers[j], {totals.sum[j], totals.squares[j]}, double_cols_);
      if (needs_care(found.second)) {
        take_care(tile, j, found.mean);
      } else {
        finish(tile.row + j, j, found, A(1));
      }
    }
    for (int j = static_cast<int>(tile.count); j < kLanes; ++j) {
      normalizers_.put(j, {A(1), A(0), A(0), A(0)});
    }
  }

  // A pixel whose center was far from its mean, or whose squares overflowed.
  __attribute__((noinline)) void take_care(const PixelTile& tile, int lane, A mean) {
    PixelTile one = tile;
    one.first += lane;
    one.count = 1;
    Tile x(args_.input.data, args_.dtype, one, args_.pixels);
    const auto measure = [&](A scale, A center) {
      alignas(64) A centers[kLanes] = {center};
      PixelTotals totals;
      add_deviations(x, scale, centers, totals);
      return moments_of(center, {totals.sum[0], totals.squares[0]}, double_cols_, true);
    };
    A scale = A(1);
    Moments<A> found = measure(scale, mean);
    if (needs_care(found.second)) {
      scale = Limits<A>::kScale;
      found = Moments<A>{};
      for (int i = 0; i < (Norm::kCentered ? 3 : 1); ++i) {
        found = measure(scale, found.mean);
      }
      unscale(found, scale);
    }
    finish(tile.row + lane, lane, found, scale);
  }

  void apply(const PixelTile& tile, Tile& x) {
    Tile output(args_.output.data, args_.dtype, tile, args_.pixels);
    for_channels(args_.cols, [&](std::int64_t first, std::int64_t last) {
      x.load(first, last);
      output.take(first);
      for (std::int64_t channel = first; channel < last; ++channel) {
        A* const y = output[channel];
        alignas(64) A xhat[kLanes], n[kLanes];
        normalize_pixels<Norm, kLanes>(x[channel], normalizers_.scale, normalizers_.mean,
                                       normalizers_.shift, normalizers_.rstd, xhat);
        affine_pixels<kLanes>(xhat, parameters_.weight(channel), parameters_.bias(channel),
                              args_.silu ? n : y);
        if (args_.silu) {
          silu(n, kLanes, y);
        }
      }
      output.store(last);
    });
  }

  const ChannelsFirstForwardArgs& args_;
  const double double_cols_ = static_cast<double>(args_.cols);
  const ChannelParameters<A, ChannelsFirstForwardArgs> parameters_;
  PixelNormalizers<kLanes, A> normalizers_;
};

template <typename Norm, int kLanes, typename A>
class ChannelsFirstBackward {
 public:
  explicit ChannelsFirstBackward(const ChannelsFirstBackwardArgs& call)
      : args_(call), parameters_(call), sums_parameters_(call.wants_sums()) {}

  void run(std::int64_t first_chunk, std::int64_t last_chunk, std::int64_t chunks) {
    const std::int64_t samples = args_.rows / args_.pixels;
    const std::int64_t tiles = samples * PixelTile::tiles_of_sample(args_.pixels, kLanes);
    const std::int64_t count = sums_parameters_ ? 2 * args_.cols : 0;
    const std::unique_ptr<double[]> sums(new double[count]);
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      std::fill_n(sums.get(), count, 0.0);
      for (std::int64_t number = chunk * tiles / chunks; number < (chunk + 1) * tiles / chunks;
           ++number) {
        const PixelTile tile(number, kLanes, args_.cols, args_.pixels);
        run_tile(tile, sums.get());
      }
      if (sums_parameters_) {
        A* const partials = static_cast<A*>(args_.workspace) + chunk * count;
        std::transform(sums.get(), sums.get() + count, partials,
                       [](double sum) { return static_cast<A>(sum); });
      }
    }
  }

 private:
  using Tile = Pixels<kLanes, A>;

  struct PixelMeans {
    alignas(64) A mean_wdy[kLanes];
    alignas(64) A along_xhat[kLanes];
    alignas(64) A rstd[kLanes];
  };

  // Of a channel: x̂, and dn, which is in the buffer if it is not dy.
  FUSED_OP_CPU_INLINE const A* normalize(const A* x, const A* dy, std::int64_t channel,
                                         A (&xhat)[kLanes], A (&buffer)[kLanes]) const {
    normalize_pixels<Norm, kLanes>(x, normalizers_.scale, normalizers_.mean, normalizers_.shift,
                                   normalizers_.rstd, xhat);
    if (!args_.silu) {
      return dy;
    }
    alignas(64) A n[kLanes];
    affine_pixels<kLanes>(xhat, parameters_.weight(channel), parameters_.bias(channel), n);
    multiply_by_slope(dy, n, kLanes, buffer);
    return buffer;
  }

  void run_tile(const PixelTile& tile, double* sums) {
    for (int j = 0; j < kLanes; ++j) {
      const bool is_there = j < tile.count;
      const auto stats = static_cast<const A*>(args_.stats);
      normalizers_.put(j, is_there ? Norm::saved(stats, tile.row + j, args_.rows).normalizer()
                                   : Normalizer<A>{A(1), A(0), A(0), A(0)});
    }
    Tile x(args_.x.data, args_.dtype, tile, args_.pixels);
    Tile dy(args_.grad_output.data, args_.dtype, tile, args_.pixels);
    PixelMeans pixels;
    if (sums_parameters_ || args_.grad_input.data != nullptr) {
      add_up(x, dy, sums, pixels);
    }
    if (args_.grad_input.data == nullptr) {
      return;
    }
    Tile grad_input(args_.grad_input.data, args_.dtype, tile, args_.pixels);
    for_channels(args_.cols, [&](std::int64_t first, std::int64_t last) {
      x.load(first, last);
      dy.load(first, last);
      grad_input.take(first);
      for (std::int64_t channel = first; channel < last; ++channel) {
        const A weight = parameters_.weight(channel);
        alignas(64) A xhat[kLanes], buffer[kLanes];
        const A* const dn = normalize(x[channel], dy[channel], channel, xhat, buffer);
        A* const dx = grad_input[channel];
#pragma omp simd
        for (int j = 0; j < kLanes; ++j) {
          const A wdy = dn[j] * weight;
          const A centered = Norm::kCentered ? wdy - pixels.mean_wdy[j] : wdy;
          dx[j] = multiply_add(-xhat[j], pixels.along_xhat[j], centered * pixels.rstd[j]);
        }
      }
      grad_input.store(last);
    });
  }

  // The two sums of each pixel, as Pullback of core/norm_math.h has them, and those of each
  // channel.
  void add_up(Tile& x, Tile& dy, double* sums, PixelMeans& pixels) const {
    alignas(64) double totals[kLanes] = {};
    alignas(64) double products[kLanes] = {};
    for_channels(args_.cols, [&](std::int64_t first, std::int64_t last) {
      x.load(first, last);
      dy.load(first, last);
      alignas(64) A sum[kLanes] = {};
      alignas(64) A product[kLanes] = {};
      for (std::int64_t channel = first; channel < last; ++channel) {
        const A weight = parameters_.weight(channel);
        alignas(64) A xhat[kLanes], buffer[kLanes];
        const A* const dn = normalize(x[channel], dy[channel], channel, xhat, buffer);
        if (sums_parameters_) {
          add_parameters(xhat, dn, sums + channel);
        }
#pragma omp simd
        for (int j = 0; j < kLanes; ++j) {
          const A wdy = dn[j] * weight;
          sum[j] += wdy;
          product[j] += wdy * xhat[j];
        }
      }
#pragma omp simd
      for (int j = 0; j < kLanes; ++j) {
        totals[j] += static_cast<double>(sum[j]);
        products[j] += static_cast<double>(product[j]);
      }
    });
    const double inverse = 1 / static_cast<double>(args_.cols);
    for (int j = 0; j < kLanes; ++j) {
      const Normalizer<A> normalizer = normalizers_[j];
      pixels.rstd[j] = normalizer.true_rstd();
      pixels.mean_wdy[j] = static_cast<A>(totals[j] * inverse);
      pixels.along_xhat[j] = static_cast<A>(products[j] * inverse) * pixels.rstd[j];
    }
  }
  FUSED_OP_CPU_INLINE void add_parameters(const A (&xhat)[kLanes], const A* dn,
                                          double* sums) const {
    alignas(64) A products[kLanes], ones[kLanes];
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) {
      ones[j] = dn[j];
      products[j] = dn[j] * xhat[j];
    }
    sums[0] += static_cast<double>(add_lanes(products));
    sums[args_.cols] += static_cast<double>(add_lanes(ones));
  }

  const ChannelsFirstBackwardArgs& args_;
  const ChannelParameters<A, ChannelsFirstBackwardArgs> parameters_;
  const bool sums_parameters_;
  PixelNormalizers<kLanes, A> normalizers_;
};

// Calls function<Norm, kLanes, A>().
template <typename Args, typename Function>
void with_pixels(const Args& args, const Function& function) {
  const auto with_elements = [&]<typename Norm, int kLanes>() {
    with_accumulators(args.dtype,
                      [&]<typename A>() { function.template operator()<Norm, kLanes, A>(); });
  };
  const auto with_lanes = [&]<typename Norm>() {
    if (tile_pixels(args.pixels) == kTilePixels) {
      with_elements.template operator()<Norm, kTilePixels>();
    } else {
      with_elements.template operator()<Norm, kFewPixels>();
    }
  };
  if (args.kind == NormKind::kLayerNorm) {
    with_lanes.template operator()<LayerNorm>();
  } else {
    with_lanes.template operator()<RmsNorm>();
  }
}

inline void channels_first_forward(const ChannelsFirstForwardArgs& args, std::int64_t first_tile,
                                   std::int64_t last_tile) {
  with_pixels(args, [&]<typename Norm, int kLanes, typename A>() {
    ChannelsFirstForward<Norm, kLanes, A>(args).run(first_tile, last_tile);
  });
}
inline void channels_first_backward(const ChannelsFirstBackwardArgs& args, std::int64_t first_chunk,
                                    std::int64_t last_chunk, std::int64_t chunks) {
  with_pixels(args, [&]<typename Norm, int kLanes, typename A>() {
    ChannelsFirstBackward<Norm, kLanes, A>(args).run(first_chunk, last_chunk, chunks);
  });
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
