// Conversions, and registers that are taken apart or put together.
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "lanes.h"
#include "numbers.h"

namespace ptx {
namespace {

// --- Floats of 16 and 8 bits ---------------------------------------------------------------------

// Rounds to a format with so many bits of mantissa, ties to even. `smallest_exponent` is that of
// its smallest normal number. The result is a float that the format has exactly, unless it is too
// large for it.
f32 rounded(f32 value, int mantissa, int smallest_exponent) {
  if (value == 0 || !std::isfinite(value)) {
    return value;
  }
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const f64 step = std::ldexp(1.0, exponent - mantissa);
  return static_cast<f32>(std::nearbyint(static_cast<f64>(value) / step) * step);
}

u16 to_bf16(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  if (std::isnan(value)) {
    return 0x7fff;
  }
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
f32 from_bf16(u16 bits) { return std::bit_cast<f32>(u32{bits} << 16); }

// The bits of a value that the format has: mantissa and exponent, with subnormals.
u32 encoded(f32 value, int mantissa, int bias) {
  const u32 sign = std::signbit(value) ? 1 : 0;
  const int width = mantissa == 10 ? 15 : 7;
  const f32 magnitude = std::fabs(value);
  if (magnitude == 0) {
    return sign << width;
  }
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const auto units = static_cast<u32>(std::ldexp(magnitude, mantissa - exponent));
  const auto field = static_cast<u32>(exponent + bias - 1) << mantissa;
  return sign << width | (field + units);
}

u16 to_f16(f32 value) {
  if (std::isnan(value)) {
    return 0x7fff;
  }
  const f32 near = rounded(value, 10, -14);
  if (std::fabs(near) > 65504) {
    return std::signbit(value) ? 0xfc00 : 0x7c00;
  }
  return static_cast<u16>(encoded(near, 10, 15));
}
f32 from_f16(u16 bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  f32 value = exponent == 0    ? std::ldexp(static_cast<f32>(mantissa), -24)
              : exponent == 31 ? (mantissa == 0 ? std::numeric_limits<f32>::infinity()
                                                : std::numeric_limits<f32>::quiet_NaN())
                               : std::ldexp(static_cast<f32>(1024 + mantissa), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

// To e4m3 and e5m2, which saturate.
template <int kMantissa, int kBias, int kLargest>
u8 to_f8(f32 value) {
  if (std::isnan(value)) {
    return 0x7f;
  }
  const f32 near = rounded(value, kMantissa, 1 - kBias);
  const f32 most = static_cast<f32>(kLargest);
  return static_cast<u8>(
      encoded(std::fabs(near) > most ? std::copysign(most, near) : near, kMantissa, kBias));
}

struct Saturated {
  f32 operator()(f32 a) const { return a > 0 ? std::fmin(a, 1.0f) : 0.0f; }  // NaN becomes 0
};
struct ToF16 {
  u16 operator()(f32 a) const { return to_f16(a); }
};
struct ToBf16 {
  u16 operator()(f32 a) const { return to_bf16(a); }
};
struct FromF16 {
  f32 operator()(u16 a) const { return from_f16(a); }
};
struct FromBf16 {
  f32 operator()(u16 a) const { return from_bf16(a); }
};
struct ToF16Pair {
  u32 operator()(f32 high, f32 low) const { return u32{to_f16(high)} << 16 | to_f16(low); }
};
struct ToBf16Pair {
  u32 operator()(f32 high, f32 low) const { return u32{to_bf16(high)} << 16 | to_bf16(low); }
};
// Rounds a float, which makes no difference if c is -0 or one of a and b is ±1: see core/packed.h.
template <typename From, typename To>
struct PairFma {
  u32 operator()(u32 a, u32 b, u32 c) const {
    const auto of = [&](int shift) {
      const auto half = [&](u32 word) { return From{}(static_cast<u16>(word >> shift)); };
      return u32{To{}(std::fma(half(a), half(b), half(c)))} << shift;
    };
    return of(0) | of(16);
  }
};
template <int kMantissa, int kBias, int kLargest>
struct ToF8Pair {
  u16 operator()(f32 high, f32 low) const {
    const auto upper = to_f8<kMantissa, kBias, kLargest>(high);
    return static_cast<u16>(upper << 8 | to_f8<kMantissa, kBias, kLargest>(low));
  }
};

// --- Numbers -------------------------------------------------------------------------------------

template <typename D>
struct To {
  D operator()(auto a) const { return static_cast<D>(a); }
};
// To an integer, towards zero or to the nearest. Values out of range become the nearest one in it,
// and NaN becomes zero.
template <typename D, bool kNearest>
struct ToInteger {
  D operator()(auto a) const {
    if (std::isnan(a)) {
      return 0;
    }
    const auto whole = static_cast<long double>(kNearest ? std::nearbyint(a) : std::trunc(a));
    constexpr long double least = std::numeric_limits<D>::min();
    constexpr long double most = std::numeric_limits<D>::max();
    return static_cast<D>(whole < least ? least : whole > most ? most : whole);
  }
};
// Converts the lower part of a register.
template <typename D, typename S>
struct FromPart {
  D operator()(auto a) const { return static_cast<D>(static_cast<S>(a)); }
};

// The width of the source register is part of the name, because it may exceed that of the type.
template <typename D, typename S>
void add_integer(PlainTable& table, const std::string& from) {
  const std::string name = std::string("cvt.") + *names_of<D>().begin() + "." + from;
  table[name + "/16"] = Lanewise<FromPart<D, S>, D, u16>::plain();
  table[name + "/32"] = Lanewise<FromPart<D, S>, D, u32>::plain();
  table[name + "/64"] = Lanewise<FromPart<D, S>, D, u64>::plain();
}
template <typename D>
void add_integers_to(PlainTable& table) {
  add_integer<D, u8>(table, "u8");
  add_integer<D, std::int8_t>(table, "s8");
  add_integer<D, u16>(table, "u16");
  add_integer<D, s16>(table, "s16");
  add_integer<D, u32>(table, "u32");
  add_integer<D, s32>(table, "s32");
  add_integer<D, u64>(table, "u64");
  add_integer<D, s64>(table, "s64");
  for (const std::string float_type : {"f32", "f64"}) {
    const bool wide = float_type == "f64";
    table["cvt.rzi." + std::string(*names_of<D>().begin()) + "." + float_type] =
        wide ? Lanewise<ToInteger<D, false>, D, f64>::plain()
             : Lanewise<ToInteger<D, false>, D, f32>::plain();
    table["cvt.rni." + std::string(*names_of<D>().begin()) + "." + float_type] =
        wide ? Lanewise<ToInteger<D, true>, D, f64>::plain()
             : Lanewise<ToInteger<D, true>, D, f32>::plain();
    const std::string back = "cvt.rn." + float_type + "." + *names_of<D>().begin();
    table[back] = wide ? Lanewise<To<f64>, f64, D>::plain() : Lanewise<To<f32>, f32, D>::plain();
  }
}

// --- Vectors and the register that holds all of one ----------------------------------------------

template <typename Whole, typename Part>
void pack(Warp& warp, const Instruction& in, std::uint32_t mask) {
  constexpr int kParts = sizeof(Whole) / sizeof(Part);
  Whole* const to = warp.lanes<Whole>(in.to[0]);
  each_lane(mask, [&](int lane) {
    Whole made = 0;
    for (int i = 0; i < kParts; ++i) {
      const Whole part = warp.lanes<Part>(in.from[static_cast<std::size_t>(i)])[lane];
      made = static_cast<Whole>(made | part << (8 * sizeof(Part) * static_cast<unsigned>(i)));
    }
    to[lane] = made;
  });
}
template <typename Whole, typename Part>
void unpack(Warp& warp, const Instruction& in, std::uint32_t mask) {
  constexpr int kParts = sizeof(Whole) / sizeof(Part);
  const Whole* const from = warp.lanes<Whole>(in.from[0]);
  each_lane(mask, [&](int lane) {
    const Whole whole = from[lane];
    for (int i = 0; i < kParts; ++i) {
      if (const std::uint32_t slot = in.to[static_cast<std::size_t>(i)]; slot != kNone) {
        warp.lanes<Part>(slot)[lane] =
            static_cast<Part>(whole >> (8 * sizeof(Part) * static_cast<unsigned>(i)));
      }
    }
  });
}

}  // namespace

void add_conversions(PlainTable& table) {
  add_integers_to<u16>(table);
  add_integers_to<s16>(table);
  add_integers_to<u32>(table);
  add_integers_to<s32>(table);
  add_integers_to<u64>(table);
  add_integers_to<s64>(table);
  table["cvt.f64.f32"] = Lanewise<To<f64>, f64, f32>::plain();
  table["cvt.rn.f32.f64"] = Lanewise<To<f32>, f32, f64>::plain();
  table["cvt.sat.f32.f32"] = Lanewise<Saturated, f32, f32>::plain();
  table["cvt.f32.f16"] = Lanewise<FromF16, f32, u16>::plain();
  table["cvt.f32.bf16"] = Lanewise<FromBf16, f32, u16>::plain();
  table["cvt.rn.f16.f32"] = Lanewise<ToF16, u16, f32>::plain();
  table["cvt.rn.bf16.f32"] = Lanewise<ToBf16, u16, f32>::plain();
  table["cvt.rn.f16x2.f32"] = Lanewise<ToF16Pair, u32, f32, f32>::plain();
  table["cvt.rn.bf16x2.f32"] = Lanewise<ToBf16Pair, u32, f32, f32>::plain();
  table["fma.rn.f16x2"] = Lanewise<PairFma<FromF16, ToF16>, u32, u32, u32, u32>::plain();
  table["fma.rn.bf16x2"] = Lanewise<PairFma<FromBf16, ToBf16>, u32, u32, u32, u32>::plain();
  table["cvt.rn.satfinite.e4m3x2.f32"] = Lanewise<ToF8Pair<3, 7, 448>, u16, f32, f32>::plain();
  table["cvt.rn.satfinite.e5m2x2.f32"] = Lanewise<ToF8Pair<2, 15, 57344>, u16, f32, f32>::plain();
  // Generic addresses are windows beside the host's addresses. Only addresses of shared memory are
  // offsets, to which a conversion adds their window.
  for (const std::string space : {"global", "param", "local", "const"}) {
    table["cvta." + space + ".u64"] = table["cvta.to." + space + ".u64"] =
        Lanewise<To<u64>, u64, u64>::plain();
  }
  struct IntoWindow {
    u64 operator()(u64 a) const { return a + kSharedWindow; }
  };
  struct OutOfWindow {
    u64 operator()(u64 a) const { return a - kSharedWindow; }
  };
  table["cvta.shared.u64"] = Lanewise<IntoWindow, u64, u64>::plain();
  table["cvta.to.shared.u64"] = Lanewise<OutOfWindow, u64, u64>::plain();
  // Names that decode.cpp gives to a mov with a vector.
  table["pack.2.64"] = {&pack<u64, u32>};
  table["pack.4.64"] = {&pack<u64, u16>};
  table["pack.2.32"] = {&pack<u32, u16>};
  table["unpack.2.64"] = {&unpack<u64, u32>};
  table["unpack.4.64"] = {&unpack<u64, u16>};
  table["unpack.2.32"] = {&unpack<u32, u16>};
}

}  // namespace ptx
