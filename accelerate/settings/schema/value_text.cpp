// Values of settings as text, and what they may be.
#include <algorithm>
#include <charconv>
#include <cmath>

#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/schema/row.h>
#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kSettingsSchema = "settings";

std::string number_text(double value) {
  char buffer[40];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

// `text` is what was given; `value` means something where that is a number.
template <class T>
void check_number(const Setting& setting, std::string_view source, bool is_number, T value,
                  std::string_view text) {
  const bool bounded = setting.least != 0 || setting.most != 0;
  const auto number = static_cast<double>(value);
  const std::string range =
      bounded ? " from " + number_text(setting.least) + " to " + number_text(setting.most)
              : std::string();
  TS_CHECK_AS(ConfigError,
              is_number && std::isfinite(number) &&
                  (!bounded || (number >= setting.least && number <= setting.most)),
              kSettingsSchema, source, " has to be a ", std::is_integral_v<T> ? "whole " : "",
              "number", range, "; got \"", text, "\"");
}

template <class T>
T parse_number(const Setting& setting, std::string_view source, std::string_view text) {
  T value{};
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, value);
  check_number(setting, source, problem == std::errc() && end == last, value, text);
  return value;
}

void add_items(std::vector<std::string>& items, std::string_view source, std::string_view text) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view item = text.substr(begin, end - begin);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    TS_CHECK_AS(ConfigError, !item.empty(), kSettingsSchema, source,
                " has to be a list A,B,... without empty items; got \"", text, "\"");
    items.emplace_back(item);
    begin = end + 1;
  }
}

}  // namespace

bool parse_bool(std::string_view source, std::string_view text) {
  const std::string word = lower(text);
  for (const std::string_view yes : {"y", "yes", "t", "true", "on", "1"}) {
    if (word == yes) return true;
  }
  for (const std::string_view no : {"n", "no", "f", "false", "off", "0"}) {
    if (word == no) return false;
  }
  TS_THROW(ConfigError, kSettingsSchema, source, " has to be true or false; got \"", text, "\"");
}

// ---- Reading -----------------------------------------------------------------------------------

void read_value(const Setting&, std::string_view source, std::string_view text, bool& value) {
  value = parse_bool(source, text);
}
void read_value(const Setting& setting, std::string_view source, std::string_view text,
                int64_t& value) {
  value = parse_number<int64_t>(setting, source, text);
}
void read_value(const Setting& setting, std::string_view source, std::string_view text,
                double& value) {
  value = parse_number<double>(setting, source, text);
}
void read_value(const Setting&, std::string_view, std::string_view text, std::string& value) {
  value = text;
}
void read_value(const Setting&, std::string_view source, std::string_view text,
                std::vector<std::string>& value) {
  if (!text.empty()) add_items(value, source, text);
}

size_t read_choice(const Setting& setting, std::string_view source, std::string_view given) {
  const std::string text =
      setting.other_word == nullptr ? std::string(given) : setting.other_word(source, given);
  const auto at = std::find(setting.names.begin(), setting.names.end(), lower(text));
  if (at != setting.names.end()) return static_cast<size_t>(at - setting.names.begin());
  std::string names;
  for (const std::string_view name : setting.names)
    names += (names.empty() ? "" : ", ") + std::string(name);
  TS_THROW(ConfigError, kSettingsSchema, source, " has to be one of ", names, "; got \"", text,
           "\"");
}

// ---- Showing -----------------------------------------------------------------------------------

std::string show_value(const Setting&, bool value) { return value ? "true" : "false"; }
std::string show_value(const Setting&, int64_t value) { return std::to_string(value); }
std::string show_value(const Setting&, double value) { return number_text(value); }
std::string show_value(const Setting&, const std::string& value) { return value; }
std::string show_value(const Setting&, const std::vector<std::string>& value) {
  std::string list;
  for (const std::string& item : value) list += (list.empty() ? "" : ",") + item;
  return list;
}

// ---- What the program says ---------------------------------------------------------------------

int64_t checked(const Setting& setting, std::string_view source, int64_t value) {
  check_number(setting, source, true, value, std::to_string(value));
  return value;
}

double checked(const Setting& setting, std::string_view source, double value) {
  check_number(setting, source, true, value, number_text(value));
  return value;
}

// An item that is a list itself counts as its items: files and variables could not say another.
std::vector<std::string> checked(const Setting&, std::string_view source,
                                 const std::vector<std::string>& value) {
  std::vector<std::string> items;
  for (const std::string& item : value) add_items(items, source, item);
  return items;
}

void check_choice(const Setting& setting, size_t position) {
  TS_CHECK_AS(ConfigError, position < setting.names.size(), kSettingsSchema, setting.key, " is a ",
              setting.type(), ", not an enumerator with the number ", position);
}

std::string source_of(const Setting& setting, const Origin& origin) {
  const bool is_place = origin.source == Source::kFile || origin.source == Source::kCode;
  return is_place ? std::string(setting.key) + " (" + origin.describe() + ")" : origin.name;
}

}  // namespace tessera::accelerate
