// DeepSpeed's JSON files as settings: every key, what is refused and why, sizes of batches.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <unistd.h>

#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/core/error.h>

#include "message_of.h"
#include "source_dir.h"

namespace tessera::accelerate::test_deepspeed_config {
namespace {

using Texts = std::vector<std::string>;

DeepSpeedConfig read(const std::string& json) { return parse_deepspeed_config(json, "ds.json"); }

// {"a": {"b": VALUE}} of "a.b".
std::string object_of(std::string path, const std::string& value) {
  std::string json = value;
  while (!path.empty()) {
    const size_t dot = path.rfind('.');
    const std::string name = dot == std::string::npos ? path : path.substr(dot + 1);
    json = "{\"" + name + "\": " + json + "}";
    path = dot == std::string::npos ? "" : path.substr(0, dot);
  }
  return json;
}

// Settings that differ from their defaults, "key=value key=value".
std::string changes(const Settings& settings) {
  const Settings defaults;
  std::string all;
  for (const Setting& setting : schema()) {
    if (setting.key == "deepspeed_config_file") continue;
    if (text(setting, settings) == text(setting, defaults)) continue;
    all += (all.empty() ? "" : " ") + std::string(setting.key) + "=" + text(setting, settings);
  }
  return all;
}

Settings resolved(const std::string& json, AcceleratorOptions code = {},
                  const Environment& environment = {}) {
  code.deepspeed_config = json;
  return resolve({.code = code, .environment = environment, .file = ""});
}

// ---- Keys

struct KeyCase {
  std::string path, value;
  std::string settings;      // that it makes; empty: none
  std::string refused = {};  // part of the reason
};

const std::vector<KeyCase>& key_cases() {
  static const std::vector<KeyCase> kCases = {
      {"gradient_accumulation_steps", "4", "gradient_accumulation_steps=4"},
      {"gradient_clipping", "0.5", "gradient_clipping=0.5"},
      {"gradient_clipping", "\"auto\"", "gradient_clipping=1"},
      {"prescale_gradients", "false", ""},
      {"prescale_gradients", "true", "", "divided once"},
      {"gradient_predivide_factor", "1", ""},
      {"gradient_predivide_factor", "2.0", "", "divided once"},
      {"sparse_gradients", "true", "", "dense"},
      {"communication_data_type", "\"fp32\"", ""},
      {"communication_data_type", "\"fp16\"", "ddp_comm_hook=fp16"},
      {"communication_data_type", "\"bfp16\"", "ddp_comm_hook=bf16"},
      {"data_types.grad_accum_dtype", "\"fp32\"", ""},
      {"data_types.grad_accum_dtype", "\"bf16\"", "", "f32"},
      {"steps_per_print", "2000", ""},
      {"wall_clock_breakdown", "false", ""},
      {"wall_clock_breakdown", "true", "", "prints nothing"},
      {"zero_allow_untested_optimizer", "true", ""},
      {"dataloader_drop_last", "true", "", "drop_last"},
      {"disable_allgather", "true", "", "old parameters"},

      {"fp16.enabled", "true",
       "mixed_precision=fp16 precision_policy=pure scaler_growth_interval=1000 scaler_min_scale=1 "
       "scaler_hysteresis=2"},
      {"fp16.enabled", "false", ""},
      {"fp16.auto_cast", "true", ""},
      {"fp16.loss_scale", "0", ""},
      {"fp16.loss_scale", "128",
       "scaler_init_scale=128 scaler_growth_factor=1 scaler_backoff_factor=1"},
      {"fp16.initial_scale_power", "12", "scaler_init_scale=4096"},
      {"fp16.loss_scale_window", "500", "scaler_growth_interval=500"},
      {"fp16.hysteresis", "2", "scaler_hysteresis=2"},
      {"fp16.consecutive_hysteresis", "true", "scaler_consecutive_hysteresis=true"},
      {"fp16.min_loss_scale", "1", "scaler_min_scale=1"},
      {"fp16.fp16_master_weights_and_grads", "true", "", "f32"},
      {"bf16.enabled", "true", "mixed_precision=bf16 precision_policy=pure"},
      {"bfloat16.enabled", "true", "mixed_precision=bf16 precision_policy=pure"},
      {"bf16.immediate_grad_update", "true", ""},
      {"bf16.check_grad_overflow", "true", "", "as far as f32"},
      {"bf16.bf16_master_weights_and_grads", "true", "", "f32"},
      {"bf16.bf16_optimizer_states", "true", "", "f32"},
      {"torch_autocast.enabled", "true", "mixed_precision=bf16"},
      {"amp", R"({"enabled": true, "opt_level": "O1"})", "", "Apex"},
      {"amp", R"({"enabled": false})", ""},

      {"zero_optimization.stage", "0", ""},
      {"zero_optimization.stage", "1", "sharding=zero1 zero_stage=1"},
      {"zero_optimization.stage", "2", "sharding=zero2 zero_stage=2"},
      {"zero_optimization.stage", "3", "sharding=zero3 zero_stage=3"},
      {"zero_optimization.stage", "\"auto\"", "sharding=zero2 zero_stage=2"},
      {"zero_optimization.contiguous_gradients", "true", ""},
      {"zero_optimization.reduce_scatter", "true", ""},
      {"zero_optimization.reduce_bucket_size", "5.24288e6", "ddp_bucket_cap_mb=20"},
      {"zero_optimization.reduce_bucket_size", "\"auto\"", ""},
      {"zero_optimization.allgather_bucket_size", "2e8", ""},
      {"zero_optimization.use_multi_rank_bucket_allreduce", "true", ""},
      {"zero_optimization.allgather_partitions", "true", ""},
      {"zero_optimization.overlap_comm", "false", ""},
      {"zero_optimization.round_robin_gradients", "true", ""},
      {"zero_optimization.ignore_unused_parameters", "true", ""},
      {"zero_optimization.ignore_unused_parameters", "false", "", "counts as zeros"},
      {"zero_optimization.load_from_fp32_weights", "false", "", "masters"},
      {"zero_optimization.elastic_checkpoint", "true", ""},
      {"zero_optimization.legacy_stage1", "true", "", "old form"},
      {"zero_optimization.offload_param", "null", ""},
      {"zero_optimization.offload_param.device", "\"none\"", ""},
      {"zero_optimization.offload_param.device", "\"auto\"", ""},
      {"zero_optimization.offload_param.device", "\"nvme\"", "", "drives"},
      {"zero_optimization.offload_param.nvme_path", "\"/nvme\"", ""},
      {"zero_optimization.offload_param.buffer_count", "5", ""},
      {"zero_optimization.offload_param.buffer_size", "1e8", ""},
      {"zero_optimization.offload_param.max_in_cpu", "1e9", ""},
      {"zero_optimization.offload_param.pin_memory", "true", ""},
      {"zero_optimization.offload_optimizer.device", "\"none\"", ""},
      {"zero_optimization.offload_optimizer.device", "\"nvme\"", "", "drives"},
      {"zero_optimization.offload_optimizer.buffer_count", "4", ""},
      {"zero_optimization.offload_optimizer.pipeline_read", "true", ""},
      {"zero_optimization.offload_optimizer.pipeline_write", "true", ""},
      {"zero_optimization.offload_optimizer.fast_init", "true", ""},
      {"zero_optimization.offload_optimizer.ratio", "1.0", ""},
      {"zero_optimization.offload_optimizer.ratio", "0.3", "", "alike"},
      {"zero_optimization.sub_group_size", "1e9", ""},
      {"zero_optimization.stage3_prefetch_bucket_size", "5e7", ""},
      {"zero_optimization.stage3_param_persistence_threshold", "\"auto\"", ""},
      {"zero_optimization.stage3_model_persistence_threshold", "1e12", ""},
      {"zero_optimization.stage3_max_live_parameters", "1e9", ""},
      {"zero_optimization.max_reuse_distance", "1e9", ""},
      {"zero_optimization.stage3_gather_16bit_weights_on_model_save", "true", ""},
      {"zero_optimization.stage3_module_granularity_threshold", "10", "", "fsdp_min_num_params"},
      {"zero_optimization.leaf_module", R"({"classes": ["Moe"]})", "", "fsdp_wrap_modules"},
      {"zero_optimization.zero_hpz_partition_size", "1", ""},
      {"zero_optimization.zero_hpz_partition_size", "8", "", "reshard_after_forward"},
      {"zero_optimization.zero_quantized_weights", "true", "", "dtypes of the model"},
      {"zero_optimization.zero_quantized_gradients", "true", "", "dtypes of the model"},
      {"zero_optimization.zeropp_loco_param", "null", ""},
      {"zero_optimization.zeropp_loco_param", R"({"err_beta": 0.8})", "", "dtypes of the model"},
      {"zero_optimization.mics_shard_size", "-1", ""},
      {"zero_optimization.mics_hierarchical_params_gather", "true", "", "one collective"},
      {"zero_optimization.memory_efficient_linear", "false", ""},
      {"zero_optimization.log_trace_cache_warnings", "true", ""},
      {"zero_optimization.zenflow", R"({"topk_ratio": 0.1})", "", "its own step"},

      {"activation_checkpointing.partition_activations", "true", "",
       "fsdp_activation_checkpointing"},
      {"activation_checkpointing.cpu_checkpointing", "false", ""},
      {"activation_checkpointing.number_checkpoints", "null", ""},
      {"checkpoint.load_universal", "true", ""},
      {"checkpoint.use_node_local_storage", "true", "", "one folder"},
      {"aio", R"({"block_size": 1048576})", ""},
      {"tensorboard", R"({"enabled": true, "output_path": "logs"})", "", "log_with"},
      {"wandb", R"({"enabled": false})", ""},
      {"csv_monitor", "{}", ""},
      {"flops_profiler", R"({"enabled": true})", "", "profile"},
      {"comms_logger", R"({"enabled": true})", "", "describe()"},
      {"autotuning", R"({"enabled": true})", "", "searched"},
      {"elasticity", R"({"enabled": true, "max_train_batch_size": 2000})", "", "--restart-ranks"},
      {"compression_training", R"({"weight_quantization": {}})", "", "quantized"},
      {"curriculum_learning", R"({"enabled": true})", "", "what it reads"},
      {"progressive_layer_drop", R"({"enabled": true})", "", "which layers"},
      {"tensor_parallel", R"({"autotp_size": 1})", ""},
      {"tensor_parallel", R"({"autotp_size": 4})", "", "not split"},
      {"pipeline", "{}", ""},
      {"sparse_attention", R"({"mode": "fixed"})", "", "attends"},
  };
  return kCases;
}

TEST(DeepSpeedKeys, EachIsASettingOrWhatIsTheCaseAnywayOrRefusedWithItsReason) {
  for (const KeyCase& one : key_cases()) {
    SCOPED_TRACE(one.path + ": " + one.value);
    const std::string json = object_of(one.path, one.value);
    if (!one.refused.empty()) {
      const std::string message = message_of<UnsupportedError>([&] { read(json); });
      EXPECT_TRUE(mentions(message, one.path + ": ")) << message;
      EXPECT_TRUE(mentions(message, one.refused)) << message;
      continue;
    }
    EXPECT_EQ(changes(resolved(json)), one.settings);
    const DeepSpeedConfig config = read(json);
    ASSERT_EQ(config.lines.size(), 1u);
    EXPECT_FALSE(config.lines[0].note.empty());
    EXPECT_NE(config.lines[0].outcome, ImportOutcome::kRefused);
  }
}

TEST(DeepSpeedKeys, StandInTheDocumentEachOfThem) {
  std::ifstream file(std::string(tests::source_dir()) + "/docs/deepspeed.md");
  ASSERT_TRUE(file.is_open());
  std::ostringstream page;
  page << file.rdbuf();
  for (const std::string& key : deepspeed_keys()) {
    const std::string name = key.substr(key.rfind('.') + 1);
    EXPECT_TRUE(mentions(page.str(), "`" + name + "`")) << key;
  }
}

TEST(DeepSpeedKeys, ShardsOfMicsAreGroupsThatShard) {
  EXPECT_EQ(changes(resolved(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})")),
            "dp_shard_size=4 sharding=zero3 zero_stage=3");
  const std::string message = message_of<ConfigError>(
      [] { resolved(R"({"zero_optimization": {"stage": 2, "mics_shard_size": 4}})"); });
  EXPECT_TRUE(mentions(message, "zero_optimization.mics_shard_size")) << message;
}

TEST(DeepSpeedKeys, SixteenBitsOnTheWireAreThoseOfDdpAlone) {
  const std::string message = message_of<ConfigError>([] {
    resolved(R"({"communication_data_type": "fp16", "zero_optimization": {"stage": 2}})");
  });
  EXPECT_TRUE(mentions(message, "communication_data_type")) << message;
  EXPECT_TRUE(mentions(message, "sharding")) << message;
}

TEST(DeepSpeedKeys, OffloadToTheCpuIsASettingAndOlderNamesSayWhatToWrite) {
  const auto with = [](const char* section) {
    return resolved(std::string(R"({"zero_optimization": {"stage": 3, ")") + section +
                    R"(": {"device": "cpu", "pin_memory": true}}})");
  };
  EXPECT_TRUE(with("offload_param").offload_parameters);
  EXPECT_FALSE(with("offload_param").offload_optimizer);
  EXPECT_TRUE(with("offload_optimizer").offload_optimizer);
  EXPECT_FALSE(with("offload_optimizer").offload_parameters);
  for (const char* old : {"cpu_offload", "cpu_offload_param", "cpu_offload_params"}) {
    const std::string message = message_of<UnsupportedError>([&] {
      read(std::string(R"({"zero_optimization": {"stage": 3, ")") + old + R"(": true}})");
    });
    EXPECT_TRUE(mentions(message, old)) << message;
    EXPECT_TRUE(mentions(message, "offload_param")) << message;
  }
}

TEST(DeepSpeedKeys, AllThatIsRefusedStandsInOneMessage) {
  const std::string message = message_of<UnsupportedError>([] {
    read(R"({"dump_state": true, "zero_optimization": {"zero_quantized_weights": true,
             "offload_param": {"device": "nvme", "nvme_path": "/x"}}})");
  });
  for (const char* key : {"dump_state", "zero_optimization.zero_quantized_weights",
                          "zero_optimization.offload_param.device"}) {
    EXPECT_TRUE(mentions(message, key)) << message;
  }
}

// As the files that HuggingFace's programs come with: every number left to the program.
constexpr const char* kAutomatic = R"({
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
           "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"},
    "offload_param": {"device": "none"}, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto"},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";

TEST(DeepSpeedFile, LeavesToTheProgramWhatIsAuto) {
  EXPECT_EQ(changes(resolved(kAutomatic)),
            "gradient_clipping=1 scaler_growth_interval=1000 scaler_min_scale=1 "
            "scaler_hysteresis=2 sharding=zero3 zero_stage=3");
  const Settings settings = resolved(kAutomatic, {.mixed_precision = Precision::kBF16,
                                                  .gradient_accumulation_steps = 3,
                                                  .gradient_clipping = 0.25});
  EXPECT_EQ(changes(settings),
            "mixed_precision=bf16 precision_policy=pure gradient_accumulation_steps=3 "
            "gradient_clipping=0.25 scaler_growth_interval=1000 scaler_min_scale=1 "
            "scaler_hysteresis=2 sharding=zero3 zero_stage=3");
  EXPECT_EQ(settings.gradient_clipping.origin.describe(), "code");
  EXPECT_EQ(settings.zero_stage.origin.describe(),
            "file deepspeed_config, zero_optimization.stage");
}

// Of its documents: window 1000, hysteresis 2, a least scale of 1. GradScaler's are others.
TEST(DeepSpeedFile, LossScalesAreDeepSpeedsOwnWhereTheFileLeavesThemOut) {
  const std::string defaults = "scaler_growth_interval=1000 scaler_min_scale=1 scaler_hysteresis=2";
  const std::string fp16 = "mixed_precision=fp16 precision_policy=pure ";
  EXPECT_EQ(changes(resolved("{}", {.mixed_precision = Precision::kFP16})), fp16 + defaults);
  EXPECT_EQ(changes(resolved("{}", {.mixed_precision = Precision::kBF16})),
            "mixed_precision=bf16 precision_policy=pure");
  EXPECT_EQ(changes(resolved("{}", {.mixed_precision = Precision::kFP8})), "mixed_precision=fp8");
  EXPECT_EQ(changes(resolved(R"({"fp16": {"enabled": true, "loss_scale_window": 7}})")),
            fp16 + "scaler_growth_interval=7 scaler_min_scale=1 scaler_hysteresis=2");
  EXPECT_EQ(
      changes(resolved(R"({"fp16": {"enabled": true}})", {}, {{"TESSERA_SCALER_HYSTERESIS", "3"}})),
      fp16 + "scaler_growth_interval=1000 scaler_min_scale=1 scaler_hysteresis=3");
  EXPECT_EQ(changes(resolved(R"({"fp16": {"enabled": true, "loss_scale": 8}})")),
            fp16 + "scaler_init_scale=8 scaler_growth_factor=1 scaler_backoff_factor=1");
  EXPECT_EQ(changes(resolved(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}})")),
            "mixed_precision=fp16");
}

TEST(DeepSpeedFile, ContradictsNobodyInSilence) {
  struct Case {
    const char *json, *key, *value, *place;
  };
  for (const Case& one :
       {Case{R"({"gradient_accumulation_steps": 4})", "gradient_accumulation_steps", "2",
             "gradient_accumulation_steps"},
        Case{R"({"gradient_clipping": 1.0})", "gradient_clipping", "0.5", "gradient_clipping"},
        Case{R"({"bf16": {"enabled": true}})", "mixed_precision", "fp16", "bf16.enabled"},
        Case{R"({"bf16": {"enabled": false}})", "mixed_precision", "bf16", "bf16.enabled"},
        Case{R"({"fp16": {"enabled": true, "initial_scale_power": 10}})", "scaler_init_scale",
             "65536", "fp16.initial_scale_power"},
        Case{R"({"zero_optimization": {"stage": 2}})", "sharding", "zero3",
             "zero_optimization.stage"},
        Case{R"({"zero_optimization": {"stage": 2}})", "zero_stage", "1",
             "zero_optimization.stage"},
        Case{R"({"zero_optimization": {"reduce_bucket_size": 1e6}})", "ddp_bucket_cap_mb", "25",
             "zero_optimization.reduce_bucket_size"}}) {
    SCOPED_TRACE(one.json);
    Environment environment;
    const std::string variable = find_setting(one.key)->environment();
    environment[variable] = one.value;
    const std::string message =
        message_of<ConfigError>([&] { resolved(one.json, {}, environment); });
    EXPECT_TRUE(mentions(message, one.place)) << message;
    EXPECT_TRUE(mentions(message, variable)) << message;
  }
  const std::string least = message_of<ConfigError>(
      [] { resolved(R"({"fp16": {"initial_scale_power": 4, "min_loss_scale": 32}})"); });
  EXPECT_TRUE(mentions(least, "fp16.min_loss_scale")) << least;
  EXPECT_TRUE(mentions(least, "fp16.initial_scale_power")) << least;
  // The same word twice is none.
  EXPECT_EQ(resolved(R"({"zero_optimization": {"stage": 3}})", {}, {{"TESSERA_SHARDING", "fsdp"}})
                .sharding.value,
            Sharding::kFsdp);
  EXPECT_EQ(resolved(R"({"gradient_accumulation_steps": 4})", {},
                     {{"TESSERA_GRADIENT_ACCUMULATION_STEPS", "4"}})
                .gradient_accumulation_steps.value,
            4);
  // A policy is what DeepSpeed's precision implies, no more.
  EXPECT_EQ(
      resolved(R"({"bf16": {"enabled": true}})", {}, {{"TESSERA_PRECISION_POLICY", "autocast"}})
          .precision_policy.value,
      PrecisionPolicy::kAutocast);
}

TEST(DeepSpeedFile, ComesFromAFileAnObjectOrAcceleratesVariable) {
  char path[] = "/tmp/tessera_ds_XXXXXX";
  ::close(::mkstemp(path));
  std::ofstream(path) << R"({"zero_optimization": {"stage": 1}})";
  EXPECT_EQ(resolved(path).sharding.value, Sharding::kZero1);
  EXPECT_EQ(resolved("  {\"zero_optimization\": {\"stage\": 2}}").sharding.value, Sharding::kZero2);
  const Settings settings = resolve({.environment = {{"ACCELERATE_USE_DEEPSPEED", "true"},
                                                     {"ACCELERATE_DEEPSPEED_CONFIG_FILE", path},
                                                     {"ACCELERATE_GRADIENT_CLIPPING", "auto"}},
                                     .file = ""});
  EXPECT_EQ(settings.sharding.value, Sharding::kZero1);
  EXPECT_EQ(settings.gradient_clipping.value, 0);
  std::filesystem::remove(path);
  const std::string message = message_of<IoError>([&] { resolved(path); });
  EXPECT_TRUE(mentions(message, path)) << message;
}

// ---- Bad files

TEST(DeepSpeedFile, NamesKeysThatAreUnknownWithTheNearest) {
  const std::string message = message_of<ConfigError>([] {
    read(R"({"zero_optimisation": {"stage": 2}, "train_batchsize": 4,
             "zero_optimization": {"reduce_bucketsize": 1, "stge": 3, "loss_scale_window": 4},
             "fp16": {"enable": true}, "overlap_comm": true, "xyz": 1})");
  });
  for (
      const char* part :
      {"ds.json", R"("zero_optimisation" (did you mean "zero_optimization"?))",
       R"("train_batchsize" (did you mean "train_batch_size"?))",
       R"("zero_optimization.reduce_bucketsize" (did you mean "zero_optimization.reduce_bucket_size"?))",
       R"("zero_optimization.stge" (did you mean "zero_optimization.stage"?))",
       R"("zero_optimization.loss_scale_window" (did you mean "fp16.loss_scale_window"?))",
       R"("fp16.enable" (did you mean "fp16.enabled"?))",
       R"("overlap_comm" (did you mean "zero_optimization.overlap_comm"?))", R"("xyz")"}) {
    EXPECT_TRUE(mentions(message, part)) << part << "\n" << message;
  }
}

TEST(DeepSpeedFile, NamesTheKeyWhoseValueCannotBe) {
  struct Case {
    const char *json, *place, *what;
  };
  for (const Case& one :
       {Case{R"({"zero_optimization": {"stage": "two"}})", "zero_optimization.stage",
             "a whole number or \"auto\""},
        Case{R"({"zero_optimization": {"stage": 2.5}})", "zero_optimization.stage",
             "a whole number"},
        Case{R"({"zero_optimization": {"stage": 4}})", "zero_optimization.stage", "from 0 to 3"},
        Case{R"({"zero_optimization": 2})", "zero_optimization", "an object"},
        Case{R"({"zero_optimization": {"overlap_comm": 1}})", "zero_optimization.overlap_comm",
             "true or false"},
        Case{R"({"zero_optimization": {"sub_group_size": "auto"}})",
             "zero_optimization.sub_group_size", "nobody fills in"},
        Case{R"({"zero_optimization": {"offload_param": {"device": "disk"}}})",
             "offload_param.device", "none, cpu or nvme"},
        Case{R"({"fp16": {"enabled": "yes"}})", "fp16.enabled", "true or false"},
        Case{R"({"fp16": {"loss_scale": -1}})", "fp16.loss_scale", "positive"},
        Case{R"({"fp16": {"initial_scale_power": 200}})", "fp16.initial_scale_power",
             "from 0 to 99"},
        Case{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "bf16.enabled", "one"},
        Case{R"({"bf16": {"enabled": true}, "torch_autocast": {"enabled": true}})",
             "torch_autocast.enabled", "one"},
        Case{R"({"torch_autocast": {"enabled": true, "dtype": "int8"}})", "torch_autocast.dtype",
             "bfloat16"},
        Case{R"({"gradient_clipping": -1})", "gradient_clipping", "from 0"},
        Case{R"({"gradient_accumulation_steps": 0})", "gradient_accumulation_steps", "1"},
        Case{R"({"train_batch_size": 0})", "train_batch_size", "1"},
        Case{R"({"communication_data_type": "int8"})", "communication_data_type", "fp32"},
        Case{R"({"optimizer": {"params": {}}})", "optimizer", "needs a type"},
        Case{R"({"optimizer": {"type": "Adam", "params": {"lr": {"a": 1}}}})",
             "optimizer.params.lr", "a number"}}) {
    SCOPED_TRACE(one.json);
    const std::string message = message_of<ConfigError>([&] { read(one.json); });
    EXPECT_TRUE(mentions(message, "ds.json")) << message;
    EXPECT_TRUE(mentions(message, one.place)) << message;
    EXPECT_TRUE(mentions(message, one.what)) << message;
  }
}

TEST(DeepSpeedFile, TakesTheBoundsThemselves) {
  struct Case {
    const char *path, *taken, *refused;
  };
  for (const Case& one :
       {Case{"fp16.initial_scale_power", "0", "-1"}, Case{"fp16.initial_scale_power", "99", "100"},
        Case{"fp16.loss_scale", "0", "-1"}, Case{"zero_optimization.stage", "0", "-1"},
        Case{"zero_optimization.stage", "3", "4"}, Case{"gradient_clipping", "0", "-1"},
        Case{"train_batch_size", "1", "0"}, Case{"train_batch_size", "1000000000", "1000000001"},
        Case{"gradient_accumulation_steps", "1", "0"}}) {
    SCOPED_TRACE(one.path);
    EXPECT_NO_THROW(read(object_of(one.path, one.taken))) << one.taken;
    EXPECT_THROW(read(object_of(one.path, one.refused)), ConfigError) << one.refused;
  }
}

TEST(DeepSpeedFile, IsOneObjectWithoutRepeatedKeys) {
  for (const char* json : {"", "[]", "{", "{\"a\": }", "{\"train_batch_size\": 1} 2"}) {
    EXPECT_TRUE(mentions(message_of<FormatError>([&] { read(json); }), "ds.json")) << json;
  }
  EXPECT_TRUE(mentions(
      message_of<FormatError>([] { read(R"({"zero_optimization": {"stage": 1, "stage": 2}})"); }),
      "\"zero_optimization.stage\" twice"));
  EXPECT_TRUE(mentions(message_of<FormatError>([] {
                         read(R"({"steps_per_print": 1, "bf16": {}, "steps_per_print": 1})");
                       }),
                       "\"steps_per_print\" twice"));
  // The same word in two sections is no repetition.
  EXPECT_NO_THROW(read(R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})"));
  std::string deep = "1";
  for (int i = 0; i < 100000; ++i) deep = deep + "]";
  EXPECT_THROW(read("{\"aio\": " + std::string(100000, '[') + deep + "}"), FormatError);
}

// ---- Files that DeepSpeed's and Transformers' documents and examples show, as they are

struct Published {
  const char *where, *json;
  std::string settings;      // that it makes
  std::string refused = {};  // or parts of the message, "a; b"
};
const std::vector<Published> kPublished = {
    {"getting started", R"({
  "train_batch_size": 8,
  "gradient_accumulation_steps": 1,
  "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
  "fp16": {"enabled": true},
  "zero_optimization": true
})",
     "mixed_precision=fp16 precision_policy=pure scaler_growth_interval=1000 "
     "scaler_min_scale=1 scaler_hysteresis=2 "
     "sharding=zero1 zero_stage=1"},
    {"CIFAR-10 tutorial", R"({
  "train_batch_size": 4,
  "steps_per_print": 2000,
  "optimizer": {"type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
  "wall_clock_breakdown": false
})",
     ""},
    {"CIFAR-10 example", R"({
  "train_batch_size": 4,
  "steps_per_print": 2000,
  "optimizer": {"type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "fp16": {"enabled": true, "fp16_master_weights_and_grads": true, "loss_scale": 0,
           "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
           "initial_scale_power": 15},
  "wall_clock_breakdown": false,
  "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true,
                        "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000,
                        "overlap_comm": true, "contiguous_gradients": true, "cpu_offload": true}
})",
     "",
     "fp16.fp16_master_weights_and_grads: true;zero_optimization.cpu_offload: true;"
     "offload_optimizer"},
    {"ZeRO tutorial, stage 1", R"({"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}})",
     "ddp_bucket_cap_mb=1907.3486328125 sharding=zero1 zero_stage=1"},
    {"ZeRO tutorial, stage 2", R"({
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8
    }
})",
     "ddp_bucket_cap_mb=1907.3486328125 sharding=zero2 zero_stage=2"},
    {"ZeRO tutorial, stage 3", R"({
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": true,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {
            "device": "cpu"
         },
        "offload_param": {
            "device": "cpu"
       }
   }
})",
     "ddp_bucket_cap_mb=38.14697265625 sharding=zero3 zero_stage=3 offload_parameters=true "
     "offload_optimizer=true"},
    {"ZeRO tutorial, elastic checkpoints",
     R"({"zero_optimization": {"stage": 3, "elastic_checkpoint": true}})",
     "sharding=zero3 zero_stage=3"},
    {"SQuAD example", R"({
  "train_batch_size": 24,
  "train_micro_batch_size_per_gpu": 6,
  "steps_per_print": 10,
  "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0, "weight_decay": 0.0,
                                           "bias_correction": false}},
  "fp16": {"enabled": true}
})",
     "mixed_precision=fp16 precision_policy=pure scaler_growth_interval=1000 "
     "scaler_min_scale=1 scaler_hysteresis=2"},
    {"BERT example", R"({
  "train_batch_size": 65536,
  "train_micro_batch_size_per_gpu": 64,
  "steps_per_print": 100,
  "prescale_gradients": false,
  "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01,
                                           "bias_correction": false, "max_coeff": 0.3,
                                           "min_coeff": 0.01}},
  "gradient_clipping": 1.0,
  "wall_clock_breakdown": false,
  "fp16": {"enabled": true, "loss_scale": 0},
  "sparse_attention": {"mode": "fixed", "block": 16, "different_layout_per_head": true,
                       "num_local_blocks": 4, "num_global_blocks": 1,
                       "attention": "bidirectional", "horizontal_global_attention": false,
                       "num_different_global_patterns": 4}
})",
     "", "optimizer.type: \"Lamb\";take AdamW;sparse_attention"},
    {"Megatron example", R"({
  "train_batch_size":16,
  "gradient_accumulation_steps": 1,
  "steps_per_print": 1,
  "zero_optimization": {
    "stage":2
  },
  "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
           "min_loss_scale": 1},
  "activation_checkpointing": {"partition_activations":true,
                               "contiguous_memory_optimization":false},
  "wall_clock_breakdown": false
})",
     "", "activation_checkpointing.partition_activations: true;fsdp_activation_checkpointing"},
    {"autotuning example", R"({
  "train_micro_batch_size_per_gpu": "auto",
  "zero_optimization": {"stage": 3},
  "fp16": {"enabled": true}
})",
     "mixed_precision=fp16 precision_policy=pure scaler_growth_interval=1000 "
     "scaler_min_scale=1 scaler_hysteresis=2 sharding=zero3 zero_stage=3"},
    {"QANet example", R"({
  "train_batch_size": 512,
  "train_micro_batch_size_per_gpu": 32,
  "steps_per_print": 10,
  "optimizer": {"type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "OneCycle",
                "params": {"cycle_min_lr": 0.004, "cycle_max_lr": 0.015,
                           "cycle_first_step_size": 1000, "cycle_second_step_size": 100,
                           "cycle_first_stair_count": 100, "cycle_second_stair_count": 100,
                           "decay_step_size": 1000, "decay_lr_rate": 0.01}}
})",
     ""},
    {"Transformers, ZeRO-3", R"({
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3,
                          "offload_optimizer": {"device": "none", "pin_memory": true},
                          "offload_param": {"device": "none", "pin_memory": true},
                          "overlap_comm": true, "contiguous_gradients": true,
                          "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto",
                          "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                          "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
})",
     "gradient_clipping=1 scaler_growth_interval=1000 scaler_min_scale=1 scaler_hysteresis=2 "
     "sharding=zero3 zero_stage=3"},
};

TEST(DeepSpeedFile, OfDeepSpeedsOwnPagesIsReadAsItStands) {
  EXPECT_EQ(changes(resolved(R"({"zero_optimization": false})")), "");
  for (const Published& one : kPublished) {
    SCOPED_TRACE(one.where);
    if (one.refused.empty()) {
      EXPECT_EQ(changes(resolved(one.json)), one.settings);
      continue;
    }
    const std::string message = message_of<UnsupportedError>([&] { resolved(one.json); });
    std::istringstream parts(one.refused);
    for (std::string part; std::getline(parts, part, ';');) {
      EXPECT_TRUE(mentions(message, part)) << part << "\n" << message;
    }
  }
}

// ---- Batches

TEST(DeepSpeedBatches, FollowFromAnyTwoOfThem) {
  struct Case {
    const char* json;
    std::optional<int64_t> steps;  // that the program says
    int64_t ranks;
    std::optional<int64_t> train, micro;
    int64_t accumulation;
  };
  const std::string automatic = R"({"train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})";
  for (const Case& one : {
           Case{R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 3})",
                {},
                2,
                24,
                4,
                3},
           Case{
               R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4})", {}, 2, 24, 4, 3},
           Case{R"({"train_batch_size": 24, "gradient_accumulation_steps": 3})", {}, 2, 24, 4, 3},
           Case{R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3})",
                {},
                2,
                24,
                4,
                3},
           Case{R"({"train_batch_size": 24})", {}, 2, 24, 12, 1},
           Case{R"({"train_batch_size": 24})", 3, 2, 24, 4, 3},
           Case{R"({"train_micro_batch_size_per_gpu": 4})", {}, 2, 8, 4, 1},
           Case{R"({"train_micro_batch_size_per_gpu": 4})", 3, 2, 24, 4, 3},
           Case{R"({"gradient_accumulation_steps": 3})", {}, 2, {}, {}, 3},
           Case{R"({"gradient_accumulation_steps": 3})", 3, 2, {}, {}, 3},
           Case{automatic.c_str(), {}, 2, {}, {}, 1},
           Case{automatic.c_str(), 5, 2, {}, {}, 5},
           Case{R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"})", 2, 3, 24,
                4, 2},
           Case{"{}", {}, 7, {}, {}, 1},
       }) {
    SCOPED_TRACE(one.json);
    const Settings settings = resolved(one.json, {.gradient_accumulation_steps = one.steps});
    const BatchSizes sizes = batch_sizes(*settings.deepspeed, settings, one.ranks);
    EXPECT_EQ(sizes.train, one.train);
    EXPECT_EQ(sizes.micro, one.micro);
    EXPECT_EQ(sizes.steps, one.accumulation);
  }
}

TEST(DeepSpeedBatches, ThatDoNotMultiplyShowTheArithmetic) {
  struct Case {
    const char* json;
    std::optional<int64_t> steps;
    const char* arithmetic;
  };
  for (const Case& one : {
           Case{R"({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 3})",
                {},
                "says train_batch_size 25, and train_micro_batch_size_per_gpu 4 x "
                "gradient_accumulation_steps 3 x 2 ranks is 24"},
           Case{R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4})", 2,
                "gradient_accumulation_steps (code) 2 x 2 ranks is 16"},
           Case{R"({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 4})",
                {},
                "train_batch_size 25 / (train_micro_batch_size_per_gpu 4 x 2 ranks), which is "
                "3.125"},
           Case{R"({"train_batch_size": 25})",
                {},
                "train_batch_size 25 / (gradient_accumulation_steps 1 x 2 ranks), which is 12.5"},
           Case{R"({"train_batch_size": 1, "gradient_accumulation_steps": 2})",
                {},
                "train_batch_size 1 / (gradient_accumulation_steps 2 x 2 ranks), which is 0.25"},
           Case{R"({"train_micro_batch_size_per_gpu": 1e9})", 1000000000, "more than anybody has"},
       }) {
    SCOPED_TRACE(one.json);
    const Settings settings = resolved(one.json, {.gradient_accumulation_steps = one.steps});
    const std::string message =
        message_of<ConfigError>([&] { batch_sizes(*settings.deepspeed, settings, 2); });
    EXPECT_TRUE(mentions(message, one.arithmetic)) << message;
  }
}

}  // namespace
}  // namespace tessera::accelerate::test_deepspeed_config
