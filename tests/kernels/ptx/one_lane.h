// What instructions compute in one lane: arithmetic, comparisons and bits. Results of approximate
// instructions are correctly rounded, so errors that a GPU may make do not show here. Compiled with
// -ffp-contract=off and -fwrapv.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "numbers.h"

namespace ptx {

struct Same {
  auto operator()(auto a) const { return a; }
};
struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};
struct Sub {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a - b);
  }
};
struct Mul {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a * b);
  }
};
// PTX leaves integer division by zero undefined; sm_90 returns all ones.
struct Div {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return a / b;
    } else if (b == 0) {
      return static_cast<T>(-1);
    } else {
      return b == static_cast<T>(-1) ? static_cast<T>(a * b) : static_cast<T>(a / b);
    }
  }
};
struct Rem {
  template <typename T>
  T operator()(T a, T b) const {
    return b == 0                                           ? a
           : b == static_cast<T>(-1) && std::is_signed_v<T> ? T{0}
                                                            : static_cast<T>(a % b);
  }
};
template <typename Wide>
struct MulHigh {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
  }
};
template <typename Wide>
struct MulWide {
  Wide operator()(auto a, auto b) const { return static_cast<Wide>(a) * static_cast<Wide>(b); }
};
template <typename Wide>
struct MadWide {
  Wide operator()(auto a, auto b, Wide c) const {
    return static_cast<Wide>(static_cast<Wide>(a) * static_cast<Wide>(b) + c);
  }
};
struct Mad {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return static_cast<T>(a * b + c);
  }
};
struct Fma {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
// Rounds towards minus infinity: to the nearest float, or to the one below it. (The product is
// exact in f64, and so is the rounding error of the sum.)
struct FmaDown {
  f32 operator()(f32 a, f32 b, f32 c) const {
    const f64 product = static_cast<f64>(a) * b;
    const f64 sum = product + c;
    const f64 of_c = sum - product;
    const f64 rest = (product - (sum - of_c)) + (c - of_c);
    const f32 near = static_cast<f32>(sum);
    const bool above = near > sum || (near == sum && rest < 0);
    return above ? std::nextafterf(near, -std::numeric_limits<f32>::infinity()) : near;
  }
};
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fmin(a, b);
    } else {
      return a < b ? a : b;
    }
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fmax(a, b);
    } else {
      return a > b ? a : b;
    }
  }
};
struct Neg {
  template <typename T>
  T operator()(T a) const {
    return static_cast<T>(-a);
  }
};
struct Abs {
  template <typename T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fabs(a);
    } else {
      return static_cast<T>(a < 0 ? -a : a);
    }
  }
};
struct Not {
  template <typename T>
  T operator()(T a) const {
    if constexpr (std::is_same_v<T, bool>) {
      return !a;
    } else {
      return static_cast<T>(~a);
    }
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};
struct Shl {
  template <typename T>
  T operator()(T a, u32 by) const {
    return by < 8 * sizeof(T) ? static_cast<T>(a << by) : T{0};
  }
};
struct Shr {
  template <typename T>
  T operator()(T a, u32 by) const {
    if (by >= 8 * sizeof(T)) {
      return a < T{0} ? static_cast<T>(-1) : T{0};
    }
    return static_cast<T>(a >> by);
  }
};
template <bool kLeft, bool kWrap>
struct Funnel {
  u32 operator()(u32 low, u32 high, u32 by) const {
    by = kWrap ? by & 31 : by < 32 ? by : 32;
    const u64 both = u64{high} << 32 | low;
    return static_cast<u32>(kLeft ? both << by >> 32 : both >> by);
  }
};
struct Permute {
  u32 operator()(u32 a, u32 b, u32 selector) const {
    const u64 both = u64{b} << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 pick = selector >> (4 * i) & 0xf;
      auto byte = static_cast<u32>(both >> (8 * (pick & 7)) & 0xff);
      if ((pick & 8) != 0) {
        byte = (byte & 0x80) != 0 ? 0xff : 0;  // copies of the sign
      }
      made |= byte << (8 * i);
    }
    return made;
  }
};
struct Reverse {
  u32 operator()(u32 a) const {
    u32 made = 0;
    for (int i = 0; i < 32; ++i) {
      made |= (a >> i & 1) << (31 - i);
    }
    return made;
  }
};
struct LeadingZeros {
  u32 operator()(auto a) const { return static_cast<u32>(std::countl_zero(a)); }
};
struct CountOnes {
  u32 operator()(auto a) const { return static_cast<u32>(std::popcount(a)); }
};
struct FindTop {  // the number of the top bit; all ones for 0
  u32 operator()(u32 a) const {
    return a == 0 ? ~u32{0} : 31 - static_cast<u32>(std::countl_zero(a));
  }
};
struct FindTopShift {  // how far the top bit is from bit 31
  u32 operator()(u32 a) const { return a == 0 ? ~u32{0} : static_cast<u32>(std::countl_zero(a)); }
};
template <typename Word>
struct InsertBits {
  Word operator()(Word a, Word b, u32 at, u32 count) const {
    constexpr u32 kBits = 8 * sizeof(Word);
    at &= 0xff;
    count &= 0xff;
    const Word ones = count >= kBits ? ~Word{0} : (Word{1} << count) - 1;
    const Word mask = at < kBits ? ones << at : 0;
    return (b & ~mask) | (at < kBits ? a << at & mask : 0);
  }
};
struct LookUp {  // lop3
  u32 operator()(u32 a, u32 b, u32 c, u32 table) const {
    u32 made = 0;
    for (u32 i = 0; i < 8; ++i) {
      const u32 here = ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
      made |= (table >> i & 1) != 0 ? here : 0;
    }
    return made;
  }
};
struct Select {
  template <typename T>
  T operator()(T a, T b, bool chosen) const {
    return chosen ? a : b;
  }
};
struct Reciprocal {
  template <typename T>
  T operator()(T a) const {
    return T{1} / a;
  }
};
inline f32 flushed(f32 a) {
  return std::fabs(a) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, a) : a;
}
template <typename F>
struct Flush {
  f32 operator()(f32 a) const { return flushed(F{}(flushed(a))); }
};
struct Root {
  template <typename T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct ReciprocalRoot {
  f32 operator()(f32 a) const { return static_cast<f32>(1 / std::sqrt(static_cast<f64>(a))); }
  f64 operator()(f64 a) const {
    return static_cast<f64>(1 / std::sqrt(static_cast<long double>(a)));
  }
};
struct PowerOfTwo {
  f32 operator()(f32 a) const { return static_cast<f32>(std::exp2(static_cast<f64>(a))); }
};
struct LogOfTwo {
  f32 operator()(f32 a) const { return static_cast<f32>(std::log2(static_cast<f64>(a))); }
};
struct Tanh {
  f32 operator()(f32 a) const { return static_cast<f32>(std::tanh(static_cast<f64>(a))); }
};
struct CopySign {  // of a to b
  template <typename T>
  T operator()(T a, T b) const {
    return std::copysign(b, a);
  }
};

template <typename F, bool kOrUnordered>
struct Compare {
  template <typename T>
  bool operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return F{}(a, b) || (kOrUnordered && (std::isnan(a) || std::isnan(b)));
    } else {
      return F{}(a, b);
    }
  }
};
struct OrderedNotEqual {
  bool operator()(auto a, auto b) const {
    if constexpr (std::is_floating_point_v<decltype(a)>) {
      return a < b || a > b;
    } else {
      return a != b;
    }
  }
};
template <bool kIsNumber>
struct Ordered {
  bool operator()(auto a, auto b) const { return (!std::isnan(a) && !std::isnan(b)) == kIsNumber; }
};

// Takes the maxima of both halves of a word.
struct MaxOfHalves {
  u32 operator()(u32 a, u32 b) const {
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
  }
};

}  // namespace ptx
