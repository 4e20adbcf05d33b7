// The table of settings, from which the flags of `tessera launch`, the environment variables, the
// JSON file, `tessera config` and docs/configuration.md are made. Its rows are in schema/, a file
// for each section.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/accelerate/settings/settings.h>

namespace tessera::accelerate {

struct Setting;

// The target of a row: field<&Settings::seed, &AcceleratorOptions::seed> of schema/row.h.
struct SettingField {
  std::string_view type;  // "bool", "int", "number", "text", "choice", "list"
  bool optional;
  std::string (*text)(const Setting&, const Settings&);
  const Origin& (*origin)(const Settings&);
  void (*assign)(const Setting&, Settings&, std::string_view source, std::string_view text,
                 const Origin&);
  // Takes the program's value, if it is set. Null: there is no option for it.
  void (*take)(const Setting&, Settings&, const AcceleratorOptions&);
};

struct Setting {
  std::string_view key;  // "mixed_precision": in files, as the flag --mixed-precision
  SettingField field;
  std::string_view help;
  std::vector<std::string_view> names = {};    // of an enum, in its order
  double least = 0, most = 0;                  // of a number; both 0: any
  std::vector<std::string_view> aliases = {};  // other keys with the same meaning
  // Variables that Accelerate reads or writes for it.
  std::vector<std::string_view> accelerate = {};
  std::string_view short_flag = {};  // "-n"
  // Values other than the default are not supported yet.
  bool planned = false;
  std::string_view instead = {};  // for a planned one: why, and what to use meanwhile
  // For a choice: the name that a synonym stands for.
  std::string (*other_word)(std::string_view source, std::string_view text) = nullptr;
  std::string_view section = {};  // "training", "data", ...: of documents and questionnaires

  std::string_view type() const { return field.type; }
  bool optional() const { return field.optional; }  // may have no value
  std::string environment() const;                  // "TESSERA_MIXED_PRECISION"
  std::string flag() const;                         // "--mixed-precision"
  std::vector<std::string> flags() const;           // with its short form and aliases
};

std::span<const Setting> schema();
// Found by key or alias, hyphens as underscores; null if unknown.
const Setting* find_setting(std::string_view key);
// The key or alias with the smallest edit distance; empty if that is more than `most` (by default a
// third of its letters).
std::string nearest_key(std::string_view key, std::optional<size_t> most = {});

// Text of a value: "bf16", "true", "0.5", "a,b"; empty for no value. parse() reads what text()
// writes, for every setting.
std::string text(const Setting& setting, const Settings& settings);
bool is_default(const Setting& setting, const Settings& settings);
const Origin& origin(const Setting& setting, const Settings& settings);
// Reads a value from text; ConfigError that names `origin` and what is possible. Truth values are
// y yes t true on 1, n no f false off 0: nothing else is true.
void assign(const Setting& setting, Settings& settings, std::string_view text,
            const Origin& origin);

// Every option that is set. ConfigError: an invalid value.
void take_options(Settings& settings, const AcceleratorOptions& options);

bool parse_bool(std::string_view source, std::string_view text);

}  // namespace tessera::accelerate
