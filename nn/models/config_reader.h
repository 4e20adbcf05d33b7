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
  // IoError; FormatError: not JSON, no object.
  explicit ConfigReader(const std::string& path);

  // FormatError: absent without a fallback, or of another kind. null is as absent.
  int64_t integer(const char* field, std::optional<int64_t> fallback = {}) const;
  double number(const char* field, double fallback) const;
  bool flag(const char* field, bool fallback) const;
  std::string text(const char* field, const std::string& fallback = "") const;
  // What a class of transformers has for a field that is not there. Of null it makes nothing.
  int64_t integer_or_class(const char* field, int64_t of_null, int64_t of_class) const {
    return integer(field, json_.contains(field) ? of_null : of_class);
  }
  // A field of which the model knows one value: UnsupportedError for others.
  void require(const char* field, const nlohmann::json& value) const;
  // config.check(), whose errors name the file then.
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
