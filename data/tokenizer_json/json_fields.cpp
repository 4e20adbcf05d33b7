#include <tessera/data/tokenizer_json/json_fields.h>

#include <algorithm>
#include <limits>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>

namespace tessera::data {

JsonFields::JsonFields(const Json& object, std::string place)
    : object_(&object), place_(std::move(place)) {
  TS_CHECK_AS(FormatError, object.is_object(), kPretrained, place_,
              " must be a JSON object; it is a ", object.type_name(), "; get the file again.");
}

const Json* JsonFields::find(const char* name) {
  asked_.push_back(name);
  const auto found = object_->find(name);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

const Json& JsonFields::at(const char* name) {
  const Json* const value = find(name);
  TS_CHECK_AS(FormatError, value != nullptr, kPretrained, place_, " lacks the field '", name,
              "'; get the file again.");
  return *value;
}

std::string JsonFields::text(const char* name) {
  const Json& value = at(name);
  if (!value.is_string()) wrong(name, "a text");
  return value.get<std::string>();
}

std::optional<std::string> JsonFields::optional_text(const char* name) {
  if (find(name) == nullptr) return std::nullopt;
  return text(name);
}

bool JsonFields::flag(const char* name) {
  const Json& value = at(name);
  if (!value.is_boolean()) wrong(name, "true or false");
  return value.get<bool>();
}

bool JsonFields::flag(const char* name, bool otherwise) {
  return find(name) == nullptr ? otherwise : flag(name);
}

int64_t JsonFields::number(const char* name) {
  const Json& value = at(name);
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > uint64_t{std::numeric_limits<int32_t>::max()}) {
    wrong(name, "a whole number from 0 to 2147483647");
  }
  return value.get<int64_t>();
}

int64_t JsonFields::number(const char* name, int64_t otherwise) {
  return find(name) == nullptr ? otherwise : number(name);
}

char32_t JsonFields::character(const char* name) {
  const std::string value = text(name);
  const CodePoint first = value.empty() ? CodePoint{kInvalidCodePoint, 0} : decode_utf8(value, 0);
  if (first.value == kInvalidCodePoint || first.length != value.size())
    wrong(name, "one character");
  return first.value;
}

const Json& JsonFields::array(const char* name) {
  const Json& value = at(name);
  if (!value.is_array()) wrong(name, "an array");
  return value;
}

JsonFields JsonFields::object(const char* name) {
  return JsonFields(at(name), place_ + "." + name);
}

void JsonFields::ignore(std::initializer_list<const char*> names) {
  asked_.insert(asked_.end(), names.begin(), names.end());
}

void JsonFields::finish() const {
  for (const auto& [name, value] : object_->items()) {
    if (std::find(asked_.begin(), asked_.end(), name) == asked_.end()) {
      refuse("the field '" + name + "'");
    }
  }
}

void JsonFields::refuse(const std::string& what) const {
  TS_THROW(UnsupportedError, kPretrained, place_, " has ", replace_invalid_utf8(what),
           ", which is not known here; ids could be others than its maker's.");
}

void JsonFields::wrong(const char* name, std::string_view wanted) const {
  TS_THROW(FormatError, kPretrained, "the field '", name, "' of ", place_, " must be ", wanted,
           "; it is not; get the file again.");
}

int32_t token_id_of(const Json& value, std::string_view place, std::string_view token) {
  TS_CHECK_AS(FormatError, value.is_number_unsigned() && value.get<uint64_t>() < (1u << 21),
              kPretrained, "ids are whole numbers from 0 to 2^21 - 1; that of ", place,
              token.empty() ? "" : " '", token, token.empty() ? "" : "'",
              " is not; get the file again.");
  return value.get<int32_t>();
}

}  // namespace tessera::data
