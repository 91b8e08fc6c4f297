#include "cuda/plan.h"

#include <algorithm>
#include <bit>
#include <initializer_list>

#include "core/pack.h"
#include "cuda/core_table.h"
#include "cuda/forward_layout.h"
#include "cuda/plan_grid.h"
#include "cuda/plan_names.h"

namespace fused_op::cuda {

// A unit has 16 bytes of the row if all streams have its type. Wider streams beside a 16-bit row
// halve the packs, so that no lane moves more than 16 bytes at a time and the accesses of a warp
// stay dense. A float row beside narrower streams has units of 8 elements, because the work for a
// row should be in proportion to its bytes.
Deal deal_of(const ForwardSpec& spec) {
  if (spec.row == DType::kFloat64) {
    return {4, 2};
  }
  int widest = std::max({size_of(spec.input), size_of(spec.row), size_of(spec.output)});
  int narrowest = std::min({size_of(spec.input), size_of(spec.row), size_of(spec.output)});
  if (spec.adds) {
    widest = std::max(widest, size_of(spec.residual));
    narrowest = std::min(narrowest, size_of(spec.residual));
  }
  if (spec.variant != nullptr) {
    widest = std::max(widest, spec.variant->widest);
    for (const ConstRows* rows : read_in_packs(*spec.variant)) {
      widest = std::max(widest, size_of(rows->dtype));
      narrowest = std::min(narrowest, size_of(rows->dtype));
    }
  }
  return {kVectorBytes / narrowest, kVectorBytes / widest};
}

bool by_words(const ForwardSpec& spec, std::int64_t cols) { return cols % deal_of(spec).unit != 0; }

namespace {

// How many threads have registers for everything that a lane loads at once, if it loads several
// rows. (With 1024 threads on an SM, LayerNorm of 16 bits spills 36 bytes at 6144 columns, sm_90.)
int threads_with_entries(const ForwardSpec& spec, int elements) {
  int bytes = size_of(spec.input) + (spec.adds ? size_of(spec.residual) : 0);
  for (const ConstRows* rows : read_beside(*spec.variant)) {
    bytes += size_of(rows->dtype);
  }
  constexpr int kRegisters = 65536, kOthers = 64;  // of an SM; of a thread, for all else
  return kRegisters / (kOthers + elements * bytes / 4);
}

// Whether rows that lie one after another are copied as one span. H200, bf16, LayerNorm, share of
// copy without and with: 0.45 0.83 at 47 columns, 0.74 0.81 at 127, 0.74 0.96 at 24, 0.70 0.85 at
// 40; but 0.81 0.77 at 319, 0.88 0.78 at 56.
bool is_flat(const ForwardSpec& spec, std::int64_t cols, const ForwardGrid& grid, bool few) {
  constexpr std::int64_t kMostCols = 48, kMostOddCols = 256;
  const bool odd = by_words(spec, cols);
  const bool six_vectors = !odd && grid.lanes == 2 && grid.units == 3;  // see grid_of()
  const bool gains =
      !few && grid.warps == 1 && !six_vectors && cols <= (odd ? kMostOddCols : kMostCols);
  return (is_short(spec, cols) || gains) && spec.row != DType::kFloat64 && !spec.adds &&
         !spec.dropout && !spec.split && spec.variant == nullptr &&
         size_of(spec.output) == size_of(spec.row);
}

}  // namespace

ForwardSpec spec_of(const NormForwardArgs& args, const Variant* variant) {
  return {.norm = args.kind,
          .adds = args.sum != nullptr,
          .dropout = args.dropout.active,
          .split = variant != nullptr ? variant->split : args.input.split.inner != 0,
          .rounds_first = rounds_first(args.rounding, args.input.dtype),
          .input = args.input.dtype,
          .residual = args.residual.dtype,
          .row = variant != nullptr ? variant->row : args.dtype,
          .parameters = args.param_dtype,
          .output = args.output.dtype,
          .variant = variant};
}

bool is_core(const ForwardSpec& spec, std::int64_t cols) {
  const bool one_type = spec.input == spec.row && spec.output == spec.row &&
                        (!spec.adds || spec.residual == spec.row) &&
                        is_tuned_pair(spec.row, spec.parameters);
  const bool options = spec.dropout || spec.split || spec.variant != nullptr;
  return one_type && !options && fills_core_tile(spec, cols) &&
         core_has(spec.norm, spec.rounds_first, spec.row, spec.parameters);
}

std::int64_t most_forward_cols(const ForwardSpec& spec) {
  return std::int64_t{kMaxRowWarps} * kWarpSize * 4 * kVectorBytes / size_of(spec.row);
}

namespace {

// Makes a plan for forward_flat_kernel: a row has as few threads as can hold it. Returns false,
// without a change, if forward_kernel is faster.
bool spread_flat(ForwardPlan& plan, const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                 bool saves, const DeviceInfo& device) {
  constexpr std::int64_t kMostOfRow = 64, kMostBytes = 128;  // of a thread
  constexpr std::int64_t kRegisters = 65536, kOthers = 32;   // of an SM; of a thread, for all else
  const auto part = [&](int threads) {
    const int padded = plan.lanes / threads * plan.vectors * plan.pack;
    return (threads == 1 ? cols : padded) * size_of(spec.row);
  };
  int threads = plan.lanes;
  while (threads > 1 && part(threads / 2) <= kMostOfRow) {
    threads /= 2;
  }
  const std::int64_t bytes = part(threads);
  // Rows that fill a vector need no shared memory, and then fewer bytes of a thread suffice. (A
  // thread would store their statistics far from those of its neighbours: us without shared memory
  // and with it, 87 14 at 4194304x1, 32 28 at 4194304x4.)
  const bool fills = threads == 1 && kVectorBytes % bytes == 0 && !saves;
  const std::int64_t most_bytes = fills ? 2 * kVectorBytes : kMostBytes;
  std::int64_t turns = std::bit_floor(
      static_cast<std::uint64_t>(std::clamp<std::int64_t>(most_bytes / bytes, 1, 32)));
  const auto ctas = [&] { return ceil_div(rows, kFlatThreads / threads * turns); };
  // With fewer CTAs an SM waits. H100, bf16, LayerNorm, us of forward_kernel, of this kernel, and
  // of this one with fewer rows a thread: 7.1 4.3 3.6 at 135168x9, 10.0 11.0 8.6 at 33792x127;
  // but 3.6 4.4 4.1 at 33792x40, 5.1 6.5 6.5 at 8448x255.
  const std::int64_t many = std::int64_t{4} * device.multiprocessors;
  const std::int64_t always_below = by_words(spec, cols) ? 256 : 64;  // bytes of a row
  if (ctas() < many && cols * size_of(spec.row) > always_below) {
    return false;
  }
  while (turns > 1 && ctas() < many) {
    turns /= 2;
  }
  const int streams = size_of(spec.row) + 2 * size_of(spec.parameters);  // bytes of an element
  const std::int64_t registers = kOthers + bytes / size_of(spec.row) * streams / 4;
  plan.pack = cols == 1 ? 1 : plan.pack;  // half of a word would be computed for nothing
  plan.flat_threads = threads;
  plan.flat_rows = static_cast<int>(turns);
  const std::int64_t of_vector = kVectorBytes / bytes;
  plan.vector_rows = fills && turns % of_vector == 0 ? static_cast<int>(of_vector) : 0;
  plan.ctas_per_sm =
      static_cast<int>(std::clamp<std::int64_t>(kRegisters / kFlatThreads / registers, 1, 5));
  plan.threads = kFlatThreads;
  plan.words = false;
  plan.ctas = ctas();
  return true;
}

}  // namespace

ForwardPlan plan_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                         RowPlaces places, const DeviceInfo& device) {
  const bool aligned = places.aligned;
  const Deal deal = deal_of(spec);
  const bool odd = by_words(spec, cols);
  const ForwardGrid grid = grid_of(spec, cols);
  const int row_threads = grid.lanes * grid.warps;
  const bool few = rows * row_threads <= std::int64_t{device.multiprocessors} * 512;
  ForwardPlan plan{};
  if (aligned && is_core(spec, cols)) {
    plan = core_forward_plan(core_tile(vectors_of(spec, cols), few), spec.adds,
                             size_of(spec.parameters) > size_of(spec.row));
  } else {
    plan.lanes = grid.lanes;
    plan.vectors = odd ? grid.units : grid.units * (deal.unit / deal.pack);
    plan.few = few;
    plan.width = static_cast<int>(cols);
    const bool drops_output = spec.dropout && !spec.adds;  // its mask takes registers, too
    const bool one_ahead = grid.units < 3 || grid.units > 6 || drops_output;
    plan.ahead = few ? plan.vectors : odd ? 4 : one_ahead ? 1 : 2;
    plan.ahead = std::min(plan.ahead, plan.vectors);
  }
  plan.pack = odd ? word_pack(spec) : deal.pack;
  plan.words = odd || !aligned;
  plan.threads = row_threads > kWarpSize ? row_threads : grid.units < 3 ? 128 : 64;
  if (plan.width != 0) {
    const std::int64_t units = ceil_div(cols, odd ? word_pack(spec) : deal.unit);
    const bool full = units == std::int64_t{grid.lanes} * grid.units * grid.warps;
    int sm_threads = threads_of_sm(spec, odd, aligned, grid, full);
    if (spec.variant != nullptr && (spec.adds || read_beside(*spec.variant).size() > 1)) {
      const int elements = grid.units * (odd ? word_pack(spec) : deal.unit);
      sm_threads = std::min(sm_threads, threads_with_entries(spec, elements));
    }
    plan.most_threads = plan.threads;
    plan.ctas_per_sm = few ? 1 : std::max(sm_threads / plan.threads, 1);
  }
  if (places.one_span && !plan.core && is_flat(spec, cols, grid, few) &&
      spread_flat(plan, spec, rows, cols, places.saves, device)) {
    return plan;
  }
  const int warp_rows = kWarpSize / grid.lanes;
  plan.ctas = ceil_div(rows, grid.warps > 1 ? 1 : plan.threads / kWarpSize * warp_rows);
  return plan;
}

RowPlaces places_of(const NormForwardArgs& args, const ForwardSpec& spec) {
  const int pack = deal_of(spec).pack;
  bool aligned = packs_aligned(args.input, pack) &&
                 (!spec.adds || packs_aligned(args.residual, pack)) &&
                 packs_aligned(dense(args.output.data, spec.output, args.cols), pack) &&
                 packs_aligned(dense(args.sum, spec.row, args.cols), pack);
  if (spec.variant != nullptr) {
    for (const ConstRows* rows : read_in_packs(*spec.variant)) {
      aligned = aligned && packs_aligned(*rows, pack);
    }
  }
  const auto address = reinterpret_cast<std::uintptr_t>(args.input.data);
  return {aligned, args.input.stride == args.cols && address % kVectorBytes == 0,
          args.stats != nullptr};
}

namespace {

Variant::Types types_of(const ForwardSpec& spec) {
  if (spec.variant != nullptr) {
    return spec.variant->types();
  }
  const std::string source =
      spec.adds
          ? "fused_op::AddResidual" +
                joined({type(spec.input), type(spec.residual), type(spec.row), flag(spec.dropout)})
          : "fused_op::Plain" + joined({type(spec.input), flag(spec.split)});
  return {source, epilogue_name(
                      {type(spec.parameters), type(spec.output), flag(spec.dropout && !spec.adds)},
                      spec.rounds_first, spec.input)};
}

}  // namespace

std::string op_name(const ForwardSpec& spec, bool words) {
  const Variant::Types types = types_of(spec);
  const std::string access = words ? "fused_op::cuda::Words" : "fused_op::cuda::Vectors";
  return "fused_op::cuda::ForwardOp" +
         joined({norm_name(spec.norm), types.source, types.epilogue, access});
}

std::string tile_name(const ForwardPlan& plan) {
  return "fused_op::cuda::ForwardTile" +
         joined({number(plan.pack), number(plan.lanes), number(plan.vectors), number(plan.ahead),
                 flag(plan.few), number(plan.most_threads), number(plan.ctas_per_sm),
                 number(plan.width), flag(plan.core)});
}

// If all rows have one type, they are dealt to lanes as in each norm alone, so the sums have the
// same bits.
bool meet_in_registers(const PostAddPreForwardArgs& args) {
  const DType dtype = args.post.input.dtype;
  return args.residual.dtype == dtype && args.dtype == dtype &&
         args.cols <= most_forward_cols(spec_of(args));
}

ForwardPlan plan_post_add_pre(const PostAddPreForwardArgs& args, const ForwardSpec& pre,
                              const DeviceInfo& device) {
  RowPlaces places = places_of(args, pre);
  places.one_span = false;
  ForwardPlan plan = plan_forward(pre, args.rows, args.cols, places, device);
  constexpr int kSmThreads = 640;  // both rows are in registers; with 80 a thread, some spill
  plan.ctas_per_sm = std::min(plan.ctas_per_sm, std::max(kSmThreads / plan.most_threads, 1));
  return plan;
}

std::string post_add_pre_kernel_name(const ForwardSpec& post, const ForwardSpec& pre,
                                     const ForwardPlan& plan, bool only_sum) {
  const std::string op = only_sum ? "PostAddOp" : "PostAddPreOp";
  const std::string both = joined({op_name(post, plan.words), op_name(pre, plan.words)});
  return "fused_op::cuda::forward_kernel" +
         joined({"fused_op::cuda::" + op + both, tile_name(plan)});
}

std::string kernel_name(const ForwardSpec& spec, const ForwardPlan& plan) {
  const std::string op = op_name(spec, plan.words);
  if (plan.flat_rows > 0) {
    const std::string tile = joined(
        {number(plan.pack), number(plan.lanes), number(plan.flat_threads), number(plan.flat_rows),
         number(plan.vector_rows), number(plan.ctas_per_sm), number(plan.width)});
    return "fused_op::cuda::forward_flat_kernel<" + op + ", fused_op::cuda::FlatTile" + tile + ">";
  }
  return "fused_op::cuda::forward_kernel" + joined({op, tile_name(plan)});
}

}  // namespace fused_op::cuda
