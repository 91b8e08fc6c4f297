// What a name means in the PTX text of a kernel, while it is read.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "decode.h"

namespace ptx {

// A single register, or those that one directive declares.
struct Registers {
  std::uint32_t slot;
  int bytes;  // 0: a predicate
  int count;
};
inline std::uint32_t size_of(const Registers& of) {
  return of.bytes == 0 ? 4 : static_cast<std::uint32_t>(of.bytes * kLanes);
}

struct Jump {
  std::uint32_t from;
  std::string_view label;
};
struct Scope {
  std::map<std::string, Registers, std::less<>> registers;  // ranges by name without the number
  std::map<std::string, Variable, std::less<>> variables;
  std::map<std::string_view, std::uint32_t> labels;
  std::vector<Jump> jumps;
};

struct Function {
  std::uint32_t first = kNone;  // index of the first instruction; kNone: only declared
  std::vector<Variable> parameters;
};
struct Call {
  std::uint32_t at;
  std::string_view callee;
  std::vector<Variable> arguments;
};

}  // namespace ptx
