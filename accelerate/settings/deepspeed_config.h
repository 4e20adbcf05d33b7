// A DeepSpeed configuration (ds_config.json) as settings.
// read_deepspeed_config() reads it, apply_deepspeed() adds to the settings what is not set
// elsewhere, and batch_sizes() does the arithmetic of batches: 512 = 16 x 4 x 8. resolve() calls
// the first two.
//
// Every key of the file has an entry in `lines`: it becomes a setting, equals a default, tunes
// something that needs no tuning here (with the reason), or the file is refused. docs/deepspeed.md
// lists all of them.
//
// A value in the file has the same priority as one in code, flags or variables: two that differ are
// a ConfigError that names both. "auto" leaves a value to the others.
//
// Accelerate's DeepSpeed without a file counts as one: kDeepSpeedWithoutFile.
//
// FormatError: not JSON, not an object, a key twice. ConfigError: keys that DeepSpeed does not know
// (all of them, each with the nearest known one), values of another type, sizes that do not
// multiply. UnsupportedError: unsupported keys, all of them with their reasons.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_keys.h>
#include <tessera/accelerate/settings/import_report.h>

namespace tessera::accelerate {

// null, a truth value, a number, a text ("auto"), a list of numbers.
using DeepSpeedValue = std::variant<std::monostate, bool, double, std::string, std::vector<double>>;

// "optimizer" or "scheduler": read by accelerate/deepspeed.h.
struct DeepSpeedSection {
  std::string type;
  std::vector<std::pair<std::string, DeepSpeedValue>> params = {};
};

struct DeepSpeedConfig {
  struct Said {
    std::string setting, text;
    std::string place;  // "zero_optimization.stage"
  };
  std::string name;               // of the file
  std::vector<Said> says;         // with the priority of code, flags and variables
  std::vector<Said> implies;      // unless set elsewhere
  std::vector<ImportLine> lines;  // each key, in the order of the file
  // From the sections fp16 and bf16; nothing for "auto" or a missing key.
  std::optional<bool> fp16 = {}, bf16 = {};
  bool torch_autocast = false;
  std::optional<int64_t> train_batch_size = {}, micro_batch_size = {}, accumulation_steps = {};
  std::optional<DeepSpeedSection> optimizer = {}, scheduler = {};

  Import import() const;  // for reports: the settings that follow from the file alone
};

// A path, or the JSON object itself.
DeepSpeedConfig read_deepspeed_config(const std::string& path_or_object);
// From the text of a file named `name`.
DeepSpeedConfig parse_deepspeed_config(const std::string& text, const std::string& name);

// All keys that are read, "zero_optimization.stage", for documents.
std::vector<std::string> deepspeed_keys();

void apply_deepspeed(const DeepSpeedConfig& config, Settings& settings);

// train = micro * steps * ranks. Missing values follow from the others, and steps from the setting
// if it is set. `micro` is empty if the file sets neither it nor train_batch_size: then it is the
// loader's.
struct BatchSizes {
  std::optional<int64_t> train, micro;
  int64_t steps = 1;
  std::string arithmetic = {};  // "train_batch_size 512 = train_micro_batch_size_per_gpu 16 x ..."
};
BatchSizes batch_sizes(const DeepSpeedConfig& config, const Settings& settings, int64_t ranks);

}  // namespace tessera::accelerate
