// Reads config.json of a transformers folder, with errors that name file and field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include <tessera/core/error.h>

namespace tessera::nn::models {

class ConfigReader {
 public:
  // IoError; FormatError: not JSON, or not an object.
  explicit ConfigReader(const std::string& path);

  // FormatError: missing without a fallback, or of another type. null counts as missing.
  int64_t integer(const char* field, std::optional<int64_t> fallback = {}) const;
  double number(const char* field, double fallback) const;
  bool flag(const char* field, bool fallback) const;
  std::string text(const char* field, const std::string& fallback = "") const;
  // From here on fields that are not there have these values, as in transformers' classes; null
  // stays null.
  void set_defaults(const nlohmann::json& values);
  bool is_null(const char* field) const { return find(field) == nullptr; }  // or not there
  // A field of which the model supports one value: UnsupportedError for others.
  void require(const char* field, const nlohmann::json& value) const;
  // Calls config.check(), whose errors then name the file.
  void check(const auto& config) const {
    try {
      config.check();
    } catch (Error& error) {
      error.add_context(path_);
      throw;
    }
  }
  const nlohmann::json& json() const { return json_; }
  const std::string& path() const { return path_; }

 private:
  const nlohmann::json* find(const char* field) const;  // null where absent

  std::string path_;
  nlohmann::json json_;
};

}  // namespace tessera::nn::models
