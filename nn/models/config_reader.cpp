#include <tessera/nn/models/config_reader.h>

#include <fstream>
#include <sstream>

#include <tessera/core/error.h>

namespace tessera::nn::models {

ConfigReader::ConfigReader(const std::string& path) : path_(path) {
  std::ifstream file(path, std::ios::binary);
  TS_CHECK_AS(IoError, file, path, "cannot be read; is it a model folder?");
  std::ostringstream text;
  text << file.rdbuf();
  try {
    json_ = nlohmann::json::parse(text.str());
  } catch (const nlohmann::json::exception& error) {
    TS_THROW(FormatError, path, "is not JSON (", error.what(), "); write it again");
  }
  TS_CHECK_AS(FormatError, json_.is_object(), path, "holds no JSON object; is it a config.json?");
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
  TS_CHECK_AS(FormatError, value->is_number_integer(), path_, "the field '", field,
              "' must be an integer; it is ", value->dump());
  return value->get<int64_t>();
}

double ConfigReader::number(const char* field, double fallback) const {
  const nlohmann::json* value = find(field);
  if (value == nullptr) return fallback;
  TS_CHECK_AS(FormatError, value->is_number(), path_, "the field '", field,
              "' must be a number; it is ", value->dump());
  return value->get<double>();
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
