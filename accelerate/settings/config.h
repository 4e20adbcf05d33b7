// Every setting of a training: one table, from which come the flags of `tessera launch`, the
// environment variables, the JSON file, `tessera config` and docs/configuration.md.
//
//     CodeSettings code;
//     code.set("gradient_accumulation_steps", options.gradient_accumulation_steps);  // optional
//     const Settings settings = resolve({.code = code});
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

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/precision/fp8_recipe.h>

namespace tessera {

// In what prepared models compute.
enum class Precision : uint8_t {
  kNo,  // as the model is
  kBF16,
  kFP16,  // f16 with loss scaling
  kFP8,   // bf16, and linear layers in float8 by a recipe (precision/fp8_recipe.h)
};

// How that precision comes about (precision/policy.h).
enum class PrecisionPolicy : uint8_t {
  kAutocast,  // f32 parameters, each op by its record
  kBoundary,  // f32 parameters, cast with the inputs where the model is entered
  kPure,      // parameters in 16 bits, their f32 masters in the optimizer, gradients in f32
};

// What one step of a prepared schedule is.
enum class ScheduleUnit : uint8_t {
  kUpdates,      // an optimizer update, whatever the number of ranks
  kHuggingFace,  // Accelerate's: each update counts once for every rank, unless batches are split
};

// What a micro-batch counts for in the gradient of its window.
enum class LossWeighting : uint8_t {
  kSamples,  // its samples or tokens: the window's gradient is that of their mean
  // Accelerate's: one part in gradient_accumulation_steps, also where the window or the batch is
  // shorter, and every rank as much as the others.
  kHuggingFace,
};

// What calls of prepared models return under mixed precision.
enum class OutputPrecision : uint8_t {
  kF32,       // results that left the model in 16 bits are converted
  kComputed,  // as they were computed
};

// The least weight of lines that a Logger writes.
enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError, kOff };

}  // namespace tessera

namespace tessera::accelerate {

using distributed::Environment;

// Where a value came from; the later ones win.
enum class Source : uint8_t { kDefault, kFile, kAccelerate, kEnvironment, kLaunchFlag, kCode };

struct Origin {
  Source source = Source::kDefault;
  std::string name = {};  // the variable, the flag, the file
  // "default", "file job.json", "TESSERA_SEED", "--seed", "code"
  std::string describe() const;
};

template <class T>
struct Resolved {
  T value{};
  Origin origin = {};
  operator const T&() const { return value; }
};

enum class CommHook : uint8_t { kNone, kFP16, kBF16, kPowerSgd, kBatchedPowerSgd };
enum class CommWrapper : uint8_t { kNone, kFP16, kBF16 };
enum class StateDictType : uint8_t { kSharded, kFull };
// What several ranks hold of a model that they train together.
enum class Sharding : uint8_t {
  kDdp,    // everything
  kZero1,  // a part of the optimizer states
  kZero2,  // and of the gradients
  kZero3,  // and of the parameters
  kFsdp,   // the same; the root's parameters stay gathered until its backward
};
using precision::AmaxAlgorithm;
using precision::Fp8Filter;
using precision::Fp8Format;
using precision::Fp8Scaling;
enum class TransportChoice : uint8_t { kAuto, kShared, kTcp };

struct DeepSpeedConfig;  // deepspeed_config.h

// All values, each with its origin. The defaults stand here and nowhere else; what each setting
// means stands in the table (config_schema.cpp) and in docs/configuration.md.
struct Settings {
  // training
  Resolved<Precision> mixed_precision{Precision::kNo};
  Resolved<PrecisionPolicy> precision_policy{PrecisionPolicy::kAutocast};
  Resolved<OutputPrecision> output_precision{OutputPrecision::kF32};
  Resolved<int64_t> gradient_accumulation_steps{1};
  Resolved<double> gradient_clipping{0};
  Resolved<bool> cuda_graphs{true};
  Resolved<LossWeighting> loss_weighting{LossWeighting::kSamples};
  Resolved<bool> sync_with_dataloader{true};
  Resolved<bool> sync_each_batch{false};
  Resolved<bool> step_schedule_with_optimizer{true};
  Resolved<ScheduleUnit> schedule_unit{ScheduleUnit::kUpdates};
  Resolved<std::optional<int64_t>> seed;
  Resolved<bool> cpu{false};
  Resolved<std::string> device;
  Resolved<bool> debug{false};
  Resolved<LogLevel> log_level{LogLevel::kWarning};

  // data
  Resolved<bool> split_batches{false};
  Resolved<std::optional<bool>> dispatch_batches;
  Resolved<bool> even_batches{true};
  Resolved<std::optional<int64_t>> data_seed;

  // project
  Resolved<std::string> project_dir{"."};
  Resolved<std::string> logging_dir;
  Resolved<bool> automatic_checkpoint_naming{false};
  Resolved<int64_t> total_limit{0};
  Resolved<int64_t> keep_every{0};
  Resolved<int64_t> keep_best{0};
  Resolved<bool> asynchronous_checkpoints{false};
  Resolved<std::vector<std::string>> log_with;

  // ddp
  Resolved<double> ddp_bucket_cap_mb{25};
  Resolved<double> ddp_first_bucket_mb{1};
  Resolved<bool> ddp_broadcast_buffers{true};
  Resolved<bool> ddp_gradient_as_bucket_view{true};
  Resolved<bool> ddp_init_sync{true};
  Resolved<CommHook> ddp_comm_hook{CommHook::kNone};
  Resolved<CommWrapper> ddp_comm_wrapper{CommWrapper::kNone};
  Resolved<int64_t> ddp_power_sgd_rank{1};
  Resolved<int64_t> ddp_power_sgd_start_step{1000};

  // grad scaler
  Resolved<double> scaler_init_scale{65536};
  Resolved<double> scaler_growth_factor{2};
  Resolved<double> scaler_backoff_factor{0.5};
  Resolved<int64_t> scaler_growth_interval{2000};
  Resolved<double> scaler_min_scale{0x1p-32};
  Resolved<int64_t> scaler_hysteresis{1};
  Resolved<bool> scaler_consecutive_hysteresis{false};
  Resolved<bool> scaler_enabled{true};
  Resolved<bool> scaler_on_device{false};

  // parallelism
  Resolved<int64_t> dp_replicate_size{1};
  Resolved<int64_t> dp_shard_size{1};
  Resolved<int64_t> tp_size{1};
  Resolved<int64_t> cp_size{1};
  Resolved<int64_t> sp_size{1};
  Resolved<int64_t> pp_size{1};

  // sharding
  Resolved<Sharding> sharding{Sharding::kDdp};
  Resolved<int64_t> zero_stage{0};
  Resolved<std::string> deepspeed_config_file;
  Resolved<bool> fsdp_reshard_after_forward{true};
  Resolved<bool> offload_parameters{false};
  Resolved<bool> offload_optimizer{false};
  Resolved<bool> fsdp_activation_checkpointing{false};
  Resolved<bool> fsdp_cpu_ram_efficient_loading{false};
  Resolved<std::vector<std::string>> fsdp_wrap_modules;
  Resolved<int64_t> fsdp_min_num_params{0};
  Resolved<StateDictType> fsdp_state_dict_type{StateDictType::kSharded};
  Resolved<std::string> fsdp_ignored_modules;

  // fp8
  Resolved<Fp8Scaling> fp8_recipe{Fp8Scaling::kTensorwise};
  Resolved<Fp8Filter> fp8_filter{Fp8Filter::kDefault};
  Resolved<std::vector<std::string>> fp8_exclude;
  Resolved<bool> fp8_strict{false};
  Resolved<bool> fp8_in_evaluation{true};
  Resolved<bool> fp8_weight_gradient{true};
  Resolved<Fp8Format> fp8_format{Fp8Format::kHybrid};
  Resolved<int64_t> fp8_margin{0};
  Resolved<int64_t> fp8_amax_history_len{1024};
  Resolved<AmaxAlgorithm> fp8_amax_compute_algo{AmaxAlgorithm::kMostRecent};

  // launch
  Resolved<std::optional<int64_t>> ranks;
  Resolved<std::optional<int64_t>> nodes;
  Resolved<std::string> hostfile;
  Resolved<std::optional<int64_t>> threads;
  Resolved<bool> oversubscribe{false};
  Resolved<int64_t> restarts{0};
  Resolved<std::vector<std::string>> restart_ranks;
  Resolved<double> collective_timeout{600};
  Resolved<std::optional<double>> first_step_timeout;
  Resolved<std::optional<double>> save_timeout;
  Resolved<double> init_timeout{600};
  Resolved<std::optional<double>> job_timeout;
  Resolved<double> start_timeout{60};
  Resolved<double> grace{30};
  Resolved<double> wait_warning{30};
  Resolved<TransportChoice> transport{TransportChoice::kAuto};
  Resolved<std::string> interface;
  Resolved<std::string> store_host;
  Resolved<int64_t> store_port{0};
  Resolved<std::string> dump_dir;
  Resolved<std::string> remote_agent;

  // What deepspeed_config_file holds, where resolve() has read it: its settings are among those
  // above, its sections of optimizer and scheduler and its batch sizes are not.
  std::shared_ptr<const DeepSpeedConfig> deepspeed;
};

// ---- The table

// A value whose type the setting's row knows: an enumerator is its position in the row's names.
struct EnumField {
  uint8_t* value;
  Origin* origin;
};
using Field =
    std::variant<Resolved<bool>*, Resolved<int64_t>*, Resolved<double>*, Resolved<std::string>*,
                 Resolved<std::vector<std::string>>*, Resolved<std::optional<bool>>*,
                 Resolved<std::optional<int64_t>>*, Resolved<std::optional<double>>*, EnumField>;

struct Setting {
  std::string_view key;      // "mixed_precision": in files, as the flag --mixed-precision
  std::string_view section;  // "training", "data", ...: of documents and questionnaires
  Field (*field)(Settings&);
  std::string_view help;
  std::vector<std::string_view> names = {};    // of an enum, in its order
  double least = 0, most = 0;                  // of a number; both 0: any
  std::vector<std::string_view> aliases = {};  // other keys with the same meaning
  // Variables that Accelerate reads or writes for it.
  std::vector<std::string_view> accelerate = {};
  std::string_view short_flag = {};  // "-n"
  // What differs from the default is not available yet.
  bool planned = false;
  std::string_view instead = {};  // of a planned one: why, and what helps meanwhile

  std::string_view type() const;           // "bool", "int", "number", "text", "choice", "list"
  bool optional() const;                   // may have no value
  std::string environment() const;         // "TESSERA_MIXED_PRECISION"
  std::string flag() const;                // "--mixed-precision"
  std::vector<std::string> flags() const;  // with its short form and aliases
};

std::span<const Setting> schema();
// By key or alias, hyphens as underscores; null: there is none.
const Setting* find_setting(std::string_view key);
// The key or alias with the fewest letters to change, add or take away; empty where that are more
// than `most` (by default a third of its letters).
std::string nearest_key(std::string_view key, std::optional<size_t> most = {});

// Text of a value: "bf16", "true", "0.5", "a,b"; empty for no value. parse() reads what text()
// writes, for every setting.
std::string text(const Setting& setting, const Settings& settings);
const Origin& origin(const Setting& setting, const Settings& settings);
// Reads a value from text; ConfigError that names `origin` and what is possible. Truth values are
// y yes t true on 1, n no f false off 0: nothing else is true.
void assign(const Setting& setting, Settings& settings, std::string_view text,
            const Origin& origin);

bool parse_bool(std::string_view source, std::string_view text);

// ---- Sources

// Texts by key, in the order given.
using SettingTexts = std::vector<std::pair<std::string, std::string>>;

// What the program itself says. Only optionals that hold something count.
class CodeSettings {
 public:
  // Throws ConfigError for a key that is not in the table or a value that does not fit.
  template <class T>
  CodeSettings& set(std::string_view key, const T& value) {
    if constexpr (requires { value.has_value(), *value; }) {
      if (value) set(key, *value);
    } else if constexpr (std::is_same_v<T, bool>) {
      add(key, value ? "true" : "false");
    } else if constexpr (std::is_enum_v<T>) {
      add_enum(key, static_cast<size_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      add(key, std::to_string(value));
    } else if constexpr (std::is_floating_point_v<T>) {
      add_number(key, static_cast<double>(value));
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      add(key, std::string(std::string_view(value)));
    } else {
      std::string list;
      for (const auto& item : value) list += (list.empty() ? "" : ",") + std::string(item);
      add(key, list);
    }
    return *this;
  }
  const SettingTexts& texts() const { return texts_; }

 private:
  void add(std::string_view key, std::string text);
  void add_enum(std::string_view key, size_t position);
  void add_number(std::string_view key, double value);
  SettingTexts texts_;
};

struct ResolveOptions {
  CodeSettings code = {};
  Environment environment = distributed::process_environment();
  std::optional<std::string> file = {};  // nothing: see above; "": none
  SettingTexts flags = {};               // of a command line that is being read (the launcher)
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
void check_consistent(const Settings& settings);
void check_available(const Settings& settings);

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
