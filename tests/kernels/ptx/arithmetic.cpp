// The instructions that each lane executes by itself, by name.
#include "lanes.h"
#include "one_lane.h"

namespace ptx {
namespace {

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
  table["bfi.b32"] = Lanewise<InsertBits<u32>, u32, u32, u32, u32, u32>::plain();
  table["bfi.b64"] = Lanewise<InsertBits<u64>, u64, u64, u64, u32, u32>::plain();
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
