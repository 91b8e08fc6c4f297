// Which level of the loops runs, and how backward is cut into chunks. Torch-free.
#include "cpu/fused_op_cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/level.h"

#if FUSED_OP_CPU_X86
#include <cpuid.h>
#endif

namespace fused_op::cpu {
namespace {

#if FUSED_OP_CPU_X86
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
// Also checks that the operating system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

void* thread_tiles() {
  static thread_local const std::unique_ptr<double[]> tiles(new double[kTiles * kTileSize]);
  return tiles.get();
}

const Level* find_level(const char* name) {
#if FUSED_OP_CPU_X86
  const Level* const best = has_avx512() ? &kAvx512Level
                            : has_avx2() ? &kAvx2Level
                                         : &kDefaultLevel;
  if (name == nullptr) {
    return best;
  }
  if (std::strcmp(name, "avx512") == 0 && has_avx512()) {
    return &kAvx512Level;
  }
  if (std::strcmp(name, "avx2") == 0 && has_avx2()) {
    return &kAvx2Level;
  }
#endif
  return name == nullptr || std::strcmp(name, "default") == 0 ? &kDefaultLevel : nullptr;
}

namespace {

// How many rows of an output stay in the L1 cache until they are read again.
std::int64_t rows_in_cache(std::int64_t row_bytes) {
  return std::max<std::int64_t>(1, (16 << 10) / row_bytes);
}

// Where row 0 would be, if `rows` is the address of row `row`. Nothing else is there.
void* before(char* rows, std::int64_t row, std::int64_t row_bytes) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(rows) -
                                 static_cast<std::uintptr_t>(row * row_bytes));
}

}  // namespace

void norm_quantized(const Level& level, const NormForwardArgs& args,
                    const Quantization& quantization, std::int64_t first_row,
                    std::int64_t last_row) {
  const auto quantize = [&](const void* output, std::int64_t first, std::int64_t last) {
    level.quantize(quantization, output, args.output.dtype, args.cols, first, last);
  };
  const std::int64_t row_bytes = args.cols * size_of(args.output.dtype);
  const std::int64_t rows_each = rows_in_cache(row_bytes);
  const bool keeps = args.output.data != nullptr;
  const std::unique_ptr<char[]> buffer(keeps ? nullptr : new char[rows_each * row_bytes]);
  NormForwardArgs part = args;
  for (std::int64_t row = first_row; row < last_row; row += rows_each) {
    const std::int64_t end = std::min(row + rows_each, last_row);
    char* const rows =
        keeps ? static_cast<char*>(args.output.data) + row * row_bytes : buffer.get();
    part.output.data = before(rows, row, row_bytes);
    level.forward(part, row, end);
    quantize(rows, row, end);
  }
}

void post_add_pre_forward(const Level& level, const PostAddPreForwardArgs& args,
                          std::int64_t first_row, std::int64_t last_row) {
  const std::int64_t row_bytes = args.cols * size_of(args.post.output.dtype);
  const std::int64_t rows_each = rows_in_cache(row_bytes);
  const std::unique_ptr<char[]> buffer(new char[rows_each * row_bytes]);
  const auto finish = args.output.data != nullptr ? level.forward : level.add;
  NormForwardArgs post = args.post;
  NormForwardArgs pre = args;
  for (std::int64_t row = first_row; row < last_row; row += rows_each) {
    const std::int64_t end = std::min(row + rows_each, last_row);
    post.output.data = before(buffer.get(), row, row_bytes);
    pre.input = {post.output.data, post.output.dtype, args.cols, {}};
    level.forward(post, row, end);
    finish(pre, row, end);
  }
}

std::int64_t norm_backward_chunks(const NormBackwardArgs& args) {
  const std::int64_t rows_each = std::clamp<std::int64_t>(32768 / args.cols, 4, 32);
  return std::clamp<std::int64_t>(args.rows / rows_each, 1, 64);
}

namespace {

BackwardWork work_of(const NormBackwardArgs& args, std::int64_t rows, std::int64_t cols,
                     std::int64_t chunks) {
  const bool sums = args.wants_sums();
  return {.chunks = chunks,
          .cols = sums ? cols : 0,
          .chunk_sums = sums ? grads_of(args.kind) * cols : 0,
          .chunk_elements = (rows + chunks - 1) / chunks * cols};
}

// A chunk is part of one entry, or consists of whole entries: cpu/modulated.h.
BackwardWork modulated_work(const ModulatedBackwardArgs& args) {
  const std::int64_t entries = args.rows / args.modulation.rows_each;
  const std::int64_t chunks = norm_backward_chunks(args);
  const bool of_one = chunks >= entries;
  BackwardWork work =
      work_of(args, args.rows, args.cols, of_one ? chunks / entries * entries : chunks);
  const bool sums = work.cols > 0;
  if (of_one && (sums || args.grad_scale.data != nullptr || args.grad_shift.data != nullptr ||
                 args.grad_gate.data != nullptr)) {
    work.cols = args.cols;
    work.chunk_sums = kEntrySums * args.cols;
  } else if (sums) {
    work.chunk_sums = 2 * args.cols;
  }
  return work;
}

}  // namespace

BackwardWork backward_work(const NormBackwardArgs& args, const Variant* variant) {
  if (variant != nullptr && variant->id == VariantId::kModulated) {
    return modulated_work(static_cast<const ModulatedBackwardArgs&>(args));
  }
  // The rows of the tensors contain all groups: the gradients of the groups' parameters lie side by
  // side.
  const int groups = variant != nullptr ? variant->groups : 1;
  NormBackwardArgs whole = args;
  whole.rows /= groups;
  whole.cols *= groups;
  return work_of(args, whole.rows, whole.cols, norm_backward_chunks(whole));
}

std::int64_t channels_first_tiles(std::int64_t rows, std::int64_t pixels) {
  return rows / pixels * PixelTile::tiles_of_sample(pixels, tile_pixels(pixels));
}

BackwardWork channels_first_work(const ChannelsFirstBackwardArgs& args) {
  const std::int64_t tiles = channels_first_tiles(args.rows, args.pixels);
  const std::int64_t tile_elements = tile_pixels(args.pixels) * args.cols;
  const std::int64_t tiles_each = std::max<std::int64_t>(1, 32768 / tile_elements);
  return work_of(args, args.rows, args.cols, std::clamp<std::int64_t>(tiles / tiles_each, 1, 64));
}

}  // namespace fused_op::cpu
