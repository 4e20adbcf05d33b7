// Resolves the settings of a training.
//
//     const Settings settings = resolve({.code = {.gradient_accumulation_steps = 4}});
//     settings.mixed_precision.value;              // Precision::kBF16
//     settings.mixed_precision.origin.describe();  // "TESSERA_MIXED_PRECISION"
//
// Each setting comes from the first of: code, flag of `tessera launch`, TESSERA_KEY, ACCELERATE_...
// (the name that HuggingFace Accelerate reads), the file, the default. One schema serves all of
// them, so they all accept the same settings.
//
// The file is JSON, one object of key: value: --config, else TESSERA_CONFIG_FILE, else
// $XDG_CONFIG_HOME/tessera/config.json (~/.config/...) if it exists.
//
// Errors are ConfigErrors that name key, source and remedy: an invalid value, an unknown key (with
// the nearest known one), TESSERA_ and ACCELERATE_ variables that differ, settings that contradict
// each other, also with deepspeed_config_file. UnsupportedError: a setting that this version knows
// but does not support.
//
// There is no global state: the environment is an argument.
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

// resolve() without its last check, which also returns settings that are not supported yet, and
// without the contents of deepspeed_config_file.
Settings merge(const ResolveOptions& options);
// Lets a stage choose the sharding if nothing else does.
void apply_stage(Settings& settings);
// Applies deepspeed_config_file: see deepspeed_config.h.
void add_deepspeed(Settings& settings);
// ConfigError if settings contradict each other, UnsupportedError for unsupported ones.
// `code_follows`: a program may still set values (the launcher, files), so nothing contradicts the
// default of a setting that it may give.
void check_consistent(const Settings& settings, bool code_follows = false);
void check_available(const Settings& settings);
// For settings that go into a file: check_consistent() together with the implications of a stage
// and of deepspeed_config_file, before a program has set anything.
void check_before_code(Settings settings);

// What `tessera launch` passes to its ranks in TESSERA_LAUNCH_SETTINGS, so that they can
// distinguish a flag from a variable that the user has exported. `written`: variables that the
// launcher wrote. It also lists the flags that only an Accelerator reads, for tessera::run.
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
// The settings that differ from the default, as JSON of the settings' types.
std::string config_json(const Settings& settings);
// Writes a temporary file and renames it; creates folders. IoError.
void write_config_file(const std::string& path, const Settings& settings);

// "key = value  (origin)", one line each; `all`: defaults too.
std::string describe(const Settings& settings, bool all);
// docs/configuration.md.
std::string configuration_document();

}  // namespace tessera::accelerate
