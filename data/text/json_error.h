// The reason inside an exception of nlohmann_json, without its bracketed prefix and its own count
// of lines, as valid UTF-8. Included by .cpp files only.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include <tessera/data/text/text.h>

namespace tessera::data {

inline std::string json_reason(const std::exception& error) {
  std::string_view what = error.what();
  if (const size_t end = what.find("] "); what.starts_with('[') && end != what.npos) {
    what.remove_prefix(end + 2);
  }
  if (const size_t end = what.find(": "); what.starts_with("parse error at") && end != what.npos) {
    what.remove_prefix(end + 2);
  }
  return replace_invalid_utf8(what);
}

}  // namespace tessera::data
