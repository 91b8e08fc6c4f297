// The loops for every CPU of the architecture that is built for: SSE2 on x86-64, NEON on arm64.
#include "cpu/level.h"

#define FUSED_OP_CPU_LEVEL baseline
#define FUSED_OP_CPU_F16C 0
// On x86-64 only CPUs from before 2013 run this level: not worth loops of their own for 16-bit
// rows.
#define FUSED_OP_CPU_READS_16_BITS (!FUSED_OP_CPU_X86)
#define FUSED_OP_CPU_ROWS 1
#include "cpu/loops.h"

const fused_op::cpu::Level fused_op::cpu::kDefaultLevel = baseline::level_of("default");
