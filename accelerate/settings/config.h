// Where the settings of a training come from.
//
//     const Settings settings = resolve({.code = {.gradient_accumulation_steps = 4}});
//     settings.mixed_precision.value;              // Precision::kBF16
//     settings.mixed_precision.origin.describe();  // "TESSERA_MIXED_PRECISION"
//
// Each setting comes from the first of: code, flag of `tessera launch`, TESSERA_KEY, ACCELERATE_...
// (the name that HuggingFace Accelerate reads), the file, the default. One schema serves all of
// them: whatever one of them can write the others can read.
//
// The file is JSON, one object of key: value. It is --config, else TESSERA_CONFIG_FILE, else
// $XDG_CONFIG_HOME/tessera/config.json (~/.config/...) where that exists.
//
// Errors are ConfigErrors that name key, source and remedy: a value that cannot be, an unknown key
// (with the nearest known one), TESSERA_ and ACCELERATE_ spellings that differ, settings that
// contradict each other, also with deepspeed_config_file. UnsupportedError: a setting that this
// version knows but cannot serve.
//
// Nothing is global: the environment is an argument.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/accelerate/settings/schema.h>
#include <tessera/accelerate/settings/settings.h>
#include <tessera/distributed/rendezvous/detect.h>

namespace tessera::accelerate {

using distributed::Environment;

// ---- Sources

// Texts by key, in the order given.
using SettingTexts = std::vector<std::pair<std::string, std::string>>;

struct ResolveOptions {
  AcceleratorOptions code = {};
  Environment environment = distributed::process_environment();
  std::optional<std::string> file = {};  // nothing: code.config_file, else see above; "": none
  SettingTexts flags = {};               // of a command line that is being read (the launcher)
  bool code_follows = false;             // see check_consistent()
};

// The values with their origin. IoError, FormatError: the file. ConfigError, UnsupportedError: see
// above.
Settings resolve(const ResolveOptions& options = {});

// resolve() without its last check, also settings that are not available yet, and without what
// deepspeed_config_file says.
Settings merge(const ResolveOptions& options);
// A stage says how to shard where nothing else does.
void apply_stage(Settings& settings);
// What deepspeed_config_file says: see deepspeed_config.h.
void add_deepspeed(Settings& settings);
// ConfigError where settings contradict each other, UnsupportedError for what is not available.
// `code_follows`: a program still has its say (the launcher, files), so that nothing contradicts
// the default of what it may give.
void check_consistent(const Settings& settings, bool code_follows = false);
void check_available(const Settings& settings);
// Of settings that go into a file: check_consistent() of them with what a stage and
// deepspeed_config_file say, before a program has spoken.
void check_before_code(Settings settings);

// What `tessera launch` leaves to its ranks in TESSERA_LAUNCH_SETTINGS, so that they can tell a
// flag from a variable that the user has exported. `written`: variables that the launcher wrote. It
// also lists the flags that only an Accelerator reads, for tessera::run.
inline constexpr std::string_view kLaunchSettings = "TESSERA_LAUNCH_SETTINGS";
std::string launch_settings_text(const SettingTexts& flags,
                                 const std::vector<std::string>& written);

// ---- Files

// $XDG_CONFIG_HOME/tessera/config.json or ~/.config/tessera/config.json; empty without a home.
std::string default_config_file(const Environment& environment);
// The file that resolve() reads; empty: none.
std::string config_file(const ResolveOptions& options);

SettingTexts read_config_file(const std::string& path);
// The same from the text of a file named `path`.
SettingTexts parse_config(const std::string& text, const std::string& path);
// What differs from the default, as JSON of the settings' types.
std::string config_json(const Settings& settings);
// Writes it aside and renames; makes the folders. IoError.
void write_config_file(const std::string& path, const Settings& settings);

// "key = value  (origin)", a line each; `all`: defaults too.
std::string describe(const Settings& settings, bool all);
// docs/configuration.md.
std::string configuration_document();

}  // namespace tessera::accelerate
