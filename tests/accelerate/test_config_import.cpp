// Accelerate's YAML files of all generations (CLI-1), key by key, and the sharding settings of FSDP
// version 1 (CLI-4). The files are written here from the lists of keys of each generation.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <unistd.h>

#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/yaml_import.h>
#include <tessera/core/error.h>

#include "message_of.h"
#include "refusals.h"

namespace tessera::accelerate::test_config_import {
namespace {

class YamlFile {
 public:
  explicit YamlFile(const std::string& text) {
    char path[] = "/tmp/tessera_yaml_XXXXXX";
    ::close(::mkstemp(path));
    path_ = path;
    std::ofstream(path_) << text;
  }
  ~YamlFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Import import_text(const std::string& text) { return import_accelerate(YamlFile(text).path()); }

const ImportLine& line_of(const Import& import, const std::string& key) {
  for (const ImportLine& line : import.lines) {
    if (line.key == key) return line;
  }
  ADD_FAILURE() << "no line for " << key << " in\n" << import.report();
  static const ImportLine kNone;
  return kNone;
}

const std::string kOldest = R"(compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: false
)";

TEST(ConfigImport, CLI1_Generation0_11SaysNothingButTheDefaults) {
  const Import import = import_text(kOldest);
  EXPECT_EQ(config_json(import.settings), "{\n  \"ranks\": 1\n}\n") << import.report();
  for (const ImportLine& line : import.lines) {
    const bool is_count = line.key == "num_processes";
    EXPECT_EQ(line.outcome, is_count ? ImportOutcome::kMapped : ImportOutcome::kUnset) << line.key;
  }
  EXPECT_EQ(import.settings.ranks.value, 1);
  EXPECT_NO_THROW(check_available(import.settings));
}

TEST(ConfigImport, CLI1_Generation0_12WithUnquotedNo) {
  const Import import = import_text(R"(compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_CPU
downcast_bf16: no
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: no
num_machines: 1
num_processes: 4
use_cpu: true
)");
  EXPECT_EQ(import.settings.mixed_precision, Precision::kNo);
  EXPECT_EQ(import.settings.ranks.value, 4);
  EXPECT_TRUE(import.settings.cpu);
  EXPECT_EQ(line_of(import, "use_cpu").outcome, ImportOutcome::kMapped);
  EXPECT_EQ(line_of(import, "downcast_bf16").outcome, ImportOutcome::kUnset);
}

TEST(ConfigImport, CLI1_Generation0_28WithMpi) {
  const Import import = import_text(R"(compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
ipex_config:
  ipex: true
machine_rank: 0
main_process_ip: 127.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /home/user/hostfile
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
)");
  const Settings& settings = import.settings;
  EXPECT_EQ(settings.ranks.value, 16);
  EXPECT_EQ(settings.nodes.value, 4);
  EXPECT_EQ(settings.hostfile.value, "/home/user/hostfile");
  EXPECT_EQ(settings.store_host.value, "127.0.0.1");
  EXPECT_EQ(settings.store_port, 29500);
  EXPECT_EQ(settings.mixed_precision, Precision::kBF16);
  EXPECT_EQ(line_of(import, "mpirun_config.mpirun_ccl").outcome, ImportOutcome::kNoCounterpart);
  EXPECT_EQ(line_of(import, "ipex_config.ipex").outcome, ImportOutcome::kNoCounterpart);
  EXPECT_EQ(line_of(import, "tpu_env").outcome, ImportOutcome::kUnset);
  EXPECT_NO_THROW(check_available(settings));
}

TEST(ConfigImport, CLI1_Generation0_30OfACloudSaysThatThereIsNoCounterpart) {
  const Import import = import_text(R"(compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: 'NO'
ec2_instance_type: ml.p3.2xlarge
iam_role_name: xxxxx
image_uri: null
mixed_precision: fp16
num_machines: 1
profile: xxxxx
py_version: py10
pytorch_version: 2.1.0
region: us-east-1
sagemaker_inputs_file: null
sagemaker_metrics_file: null
transformers_version: 4.17.0
use_cpu: false
)");
  EXPECT_EQ(import.settings.mixed_precision, Precision::kFP16);
  for (const char* key : {"compute_environment", "ec2_instance_type", "iam_role_name", "region",
                          "py_version", "pytorch_version", "transformers_version", "profile"}) {
    EXPECT_EQ(line_of(import, key).outcome, ImportOutcome::kNoCounterpart) << key;
  }
  EXPECT_EQ(line_of(import, "image_uri").outcome, ImportOutcome::kUnset);
}

// The questionnaire of this generation wrote keys that its own readers did not know.
TEST(ConfigImport, CLI1_Generation0_34WithFp8_BothSpellingsAreRead_Fp8KeyMismatch) {
  const auto file = [](const std::string& length, const std::string& algorithm) {
    return "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp8_config:\n  " +
           algorithm + ": max\n  " + length +
           ": 32\n  backend: TE\n  fp8_format: E4M3\n  interval: 1\n  margin: 0\n"
           "  override_linear_precision: false\n  use_autocast_during_eval: false\n"
           "gpu_ids: all\nenable_cpu_affinity: false\nmixed_precision: fp8\nnum_processes: 2\n";
  };
  for (const auto& [length, algorithm] :
       {std::pair("amax_history_length", "amax_compute_algorithm"),
        std::pair("amax_history_len", "amax_compute_algo")}) {
    const Import import = import_text(file(length, algorithm));
    EXPECT_EQ(import.settings.fp8_amax_history_len, 32);
    EXPECT_EQ(import.settings.fp8_amax_compute_algo, AmaxAlgorithm::kMax);
    EXPECT_EQ(import.settings.fp8_format, Fp8Format::kE4M3);
    EXPECT_EQ(line_of(import, std::string("fp8_config.") + length).outcome, ImportOutcome::kMapped);
    EXPECT_EQ(import.settings.mixed_precision, Precision::kFP8);
    EXPECT_EQ(import.settings.fp8_recipe, Fp8Scaling::kDelayed);
    EXPECT_EQ(import.settings.fp8_in_evaluation, false);
    EXPECT_EQ(import.settings.fp8_weight_gradient, true);
    EXPECT_TRUE(import.refusals().empty()) << import.refusals();
    EXPECT_NO_THROW(check_available(import.settings));
  }
}

// TERecipeKwargs and AORecipeKwargs; what no recipe here does is refused.
TEST(ConfigImport, Fp8RecipesOfBothBackendsAreRead) {
  const auto file = [](const std::string& section) {
    return import_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\n"
        "mixed_precision: fp8\nnum_processes: 1\nfp8_config:\n" +
        section);
  };
  const Import te = file("  backend: TE\n  override_linear_precision: [false, false, true]\n");
  EXPECT_EQ(te.settings.fp8_recipe, Fp8Scaling::kDelayed);
  EXPECT_EQ(te.settings.fp8_weight_gradient, false);
  EXPECT_EQ(te.settings.fp8_in_evaluation, false) << "what Accelerate does where nothing is said";
  EXPECT_EQ(file("  margin: 1\n").settings.fp8_recipe, Fp8Scaling::kDelayed) << "its default";
  EXPECT_EQ(file("  backend: TE\n  use_autocast_during_eval: true\n").settings.fp8_in_evaluation,
            true);
  const Import ao = file("  backend: AO\n  pad_inner_dim: true\n");
  EXPECT_EQ(ao.settings.fp8_recipe, Fp8Scaling::kTensorwise);
  EXPECT_EQ(ao.settings.fp8_in_evaluation, true);
  EXPECT_TRUE(ao.refusals().empty()) << ao.refusals();
  EXPECT_EQ(line_of(ao, "fp8_config.pad_inner_dim").outcome, ImportOutcome::kNoCounterpart);
  for (const char* refused : {"  backend: MSAMP\n  opt_level: O2\n",
                              "  backend: TE\n  override_linear_precision: [true, false, false]\n",
                              "  backend: TE\n  use_mxfp8_block_scaling: true\n",
                              "  backend: TE\n  fp8_format: E5M2\n"}) {
    EXPECT_FALSE(file(refused).refusals().empty()) << refused;
  }
  EXPECT_TRUE(mentions(file("  backend: MSAMP\n").refusals(), "MS-AMP"));
  const Import unnamed = file("  pad_inner_dim: true\n  enable_fsdp_float8_all_gather: true\n");
  EXPECT_EQ(unnamed.settings.fp8_recipe, Fp8Scaling::kTensorwise) << "torchao's keys alone";
  EXPECT_EQ(unnamed.settings.fp8_in_evaluation, true);
}

// Each key of both classes: mapped, refused, or named with its reason.
TEST(ConfigImport, NoKeyOfAcceleratesFp8RecipesIsPassedOver) {
  const std::map<std::string, std::string> te = {
      {"use_autocast_during_eval", "true"},
      {"margin", "1"},
      {"interval", "4"},
      {"fp8_format", "E4M3"},
      {"amax_history_len", "16"},
      {"amax_compute_algo", "max"},
      {"override_linear_precision", "[false, true, false]"},
      {"use_mxfp8_block_scaling", "true"}};
  const std::map<std::string, std::string> ao = {{"pad_inner_dim", "true"},
                                                 {"enable_fsdp_float8_all_gather", "true"}};
  for (const auto& [backend, keys] : {std::pair("TE", te), std::pair("AO", ao)}) {
    for (const auto& [key, value] : keys) {
      const Import import =
          import_text(std::string("mixed_precision: fp8\nfp8_config:\n  backend: ") + backend +
                      "\n  " + key + ": " + value + "\n");
      const ImportLine& line = line_of(import, "fp8_config." + key);
      EXPECT_FALSE(line.note.empty()) << key;
      EXPECT_NE(line.outcome == ImportOutcome::kUnset, key != "use_autocast_during_eval") << key;
    }
  }
  EXPECT_THROW(import_text("mixed_precision: fp8\nfp8_config:\n  backend: TE\n  marginn: 1\n"),
               ConfigError);
}

TEST(ConfigImport, CLI1_TheLatestGenerationWithShardingAndMesh) {
  const Import import = import_text(R"(compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
dynamo_config:
  dynamo_backend: INDUCTOR
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer,BertPooler
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 1
machine_rank: 1
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: c10d
same_network: true
use_cpu: false
)");
  const Settings& settings = import.settings;
  EXPECT_TRUE(settings.debug);
  EXPECT_EQ(settings.sharding.value, Sharding::kFsdp);
  EXPECT_FALSE(settings.fsdp_reshard_after_forward);
  EXPECT_EQ(settings.fsdp_wrap_modules.value,
            (std::vector<std::string>{"BertLayer", "BertPooler"}));
  EXPECT_TRUE(settings.offload_parameters);
  EXPECT_EQ(settings.fsdp_state_dict_type, StateDictType::kFull);
  EXPECT_EQ(settings.dp_replicate_size, 2);
  EXPECT_EQ(settings.dp_shard_size, 4);
  for (const char* key : {"machine_rank", "rdzv_backend", "dynamo_config.dynamo_backend"}) {
    EXPECT_EQ(line_of(import, key).outcome, ImportOutcome::kNoCounterpart) << key;
  }
  check_consistent(settings);
  check_available(settings);
}

TEST(ConfigImport, EveryKeyOfTheFileHasALineOfTheReport) {
  const Import import = import_text(kOldest + "gradient_accumulation_steps: 4\n");
  EXPECT_EQ(import.lines.size(), 13u);
  EXPECT_TRUE(mentions(import.report(), "gradient_accumulation_steps = 4")) << import.report();
}

// Key and value, what became of it, and the note, each in a column of its own.
TEST(ConfigImport, TheReportStandsInColumns) {
  Import import;
  import.lines = {{"a", "1", ImportOutcome::kMapped, "x = 1"},
                  {"longer_key", "value", ImportOutcome::kPlanned, "y"},
                  {"b", "", ImportOutcome::kUnset, ""},
                  {"c", "2", ImportOutcome::kNoCounterpart, "of a cloud"},
                  { "d",
                    "3",
                    ImportOutcome::kRefused,
                    "is 3" }};
  EXPECT_EQ(import.report(),
            "  a: 1               mapped  x = 1\n"
            "  longer_key: value  planned y (not available yet)\n"
            "  b:                 -       \n"
            "  c: 2               none    of a cloud\n"
            "  d: 3               refused is 3\n");
}

TEST(ConfigImport, CLI1_InvalidKeysAreAllListed) {
  const std::string message = message_of<ConfigError>([] {
    import_text(kOldest +
                "another_invalid_key: 1\ninvalid_key: another_invalid_value\n"
                "mpirun_config:\n  mpirun_ccl: '1'\n  strange: 2\n");
  });
  EXPECT_TRUE(mentions(message, "\"another_invalid_key\"")) << message;
  EXPECT_TRUE(mentions(message, "\"invalid_key\"")) << message;
  EXPECT_TRUE(mentions(message, "\"mpirun_config.strange\"")) << message;
}

TEST(ConfigImport, ValuesThatCannotBeAreErrors) {
  EXPECT_TRUE(mentions(message_of<ConfigError>(
                           [] { import_text("distributed_type: MULTI_CPU\nnum_processes: -1\n"); }),
                       "num_processes is -1"));
  EXPECT_TRUE(mentions(
      message_of<ConfigError>([] { import_text("distributed_type: 'NO'\nnum_processes: 4\n"); }),
      "contradict"));
  EXPECT_THROW(import_text("use_cpu: perhaps\n"), ConfigError);
  EXPECT_THROW(import_text("[1, 2]\n"), FormatError);
  EXPECT_THROW(import_text("a: [1\n"), FormatError);
  EXPECT_THROW(import_accelerate("/nowhere/default_config.yaml"), IoError);
}

// Each value that has a meaning of its own: what becomes of it, and what the report says of it.
TEST(ConfigImport, EverySpecialValueHasItsLine) {
  struct Row {
    std::string text, key;
    ImportOutcome outcome;
    std::string note;
  };
  using enum ImportOutcome;
  const auto fsdp = [](const std::string& key, const std::string& value) {
    return "distributed_type: FSDP\nfsdp_config:\n  " + key + ": " + value + "\n";
  };
  const auto deepspeed = [](const std::string& key, const std::string& value) {
    return "distributed_type: DEEPSPEED\ndeepspeed_config:\n  " + key + ": " + value + "\n";
  };
  const auto megatron = [](const std::string& key, const std::string& value) {
    return "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_" + key + ": " +
           value + "\n";
  };
  const auto fp8 = [](const std::string& key, const std::string& value) {
    return "mixed_precision: fp8\nfp8_config:\n  " + key + ": " + value + "\n";
  };
  const std::string harmless = "what is the case anyway", program = "what the program says";
  const Row rows[] = {
      {"compute_environment: LOCAL_MACHINE", "compute_environment", kUnset, "as always"},
      {"compute_environment: AMAZON_SAGEMAKER", "compute_environment", kNoCounterpart, "cloud"},
      {"distributed_type: 'NO'", "distributed_type", kUnset, "data parallel"},
      {"distributed_type: no", "distributed_type", kUnset, "data parallel"},
      {"distributed_type: false", "distributed_type", kUnset, "data parallel"},
      {"distributed_type: MULTI_CPU", "distributed_type", kUnset, "data parallel"},
      {"distributed_type: multi_gpu", "distributed_type", kUnset, "data parallel"},
      {"distributed_type: FSDP", "distributed_type", kUnset, "see fsdp_config"},
      {"distributed_type: DEEPSPEED", "distributed_type", kUnset, "see deepspeed_config"},
      {"distributed_type: XLA", "distributed_type", kRefused, "no such processes"},
      {"mixed_precision: false", "mixed_precision", kUnset, "the default of mixed_precision"},
      {"mixed_precision: BF16", "mixed_precision", kMapped, "mixed_precision = bf16"},
      {"num_machines: 1", "num_machines", kUnset, "as the ranks fit"},
      {"num_machines: 2", "num_machines", kMapped, "--hostfile FILE names them"},
      {"machine_rank: 0", "machine_rank", kUnset, "host file"},
      {"machine_rank: 1", "machine_rank", kNoCounterpart, "host file"},
      {"same_network: TRUE", "same_network", kUnset, "routes"},
      {"main_process_ip: null", "main_process_ip", kUnset, "empty"},
      {"main_process_ip: 'null'", "main_process_ip", kUnset, "empty"},
      {"main_process_ip: '~'", "main_process_ip", kUnset, "empty"},
      {"main_process_ip: ''", "main_process_ip", kUnset, "empty"},
      {"tpu_env: []", "tpu_env", kUnset, "TPUs"},
      {"tpu_env: [a, b]", "tpu_env", kNoCounterpart, "TPUs"},
      {"gradient_accumulation_steps: 4", "gradient_accumulation_steps", kMapped, "= 4"},
      {deepspeed("gradient_accumulation_steps", "auto"),
       "deepspeed_config.gradient_accumulation_steps", kUnset, program},
      {deepspeed("gradient_accumulation_steps", "4"),
       "deepspeed_config.gradient_accumulation_steps", kMapped, "= 4"},
      {fsdp("fsdp_activation_checkpointing_offload", "false"),
       "fsdp_config.fsdp_activation_checkpointing_offload", kUnset, "stay where they are"},
      {fsdp("fsdp_activation_checkpointing_offload", "true"),
       "fsdp_config.fsdp_activation_checkpointing_offload", kRefused, "stay where they are"},
      {"dynamo_config: {}", "dynamo_config", kUnset, "empty"},
      {"dynamo_config:\n  dynamo_mode: x", "dynamo_config.dynamo_mode", kNoCounterpart, "compiler"},
      {"ipex_config:\n  ipex: true", "ipex_config.ipex", kNoCounterpart, "oneDNN"},
      {"distributed_type: MEGATRON_LM", "distributed_type", kUnset, "see megatron_lm_config"},
      {megatron("tp_degree", "2"), "megatron_lm_config.megatron_lm_tp_degree", kMapped,
       "tp_size = 2"},
      {megatron("use_distributed_optimizer", "true"),
       "megatron_lm_config.megatron_lm_use_distributed_optimizer", kMapped, "sharding = zero1"},
      {megatron("use_distributed_optimizer", "false"),
       "megatron_lm_config.megatron_lm_use_distributed_optimizer", kUnset, "whole"},
      {megatron("expert_model_parallel_size", "2"),
       "megatron_lm_config.megatron_lm_expert_model_parallel_size", kRefused, "experts"},
      {megatron("expert_model_parallel_size", "1"),
       "megatron_lm_config.megatron_lm_expert_model_parallel_size", kUnset, "experts"},
      {megatron("recompute_granularity", "selective"),
       "megatron_lm_config.megatron_lm_recompute_granularity", kNoCounterpart, "whole blocks"},
      {megatron("pp_degree", "4"), "megatron_lm_config.megatron_lm_gradient_clipping", kMapped,
       "gradient_clipping = 1"},
      {"distributed_type: FSDP\nmegatron_lm_config:\n  megatron_lm_pp_degree: 2\n",
       "megatron_lm_config.megatron_lm_pp_degree", kNoCounterpart, "does not read this section"},
      {fsdp("fsdp_version", "2.0"), "fsdp_config.fsdp_version", kUnset, "one engine"},
      {fsdp("fsdp_state_dict_type", "LOCAL_STATE_DICT"), "fsdp_config.fsdp_state_dict_type",
       kRefused, "parts that do not say"},
      {fsdp("fsdp_state_dict_type", "3"), "fsdp_config.fsdp_state_dict_type", kRefused, "parts"},
      {fsdp("fsdp_sharding_strategy", "HYBRID_SHARD"), "fsdp_config.fsdp_sharding_strategy",
       kMapped, "dp_replicate_size says how many"},
      {fsdp("fsdp_min_num_params", "100") + "  fsdp_auto_wrap_policy: NO_WRAP\n",
       "fsdp_config.fsdp_min_num_params", kUnset, "not what decides about units"},
      {fsdp("fsdp_sharding_strategy", "FULL_SHARD") + "  fsdp_version: 2\n",
       "fsdp_config.fsdp_sharding_strategy", kUnset, "version 2 reads"},
      {fsdp("fsdp_reshard_after_forward", "true") + "  fsdp_version: 1\n",
       "fsdp_config.fsdp_reshard_after_forward", kUnset, "version 1 reads"},
      {fsdp("fsdp_use_orig_params", "true"), "fsdp_config.fsdp_use_orig_params", kNoCounterpart,
       "dropped"},
      {deepspeed("offload_optimizer_device", "none"), "deepspeed_config.offload_optimizer_device",
       kUnset, harmless},
      {deepspeed("offload_optimizer_device", "CPU"), "deepspeed_config.offload_optimizer_device",
       kMapped, "offload_optimizer = true"},
      {deepspeed("offload_param_device", "cpu"), "deepspeed_config.offload_param_device", kMapped,
       "offload_parameters = true"},
      {deepspeed("offload_param_device", "nvme"), "deepspeed_config.offload_param_device", kRefused,
       "drives; write cpu or none"},
      {deepspeed("gradient_clipping", "auto"), "deepspeed_config.gradient_clipping", kUnset,
       program},
      {deepspeed("gradient_clipping", "2.5"), "deepspeed_config.gradient_clipping", kMapped,
       "= 2.5"},
      {deepspeed("deepspeed_config_file", "none"), "deepspeed_config.deepspeed_config_file", kUnset,
       "no file"},
      {deepspeed("deepspeed_config_file", "/nowhere/x.json"),
       "deepspeed_config.deepspeed_config_file", kRefused, "there is no file /nowhere/x.json"},
      {fp8("backend", "te"), "fp8_config.backend", kMapped, "fp8_recipe = delayed"},
      {fp8("backend", "AO"), "fp8_config.backend", kUnset, "the default of fp8_recipe"},
      {fp8("backend", "MSAMP"), "fp8_config.backend", kRefused, "MS-AMP keeps"},
      {fp8("backend", "X"), "fp8_config.backend", kRefused, "TE, AO and MSAMP"},
      {fp8("fp8_format", "E5M2"), "fp8_config.fp8_format", kRefused, "two bits are too few"},
      {fp8("fp8_format", "E4M3"), "fp8_config.fp8_format", kMapped, "e4m3"},
      {fp8("override_linear_precision", "[false, false, false]"),
       "fp8_config.override_linear_precision", kUnset, "all three products"},
      {fp8("override_linear_precision", "(False, False, True)"),
       "fp8_config.override_linear_precision", kMapped, "fp8_weight_gradient = false"},
      {fp8("override_linear_precision", "[true, false, false]"),
       "fp8_config.override_linear_precision", kRefused, "only that of the weight's gradient"},
      {fp8("interval", "1"), "fp8_config.interval", kUnset, "scales follow"},
      {fp8("interval", "2"), "fp8_config.interval", kNoCounterpart, "scales follow"},
      {fp8("use_mxfp8_block_scaling", "true"), "fp8_config.use_mxfp8_block_scaling", kRefused,
       "blocks of 32"},
      // A file that names no backend is torchao's where all of its keys are.
      {fp8("pad_inner_dim", "true"), "fp8_config.backend", kUnset, "the default of fp8_recipe"},
      {fp8("margin", "0"), "fp8_config.backend", kMapped, "fp8_recipe = delayed"},
      {fp8("backend", "TE"), "fp8_config.use_autocast_during_eval", kMapped, "false"},
      {"distributed_type: DEEPSPEED", "distributed_type", kUnset, "deepspeed_config"},
  };
  for (const Row& row : rows) {
    const Import import = import_text(row.text + "\n");
    const ImportLine& line = line_of(import, row.key);
    EXPECT_EQ(line.outcome, row.outcome) << row.text << "\n" << import.report();
    EXPECT_TRUE(mentions(line.note, row.note)) << row.text << ": " << line.note;
  }
}

// Which sections Accelerate reads, by distributed_type.
TEST(ConfigImport, EachTypeHasItsSections) {
  struct Row {
    const char* section;
    const char* text;
    const char* key;
    std::vector<const char*> types;  // for which it is read
  };
  const Row rows[] = {
      {"fsdp_config",
       "fsdp_config:\n  fsdp_offload_params: true\n",
       "fsdp_config.fsdp_offload_params",
       {"FSDP"}},
      {"deepspeed_config",
       "deepspeed_config:\n  zero_stage: 3\n",
       "deepspeed_config.zero_stage",
       {"DEEPSPEED"}},
      {"mpirun_config",
       "mpirun_config:\n  mpirun_hostfile: h\n",
       "mpirun_config.mpirun_hostfile",
       {"'NO'", "false", "MULTI_CPU"}},
      {"parallelism_config",
       "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n",
       "parallelism_config.parallelism_config_dp_shard_size",
       {"FSDP", "DEEPSPEED", "MULTI_GPU"}},
  };
  for (const Row& row : rows) {
    for (const std::string type :
         {"'NO'", "false", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"}) {
      const Import import = import_text("distributed_type: " + type + "\n" + row.text);
      const bool read = std::ranges::count(row.types, type) > 0;
      const ImportLine& line = line_of(import, row.key);
      EXPECT_EQ(line.outcome != ImportOutcome::kNoCounterpart, read) << type << ", " << row.section;
      EXPECT_EQ(mentions(line.note, "does not read this section"), !read) << type << line.note;
    }
    EXPECT_NE(line_of(import_text(row.text), row.key).outcome, ImportOutcome::kNoCounterpart);
  }
  const Import half = import_text("mixed_precision: bf16\nfp8_config:\n  margin: 1\n");
  EXPECT_TRUE(mentions(line_of(half, "fp8_config.margin").note, "where mixed_precision is fp8"));
}

TEST(ConfigImport, WhatASectionOrAFileHasToBe) {
  const auto read = [](const char* text) { return [text] { import_text(text); }; };
  expect_refusals({
      {"has to hold keys and values", read("[1]\n")},
      {"has to hold keys and values", read("just a text\n")},
      {"fsdp_config has to hold keys and values", read("fsdp_config: 3\n")},
      {"fp8_config has to hold keys and values", read("mixed_precision: fp8\nfp8_config: [1]\n")},
      {"and another key makes it",
       read("mixed_precision: fp8\nfp8_config:\n  fp8_format: E4M3\n  format: HYBRID\n"
            "  margin: 1\n  amax_history_len: 16\n  amax_history_length: 32\n")},
      {"\"fsdp_config.fsdp_version\" twice",
       read("fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n")},
      {"fsdp_version has to be 1 or 2; got \"3\"",
       read("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n")},
      {"has to be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
       read("distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: x\n")},
      {"fsdp_sharding_strategy has to be",
       read("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: x\n")},
      {"num_processes is 2, which contradict", read("distributed_type: no\nnum_processes: 2\n")},
  });
}

// Whatever YAML can say is an error with the file's name, or is written as it was read.
TEST(ConfigImport, OddYamlIsAFormatErrorOfTheFile) {
  for (const char* text : {"? [a, b]\n: 1\n", "mixed_precision: *nothing\n", "? {a: b}\n: 1\n",
                           "tpu_env: [[1]]\n", "fsdp_config: {? [a] : 1}\n"}) {
    EXPECT_TRUE(mentions(message_of<FormatError>([&] { import_text(text); }), "/tmp/tessera_yaml_"))
        << text;
  }
  const Import bytes = import_text("mpirun_config: {mpirun_hostfile: \"h\xff\"}\n");
  EXPECT_TRUE(mentions(message_of<ConfigError>([&] { config_json(bytes.settings); }), "UTF-8"));
}

// Truth values were read by a constructor for which every text is true.
// The parser finds the first one by name and goes by all.
TEST(ConfigImport, AKeyThatStandsTwiceIsNamed) {
  EXPECT_TRUE(mentions(message_of<FormatError>(
                           [] { import_text("mixed_precision: bf16\nmixed_precision: fp16\n"); }),
                       "\"mixed_precision\" twice"));
  EXPECT_TRUE(mentions(message_of<FormatError>(
                           [] { import_text("fsdp_config: {}\nfsdp_config:\n  stranger: 1\n"); }),
                       "\"fsdp_config\" twice"));
  EXPECT_TRUE(mentions(message_of<FormatError>([] {
                         import_text("deepspeed_config:\n  zero_stage: 2\n  zero_stage: 3\n");
                       }),
                       "\"deepspeed_config.zero_stage\" twice"));
  EXPECT_TRUE(import_text("debug: true\nuse_cpu: false\ndebug: true\n").settings.debug.value);
}

TEST(ConfigImport, Trap25_FalseInQuotesIsFalse) {
  const Import import = import_text(
      "distributed_type: FSDP\nuse_cpu: 'False'\ndebug: 'no'\nfsdp_config:\n"
      "  fsdp_offload_params: 'false'\n  fsdp_sharding_strategy: FULL_SHARD\n");
  EXPECT_FALSE(import.settings.cpu);
  EXPECT_FALSE(import.settings.debug);
  EXPECT_FALSE(import.settings.offload_parameters);
}

std::string fsdp1(const std::string& strategy) {
  return "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n"
         "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 2000\n"
         "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_forward_prefetch: true\n"
         "  fsdp_use_orig_params: true\n  fsdp_sync_module_states: true\n"
         "  fsdp_offload_params: false\n  fsdp_sharding_strategy: " +
         strategy + "\n  fsdp_state_dict_type: SHARDED_STATE_DICT\nnum_processes: 2\n";
}

TEST(ConfigImport, CLI4_StrategiesOfVersion1BecomeModes) {
  struct Expected {
    const char* strategy;
    Sharding sharding;
    bool reshards;
  };
  for (const auto& [strategy, sharding, reshards] : {Expected{"FULL_SHARD", Sharding::kFsdp, true},
                                                     {"SHARD_GRAD_OP", Sharding::kFsdp, false},
                                                     {"NO_SHARD", Sharding::kDdp, true},
                                                     {"HYBRID_SHARD", Sharding::kFsdp, true},
                                                     {"HYBRID_SHARD_ZERO2", Sharding::kFsdp, false},
                                                     {"1", Sharding::kFsdp, true},
                                                     {"2", Sharding::kFsdp, false},
                                                     {"3", Sharding::kDdp, true}}) {
    const Import import = import_text(fsdp1(strategy));
    EXPECT_EQ(import.settings.sharding.value, sharding) << strategy;
    EXPECT_EQ(import.settings.fsdp_reshard_after_forward, reshards) << strategy;
    EXPECT_EQ(import.fsdp_version, 1);
  }
  EXPECT_TRUE(mentions(message_of<ConfigError>([] { import_text(fsdp1("SOME_SHARD")); }),
                       "fsdp_sharding_strategy"));
}

TEST(ConfigImport, CLI4_KeysThatVersion2DroppedAreSaidToBeDropped) {
  const Import import = import_text(fsdp1("FULL_SHARD"));
  for (const char* key : {"fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
                          "fsdp_sync_module_states"}) {
    const ImportLine& line = line_of(import, std::string("fsdp_config.") + key);
    EXPECT_EQ(line.outcome, ImportOutcome::kNoCounterpart) << key;
    EXPECT_TRUE(mentions(line.note, "dropped")) << key;
  }
  EXPECT_EQ(import.settings.fsdp_min_num_params, 2000);
  EXPECT_EQ(config_json(import.settings),
            "{\n  \"sharding\": \"fsdp\",\n  \"fsdp_min_num_params\": 2000,\n  \"ranks\": 2\n}\n");
}

// Of units those count that the policy asks for: files hold the other's keys, too.
TEST(ConfigImport, ThePolicySaysWhichKeysOfUnitsCount) {
  const auto of = [](const std::string& policy) {
    return import_text(
        "distributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n"
        "  fsdp_min_num_params: 2000\n" +
        (policy.empty() ? policy : "  fsdp_auto_wrap_policy: " + policy + "\n"));
  };
  const Import by_class = of("TRANSFORMER_BASED_WRAP");
  EXPECT_EQ(by_class.settings.fsdp_wrap_modules.value, std::vector<std::string>{"BertLayer"});
  EXPECT_EQ(by_class.settings.fsdp_min_num_params, 0);
  EXPECT_EQ(line_of(by_class, "fsdp_config.fsdp_min_num_params").outcome, ImportOutcome::kUnset);
  const Import by_size = of("size_based_wrap");
  EXPECT_TRUE(by_size.settings.fsdp_wrap_modules.value.empty());
  EXPECT_EQ(by_size.settings.fsdp_min_num_params, 2000);
  EXPECT_EQ(of("NO_WRAP").settings.fsdp_wrap_modules.value, std::vector<std::string>{"none"});
  EXPECT_TRUE(mentions(message_of<ConfigError>([&] { of("EVERY_WRAP"); }),
                       "fsdp_config.fsdp_auto_wrap_policy has to be"));
  EXPECT_THROW(check_consistent(of("").settings), ConfigError);
}

TEST(ConfigImport, KeysOfShardingThatWereNotThereBecomeSettings) {
  const Import import = import_text(
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n"
      "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
      "  fsdp_ignored_modules: 'blocks\\.[01]\\.router'\n"
      "  fsdp_activation_checkpointing: true\n  fsdp_cpu_ram_efficient_loading: true\n"
      "  fsdp_activation_checkpointing_offload: false\n");
  EXPECT_FALSE(import.settings.fsdp_reshard_after_forward);
  EXPECT_EQ(import.settings.fsdp_state_dict_type.value, StateDictType::kFull);
  EXPECT_EQ(import.settings.fsdp_ignored_modules.value, "blocks\\.[01]\\.router");
  EXPECT_TRUE(import.settings.fsdp_activation_checkpointing);
  EXPECT_TRUE(import.settings.fsdp_cpu_ram_efficient_loading);
  EXPECT_EQ(import.refusals(), "");
  check_consistent(import.settings);
  check_available(import.settings);
  for (const auto& [key, value] :
       std::vector<std::array<std::string, 2>>{{"fsdp_state_dict_type", "LOCAL_STATE_DICT"},
                                               {"fsdp_activation_checkpointing_offload", "true"}}) {
    const std::string refusals =
        import_text("distributed_type: FSDP\nfsdp_config:\n  " + key + ": " + value + "\n")
            .refusals();
    EXPECT_TRUE(mentions(refusals, "fsdp_config." + key + ": " + value)) << refusals;
  }
}

// The version was compared as a number with a text, so that 2 in quotes was no 2.
TEST(ConfigImport, Trap25_TheVersionIsANumberHoweverItIsWritten) {
  for (const char* version : {"2", "'2'", "\"2\""}) {
    EXPECT_EQ(import_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: " +
                          std::string(version) + "\n")
                  .fsdp_version,
              2)
        << version;
  }
}

TEST(ConfigImport, DeepSpeedsStagesAndOffloadAreMapped) {
  const Import import = import_text(R"(distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 8
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  offload_optimizer_nvme_path: /local_nvme
  zero3_init_flag: false
  zero_stage: 2
  deepspeed_hostfile: /job/hostfile
num_processes: 2
)");
  EXPECT_EQ(import.settings.zero_stage, 2);
  EXPECT_EQ(import.settings.gradient_accumulation_steps, 8);
  EXPECT_EQ(import.settings.hostfile.value, "/job/hostfile");
  EXPECT_TRUE(import.settings.offload_optimizer);
  EXPECT_FALSE(import.settings.offload_parameters);
  EXPECT_EQ(import.settings.gradient_clipping, 1.0);
  EXPECT_EQ(line_of(import, "deepspeed_config.offload_param_device").outcome,
            ImportOutcome::kUnset);
  // The option that the other launcher took and never handed on.
  EXPECT_EQ(line_of(import, "deepspeed_config.offload_optimizer_nvme_path").outcome,
            ImportOutcome::kNoCounterpart);
  EXPECT_EQ(import.settings.deepspeed_config_file.value, kDeepSpeedWithoutFile)
      << "its other defaults";
  Settings bare =
      import_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {}\n")
          .settings;
  add_deepspeed(bare);
  EXPECT_EQ(bare.sharding.value, Sharding::kZero2);
  EXPECT_EQ(bare.gradient_clipping, 1);
  EXPECT_EQ(bare.precision_policy, PrecisionPolicy::kPure);
  const Import drives =
      import_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_param_device: nvme\n");
  EXPECT_EQ(line_of(drives, "deepspeed_config.offload_param_device").outcome,
            ImportOutcome::kRefused);
}

Import import_deepspeed_file(const std::string& file, const std::string& more = "") {
  return import_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: " +
                     file + "\n" + more);
}

// The other file's keys have their lines, too, and what it asks for is known before a launch.
TEST(ConfigImport, AJsonThatTheFileNamesIsReadKeyByKey) {
  const YamlFile json(R"({"zero_optimization": {"stage": 3, "overlap_comm": true}})");
  const Import import = import_deepspeed_file(json.path(), "  zero3_init_flag: true\n");
  EXPECT_EQ(import.settings.deepspeed_config_file.value, json.path());
  EXPECT_EQ(import.settings.zero_stage, 0) << "the file says it";
  EXPECT_EQ(import.refusals(), "");
  const std::string key = "deepspeed_config.deepspeed_config_file: zero_optimization.";
  EXPECT_EQ(line_of(import, key + "stage").outcome, ImportOutcome::kMapped);
  EXPECT_EQ(line_of(import, key + "overlap_comm").outcome, ImportOutcome::kNoCounterpart);
  const std::string name = std::filesystem::path(json.path()).filename();
  EXPECT_EQ(import_deepspeed_file(name).settings.deepspeed_config_file.value, json.path())
      << "beside the file that names it";
  EXPECT_TRUE(mentions(import_deepspeed_file("no_such.json").refusals(), "there is no file"));
  EXPECT_EQ(import_deepspeed_file("none").settings.deepspeed_config_file.value,
            kDeepSpeedWithoutFile);
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {R"({"optimizer": {"type": "OneBitAdam"}})", "optimizer.type: \"OneBitAdam\""},
           {R"({"zero_optimization": {"offload_param": {"device": "nvme"}}})",
            "device: \"nvme\""}}) {
    const YamlFile refused(text);
    const std::string message =
        message_of<UnsupportedError>([&] { import_deepspeed_file(refused.path()); });
    EXPECT_TRUE(mentions(message, part)) << message;
  }
  const YamlFile unknown(R"({"zero_optimization": {"stge": 3}})");
  EXPECT_THROW(import_deepspeed_file(unknown.path()), ConfigError);
}

// A file holds the answers to other questions, too; the launcher reads the sections of its type.
TEST(ConfigImport, SectionsThatAccelerateDoesNotReadForTheTypeChangeNothing) {
  struct Section {
    const char *name, *text;
    std::vector<std::string> read_by;
  };
  const Section kSections[] = {
      {"fsdp_config", "  fsdp_offload_params: true\n", {"FSDP"}},
      {"deepspeed_config", "  gradient_clipping: 0.5\n", {"DEEPSPEED"}},
      {"parallelism_config",
       "  parallelism_config_dp_shard_size: 2\n",
       {"FSDP", "DEEPSPEED", "MULTI_GPU"}},
      {"mpirun_config", "  mpirun_hostfile: hosts\n", {"NO", "MULTI_CPU"}}};
  for (const char* type : {"'NO'", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"}) {
    for (const auto& [name, text, read_by] : kSections) {
      SCOPED_TRACE(std::string(type) + " " + name);
      const std::string head = std::string("distributed_type: ") + type + "\nnum_processes: 1\n";
      const Import without = import_text(head);
      const Import import = import_text(head + name + ":\n" + text);
      const std::string bare = type == std::string("'NO'") ? "NO" : type;
      const bool reads = std::find(read_by.begin(), read_by.end(), bare) != read_by.end();
      EXPECT_EQ(config_json(import.settings) != config_json(without.settings), reads);
      for (const ImportLine& line : import.lines) {
        if (!line.key.starts_with(std::string(name) + ".")) continue;
        EXPECT_EQ(line.outcome == ImportOutcome::kNoCounterpart, !reads);
        EXPECT_EQ(mentions(line.note, "does not read"), !reads) << line.note;
      }
    }
  }
  const Import none =
      import_text("distributed_type: 'NO'\ndeepspeed_config:\n  deepspeed_config_file: no.json\n");
  EXPECT_EQ(none.refusals(), "") << "nobody opens it";
  const Import sixteen =
      import_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nfp8_config:\n  margin: 2\n");
  EXPECT_EQ(sixteen.settings.fp8_margin, 0);
  EXPECT_TRUE(mentions(line_of(sixteen, "fp8_config.margin").note, "fp8"));
}

// Version 1 goes by the strategy, version 2 by reshard_after_forward, as FSDP_VERSION says.
TEST(ConfigImport, TheVersionSaysWhichKeyDecidesAboutResharding) {
  struct Case {
    const char *version, *strategy, *reshards;
    bool kept;  // parameters stay whole after the forward
  };
  for (const Case& one : {Case{"1", "SHARD_GRAD_OP", "true", true},
                          {"1", "FULL_SHARD", "false", false},
                          {"", "FULL_SHARD", "false", false},
                          {"2", "SHARD_GRAD_OP", "true", false},
                          {"2", "NO_SHARD", "true", false},
                          {"2", "FULL_SHARD", "false", true},
                          {"2.0", "SHARD_GRAD_OP", "", false}}) {
    std::string text = "distributed_type: FSDP\nfsdp_config:\n";
    const auto add = [&](const char* key, const std::string& value) {
      if (!value.empty()) text += std::string("  fsdp_") + key + ": " + value + "\n";
    };
    add("sharding_strategy", one.strategy);
    add("reshard_after_forward", one.reshards);
    add("version", one.version);
    const Import import = import_text(text);
    EXPECT_EQ(import.settings.fsdp_reshard_after_forward, !one.kept) << text << import.report();
    EXPECT_EQ(import.settings.sharding.value, Sharding::kFsdp) << text;
    const bool second = one.version[0] == '2';
    const ImportLine& passed_over =
        line_of(import, second ? "fsdp_config.fsdp_sharding_strategy"
                               : "fsdp_config.fsdp_reshard_after_forward");
    EXPECT_EQ(passed_over.outcome, ImportOutcome::kUnset) << text;
    EXPECT_TRUE(mentions(passed_over.note, second ? "version 2" : "version 1")) << passed_over.note;
  }
}

}  // namespace
}  // namespace tessera::accelerate::test_config_import
