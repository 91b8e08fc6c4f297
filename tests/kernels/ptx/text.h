// Reads a PTX text word by word. Used by parse.cpp and decode.cpp.
#pragma once

#include <cctype>
#include <string>
#include <string_view>

#include "module.h"

namespace ptx {

class Words {
 public:
  explicit Words(std::string_view text) : text_(text) { skip(); }

  bool at_end() const { return at_ == text_.size(); }
  std::size_t position() const { return at_; }

  // The next word, without taking it; empty at the end.
  std::string_view peek() const { return text_.substr(at_, length()); }
  std::string_view next() {
    const std::string_view word = peek();
    at_ += word.size();
    skip();
    return word;
  }
  bool take(std::string_view word) {
    const bool found = peek() == word;
    if (found) {
      next();
    }
    return found;
  }
  void expect(std::string_view word) {
    if (!take(word)) {
      throw Fault("'" + std::string(word) + "' expected before '" + std::string(peek()) + "'");
    }
  }
  // Everything up to a word, which is taken as well.
  std::string_view until(char last) {
    const std::size_t first = at_;
    const std::size_t end = text_.find(last, at_);
    if (end == std::string_view::npos) {
      throw Fault("the text ends in a statement");
    }
    at_ = end + 1;
    skip();
    return text_.substr(first, end - first);
  }

 private:
  static bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }
  // The length of the next word: letters and digits with "." and "::" within, or any other single
  // character.
  std::size_t length() const {
    std::size_t end = at_;
    while (end < text_.size()) {
      if (in_word(text_[end])) {
        ++end;
      } else if (end > at_ && text_.substr(end, 2) == "::") {
        end += 2;
      } else {
        break;
      }
    }
    return end > at_ || at_ == text_.size() ? end - at_ : 1;
  }
  void skip() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

// The bits of "12", "-0x1f", "0f3F800000" or "0d3FF0000000000000".
bool is_number(std::string_view word);
std::uint64_t number(std::string_view word, bool negative);
int bytes_of_type(std::string_view type);  // 0: of a predicate

}  // namespace ptx
