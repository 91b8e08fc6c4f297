// The loops for CPUs with AVX2.
#include "cpu/level.h"

#if FUSED_OP_CPU_X86
#define FUSED_OP_CPU_LEVEL avx2
#define FUSED_OP_CPU_F16C 8
#define FUSED_OP_CPU_READS_16_BITS 1
#define FUSED_OP_CPU_ROWS 1
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2")
#endif
#include "cpu/loops.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const fused_op::cpu::Level fused_op::cpu::kAvx2Level = avx2::level_of("avx2");
#endif
