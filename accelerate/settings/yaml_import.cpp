#include <tessera/accelerate/settings/yaml_import.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <yaml-cpp/yaml.h>

#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/fsdp_words.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/megatron_keys.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kConfigImport = "tessera config import";

// What becomes of a key: `setting`, or no counterpart and why. Those with neither are read by
// code of their own.
struct Rule {
  std::string_view key;
  std::string_view setting = {};
  std::string_view why = {};
  std::string_view harmless = {};  // the value with which nothing is lost
  bool alters = false;             // another value means another training: the file is refused
};

constexpr std::string_view kTpu = "TPUs are not supported";
constexpr std::string_view kCloud =
    "tessera does not start cloud jobs; run tessera launch on the machines";
constexpr std::string_view kCompile = "there is no graph compiler to configure";
constexpr std::string_view kRemoved = "dropped, as FSDP2 does";

// Keys of the top level, by generation. https://github.com/huggingface/accelerate, ClusterConfig
// and SageMakerConfig.
const Rule kTop[] = {
    {.key = "compute_environment"},
    {.key = "distributed_type"},
    {.key = "mixed_precision"},
    {.key = "use_cpu", .setting = "cpu"},
    {.key = "debug", .setting = "debug"},
    {.key = "num_processes", .setting = "ranks"},
    {.key = "num_machines", .setting = "nodes"},
    {.key = "machine_rank",
     .why = "one tessera launch starts the ranks of all machines; list them in a host file",
     .harmless = "0"},
    {.key = "gpu_ids", .why = "set CUDA_VISIBLE_DEVICES", .harmless = "all"},
    {.key = "main_process_ip", .setting = "store_host"},
    {.key = "main_process_port", .setting = "store_port"},
    {.key = "rdzv_backend", .why = "ranks meet through the launcher's store", .harmless = "static"},
    {.key = "same_network", .why = "addresses are found from the routes", .harmless = "true"},
    {.key = "main_training_function", .why = "a program has its main()", .harmless = "main"},
    {.key = "enable_cpu_affinity", .why = "mpirun binds ranks to cores", .harmless = "false"},
    {.key = "downcast_bf16", .why = kTpu, .harmless = "no"},
    {.key = "tpu_name", .why = kTpu},
    {.key = "tpu_zone", .why = kTpu},
    {.key = "tpu_use_cluster", .why = kTpu, .harmless = "false"},
    {.key = "tpu_use_sudo", .why = kTpu, .harmless = "false"},
    {.key = "tpu_vm", .why = kTpu},
    {.key = "tpu_env", .why = kTpu, .harmless = "[]"},
    {.key = "command_file", .why = kTpu},
    {.key = "commands", .why = kTpu},
    {.key = "dynamo_backend", .why = kCompile, .harmless = "no"},
    {.key = "max_restarts", .setting = "restarts"},
    {.key = "gradient_accumulation_steps", .setting = "gradient_accumulation_steps"},
    {.key = "fsdp_config"},
    {.key = "deepspeed_config"},
    {.key = "fp8_config"},
    {.key = "parallelism_config"},
    {.key = "mpirun_config"},
    {.key = "ipex_config"},
    {.key = "dynamo_config"},
    {.key = "megatron_lm_config"},
    {.key = "ec2_instance_type", .why = kCloud},
    {.key = "iam_role_name", .why = kCloud},
    {.key = "image_uri", .why = kCloud},
    {.key = "profile", .why = kCloud},
    {.key = "region", .why = kCloud},
    {.key = "base_job_name", .why = kCloud},
    {.key = "py_version", .why = kCloud},
    {.key = "pytorch_version", .why = kCloud},
    {.key = "transformers_version", .why = kCloud},
    {.key = "sagemaker_inputs_file", .why = kCloud},
    {.key = "sagemaker_metrics_file", .why = kCloud},
    {.key = "additional_args", .why = kCloud, .harmless = "{}"},
};

constexpr std::string_view kDrives = "nothing is kept on drives";

const Rule kFsdp[] = {
    {.key = "fsdp_version"},
    {.key = "fsdp_sharding_strategy"},
    {.key = "fsdp_reshard_after_forward"},
    {.key = "fsdp_state_dict_type"},
    {.key = "fsdp_auto_wrap_policy"},
    {.key = "fsdp_offload_params", .setting = "offload_parameters"},
    {.key = "fsdp_activation_checkpointing", .setting = "fsdp_activation_checkpointing"},
    {.key = "fsdp_cpu_ram_efficient_loading", .setting = "fsdp_cpu_ram_efficient_loading"},
    {.key = "fsdp_activation_checkpointing_offload",
     .why = "inputs of checkpointed modules stay where they are",
     .harmless = "false",
     .alters = true},
    {.key = "fsdp_transformer_layer_cls_to_wrap"},
    {.key = "fsdp_min_num_params"},
    // Spellings of 0.11 to 0.14.
    {.key = "sharding_strategy"},
    {.key = "offload_params", .setting = "offload_parameters"},
    {.key = "min_num_params"},
    {.key = "fsdp_backward_prefetch", .why = kRemoved},
    {.key = "fsdp_backward_prefetch_policy", .why = kRemoved},
    {.key = "fsdp_forward_prefetch", .why = kRemoved, .harmless = "false"},
    {.key = "fsdp_use_orig_params", .why = kRemoved},
    {.key = "fsdp_sync_module_states", .why = kRemoved},
    {.key = "fsdp_limit_all_gathers", .why = kRemoved},
    {.key = "fsdp_param_init_fn", .why = kRemoved},
    {.key = "fsdp_ignored_modules", .setting = "fsdp_ignored_modules"},
};

const Rule kDeepSpeed[] = {
    {.key = "zero_stage", .setting = "zero_stage"},
    {.key = "gradient_accumulation_steps"},
    {.key = "gradient_clipping"},
    {.key = "deepspeed_hostfile", .setting = "hostfile"},
    {.key = "deepspeed_config_file"},
    {.key = "deepspeed_multinode_launcher", .why = "tessera launch chooses mpirun or srun"},
    {.key = "deepspeed_inclusion_filter", .why = "list the machines in the host file"},
    {.key = "deepspeed_exclusion_filter", .why = "list the machines in the host file"},
    {.key = "deepspeed_moe_layer_cls_names", .why = "mixtures of experts are not sharded by class"},
    {.key = "offload_optimizer_device"},
    {.key = "offload_param_device"},
    {.key = "offload_optimizer_nvme_path", .why = kDrives, .harmless = "none"},
    {.key = "offload_param_nvme_path", .why = kDrives, .harmless = "none"},
    {.key = "zero3_init_flag",
     .why = "modules are made on the meta device by the program",
     .harmless = "false"},
    {.key = "zero3_save_16bit_model", .why = "save_model() takes the dtype", .harmless = "false"},
};

// The questionnaire writes three names that Accelerate's own readers do not know
// (amax_history_length, amax_compute_algorithm, optimization_level): here both are read.
const Rule kFp8[] = {
    {.key = "backend"},
    {.key = "fp8_format", .setting = "fp8_format"},
    {.key = "format", .setting = "fp8_format"},
    {.key = "margin", .setting = "fp8_margin"},
    {.key = "amax_history_len", .setting = "fp8_amax_history_len"},
    {.key = "amax_history_length", .setting = "fp8_amax_history_len"},
    {.key = "amax_compute_algo", .setting = "fp8_amax_compute_algo"},
    {.key = "amax_compute_algorithm", .setting = "fp8_amax_compute_algo"},
    {.key = "interval", .why = "scales follow each step", .harmless = "1"},
    {.key = "override_linear_precision"},
    {.key = "use_autocast_during_eval", .setting = "fp8_in_evaluation"},
    {.key = "use_mxfp8_block_scaling",
     .why = "blocks of 32 are of a later GPU than Hopper; fp8_recipe = blockwise has larger ones",
     .harmless = "false",
     .alters = true},
    {.key = "opt_level", .why = "MS-AMP's alone"},
    {.key = "optimization_level", .why = "MS-AMP's alone"},
    {.key = "pad_inner_dim",
     .why = "calls whose dimensions are no multiples of 16 run in bf16, and are counted"},
    {.key = "enable_fsdp_float8_all_gather", .why = "parameters are gathered in f32"},
};

const Rule kParallelism[] = {
    {.key = "parallelism_config_dp_replicate_size", .setting = "dp_replicate_size"},
    {.key = "parallelism_config_dp_shard_size", .setting = "dp_shard_size"},
    {.key = "parallelism_config_tp_size", .setting = "tp_size"},
    {.key = "parallelism_config_cp_size", .setting = "cp_size"},
    {.key = "parallelism_config_sp_size", .setting = "sp_size"},
    {.key = "parallelism_config_cp_backend",
     .why = "there is one implementation",
     .harmless = "torch"},
    {.key = "parallelism_config_cp_comm_strategy", .why = "there is one implementation"},
    {.key = "parallelism_config_sp_backend",
     .why = "there is one implementation",
     .harmless = "deepspeed"},
    {.key = "parallelism_config_sp_seq_length", .why = "taken from the batch"},
    {.key = "parallelism_config_sp_seq_length_is_variable", .why = "taken from the batch"},
    {.key = "parallelism_config_sp_attn_implementation", .why = "there is one implementation"},
};

const Rule kMpirun[] = {
    {.key = "mpirun_hostfile", .setting = "hostfile"},
    {.key = "mpirun_ccl", .why = "MPI's own collectives are used"},
};

std::span<const Rule> megatron_rules() {
  static const auto* const kRules = [] {
    auto* rules = new std::vector<Rule>;  // also after main
    for (const MegatronKey& key : megatron_keys()) {
      rules->push_back({.key = key.key,
                        .setting = key.setting,
                        .why = key.why,
                        .harmless = key.harmless,
                        .alters = key.alters});
    }
    return rules;
  }();
  return *kRules;
}

const Rule* find_rule(std::span<const Rule> rules, std::string_view key) {
  for (const Rule& rule : rules) {
    if (rule.key == key) return &rule;
  }
  return nullptr;
}

class Importer {
 public:
  explicit Importer(std::string path) : path_(std::move(path)) {}

  // Reading nodes throws too: a key that is a list, an alias of nothing.
  Import run(const std::string& text) {
    try {
      return import(YAML::Load(text));
    } catch (const YAML::Exception& error) {
      TS_THROW(FormatError, kConfigImport, path_, " is no YAML of settings: ", error.what());
    }
  }

 private:
  Import import(const YAML::Node& file) {
    TS_CHECK_AS(FormatError, file.IsMap(), kConfigImport, path_, " has to hold keys and values");
    refuse_repeated("", file);
    for (const auto& entry : file) {
      if (entry.second.IsMap()) refuse_repeated(entry.first.as<std::string>() + ".", entry.second);
    }
    find_strangers("", file, kTop);
    for (const auto& [section, rules] : sections()) {
      if (file[section] && file[section].IsMap())
        find_strangers(section + ".", file[section], rules);
    }
    TS_CHECK_AS(ConfigError, strangers_.empty(), kConfigImport, path_,
                " has keys that Accelerate does not know: ", strangers_,
                "; correct or remove them");
    if (const YAML::Node type = file["distributed_type"]; type && type.IsScalar()) {
      type_ = upper(type.Scalar());
    }
    if (const YAML::Node precision = file["mixed_precision"]; precision && precision.IsScalar()) {
      precision_ = lower(precision.Scalar());
    }
    for (const auto& entry : file) {
      const auto key = entry.first.as<std::string>();
      const auto section = std::find_if(sections().begin(), sections().end(),
                                        [&](const auto& one) { return one.first == key; });
      if (const std::string why = ignored(key); !why.empty()) {
        pass_over(key, entry.second, why);
      } else if (section != sections().end()) {
        read_section(key, entry.second, section->second);
      } else if (entry.second.IsMap()) {
        pass_over(key, entry.second, unsupported_section(key));
      } else {
        read_key("", *find_rule(kTop, key), entry.second);
      }
    }
    finish(file);
    return std::move(result_);
  }

  using Sections = std::vector<std::pair<std::string, std::span<const Rule>>>;
  static const Sections& sections() {
    static const auto* const kSections =
        new Sections{{"fsdp_config", kFsdp},
                     {"deepspeed_config", kDeepSpeed},
                     {"fp8_config", kFp8},
                     {"parallelism_config", kParallelism},
                     {"megatron_lm_config", megatron_rules()},
                     {"mpirun_config", kMpirun}};  // also after main
    return *kSections;
  }

  // A key that stands twice has two values: the parser keeps both, others take the last one. One
  // value twice is none too many: a file of Accelerate's own tests has that.
  void refuse_repeated(const std::string& prefix, const YAML::Node& map) {
    std::map<std::string, std::string> seen;
    for (const auto& entry : map) {
      const auto key = entry.first.as<std::string>();
      const auto [first, fresh] = seen.emplace(key, value_text(entry.second));
      const bool same = entry.second.IsScalar() && first->second == entry.second.Scalar();
      TS_CHECK_AS(FormatError, fresh || same, kConfigImport, path_, " has \"", prefix, key,
                  "\" twice; remove one");
    }
  }

  // Why Accelerate's launcher makes nothing of a section in this file; empty: it reads it. A file
  // holds the answers to questions of other types, too.
  std::string ignored(const std::string& section) const {
    const bool on_cpus = type_ == "NO" || type_ == "FALSE" || type_ == "MULTI_CPU";
    const bool reads = section == "fsdp_config"          ? type_ == "FSDP"
                       : section == "deepspeed_config"   ? type_ == "DEEPSPEED"
                       : section == "megatron_lm_config" ? type_ == "MEGATRON_LM"
                       : section == "mpirun_config"      ? on_cpus
                                                         : !on_cpus;
    const bool by_type = section == "fsdp_config" || section == "deepspeed_config" ||
                         section == "megatron_lm_config" || section == "mpirun_config" ||
                         section == "parallelism_config";
    if (by_type && !type_.empty() && !reads) {
      return "Accelerate does not read this section where distributed_type is " + type_;
    }
    if (section == "fp8_config" && precision_ != "fp8") {
      return "Accelerate reads this section where mixed_precision is fp8";
    }
    return "";
  }

  void find_strangers(const std::string& prefix, const YAML::Node& map,
                      std::span<const Rule> rules) {
    for (const auto& entry : map) {
      const auto key = entry.first.as<std::string>();
      if (find_rule(rules, key) != nullptr) continue;
      strangers_ += (strangers_.empty() ? "\"" : ", \"") + prefix + key + "\"";
    }
  }

  static std::string value_text(const YAML::Node& node) {
    if (node.IsNull()) return "";
    if (node.IsScalar()) return node.Scalar();
    std::string list;
    if (node.IsSequence()) {
      for (const auto& item : node) list += (list.empty() ? "" : ",") + item.as<std::string>();
      return list.empty() ? "[]" : list;
    }
    return node.size() == 0 ? "{}" : YAML::Dump(node);
  }

  void line(const std::string& key, const std::string& value, ImportOutcome outcome,
            std::string note) {
    result_.lines.push_back({key, value, outcome, std::move(note)});
  }

  void map(const std::string& key, const std::string& value, std::string_view name,
           const std::string& text_of_setting) {
    const Setting& setting = *find_setting(name);
    const Settings defaults;
    Settings scratch;
    assign(setting, scratch, text_of_setting, {Source::kFile, path_ + ", " + key});
    const std::string now = text(setting, scratch);
    if (now == text(setting, defaults)) {
      line(key, value, ImportOutcome::kUnset, "the default of " + std::string(name));
      return;
    }
    const std::string before = text(setting, result_.settings);
    TS_CHECK_AS(ConfigError, before == text(setting, defaults) || before == now, kConfigImport,
                path_, ": ", key, " makes ", name, " ", now, ", and another key makes it ", before);
    assign(setting, result_.settings, text_of_setting, {Source::kFile, path_});
    line(key, value, setting.planned ? ImportOutcome::kPlanned : ImportOutcome::kMapped,
         std::string(name) + " = " + now);
  }

  void read_section(const std::string& name, const YAML::Node& node, std::span<const Rule> rules) {
    if (node.IsNull() || (node.IsMap() && node.size() == 0)) {
      line(name, "", ImportOutcome::kUnset, "empty");
      return;
    }
    TS_CHECK_AS(FormatError, node.IsMap(), kConfigImport, path_, ": ", name,
                " has to hold keys and values");
    if (name == "fsdp_config") read_words(name, node);
    for (const auto& entry : node) {
      read_key(name + ".", *find_rule(rules, entry.first.as<std::string>()), entry.second);
    }
  }

  // What keys of sharding are together.
  void read_words(const std::string& name, const YAML::Node& node) {
    FsdpWords words = {{"version", "1"}};  // the launcher's default
    for (const auto& entry : node) {
      const auto key = entry.first.as<std::string>();
      const bool by_rule = word_of(key) == "activation_checkpointing_offload";
      if (!entry.second.IsScalar() || entry.second.IsNull() || by_rule) continue;
      spellings_[word_of(key)] = path_ + ": " + name + "." + key;
      words[word_of(key)] = entry.second.Scalar();
    }
    // As a number: 2, "2" and 2.0 are one version.
    if (words["version"].ends_with(".0")) words["version"].resize(words["version"].size() - 2);
    result_.fsdp_version = words["version"] == "2" ? 2 : 1;
    read_fsdp_words(
        words, [&](std::string_view word) { return spellings_[std::string(word)]; },
        [&](std::string_view setting, std::string_view text, std::string_view word) {
          follows_[std::string(word)].emplace_back(setting, text);
        });
  }
  // "sharding_strategy" of fsdp_sharding_strategy; files of 0.11 to 0.14 wrote that.
  static std::string word_of(const std::string& key) {
    const std::string word = key.starts_with("fsdp_") ? key.substr(5) : key;
    return word == "transformer_layer_cls_to_wrap" ? "transformer_cls_to_wrap" : word;
  }

  static std::string_view unsupported_section(const std::string& name) {
    return name == "ipex_config"     ? "oneDNN is used by itself"
           : name == "dynamo_config" ? kCompile
                                     : "no counterpart";
  }
  void pass_over(const std::string& name, const YAML::Node& node, std::string_view why) {
    if (!node.IsMap() || node.size() == 0) line(name, "", ImportOutcome::kUnset, "empty");
    if (!node.IsMap()) return;
    for (const auto& entry : node) {
      line(name + "." + entry.first.as<std::string>(), value_text(entry.second),
           ImportOutcome::kNoCounterpart, std::string(why));
    }
  }

  void read_key(const std::string& prefix, const Rule& rule, const YAML::Node& node) {
    const std::string key = prefix + std::string(rule.key);
    const std::string value = value_text(node);
    if (value.empty() || value == "null" || value == "~") {
      line(key, "", ImportOutcome::kUnset, "empty");
    } else if (!rule.why.empty()) {
      const bool harmless = lower(value) == rule.harmless;
      line(key, value,
           harmless      ? ImportOutcome::kUnset
           : rule.alters ? ImportOutcome::kRefused
                         : ImportOutcome::kNoCounterpart,
           std::string(rule.why));
    } else if (!rule.setting.empty()) {
      read_setting(key, value, rule);
    } else {
      read_special(key, std::string(rule.key), value);
    }
  }

  void read_setting(const std::string& key, const std::string& value, const Rule& rule) {
    TS_CHECK_AS(ConfigError, rule.key != "num_processes" || value != "-1", kConfigImport, path_,
                ": num_processes is -1, which Accelerate writes where nobody said how many; "
                "write the number of processes");
    // One node is no wish, but the case where nothing is said.
    if (rule.key == "num_machines" && value == "1") {
      line(key, value, ImportOutcome::kUnset, "as the ranks fit");
      return;
    }
    if (rule.setting == "fp8_format" && lower(value) == "e5m2") {
      line(key, value, ImportOutcome::kRefused,
           "two bits are too few for x and W, which are E4M3; write HYBRID, whose gradients are "
           "E5M2, or E4M3");
      return;
    }
    map(key, value, rule.setting, rule.setting == "fp8_format" ? lower(value) : value);
    if (rule.key == "num_machines") {
      result_.lines.back().note += "; tessera launch --hostfile FILE names them";
    }
  }

  void read_special(const std::string& key, const std::string& name, const std::string& value) {
    if (name == "compute_environment") {
      const bool local = value == "LOCAL_MACHINE";
      line(key, value, local ? ImportOutcome::kUnset : ImportOutcome::kNoCounterpart,
           local ? "as always" : std::string(kCloud));
    } else if (name == "distributed_type") {
      read_distributed_type(key, value);
    } else if (name == "mixed_precision") {
      // Unquoted no is a truth value to some writers of YAML.
      map(key, value, "mixed_precision", lower(value) == "false" ? "no" : lower(value));
    } else if (name == "offload_optimizer_device" || name == "offload_param_device") {
      const std::string device = lower(value);
      if (device == "none") {
        line(key, value, ImportOutcome::kUnset, "what is the case anyway");
      } else if (device == "cpu") {
        map(key, value, name == "offload_param_device" ? "offload_parameters" : "offload_optimizer",
            "true");
      } else {
        line(key, value, ImportOutcome::kRefused, std::string(kDrives) + "; write cpu or none");
      }
    } else if (name == "deepspeed_config_file") {
      read_deepspeed_file(key, value);
    } else if (name == "gradient_clipping") {
      if (value == "auto") {
        line(key, value, ImportOutcome::kUnset, "what the program says");
      } else {
        map(key, value, "gradient_clipping", value);
      }
    } else if (name == kMegatronShards) {
      if (lower(value) == "true") {
        map(key, value, "sharding", "zero1");
      } else {
        line(key, value, ImportOutcome::kUnset, "states stay whole");
      }
    } else if (name == "backend") {
      read_fp8_backend(key, value);
    } else if (name == "override_linear_precision") {
      read_fp8_override(key, value);
    } else if (name == "gradient_accumulation_steps") {
      if (value == "auto") {
        line(key, value, ImportOutcome::kUnset, "what the program says");
      } else {
        map(key, value, "gradient_accumulation_steps", value);
      }
    } else {
      read_fsdp(key, name, value);
    }
  }

  // The JSON's keys get lines of their own. Its path is that of the launch's folder, or of this
  // file's.
  void read_deepspeed_file(const std::string& key, const std::string& value) {
    if (lower(value) == "none") return line(key, value, ImportOutcome::kUnset, "no file");
    deepspeed_file_given_ = true;
    namespace fs = std::filesystem;
    const fs::path beside = fs::path(path_).parent_path() / value;
    std::error_code none;
    const bool here = fs::exists(value, none) || !fs::exists(beside, none);
    const std::string path = fs::absolute(here ? fs::path(value) : beside).lexically_normal();
    if (!fs::exists(path, none)) {
      return line(key, value, ImportOutcome::kRefused,
                  "there is no file " + path + "; write where it is");
    }
    const DeepSpeedConfig config = read_deepspeed_config(path);
    map(key, value, "deepspeed_config_file", path);
    for (ImportLine one : config.lines) {
      one.key = key + ": " + one.key;
      result_.lines.push_back(std::move(one));
    }
  }

  // Whose recipe the file means. Where it names none Accelerate takes what it finds installed; here
  // the other keys decide (finish_fp8).
  void read_fp8_backend(const std::string& key, const std::string& value) {
    const std::string backend = upper(value);
    if (backend == "TE") {
      map(key, value, "fp8_recipe", "delayed");
    } else if (backend == "AO") {
      map(key, value, "fp8_recipe", "tensorwise");
    } else {
      line(key, value, ImportOutcome::kRefused,
           backend == "MSAMP" ? "MS-AMP keeps gradients and optimizer states in fp8, and is "
                                "developed no more; write TE or AO"
                              : "Accelerate knows TE, AO and MSAMP");
    }
  }

  // Which of (output, gradient of the input, gradient of the weight) are not in fp8.
  void read_fp8_override(const std::string& key, const std::string& value) {
    std::string words;
    for (const char c : lower(value)) {
      if ((c >= 'a' && c <= 'z') || c == ',') words += c;
    }
    if (words == "false" || words == "false,false,false" || words.empty()) {
      line(key, value, ImportOutcome::kUnset, "all three products are in fp8");
    } else if (words == "false,false,true") {
      map(key, value, "fp8_weight_gradient", "false");
    } else {
      line(key, value, ImportOutcome::kRefused,
           "of the three products only that of the weight's gradient can be left out");
    }
  }

  void read_distributed_type(const std::string& key, const std::string& value) {
    const std::string type = upper(value);
    if (type == "NO" || type == "FALSE" || type.starts_with("MULTI_CPU") ||
        type.starts_with("MULTI_GPU")) {
      line(key, value, ImportOutcome::kUnset, "data parallel where there are several ranks");
    } else if (type == "FSDP") {
      line(key, value, ImportOutcome::kUnset, "see fsdp_config");
    } else if (type == "DEEPSPEED") {
      line(key, value, ImportOutcome::kUnset, "see deepspeed_config");
    } else if (type == "MEGATRON_LM") {
      line(key, value, ImportOutcome::kUnset, "see megatron_lm_config");
    } else {
      line(key, value, ImportOutcome::kRefused, "tessera has no such processes");
    }
  }

  void read_fsdp(const std::string& key, const std::string& name, const std::string& value) {
    const std::string word = word_of(name);
    if (word == "version") {
      line(key, value, ImportOutcome::kUnset, "both are one engine here");
    } else if (word == "state_dict_type") {
      const std::string type = upper(value);
      if (type.find("LOCAL") != std::string::npos || type == "3") {
        line(key, value, ImportOutcome::kRefused,
             "parts that do not say what they are parts of are not written; write "
             "SHARDED_STATE_DICT, which any number of ranks reads, or FULL_STATE_DICT");
      } else {
        map(key, value, "fsdp_state_dict_type", value);
      }
    } else if (follows_.contains(word)) {
      for (const auto& [setting, text_of_setting] : follows_[word]) {
        map(key, value, setting, text_of_setting);
        strategy_given_ = strategy_given_ || setting == "sharding";
      }
      const FsdpStrategy* strategy = find_fsdp_strategy(value);
      if (strategy != nullptr && strategy->hybrid) {
        result_.lines.back().note += "; dp_replicate_size says how many groups hold a whole model";
      }
    } else {
      const bool of_version = word == "sharding_strategy" || word == "reshard_after_forward";
      TS_CHECK_AS(ConfigError,
                  of_version || word == "auto_wrap_policy" || word == "min_num_params" ||
                      word == "transformer_cls_to_wrap",
                  kConfigImport, path_, ": ", key, " is not understood");
      line(key, value, ImportOutcome::kUnset,
           !of_version                 ? "not what decides about units in this file"
           : result_.fsdp_version == 2 ? "version 2 reads fsdp_reshard_after_forward"
                                       : "version 1 reads fsdp_sharding_strategy");
    }
  }

  // Where a file of fp8 names no backend: torchao where all of its keys are torchao's, else
  // TransformerEngine, which does not run in evaluation unless told.
  void finish_fp8(const YAML::Node& section) {
    const YAML::Node backend = section["backend"];
    const bool said = backend && backend.IsScalar() && !backend.Scalar().empty();
    if (said && upper(backend.Scalar()) != "TE") return;
    const bool of_torchao = std::all_of(section.begin(), section.end(), [](const auto& entry) {
      const auto key = entry.first.template as<std::string>();
      return key == "backend" || key == "pad_inner_dim" || key == "enable_fsdp_float8_all_gather";
    });
    if (!said) map("fp8_config.backend", "", "fp8_recipe", of_torchao ? "tensorwise" : "delayed");
    if (!said && of_torchao) return;
    if (!section["use_autocast_during_eval"]) {
      map("fp8_config.use_autocast_during_eval", "", "fp8_in_evaluation", "false");
    }
  }

  void finish(const YAML::Node& file) {
    const YAML::Node fp8 = file["fp8_config"];
    const bool has_fp8 = fp8 && fp8.IsMap() && fp8.size() > 0;
    if (has_fp8 && ignored("fp8_config").empty()) finish_fp8(fp8);
    if (type_ == "FSDP") {
      if (result_.fsdp_version == 0) result_.fsdp_version = 1;
      if (!strategy_given_) map("distributed_type", type_, "sharding", "fsdp");
    }
    if (type_ == "DEEPSPEED" && !deepspeed_file_given_) {
      map("distributed_type", type_, "deepspeed_config_file", std::string(kDeepSpeedWithoutFile));
    }
    const YAML::Node megatron = file["megatron_lm_config"];
    const bool clips = megatron && megatron.IsMap() && megatron["megatron_lm_gradient_clipping"];
    if (type_ == "MEGATRON_LM" && !clips) {
      map("megatron_lm_config.megatron_lm_gradient_clipping", "", "gradient_clipping",
          std::string(kMegatronClipping));
    }
    // Accelerate starts one process with NO whatever num_processes says.
    TS_CHECK_AS(
        ConfigError,
        (type_ != "NO" && type_ != "FALSE") || result_.settings.ranks.value.value_or(1) == 1,
        kConfigImport, path_, ": distributed_type is NO and num_processes is ",
        result_.settings.ranks.value.value_or(1),
        ", which contradict each other; make it MULTI_CPU or MULTI_GPU, or 1 process");
  }

  std::string path_;
  std::string strangers_;
  std::string type_, precision_;  // distributed_type in capitals, mixed_precision in small letters
  bool strategy_given_ = false, deepspeed_file_given_ = false;
  // Of fsdp_config by word: how the file spells it, and the settings that follow.
  std::map<std::string, std::string> spellings_;
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> follows_;
  Import result_;
};

}  // namespace

Import import_accelerate_text(const std::string& text, const std::string& path) {
  return Importer(path).run(text);
}

Import import_accelerate(const std::string& path) {
  PlainText<std::ifstream> file(path);
  TS_CHECK_AS(IoError, file.is_open(), kConfigImport, "cannot read ", path,
              "; is the path right? Accelerate's default is "
              "~/.cache/huggingface/accelerate/default_config.yaml");
  PlainText<std::ostringstream> text;
  text << file.rdbuf();
  return import_accelerate_text(text.str(), path);
}

}  // namespace tessera::accelerate
