// JSON of files from other programs: config.json, adapter_config.json, indices of shards. Its bytes
// and depth are bounded, because nlohmann_json copies and shows values recursively.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>

namespace tessera {

inline constexpr size_t kMostJsonBytes = size_t{64} << 20;  // in memory up to 25 times as many
inline constexpr int kMostJsonLevels = 64;

// A discarded value for what is no JSON, as Json::parse without exceptions; `why` then has its
// words. FormatError, with `path`, beyond the bounds.
template <class Json = nlohmann::json>
Json parse_bounded_json(std::string_view text, const std::string& path,
                        std::string* why = nullptr) {
  TS_CHECK_AS(FormatError, text.size() <= kMostJsonBytes, path, "has ", text.size(),
              " bytes of JSON, and at most ", kMostJsonBytes, " are read");
  const auto watch = [&](int depth, typename Json::parse_event_t, Json&) {
    TS_CHECK_AS(FormatError, depth <= kMostJsonLevels, path, "has JSON of more than ",
                kMostJsonLevels, " levels; the file is damaged or hostile: get it again");
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const typename Json::exception& error) {
    if (why != nullptr) *why = error.what();
    return Json(Json::value_t::discarded);
  }
}

// The same of a file. IoError where it cannot be read.
template <class Json = nlohmann::json>
Json read_bounded_json(const std::string& path, std::string* why = nullptr) {
  const MappedFile file(path);
  return parse_bounded_json<Json>(file.text(), path, why);
}

}  // namespace tessera
