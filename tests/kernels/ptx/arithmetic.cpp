// Arithmetic, comparisons and bits. Results of approximate instructions are correctly rounded, so
// errors that a GPU may make do not show here. Compiled with -ffp-contract=off and -fwrapv.
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "lanes.h"

namespace ptx {
namespace {

using u16 = std::uint16_t;
using s16 = std::int16_t;
using u32 = std::uint32_t;
using s32 = std::int32_t;
using u64 = std::uint64_t;
using s64 = std::int64_t;
using f32 = float;
using f64 = double;

// --- One lane ------------------------------------------------------------------------------------

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
struct InsertBits {
  u32 operator()(u32 a, u32 b, u32 at, u32 count) const {
    at &= 0xff;
    count &= 0xff;
    const u64 mask = (count >= 32 ? u64{0xffffffff} : (u64{1} << count) - 1) << (at < 32 ? at : 32);
    return static_cast<u32>((b & ~mask) | (u64{a} << (at < 32 ? at : 32) & mask));
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

// --- Tables --------------------------------------------------------------------------------------

template <typename F, typename... Ts>
void add_comparison(PlainTable& table, const std::string& name) {
  const auto one = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table["setp." + name + "." + type] = Lanewise<F, bool, T, T>::plain();
    }
  };
  (one(Ts{}), ...);
}
template <typename F>
void add_order(PlainTable& table, const std::string& name) {
  add_comparison<Compare<F, false>, u16, s16, u32, s32, u64, s64, f32, f64>(table, name);
  add_comparison<Compare<F, true>, f32, f64>(table, name + "u");
}

template <typename F, typename... Ts>
void add_shift(PlainTable& table, const std::string& name) {
  const auto one = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table[name + "." + type] = Lanewise<F, T, T, u32>::plain();
    }
  };
  (one(Ts{}), ...);
}

// Takes the maxima of both halves of a word.
struct MaxOfHalves {
  u32 operator()(u32 a, u32 b) const {
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
  }
};

void add_integers(PlainTable& table) {
  table["max.u16x2"] = Lanewise<MaxOfHalves, u32, u32, u32>::plain();
  add_binary<Add, u16, s16, u32, s32, u64, s64>(table, "add");
  add_binary<Sub, u16, s16, u32, s32, u64, s64>(table, "sub");
  add_binary<Mul, u16, s16, u32, s32, u64, s64>(table, "mul.lo");
  add_binary<MulHigh<u64>, u32>(table, "mul.hi");
  add_binary<MulHigh<s64>, s32>(table, "mul.hi");
  add_binary<MulHigh<unsigned __int128>, u64>(table, "mul.hi");
  add_binary<MulHigh<__int128>, s64>(table, "mul.hi");
  add_ternary<Mad, u32, s32, u64, s64>(table, "mad.lo");
  table["mul.wide.u16"] = Lanewise<MulWide<u32>, u32, u16, u16>::plain();
  table["mul.wide.s16"] = Lanewise<MulWide<s32>, s32, s16, s16>::plain();
  table["mul.wide.u32"] = Lanewise<MulWide<u64>, u64, u32, u32>::plain();
  table["mul.wide.s32"] = Lanewise<MulWide<s64>, s64, s32, s32>::plain();
  table["mad.wide.u32"] = Lanewise<MadWide<u64>, u64, u32, u32, u64>::plain();
  table["mad.wide.s32"] = Lanewise<MadWide<s64>, s64, s32, s32, s64>::plain();
  add_binary<Div, u16, s16, u32, s32, u64, s64>(table, "div");
  add_binary<Rem, u16, s16, u32, s32, u64, s64>(table, "rem");
  add_binary<Min, u16, s16, u32, s32, u64, s64>(table, "min");
  add_binary<Max, u16, s16, u32, s32, u64, s64>(table, "max");
  add_unary<Neg, s16, s32, s64>(table, "neg");
  add_unary<Abs, s16, s32, s64>(table, "abs");
}

void add_bits(PlainTable& table) {
  add_unary<Not, u16, u32, u64, bool>(table, "not");
  add_binary<And, u16, u32, u64, bool>(table, "and");
  add_binary<Or, u16, u32, u64, bool>(table, "or");
  add_binary<Xor, u16, u32, u64, bool>(table, "xor");
  add_shift<Shl, u16, u32, u64>(table, "shl");
  add_shift<Shr, u16, s16, u32, s32, u64, s64>(table, "shr");
  table["shf.l.wrap.b32"] = Lanewise<Funnel<true, true>, u32, u32, u32, u32>::plain();
  table["shf.l.clamp.b32"] = Lanewise<Funnel<true, false>, u32, u32, u32, u32>::plain();
  table["shf.r.wrap.b32"] = Lanewise<Funnel<false, true>, u32, u32, u32, u32>::plain();
  table["shf.r.clamp.b32"] = Lanewise<Funnel<false, false>, u32, u32, u32, u32>::plain();
  table["prmt.b32"] = Lanewise<Permute, u32, u32, u32, u32>::plain();
  table["brev.b32"] = Lanewise<Reverse, u32, u32>::plain();
  table["clz.b32"] = Lanewise<LeadingZeros, u32, u32>::plain();
  table["clz.b64"] = Lanewise<LeadingZeros, u32, u64>::plain();
  table["popc.b32"] = Lanewise<CountOnes, u32, u32>::plain();
  table["popc.b64"] = Lanewise<CountOnes, u32, u64>::plain();
  table["bfind.u32"] = Lanewise<FindTop, u32, u32>::plain();
  table["bfind.shiftamt.u32"] = Lanewise<FindTopShift, u32, u32>::plain();
  table["bfi.b32"] = Lanewise<InsertBits, u32, u32, u32, u32, u32>::plain();
  table["lop3.b32"] = Lanewise<LookUp, u32, u32, u32, u32, u32>::plain();
}

void add_floats(PlainTable& table) {
  for (const char* const rounding : {"", ".rn"}) {
    add_binary<Add, f32, f64>(table, std::string("add") + rounding);
    add_binary<Sub, f32, f64>(table, std::string("sub") + rounding);
    add_binary<Mul, f32, f64>(table, std::string("mul") + rounding);
  }
  add_ternary<Fma, f32, f64>(table, "fma.rn");
  add_ternary<FmaDown, f32>(table, "fma.rm");
  add_binary<Div, f32, f64>(table, "div.rn");
  add_binary<Min, f32, f64>(table, "min");
  add_binary<Max, f32, f64>(table, "max");
  add_unary<Neg, f32, f64>(table, "neg");
  add_unary<Abs, f32, f64>(table, "abs");
  add_binary<CopySign, f32, f64>(table, "copysign");
  add_unary<Root, f32, f64>(table, "sqrt.rn");
  add_unary<Reciprocal, f32, f64>(table, "rcp.rn");
  add_unary<ReciprocalRoot, f32, f64>(table, "rsqrt.approx");
  add_unary<PowerOfTwo, f32>(table, "ex2.approx");
  add_unary<LogOfTwo, f32>(table, "lg2.approx");
  add_unary<Tanh, f32>(table, "tanh.approx");
  add_binary<Div, f32>(table, "div.full");
  add_unary<Reciprocal, f32>(table, "rcp.approx");
  add_unary<Flush<Reciprocal>, f32>(table, "rcp.approx.ftz");
  add_unary<Flush<ReciprocalRoot>, f32>(table, "rsqrt.approx.ftz");
  add_unary<Flush<PowerOfTwo>, f32>(table, "ex2.approx.ftz");
}

}  // namespace

void add_arithmetic(PlainTable& table) {
  add_integers(table);
  add_bits(table);
  add_floats(table);
  add_unary<Same, u16, s16, u32, s32, u64, s64, f32, f64, bool>(table, "mov");
  add_order<std::equal_to<>>(table, "eq");
  add_order<OrderedNotEqual>(table, "ne");
  add_order<std::less<>>(table, "lt");
  add_order<std::less_equal<>>(table, "le");
  add_order<std::greater<>>(table, "gt");
  add_order<std::greater_equal<>>(table, "ge");
  for (const auto& [name, same] :
       {std::pair{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}}) {
    for (const char* const type : {".u16", ".u32", ".u64"}) {
      table[std::string("setp.") + name + type] = table[std::string("setp.") + same + type];
    }
  }
  add_comparison<Ordered<true>, f32, f64>(table, "num");
  add_comparison<Ordered<false>, f32, f64>(table, "nan");
  const auto select = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table[std::string("selp.") + type] = Lanewise<Select, T, T, T, bool>::plain();
    }
  };
  select(u16{}), select(s16{}), select(u32{}), select(s32{}), select(u64{}), select(s64{});
  select(f32{}), select(f64{});
}

std::optional<Plain> find_plain(std::string_view opcode) {
  static const PlainTable table = [] {
    PlainTable made;
    add_arithmetic(made);
    add_conversions(made);
    return made;
  }();
  const auto found = table.find(std::string(opcode));
  return found == table.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace ptx
