// A DeepSpeed configuration (ds_config.json) as settings.
// read_deepspeed_config() reads it, apply_deepspeed() adds to the settings what nobody has said,
// and batch_sizes() does the arithmetic of batches: 512 = 16 x 4 x 8. resolve() calls the first
// two.
//
// Every key of the file is accounted for in `lines`: it became a setting, it says what is the case
// anyway, it tunes something that there is no need to tune here (and the line says why), or the
// file is refused. docs/deepspeed.md lists all of them.
//
// A value in the file is as firm as one in code, flags or variables: two of them that differ are a
// ConfigError which names both. "auto" leaves a value to the others.
//
// Accelerate's DeepSpeed without a file is one, too: kDeepSpeedWithoutFile.
//
// FormatError: no JSON, no object, a key twice. ConfigError: keys that DeepSpeed does not know
// (all of them, each with the nearest known one), values of another kind, sizes that do not
// multiply. UnsupportedError: keys that cannot be served, all of them with their reasons.
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
  std::vector<Said> says;         // as firm as what code, flags and variables say
  std::vector<Said> implies;      // where nobody else says it
  std::vector<ImportLine> lines;  // each key, in the order of the file
  // Of the sections fp16 and bf16; nothing: "auto", or no word on it.
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

// train = micro * steps * ranks. What the file leaves open follows from the rest, and steps from
// the setting where somebody has said it. `micro` is nothing where the file says neither it nor
// train_batch_size: then it is the loader's.
struct BatchSizes {
  std::optional<int64_t> train, micro;
  int64_t steps = 1;
  std::string arithmetic = {};  // "train_batch_size 512 = train_micro_batch_size_per_gpu 16 x ..."
};
BatchSizes batch_sizes(const DeepSpeedConfig& config, const Settings& settings, int64_t ranks);

}  // namespace tessera::accelerate
