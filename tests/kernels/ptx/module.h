// PTX as the interpreter runs it: instructions whose operands are places in the register file of a
// warp. Made by parse.cpp and decode.cpp of the text of one kernel, run by warp.cpp.
//
// A register is an array of 32 lanes in the file; a predicate is a mask of 32 bits there. Constants
// and special registers are registers that are filled before a warp starts, so that instructions
// have one kind of operand.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
constexpr std::uint32_t kAllLanes = 0xffffffff;

// What is wrong with a program or with what it does.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Warp;
struct Group;
struct Instruction;

// Carries an instruction out for the lanes of `mask`, which is not empty.
using Run = void (*)(Warp&, const Instruction&, std::uint32_t mask);
// The same of one that waits for other threads, called until all lanes of the group have gone on:
// returns those that do so now. It finds the group at the same state each time.
using Sync = std::uint32_t (*)(Warp&, Group&, const Instruction&);

enum class Kind : std::uint8_t { kRun, kSync, kBranch, kCall, kReturn };
enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kCluster, kParam };

constexpr std::uint32_t kNone = 0xffffffff;  // no operand

// Of memory: a register and a constant.
struct Address {
  std::uint32_t slot = kNone;
  bool is_wide = true;  // the register has 64 bits
  std::int64_t offset = 0;
};

struct Instruction {
  Kind kind = Kind::kRun;
  bool guard_negated = false;
  Space space = Space::kGeneric;
  std::uint8_t bytes = 0;  // that a lane moves
  std::uint8_t count = 1;  // of registers that it moves
  std::uint32_t guard = kNone;
  Run run = nullptr;
  Sync sync = nullptr;
  std::array<std::uint32_t, 4> to{kNone, kNone, kNone, kNone};
  std::array<std::uint32_t, 5> from{kNone, kNone, kNone, kNone, kNone};
  std::array<Address, 3> addresses{};
  std::uint32_t target = 0;  // index of an instruction
  std::uint32_t copies = 0;  // of a call: `count` from here on in Module::copies
  std::string_view text{};   // in Module::text
};

// Windows of the generic address space. All else is a host address: global memory is the host's.
constexpr std::uint64_t kSharedWindow = 0x7100'0000'0000'0000;
constexpr std::uint64_t kLaneWindow = 0x7200'0000'0000'0000;   // memory of each lane: .local, and
                                                               // what calls pass on
constexpr std::uint64_t kParamWindow = 0x7300'0000'0000'0000;  // parameters of the kernel
constexpr std::uint64_t kWindowMask = 0xff00'0000'0000'0000;

// Shared memory begins at 1 KiB, as on sm_90, so that a null pointer lies in none.
constexpr std::uint32_t kSharedBase = 1024;
// What the launch adds begins beyond all that a kernel declares. Variables lie apart, so that what
// is past the end of one is not the start of the next.
constexpr std::uint32_t kDynamicBase = 1 << 18;
constexpr std::uint32_t kSharedGap = 256;

// What createpolicy makes; its meaning is the GPU's.
constexpr std::uint64_t kPolicy = 0x14f0'0000'0000'0000;

// A variable in memory of some kind, at an address of its window (shared: an offset).
struct Variable {
  std::uint64_t address = 0;
  std::uint32_t bytes = 0;
  std::uint32_t element = 0;  // bytes of one
  bool is_dynamic = false;    // of the size that the launch gives
};

// Where special registers lie in the file, in this order: 32 bits each.
constexpr const char* kSpecialRegisters[] = {
    "%tid.x",           "%tid.y",       "%tid.z",           "%ntid.x",
    "%ntid.y",          "%ntid.z",      "%ctaid.x",         "%ctaid.y",
    "%ctaid.z",         "%nctaid.x",    "%nctaid.y",        "%nctaid.z",
    "%laneid",          "%clusterid.x", "%cluster_ctaid.x", "%cluster_nctaid.x",
    "%cluster_ctarank", "%nclusterid.x"};
constexpr int kSpecialCount = sizeof(kSpecialRegisters) / sizeof(kSpecialRegisters[0]);

struct Constant {
  std::uint32_t slot;
  int bytes;  // 0: a predicate
  std::uint64_t value;
};

struct Parameter {
  std::uint32_t offset;
  std::uint32_t bytes;
};

// An argument of a call, in the memory of a lane.
struct Copy {
  std::uint64_t from;
  std::uint64_t to;
  std::uint32_t bytes;
};

// One kernel, and the functions that it calls.
struct Module {
  std::string text;
  std::string name;  // of the kernel
  std::vector<Instruction> code;
  std::uint32_t entry = 0;
  std::uint32_t file_bytes = 0;  // registers of a warp
  std::uint32_t lane_bytes = 0;  // memory of a lane
  std::vector<Constant> constants;
  std::vector<Copy> copies;
  std::vector<Parameter> parameters;
  std::uint32_t parameter_bytes = 0;
  std::vector<Variable> shared;                              // of a CTA
  std::uint32_t shared_bytes = 0;                            // that the kernel declares
  std::uint32_t most_threads = 1024;                         // .maxntid
  std::map<std::string, std::vector<std::uint8_t>> globals;  // at addresses that stay
};

// Of a text with one kernel. Throws Fault for what it does not know.
std::unique_ptr<Module> parse(std::string text);

}  // namespace ptx
