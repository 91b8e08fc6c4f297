// How words move between memory and registers: instructions that CUDA C++ has no name for, or that
// the compiler would take apart. Torch-free.
#pragma once

#include <type_traits>

#include "core/pack.h"

namespace fused_op::cuda {

// An address in shared memory, opaque to the compiler, so that it stays in its register. Otherwise
// the compiler would compute it again for each copy, in five instructions.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return address;
}
// A global address, also opaque: computed once for several vectors at constant distances. (Stores
// go there by store_if, because the compiler no longer knows that the memory is global.) H200, us
// without and with it, in kernels of long rows: LayerNorm forward 140 136 at 2048x65536, bf16;
// backward 233 225; RMSNorm backward 217 209 at 1024x131072.
__device__ __forceinline__ std::uintptr_t global_address(const void* pointer) {
  auto address = reinterpret_cast<std::uintptr_t>(pointer);
  asm volatile("" : "+l"(address));
  return address;
}
// What the L2 cache fetches from global memory: the requested words, or the whole line of 128 bytes
// that contains them.
struct FetchWords {};
struct FetchLine {};

// The L2 policy for the rows that forward reads: evict them last. No row is read again. The hint
// helps because L2 then evicts the dirty lines of y earlier. H200, us with evict_normal and with
// it: LayerNorm, bf16, 129.1 125.0 at 32768x4096, 9.9 9.7 at 2048x4096; RMSNorm, bf16, 129.2 125.0
// at 16384x8192. A kernel that reads y next does not pay for it: with a copy of y, 257.8 254.5 and
// 18.9 18.7. Backward, which reads two rows for one, was up to 1 % slower. Not for cp.async, of
// which ptxas 13.0 makes illegal instructions in some kernels (desc[UR1], an odd register). Bulk
// copies have the policy (forward_in_turn.cuh).
__device__ __forceinline__ std::uint64_t evict_last() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The alignment of rows staged in shared memory. us of backward at odd multiples of 16 bytes and at
// multiples of 128: 125 104 at 5957x11264, 129 107 at 5041x13312 (H200, bf16, LayerNorm).
constexpr int kStagedAlignment = 128;

// Copies 16 bytes past the L1 cache, asynchronously: see end_copy_group(). Before sm_80, the thread
// itself copies.
template <typename Fetch = FetchWords>
__device__ __forceinline__ void copy_async(std::uint32_t to, std::uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Fetch, FetchLine>) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
#else
  *static_cast<uint4*>(__cvta_shared_to_generic(to)) = *reinterpret_cast<const uint4*>(from);
#endif
}

// The same for 4 or 8 bytes, which pass through the L1 cache.
template <int kBytes>
__device__ __forceinline__ void copy_bytes_async(std::uint32_t to, std::uintptr_t from) {
  static_assert(kBytes == 4 || kBytes == 8);
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
               : "memory");
#else
  using Bytes = std::conditional_t<kBytes == 4, std::uint32_t, uint2>;
  *static_cast<Bytes*>(__cvta_shared_to_generic(to)) = *reinterpret_cast<const Bytes*>(from);
#endif
}
// The same for `bytes`, an even number below 16.
__device__ __forceinline__ void copy_some(std::uint32_t to, std::uintptr_t from, int bytes) {
  auto* const target = static_cast<std::uint16_t*>(__cvta_shared_to_generic(to));
#pragma unroll 1
  for (int k = 0; k < bytes / 2; ++k) {
    target[k] = reinterpret_cast<const std::uint16_t*>(from)[k];
  }
}
// The copies since the last call form a group. After await_copies, all groups of this thread but
// the last kLeft have arrived.
__device__ __forceinline__ void end_copy_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLeft>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Reads bytes of shared memory as words; 2 bytes become the lower half of one.
template <int kBytes>
__device__ __forceinline__ void load_shared_bytes(std::uint32_t address, std::uint32_t* words) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else {
    asm volatile(
        "{\n"
        "  .reg .b16 half;\n"
        "  ld.shared.b16 half, [%1];\n"
        "  cvt.u32.u16 %0, half;\n"
        "}"
        : "=r"(words[0])
        : "r"(address)
        : "memory");
  }
}

__device__ __forceinline__ void store_shared(std::uint32_t address, const std::uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Loads words of global memory, 16 bytes or fewer, if `wanted`; otherwise `words` stay as they are.
// This is one predicated instruction. If loads were in branches of their own, each would be waited
// for before the next one is issued.
template <int kWords = 4>
__device__ __forceinline__ void load_if(bool wanted, const void* address, std::uint32_t* words) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %2, 0;\n"
        "  @wanted ld.global.b32 %0, [%1];\n"
        "}"
        : "+r"(words[0])
        : "l"(address), "r"(static_cast<int>(wanted))
        : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %3, 0;\n"
        "  @wanted ld.global.v2.b32 {%0, %1}, [%2];\n"
        "}"
        : "+r"(words[0]), "+r"(words[1])
        : "l"(address), "r"(static_cast<int>(wanted))
        : "memory");
  } else {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %5, 0;\n"
        "  @wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(address), "r"(static_cast<int>(wanted))
        : "memory");
  }
}

// The same for 16 bytes. The L2 cache fetches the whole line of 128 bytes that contains them.
__device__ __forceinline__ void load_line_if(bool wanted, const void* address,
                                             std::uint32_t* words) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.b32 wanted, %5, 0;\n"
      "  @wanted ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
}

// Loads the 2 bytes at `address` as a word, if `wanted`.
__device__ __forceinline__ void load_half_if(bool wanted, const void* address,
                                             std::uint32_t* word) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.b32 wanted, %2, 0;\n"
      "  @wanted ld.global.u16 %0, [%1];\n"
      "}"
      : "+r"(*word)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
}

// load_if with the policy of evict_last().
template <int kWords = 4>
__device__ __forceinline__ void load_kept_if(bool wanted, const void* address,
                                             std::uint32_t* words) {
#if __CUDA_ARCH__ >= 800
  static_assert(kWords == 1 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %2, 0;\n"
        "  @wanted ld.global.L2::cache_hint.b32 %0, [%1], %3;\n"
        "}"
        : "+r"(words[0])
        : "l"(address), "r"(static_cast<int>(wanted)), "l"(evict_last())
        : "memory");
  } else {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %5, 0;\n"
        "  @wanted ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(address), "r"(static_cast<int>(wanted)), "l"(evict_last())
        : "memory");
  }
#else
  load_if<kWords>(wanted, address, words);
#endif
}

// Stores words, 16 bytes or fewer, to global memory if `wanted`, in one predicated instruction. A
// branch takes four, and in a loop over rows the compiler may take a vector apart.
template <int kWords = 4>
__device__ __forceinline__ void store_if(bool wanted, void* address, const std::uint32_t* words) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %0, 0;\n"
        "  @wanted st.global.b32 [%1], %2;\n"
        "}" ::"r"(static_cast<int>(wanted)),
        "l"(address), "r"(words[0])
        : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %0, 0;\n"
        "  @wanted st.global.v2.b32 [%1], {%2, %3};\n"
        "}" ::"r"(static_cast<int>(wanted)),
        "l"(address), "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    asm volatile(
        "{\n"
        "  .reg .pred wanted;\n"
        "  setp.ne.b32 wanted, %5, 0;\n"
        "  @wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "}"
        :
        : "l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
          "r"(static_cast<int>(wanted))
        : "memory");
  }
}

}  // namespace fused_op::cuda
