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
// With the state of the registers, which the operating system has to save.
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

std::int64_t norm_backward_chunks(const NormBackwardArgs& args) {
  const std::int64_t rows_each = std::clamp<std::int64_t>(32768 / args.cols, 4, 32);
  return std::clamp<std::int64_t>(args.rows / rows_each, 1, 64);
}

std::size_t norm_backward_workspace(const NormBackwardArgs& args) {
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) {
    return 0;
  }
  const std::int64_t grads = args.kind == NormKind::kLayerNorm ? 2 : 1;
  const std::int64_t bytes = args.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<std::size_t>(norm_backward_chunks(args) * grads * args.cols * bytes);
}

}  // namespace fused_op::cpu
