// Regular expressions that ranks of one process may compile at a time.
#pragma once

#include <mutex>
#include <regex>
#include <string>

namespace tessera {

// std::regex(pattern), whose std::regex_error it throws. One at a time: libstdc++ fills the table
// of narrowed characters of its locale as it compiles, without a lock of its own.
inline std::regex compile_regex(const std::string& pattern) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return std::regex(pattern);
}

}  // namespace tessera
