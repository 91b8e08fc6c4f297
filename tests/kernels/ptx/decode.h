// From the words of an instruction to the instruction. parse.cpp calls decode.cpp, which looks
// opcodes up in the tables of the other files.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "module.h"

namespace ptx {

// An operand as it is written in the text.
struct Operand {
  enum Kind { kRegister, kNumber, kAddressOf, kMemory, kVector, kSink, kName } kind = kSink;
  std::uint32_t slot = kNone;    // of a register, or of the one in an address; kNone: none
  int bytes = 0;                 // of the register; 0: a predicate
  std::uint64_t value = 0;       // a number, or the address of a variable
  std::int64_t offset = 0;       // in an address
  std::vector<Operand> of{};     // a vector's registers
  std::string_view name{};       // of a function or a label
  std::uint32_t second = kNone;  // the predicate of "%r1|%p1"
};

// Gives constants a place in the register file. If `bytes` is 0, the constant is a predicate.
class Constants {
 public:
  virtual std::uint32_t slot_of(std::uint64_t value, int bytes) = 0;

 protected:
  ~Constants() = default;
};

// `opcode` is the whole of it, such as "ld.global.L2::128B.v4.b32". Throws Fault if the opcode is
// unknown, or if the operands do not suit it. Branches and calls are left to the caller.
Instruction decode(std::string_view opcode, const std::vector<Operand>& operands,
                   Constants& constants);

// Instructions on registers alone (arithmetic.cpp, convert.cpp).
struct Plain {
  Run run = nullptr;
  // Bytes of the register that is written, and of those that are read; 0: a predicate, -1: none.
  std::array<int, 5> bytes{-1, -1, -1, -1, -1};
};
std::optional<Plain> find_plain(std::string_view opcode);

// Loads and stores of elements of this size (memory.cpp). Null if there is none.
Run find_load(int bytes, bool is_signed, int register_bytes);
Run find_store(int bytes, int register_bytes);

// Instructions with operands of their own (memory.cpp, sync.cpp). Operands go to `to` and `from` in
// the order in which they are written.
struct Special {
  const char* opcode;
  Run run;
  Sync sync;
  const char* operands;  // one letter each: see decode.cpp
};
const Special* find_special(std::string_view opcode, std::size_t operands);

}  // namespace ptx
