// One object of a tokenizer.json, whose fields are asked for by name: what is missing, of another
// type or not asked for is an error that names its place. Included by this folder's .cpp files.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

using Json = nlohmann::json;

inline constexpr std::string_view kPretrained = "PretrainedTokenizer";

class JsonFields {
 public:
  // `place` names the object in errors: "'tokenizer.json' model". FormatError: not an object.
  JsonFields(const Json& object, std::string place);

  const std::string& place() const { return place_; }

  // A field that is there and not null; else nullptr.
  const Json* find(const char* name);
  // The others throw FormatError where the field is absent or of another type.
  const Json& at(const char* name);
  std::string text(const char* name);
  std::optional<std::string> optional_text(const char* name);
  bool flag(const char* name);
  bool flag(const char* name, bool otherwise);
  int64_t number(const char* name);  // 0 to 2^31 - 1
  int64_t number(const char* name, int64_t otherwise);
  char32_t character(const char* name);  // a text of one code point
  const Json& array(const char* name);
  JsonFields object(const char* name);
  // Fields that mean nothing here.
  void ignore(std::initializer_list<const char*> names);

  // UnsupportedError naming a field that nobody asked for.
  void finish() const;

  // UnsupportedError: '`place` has WHAT, which is not known'.
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void wrong(const char* name, std::string_view wanted) const;  // FormatError

 private:
  const Json* object_;
  std::string place_;
  std::vector<std::string_view> asked_;
};

// An id: FormatError unless it is a number from 0 to 2^21 - 1, more than any vocabulary has.
int32_t token_id_of(const Json& value, std::string_view place, std::string_view token = {});

}  // namespace tessera::data
