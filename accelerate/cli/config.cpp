// tessera config: makes, rewrites and imports files of settings.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/yaml_import.h>
#include <tessera/core/error.h>

namespace tessera::cli {
namespace {

using namespace accelerate;

constexpr std::string_view kConfig = "tessera config";

struct Choices {
  std::string input;
  std::string output;
  bool overwrite = false;
  std::map<std::string, std::string> values;
};

std::string output_of(const Choices& choices) {
  if (!choices.output.empty()) return choices.output;
  const std::string file = default_config_file(distributed::process_environment());
  TS_CHECK_AS(ConfigError, !file.empty(), kConfig,
              "neither XDG_CONFIG_HOME nor HOME says where the file goes; give --output FILE");
  return file;
}

void write(const std::string& path, const Settings& settings, bool overwrite) {
  TS_CHECK_AS(ConfigError, overwrite || !std::filesystem::exists(path), kConfig, path,
              " exists; give --overwrite to replace it, or --output OTHER");
  write_config_file(path, settings);
  std::printf("written: %s\n", path.c_str());
}

Settings from_values(const Choices& choices) {
  Settings settings;
  for (const auto& [key, value] : choices.values) {
    const Setting& setting = *find_setting(key);
    assign(setting, settings, value, {Source::kLaunchFlag, setting.flag()});
  }
  check_before_code(settings);
  return settings;
}

// One question; empty input keeps what is there. What cannot be is said, and asked again.
bool ask(const Setting& setting, Settings& settings) {
  std::string kind(setting.type());
  if (kind == "choice") {
    kind.clear();
    for (const std::string_view name : setting.names) {
      kind += (kind.empty() ? "" : " | ") + std::string(name);
    }
  }
  const std::string now = text(setting, settings);
  while (true) {
    std::printf("%.*s\n  %.*s (%s) [%s]: ", static_cast<int>(setting.help.size()),
                setting.help.data(), static_cast<int>(setting.key.size()), setting.key.data(),
                kind.c_str(), now.empty() ? "none" : now.c_str());
    std::fflush(stdout);
    std::string answer;
    if (!std::getline(std::cin, answer)) return false;
    if (answer.empty()) return true;
    try {
      assign(setting, settings, answer, {Source::kFile, std::string(setting.key)});
      return true;
    } catch (const Error& error) {
      std::printf("%s\n", error.what());
    }
  }
}

bool ask_yes(const std::string& question) {
  while (true) {
    std::printf("%s (yes | no) [no]: ", question.c_str());
    std::fflush(stdout);
    std::string answer;
    if (!std::getline(std::cin, answer)) return false;
    if (answer.empty()) return false;
    try {
      return parse_bool("the answer", answer);
    } catch (const Error& error) {
      std::printf("%s\n", error.what());
    }
  }
}

int questionnaire(const Choices& choices) {
  const std::string path = output_of(choices);
  Settings settings;
  if (std::filesystem::exists(path)) {
    std::printf("%s exists; its values are offered.\n", path.c_str());
    for (const auto& [key, value] : read_config_file(path)) {
      assign(*find_setting(key), settings, value, {Source::kFile, path});
    }
  }
  std::printf("An empty answer keeps the value in brackets.\n\n");
  // What everybody wants to say; the rest on request.
  constexpr std::string_view kFirst[] = {"ranks", "sharding", "mixed_precision",
                                         "gradient_accumulation_steps"};
  const auto question = [&](const Setting& setting) {
    TS_CHECK_AS(ConfigError, ask(setting, settings), kConfig, "the input ended at the question ",
                setting.key, "; nothing was written");
  };
  for (const std::string_view key : kFirst) question(*find_setting(key));
  std::vector<std::string_view> sections;
  for (const Setting& setting : schema()) {
    if (!setting.planned && (sections.empty() || sections.back() != setting.section)) {
      sections.push_back(setting.section);
    }
  }
  for (const std::string_view section : sections) {
    if (!ask_yes("Change settings of " + std::string(section) + "?")) {
      TS_CHECK_AS(ConfigError, !std::cin.eof(), kConfig,
                  "the input ended before the last question; nothing was written");
      continue;
    }
    for (const Setting& setting : schema()) {
      const bool was_first = std::ranges::find(kFirst, setting.key) != std::end(kFirst);
      if (setting.section == section && !setting.planned && !was_first) question(setting);
    }
  }
  check_before_code(settings);
  check_available(settings);
  write(path, settings, true);
  return 0;
}

int make_default(const Choices& choices) {
  const Settings settings = from_values(choices);
  check_available(settings);
  write(output_of(choices), settings, choices.overwrite);
  return 0;
}

// Rewrites a file with the keys and types of today: aliases become keys, defaults go.
int update(const Choices& choices) {
  Settings settings;
  for (const auto& [key, value] : read_config_file(choices.input)) {
    assign(*find_setting(key), settings, value, {Source::kFile, choices.input});
    if (find_setting(key)->key != key) {
      std::printf("%s is called %s\n", key.c_str(), std::string(find_setting(key)->key).c_str());
    }
  }
  check_before_code(settings);
  write(choices.input, settings, true);
  return 0;
}

void report(const Import& import, const std::string& path) {
  std::printf("%s:\n%s", path.c_str(), import.report().c_str());
}

void check_is_same_training(const Import& import, const std::string& path, std::string_view where) {
  const std::string refusals = import.refusals();
  TS_CHECK_AS(UnsupportedError, refusals.empty(), where, path,
              " describes another training than these settings would be: ", refusals,
              "; nothing was written: change or remove these keys");
  check_before_code(import.settings);
}

// Of DeepSpeed the file itself stays: its optimizer, its schedule and its batch sizes are no
// settings.
int import_deepspeed(const Choices& choices) {
  const DeepSpeedConfig config = read_deepspeed_config(choices.input);
  report(config.import(), choices.input);
  Settings settings;
  assign(*find_setting("deepspeed_config_file"), settings,
         std::filesystem::absolute(choices.input).string(), {Source::kFile, choices.input});
  write(output_of(choices), settings, choices.overwrite);
  return 0;
}

int import_file(const Choices& choices) {
  if (choices.input.ends_with(".json")) return import_deepspeed(choices);
  const Import import = import_accelerate(choices.input);
  report(import, choices.input);
  check_is_same_training(import, choices.input, "tessera config import");
  write(output_of(choices), import.settings, choices.overwrite);
  return 0;
}

int convert_fsdp(const Choices& choices) {
  TS_CHECK_AS(IoError, std::filesystem::exists(choices.input), "tessera config to-fsdp2",
              "there is no file ", choices.input);
  TS_CHECK_AS(UsageError, !choices.output.empty(), "tessera config to-fsdp2",
              "needs --output-file FILE for the settings");
  TS_CHECK_AS(ConfigError, choices.overwrite || !std::filesystem::exists(choices.output),
              "tessera config to-fsdp2", choices.output, " exists; give --overwrite to replace it");
  const Import import = import_accelerate(choices.input);
  TS_CHECK_AS(ConfigError, import.fsdp_version != 0, "tessera config to-fsdp2", choices.input,
              " has no fsdp_config of an FSDP training");
  if (import.fsdp_version == 2) {
    std::printf("%s is of FSDP2 already; nothing was written (tessera config import reads it)\n",
                choices.input.c_str());
    return 0;
  }
  report(import, choices.input);
  check_is_same_training(import, choices.input, "tessera config to-fsdp2");
  write(choices.output, import.settings, choices.overwrite);
  return 0;
}

}  // namespace

void add_config(CLI::App& app, int& exit_code) {
  CLI::App* config = app.add_subcommand("config", "asks for settings and writes them to a file");
  config->require_subcommand(0, 1);
  const auto choices = std::make_shared<Choices>();
  const auto output = [&](CLI::App* command) {
    command->add_option("--output,--output-file,--config,--config-file", choices->output,
                        "file to write (default: the one that every training reads)");
  };
  const auto overwrite = [&](CLI::App* command) {
    command->add_flag("--overwrite", choices->overwrite, "replace the file");
  };
  output(config);
  config->callback([config, choices, &exit_code] {
    if (config->get_subcommands().empty()) exit_code = questionnaire(*choices);
  });

  CLI::App* defaults = config->add_subcommand("default", "writes a file without asking");
  output(defaults);
  overwrite(defaults);
  add_settings(*defaults, choices->values);
  defaults->callback([choices, &exit_code] { exit_code = make_default(*choices); });

  CLI::App* refresh = config->add_subcommand("update", "rewrites a file with today's keys");
  refresh->add_option("FILE", choices->input)->required();
  refresh->callback([choices, &exit_code] { exit_code = update(*choices); });

  CLI::App* import = config->add_subcommand(
      "import", "makes a file from Accelerate's YAML, or from DeepSpeed's JSON");
  import->add_option("FILE", choices->input)->required();
  output(import);
  overwrite(import);
  import->callback([choices, &exit_code] { exit_code = import_file(*choices);
});

CLI::App* convert = config->add_subcommand(
    "to-fsdp2", "the sharding settings of an Accelerate YAML file of FSDP version 1");
convert->add_option("--config-file", choices->input, "the YAML file")->required();
convert->add_option("--output-file,--output", choices->output, "the JSON file to write");
overwrite(convert);
convert->callback([choices, &exit_code] { exit_code = convert_fsdp(*choices); });

CLI::App* document = config->add_subcommand("document", "prints docs/configuration.md");
document->callback([] { std::fputs(configuration_document().c_str(), stdout); });
}  // namespace tessera::cli

}  // namespace tessera::cli
