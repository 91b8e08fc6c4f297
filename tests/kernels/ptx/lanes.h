// Makes instructions on registers from functions of one lane, and lists them in tables. For
// arithmetic.cpp and convert.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "decode.h"
#include "warp.h"

namespace ptx {

using PlainTable = std::unordered_map<std::string, Plain>;
void add_arithmetic(PlainTable& table);
void add_conversions(PlainTable& table);

// The bytes of a T in the register file. A bool is a mask there, and has 0.
template <typename T>
constexpr int kBytesOf = std::is_same_v<T, bool> ? 0 : static_cast<int>(sizeof(T));

// A source operand's lanes. For a predicate, its bits.
template <typename T>
struct Source {
  const T* lanes;
  T operator[](int lane) const { return lanes[lane]; }
};
template <>
struct Source<bool> {
  std::uint32_t bits;
  bool operator[](int lane) const { return (bits >> lane & 1) != 0; }
};
template <typename T>
Source<T> source_of(Warp& warp, std::uint32_t slot) {
  if constexpr (std::is_same_v<T, bool>) {
    return {warp.predicate(slot)};
  } else {
    return {warp.lanes<T>(slot)};
  }
}

// F(S...) -> D in each lane.
template <typename F, typename D, typename... S>
struct Lanewise {
  static void run(Warp& warp, const Instruction& in, std::uint32_t mask) {
    run(warp, in, mask, std::index_sequence_for<S...>());
  }

  template <std::size_t... I>
  static void run(Warp& warp, const Instruction& in, std::uint32_t mask,
                  std::index_sequence<I...>) {
    const std::tuple<Source<S>...> sources{source_of<S>(warp, in.from[I])...};
    const auto value = [sources](int lane) { return F{}(std::get<I>(sources)[lane]...); };
    if constexpr (std::is_same_v<D, bool>) {
      std::uint32_t bits = 0;
      each_lane(mask, [&](int lane) { bits |= std::uint32_t{value(lane)} << lane; });
      std::uint32_t& to = warp.predicate(in.to[0]);
      to = (to & ~mask) | bits;
    } else {
      D* const to = warp.lanes<D>(in.to[0]);
      each_lane(mask, [to, value](int lane) { to[lane] = value(lane); });
    }
  }

  static Plain plain() {
    Plain made{.run = &run};
    std::size_t i = 0;
    for (const int bytes : {kBytesOf<D>, kBytesOf<S>...}) {
      made.bytes[i++] = bytes;
    }
    return made;
  }
};

// Names of PTX's types that have the same arithmetic.
template <typename T>
std::initializer_list<const char*> names_of() {
  if constexpr (std::is_same_v<T, std::uint16_t>) {
    static constexpr std::initializer_list<const char*> names = {"u16", "b16"};
    return names;
  } else if constexpr (std::is_same_v<T, std::uint32_t>) {
    static constexpr std::initializer_list<const char*> names = {"u32", "b32"};
    return names;
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    static constexpr std::initializer_list<const char*> names = {"u64", "b64"};
    return names;
  } else if constexpr (std::is_same_v<T, bool>) {
    static constexpr std::initializer_list<const char*> names = {"pred"};
    return names;
  } else {
    static constexpr std::initializer_list<const char*> names = {
        std::is_same_v<T, std::int16_t>   ? "s16"
        : std::is_same_v<T, std::int32_t> ? "s32"
        : std::is_same_v<T, std::int64_t> ? "s64"
        : std::is_same_v<T, float>        ? "f32"
                                          : "f64"};
    return names;
  }
}

// Adds "name.type" for each of the types. The functions are T(T), T(T, T) and T(T, T, T).
template <typename F, typename... Ts>
void add_unary(PlainTable& table, const std::string& name) {
  const auto one = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table[name + "." + type] = Lanewise<F, T, T>::plain();
    }
  };
  (one(Ts{}), ...);
}
template <typename F, typename... Ts>
void add_binary(PlainTable& table, const std::string& name) {
  const auto one = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table[name + "." + type] = Lanewise<F, T, T, T>::plain();
    }
  };
  (one(Ts{}), ...);
}
template <typename F, typename... Ts>
void add_ternary(PlainTable& table, const std::string& name) {
  const auto one = [&]<typename T>(T) {
    for (const char* const type : names_of<T>()) {
      table[name + "." + type] = Lanewise<F, T, T, T, T>::plain();
    }
  };
  (one(Ts{}), ...);
}

}  // namespace ptx
