// The launchers of forward: tile, grid, shared memory, launch. Included by launch_*.cu only;
// torch-free.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "cuda/fused_op_kernel.cuh"
#include "cuda/launch.cuh"

namespace fused_op::cuda {

// Whether no parameter is absent, as FullAccess has it.
template <typename Norm>
bool has_all(const NormForwardArgs& args) {
  return args.weight != nullptr && (!Norm::kCentered || args.bias != nullptr);
}

// Rows too long for registers, one a cluster or, where no cluster can hold one, a CTA.
template <typename W, typename Norm, typename Source, typename Access>
void launch_long_rows(const NormForwardArgs& args, std::int64_t vectors, const Queue& queue) {
  const std::int64_t parts = ceil_div(vectors, kPartVectors);
  constexpr std::size_t kSlot = sizeof(WarpMoments<Accumulator<typename Source::Element>>);
  if constexpr (!Source::kFlexible && !kClustersTakeTurns<Source, Access>) {
    if (const ClusterLayout layout = one_row_layout(parts, args.rows, queue.device);
        layout.ctas > 0) {
      const auto kernel = norm_forward_cluster_kernel<W, Norm, Source, Access>;
      static AttributeOnce large;
      large.set(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, queue.device);
      const LaunchShape shape{.grid = static_cast<unsigned>(args.rows * layout.ctas),
                              .block = static_cast<unsigned>(one_row_warps(layout) * kWarpSize),
                              .shared_bytes = one_row_shared_bytes(parts, layout, kSlot),
                              .cluster = static_cast<unsigned>(layout.ctas)};
      if (queue.launch_clusters(kernel, shape, args, static_cast<int>(layout.cta_parts))) {
        return;
      }
    }
  }
  queue.launch(norm_forward_streamed_kernel<W, Norm, Source, Access>,
               {.grid = static_cast<unsigned>(args.rows),
                .block = kMaxRowThreads,
                .shared_bytes = std::min<std::int64_t>(parts, kMaxParts) * kSlot},
               args);
}

// Many rows too long for the registers of a CTA, in those of clusters. H200, fp32, LayerNorm, us in
// turn (launch_pipelined) and so: 271 258 at 8192x16384.
template <typename W, typename Norm, typename Source, typename Access>
bool launch_parts(const NormForwardArgs& args, std::int64_t vectors, const Queue& queue) {
  if constexpr (kClustersTakeTurns<Source, Access> &&
                (!Norm::kCentered || sizeof(typename Source::Element) == 4)) {
    using T = typename Source::Element;
    using A = Accumulator<T>;
    const std::int64_t parts = ceil_div(vectors, kPartVectors);
    const ClusterLayout layout = in_registers_layout(parts, args.rows, queue.device);
    if (layout.ctas == 0) {
      return false;
    }
    auto kernel = norm_forward_parts_kernel<W, Norm, T, VectorAccess>;
    if constexpr (!Norm::kCentered) {  // LayerNorm would spill
      if (vectors == layout.ctas * layout.cta_parts * kPartVectors && has_all<Norm>(args)) {
        kernel = norm_forward_parts_kernel<W, Norm, T, FullAccess>;
      }
    }
    const LaunchShape shape{
        .grid = static_cast<unsigned>(args.rows * layout.ctas),
        .block = static_cast<unsigned>(layout.cta_parts / kWarpParts * kWarpSize),
        .shared_bytes = parts * sizeof(WarpMoments<A>),
        .cluster = static_cast<unsigned>(layout.ctas)};
    return queue.launch_clusters(kernel, shape, args, static_cast<int>(layout.cta_parts));
  }
  return false;
}

// norm_forward_pipelined_kernel, ready for clusters of any size on this device.
template <typename Copy, typename W, typename Norm, typename T>
auto pipelined_kernel(const DeviceInfo& device) {
  const auto kernel = norm_forward_pipelined_kernel<W, Norm, T, Copy>;
  static AttributeOnce most_shared, large;
  most_shared.set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_dynamic_shared(device),
                  device);
  large.set(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, device);
  return kernel;
}

// Rows too long for registers, in turn, where clusters can hold them. H200, bf16, share of the
// limit with a cluster a row and so, LayerNorm: 0.79 0.95 at 4096x32768, 0.76 0.99 at 2048x65536,
// 0.73 0.96 at 1024x131072, 0.65 0.85 at 512x262144; RMSNorm 0.69 0.98 there. (Shorter rows may
// lose by it: 0.94 0.98, 0.87 0.87 at 8192x16384.)
template <typename W, typename Norm, typename Source, typename Access>
bool launch_pipelined(const NormForwardArgs& args, std::int64_t vectors, const Queue& queue) {
  if constexpr (kClustersTakeTurns<Source, Access>) {
    using T = typename Source::Element;
    using A = Accumulator<T>;
    const DeviceInfo& device = queue.device;
    const std::int64_t parts = ceil_div(vectors, kPartVectors);
    const ClusterLayout layout = in_turn_layout(parts, args.rows, sizeof(WarpMoments<A>), device);
    if (layout.ctas == 0) {
      return false;
    }
    const auto shared_bytes = [&](int stages) {
      return pipelined_shared_bytes(parts, layout.cta_parts, stages, sizeof(WarpMoments<A>));
    };
    LaunchShape shape{.grid = static_cast<unsigned>(layout.ctas),
                      .block = kMaxRowThreads,
                      .shared_bytes = static_cast<std::size_t>(most_dynamic_shared(device)),
                      .cluster = static_cast<unsigned>(layout.ctas)};
    // As many clusters as the GPU runs at once, of the largest CTAs or smaller ones side by side.
    static ActiveClusters active;
    auto kernel = pipelined_kernel<CopyByThread, W, Norm, T>(device);
    const std::int64_t side_by_side = kPipelinedParts / layout.cta_parts;
    std::int64_t clusters = active.count(queue, kernel, shape) * side_by_side;
    if (clusters == 0) {
      return false;
    }
    shape.shared_bytes = shared_bytes(CopyByThread::kStages<Norm>);
    constexpr int kBulkTurns = 8;  // fewer are over too soon
    const std::size_t bulk_bytes = shared_bytes(CopyInBulk::kStages<Norm>);
    if (side_by_side == 1 && args.rows > clusters * kBulkTurns &&
        bulk_bytes <= static_cast<std::size_t>(most_dynamic_shared(device))) {
      kernel = pipelined_kernel<CopyInBulk, W, Norm, T>(device);
      shape.shared_bytes = bulk_bytes;
    }
    // The largest CTAs in two waves, of which one begins where the other ends. H200, LayerNorm,
    // bf16, us without and with it: 141 134 at 4096x32768, 261 254 at 8000x32768; but 130 136 at
    // 5461x24576, by CTAs of twelve warps, and 34 39 at 1000x32768.
    if (layout.ctas <= 2 && layout.cta_parts == kPipelinedParts && args.rows >= clusters * 32) {
      clusters = ceil_div(args.rows, ceil_div(args.rows, 2 * clusters));
    }
    shape.grid.x *= static_cast<unsigned>(std::min(clusters, args.rows));
    shape.block.x = static_cast<unsigned>(layout.cta_parts * kWarpSize);
    return queue.launch_clusters(kernel, shape, args, static_cast<int>(layout.cta_parts));
  }
  return false;
}

// Whether the warps of a row take one vector a lane, not three or four: where rows are so few that
// all of these are on the GPU at once. H200, bf16, us, with four and with one: 1.97 1.37 at
// 1x1024, 2.40 1.95 at 64x1024, 2.76 2.41 at 512x1024, 3.17 3.88 at 1024x1024; 2.27 2.02 at
// 1x4096, 3.58 3.53 at 256x4096; 2.66 2.83 at 1x8192.
template <typename Tile>
bool in_spread(const NormForwardArgs& args, std::int64_t vectors, const DeviceInfo& device) {
  const std::int64_t row_threads = row_warps<Tile>(vectors) * Tile::kVectors * kWarpSize;
  return row_threads <= kMaxSpreadThreads &&
         args.rows * row_threads <= std::int64_t{device.multiprocessors} * 512;
}

// Whether a CTA takes its rows as one span.
template <typename T>
constexpr int kFlatCols = sizeof(T) == 2 ? kVector<T> - 1 : kVector<T>;  // at most
template <typename T>
bool is_flat(const NormForwardArgs& args) {
  return args.residual.data == nullptr && args.cols <= kFlatCols<T> &&
         args.input.stride == args.cols && vector_aligned(args.input.data);
}

// Threads a multiprocessor, of all rows, up to which these are few (EagerTile). H200, bf16, us
// taken as many and as few: 2.91 1.77 at 1x8192, 3.66 2.45 at 256x4096, 4.36 3.72 at
// 512x4096, 3.44 3.35 at 2000x1024, 485 threads, but 4.34 5.14 at 4096x768, 993 threads.
constexpr std::int64_t kEagerThreads = 512;

// Whether there is such a tile.
template <typename Source, typename Access, typename Tile>
constexpr bool kHasEager =
    Tile::kLanes == kWarpSize && !Source::kFlexible && std::is_same_v<Access, VectorAccess>;

// Whether there is a kernel with FullAccess for rows that fill this tile, and whether these do.
template <typename Source, typename Access, typename Tile>
constexpr bool kHasFull = std::is_same_v<Source, Plain<typename Source::Element>> &&
                          std::is_same_v<Access, VectorAccess> &&
                          sizeof(typename Source::Element) <= 4 && Tile::kLanes > 1;
template <typename Norm, typename Tile>
bool is_full(const NormForwardArgs& args, std::int64_t vectors, int cta_rows) {
  return vectors == std::int64_t{row_warps<Tile>(vectors)} * Tile::kLanes * Tile::kVectors &&
         has_all<Norm>(args) && (!Tile::kOneWarp || args.rows % cta_rows == 0);
}

// Whether rows are no whole number of vectors, and taken by words of 4 bytes, wherever they begin.
// H200, us by shifted vectors and so, LayerNorm and RMSNorm: bf16, 169 142, 139 131 at 32776x4095;
// 165 143, 139 132 at 131200x1023; 81 50, 64 43 at 262144x130; fp32, 135 126, 130 126 at
// 263172x255. Packs of two elements, of even rows: 155 149, 129 129 at 65472x2050, bf16,
// but 1.50 1.94 at 64x2050, where they start sooner.
template <typename T>
bool is_uneven(const NormForwardArgs& args) {
  const std::int64_t bytes = args.cols * sizeof(T);
  return sizeof(T) <= 4 && args.residual.data == nullptr && bytes % kVectorBytes != 0 &&
         bytes > kMinWords * 4 && bytes <= kMaxForwardVectors * kVectorBytes;
}

template <typename T, typename Function>
auto with_flat_cols(std::int64_t cols, Function&& function) {
  if constexpr (kVector<T> > 4) {
    if (cols == 7) return function.template operator()<7>();
    if (cols == 6) return function.template operator()<6>();
    if (cols == 5) return function.template operator()<5>();
  }
  if constexpr (kVector<T> > 2) {
    if (cols == 4) return function.template operator()<4>();
    if (cols == 3) return function.template operator()<3>();
  }
  if (cols == 2) return function.template operator()<2>();
  return function.template operator()<1>();
}

// Rows that are longer than one vector, or not one span.
template <typename W, typename Norm, typename Source, typename Access>
void launch_rows(const NormForwardArgs& args, const Queue& queue) {
  const std::int64_t vectors = ceil_div(args.cols, Source::kElements);
  const auto launch_tile = [&]<typename Tile>() {
    const int row_threads = Tile::kLanes * row_warps<Tile>(vectors);
    if constexpr (Tile::kLanes == kWarpSize && !Source::kFlexible) {
      if (in_spread<Tile>(args, vectors, queue.device)) {
        queue.launch(norm_forward_kernel<W, Norm, Source, Access, SpreadTile<Tile::kVectors>>,
                     {static_cast<unsigned>(args.rows), row_threads * Tile::kVectors}, args);
        return;
      }
    }
    if constexpr (kIsShort<Source, Access, Tile>) {
      constexpr int kCtaRows = kShortThreads<Tile> / Tile::kLanes * kShortRows;
      using T = typename Source::Element;
      auto kernel = norm_forward_short_kernel<W, Norm, T, VectorAccess, Tile>;
      if constexpr (kHasFull<Source, Access, Tile>) {
        if (is_full<Norm, Tile>(args, vectors, kCtaRows)) {
          kernel = norm_forward_short_kernel<W, Norm, T, FullAccess, Tile>;
        }
      }
      queue.launch(kernel,
                   {static_cast<unsigned>(ceil_div(args.rows, kCtaRows)), kShortThreads<Tile>},
                   args);
    } else {
      // Of a CTA with several rows. (Three vectors a lane, RMSNorm, us with 128 and with 64: 127
      // 131 at 209715x640, bf16, H200.)
      constexpr int kShared =
          Tile::kOneWarp || Tile::kVectors == 4 ? kShortTileThreads / Tile::kVectors : 128;
      const int threads = row_threads <= kWarpSize ? kShared : row_threads;
      const auto grid = static_cast<unsigned>(ceil_div(args.rows, threads / row_threads));
      if constexpr (kHasEager<Source, Access, Tile>) {
        if (args.rows * row_threads <= queue.device.multiprocessors * kEagerThreads) {
          using Eager = EagerTile<RowTile<kWarpSize, Tile::kVectors>>;
          queue.launch(norm_forward_kernel<W, Norm, Source, Access, Eager>, {grid, threads}, args);
          return;
        }
      }
      if constexpr (kHasFull<Source, Access, Tile>) {
        if (is_full<Norm, Tile>(args, vectors, threads / row_threads)) {
          auto kernel = norm_forward_kernel<W, Norm, Source, FullAccess, Tile>;
          if constexpr (Norm::kCentered && std::is_same_v<Tile, RowTile<kWarpSize, 4>>) {
            if (vectors > kMaxForwardVectors * 3 / 4) {
              kernel = norm_forward_kernel<W, Norm, Source, FullAccess, LongTile>;
            }
          }
          queue.launch(kernel, {grid, threads}, args);
          return;
        }
      }
      queue.launch(norm_forward_kernel<W, Norm, Source, Access, Tile>, {grid, threads}, args);
    }
  };
  constexpr bool kShort = Source::kSplit && !Source::kFlexible;  // at most kMaxSplitBytes
  if constexpr (kShort) {
    with_short_forward_tile(vectors, launch_tile);
  } else if (vectors > (Source::kFlexible ? kMaxFlexibleVectors : kMaxForwardVectors)) {
    if (!launch_parts<W, Norm, Source, Access>(args, vectors, queue) &&
        !launch_pipelined<W, Norm, Source, Access>(args, vectors, queue)) {
      launch_long_rows<W, Norm, Source, Access>(args, vectors, queue);
    }
  } else if constexpr (Source::kFlexible) {
    with_flexible_tile(vectors, launch_tile);
  } else {
    using Bounds = ForwardBounds<W, Source, Access, RowTile<kWarpSize, 4>>;
    with_forward_tile<Bounds, Norm>(vectors, launch_tile);
  }
}

// Rows by words.
template <typename W, typename Norm, typename T>
void launch_words(const NormForwardArgs& args, const Queue& queue) {
  const std::int64_t words = ceil_div(args.cols * sizeof(T), 4);
  const std::int64_t parts = word_parts(words);
  with_word_tile<T>(words, [&]<typename Tile>() {
    const int row_threads = Tile::kLanes * static_cast<int>(parts);
    const int threads = row_threads <= kWarpSize ? kWordThreads<Tile> : row_threads;
    const auto launch = [&](auto kernel) {
      queue.launch(kernel,
                   {static_cast<unsigned>(ceil_div(args.rows, threads / row_threads)), threads},
                   args, static_cast<int>(words / parts), static_cast<int>(words % parts));
    };
    const bool few = args.rows * row_threads <= queue.device.multiprocessors * kEagerThreads;
    if (few || !has_all<Norm>(args)) {  // EagerTile has defaults for what is absent
      launch(norm_forward_words_kernel<W, Norm, T, EagerTile<Tile>>);
    } else {
      launch(norm_forward_words_kernel<W, Norm, T, Tile>);
    }
  });
}

template <typename T, typename W>
cudaError_t launch_forward(const NormForwardArgs& args, cudaStream_t stream) {
  const Queue queue{device_info(), stream};
  with_norm(args.kind, [&]<typename Norm>() {
    if constexpr (kIsFlexible<W>) {
      launch_rows<W, Norm, Flexible<T>, AnyAccess>(args, queue);
    } else if (args.input.split.inner != 0) {
      launch_rows<W, Norm, SplitRows<T>, VectorAccess>(args, queue);
    } else if (is_flat<T>(args)) {
      with_flat_cols<T>(args.cols, [&]<int kCols>() {
        const std::int64_t ctas = ceil_div(args.rows, FlatTile<T, kCols>::kCtaRows);
        queue.launch(norm_forward_flat_kernel<W, Norm, T, kCols>,
                     {static_cast<unsigned>(ctas), kFlatThreads}, args);
      });
    } else if (is_uneven<T>(args)) {
      if constexpr (sizeof(T) <= 4) {
        launch_words<W, Norm, T>(args, queue);
      }
    } else {
      with_source<T>(args.residual, [&]<typename Source>() {
        with_access<T>(
            args.cols, {args.input, args.residual, dense(args.output.data), dense(args.sum)},
            [&]<typename Access>() { launch_rows<W, Norm, Source, Access>(args, queue); });
      });
    }
  });
  return cudaGetLastError();
}

}  // namespace fused_op::cuda
