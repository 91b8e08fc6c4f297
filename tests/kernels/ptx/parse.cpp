// Reads the PTX text of a kernel: declarations, scopes, labels, calls. decode.cpp knows the
// instructions.
#include <algorithm>
#include <cstring>
#include <map>

#include "decode.h"
#include "scope.h"
#include "text.h"

namespace ptx {
namespace {

class Parser final : public Constants {
 public:
  explicit Parser(Module& module) : module_(module), words_(module.text) {
    for (int i = 0; i < kSpecialCount; ++i) {
      const Registers one{allot(kLanes * 4), 4, 1};
      module_scope().registers.emplace(kSpecialRegisters[i], one);
    }
  }

  void parse() {
    while (!words_.at_end()) {
      directive();
    }
    resolve_calls();
    if (module_.name.empty()) {
      throw Fault("there is no kernel");
    }
    module_.file_bytes = file_bytes_;
  }

  std::uint32_t slot_of(std::uint64_t value, int bytes) override {
    const auto [place, is_new] = known_.try_emplace({value, bytes}, 0);
    if (is_new) {
      place->second = allot(bytes == 0 ? 4 : static_cast<std::uint32_t>(bytes * kLanes));
      module_.constants.push_back({place->second, bytes, value});
    }
    return place->second;
  }

 private:
  Scope& module_scope() { return scopes_.front(); }

  std::uint32_t allot(std::uint32_t bytes) {
    const std::uint32_t slot = file_bytes_;
    file_bytes_ += (bytes + 63) / 64 * 64;
    return slot;
  }

  template <typename T>
  const T* find(std::map<std::string, T, std::less<>> Scope::* map, std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = ((*scope).*map).find(name); found != ((*scope).*map).end()) {
        return &found->second;
      }
    }
    return nullptr;
  }

  // --- Outside of functions ----------------------------------------------------------------------

  void directive() {
    const std::string_view word = words_.next();
    if (word == ".version" || word == ".target" || word == ".address_size") {
      words_.next();
    } else if (word == ".weak" || word == ".visible" || word == ".extern") {
    } else if (word == ".entry") {
      function(true);
    } else if (word == ".func") {
      function(false);
    } else if (word == ".global" || word == ".shared" || word == ".const") {
      variable(word);
    } else {
      throw Fault("unknown directive " + std::string(word));
    }
  }

  // A parameter, or an array or scalar in memory, up to the word after its size.
  Variable declaration(std::string_view space, std::string_view* name) {
    std::uint32_t alignment = 0;
    std::string_view type = words_.next();
    if (type == ".align") {
      alignment = static_cast<std::uint32_t>(number(words_.next(), false));
      type = words_.next();
    }
    const auto size = static_cast<std::uint32_t>(bytes_of_type(type));
    Variable made{.bytes = size, .element = size};
    *name = words_.next();
    if (words_.take("[")) {
      made.is_dynamic = words_.peek() == "]";
      made.bytes =
          made.is_dynamic ? 0 : size * static_cast<std::uint32_t>(number(words_.next(), false));
      words_.expect("]");
    }
    place(made, space, std::max(alignment, size), *name);
    return made;
  }

  void place(Variable& made, std::string_view space, std::uint32_t alignment,
             std::string_view name) {
    const auto append = [&](std::uint32_t& total) {
      const std::uint32_t first = (total + alignment - 1) / alignment * alignment;
      total = first + made.bytes;
      return first;
    };
    if (space == ".shared") {
      module_.shared_bytes += made.bytes;
      if (made.is_dynamic) {
        made.address = kDynamicBase;
      } else {
        made.address = append(shared_end_);
        shared_end_ += kSharedGap;
      }
      module_.shared.push_back(made);
    } else if (space == ".global" || space == ".const") {
      auto& bytes = module_.globals[std::string(name)];
      bytes.assign(made.bytes, 0);
      made.address = reinterpret_cast<std::uint64_t>(bytes.data());
    } else if (space == ".kernel") {
      const std::uint32_t first = append(module_.parameter_bytes);
      module_.parameters.push_back({first, made.bytes});
      made.address = kParamWindow + first;
    } else {
      made.address = kLaneWindow + append(module_.lane_bytes);
    }
  }

  void variable(std::string_view space) {
    std::string_view name;
    const Variable made = declaration(space, &name);
    scopes_.back().variables.emplace(name, made);
    if (words_.take("=")) {
      initialise(module_.globals.at(std::string(name)), made.element);
    }
    words_.expect(";");
  }
  void initialise(std::vector<std::uint8_t>& bytes, std::uint32_t element) {
    const bool is_list = words_.take("{");
    std::size_t at = 0;
    do {
      const bool negative = words_.take("-");
      const std::uint64_t value = number(words_.next(), negative);
      if (at + element > bytes.size()) {
        throw Fault("more values than the variable has");
      }
      std::memcpy(bytes.data() + at, &value, element);
      at += element;
    } while (is_list && words_.take(","));
    if (is_list) {
      words_.expect("}");
    }
  }

  // --- Functions ---------------------------------------------------------------------------------

  std::vector<Variable> parameters(std::string_view space, Scope& scope) {
    std::vector<Variable> made;
    words_.expect("(");
    while (!words_.take(")")) {
      words_.expect(".param");
      std::string_view name;
      made.push_back(declaration(space, &name));
      scope.variables.emplace(name, made.back());
      words_.take(",");
    }
    return made;
  }

  void function(bool is_kernel) {
    Scope scope;
    if (words_.peek() == "(") {
      throw Fault("a function that returns a value is not implemented");
    }
    const std::string name(words_.next());
    Function& made = functions_[name];
    auto found = parameters(is_kernel ? ".kernel" : ".lane", scope);
    while (words_.peek() != "{" && words_.peek() != ";") {
      const std::string_view word = words_.next();
      if (word == ".maxntid") {
        module_.most_threads = static_cast<std::uint32_t>(number(words_.next(), false));
        while (words_.take(",")) {
          module_.most_threads *= static_cast<std::uint32_t>(number(words_.next(), false));
        }
      } else if (word == ".minnctapersm") {
        words_.next();
      } else if (word != ".noinline") {
        throw Fault("unknown directive " + std::string(word));
      }
    }
    if (words_.take(";")) {
      return;
    }
    made.parameters = std::move(found);
    made.first = static_cast<std::uint32_t>(module_.code.size());
    if (is_kernel) {
      if (!module_.name.empty()) {
        throw Fault("a second kernel: " + name);
      }
      module_.name = name;
      module_.entry = made.first;
    }
    words_.expect("{");
    scopes_.push_back(std::move(scope));
    while (scopes_.size() > 1) {
      statement();
    }
    emit({.kind = Kind::kReturn, .text = "the end of the function"});
  }

  void statement() {
    const std::string_view word = words_.peek();
    if (words_.take("{")) {
      scopes_.emplace_back();
    } else if (words_.take("}")) {
      close_scope();
    } else if (words_.take(".reg")) {
      registers();
    } else if (words_.take(".pragma") || words_.take(".loc")) {
      words_.until(';');
    } else if (word == ".shared" || word == ".local" || word == ".param") {
      variable(words_.next());
    } else {
      instruction();
    }
  }

  void close_scope() {
    Scope closed = std::move(scopes_.back());
    scopes_.pop_back();
    for (const Jump& jump : closed.jumps) {
      if (const auto label = closed.labels.find(jump.label); label != closed.labels.end()) {
        module_.code[jump.from].target = label->second;
      } else if (scopes_.size() > 1) {
        scopes_.back().jumps.push_back(jump);
      } else {
        throw Fault("a branch to a label that is not there: " + std::string(jump.label));
      }
    }
  }

  void registers() {
    const int bytes = bytes_of_type(words_.next());
    do {
      const std::string name(words_.next());
      Registers made{0, bytes, 1};
      if (words_.take("<")) {
        made.count = static_cast<int>(number(words_.next(), false));
        words_.expect(">");
      }
      made.slot = file_bytes_;
      for (int i = 0; i < made.count; ++i) {
        allot(size_of(made));
      }
      scopes_.back().registers[name] = made;
    } while (words_.take(","));
    words_.expect(";");
  }

  // --- Instructions ------------------------------------------------------------------------------

  void emit(Instruction made) { module_.code.push_back(std::move(made)); }

  void instruction() {
    const std::size_t first = words_.position();
    std::uint32_t guard = kNone;
    bool negated = false;
    if (words_.take("@")) {
      negated = words_.take("!");
      guard = operand().slot;
    }
    const std::string_view opcode = words_.next();
    if (guard == kNone && words_.take(":")) {
      scopes_.back().labels[opcode] = static_cast<std::uint32_t>(module_.code.size());
      return;
    }
    Instruction made;
    if (opcode.starts_with("call")) {
      call();
      made.kind = Kind::kCall;
    } else {
      made = plain(opcode);
    }
    made.guard = guard;
    made.guard_negated = negated;
    made.text = std::string_view(module_.text).substr(first, text_end_ - first);
    emit(std::move(made));
  }

  Instruction plain(std::string_view opcode) {
    std::vector<Operand> operands;
    while (words_.peek() != ";") {
      operands.push_back(operand());
      if (words_.peek() != ";") {
        words_.expect(",");
      }
    }
    text_end_ = words_.position();
    words_.expect(";");
    if (opcode == "bra" || opcode == "bra.uni") {
      scopes_.back().jumps.push_back(
          {static_cast<std::uint32_t>(module_.code.size()), operands.at(0).name});
      return {.kind = Kind::kBranch};
    }
    if (opcode == "ret" || opcode == "ret.uni") {
      return {.kind = Kind::kReturn};
    }
    try {
      return decode(opcode, operands, *this);
    } catch (const Fault& fault) {
      throw Fault(std::string(opcode) + ": " + fault.what());
    }
  }

  // "call function, (arguments);", whose arguments are variables of .param space.
  void call() {
    Call made{static_cast<std::uint32_t>(module_.code.size()), words_.next(), {}};
    if (made.callee == "(") {
      throw Fault("a function that returns a value is not implemented");
    }
    if (words_.take(",")) {
      words_.expect("(");
      while (!words_.take(")")) {
        const std::string_view name = words_.next();
        const Variable* const argument = find(&Scope::variables, name);
        if (argument == nullptr) {
          throw Fault("a call with an argument that is not there: " + std::string(name));
        }
        made.arguments.push_back(*argument);
        words_.take(",");
      }
    }
    text_end_ = words_.position();
    words_.expect(";");
    calls_.push_back(std::move(made));
  }

  // A function's parameters and registers have one place each, because there is no recursion.
  void resolve_calls() {
    for (const Call& call : calls_) {
      const auto callee = functions_.find(std::string(call.callee));
      if (callee == functions_.end() || callee->second.first == kNone ||
          callee->second.parameters.size() != call.arguments.size()) {
        throw Fault("a call of what is no such function: " + std::string(call.callee));
      }
      Instruction& made = module_.code[call.at];
      made.target = callee->second.first;
      made.copies = static_cast<std::uint32_t>(module_.copies.size());
      for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        module_.copies.push_back({call.arguments[i].address, callee->second.parameters[i].address,
                                  call.arguments[i].bytes});
      }
      made.count = static_cast<std::uint8_t>(call.arguments.size());
    }
  }

  // --- Operands ----------------------------------------------------------------------------------

  Operand operand() {
    if (words_.take("{")) {
      Operand made{.kind = Operand::kVector};
      do {
        made.of.push_back(operand());
      } while (words_.take(","));
      words_.expect("}");
      return made;
    }
    if (words_.take("[")) {
      return memory();
    }
    if (words_.take("_")) {
      return {.kind = Operand::kSink};
    }
    const bool negative = words_.take("-");
    const std::string_view word = words_.next();
    if (negative || is_number(word)) {
      return {.kind = Operand::kNumber, .value = number(word, negative)};
    }
    Operand made = named(word);
    if (words_.take("|")) {
      made.second = operand().slot;
    }
    return made;
  }

  Operand named(std::string_view word) {
    if (const Registers* const exact = find(&Scope::registers, word)) {
      return {.kind = Operand::kRegister, .slot = exact->slot, .bytes = exact->bytes};
    }
    if (const Variable* const variable = find(&Scope::variables, word)) {
      return {.kind = Operand::kAddressOf, .value = variable->address};
    }
    const std::size_t digits = word.find_last_not_of("0123456789") + 1;
    if (const Registers* const range = find(&Scope::registers, word.substr(0, digits));
        range != nullptr && digits < word.size()) {
      const int index = std::stoi(std::string(word.substr(digits)));
      const std::uint32_t step = (size_of(*range) + 63) / 64 * 64;
      if (index < range->count) {
        return {.kind = Operand::kRegister,
                .slot = range->slot + static_cast<std::uint32_t>(index) * step,
                .bytes = range->bytes};
      }
    }
    if (word.starts_with("%")) {
      throw Fault("unknown register " + std::string(word));
    }
    return {.kind = Operand::kName, .name = word};
  }

  Operand memory() {
    Operand made = operand();
    if (made.kind == Operand::kNumber || made.kind == Operand::kAddressOf) {
      made.slot = slot_of(made.value, 8);
      made.bytes = 8;
    } else if (made.kind != Operand::kRegister) {
      throw Fault("unknown address " + std::string(made.name));
    }
    made.kind = Operand::kMemory;
    if (words_.take("+")) {
      const bool negative = words_.take("-");
      made.offset = static_cast<std::int64_t>(number(words_.next(), negative));
    }
    words_.expect("]");
    return made;
  }

  Module& module_;
  Words words_;
  std::vector<Scope> scopes_{1};
  std::map<std::string, Function> functions_;
  std::vector<Call> calls_;
  std::map<std::pair<std::uint64_t, int>, std::uint32_t> known_;
  std::uint32_t file_bytes_ = 0;
  std::uint32_t shared_end_ = kSharedBase;
  std::size_t text_end_ = 0;
};

}  // namespace

std::unique_ptr<Module> parse(std::string text) {
  auto module = std::make_unique<Module>();
  module->text = std::move(text);
  Parser(*module).parse();
  return module;
}

}  // namespace ptx
