// Settings as JSON files, as listings and as documentation.
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/settings/config.h>
#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/plain_text.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kSettingsFile = "settings";

std::string as_text(const nlohmann::json& value, const std::string& key, const std::string& path) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean() || value.is_number()) return value.dump();
  std::string list;
  TS_CHECK_AS(ConfigError, value.is_array(), kSettingsFile, path, ": \"", key,
              "\" has to be a number, a truth value, a text or a list of texts; got ",
              value.dump());
  for (const auto& item : value) {
    list += (list.empty() ? "" : ",") + (item.is_string() ? item.get<std::string>() : item.dump());
  }
  return list;
}

nlohmann::json as_json(const Setting& setting, const Settings& settings) {
  const std::string value = text(setting, settings);
  if (setting.type() == "list") {
    auto list = nlohmann::json::array();
    for (size_t begin = 0; begin < value.size();) {
      const size_t end = std::min(value.find(',', begin), value.size());
      list.push_back(value.substr(begin, end - begin));
      begin = end + 1;
    }
    return list;
  }
  const bool is_word = setting.type() == "text" || setting.type() == "choice";
  return is_word ? nlohmann::json(value) : nlohmann::json::parse(value);
}

}  // namespace

SettingTexts read_config_file(const std::string& path) {
  PlainText<std::ifstream> file(path);
  TS_CHECK_AS(IoError, file.is_open(), kSettingsFile, "cannot read the settings in ", path, ": ",
              std::strerror(errno));
  PlainText<std::ostringstream> text;
  text << file.rdbuf();
  return parse_config(text.str(), path);
}

SettingTexts parse_config(const std::string& text, const std::string& path) {
  SettingTexts texts;
  // nlohmann's object would keep one of two equal keys.
  std::string repeated;
  std::vector<std::string> seen;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    // Messages show values, and what shows a value calls itself for each level of it.
    TS_CHECK_AS(FormatError, depth <= 8, kSettingsFile, path, " has values ", depth,
                " levels deep; settings are texts, numbers, truth values and lists of texts");
    if (event == nlohmann::json::parse_event_t::key && depth == 1) {
      const auto key = parsed.get<std::string>();
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) repeated = key;
      seen.push_back(key);
    }
    return true;
  };
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    const bool yaml = path.ends_with(".yaml") || path.ends_with(".yml");
    TS_THROW(FormatError, kSettingsFile, path, " is no JSON: ", error.what(),
             yaml ? "; settings of Accelerate become a JSON file by: tessera config import " + path
                  : std::string());
  }
  TS_CHECK_AS(FormatError, json.is_object(), kSettingsFile, path, " has to hold one JSON object");
  TS_CHECK_AS(ConfigError, repeated.empty(), kSettingsFile, path, " has the setting \"", repeated,
              "\" twice");
  std::string unknown;
  for (const auto& [key, value] : json.items()) {
    if (find_setting(key) == nullptr) {
      const std::string near = nearest_key(key);
      unknown += (unknown.empty() ? "\"" : ", \"") + key + "\"" +
                 (near.empty() ? "" : " (did you mean \"" + near + "\"?)");
    } else if (!value.is_null()) {  // null: no value
      texts.emplace_back(key, as_text(value, key, path));
    }
  }
  TS_CHECK_AS(ConfigError, unknown.empty(), kSettingsFile, path,
              " has settings that are unknown: ", unknown,
              "; docs/configuration.md lists all settings");
  std::erase_if(texts, [](const auto& entry) { return entry.second.empty(); });
  return texts;
}

std::string config_json(const Settings& settings) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const Setting& setting : schema()) {
    if (is_default(setting, settings)) continue;
    json[std::string(setting.key)] = as_json(setting, settings);
  }
  try {
    return json.dump(2) + "\n";
  } catch (const nlohmann::json::exception&) {
    TS_THROW(ConfigError, kSettingsFile,
             "a setting has bytes that are no UTF-8, which JSON cannot hold; give it in UTF-8");
  }
}

void write_config_file(const std::string& path, const Settings& settings) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) make_folders(folder.string());
  write_file_atomically(path, config_json(settings));
}

std::string describe(const Settings& settings, bool all) {
  std::string lines;
  for (const Setting& setting : schema()) {
    const Origin& from = origin(setting, settings);
    if (!all && from.source == Source::kDefault) continue;
    const std::string value = text(setting, settings);
    lines += std::string(setting.key) + " = " + (value.empty() ? "none" : value) + "  (" +
             from.describe() + ")\n";
  }
  return lines;
}

std::string configuration_document() {
  const Settings defaults;
  std::string page =
      "# Configuration\n\n"
      "Generated by `tessera config document` from the table of settings; a test compares the "
      "two.\n\n"
      "Every setting has one key. It can be given in the program, as a flag of `tessera launch` "
      "(hyphens or underscores),\nas a variable `TESSERA_KEY`, as the variable that Hugging Face "
      "Accelerate reads, or in a JSON file. The first of these that\ngives it wins, in this "
      "order; last comes the default. `tessera env` prints what was given with its origin, "
      "`tessera env --all` each value.\n\n"
      "The file is `--config FILE`, else `TESSERA_CONFIG_FILE`, else "
      "`$XDG_CONFIG_HOME/tessera/config.json` (`~/.config/tessera/config.json`)\nwhere that "
      "exists. `tessera config` writes it by asking, `tessera config default` without asking, "
      "`tessera config update FILE`\nrewrites an older one, `tessera config import FILE` makes "
      "it from an Accelerate YAML file or a DeepSpeed JSON file ([key by key](deepspeed.md)).\n\n"
      "```json\n{\n  \"mixed_precision\": \"bf16\",\n  \"gradient_accumulation_steps\": 4,\n  "
      "\"log_with\": [\"jsonl\", \"tensorboard\"]\n}\n```\n\n"
      "Errors, each with the names: an unknown key or flag, a `TESSERA_` variable a letter or two "
      "from a setting, a value that cannot be,\n`TESSERA_` and `ACCELERATE_` variables that "
      "differ, settings that contradict each other. Truth values are `y yes t true on 1` and\n"
      "`n no f false off 0`, in any case. An empty variable is as if it were unset.\n\n"
      "Settings marked *planned* are known to files and flags, and anything but their default is "
      "an error that says so.\n";
  std::string_view section;
  for (const Setting& setting : schema()) {
    if (setting.section != section) {
      section = setting.section;
      page += "\n## " + std::string(section) +
              "\n\n| key | type | default | meaning | variables |\n|---|---|---|---|---|\n";
    }
    std::string type(setting.type());
    if (setting.type() == "choice") {
      type.clear();
      for (const std::string_view name : setting.names) {
        type += (type.empty() ? "`" : ", `") + std::string(name) + "`";
      }
    }
    std::string keys = "`" + std::string(setting.key) + "`";
    for (const std::string_view alias : setting.aliases) keys += ", `" + std::string(alias) + "`";
    std::string variables = "`" + setting.environment() + "`";
    for (const std::string_view name : setting.accelerate) {
      variables += ", `" + std::string(name) + "`";
    }
    const std::string value = text(setting, defaults);
    page += "| " + keys + " | " + type + " | " + (value.empty() ? "none" : "`" + value + "`") +
            " | " + std::string(setting.help) + (setting.planned ? " (*planned*)" : "") + " | " +
            variables + " |\n";
  }
  return page;
}

}  // namespace tessera::accelerate
