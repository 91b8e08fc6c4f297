// Numbers and types, as PTX writes them.
#include "text.h"

#include <bit>
#include <string>

#include "module.h"

namespace ptx {

int bytes_of_type(std::string_view type) {
  if (type == ".pred") {
    return 0;
  }
  const std::size_t digits = type.find_first_of("0123456789");
  const int bits = digits == type.npos ? 0 : std::stoi(std::string(type.substr(digits)));
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) {
    throw Fault("unknown type " + std::string(type));
  }
  return bits / 8;
}

bool is_number(std::string_view word) { return !word.empty() && word[0] >= '0' && word[0] <= '9'; }

std::uint64_t number(std::string_view word, bool negative) {
  if (word.find('.') != word.npos) {
    return std::bit_cast<std::uint64_t>(std::stod(std::string(word)));
  }
  int base = 10;
  if (word.starts_with("0f") || word.starts_with("0F") || word.starts_with("0d") ||
      word.starts_with("0D") || word.starts_with("0x") || word.starts_with("0X")) {
    base = 16;
    word.remove_prefix(2);
  }
  if (word.ends_with("U")) {
    word.remove_suffix(1);
  }
  std::size_t used = 0;
  const std::uint64_t value = word.empty() ? 0 : std::stoull(std::string(word), &used, base);
  if (used != word.size() || word.empty()) {
    throw Fault("not a number: " + std::string(word));
  }
  return negative ? 0 - value : value;
}

}  // namespace ptx
