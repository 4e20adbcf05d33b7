// Settings from their sources.
#include <tessera/accelerate/settings/config.h>

#include <algorithm>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/settings/deepspeed_keys.h>
#include <tessera/accelerate/settings/fsdp_words.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/megatron_keys.h>
#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kSettings = "settings";

constexpr std::string_view kOfDelayedScales[] = {"fp8_margin", "fp8_amax_history_len",
                                                 "fp8_amax_compute_algo"};

const std::string* find(const Environment& environment, std::string_view name) {
  const auto at = environment.find(name);
  return at == environment.end() || at->second.empty() ? nullptr : &at->second;
}

std::string suggestion(std::string_view key) {
  const std::string near = nearest_key(key);
  return near.empty() ? "; docs/configuration.md lists all settings"
                      : "; did you mean \"" + near + "\"?";
}

const Setting& known(std::string_view key, std::string_view source) {
  const Setting* setting = find_setting(key);
  TS_CHECK_AS(ConfigError, setting != nullptr, kSettings, source, " has the setting \"", key,
              "\", which is unknown", suggestion(key));
  return *setting;
}

// One source's word on one setting.
struct Candidate {
  const Setting* setting;
  std::string text;
  Origin origin;
};

std::string value_of(const Candidate& candidate) {
  Settings scratch;
  assign(*candidate.setting, scratch, candidate.text, candidate.origin);
  return text(*candidate.setting, scratch);
}

// Two spellings of one setting, both given: they have to say the same.
void check_same(const Candidate& first, const Candidate& second) {
  TS_CHECK_AS(ConfigError, value_of(first) == value_of(second), kSettings, first.origin.name, "=",
              first.text, " contradicts ", second.origin.name, "=", second.text,
              "; both are the setting \"", first.setting->key, "\": unset one of them");
}

// Variables of the library, its launcher and its tests that are no settings.
bool is_internal(std::string_view name) {
  constexpr std::string_view kNames[] = {"RANK",
                                         "WORLD_SIZE",
                                         "LOCAL_RANK",
                                         "LOCAL_WORLD_SIZE",
                                         "NODE",
                                         "NODE_OF_RANK",
                                         "STORE",
                                         "STORE_TOKEN",
                                         "RESTART_COUNT",
                                         "LAUNCH_SETTINGS",
                                         "CONFIG_FILE",
                                         "NODE_NAME",
                                         "DATA_DIR",
                                         "ISA",
                                         "SYNC",
                                         "NCCL",
                                         "EMULATED_DEVICES",
                                         "EMULATION_SEED"};
  return name.starts_with("TEST_") ||
         std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// A variable that was meant as a setting: one of its sections, or a letter or two from a setting.
// Programs have TESSERA_ variables of their own, which are left alone.
void check_variables(const Environment& environment) {
  constexpr std::string_view kPrefix = "TESSERA_";
  for (auto at = environment.lower_bound(kPrefix);
       at != environment.end() && at->first.starts_with(kPrefix); ++at) {
    const std::string_view name = std::string_view(at->first).substr(kPrefix.size());
    if (is_internal(name) || find_setting(name) != nullptr || at->second.empty()) continue;
    const bool of_a_section = name.starts_with("DDP_") || name.starts_with("SCALER_") ||
                              name.starts_with("FSDP_") || name.starts_with("FP8_");
    const bool close = name.size() > 3 && !nearest_key(name, name.size() < 8 ? 1 : 2).empty();
    TS_CHECK_AS(ConfigError, !of_a_section && !close, kSettings, at->first,
                " looks like a setting but is none", suggestion(name));
  }
}

class Sources {
 public:
  explicit Sources(const ResolveOptions& options)
      : environment_(options.environment), file_(config_file(options)), code_(options.code) {
    read_launch_settings();
    if (!file_.empty()) {
      for (auto& [key, text] : read_config_file(file_)) {
        put(file_values_, {&known(key, file_), text, {Source::kFile, file_}});
      }
    }
    read_accelerate();
    read_tessera();
    for (const auto& [key, text] : options.flags) {
      const Setting& setting = known(key, "the command line");
      put(flags_, {&setting, text, {Source::kLaunchFlag, setting.flag()}});
    }
  }

  Settings settings() const {
    Settings result;
    for (const auto* source : {&file_values_, &accelerate_, &tessera_, &flags_}) {
      for (const Candidate& candidate : *source) {
        assign(*candidate.setting, result, candidate.text, candidate.origin);
      }
    }
    take_options(result, code_);
    if (deepspeed_ && result.deepspeed_config_file.origin.source == Source::kDefault) {
      result.deepspeed_config_file = {std::string(kDeepSpeedWithoutFile),
                                      {Source::kAccelerate, std::string(kDeepSpeedSwitch)}};
    }
    for (const Candidate& ours : tessera_) {
      for (const Candidate& theirs : accelerate_) {
        if (ours.setting == theirs.setting) check_same(ours, theirs);
      }
    }
    apply_stage(result);
    apply_recipe(result);
    return result;
  }

 private:
  // Numbers that delayed scales alone have are of TransformerEngine's recipe, Accelerate's first.
  static void apply_recipe(Settings& settings) {
    if (settings.fp8_recipe.origin.source != Source::kDefault) return;
    for (const std::string_view key : kOfDelayedScales) {
      const Setting& setting = *find_setting(key);
      if (is_default(setting, settings)) continue;
      settings.fp8_recipe = {Fp8Scaling::kDelayed, origin(setting, settings)};
    }
  }

  using Candidates = std::vector<Candidate>;

  static void put(Candidates& candidates, Candidate candidate) {
    for (const Candidate& other : candidates) {
      if (other.setting == candidate.setting) check_same(other, candidate);
    }
    candidates.push_back(std::move(candidate));
  }

  void read_launch_settings() {
    const std::string* text = find(environment_, kLaunchSettings);
    if (text == nullptr) return;
    const auto json = nlohmann::json::parse(*text, nullptr, false);
    TS_CHECK_AS(ConfigError, json.is_object() && json.contains("flags") && json.contains("written"),
                kSettings, kLaunchSettings, " is not what tessera launch writes: \"", *text, "\"");
    for (const auto& [key, value] : json.at("flags").items()) {
      const Setting& setting = known(key, kLaunchSettings);
      put(flags_, {&setting, value.get<std::string>(), {Source::kLaunchFlag, setting.flag()}});
    }
    // What the launcher wrote repeats flags, the file or defaults.
    for (const auto& name : json.at("written")) environment_.erase(name.get<std::string>());
  }

  void read_tessera() {
    // The agent says on how many nodes the job is; a setting it is only before the launch.
    if (find(environment_, "TESSERA_STORE") != nullptr) environment_.erase("TESSERA_NODES");
    check_variables(environment_);
    for (const Setting& setting : schema()) {
      const auto look = [&](std::string_view key) {
        const std::string name = "TESSERA_" + upper(key);
        const std::string* text = find(environment_, name);
        if (text != nullptr) put(tessera_, {&setting, *text, {Source::kEnvironment, name}});
      };
      look(setting.key);
      for (const std::string_view alias : setting.aliases) look(alias);
    }
  }

  // Accelerate's switches: variables of a family count where its switch is on.
  bool switched_on(std::string_view name) const {
    const std::string* text = find(environment_, name);
    return text != nullptr && parse_bool(name, *text);
  }
  void read_accelerate() {
    const bool fsdp = switched_on("ACCELERATE_USE_FSDP");
    const bool deepspeed = deepspeed_ = switched_on(kDeepSpeedSwitch);
    const bool mesh = switched_on("ACCELERATE_USE_PARALLELISM_CONFIG");
    for (const Setting& setting : schema()) {
      for (const std::string_view name : setting.accelerate) {
        if (name.starts_with("FSDP_") && (!fsdp || follows_from_several(setting))) continue;
        if (name.starts_with("ACCELERATE_DEEPSPEED_") && !deepspeed) continue;
        if (name.starts_with("PARALLELISM_CONFIG_") && !mesh) continue;
        if (name.starts_with(kAccelerateFp8) && of_another_backend()) continue;
        const std::string* text = find(environment_, name);
        if (text == nullptr || says_nothing(name, *text)) continue;
        put(accelerate_, {&setting, *text, {Source::kAccelerate, std::string(name)}});
      }
    }
    if (deepspeed) read_deepspeed();
    if (fsdp) read_fsdp();
    if (switched_on(kMegatronSwitch)) read_megatron();
    read_fp8();
  }

  // What Accelerate's launcher exports where nobody has said anything.
  static bool says_nothing(std::string_view name, std::string_view text) {
    if (name == "ACCELERATE_DEEPSPEED_CONFIG_FILE") return lower(text) == "none";
    if (name == "ACCELERATE_FP8_FORMAT") return lower(text) == "hybrid";
    return (name == "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" ||
            name == "ACCELERATE_GRADIENT_CLIPPING") &&
           (lower(text) == "auto" || lower(text) == "none");
  }
  // Accelerate's launcher exports the flags of every backend, also those that nobody gave;
  // TransformerEngine's are read where it, or no backend, is asked for.
  static constexpr std::string_view kAccelerateFp8 = "ACCELERATE_FP8_";
  std::string fp8_backend() const {
    const std::string* text = find(environment_, "ACCELERATE_FP8_BACKEND");
    return text == nullptr ? "" : lower(*text);
  }
  bool of_another_backend() const { return fp8_backend() == "ao" || fp8_backend() == "msamp"; }

  // What of fp8 is no setting by itself.
  void read_fp8() {
    const std::string* precision = find(environment_, "ACCELERATE_MIXED_PRECISION");
    if (precision == nullptr || lower(*precision) != "fp8") return;
    const std::string backend = fp8_backend();
    const auto recipe = [&](const char* name) {
      put(accelerate_,
          {find_setting("fp8_recipe"), name, {Source::kAccelerate, "ACCELERATE_FP8_BACKEND"}});
    };
    TS_CHECK_AS(UnsupportedError, backend != "msamp", kSettings, "ACCELERATE_FP8_BACKEND=", backend,
                ": MS-AMP keeps gradients and optimizer states in fp8, and is developed no more; "
                "say te or ao");
    TS_CHECK_AS(ConfigError, backend.empty() || backend == "te" || backend == "ao", kSettings,
                "ACCELERATE_FP8_BACKEND has to be te or ao; got \"", backend, "\"");
    if (backend == "te") recipe("delayed");
    if (backend == "ao") recipe("tensorwise");
    if (of_another_backend()) return;
    const std::string* interval = find(environment_, "ACCELERATE_FP8_INTERVAL");
    TS_CHECK_AS(UnsupportedError, interval == nullptr || *interval == "1", kSettings,
                "ACCELERATE_FP8_INTERVAL=", interval == nullptr ? "" : *interval,
                ": scales follow each step; say 1, or unset it");
    for (const char* name : {"ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD"}) {
      TS_CHECK_AS(UnsupportedError, !switched_on(name), kSettings, name,
                  ": of the three products only that of the weight's gradient can be left out; "
                  "unset it");
    }
    TS_CHECK_AS(UnsupportedError, !switched_on("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"), kSettings,
                "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING: blocks of 32 are of a later GPU than "
                "Hopper; unset it, and set fp8_recipe to blockwise for larger ones");
    if (switched_on("ACCELERATE_FP8_OVERRIDE_WGRAD")) {
      put(accelerate_, {find_setting("fp8_weight_gradient"),
                        "false",
                        {Source::kAccelerate, "ACCELERATE_FP8_OVERRIDE_WGRAD"}});
    }
  }

  void read_deepspeed() {
    for (const auto& [name, setting] :
         {std::pair{"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer"},
          std::pair{"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_parameters"}}) {
      const std::string* text = find(environment_, name);
      if (text == nullptr || lower(*text) == "none") continue;
      TS_CHECK_AS(UnsupportedError, lower(*text) == "cpu", kSettings, name, "=", *text,
                  ": nothing is kept on drives; say cpu or none, or unset it");
      put(accelerate_, {find_setting(setting), "true", {Source::kAccelerate, name}});
    }
  }

  void read_megatron() {
    bool clips = find(environment_, "ACCELERATE_GRADIENT_CLIPPING") != nullptr;
    for (const MegatronKey& key : megatron_keys()) {
      const std::string name = upper(key.key);
      const std::string* text = find(environment_, name);
      if (text == nullptr || lower(*text) == "none") continue;
      const auto means = [&](std::string_view setting, std::string_view value) {
        put(accelerate_, {find_setting(setting), std::string(value), {Source::kAccelerate, name}});
      };
      if (key.key == kMegatronShards) {
        if (parse_bool(name, *text)) means("sharding", "zero1");
      } else if (!key.setting.empty()) {
        means(key.setting, *text);
        clips = clips || key.setting == "gradient_clipping";
      } else {
        TS_CHECK_AS(UnsupportedError, !key.alters || lower(*text) == key.harmless, kSettings, name,
                    "=", *text, ": ", key.why, "; say ", key.harmless, ", or unset it");
      }
    }
    if (clips) return;
    put(accelerate_, {find_setting("gradient_clipping"),
                      std::string(kMegatronClipping),
                      {Source::kAccelerate, std::string(kMegatronSwitch)}});
  }

  // See read_fsdp_words().
  static bool follows_from_several(const Setting& setting) {
    return setting.key == "fsdp_reshard_after_forward" || setting.key == "fsdp_wrap_modules" ||
           setting.key == "fsdp_min_num_params";
  }
  static std::string fsdp_variable(std::string_view word) { return "FSDP_" + upper(word); }
  void read_fsdp() {
    FsdpWords words;
    for (const std::string_view word :
         {"version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy",
          "transformer_cls_to_wrap", "min_num_params", "activation_checkpointing",
          "activation_checkpointing_offload"}) {
      if (const std::string* text = find(environment_, fsdp_variable(word))) {
        words.emplace(word, *text);
      }
    }
    std::string sharding = "fsdp";
    read_fsdp_words(words, fsdp_variable,
                    [&](std::string_view setting, std::string_view text, std::string_view word) {
                      if (setting == "sharding") {
                        sharding = text;
                        return;
                      }
                      put(accelerate_, {find_setting(setting),
                                        std::string(text),
                                        {Source::kAccelerate, fsdp_variable(word)}});
                    });
    put(accelerate_,
        {find_setting("sharding"), sharding, {Source::kAccelerate, "ACCELERATE_USE_FSDP"}});
  }

  Environment environment_;
  std::string file_;
  Candidates file_values_, accelerate_, tessera_, flags_;
  bool deepspeed_ = false;  // Accelerate's switch
  const AcceleratorOptions& code_;
};

}  // namespace

std::string default_config_file(const Environment& environment) {
  if (const std::string* folder = find(environment, "XDG_CONFIG_HOME")) {
    return *folder + "/tessera/config.json";
  }
  const std::string* home = find(environment, "HOME");
  return home == nullptr ? "" : *home + "/.config/tessera/config.json";
}

Settings merge(const ResolveOptions& options) { return Sources(options).settings(); }

void apply_stage(Settings& settings) {
  const auto& [stage, origin] = settings.zero_stage;
  if (origin.source == Source::kDefault || settings.sharding.origin.source != Source::kDefault) {
    return;
  }
  settings.sharding = {static_cast<Sharding>(stage), origin};
}

void check_consistent(const Settings& settings, bool code_follows) {
  const auto open = [&](const Setting& setting) {
    return code_follows && setting.field.take != nullptr &&
           origin(setting, settings).source == Source::kDefault;
  };
  const auto contradict = [&](bool wrong, std::string_view a, std::string_view b,
                              std::string_view why) {
    const Setting& first = *find_setting(a);
    const Setting& second = *find_setting(b);
    if (open(first) || open(second)) return;
    TS_CHECK_AS(ConfigError, !wrong, kSettings, a, "=", text(first, settings), " (",
                origin(first, settings).describe(), ") contradicts ", b, "=",
                text(second, settings), " (", origin(second, settings).describe(), "): ", why);
  };
  for (const std::string_view key : {"total_limit", "keep_every", "keep_best"}) {
    contradict(text(*find_setting(key), settings) != "0" && !settings.automatic_checkpoint_naming,
               key, "automatic_checkpoint_naming",
               "only folders that are named automatically are counted; set it to true");
  }
  const CommHook hook = settings.ddp_comm_hook.value;
  const bool power_sgd = hook == CommHook::kPowerSgd || hook == CommHook::kBatchedPowerSgd;
  for (const std::string_view key : {"ddp_power_sgd_rank", "ddp_power_sgd_start_step"}) {
    const Setting& setting = *find_setting(key);
    contradict(!is_default(setting, settings) && !power_sgd, key, "ddp_comm_hook",
               "it is that of power_sgd and batched_power_sgd alone");
  }
  contradict(settings.ddp_comm_wrapper.value != CommWrapper::kNone && !power_sgd,
             "ddp_comm_wrapper", "ddp_comm_hook",
             hook == CommHook::kNone
                 ? "there is no hook to wrap; to send gradients in 16 bits, set "
                   "ddp_comm_hook to fp16 or bf16"
                 : "the hook casts already; leave the wrapper out");
  contradict(settings.precision_policy.value != PrecisionPolicy::kAutocast &&
                 settings.mixed_precision.value == Precision::kNo,
             "precision_policy", "mixed_precision", "nothing is cast in f32; set bf16 or fp16");
  contradict(settings.precision_policy.value == PrecisionPolicy::kPure &&
                 !settings.ddp_gradient_as_bucket_view,
             "precision_policy", "ddp_gradient_as_bucket_view",
             "f32 gradients of 16-bit parameters lie in the buckets; leave it true");
  const bool fp8 = settings.mixed_precision.value == Precision::kFP8;
  contradict(settings.precision_policy.value != PrecisionPolicy::kAutocast && fp8,
             "precision_policy", "mixed_precision",
             "weights are quantised from f32 parameters; leave it at autocast");
  for (const std::string_view key : kOfDelayedScales) {
    const Setting& setting = *find_setting(key);
    contradict(
        fp8 && !is_default(setting, settings) && settings.fp8_recipe.value != Fp8Scaling::kDelayed,
        key, "fp8_recipe", "it is that of delayed scales alone");
  }
  contradict(fp8 && settings.fp8_format.value == Fp8Format::kHybrid &&
                 settings.fp8_format.origin.source != Source::kDefault &&
                 settings.fp8_recipe.value != Fp8Scaling::kTensorwise &&
                 settings.fp8_recipe.value != Fp8Scaling::kDelayed,
             "fp8_format", "fp8_recipe", "scales of rows and blocks are for e4m3 everywhere");
  contradict(settings.scaler_backoff_factor > settings.scaler_growth_factor,
             "scaler_backoff_factor", "scaler_growth_factor", "the scale could only grow");
  contradict(
      (settings.scaler_backoff_factor == 1.0) != (settings.scaler_growth_factor == 1.0),
      "scaler_backoff_factor", "scaler_growth_factor",
      "a scale that only grows, or only falls, ends nowhere; make both 1 for one that stays");
  contradict(settings.scaler_min_scale > settings.scaler_init_scale, "scaler_min_scale",
             "scaler_init_scale", "the scale would begin below its least value");
  contradict(settings.scaler_on_device && settings.scaler_hysteresis > 1, "scaler_on_device",
             "scaler_hysteresis", "on the GPU the scale falls at each overflow");
  contradict(!settings.restart_ranks.value.empty() && settings.restarts == 0, "restart_ranks",
             "restarts", "there are no restarts; give --restarts K with --restart-ranks");
  contradict(settings.cpu && settings.device.value.starts_with("cuda"), "cpu", "device",
             "one asks for the CPU, the other for a GPU; leave one out");
  contradict(settings.cp_size > 1 && settings.sp_size > 1, "cp_size", "sp_size",
             "both split sequences; choose one");
  for (const std::string_view key : {"tp_size", "cp_size"}) {
    const bool split = text(*find_setting(key), settings) != "1";
    contradict(split && settings.dp_replicate_size > 1 && settings.dp_shard_size == 1, key,
               "dp_replicate_size",
               "replicas alone do not combine with it; shard too (dp_shard_size > 1)");
  }
  const Sharding sharding = settings.sharding.value;
  const bool shards_parameters = sharding == Sharding::kZero3 || sharding == Sharding::kFsdp;
  contradict(settings.zero_stage.origin.source != Source::kDefault &&
                 settings.zero_stage != std::min<int64_t>(static_cast<int64_t>(sharding), 3),
             "zero_stage", "sharding", "they name different modes; leave one out");
  contradict(settings.tp_size > 1 && settings.precision_policy.value == PrecisionPolicy::kPure &&
                 settings.mixed_precision.value != Precision::kNo,
             "tp_size", "precision_policy",
             "masters of parameters that are cut along tp are not built; take autocast");
  contradict(settings.tp_size > 1 && settings.mixed_precision.value == Precision::kFP8, "tp_size",
             "mixed_precision", "linear layers that are cut along tp run in bf16; take bf16");
  contradict(settings.tp_size == 1 && !settings.tp_sequence, "tp_sequence", "tp_size",
             "it is of several ranks that share a layer; leave it out");
  for (const std::string_view key : {"dp_replicate_size", "dp_shard_size"}) {
    contradict(text(*find_setting(key), settings) != "1" && !shards_parameters, key, "sharding",
               "only sharded parameters lie on a mesh of two axes; set sharding to fsdp or zero3");
  }
  const bool has_units = shards_parameters || settings.fsdp_activation_checkpointing;
  for (const std::string_view key : {"fsdp_reshard_after_forward", "fsdp_ignored_modules",
                                     "fsdp_wrap_modules", "fsdp_min_num_params"}) {
    const Setting& setting = *find_setting(key);
    const bool of_units = key == "fsdp_wrap_modules" || key == "fsdp_min_num_params";
    contradict(!is_default(setting, settings) && !(of_units ? has_units : shards_parameters), key,
               "sharding",
               of_units ? "it names units, which fsdp, zero3 and fsdp_activation_checkpointing have"
                        : "it is that of fsdp and zero3 alone");
  }
  contradict(settings.offload_parameters && !shards_parameters, "offload_parameters", "sharding",
             "only fsdp and zero3 cut parameters; zero1 and zero2 have offload_optimizer");
  contradict(settings.offload_optimizer && sharding == Sharding::kDdp, "offload_optimizer",
             "sharding", "what lies with the host is cut among the ranks; set sharding to zero1");
  contradict(settings.offload_parameters && !settings.offload_optimizer &&
                 settings.offload_optimizer.origin.source != Source::kDefault,
             "offload_parameters", "offload_optimizer",
             "an optimizer works where its parameters lie; leave the second out");
  for (const std::string_view key : {"offload_parameters", "offload_optimizer"}) {
    const bool offloads = text(*find_setting(key), settings) == "true";
    contradict(offloads && settings.cpu, key, "cpu", "all lies in memory of the host there");
    contradict(offloads && settings.device.value == "cpu", key, "device",
               "all lies in memory of the host there");
  }
  contradict(settings.fsdp_cpu_ram_efficient_loading && !settings.ddp_init_sync,
             "fsdp_cpu_ram_efficient_loading", "ddp_init_sync",
             "rank 0's values are all that there are; leave it true");
  contradict(!settings.fsdp_wrap_modules.value.empty() && settings.fsdp_min_num_params > 0,
             "fsdp_wrap_modules", "fsdp_min_num_params",
             "units are found by their class or by their size; leave one out");
  contradict(settings.ddp_comm_hook.value != CommHook::kNone && sharding != Sharding::kDdp,
             "ddp_comm_hook", "sharding", "it compresses the reductions of ddp alone");
  contradict(settings.scaler_on_device && sharding != Sharding::kDdp, "scaler_on_device",
             "sharding", "the ranks agree on the host whether a part has overflowed");
}

void check_available(const Settings& settings) {
  const Settings defaults;
  for (const Setting& setting : schema()) {
    if (!setting.planned) continue;
    TS_CHECK_AS(UnsupportedError, is_default(setting, settings), kSettings, setting.key, "=",
                text(setting, settings), " (", origin(setting, settings).describe(),
                ") is not available yet; leave it at ",
                text(setting, defaults).empty() ? "nothing" : text(setting, defaults),
                setting.instead.empty() ? "" : ": ", setting.instead);
  }
}

std::string launch_settings_text(const SettingTexts& flags,
                                 const std::vector<std::string>& written) {
  nlohmann::json json = {{"flags", nlohmann::json::object()},
                         {"written", written},
                         {"for_accelerator", nlohmann::json::array()}};
  for (const auto& [key, text] : flags) {
    json["flags"][key] = text;
    // The others are the launcher's, or any Logger's.
    const Setting* setting = find_setting(key);
    if (setting != nullptr && setting->section != "launch" && setting->key != "log_level") {
      json["for_accelerator"].push_back(setting->flag());
    }
  }
  return json.dump();
}

std::string config_file(const ResolveOptions& options) {
  if (options.file) return *options.file;
  if (options.code.config_file) return *options.code.config_file;
  if (const std::string* file = find(options.environment, "TESSERA_CONFIG_FILE")) return *file;
  const std::string file = default_config_file(options.environment);
  return file.empty() || ::access(file.c_str(), F_OK) != 0 ? "" : file;
}

}  // namespace tessera::accelerate
