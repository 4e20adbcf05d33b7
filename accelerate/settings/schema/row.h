// How a row of the table points to its setting.
//
//     {.key = "seed", .field = field<&Settings::seed, &AcceleratorOptions::seed>, ...}
//     {.key = "fp8_strict",
//      .field = field<&Settings::fp8_strict, &AcceleratorOptions::fp8, &Fp8Options::strict>, ...}
//
// The member's type decides how its value is read, shown and checked: truth values, whole numbers
// and others within the row's range, texts, lists, enumerators by the row's names, and optionals of
// these. A setting of the launcher has no option.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/accelerate/settings/schema.h>

namespace tessera::accelerate {

// ---- A value of each type. `source` names it in errors.

template <class T>
concept Choice = std::is_enum_v<T>;

void read_value(const Setting&, std::string_view source, std::string_view text, bool& value);
void read_value(const Setting&, std::string_view source, std::string_view text, int64_t& value);
void read_value(const Setting&, std::string_view source, std::string_view text, double& value);
void read_value(const Setting&, std::string_view source, std::string_view text, std::string& value);
void read_value(const Setting&, std::string_view source, std::string_view text,
                std::vector<std::string>& value);
size_t read_choice(const Setting&, std::string_view source, std::string_view text);
template <Choice T>
void read_value(const Setting& setting, std::string_view source, std::string_view text, T& value) {
  value = static_cast<T>(read_choice(setting, source, text));
}
template <class T>
void read_value(const Setting& setting, std::string_view source, std::string_view text,
                std::optional<T>& value) {
  read_value(setting, source, text, value.emplace());
}

std::string show_value(const Setting&, bool value);
std::string show_value(const Setting&, int64_t value);
std::string show_value(const Setting&, double value);
std::string show_value(const Setting&, const std::string& value);
std::string show_value(const Setting&, const std::vector<std::string>& value);
template <Choice T>
std::string show_value(const Setting& setting, T value) {
  return std::string(setting.names[static_cast<size_t>(value)]);
}
template <class T>
std::string show_value(const Setting& setting, const std::optional<T>& value) {
  return value ? show_value(setting, *value) : std::string();
}

// A value from the program, as it is stored: texts and truth values unchanged, numbers if they are
// in range, lists without empty items.
inline bool checked(const Setting&, std::string_view, bool value) { return value; }
int64_t checked(const Setting&, std::string_view source, int64_t value);
double checked(const Setting&, std::string_view source, double value);
inline std::string checked(const Setting&, std::string_view, const std::string& value) {
  return value;
}
std::vector<std::string> checked(const Setting&, std::string_view source,
                                 const std::vector<std::string>& value);
void check_choice(const Setting&, size_t position);
template <Choice T>
T checked(const Setting& setting, std::string_view, T value) {
  check_choice(setting, static_cast<size_t>(value));
  return value;
}

// "seed (code)"
std::string source_of(const Setting& setting, const Origin& origin);

// ---- Members

namespace detail {

template <class T>
constexpr bool is_optional = false;
template <class T>
constexpr bool is_optional<std::optional<T>> = true;

template <class T>
consteval std::string_view type_name() {
  if constexpr (is_optional<T>) {
    return type_name<typename T::value_type>();
  } else if constexpr (std::is_enum_v<T>) {
    return "choice";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return "int";
  } else if constexpr (std::is_same_v<T, double>) {
    return "number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "text";
  } else {
    static_assert(std::is_same_v<T, std::vector<std::string>>);
    return "list";
  }
}

// `Option`: the members that lead from AcceleratorOptions to the option.
template <auto Member, auto... Option>
struct Row {
  using T = std::remove_reference_t<decltype((std::declval<Settings&>().*Member).value)>;

  static std::string text(const Setting& setting, const Settings& settings) {
    return show_value(setting, (settings.*Member).value);
  }
  static const Origin& origin(const Settings& settings) { return (settings.*Member).origin; }
  static void assign(const Setting& setting, Settings& settings, std::string_view source,
                     std::string_view text, const Origin& origin) {
    T value{};
    read_value(setting, source, text, value);
    settings.*Member = {std::move(value), origin};
  }
  static void take(const Setting& setting, Settings& settings, const AcceleratorOptions& options) {
    const auto& said = (options.*....*Option);
    if (!said) return;
    const Origin code{Source::kCode, ""};
    settings.*Member = {checked(setting, source_of(setting, code), *said), code};
  }
  static constexpr SettingField field() {
    SettingField all{.type = type_name<T>(),
                     .optional = is_optional<T>,
                     .text = text,
                     .origin = origin,
                     .assign = assign,
                     .take = nullptr};
    if constexpr (sizeof...(Option) > 0) all.take = take;
    return all;
  }
};

}  // namespace detail

template <auto Member, auto... Option>
constexpr SettingField field = detail::Row<Member, Option...>::field();

// ---- Sections, a file each

std::vector<Setting> training_settings();
std::vector<Setting> data_settings();
std::vector<Setting> project_settings();
std::vector<Setting> ddp_settings();
std::vector<Setting> grad_scaler_settings();
std::vector<Setting> parallelism_settings();
std::vector<Setting> sharding_settings();
std::vector<Setting> fp8_settings();
std::vector<Setting> launch_settings();

}  // namespace tessera::accelerate
