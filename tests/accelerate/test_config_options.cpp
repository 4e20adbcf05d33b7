// What a program says in AcceleratorOptions becomes settings.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include <tessera/accelerate/settings/config.h>
#include <tessera/core/error.h>

#include "message_of.h"

namespace tessera::accelerate::test_config_options {
namespace {

Settings said(const AcceleratorOptions& code) {
  return resolve({.code = code, .environment = {}, .file = ""});
}

TEST(ConfigValues, WhatTheProgramSaysIsCheckedByTheSettingsRow) {
  const auto message = [](const AcceleratorOptions& code) {
    return message_of<ConfigError>([&] { said(code); });
  };
  EXPECT_TRUE(mentions(message({.gradient_accumulation_steps = 0}),
                       "gradient_accumulation_steps (code) has to be a whole number from 1 to "
                       "1e+09; got \"0\""));
  EXPECT_TRUE(mentions(message({.gradient_clipping = std::nan("")}), "gradient_clipping (code)"));
  EXPECT_TRUE(mentions(message({.loss_scale = {.backoff_factor = 2.0}}),
                       "scaler_backoff_factor (code) has to be a number from 1e-06 to 1"));
  EXPECT_TRUE(
      mentions(message({.log_with = std::vector<std::string>{"csv", ""}}), "log_with (code)"));
  EXPECT_TRUE(mentions(message({.mixed_precision = static_cast<Precision>(7)}),
                       "not an enumerator with the number 7"));
  EXPECT_EQ(
      said({.log_with = std::vector<std::string>{"csv, jsonl", "tensorboard"}}).log_with.value,
      (std::vector<std::string>{"csv", "jsonl", "tensorboard"}));
}

// Each option with a value of its own: it comes out as the setting that its row says.
AcceleratorOptions everything_said() {
  return {.mixed_precision = Precision::kBF16,
          .precision_policy = PrecisionPolicy::kBoundary,
          .output_precision = OutputPrecision::kComputed,
          .gradient_accumulation_steps = 5,
          .gradient_clipping = 6.5,
          .allow_tf32 = true,
          .cuda_graphs = false,
          .loss_weighting = LossWeighting::kHuggingFace,
          .sync_with_dataloader = false,
          .sync_each_batch = true,
          .step_schedule_with_optimizer = false,
          .schedule_unit = ScheduleUnit::kHuggingFace,
          .split_batches = true,
          .even_batches = false,
          .dispatch_batches = true,
          .seed = 16,
          .data_seed = 17,
          .cpu = true,
          .device = "t17",
          .debug = true,
          .log_level = LogLevel::kDebug,
          .project_dir = "t20",
          .logging_dir = "t21",
          .log_with = std::vector<std::string>{"a22", "b"},
          .automatic_checkpoint_naming = true,
          .total_limit = 26,
          .keep_every = 27,
          .keep_best = 28,
          .larger_is_better = true,
          .asynchronous_checkpoints = true,
          .sharding = Sharding::kZero1,
          .offload_parameters = true,
          .offload_optimizer = true,
          .dp_replicate_size = 34,
          .dp_shard_size = 35,
          .tp_size = 39,
          .tp_sequence = false,
          .deepspeed_config = "t31",
          .pp = {.size = 40,
                 .schedule = distributed::PipelineSchedule::kGPipe,
                 .stages_per_rank = 41,
                 .cuts = std::vector<std::string>{"a42", "b"}},
          .fsdp = {.reshard_after_forward = false,
                   .wrap_modules = std::vector<std::string>{"a35", "b"},
                   .min_num_params = 38,
                   .ignored_modules = "t37",
                   .activation_checkpointing = true,
                   .cpu_ram_efficient_loading = true,
                   .state_dict_type = StateDictType::kFull},
          .ddp = {.bucket_cap_mb = 43.5,
                  .first_bucket_mb = 44.5,
                  .broadcast_buffers = false,
                  .gradient_as_bucket_view = false,
                  .init_sync = false,
                  .comm_hook = CommHook::kFP16,
                  .comm_wrapper = CommWrapper::kFP16,
                  .power_sgd_rank = 50,
                  .power_sgd_start_step = 51},
          .loss_scale = {.init_scale = 52.5,
                         .growth_factor = 53.5,
                         .backoff_factor = 0.75,
                         .growth_interval = 55,
                         .enabled = false,
                         .min_scale = 57.5,
                         .hysteresis = 58,
                         .consecutive_hysteresis = true,
                         .on_device = true},
          .fp8 = {.recipe = Fp8Scaling::kDelayed,
                  .filter = Fp8Filter::kAll,
                  .exclude = std::vector<std::string>{"a61", "b"},
                  .strict = true,
                  .in_evaluation = false,
                  .weight_gradient = false,
                  .format = Fp8Format::kE4M3,
                  .margin = 6,
                  .amax_history_len = 69,
                  .amax_compute_algo = AmaxAlgorithm::kMax},
          .collective_timeout = 71.5};
}

TEST(ConfigSchema, EveryOptionOfTheProgramBecomesItsSetting) {
  const std::map<std::string, std::string> expected = {{"mixed_precision", "bf16"},
                                                       {"precision_policy", "boundary"},
                                                       {"output_precision", "computed"},
                                                       {"gradient_accumulation_steps", "5"},
                                                       {"gradient_clipping", "6.5"},
                                                       {"allow_tf32", "true"},
                                                       {"cuda_graphs", "false"},
                                                       {"loss_weighting", "huggingface"},
                                                       {"sync_with_dataloader", "false"},
                                                       {"sync_each_batch", "true"},
                                                       {"step_schedule_with_optimizer", "false"},
                                                       {"schedule_unit", "huggingface"},
                                                       {"split_batches", "true"},
                                                       {"even_batches", "false"},
                                                       {"dispatch_batches", "true"},
                                                       {"seed", "16"},
                                                       {"data_seed", "17"},
                                                       {"cpu", "true"},
                                                       {"device", "t17"},
                                                       {"debug", "true"},
                                                       {"log_level", "debug"},
                                                       {"project_dir", "t20"},
                                                       {"logging_dir", "t21"},
                                                       {"log_with", "a22,b"},
                                                       {"automatic_checkpoint_naming", "true"},
                                                       {"total_limit", "26"},
                                                       {"keep_every", "27"},
                                                       {"keep_best", "28"},
                                                       {"larger_is_better", "true"},
                                                       {"asynchronous_checkpoints", "true"},
                                                       {"sharding", "zero1"},
                                                       {"offload_parameters", "true"},
                                                       {"offload_optimizer", "true"},
                                                       {"deepspeed_config_file", "t31"},
                                                       {"dp_replicate_size", "34"},
                                                       {"dp_shard_size", "35"},
                                                       {"tp_size", "39"},
                                                       {"tp_sequence", "false"},
                                                       {"pp_size", "40"},
                                                       {"pp_schedule", "gpipe"},
                                                       {"pp_stages_per_rank", "41"},
                                                       {"pp_cuts", "a42,b"},
                                                       {"fsdp_reshard_after_forward", "false"},
                                                       {"fsdp_wrap_modules", "a35,b"},
                                                       {"fsdp_min_num_params", "38"},
                                                       {"fsdp_ignored_modules", "t37"},
                                                       {"fsdp_activation_checkpointing", "true"},
                                                       {"fsdp_cpu_ram_efficient_loading", "true"},
                                                       {"fsdp_state_dict_type", "full"},
                                                       {"ddp_bucket_cap_mb", "43.5"},
                                                       {"ddp_first_bucket_mb", "44.5"},
                                                       {"ddp_broadcast_buffers", "false"},
                                                       {"ddp_gradient_as_bucket_view", "false"},
                                                       {"ddp_init_sync", "false"},
                                                       {"ddp_comm_hook", "fp16"},
                                                       {"ddp_comm_wrapper", "fp16"},
                                                       {"ddp_power_sgd_rank", "50"},
                                                       {"ddp_power_sgd_start_step", "51"},
                                                       {"scaler_init_scale", "52.5"},
                                                       {"scaler_growth_factor", "53.5"},
                                                       {"scaler_backoff_factor", "0.75"},
                                                       {"scaler_growth_interval", "55"},
                                                       {"scaler_enabled", "false"},
                                                       {"scaler_min_scale", "57.5"},
                                                       {"scaler_hysteresis", "58"},
                                                       {"scaler_consecutive_hysteresis", "true"},
                                                       {"scaler_on_device", "true"},
                                                       {"fp8_recipe", "delayed"},
                                                       {"fp8_filter", "all"},
                                                       {"fp8_exclude", "a61,b"},
                                                       {"fp8_strict", "true"},
                                                       {"fp8_in_evaluation", "false"},
                                                       {"fp8_weight_gradient", "false"},
                                                       {"fp8_format", "e4m3"},
                                                       {"fp8_margin", "6"},
                                                       {"fp8_amax_history_len", "69"},
                                                       {"fp8_amax_compute_algo", "max"},
                                                       {"collective_timeout", "71.5"}};
  const Settings settings = merge({.code = everything_said(), .environment = {}, .file = ""});
  for (const Setting& setting : schema()) {
    const auto found = expected.find(std::string(setting.key));
    EXPECT_EQ(setting.field.take != nullptr, found != expected.end()) << setting.key;
    if (found == expected.end()) continue;
    EXPECT_EQ(text(setting, settings), found->second) << setting.key;
    EXPECT_EQ(origin(setting, settings).describe(), "code") << setting.key;
  }
}

}  // namespace
}  // namespace tessera::accelerate::test_config_options
