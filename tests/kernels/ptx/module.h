// PTX as the interpreter runs it: instructions whose operands are places in the register file of a
// warp. parse.cpp and decode.cpp make it from the text of one kernel, and warp.cpp runs it.
//
// A register is an array of 32 lanes in the file; a predicate is a mask of 32 bits. Constants and
// special registers are registers that are filled before a warp starts, so that instructions have
// only one kind of operand.
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

// What is wrong with a program, or with what it does.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Warp;
struct Group;
struct Instruction;

// Executes an instruction for the lanes of `mask`, which is not empty.
using Run = void (*)(Warp&, const Instruction&, std::uint32_t mask);
// Executes an instruction that waits for other threads. It is called until all lanes of the group
// have gone on, and returns those that go on now. It finds the group in the same state each time.
using Sync = std::uint32_t (*)(Warp&, Group&, const Instruction&);

enum class Kind : std::uint8_t { kRun, kSync, kBranch, kCall, kReturn };
enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kCluster, kParam };

constexpr std::uint32_t kNone = 0xffffffff;  // no operand

// An address in memory: a register plus a constant.
struct Address {
  std::uint32_t slot = kNone;
  bool is_wide = true;  // the register has 64 bits
  std::int64_t offset = 0;
};

struct Instruction {
  Kind kind = Kind::kRun;
  bool guard_negated = false;
  Space space = Space::kGeneric;
  std::uint8_t bytes = 0;  // that each lane moves
  std::uint8_t count = 1;  // registers that each lane moves
  std::uint32_t guard = kNone;
  Run run = nullptr;
  Sync sync = nullptr;
  std::array<std::uint32_t, 4> to{kNone, kNone, kNone, kNone};
  std::array<std::uint32_t, 5> from{kNone, kNone, kNone, kNone, kNone};
  std::array<Address, 3> addresses{};
  std::uint32_t target = 0;  // index of an instruction
  std::uint32_t copies = 0;  // for a call: the first of its `count` entries in Module::copies
  std::string_view text{};   // in Module::text
};

// Windows of the generic address space. All other addresses are those of the host, whose memory is
// the global memory.
constexpr std::uint64_t kSharedWindow = 0x7100'0000'0000'0000;
constexpr std::uint64_t kLaneWindow = 0x7200'0000'0000'0000;   // memory of each lane: .local, and
                                                               // what calls pass on
constexpr std::uint64_t kParamWindow = 0x7300'0000'0000'0000;  // parameters of the kernel
constexpr std::uint64_t kWindowMask = 0xff00'0000'0000'0000;

// Shared memory begins at 1 KiB, as on sm_90, so that a null pointer does not point into it.
constexpr std::uint32_t kSharedBase = 1024;
// The dynamic shared memory of a launch begins beyond all that a kernel declares. There are gaps
// between variables, so that an access past the end of one does not reach the next.
constexpr std::uint32_t kDynamicBase = 1 << 18;
constexpr std::uint32_t kSharedGap = 256;

// What createpolicy returns. Its meaning is left to the GPU.
constexpr std::uint64_t kPolicy = 0x14f0'0000'0000'0000;

// A variable in some kind of memory. The address is one of its window; in shared memory, an offset.
struct Variable {
  std::uint64_t address = 0;
  std::uint32_t bytes = 0;
  std::uint32_t element = 0;  // bytes of one element
  bool is_dynamic = false;    // its size is that of the launch
};

// The special registers, in the order in which they lie in the file; 32 bits each.
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
  std::vector<Variable> shared;                              // variables of a CTA
  std::uint32_t shared_bytes = 0;                            // that the kernel declares
  std::uint32_t most_threads = 1024;                         // .maxntid
  std::map<std::string, std::vector<std::uint8_t>> globals;  // at addresses that do not change
};

// Parses a text with one kernel. Throws Fault at anything unknown.
std::unique_ptr<Module> parse(std::string text);

}  // namespace ptx
