// The table of settings and where their values come from. DC-1, CLI-2 and the defects of other
// configurations that it is built against are in the tests' names.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <tessera/accelerate/launch/options.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/error.h>

#include "message_of.h"
#include "source_dir.h"

namespace tessera::accelerate::test_config {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    char path[] = "/tmp/tessera_config_XXXXXX";
    path_ = ::mkdtemp(path);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    std::ofstream(path(name)) << text;
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name));
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  std::string path_;
};

Settings from(const Environment& environment, const AcceleratorOptions& code = {},
              const std::string& file = "") {
  return resolve({.code = code, .environment = environment, .file = file});
}

// A value that differs from the default.
std::string another_value(const Setting& setting) {
  const Settings defaults;
  const std::string now = text(setting, defaults);
  if (setting.type() == "bool") return now == "true" ? "false" : "true";
  if (setting.type() == "choice")
    return std::string(setting.names[now == setting.names[0] ? 1 : 0]);
  if (setting.type() == "list") return "2,3";
  if (setting.type() == "text") return "somewhere";
  for (const char* value : {"2", "1", "0.5"}) {
    if (value != now && std::atof(value) >= setting.least &&
        (setting.most == 0 || std::atof(value) <= setting.most)) {
      return value;
    }
  }
  ADD_FAILURE() << setting.key;
  return now;
}

TEST(ConfigSchema, EveryKeyAliasFlagAndVariableIsThereOnce) {
  std::set<std::string> keys, flags, variables;
  for (const Setting& setting : schema()) {
    EXPECT_TRUE(keys.insert(std::string(setting.key)).second) << setting.key;
    for (const std::string_view alias : setting.aliases) {
      EXPECT_TRUE(keys.insert(std::string(alias)).second) << alias;
    }
    for (const std::string& flag : setting.flags()) EXPECT_TRUE(flags.insert(flag).second) << flag;
    for (const std::string_view name : setting.accelerate) {
      EXPECT_TRUE(variables.insert(std::string(name)).second) << name;
    }
    EXPECT_FALSE(setting.help.empty()) << setting.key;
  }
  EXPECT_GT(keys.size(), 60u);
}

TEST(ConfigSchema, CLI2_HyphensAndUnderscoresAreOneSpelling) {
  EXPECT_EQ(find_setting("gradient-accumulation-steps"),
            find_setting("gradient_accumulation_steps"));
  EXPECT_EQ(find_setting("num_processes"), find_setting("ranks"));
  EXPECT_EQ(find_setting("no_such_setting"), nullptr);
}

// Every number has a least value that makes sense, and what is less is refused; some have a last one.
TEST(ConfigSchema, NumbersAreTakenFromTheirLeastValueOn) {
  const auto taken = [](std::string_view key, const std::string& value) {
    Settings settings;
    try {
      assign(*find_setting(key), settings, value, {Source::kCode, ""});
    } catch (const ConfigError&) {
      return false;
    }
    return true;
  };
  const struct {
    std::vector<const char*> refused, accepted;
    std::vector<std::string_view> keys;
  } groups[] = {
      {{"0", "-1"},
       {"1"},
       {"ddp_power_sgd_rank", "fp8_amax_history_len", "scaler_growth_interval", "scaler_hysteresis",
        "ranks", "nodes", "threads", "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size",
        "sp_size", "pp_size", "pp_stages_per_rank", "gradient_accumulation_steps"}},
      {{"-1"},
       {"0", "1"},
       {"data_seed", "seed", "ddp_power_sgd_start_step", "fp8_margin", "scaler_min_scale",
        "restarts", "store_port", "total_limit", "keep_every", "keep_best", "zero_stage",
        "fsdp_min_num_params", "gradient_clipping"}},
      {{"0", "-1", "0.0009"},
       {"0.001"},
       {"collective_timeout", "first_step_timeout", "save_timeout", "init_timeout", "job_timeout",
        "start_timeout", "grace", "wait_warning"}},
      {{"0", "-1", "0.00009"}, {"0.0001"}, {"ddp_bucket_cap_mb", "ddp_first_bucket_mb"}},
      {{"0", "-1"}, {"1e-9"}, {"scaler_init_scale"}},
      {{"0", "0.99"}, {"1", "2"}, {"scaler_growth_factor"}},
      {{"0", "1.01"}, {"1e-6", "1"}, {"scaler_backoff_factor"}},
  };
  std::set<std::string_view> known;
  for (const auto& group : groups) {
    for (const std::string_view key : group.keys) {
      known.insert(key);
      for (const char* value : group.refused) EXPECT_FALSE(taken(key, value)) << key << value;
      for (const char* value : group.accepted) EXPECT_TRUE(taken(key, value)) << key << value;
    }
  }
  for (const Setting& setting : schema()) {
    const bool bounded = setting.least != 0 || setting.most != 0;
    EXPECT_TRUE(!bounded || known.contains(setting.key)) << setting.key << " is in no group";
  }
  const struct {
    const char *key, *last, *beyond;
  } rows[] = {{"store_port", "65535", "65536"},
              {"zero_stage", "3", "4"},
              {"threads", "4096", "4097"},
              {"fp8_margin", "64", "65"}};
  for (const auto& row : rows) {
    EXPECT_TRUE(taken(row.key, row.last)) << row.key;
    EXPECT_FALSE(taken(row.key, row.beyond)) << row.key;
  }
}

// The defect: a questionnaire that writes FP8 keys that no reader knows.
TEST(ConfigSchema, EveryKeyThatIsWrittenIsRead_Fp8KeyMismatch) {
  const Folder folder;
  for (const Setting& setting : schema()) {
    Settings settings;
    assign(setting, settings, another_value(setting), {Source::kCode, ""});
    write_config_file(folder.path("one.json"), settings);
    const SettingTexts texts = read_config_file(folder.path("one.json"));
    ASSERT_EQ(texts.size(), 1u) << setting.key;
    EXPECT_EQ(texts[0].first, setting.key);
    Settings again;
    assign(*find_setting(texts[0].first), again, texts[0].second, {Source::kFile, "one.json"});
    EXPECT_EQ(text(setting, again), text(setting, settings)) << setting.key;
  }
  for (const char* key : {"fp8_amax_history_len", "fp8_amax_history_length",
                          "fp8_amax_compute_algo", "fp8_amax_compute_algorithm"}) {
    EXPECT_NE(find_setting(key), nullptr) << key;
  }
}

// DC-1's round trip, of every setting: what is exported is what is read, under every spelling.
TEST(ConfigEnvironment, DC1_EverySettingMakesTheRoundTripThroughItsVariables) {
  const Environment switches = {{"ACCELERATE_USE_PARALLELISM_CONFIG", "true"}};
  for (const Setting& setting : schema()) {
    const std::string value = another_value(setting);
    std::vector<std::string> names = {setting.environment()};
    for (const std::string_view name : setting.accelerate) names.emplace_back(name);
    for (const std::string& name : names) {
      Environment environment = switches;
      if (name.starts_with("ACCELERATE_DEEPSPEED_")) environment["ACCELERATE_USE_DEEPSPEED"] = "1";
      if (name.starts_with("FSDP_")) {
        environment["ACCELERATE_USE_FSDP"] = "1";
        environment["FSDP_SHARDING_STRATEGY"] = "NO_SHARD";
        environment["FSDP_ACTIVATION_CHECKPOINTING"] = "true";  // of units
      }
      environment[name] = value;
      const Settings settings = merge({.environment = environment, .file = ""});
      EXPECT_EQ(text(setting, settings), value) << name;
      EXPECT_EQ(origin(setting, settings).describe(), name);
    }
  }
}

// Its default where nothing else is said; without it a training would be plain data parallel.
TEST(ConfigEnvironment, DeepSpeedsSwitchAloneIsStage2AndItsFileSaysItsOwn) {
  Environment environment = {{"ACCELERATE_USE_DEEPSPEED", "true"}};
  const Settings settings = from(environment);
  EXPECT_EQ(settings.sharding.value, Sharding::kZero2);
  EXPECT_EQ(settings.sharding.origin.describe(), "ACCELERATE_USE_DEEPSPEED");
  environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = R"({"zero_optimization": {"stage": 3}})";
  EXPECT_EQ(from(environment).sharding.value, Sharding::kZero3);
  environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "none";
  EXPECT_EQ(from(environment).sharding.value, Sharding::kZero2);
  environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "cpu";
  EXPECT_TRUE(from(environment).offload_optimizer);
  EXPECT_FALSE(from(environment).offload_parameters);
  environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] = "nvme";
  EXPECT_THROW(from(environment), UnsupportedError);
}

// Without a file Accelerate clips to 1 and hands DeepSpeed its precision, which is stored in 16
// bits; what anybody says wins.
TEST(ConfigEnvironment, DeepSpeedsSwitchWithoutAFileTrainsAsAccelerateWithDeepSpeedDoes) {
  const auto with = [](Environment environment) {
    environment["ACCELERATE_USE_DEEPSPEED"] = "true";
    return from(environment);
  };
  const Settings stage = with({{"ACCELERATE_MIXED_PRECISION", "bf16"},
                               {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
                               {"ACCELERATE_GRADIENT_CLIPPING", "auto"}});
  EXPECT_EQ(stage.sharding.value, Sharding::kZero3);
  EXPECT_EQ(stage.gradient_clipping, 1);
  EXPECT_EQ(stage.precision_policy, PrecisionPolicy::kPure);
  EXPECT_EQ(stage.scaler_growth_interval, 2000);
  const Settings fp16 = with({{"ACCELERATE_MIXED_PRECISION", "fp16"}});
  EXPECT_EQ(fp16.precision_policy, PrecisionPolicy::kPure);
  EXPECT_EQ(fp16.scaler_growth_interval, 1000);
  EXPECT_EQ(fp16.scaler_hysteresis, 2);
  EXPECT_EQ(fp16.scaler_min_scale, 1);
  EXPECT_EQ(with({{"ACCELERATE_MIXED_PRECISION", "fp8"}}).precision_policy,
            PrecisionPolicy::kAutocast);
  for (const auto& [variable, value] : {std::pair("ACCELERATE_GRADIENT_CLIPPING", "0"),
                                        std::pair("TESSERA_GRADIENT_CLIPPING", "0")}) {
    EXPECT_EQ(with({{variable, value}}).gradient_clipping, 0) << "nobody clips";
  }
  EXPECT_EQ(with({{"TESSERA_SHARDING", "zero1"}}).sharding.value, Sharding::kZero1);
  EXPECT_EQ(with({{"TESSERA_ZERO_STAGE", "0"}}).sharding.value, Sharding::kDdp);
  const Settings said = resolve({.code = {.mixed_precision = Precision::kBF16,
                                          .precision_policy = PrecisionPolicy::kAutocast,
                                          .gradient_clipping = 0.5},
                                 .environment = {{"ACCELERATE_USE_DEEPSPEED", "true"}},
                                 .file = ""});
  EXPECT_EQ(said.precision_policy, PrecisionPolicy::kAutocast);
  EXPECT_EQ(said.gradient_clipping, 0.5);
  // A file says what of these it says, and no more.
  EXPECT_EQ(with({{"TESSERA_DEEPSPEED_CONFIG_FILE", R"({"zero_optimization": {"stage": 1}})"}})
                .gradient_clipping,
            0);
}

// All that `accelerate launch --mixed_precision fp8` exports where nobody gives another flag.
TEST(ConfigEnvironment, WhatAcceleratesLauncherExportsOfFp8IsRead) {
  const Environment plain = {{"ACCELERATE_MIXED_PRECISION", "fp8"},
                             {"ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "False"},
                             {"ACCELERATE_FP8_MARGIN", "0"},
                             {"ACCELERATE_FP8_INTERVAL", "1"},
                             {"ACCELERATE_FP8_FORMAT", "HYBRID"},
                             {"ACCELERATE_FP8_AMAX_HISTORY_LEN", "1024"},
                             {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "most_recent"},
                             {"ACCELERATE_FP8_OVERRIDE_FPROP", "False"},
                             {"ACCELERATE_FP8_OVERRIDE_DGRAD", "False"},
                             {"ACCELERATE_FP8_OVERRIDE_WGRAD", "False"},
                             {"ACCELERATE_FP8_OPT_LEVEL", "O2"},
                             {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "True"},
                             {"ACCELERATE_FP8_PAD_INNER_DIM", "True"}};
  const auto with = [&](const Environment& more) {
    Environment environment = more;
    environment.insert(plain.begin(), plain.end());
    return environment;
  };
  EXPECT_EQ(from(plain).mixed_precision.value, Precision::kFP8);
  EXPECT_EQ(from(plain).fp8_recipe.value, Fp8Scaling::kTensorwise);
  EXPECT_NO_THROW(from(with({{"TESSERA_FP8_RECIPE", "rowwise"}}))) << "HYBRID is nobody's wish";

  const Settings te = from(with({{"ACCELERATE_FP8_BACKEND", "te"},
                                 {"ACCELERATE_FP8_MARGIN", "2"},
                                 {"ACCELERATE_FP8_OVERRIDE_WGRAD", "True"}}));
  EXPECT_EQ(te.fp8_recipe.value, Fp8Scaling::kDelayed);
  EXPECT_EQ(te.fp8_recipe.origin.describe(), "ACCELERATE_FP8_BACKEND");
  EXPECT_EQ(te.fp8_margin, 2);
  EXPECT_FALSE(te.fp8_weight_gradient);
  EXPECT_FALSE(te.fp8_in_evaluation);
  const Settings ao =
      from(with({{"ACCELERATE_FP8_BACKEND", "AO"}, {"ACCELERATE_FP8_MARGIN", "2"}}));
  EXPECT_EQ(ao.fp8_recipe.value, Fp8Scaling::kTensorwise);
  EXPECT_EQ(ao.fp8_margin, 0) << "TransformerEngine's";
  EXPECT_TRUE(ao.fp8_in_evaluation);
  EXPECT_TRUE(ao.fp8_weight_gradient);

  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"ACCELERATE_FP8_BACKEND", "msamp"},
           {"ACCELERATE_FP8_INTERVAL", "16"},
           {"ACCELERATE_FP8_OVERRIDE_FPROP", "True"},
           {"ACCELERATE_FP8_OVERRIDE_DGRAD", "True"},
           {"ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "True"}}) {
    EXPECT_TRUE(mentions(message_of<UnsupportedError>([&] { from(with({{name, value}})); }), name));
    Environment unused = with({{name, value}});
    unused["ACCELERATE_MIXED_PRECISION"] = "bf16";
    EXPECT_NO_THROW(from(unused)) << name;
  }
  EXPECT_THROW(from(with({{"ACCELERATE_FP8_BACKEND", "tea"}})), ConfigError);
  EXPECT_THROW(from(with({{"ACCELERATE_FP8_FORMAT", "E5M2"}})), ConfigError);
  EXPECT_THROW(from(with({{"TESSERA_FP8_RECIPE", "rowwise"}, {"ACCELERATE_FP8_BACKEND", "te"}})),
               ConfigError)
      << "two wishes";
}

TEST(ConfigEnvironment, DC1_MeshSizesOfAllAxesAreRead) {
  const Environment environment = {{"ACCELERATE_USE_PARALLELISM_CONFIG", "true"},
                                   {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"},
                                   {"PARALLELISM_CONFIG_DP_SHARD_SIZE", "4"},
                                   {"PARALLELISM_CONFIG_TP_SIZE", "8"},
                                   {"PARALLELISM_CONFIG_CP_SIZE", "16"}};
  const Settings settings = merge({.environment = environment, .file = ""});
  EXPECT_EQ(settings.dp_replicate_size, 2);
  EXPECT_EQ(settings.dp_shard_size, 4);
  EXPECT_EQ(settings.tp_size, 8);
  EXPECT_EQ(settings.cp_size, 16);
  // Accelerate reads them where its switch is on.
  Environment off = environment;
  off.erase("ACCELERATE_USE_PARALLELISM_CONFIG");
  EXPECT_EQ(merge({.environment = off, .file = ""}).tp_size, 1);
}

TEST(ConfigEnvironment, DC1_WrongSizesAndExclusiveOnesAreErrorsWithTheirNames) {
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         from({{"TESSERA_TP_SIZE", "0"}});
                       }),
                       "TESSERA_TP_SIZE"));
  const std::string both = message_of<ConfigError>([] {
    from({{"TESSERA_CP_SIZE", "2"}, {"TESSERA_SP_SIZE", "2"}});
  });
  EXPECT_TRUE(mentions(both, "cp_size=2") && mentions(both, "sp_size=2")) << both;
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         from({{"TESSERA_TP_SIZE", "2"}, {"TESSERA_DP_REPLICATE_SIZE", "2"}});
                       }),
                       "dp_shard_size"));
}

TEST(ConfigEnvironment, ShardingIsSaidByModeByStageOrByAcceleratesSwitches) {
  const auto sharding = [](const Environment& environment) {
    return from(environment).sharding.value;
  };
  EXPECT_EQ(sharding({}), Sharding::kDdp);
  EXPECT_EQ(sharding({{"TESSERA_SHARDING", "zero1"}}), Sharding::kZero1);
  EXPECT_EQ(sharding({{"TESSERA_ZERO_STAGE", "3"}}), Sharding::kZero3);
  EXPECT_EQ(sharding({{"ACCELERATE_USE_FSDP", "true"}}), Sharding::kFsdp);
  EXPECT_EQ(sharding({{"ACCELERATE_USE_FSDP", "1"}, {"FSDP_SHARDING_STRATEGY", "NO_SHARD"}}),
            Sharding::kDdp);
  const Settings kept =
      from({{"ACCELERATE_USE_FSDP", "true"}, {"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"}});
  EXPECT_EQ(kept.sharding.value, Sharding::kFsdp);
  EXPECT_FALSE(kept.fsdp_reshard_after_forward);
  EXPECT_EQ(
      sharding({{"ACCELERATE_USE_DEEPSPEED", "true"}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"}}),
      Sharding::kZero1);
  EXPECT_EQ(sharding({{"TESSERA_SHARDING", "fsdp"}, {"TESSERA_ZERO_STAGE", "3"}}), Sharding::kFsdp);
  // Each names both keys.
  for (const auto& [environment, key] : std::vector<std::pair<Environment, std::string>>{
           {{{"TESSERA_SHARDING", "ddp"}, {"TESSERA_ZERO_STAGE", "2"}}, "zero_stage=2"},
           {{{"TESSERA_DP_SHARD_SIZE", "2"}}, "dp_shard_size=2"},
           {{{"TESSERA_TP_SIZE", "2"}, {"TESSERA_MIXED_PRECISION", "fp8"}}, "tp_size=2"},
           {{{"TESSERA_TP_SEQUENCE", "false"}}, "tp_sequence=false"},
           {{{"TESSERA_SHARDING", "zero1"}, {"TESSERA_DP_REPLICATE_SIZE", "2"}},
            "dp_replicate_size=2"},
           {{{"TESSERA_FSDP_WRAP_MODULES", "Block"}}, "fsdp_wrap_modules=Block"},
           {{{"TESSERA_SHARDING", "fsdp"},
             {"TESSERA_FSDP_WRAP_MODULES", "Block"},
             {"TESSERA_FSDP_MIN_NUM_PARAMS", "100"}},
            "fsdp_min_num_params=100"},
           {{{"TESSERA_SHARDING", "fsdp"}, {"TESSERA_DDP_COMM_HOOK", "bf16"}},
            "ddp_comm_hook=bf16"},
           {{{"TESSERA_OFFLOAD_PARAMETERS", "true"}}, "sharding=ddp"},
           {{{"TESSERA_OFFLOAD_PARAMETERS", "true"}, {"TESSERA_SHARDING", "zero2"}},
            "offload_optimizer"},
           {{{"TESSERA_OFFLOAD_OPTIMIZER", "true"}}, "sharding=ddp"},
           {{{"TESSERA_OFFLOAD_PARAMETERS", "true"},
             {"TESSERA_OFFLOAD_OPTIMIZER", "false"},
             {"TESSERA_SHARDING", "fsdp"}},
            "offload_optimizer=false"},
           {{{"TESSERA_OFFLOAD_OPTIMIZER", "true"},
             {"TESSERA_SHARDING", "zero1"},
             {"TESSERA_CPU", "true"}},
            "cpu=true"},
           {{{"TESSERA_OFFLOAD_PARAMETERS", "true"},
             {"TESSERA_SHARDING", "fsdp"},
             {"TESSERA_DEVICE", "cpu"}},
            "device=cpu"},
           {{{"TESSERA_SHARDING", "fsdp"}, {"TESSERA_SCALER_ON_DEVICE", "true"}},
            "scaler_on_device=true"}}) {
    const std::string message = message_of<ConfigError>([&] { from(environment); });
    EXPECT_TRUE(mentions(message, key)) << key << ": " << message;
  }
}

// What `accelerate launch --use_fsdp ...` exports, whatever was said there.
Environment exported_by_accelerate(const std::string& version) {
  return {{"ACCELERATE_USE_FSDP", "true"},
          {"FSDP_VERSION", version},
          {"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
          {"FSDP_RESHARD_AFTER_FORWARD", "true"},
          {"FSDP_OFFLOAD_PARAMS", "false"},
          {"FSDP_MIN_NUM_PARAMS", "100000000"},
          {"FSDP_FORWARD_PREFETCH", "false"},
          {"FSDP_USE_ORIG_PARAMS", "true"},
          {"FSDP_CPU_RAM_EFFICIENT_LOADING", "true"},
          {"FSDP_SYNC_MODULE_STATES", "true"},
          {"FSDP_ACTIVATION_CHECKPOINTING", "false"},
          {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"}};
}

TEST(ConfigEnvironment, WhatAcceleratesLauncherExportsForShardingIsRead) {
  for (const char* version : {"1", "2"}) {
    SCOPED_TRACE(version);
    const Environment plain = exported_by_accelerate(version);
    const auto with = [&](const Environment& more) {
      Environment environment = plain;
      for (const auto& [name, value] : more) environment[name] = value;
      return from(environment);
    };
    const Settings settings = with({});
    EXPECT_EQ(settings.sharding.value, Sharding::kFsdp);
    EXPECT_TRUE(settings.fsdp_reshard_after_forward);
    EXPECT_EQ(settings.fsdp_min_num_params, 0) << "nobody has said it";
    EXPECT_TRUE(settings.fsdp_cpu_ram_efficient_loading);
    const Settings by_class = with({{"FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"},
                                    {"FSDP_TRANSFORMER_CLS_TO_WRAP", "BertLayer,BertPooler"}});
    EXPECT_EQ(by_class.fsdp_wrap_modules.value,
              (std::vector<std::string>{"BertLayer", "BertPooler"}));
    EXPECT_EQ(by_class.fsdp_wrap_modules.origin.describe(), "FSDP_TRANSFORMER_CLS_TO_WRAP");
    EXPECT_EQ(by_class.fsdp_min_num_params, 0);
    const Settings by_size = with({{"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"},
                                   {"FSDP_TRANSFORMER_CLS_TO_WRAP", "BertLayer"}});
    EXPECT_EQ(by_size.fsdp_min_num_params, 100000000);
    EXPECT_TRUE(by_size.fsdp_wrap_modules.value.empty());
    EXPECT_EQ(with({{"FSDP_AUTO_WRAP_POLICY", "NO_WRAP"}}).fsdp_wrap_modules.value,
              std::vector<std::string>{"none"});
    EXPECT_EQ(with({{"FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"}}).fsdp_state_dict_type.value,
              StateDictType::kFull);
    EXPECT_EQ(with({{"FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"}}).fsdp_state_dict_type.value,
              StateDictType::kSharded);
    EXPECT_EQ(with({{"FSDP_IGNORED_MODULES", ".*\\.router"}}).fsdp_ignored_modules.value,
              ".*\\.router");
    EXPECT_TRUE(with({{"FSDP_ACTIVATION_CHECKPOINTING", "true"}}).fsdp_activation_checkpointing);
    EXPECT_FALSE(settings.offload_parameters);
    EXPECT_TRUE(with({{"FSDP_OFFLOAD_PARAMS", "true"}}).offload_parameters);
    // The strategy counts in version 1, resharding in version 2.
    const bool first = std::string_view(version) == "1";
    EXPECT_EQ(with({{"FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"}}).fsdp_reshard_after_forward.value,
              !first);
    EXPECT_EQ(with({{"FSDP_RESHARD_AFTER_FORWARD", "false"}}).fsdp_reshard_after_forward.value,
              first);
    EXPECT_EQ(with({{"FSDP_SHARDING_STRATEGY", "NO_SHARD"}}).sharding.value,
              first ? Sharding::kDdp : Sharding::kFsdp);
    for (const auto& [name, value, error] : std::vector<std::array<std::string, 3>>{
             {"FSDP_AUTO_WRAP_POLICY", "SOME_WRAP", "FSDP_AUTO_WRAP_POLICY"},
             {"FSDP_VERSION", "3", "FSDP_VERSION"}}) {
      const std::string message = message_of<ConfigError>([&] { with({{name, value}}); });
      EXPECT_TRUE(mentions(message, error) && mentions(message, value)) << message;
    }
    for (const auto& [name, value, error] : std::vector<std::array<std::string, 3>>{
             {"FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT", "any number reads"},
             {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true", "leave it out"}}) {
      const std::string message = message_of<UnsupportedError>([&] { with({{name, value}}); });
      EXPECT_TRUE(mentions(message, name) && mentions(message, error)) << message;
    }
  }
  // Version 1 takes a strategy as resharding; its launcher exports the other name besides.
  Environment renamed = exported_by_accelerate("1");
  renamed["FSDP_RESHARD_AFTER_FORWARD"] = "shard_grad_op";
  EXPECT_FALSE(from(renamed).fsdp_reshard_after_forward);
  renamed["FSDP_RESHARD_AFTER_FORWARD"] = "full_shard";
  EXPECT_TRUE(from(renamed).fsdp_reshard_after_forward);
  // Off where its switch is off.
  renamed["ACCELERATE_USE_FSDP"] = "false";
  renamed["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT";
  EXPECT_EQ(from(renamed).sharding.value, Sharding::kDdp);
  EXPECT_EQ(from(renamed).fsdp_state_dict_type.value, StateDictType::kSharded);
}

TEST(ConfigAvailability, WhatIsPlannedIsAnErrorThatSaysSo) {
  for (const Setting& setting : schema()) {
    if (!setting.planned) continue;
    const std::string message = message_of<UnsupportedError>([&] {
      from({{setting.environment(), another_value(setting)}});
    });
    EXPECT_TRUE(mentions(message, std::string(setting.key)) &&
                mentions(message, "not available yet"))
        << message;
  }
}

// As `accelerate launch --use_megatron_lm` exports it.
TEST(ConfigPrecedence, MegatronsVariablesAreReadWhereItsSwitchIsOn) {
  Environment environment = {{"ACCELERATE_USE_MEGATRON_LM", "true"},
                             {"MEGATRON_LM_TP_DEGREE", "2"},
                             {"MEGATRON_LM_PP_DEGREE", "4"},
                             {"MEGATRON_LM_NUM_MICRO_BATCHES", "8"},
                             {"MEGATRON_LM_SEQUENCE_PARALLELISM", "false"},
                             {"MEGATRON_LM_GRADIENT_CLIPPING", "0.5"},
                             {"MEGATRON_LM_RECOMPUTE_ACTIVATIONS", "true"},
                             {"MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true"},
                             {"MEGATRON_LM_USE_CUSTOM_FSDP", "False"},
                             {"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", "1"},
                             {"MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "1"}};
  const Settings settings = from(environment);
  EXPECT_EQ(settings.tp_size.value, 2);
  EXPECT_EQ(settings.pp_size.value, 4);
  EXPECT_EQ(settings.gradient_accumulation_steps.value, 8);
  EXPECT_FALSE(settings.tp_sequence.value);
  EXPECT_EQ(settings.gradient_clipping.value, 0.5);
  EXPECT_TRUE(settings.fsdp_activation_checkpointing.value);
  EXPECT_EQ(settings.sharding.value, Sharding::kZero1);
  EXPECT_EQ(settings.pp_size.origin.describe(), "MEGATRON_LM_PP_DEGREE");
  // Megatron clips where nobody says anything.
  environment.erase("MEGATRON_LM_GRADIENT_CLIPPING");
  EXPECT_EQ(from(environment).gradient_clipping.value, 1);
  for (const auto& [name, value, why] :
       {std::array<const char*, 3>{"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", "2", "experts"},
        {"MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS", "3", "pp_cuts"},
        {"MEGATRON_LM_EOD_MASK_LOSS", "True", "loss"},
        {"MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "2", "cp_size"}}) {
    Environment other = environment;
    other[name] = value;
    const std::string message = message_of<UnsupportedError>([&] { from(other); });
    EXPECT_TRUE(mentions(message, name) && mentions(message, why)) << message;
  }
  environment["ACCELERATE_USE_MEGATRON_LM"] = "false";
  EXPECT_EQ(from(environment).pp_size.value, 1);
}

TEST(ConfigPrecedence, CodeFlagTesseraAccelerateFileDefault) {
  const Folder folder;
  const std::string file = folder.write("a.json", R"({"gradient_accumulation_steps": 6})");
  const AcceleratorOptions code{.gradient_accumulation_steps = 2};
  Environment environment = {{"TESSERA_GRADIENT_ACCUMULATION_STEPS", "4"},
                             {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"},
                             {"TESSERA_LAUNCH_SETTINGS",
                              launch_settings_text({{"gradient_accumulation_steps", "3"}}, {})}};
  const auto now = [&](const AcceleratorOptions& with) {
    const Settings settings = from(environment, with, file);
    return std::to_string(settings.gradient_accumulation_steps.value) + " " +
           settings.gradient_accumulation_steps.origin.describe();
  };
  EXPECT_EQ(now(code), "2 code");
  EXPECT_EQ(now({}), "3 --gradient-accumulation-steps");
  environment.erase("TESSERA_LAUNCH_SETTINGS");
  EXPECT_EQ(now({}), "4 TESSERA_GRADIENT_ACCUMULATION_STEPS");
  environment.erase("TESSERA_GRADIENT_ACCUMULATION_STEPS");
  EXPECT_EQ(now({}), "4 ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
  environment.clear();
  EXPECT_EQ(now({}), "6 file " + file);
  EXPECT_EQ(from({}).gradient_accumulation_steps.origin.describe(), "default");
}

TEST(ConfigPrecedence, Trap3_TheAccumulationVariableDoesNotBeatTheProgram) {
  const Settings settings =
      from({{"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8"}}, {.gradient_accumulation_steps = 2});
  EXPECT_EQ(settings.gradient_accumulation_steps, 2);
}

TEST(ConfigPrecedence, AnAbsentOptionalOfTheProgramSaysNothing) {
  const Settings settings = from({{"TESSERA_MIXED_PRECISION", "bf16"}},
                                 {.mixed_precision = std::nullopt,
                                  .schedule_unit = ScheduleUnit::kHuggingFace,
                                  .even_batches = false,
                                  .project_dir = "runs/1",
                                  .log_with = std::vector<std::string>{"csv", "jsonl"},
                                  .loss_scale = {.init_scale = 1024.0}});
  EXPECT_EQ(settings.mixed_precision, Precision::kBF16);
  EXPECT_FALSE(settings.even_batches);
  EXPECT_EQ(settings.schedule_unit, ScheduleUnit::kHuggingFace);
  EXPECT_EQ(settings.scaler_init_scale, 1024);
  EXPECT_EQ(settings.log_with.value, (std::vector<std::string>{"csv", "jsonl"}));
  EXPECT_EQ(settings.project_dir.value, "runs/1");
}

// Any non-empty text, "false" too, was true in eight options of the other launcher.
TEST(ConfigValues, Trap25_FalseIsFalse) {
  for (const char* no : {"false", "False", "FALSE", "no", "n", "f", "off", "0"}) {
    EXPECT_FALSE(parse_bool("x", no)) << no;
    EXPECT_FALSE(from({{"TESSERA_EVEN_BATCHES", no}}).even_batches) << no;
  }
  for (const char* yes : {"true", "True", "yes", "Y", "t", "on", "1"}) {
    EXPECT_TRUE(from({{"ACCELERATE_USE_CPU", yes}}).cpu) << yes;
  }
  for (const char* neither : {"2", "maybe", "tru", "none", " true"}) {
    EXPECT_TRUE(mentions(message_of<ConfigError>([&] {
                           from({{"TESSERA_CPU", neither}});
                         }),
                         "TESSERA_CPU has to be true or false"));
  }
}

// The version of FSDP was compared with a text, so that a check never fired: all that is compared
// here has the type of its row.
TEST(ConfigValues, Trap25_NumbersAreComparedAsNumbers) {
  EXPECT_THROW(from({{"TESSERA_GRADIENT_ACCUMULATION_STEPS", "0"}}), ConfigError);
  EXPECT_THROW(from({{"TESSERA_GRADIENT_ACCUMULATION_STEPS", "2.5"}}), ConfigError);
  EXPECT_THROW(from({{"TESSERA_GRADIENT_ACCUMULATION_STEPS", "2x"}}), ConfigError);
  EXPECT_THROW(from({{"TESSERA_SCALER_BACKOFF_FACTOR", "nan"}}), ConfigError);
  EXPECT_THROW(from({{"TESSERA_ZERO_STAGE", "4"}}), ConfigError);
  EXPECT_EQ(merge({.environment = {{"TESSERA_ZERO_STAGE", "3"}}, .file = ""}).zero_stage, 3);
}

TEST(ConfigValues, NamesOfChoicesAreListedWhereOneIsWrong) {
  const std::string message = message_of<ConfigError>([] {
    from({{"TESSERA_MIXED_PRECISION", "fp17"}});
  });
  EXPECT_TRUE(mentions(message, "TESSERA_MIXED_PRECISION has to be one of no, bf16, fp16"))
      << message;
  EXPECT_EQ(from({{"ACCELERATE_LOG_LEVEL", "WARNING"}}).log_level, LogLevel::kWarning);
}

TEST(ConfigContradictions, TwoVariablesOfOneSettingHaveToSayTheSame) {
  const std::string message = message_of<ConfigError>([] {
    from({{"TESSERA_MIXED_PRECISION", "bf16"}, {"ACCELERATE_MIXED_PRECISION", "fp16"}});
  });
  EXPECT_TRUE(mentions(message, "TESSERA_MIXED_PRECISION=bf16")) << message;
  EXPECT_TRUE(mentions(message, "ACCELERATE_MIXED_PRECISION=fp16")) << message;
  // The same value in other words is no contradiction.
  EXPECT_TRUE(from({{"TESSERA_CPU", "yes"}, {"ACCELERATE_USE_CPU", "1"}}).cpu);
  EXPECT_THROW(from({{"TESSERA_RANKS", "2"}, {"TESSERA_NUM_PROCESSES", "3"}}), ConfigError);
}

TEST(ConfigContradictions, AValueThatIsTheDefaultContradictsNothing) {
  EXPECT_EQ(from({{"TESSERA_DDP_POWER_SGD_RANK", "1"}}).ddp_power_sgd_rank, 1);
  EXPECT_THROW(from({{"TESSERA_DDP_POWER_SGD_RANK", "2"}}), ConfigError);
  // torch's start_powerSGD_iter.
  EXPECT_EQ(from({{"TESSERA_DDP_COMM_HOOK", "power_sgd"}}).ddp_power_sgd_start_step, 1000);
}

TEST(ConfigContradictions, AWrapperNeedsAHookThatDoesNotCast) {
  for (const std::string hook : {"power_sgd", "batched_power_sgd"}) {
    for (const std::string wrapper : {"none", "fp16", "bf16"}) {
      const Settings settings =
          from({{"TESSERA_DDP_COMM_HOOK", hook}, {"TESSERA_DDP_COMM_WRAPPER", wrapper}});
      EXPECT_EQ(text(*find_setting("ddp_comm_hook"), settings), hook);
      EXPECT_EQ(text(*find_setting("ddp_comm_wrapper"), settings), wrapper);
      EXPECT_EQ(from({{"TESSERA_DDP_COMM_HOOK", hook}, {"TESSERA_DDP_POWER_SGD_RANK", "2"}})
                    .ddp_power_sgd_rank,
                2);
    }
  }
  const std::string none = message_of<ConfigError>([] {
    from({{"TESSERA_DDP_COMM_WRAPPER", "bf16"}});
  });
  EXPECT_TRUE(mentions(none, "ddp_comm_wrapper=bf16 (TESSERA_DDP_COMM_WRAPPER)")) << none;
  EXPECT_TRUE(mentions(none, "no hook to wrap")) << none;
  for (const std::string hook : {"fp16", "bf16"}) {
    const std::string twice = message_of<ConfigError>([&] {
      from({{"TESSERA_DDP_COMM_HOOK", hook}, {"TESSERA_DDP_COMM_WRAPPER", "fp16"}});
    });
    EXPECT_TRUE(mentions(twice, "ddp_comm_hook=" + hook)) << twice;
    EXPECT_TRUE(mentions(twice, "casts already")) << twice;
  }
  EXPECT_THROW(
      from({{"TESSERA_DDP_COMM_HOOK", "power_sgd"}, {"TESSERA_DDP_COMM_WRAPPER", "power_sgd"}}),
      ConfigError);
  const Folder folder;
  const std::string file = folder.write(
      "job.json", R"({"ddp_comm_hook": "batched_power_sgd", "ddp_comm_wrapper": "fp16"})");
  EXPECT_EQ(from({}, {}, file).ddp_comm_wrapper, CommWrapper::kFP16);
}

TEST(ConfigContradictions, SettingsWithoutEffectAreNamedWithWhatTheyNeed) {
  const std::string limit = message_of<ConfigError>([] { from({{"TESSERA_TOTAL_LIMIT", "2"}}); });
  EXPECT_TRUE(mentions(limit, "total_limit=2 (TESSERA_TOTAL_LIMIT)")) << limit;
  EXPECT_TRUE(mentions(limit, "automatic_checkpoint_naming")) << limit;
  EXPECT_EQ(from({{"TESSERA_TOTAL_LIMIT", "2"}, {"TESSERA_AUTOMATIC_CHECKPOINT_NAMING", "1"}})
                .total_limit,
            2);
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         from({{"TESSERA_DDP_POWER_SGD_RANK", "4"}});
                       }),
                       "ddp_comm_hook"));
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         from({{"TESSERA_PRECISION_POLICY", "pure"}});
                       }),
                       "mixed_precision=no"));
  EXPECT_TRUE(mentions(message_of<ConfigError>([] {
                         from({{"TESSERA_MIXED_PRECISION", "bf16"},
                               {"TESSERA_PRECISION_POLICY", "pure"},
                               {"TESSERA_DDP_GRADIENT_AS_BUCKET_VIEW", "no"}});
                       }),
                       "ddp_gradient_as_bucket_view=false"));
}

TEST(ConfigUnknown, VariablesThatLookLikeSettingsAreNamedWithTheNearestKey) {
  const std::string message = message_of<ConfigError>([] {
    from({{"TESSERA_MIXED_PRECISOIN", "bf16"}});
  });
  EXPECT_TRUE(mentions(message, "TESSERA_MIXED_PRECISOIN")) << message;
  EXPECT_TRUE(mentions(message, "\"mixed_precision\"")) << message;
  EXPECT_THROW(from({{"TESSERA_DDP_FIND_UNUSED", "1"}}), ConfigError);
  EXPECT_THROW(from({{"TESSERA_SEDE", "1"}}), ConfigError);
  // Variables of the library and of users stay theirs.
  EXPECT_NO_THROW(from({{"TESSERA_RANK", "0"},
                        {"TESSERA_NODE", "0"},
                        {"TESSERA_WORLD_SIZE", "1"},
                        {"TESSERA_DATA_DIR", "/data"},
                        {"TESSERA_TEST_SLOW", "1"},
                        {"TESSERA_MY_EXPERIMENT", "x"},
                        {"TESSERA_CPX", "1"},  // too short to be like "cpu"
                        {"TESSERA_SEED", ""}}));
}

TEST(ConfigFile, UnknownKeysAreAllListed) {
  const Folder folder;
  const std::string file =
      folder.write("a.json", R"({"mixed_precison": "bf16", "cpu": true, "warp_factor": 9})");
  const std::string message = message_of<ConfigError>([&] { from({}, {}, file); });
  EXPECT_TRUE(mentions(message, "\"mixed_precison\" (did you mean \"mixed_precision\"?)"))
      << message;
  EXPECT_TRUE(mentions(message, "\"warp_factor\"") && mentions(message, file)) << message;
}

TEST(ConfigFile, WhatIsNoObjectOfSettingsIsRefused) {
  const Folder folder;
  const auto read = [&](const std::string& text) {
    return from({}, {}, folder.write("b.json", text));
  };
  EXPECT_THROW(read("[1]"), FormatError);
  EXPECT_THROW(read("{\"cpu\": "), FormatError);
  EXPECT_THROW(read(R"({"cpu": {"a": 1}})"), ConfigError);
  EXPECT_THROW(read(R"({"cpu": true, "cpu": false})"), ConfigError);
  EXPECT_THROW(read(R"({"ranks": 2, "num_processes": 3})"), ConfigError);
  EXPECT_THROW(read(R"({"gradient_accumulation_steps": "four"})"), ConfigError);
  EXPECT_THROW(from({}, {}, folder.path("absent.json")), IoError);
  EXPECT_EQ(read(R"({"seed": null, "log_with": ["csv", "jsonl"], "num_processes": 4})").ranks.value,
            4);
}

TEST(ConfigFile, ThePlaceIsAnArgumentAVariableOrTheUsersFolder) {
  const Folder folder;
  folder.write("xdg/tessera/config.json", R"({"seed": 1})");
  const std::string named = folder.write("named.json", R"({"seed": 2})");
  const std::string given = folder.write("given.json", R"({"seed": 3})");
  Environment environment = {{"XDG_CONFIG_HOME", folder.path("xdg")},
                             {"HOME", folder.path("home")}};
  EXPECT_EQ(resolve({.environment = environment}).seed.value, 1);
  environment["TESSERA_CONFIG_FILE"] = named;
  EXPECT_EQ(resolve({.environment = environment}).seed.value, 2);
  EXPECT_EQ(resolve({.environment = environment, .file = given}).seed.value, 3);
  EXPECT_EQ(resolve({.environment = environment, .file = ""}).seed.value, std::nullopt);
  EXPECT_EQ(resolve({.environment = {{"HOME", folder.path("home")}}}).seed.value, std::nullopt);
  EXPECT_EQ(default_config_file({{"HOME", "/h"}}), "/h/.config/tessera/config.json");
  environment["TESSERA_CONFIG_FILE"] = folder.path("gone.json");
  EXPECT_THROW(resolve({.environment = environment}), IoError);
}

TEST(ConfigFile, ItHoldsWhatDiffersFromTheDefaultWithItsTypes) {
  const AcceleratorOptions code{.mixed_precision = Precision::kBF16,
                                .even_batches = false,
                                .seed = 7,
                                .log_with = std::vector<std::string>{"csv", "jsonl"},
                                .loss_scale = {.growth_factor = 2.5}};
  EXPECT_EQ(config_json(from({}, code)),
            "{\n  \"mixed_precision\": \"bf16\",\n  \"seed\": 7,\n  \"even_batches\": false,\n"
            "  \"log_with\": [\n    \"csv\",\n    \"jsonl\"\n  ],\n"
            "  \"scaler_growth_factor\": 2.5\n}\n");
}

// The defect: --gradient_accumulation_steps was exported for one paradigm only. Every flag reaches
// the ranks here, and is told from what the user has exported.
TEST(ConfigLaunch, EveryFlagReachesTheRanksAsAFlag) {
  launch::Flags flags;
  for (const Setting& setting : schema()) {
    if (setting.planned || setting.section == "launch") continue;
    flags[std::string(setting.key)] = another_value(setting);
  }
  flags["automatic_checkpoint_naming"] = "true";
  flags["ddp_comm_hook"] = "power_sgd";
  // What contradicts the rest, and what only goes with sharding: in a job of their own.
  launch::Flags sharded = {{"sharding", "fsdp"}};
  for (const auto& [key, value] : std::map(flags.begin(), flags.end())) {
    const bool shards = find_setting(key)->section == "sharding" || key.starts_with("dp_");
    if (!shards) continue;
    flags.erase(key);
    if (key == "deepspeed_config_file") continue;
    if (key != "sharding" && key != "zero_stage" && key != "fsdp_min_num_params") {
      sharded[key] = value;
    }
  }
  sharded["scaler_hysteresis"] = flags.extract("scaler_hysteresis").mapped();
  sharded["deepspeed_config_file"] = R"({"steps_per_print": 10})";
  for (const launch::Flags& job :
       {flags, sharded, launch::Flags{{"zero_stage", "2"}},
        launch::Flags{{"sharding", "zero3"}, {"fsdp_min_num_params", "1000"}}}) {
    const launch::LaunchOptions options = launch::resolve_options(job, {}, "", {"train"});
    const Environment of_ranks = launch::settings_for_ranks(options, {});
    const Settings settings = resolve({.environment = of_ranks, .file = ""});
    for (const auto& [key, value] : job) {
      EXPECT_EQ(text(*find_setting(key), settings), value) << key;
      EXPECT_EQ(origin(*find_setting(key), settings).source, Source::kLaunchFlag) << key;
    }
  }
}

TEST(ConfigLaunch, WhatTheLauncherWroteItselfIsNoVariableOfTheUser) {
  const launch::LaunchOptions options =
      launch::resolve_options({{"grace", "3"}}, {{"TESSERA_INIT_TIMEOUT", "9"}}, "", {"train"});
  Environment job = {{"TESSERA_GRACE", "3"},
                     {"TESSERA_INIT_TIMEOUT", "9"},
                     {"TESSERA_COLLECTIVE_TIMEOUT", "600"},
                     {"TESSERA_NUM_THREADS", "1"},
                     {"TESSERA_STORE", "127.0.0.1:1"},
                     {"TESSERA_NODES", "1"}};
  job.merge(launch::settings_for_ranks(options, job));
  const Settings settings = resolve({.environment = job, .file = ""});
  EXPECT_EQ(settings.grace.origin.describe(), "--grace");
  EXPECT_EQ(settings.init_timeout.origin.describe(), "TESSERA_INIT_TIMEOUT");
  EXPECT_EQ(settings.collective_timeout.origin.describe(), "default");
  EXPECT_EQ(settings.threads.origin.describe(), "default");
  EXPECT_EQ(settings.nodes.origin.describe(), "default");
}

TEST(ConfigLaunch, TheFileOfTheLauncherIsTheFileOfItsRanks) {
  const Folder folder;
  const std::string file = folder.write("job.json", R"({"ranks": 2, "mixed_precision": "bf16"})");
  const launch::LaunchOptions options = launch::resolve_options({}, {}, file, {"train"});
  EXPECT_EQ(options.ranks, 2);
  const Settings settings = resolve({.environment = launch::settings_for_ranks(options, {})});
  EXPECT_EQ(settings.mixed_precision, Precision::kBF16);
  EXPECT_EQ(settings.mixed_precision.origin.describe(), "file " + file);
}

// A message that shows a value goes into it as deep as it is: 100 000 levels were a stack overflow.
TEST(ConfigFile, ValuesThatAreNestedDeeplyAreRefused) {
  const std::string deep(100'000, '[');
  EXPECT_THROW(
      parse_config("{\"seed\": " + deep + std::string(deep.size(), ']') + "}", "deep.json"),
      FormatError);
  EXPECT_THROW(parse_config("{\"seed\": {\"a\": 1}}", "map.json"), ConfigError);
}

TEST(ConfigDocument, ThePageIsTheTable) {
  std::ifstream file(std::string(tests::source_dir()) + "/docs/configuration.md");
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), configuration_document())
      << "run: build/bin/tessera config document > docs/configuration.md";
}

TEST(ConfigDescribe, ValuesAreShownWithTheirOrigin) {
  const Settings settings = from({{"TESSERA_SEED", "5"}});
  EXPECT_EQ(describe(settings, false), "seed = 5  (TESSERA_SEED)\n");
  EXPECT_TRUE(mentions(describe(settings, true), "even_batches = true  (default)\n"));
}

}  // namespace
}  // namespace tessera::accelerate::test_config
