#include "decode.h"

#include <algorithm>

namespace ptx {
namespace {

std::vector<std::string_view> split(std::string_view opcode) {
  std::vector<std::string_view> parts;
  while (!opcode.empty()) {
    const std::size_t dot = std::min(opcode.find('.'), opcode.size());
    parts.push_back(opcode.substr(0, dot));
    opcode.remove_prefix(std::min(dot + 1, opcode.size()));
  }
  return parts;
}

std::uint32_t source(const Operand& operand, int bytes, Constants& constants) {
  if (operand.kind == Operand::kNumber || operand.kind == Operand::kAddressOf) {
    // A predicate constant holds for every lane.
    const std::uint64_t value = bytes == 0 && operand.value != 0 ? kAllLanes : operand.value;
    return constants.slot_of(value, bytes);
  }
  if (operand.kind != Operand::kRegister || operand.bytes != bytes) {
    throw Fault("an operand is no register of " + std::to_string(8 * bytes) + " bits");
  }
  return operand.slot;
}

std::uint32_t target(const Operand& operand, int bytes) {
  if (operand.kind != Operand::kRegister || operand.bytes != bytes) {
    throw Fault("the result is no register of " + std::to_string(8 * bytes) + " bits");
  }
  return operand.slot;
}

Address address(const Operand& operand) {
  if (operand.kind != Operand::kMemory || (operand.bytes != 4 && operand.bytes != 8)) {
    throw Fault("an operand is no address");
  }
  return {operand.slot, operand.bytes == 8, operand.offset};
}

void require(bool holds, const char* what) {
  if (!holds) {
    throw Fault(what);
  }
}

Instruction decode_plain(const Plain& plain, const std::vector<Operand>& operands,
                         Constants& constants) {
  Instruction made{.run = plain.run};
  const auto wanted =
      std::count_if(plain.bytes.begin(), plain.bytes.end(), [](int bytes) { return bytes >= 0; });
  require(static_cast<std::size_t>(wanted) == operands.size(), "it has another number of operands");
  require(operands[0].second == kNone, "a second result is not implemented");
  made.to[0] = target(operands[0], plain.bytes[0]);
  for (std::size_t i = 1; i < operands.size(); ++i) {
    made.from[i - 1] = source(operands[i], plain.bytes[i], constants);
  }
  return made;
}

// --- mov ---------------------------------------------------------------------------------------

// Packs a vector's registers into one, or unpacks one into them.
Instruction decode_pack(const std::vector<Operand>& operands, int bytes, Constants& constants) {
  const bool packs = operands[1].kind == Operand::kVector;
  const Operand& whole = operands[packs ? 0 : 1];
  const std::vector<Operand>& parts = operands[packs ? 1 : 0].of;
  const int each = bytes / static_cast<int>(parts.size());
  Instruction made;
  const auto name = std::string(packs ? "pack." : "unpack.") + std::to_string(parts.size()) + "." +
                    std::to_string(8 * bytes);
  const auto plain = find_plain(name);
  require(plain.has_value() && parts.size() <= 4, "a vector of no such size");
  made.run = plain->run;
  (packs ? made.to[0] : made.from[0]) = target(whole, bytes);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (packs) {
      made.from[i] = source(parts[i], each, constants);
    } else if (parts[i].kind != Operand::kSink) {
      made.to[i] = target(parts[i], each);
    }
  }
  return made;
}

// --- ld, st ------------------------------------------------------------------------------------

struct Access {
  Space space = Space::kGeneric;
  int count = 1;
  int bytes = 0;  // of an element
  bool is_signed = false;
  bool has_policy = false;
};

Access access_of(const std::vector<std::string_view>& parts) {
  Access made;
  for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
    const std::string_view part = parts[i];
    if (part == "global" || part == "const") {
      made.space = Space::kGlobal;
    } else if (part == "shared" || part == "shared::cta") {
      made.space = Space::kShared;
    } else if (part == "shared::cluster") {
      made.space = Space::kCluster;
    } else if (part == "param" || part == "local") {
      made.space = Space::kParam;
    } else if (part == "v2" || part == "v4") {
      made.count = part[1] - '0';
    } else if (part == "L2::cache_hint") {
      made.has_policy = true;
    } else {
      // Cache hints do not change values.
      const bool hint = part.starts_with("L1::") || part.starts_with("L2::") || part == "nc" ||
                        part == "ca" || part == "cg" || part == "cs" || part == "weak";
      require(hint, "it has an unknown part");
    }
  }
  const std::string_view type = parts.back();
  const std::size_t digits = type.find_first_of("0123456789");
  require(digits == 1 && std::string_view("busf").find(type[0]) != std::string_view::npos,
          "its type is unknown");
  made.bytes = std::stoi(std::string(type.substr(1))) / 8;
  made.is_signed = type[0] == 's';
  return made;
}

Instruction decode_access(bool is_store, const std::vector<std::string_view>& parts,
                          const std::vector<Operand>& operands, Constants& constants) {
  const Access access = access_of(parts);
  require(operands.size() == (access.has_policy ? 3u : 2u), "it has another number of operands");
  Instruction made{.space = access.space};
  made.addresses[0] = address(operands[is_store ? 0 : 1]);
  made.from[4] = access.has_policy ? source(operands[2], 8, constants) : kNone;
  const Operand& data = operands[is_store ? 1 : 0];
  const std::vector<Operand> alone{data};
  const std::vector<Operand>& registers = access.count > 1 ? data.of : alone;
  require(registers.size() == static_cast<std::size_t>(access.count), "its vector is another");
  int width = access.bytes;  // of the registers
  for (std::size_t i = 0; i < registers.size(); ++i) {
    if (registers[i].kind == Operand::kRegister) {
      width = std::max(width, registers[i].bytes);
    }
  }
  for (std::size_t i = 0; i < registers.size(); ++i) {
    if (is_store) {
      made.from[i] = source(registers[i], width, constants);
    } else if (registers[i].kind != Operand::kSink) {
      made.to[i] = target(registers[i], width);
    }
  }
  made.count = static_cast<std::uint8_t>(access.count);
  made.bytes = static_cast<std::uint8_t>(access.count * access.bytes);
  made.run =
      is_store ? find_store(access.bytes, width) : find_load(access.bytes, access.is_signed, width);
  require(made.run != nullptr, "no such width");
  return made;
}

// --- Instructions with operands of their own -----------------------------------------------------

// The letters of Special::operands:
//     R, L, Q  a register to write, of 32 or 64 bits, or a predicate
//     r, l, p  the same to read
//     D        "register|predicate" to write, of 32 bits
//     v        a vector of 32-bit registers to read
//     m        an address
//     _        nothing
Instruction decode_special(const Special& special, const std::vector<Operand>& operands,
                           Constants& constants) {
  const std::string_view letters = special.operands;
  Instruction made{.run = special.run, .sync = special.sync};
  made.kind = special.sync != nullptr ? Kind::kSync : Kind::kRun;
  std::size_t to = 0, from = 0, addresses = 0;
  for (std::size_t i = 0; i < letters.size(); ++i) {
    const Operand& operand = operands[i];
    switch (letters[i]) {
      case 'R':
        made.to[to++] = target(operand, 4);
        break;
      case 'D':
        made.to[to++] = target(operand, 4);
        made.to[to++] = operand.second;
        break;
      case 'L':
        made.to[to++] = target(operand, 8);
        break;
      case 'Q':
        made.to[to++] = target(operand, 0);
        break;
      case 'r':
        made.from[from++] = source(operand, 4, constants);
        break;
      case 'l':
        made.from[from++] = source(operand, 8, constants);
        break;
      case 'p':
        made.from[from++] = source(operand, 0, constants);
        break;
      case 'v':
        require(operand.kind == Operand::kVector && operand.of.size() <= 4, "it has no vector");
        for (const Operand& each : operand.of) {
          made.from[from++] = source(each, 4, constants);
        }
        made.count = static_cast<std::uint8_t>(operand.of.size());
        break;
      case 'm':
        made.addresses[addresses++] = address(operand);
        break;
      case '_':
        require(operand.kind == Operand::kSink, "a result is not implemented");
        break;
      default:
        throw Fault("a table with an unknown letter");
    }
  }
  return made;
}

}  // namespace

Instruction decode(std::string_view opcode, const std::vector<Operand>& operands,
                   Constants& constants) {
  const std::vector<std::string_view> parts = split(opcode);
  if (parts[0] == "ld" || parts[0] == "st") {
    if (parts.size() > 1 && parts[1] != "async") {
      return decode_access(parts[0] == "st", parts, operands, constants);
    }
  }
  if (parts[0] == "mov" && operands.size() == 2 &&
      (operands[0].kind == Operand::kVector || operands[1].kind == Operand::kVector)) {
    return decode_pack(operands, std::stoi(std::string(parts[1].substr(1))) / 8, constants);
  }
  auto plain = find_plain(opcode);
  if (!plain && operands.size() == 2) {  // the width of the source register is part of the name
    plain = find_plain(std::string(opcode) + "/" + std::to_string(8 * operands[1].bytes));
  }
  if (plain) {
    return decode_plain(*plain, operands, constants);
  }
  if (const Special* const special = find_special(opcode, operands.size())) {
    return decode_special(*special, operands, constants);
  }
  throw Fault("an instruction that the interpreter does not know");
}

}  // namespace ptx
