// From the words of an instruction to the instruction: what parse.cpp asks of decode.cpp, and the
// tables that decode.cpp asks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "module.h"

namespace ptx {

// An operand as it is written.
struct Operand {
  enum Kind { kRegister, kNumber, kAddressOf, kMemory, kVector, kSink, kName } kind = kSink;
  std::uint32_t slot = kNone;    // of a register; of the one in an address, if there is one
  int bytes = 0;                 // of the register; 0: a predicate
  std::uint64_t value = 0;       // a number, or the address of a variable
  std::int64_t offset = 0;       // in an address
  std::vector<Operand> of{};     // a vector's registers
  std::string_view name{};       // of a function, a label
  std::uint32_t second = kNone;  // the predicate of "%r1|%p1"
};

// Gives constants a place in the register file. `bytes` 0: a predicate.
class Constants {
 public:
  virtual std::uint32_t slot_of(std::uint64_t value, int bytes) = 0;

 protected:
  ~Constants() = default;
};

// `opcode` is the whole of it, such as "ld.global.L2::128B.v4.b32". Throws Fault if it is unknown,
// or its operands are not what it takes. Branches and calls are left to the caller.
Instruction decode(std::string_view opcode, const std::vector<Operand>& operands,
                   Constants& constants);

// Instructions on registers alone (arithmetic.cpp, convert.cpp).
struct Plain {
  Run run = nullptr;
  // Bytes of the register that is written and of those that are read; 0: a predicate, -1: none.
  std::array<int, 5> bytes{-1, -1, -1, -1, -1};
};
std::optional<Plain> find_plain(std::string_view opcode);

// Loads and stores of elements of so many bytes (memory.cpp). Null where there is none.
Run find_load(int bytes, bool is_signed, int register_bytes);
Run find_store(int bytes, int register_bytes);

// Instructions with operands of their own (memory.cpp, sync.cpp): the operands go to `to` and
// `from` in their order.
struct Special {
  const char* opcode;
  Run run;
  Sync sync;
  const char* operands;  // a letter each: see decode.cpp
};
const Special* find_special(std::string_view opcode, std::size_t operands);

}  // namespace ptx
