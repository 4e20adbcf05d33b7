// DeepSpeed's JSON files as settings: every key, what is refused and why, sizes of batches, the
// sections of optimizers and schedules.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include <unistd.h>

#include <tessera/accelerate/deepspeed.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/raw_views.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/grad_scaler.h>

#include "golden_files.h"
#include "message_of.h"
#include "source_dir.h"

namespace tessera::accelerate::test_deepspeed_config {
namespace {

using Texts = std::vector<std::string>;

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

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

Settings resolved(const std::string& json, const CodeSettings& code = {},
                  const Environment& environment = {}) {
  CodeSettings all = code;
  all.set("deepspeed_config_file", json);
  return resolve({.code = all, .environment = environment, .file = ""});
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

      {"fp16.enabled", "true", "mixed_precision=fp16 precision_policy=pure"},
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
  CodeSettings code;
  code.set("mixed_precision", "bf16").set("gradient_accumulation_steps", int64_t{3});
  code.set("gradient_clipping", 0.25);
  const Settings settings = resolved(kAutomatic, code);
  EXPECT_EQ(changes(settings),
            "mixed_precision=bf16 precision_policy=pure gradient_accumulation_steps=3 "
            "gradient_clipping=0.25 scaler_growth_interval=1000 scaler_min_scale=1 "
            "scaler_hysteresis=2 sharding=zero3 zero_stage=3");
  EXPECT_EQ(settings.gradient_clipping.origin.describe(), "code");
  EXPECT_EQ(settings.zero_stage.origin.describe(),
            "file deepspeed_config, zero_optimization.stage");
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
    CodeSettings code;
    code.set("gradient_accumulation_steps", one.steps);
    const Settings settings = resolved(one.json, code);
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
    CodeSettings code;
    code.set("gradient_accumulation_steps", one.steps);
    const Settings settings = resolved(one.json, code);
    const std::string message =
        message_of<ConfigError>([&] { batch_sizes(*settings.deepspeed, settings, 2); });
    EXPECT_TRUE(mentions(message, one.arithmetic)) << message;
  }
}

// ---- Optimizers

NamedTensors weights(const char* prefix = "w") {
  return {{std::string(prefix) + "0", tessera::ones({3})},
          {std::string(prefix) + "1", tessera::ones({2})}};
}

std::unique_ptr<optim::Optimizer> optimizer_of(const std::string& section,
                                               const ConfiguredOptimizerOptions& options = {}) {
  return make_optimizer(read(R"({"optimizer": )" + section + "}"), {{.parameters = weights()}},
                        options);
}

template <class Optimizer>
typename Optimizer::Options options_of(const std::string& section,
                                       const ConfiguredOptimizerOptions& options = {}) {
  const auto made = optimizer_of(section, options);
  const auto* typed = dynamic_cast<const Optimizer*>(made.get());
  if (typed == nullptr) {
    ADD_FAILURE() << section << " makes another optimizer";
    return {};
  }
  return typed->options();
}

TEST(DeepSpeedOptimizer, AdamDecaysAsAdamWUnlessTheFileSaysOtherwise) {
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "Adam"})").weight_decay, 0);
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "AdamW"})").weight_decay, 0);
  EXPECT_EQ(
      options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"torch_adam": true}})").weight_decay,
      0.01);
  EXPECT_EQ(
      options_of<optim::Adam>(R"({"type": "adam", "params": {"adam_w_mode": false}})").weight_decay,
      0);
  // AdamW is AdamW whatever its mode.
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"adam_w_mode": false}})").lr,
            1e-3);
}

TEST(DeepSpeedOptimizer, TakesItsNumbersByName) {
  const auto adam = options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"lr": 3e-4,
    "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1, "amsgrad": true,
    "bias_correction": true, "fused": true, "adam_w_mode": true, "torch_adam": false}})");
  EXPECT_EQ(adam.lr, 3e-4);
  EXPECT_EQ(adam.betas, (std::array<double, 2>{0.8, 0.95}));
  EXPECT_EQ(adam.eps, 1e-7);
  EXPECT_EQ(adam.weight_decay, 0.1);
  EXPECT_TRUE(adam.amsgrad);
  const auto sgd = options_of<optim::SGD>(
      R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true}})");
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion", "params": {"betas": [0.9, 0.98]}})").betas,
            (std::array<double, 2>{0.9, 0.98}));
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion"})").lr, 1e-3);  // DeepSpeed's
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion"})").betas, (std::array{0.9, 0.999}));
  EXPECT_EQ(options_of<optim::Adagrad>(R"({"type": "Adagrad", "params": {"eps": 1e-9}})").eps,
            1e-9);
  EXPECT_EQ(options_of<optim::RMSprop>(R"({"type": "RMSprop", "params": {"alpha": 0.5}})").alpha,
            0.5);
  for (const char* type : {"Adadelta", "Adamax", "NAdam", "RAdam"}) {
    EXPECT_NO_THROW(optimizer_of(std::string(R"({"type": ")") + type + "\"}")) << type;
  }
}

TEST(DeepSpeedOptimizer, AutoIsWhatTheProgramSays) {
  const std::string automatic = R"({"type": "AdamW", "params": {"lr": "auto", "betas": "auto",
    "eps": "auto", "weight_decay": "auto"}})";
  EXPECT_EQ(options_of<optim::AdamW>(automatic).lr, 1e-3);
  const auto said = options_of<optim::AdamW>(
      automatic, {.lr = 0.5, .weight_decay = 0.25, .betas = {{0.5, 0.75}}, .eps = 1e-3});
  EXPECT_EQ(said.lr, 0.5);
  EXPECT_EQ(said.weight_decay, 0.25);
  EXPECT_EQ(said.betas, (std::array<double, 2>{0.5, 0.75}));
  EXPECT_EQ(said.eps, 1e-3);
  const std::string message = message_of<ConfigError>(
      [] { optimizer_of(R"({"type": "AdamW", "params": {"lr": 0.1}})", {.lr = 0.2}); });
  EXPECT_TRUE(mentions(message, "optimizer.params.lr is 0.1, and the program says 0.2")) << message;
}

TEST(DeepSpeedOptimizer, GroupsHaveTheirOwnNumbersFirst) {
  const auto made = make_optimizer(
      read(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}}})"),
      {{.parameters = weights("a"), .weight_decay = 0.0}, {.parameters = weights("b"), .lr = 0.2}});
  const auto& adam = dynamic_cast<const optim::AdamW&>(*made);
  EXPECT_EQ(adam.options(0).weight_decay, 0);
  EXPECT_EQ(adam.options(0).lr, 0.1);
  EXPECT_EQ(adam.options(1).weight_decay, 0.01);
  EXPECT_EQ(adam.options(1).lr, 0.2);
}

TEST(DeepSpeedOptimizer, BadSectionsAreNamedByTypeAndParameter) {
  struct Case {
    const char *section, *part;
  };
  for (const Case& one :
       {Case{R"({"type": "AdmaW"})", "optimizer.type is \"AdmaW\""},
        Case{R"({"type": "AdmaW"})", "did you mean \"adamw\"?"},
        Case{R"({"type": "AdamW", "params": {"weight_dcay": 1}})",
             R"("optimizer.params.weight_dcay" (did you mean "weight_decay"?))"},
        Case{R"({"type": "SGD", "params": {"eps": 1}})", "unknown to SGD"},
        Case{R"({"type": "AdamW", "params": {"lr": true}})",
             "optimizer.params.lr has to be a number; got true"},
        Case{R"({"type": "AdamW", "params": {"betas": [0.9]}})", "a list of two numbers"},
        Case{R"({"type": "AdamW", "params": {"amsgrad": "auto"}})", "nobody fills in"}}) {
    const std::string message = message_of<ConfigError>([&] { optimizer_of(one.section); });
    EXPECT_TRUE(mentions(message, one.part)) << message;
  }
  EXPECT_THROW(optimizer_of(R"({"type": "AdamW", "params": {"lr": -1}})"), ValueError);
  for (const char* type : {"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "MuSGD"}) {
    EXPECT_THROW(optimizer_of(std::string(R"({"type": ")") + type + "\"}"), UnsupportedError)
        << type;
  }
  EXPECT_THROW(optimizer_of(R"({"type": "Adam", "params": {"bias_correction": false}})"),
               UnsupportedError);
  const std::string none =
      message_of<ConfigError>([] { make_optimizer(read("{}"), {{.parameters = weights()}}); });
  EXPECT_TRUE(mentions(none, "no section \"optimizer\"")) << none;
}

// ---- Schedules: before the first step (DeepSpeed's iteration -1) and after each.

std::vector<double> rates(const std::string& section, const std::vector<int64_t>& steps,
                          double lr = 0.1, const ConfiguredScheduleOptions& options = {}) {
  optim::SGD optimizer(weights(), {.lr = lr});
  const auto schedule =
      make_schedule(read(R"({"scheduler": )" + section + "}"), optimizer, options);
  std::vector<double> found;
  for (const int64_t step : steps) {
    while (schedule->current_step() < step) schedule->step();
    found.push_back(optimizer.lr());
  }
  return found;
}

void expect_rates(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-12) << i;
}

const std::vector<int64_t> kSteps = {0, 1, 2, 3, 4, 5, 6, 8, 10, 12};

TEST(DeepSpeedSchedule, WarmupLRHasDeepSpeedsRates) {
  expect_rates(
      rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 0.01,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 5}})",
            kSteps),
      {0.01, 0.01, 0.0487608902266, 0.0714345575037, 0.0875217804532, 0.1, 0.1, 0.1, 0.1, 0.1});
  expect_rates(rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 0.01,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"}})",
                     kSteps),
               {0.01, 0.01, 0.028, 0.046, 0.064, 0.082, 0.1, 0.1, 0.1, 0.1});
}

TEST(DeepSpeedSchedule, WarmupDecayLRHasDeepSpeedsRatesAlsoWhereTheProgramSaysThem) {
  expect_rates(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
                         "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                         "total_num_steps": "auto"}})",
                     kSteps, 0.1, {.warmup_num_steps = 4, .total_num_steps = 10}),
               {0, 0, 0.05, 0.0792481250361, 0.1, 0.1, 0.0833333333333, 0.05, 0.0166666666667, 0});
  expect_rates(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.02,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear",
                         "total_num_steps": 10}})",
                     kSteps),
               {0.02, 0.02, 0.04, 0.06, 0.08, 0.1, 0.0866666666667, 0.06, 0.0333333333333, 0.02});
}

TEST(DeepSpeedSchedule, WarmupCosineLRHasDeepSpeedsRatesAndStaysAtItsEnd) {
  const std::vector<int64_t> steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20};
  expect_rates(rates(R"({"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1,
                         "warmup_num_steps": 3, "cos_min_ratio": 0.05, "warmup_type": "linear",
                         "total_num_steps": 9}})",
                     steps, 0.5),
               {0, 0.05, 0.2, 0.35, 0.468181033399, 0.38125, 0.2625, 0.14375, 0.0568189666012,
                0.025, 0.025, 0.025});
  expect_rates(rates(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3,
                         "total_num_steps": 9}})",
                     {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 0.5),
               {0, 0, 0.315464876786, 0.5, 0.466509700311, 0.3750125, 0.250025, 0.1250375,
                0.033540299689, 5e-05});
}

TEST(DeepSpeedSchedule, LRRangeTestHasDeepSpeedsRates) {
  const std::string section = R"({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001,
    "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": )";
  expect_rates(rates(section + "false}}", kSteps),
               {0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.006, 0.007});
  expect_rates(rates(section + "true}}", kSteps),
               {0.001, 0.001, 0.001, 0.001, 0.003, 0.003, 0.003, 0.005, 0.005, 0.007});
}

TEST(DeepSpeedSchedule, OneCycleHasDeepSpeedsRatesAndMomentumGoesTheOtherWay) {
  std::vector<int64_t> steps(16);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<int64_t>(i);
  const std::string section = R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.01,
    "cycle_max_lr": 0.11, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
    "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}})";
  expect_rates(
      rates(section, steps),
      {0.01, 0.035, 0.06, 0.085, 0.11, 0.0933333333333, 0.0766666666667, 0.06, 0.0433333333333,
       0.0266666666667, 0.01, 0.008, 0.00666666666667, 0.00571428571429, 0.005, 0.00444444444444});
  optim::AdamW optimizer(weights(), {.lr = 0.1});
  const auto schedule = make_schedule(read(R"({"scheduler": )" + section + "}"), optimizer);
  EXPECT_NEAR(optimizer.options().betas[0], 0.8, 1e-12);
  schedule->step();
  EXPECT_NEAR(optimizer.options().betas[0], 0.875, 1e-12);
  for (int i = 0; i < 3; ++i) schedule->step();
  EXPECT_NEAR(optimizer.options().betas[0], 0.8, 1e-12);
}

// Of golden/deepspeed_cases.py.
TEST(DeepSpeedSchedule, EveryRateIsThatOfThePackage) {
  const nlohmann::json cases = tests::golden_json("deepspeed_schedules.json");
  EXPECT_EQ(cases.size(), 22u);
  for (const nlohmann::json& golden : cases) {
    SCOPED_TRACE(golden["type"].get<std::string>() + golden["params"].dump());
    std::vector<optim::ParameterGroup<optim::AdamWOptions>> groups;
    for (const double lr : golden["lr"]) {
      groups.push_back({weights(groups.empty() ? "a" : "b"), {.lr = lr}});
    }
    optim::AdamW optimizer(groups);
    const nlohmann::json section = {
        {"scheduler", {{"type", golden["type"]}, {"params", golden["params"]}}}};
    const auto schedule = make_schedule(read(section.dump()), optimizer);
    const nlohmann::json& steps = golden["lrs"];
    // Some roundings of numbers below the largest.
    double largest = 0;
    for (const auto& rates : steps) largest = std::max(largest, rates[0].get<double>());
    const double tolerance = 8 * std::numeric_limits<double>::epsilon();
    for (size_t step = 0; step < steps.size(); ++step) {
      if (step > 0) schedule->step();
      for (size_t group = 0; group < groups.size(); ++group) {
        EXPECT_NEAR(optimizer.lr(group), steps[step][group].get<double>(), tolerance * largest)
            << "step " << step << " group " << group;
      }
      if (golden.contains("beta1")) {
        EXPECT_NEAR(optimizer.options(1).betas[0], golden["beta1"][step].get<double>(), tolerance)
            << "step " << step;
      }
      if (golden.contains("beta2")) {
        EXPECT_EQ(optimizer.options(1).betas[1], golden["beta2"][step].get<double>());
      }
    }
  }
}

TEST(DeepSpeedSchedule, OneCycleLeavesMomentumAloneWhereThereAreNoBetas) {
  optim::SGD optimizer(weights(), {.lr = 0.1, .momentum = 0.3});
  const auto schedule = make_schedule(read(R"({"scheduler": {"type": "OneCycle",
               "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}}})"),
                                      optimizer);
  schedule->step();
  EXPECT_EQ(optimizer.options().momentum, 0.3);
  EXPECT_GT(optimizer.lr(), 0.01);
}

TEST(DeepSpeedSchedule, BadSectionsAreNamed) {
  struct Case {
    const char *section, *part;
  };
  for (const Case& one :
       {Case{R"({"type": "WarmupDecay"})", "did you mean \"warmupdecaylr\"?"},
        Case{R"({"type": "WarmupDecayLR"})", "scheduler.params.total_num_steps"},
        Case{R"({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})",
             "schedule_from_config()"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_num_step": 3}})",
             R"("scheduler.params.warmup_num_step" (did you mean "warmup_num_steps"?))"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_type": "cosine"}})", "log or linear"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}})", "a whole number"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}})", "a number"},
        Case{R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1}})", "cycle_max_lr"}}) {
    const std::string message = message_of<ConfigError>([&] { rates(one.section, {0}); });
    EXPECT_TRUE(mentions(message, one.part)) << message;
  }
  EXPECT_THROW(rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 1}})", {0}), ValueError);
  EXPECT_THROW(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.002,
                         "total_num_steps": 2000}})",
                     {0}),
               ValueError);
  EXPECT_THROW(rates(R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2,
                         "cycle_second_stair_count": -3}})",
                     {0}),
               ValueError);
}

// ---- Loss scale

// DynamicLossScaler.update_scale() of deepspeed/runtime/fp16/loss_scaler.py.
struct Scaler {
  double scale;
  int window, delayed, hysteresis;
  bool consecutive;
  int iteration = 0, last_overflow = -1;
  void update(bool overflow) {
    if (overflow) {
      if (delayed == 1 || hysteresis == 1) {
        scale /= 2;
      } else {
        --hysteresis;
      }
      last_overflow = iteration;
    } else {
      if (consecutive) hysteresis = delayed;
      if ((iteration - last_overflow) % window == 0) {
        if (!consecutive) hysteresis = delayed;
        scale *= 2;
      }
    }
    ++iteration;
  }
};

TEST(DeepSpeedLossScale, FallsAndGrowsWhereDeepSpeedsDoes) {
  for (const int hysteresis : {1, 2, 3}) {
    for (const bool consecutive : {false, true}) {
      Scaler expected{1024, 5, hysteresis, hysteresis, consecutive};
      precision::GradScaler scaler({.init_scale = 1024,
                                    .growth_interval = 5,
                                    .hysteresis = hysteresis,
                                    .consecutive_hysteresis = consecutive});
      const Tensor weight = tessera::ones({2});
      weight.set_requires_grad();
      optim::SGD optimizer({{"w", weight}}, {.lr = 0});
      uint32_t random = 7;
      for (int i = 0; i < 300; ++i) {
        random = random * 1664525 + 1013904223;
        const bool overflow = (random >> 28) < 3;
        weight.set_grad(overflow ? full({2}, INFINITY) : tessera::ones({2}));
        scaler.step(optimizer);
        scaler.update();
        expected.update(overflow);
        ASSERT_EQ(scaler.loss_scale(), expected.scale) << i << " " << hysteresis << consecutive;
        if (i % 50 == 17) {  // goes on where it was saved
          precision::GradScaler again;
          again.load_state_dict(scaler.state_dict());
          EXPECT_EQ(again.options().hysteresis, hysteresis);
          again = precision::GradScaler({.consecutive_hysteresis = consecutive});
          again.load_state_dict(scaler.state_dict());
          scaler = again;
        }
      }
    }
  }
}

TEST(DeepSpeedLossScale, ThatIsConstantStaysAndLeavesBadStepsOut) {
  precision::GradScaler scaler(
      {.init_scale = 128, .growth_factor = 1, .backoff_factor = 1, .growth_interval = 1});
  const Tensor weight = tessera::ones({1});
  weight.set_requires_grad();
  optim::SGD optimizer({{"w", weight}}, {.lr = 0.5});
  for (const bool overflow : {false, true, false, true, true}) {
    weight.set_grad(full({1}, overflow ? INFINITY : 128.0));
    EXPECT_EQ(scaler.step(optimizer), !overflow);
    scaler.update();
    EXPECT_EQ(scaler.loss_scale(), 128);
  }
  EXPECT_EQ(weight.item<float>(), 0);
  EXPECT_THROW(precision::GradScaler({.backoff_factor = 1}), ConfigError);
  EXPECT_THROW(precision::GradScaler({.hysteresis = 0}), ConfigError);
  EXPECT_THROW(precision::GradScaler({.hysteresis = 2, .on_device = true}), ConfigError);
}

}  // namespace
}  // namespace tessera::accelerate::test_deepspeed_config
