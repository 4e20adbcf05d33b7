// Flags of `tessera launch`, Accelerate's among them. CLI-2 and CLI-5 are in the tests' names.
#include <gtest/gtest.h>

#include <set>

#include <tessera/accelerate/settings/config.h>

#include "accelerate/tessera_command.h"

namespace tessera::test_launch_flags {
namespace {

TEST(LaunchFlags, CLI2_EverySettingIsAFlagOnceInBothSpellings) {
  const FinishedProcess help = tessera_command({"launch", "--help"});
  ASSERT_EQ(help.code(), 0);
  for (const accelerate::Setting& setting : accelerate::schema()) {
    size_t times = 0;
    for (const std::string end : {" ", ",", "\n"}) {
      const std::string flag = setting.flag() + end;
      for (size_t at = help.output.find(flag); at != std::string::npos;
           at = help.output.find(flag, at + 1)) {
        const char before = at == 0 ? ' ' : help.output[at - 1];
        if (before == ' ' || before == ',') ++times;
      }
    }
    EXPECT_EQ(times, 1u) << setting.flag();
  }
  for (const char* flag : {"--use-fsdp", "--use-deepspeed"}) {
    EXPECT_TRUE(help.printed(std::string(flag) + " ")) << "they are where to begin";
  }
  for (const char* flag : {"--gradient_accumulation_steps", "--gradient-accumulation-steps",
                           "--gradient_accumulation-steps=4"}) {
    std::vector<std::string> words = {"launch", flag};
    if (words[1].find('=') == std::string::npos) words.push_back("4");
    words.insert(words.end(), {kTesseraCommand, "env", "--changed"});
    const FinishedProcess shown = tessera_command(words);
    EXPECT_TRUE(shown.printed("gradient_accumulation_steps = 4  (--gradient-accumulation-steps)"))
        << shown;
  }
}

TEST(LaunchFlags, CLI2_AFlagBeatsTheFile) {
  TestFolder folder;
  const std::string file =
      folder.write("a.json", R"({"mixed_precision": "fp16", "gradient_accumulation_steps": 2})");
  const FinishedProcess shown = tessera_command({"launch", "--config", file, "--mixed_precision",
                                                 "bf16", kTesseraCommand, "env", "--changed"});
  EXPECT_TRUE(shown.printed("mixed_precision = bf16  (--mixed-precision)")) << shown;
  EXPECT_TRUE(shown.printed("gradient_accumulation_steps = 2  (file " + file + ")")) << shown;
}

// With the other launcher a variable of the user was overwritten by the launcher's defaults.
TEST(LaunchFlags, VariablesOfTheUserReachTheRanksAsSuch) {
  const FinishedProcess shown =
      tessera_command({"launch", kTesseraCommand, "env", "--changed"},
                      {{"ACCELERATE_MIXED_PRECISION", "bf16"}, {"TESSERA_SEED", "9"}});
  EXPECT_TRUE(shown.printed("mixed_precision = bf16  (ACCELERATE_MIXED_PRECISION)")) << shown;
  EXPECT_TRUE(shown.printed("seed = 9  (TESSERA_SEED)")) << shown;
  EXPECT_FALSE(shown.printed("grace =")) << shown;  // nobody said anything of it
}

TEST(LaunchFlags, VariablesOfRemoteRanksAreNamedOneByOne) {
  TestFolder folder;
  const std::string hosts = folder.write("hosts", "a slots=1\nb slots=1\n");
  const FinishedProcess shown = tessera_command(
      {"launch", "--dry-run", "--hostfile", hosts, "--export", "A", "--export", "B", "train", "C"});
  EXPECT_TRUE(shown.printed("-x A -x B ")) << shown;
  EXPECT_TRUE(shown.printed("train C")) << shown;
}

TEST(LaunchFlags, Trap25_TruthValuesMayStandApartAndFalseIsFalse) {
  for (const std::vector<std::string>& flag : {std::vector<std::string>{"--even_batches", "false"},
                                               {"--even-batches=no"},
                                               {"--even_batches", "0"}}) {
    std::vector<std::string> words = {"launch"};
    words.insert(words.end(), flag.begin(), flag.end());
    words.insert(words.end(), {kTesseraCommand, "env", "--changed"});
    const FinishedProcess shown = tessera_command(words);
    EXPECT_TRUE(shown.printed("even_batches = false  (--even-batches)")) << shown;
  }
  const FinishedProcess alone =
      tessera_command({"launch", "--cpu", kTesseraCommand, "env", "--changed"});
  EXPECT_TRUE(alone.printed("cpu = true  (--cpu)")) << alone;
}

TEST(LaunchFlags, MistakesAreToldBeforeAnythingStarts) {
  const FinishedProcess planned = tessera_command({"launch", "--cp_size", "2", "true"});
  EXPECT_TRUE(planned.code() == 1 && planned.complained("not available yet")) << planned;
  const FinishedProcess wrong = tessera_command({"launch", "--mixed_precision", "fp17", "true"});
  EXPECT_TRUE(wrong.code() == 2 && wrong.complained("--mixed-precision")) << wrong;
}

// What hands know from `accelerate launch` works, or the error names what takes its place.
TEST(LaunchFlags, HabitsOfAccelerateWorkOrAreToldWhatTakesTheirPlace) {
  TestFolder folder;
  const std::string file = folder.write("a.json", R"({"seed": 5})");
  const auto launched = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), "launch");
    flags.insert(flags.end(),
                 {"sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES seed=$TESSERA_CONFIG_FILE"});
    return tessera_command(flags, {{"CUDA_VISIBLE_DEVICES", "9"}});
  };
  EXPECT_TRUE(launched({"--config_file", file}).printed("seed=" + file));
  EXPECT_TRUE(launched({"--gpu_ids", "1,3"}).printed("gpus=1,3 "));
  EXPECT_TRUE(launched({"--gpu_ids=all"}).printed("gpus=9 "));
  for (const std::vector<std::string>& fine : {std::vector<std::string>{"--multi_gpu", "-n", "1"},
                                               {"--machine_rank", "0"},
                                               {"--dynamo_backend", "no"},
                                               {"--quiet"},
                                               {"--no_python"},
                                               {"--rdzv_backend", "static"},
                                               {"--rdzv_backend", "static", "--rdzv_conf", "a=1",
                                                "--monitor_interval", "1", "--role", "r"},
                                               {"--same_network", "--enable_cpu_affinity"},
                                               {"--use_parallelism_config", "--downcast_bf16"}}) {
    const FinishedProcess job = launched(fine);
    EXPECT_EQ(job.code(), 0) << job;
    EXPECT_TRUE(job.printed("gpus=9 ")) << fine[0] << '\n' << job;
  }
  for (const auto& [flags, remedy] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--multi_gpu"}, "-n N"},
           {{"--machine_rank", "1"}, "--hostfile FILE"},
           {{"--dynamo_backend", "inductor"}, "no graph compiler"},
           {{"-m"}, "path of a program"},
           {{"--log_dir", "logs"}, "--logging-dir"},
           {{"--tpu"}, "NVIDIA"}}) {
    const FinishedProcess job = launched(flags);
    EXPECT_EQ(job.code(), 2) << job;
    EXPECT_TRUE(job.complained(remedy)) << flags[0] << '\n' << job;
    EXPECT_FALSE(job.printed("gpus=")) << job;
  }
}

// Accelerate's flags of sharding as its users write them; --dry-run lists the settings.
TEST(LaunchFlags, CLI2_AcceleratesFlagsOfShardingBecomeSettings) {
  const auto launched = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"launch", "-n", "2", "--dry-run"});
    flags.push_back("train");
    return tessera_command(flags);
  };
  const FinishedProcess plain = launched({"--use_fsdp"});
  EXPECT_EQ(plain.code(), 0) << plain;
  EXPECT_TRUE(plain.printed("sharding = fsdp  (--sharding)")) << plain;
  const FinishedProcess mesh =
      launched({"--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config",
                "--parallelism_config_dp_shard_size", "2"});
  EXPECT_TRUE(mesh.code() == 0 && mesh.printed("dp_shard_size = 2  (--")) << mesh;
  const FinishedProcess stages =
      launched({"--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "false",
                "--zero3_save_16bit_model", "true", "--offload_param_device", "none",
                "--deepspeed_multinode_launcher", "standard"});
  EXPECT_TRUE(stages.code() == 0 && stages.printed("zero_stage = 3  (--")) << stages;
  const FinishedProcess alone = launched({"--use_deepspeed", "--mixed_precision", "fp16"});
  for (const std::string value : {"zero_stage = 2", "gradient_clipping = 1",
                                  "precision_policy = pure", "scaler_hysteresis = 2"}) {
    EXPECT_TRUE(alone.printed(value + "  (ACCELERATE_USE_DEEPSPEED)")) << alone;
  }
  const FinishedProcess by_file =
      launched({"--use_deepspeed", "--gradient_clipping", "auto", "--deepspeed_config_file",
                R"({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"})"});
  EXPECT_TRUE(by_file.code() == 0 &&
              by_file.printed("zero_stage = 3  (file deepspeed_config, zero_optimization.stage)"))
      << by_file;
  const FinishedProcess clipped = launched({"--use_deepspeed", "--gradient_clipping", "0.5"});
  EXPECT_TRUE(clipped.code() == 0 && clipped.printed("gradient_clipping = 0.5  (--")) << clipped;
  const FinishedProcess all = launched({"--use_fsdp",
                                        "--fsdp_version",
                                        "1",
                                        "--fsdp_sharding_strategy",
                                        "SHARD_GRAD_OP",
                                        "--fsdp_reshard_after_forward",
                                        "FULL_SHARD",
                                        "--fsdp_auto_wrap_policy",
                                        "TRANSFORMER_BASED_WRAP",
                                        "--fsdp_transformer_layer_cls_to_wrap",
                                        "BertLayer",
                                        "--fsdp_min_num_params",
                                        "1000",
                                        "--fsdp_offload_params",
                                        "false",
                                        "--fsdp_backward_prefetch",
                                        "BACKWARD_PRE",
                                        "--fsdp_forward_prefetch",
                                        "false",
                                        "--fsdp_use_orig_params",
                                        "true",
                                        "--fsdp_sync_module_states",
                                        "true",
                                        "--fsdp_state_dict_type",
                                        "FULL_STATE_DICT",
                                        "--fsdp_cpu_ram_efficient_loading",
                                        "true",
                                        "--fsdp_activation_checkpointing",
                                        "true",
                                        "--fsdp_activation_checkpointing_offload",
                                        "false"});
  EXPECT_EQ(all.code(), 0) << all;
  for (const std::string value :
       {"fsdp_reshard_after_forward = false", "fsdp_wrap_modules = BertLayer",
        "fsdp_state_dict_type = full", "fsdp_cpu_ram_efficient_loading = true",
        "fsdp_activation_checkpointing = true"}) {
    EXPECT_TRUE(all.printed(value + "  (--")) << value << '\n' << all;
  }
  EXPECT_FALSE(all.printed("fsdp_min_num_params =")) << all;
  EXPECT_TRUE(all.printed("agent") && all.printed("train")) << all;
  // A program may say what they go with: its own default contradicts nothing here.
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--fsdp_wrap_modules", "Block"},
        {"--fsdp_min_num_params", "10"},
        {"--fsdp_reshard_after_forward", "false"},
        {"--offload_parameters", "true"},
        {"--dp_shard_size", "2"},
        {"--precision_policy", "pure"},
        {"--total_limit", "3"},
        {"--ddp_power_sgd_rank", "2"},
        {"--use_fsdp", "--fsdp_sharding_strategy", "NO_SHARD", "--fsdp_auto_wrap_policy",
         "NO_WRAP"}}) {
    const FinishedProcess job = launched(flags);
    EXPECT_EQ(job.code(), 0) << job;
  }
  for (const auto& [flags, remedy] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--use_fsdp", "--fsdp_state_dict_type", "LOCAL_STATE_DICT"}, "any number reads"},
           {{"--use_fsdp", "--fsdp_offload_params", "true", "--cpu"}, "contradicts cpu=true"},
           {{"--use_fsdp", "--fsdp_sharding_strategy", "SOME"}, "--fsdp-sharding-strategy has to"},
           {{"--use_deepspeed", "--offload_param_device", "nvme"}, "kept on drives"},
           {{"--use_deepspeed", "--offload_param_device", "cpu"}, "offload_parameters=true"},
           {{"--use_deepspeed", "--offload_optimizer_device", "cpu", "--cpu"}, "cpu=true"},
           {{"--use_deepspeed", "--gradient_clipping", "-1"}, "gradient-clipping"},
           {{"--use_deepspeed", "--deepspeed_config_file", "/no/such.json"}, "/no/such.json"},
           {{"--deepspeed_config_file", R"({"zero_optimization": {"stge": 2}})"},
            "zero_optimization.stage"},
           {{"--zero_stage", "3", "--deepspeed_config_file",
             R"({"zero_optimization": {"stage": 2}})"},
            "zero_optimization.stage makes zero_stage 2, and --zero-stage makes it 3"},
           {{"--deepspeed_config_file", R"({"train_batch_size": 9})"},
            "train_batch_size 9 / (gradient_accumulation_steps 1 x 2 ranks), which is 4.5"},
           {{"--use_fsdp", "--use_deepspeed"}, "contradicts --use-fsdp"},
           {{"--use_fsdp", "--sharding", "zero1"}, "contradicts --use-fsdp"},
           {{"--use_fsdp", "--fsdp_version", "3"}, "--fsdp-version has to be 1 or 2"},
           {{"--fsdp_sharding_strategy", "FULL_SHARD"}, "--use-fsdp"},
           {{"--restart_ranks", "1"}, "restarts=0"},
           {{"--fsdp_min_num_params", "10", "--sharding", "ddp"}, "sharding=ddp"}}) {
    const FinishedProcess job = launched(flags);
    EXPECT_NE(job.code(), 0) << job;
    EXPECT_TRUE(job.complained(remedy)) << flags.back() << '\n' << job;
  }
}

TEST(LaunchFlags, AcceleratesFlagsOfFp8BecomeSettings) {
  const auto launched = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"launch", "--dry-run", "--mixed_precision", "fp8"});
    flags.push_back("train");
    return tessera_command(flags);
  };
  const FinishedProcess te = launched(
      {"--fp8_backend", "te", "--fp8_use_autocast_during_eval", "--fp8_margin", "1",
       "--fp8_interval", "1", "--fp8_format", "HYBRID", "--fp8_amax_history_len", "32",
       "--fp8_amax_compute_algo", "max", "--fp8_override_linear_precision", "false,false,true"});
  EXPECT_EQ(te.code(), 0) << te;
  for (const char* value : {"fp8_recipe = delayed", "fp8_in_evaluation = true", "fp8_margin = 1",
                            "fp8_amax_history_len = 32", "fp8_amax_compute_algo = max",
                            "fp8_weight_gradient = false"}) {
    EXPECT_TRUE(te.printed(value)) << value << '\n' << te;
  }
  EXPECT_TRUE(launched({"--fp8_backend", "TE"}).printed("fp8_in_evaluation = false"));
  const FinishedProcess ao =
      launched({"--fp8_backend", "ao", "--fp8_margin", "1", "--fp8_pad_inner_dim", "true",
                "--fp8_enable_fsdp_float8_all_gather", "true", "--fp8_opt_level", "O2"});
  EXPECT_TRUE(ao.code() == 0 && ao.printed("fp8_recipe = tensorwise")) << ao;
  EXPECT_FALSE(ao.printed("fp8_margin")) << "TransformerEngine's\n" << ao;
  // Without a backend the numbers of delayed scales are of Accelerate's first.
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--fp8_margin", "1"},
                                                {"--fp8_amax_history_len", "7"},
                                                {"--fp8_amax_compute_algo", "max"}}) {
    const FinishedProcess margin = launched(flags);
    EXPECT_TRUE(margin.code() == 0 && margin.printed("fp8_recipe = delayed")) << margin;
  }
  for (const auto& [flags, remedy] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--fp8_backend", "msamp"}, "say te or ao"},
           {{"--fp8_backend", "xyz"}, "te or ao"},
           {{"--fp8_interval", "4"}, "each step"},
           {{"--fp8_override_linear_precision", "true,false,false"}, "false,false,true"}}) {
    const FinishedProcess told = launched(flags);
    EXPECT_TRUE(told.code() == 2 && told.complained(remedy)) << told;
  }
  const FinishedProcess against = launched({"--fp8_recipe", "rowwise", "--fp8_margin", "1"});
  EXPECT_TRUE(against.code() == 1 && against.complained("fp8_margin=1")) << against;
}

TEST(LaunchFlags, AnUnknownFlagIsToldTheNearestOne) {
  for (const auto& [words, near] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"launch", "--num_procesess", "2", "true"}, "did you mean --num-processes?"},
           {{"launch", "--mixed_precison=bf16", "true"}, "did you mean --mixed-precision?"},
           {{"launch", "--dry-rum", "true"}, "did you mean --dry-run?"},
           {{"estimate-memory", "x", "--dtype", "f32"}, "did you mean --dtypes?"},
           {{"env", "--change"}, "did you mean --changed?"}}) {
    const FinishedProcess told = tessera_command(words);
    EXPECT_EQ(told.code(), 2) << told;
    EXPECT_TRUE(told.complained(near)) << told;
  }
  const FinishedProcess far = tessera_command({"launch", "--qqqqqqqqqqqq", "true"});
  EXPECT_EQ(far.code(), 2);
  EXPECT_FALSE(far.complained("did you mean")) << far;
  EXPECT_TRUE(far.complained("--qqqqqqqqqqqq") && far.complained("--help")) << far;
}

// Jobs at the same time need no ports of their own; a port that is asked for and taken is an error.
TEST(LaunchFlags, CLI5_AFreePortIsChosen) {
  const std::string script = "echo $TESSERA_STORE; sleep 0.5";
  const std::string both = kTesseraCommand + " launch sh -c '" + script + "' & " + kTesseraCommand +
                           " launch sh -c '" + script + "'; wait";
  const FinishedProcess jobs = run_process({"sh", "-c", both});
  EXPECT_EQ(jobs.code(), 0) << jobs;
  std::set<std::string> stores;
  std::istringstream lines(jobs.output);
  for (std::string line; std::getline(lines, line);) {
    stores.insert(line);
    EXPECT_GT(std::stoi(line.substr(line.rfind(':') + 1)), 0) << line;
  }
  EXPECT_EQ(stores.size(), 2u) << jobs;
}

TEST(LaunchFlags, CLI5_APortThatIsTakenIsAnErrorThatNamesIt) {
  distributed::TcpStoreServer server({"127.0.0.1", 0, "token"});
  const std::string port = std::to_string(server.port());
  const FinishedProcess job = tessera_command({"launch", "--main_process_port", port, "true"});
  EXPECT_EQ(job.code(), 1) << job;
  EXPECT_TRUE(job.complained(port)) << job;
}

}  // namespace
}  // namespace tessera::test_launch_flags
