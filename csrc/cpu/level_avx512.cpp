// The loops for CPUs with AVX-512 (F, BW, CD, DQ and VL).
#include "cpu/level.h"

#if FUSED_OP_CPU_X86
#define FUSED_OP_CPU_LEVEL avx512
#define FUSED_OP_CPU_F16C 16
#define FUSED_OP_CPU_READS_16_BITS 1
#define FUSED_OP_CPU_ROWS 2
#ifdef __clang__
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,f16c,bmi,bmi2"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,f16c,bmi,bmi2")
#endif
#include "cpu/loops.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const fused_op::cpu::Level fused_op::cpu::kAvx512Level = avx512::level_of("avx512");
#endif
