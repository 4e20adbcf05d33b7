// What operators, places and attributes of values say. Included by this folder's .cpp files only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <tessera/data/chat_template/value.h>

namespace tessera::data::jinja {

// + - * / // % **. ValueError for values that do not have it.
Value binary(Run& run, std::string_view name, const Value& a, const Value& b);
Value negative(Run& run, const Value& value);
bool contains(Run& run, const Value& container, const Value& value);

// value.name: a method, or a dict's value. Undefined where there is none; ValueError of an
// undefined value.
Value attribute(Run& run, const Value& value, const std::string& name);
// value[place], and then as an attribute.
Value item(Run& run, const Value& value, const Value& place);
Value slice(Run& run, const Value& value, const std::optional<Value>& begin,
            const std::optional<Value>& end, const std::optional<Value>& step);

Value call(Run& run, const Value& function, Arguments& arguments);

// A method of texts, lists or dicts; nothing if the type has none of the name.
std::optional<Value> method(Run& run, const Value& value, std::string_view name);
// Applies a filter or a test. FormatError for an unknown one.
Value filter(Run& run, const std::string& name, const Value& value, Arguments& arguments);
bool test(Run& run, const std::string& name, const Value& value, Arguments& arguments);
bool is_test(std::string_view name);

// str % values.
std::string format(Run& run, const std::string& form, const Value& values);

// json.dumps(value, ...), as transformers' tojson passes it. ValueError for what JSON does not have.
struct JsonForm {
  bool ensure_ascii = false, sort_keys = false;
  std::optional<std::string> indent = {};
  std::string item_separator = ", ", key_separator = ": ";
};
std::string json_of(Run& run, const Value& value, const JsonForm& form);
// The value of a JSON text. FormatError.
Value value_of_json(Run& run, std::string_view text, const std::string& what);

// The value, or an error that names what is undefined.
const std::string& needed_text(const Run& run, const Value& value, std::string_view use);
int64_t needed_integer(const Run& run, const Value& value, std::string_view use);

}  // namespace tessera::data::jinja
