#include <tessera/nn/models/config_reader.h>

#include <cstdint>
#include <filesystem>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>

namespace tessera::nn::models {

ConfigReader::ConfigReader(const std::string& path) : path_(path) {
  TS_CHECK_AS(IoError, std::filesystem::exists(path), path,
              "cannot be read; is it a model folder?");
  std::string why;
  json_ = read_bounded_json(path, &why);
  TS_CHECK_AS(FormatError, why.empty(), path, "is not JSON (", why, "); write it again");
  TS_CHECK_AS(FormatError, json_.is_object(), path, "holds no JSON object; is it a config.json?");
}

void ConfigReader::set_defaults(const nlohmann::json& values) {
  for (const auto& [field, value] : values.items()) {
    if (!json_.contains(field)) json_[field] = value;
  }
}

const nlohmann::json* ConfigReader::find(const char* field) const {
  const auto found = json_.find(field);
  return found == json_.end() || found->is_null() ? nullptr : &*found;
}

int64_t ConfigReader::integer(const char* field, std::optional<int64_t> fallback) const {
  const nlohmann::json* value = find(field);
  if (value == nullptr) {
    TS_CHECK_AS(FormatError, fallback.has_value(), path_, "the field '", field, "' is missing");
    return *fallback;
  }
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  TS_CHECK_AS(FormatError, fits, path_, "the field '", field, "' must be an integer; it is ",
              value->dump());
  return value->get<int64_t>();
}

double ConfigReader::number(const char* field, double fallback) const {
  const nlohmann::json* value = find(field);
  if (value == nullptr) return fallback;
  TS_CHECK_AS(FormatError, value->is_number(), path_, "the field '", field,
              "' must be a number; it is ", value->dump());
  return value->get<double>();
}

bool ConfigReader::flag(const char* field, bool fallback) const {
  const nlohmann::json* value = find(field);
  if (value == nullptr) return fallback;
  TS_CHECK_AS(FormatError, value->is_boolean(), path_, "the field '", field,
              "' must be true or false; it is ", value->dump());
  return value->get<bool>();
}

std::string ConfigReader::text(const char* field, const std::string& fallback) const {
  const nlohmann::json* value = find(field);
  return value != nullptr && value->is_string() ? value->get<std::string>() : fallback;
}

void ConfigReader::require(const char* field, const nlohmann::json& value) const {
  const auto found = json_.find(field);
  TS_CHECK_AS(UnsupportedError, found == json_.end() || *found == value, path_, "the field '",
              field, "' is ", found->dump(), "; this model supports ", value.dump());
}

}  // namespace tessera::nn::models
