// The reason inside an exception of nlohmann_json, without its bracketed prefix. Included by .cpp
// files only.
#pragma once

#include <exception>
#include <string_view>

namespace tessera::data {

inline std::string_view json_reason(const std::exception& error) {
  std::string_view what = error.what();
  if (const size_t end = what.find("] "); what.starts_with('[') && end != what.npos) {
    what.remove_prefix(end + 2);
  }
  return what;
}

}  // namespace tessera::data
