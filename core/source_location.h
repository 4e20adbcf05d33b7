// Where in the program a call stands. std::source_location would do; clang before 16 has none.
#pragma once

#include <cstdint>

namespace tessera {

// SourceLocation::current() is the place of the call whose default argument, or default member of
// an option struct in braces, it is.
class SourceLocation {
 public:
  constexpr SourceLocation() = default;
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          uint32_t line = __builtin_LINE(),
                                          const char* function = __builtin_FUNCTION()) {
    SourceLocation here;
    here.file_ = file;
    here.line_ = line;
    here.function_ = function;
    return here;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr uint32_t line() const { return line_; }
  constexpr const char* function_name() const { return function_; }

 private:
  const char* file_ = "";
  const char* function_ = "";
  uint32_t line_ = 0;
};

}  // namespace tessera
