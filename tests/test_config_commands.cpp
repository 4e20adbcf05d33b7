// The tessera command as users run it: config, env, launch's flags, estimate-memory, plan,
// merge-weights, test. CLI-2 to CLI-5 are in the tests' names.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "finished_process.h"

#include <nlohmann/json.hpp>

#include <tessera/accelerate/settings/config.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/safetensors.h>
#include <tessera/distributed/checkpoint/commit.h>

namespace tessera::test_config_commands {
namespace {

const std::string kCommand = TESSERA_COMMAND;

// Without the user's own settings.
FinishedProcess tessera_command(std::vector<std::string> words, launch::Environment changes = {}) {
  words.insert(words.begin(), kCommand);
  changes.emplace("XDG_CONFIG_HOME", "/nonexistent");
  return run_process(words, changes);
}

// Answers to questions, by a shell.
FinishedProcess tessera_with_input(const std::string& input, const std::string& words) {
  return run_process({"sh", "-c", "printf '" + input + "' | " + kCommand + " " + words},
                     {{"XDG_CONFIG_HOME", "/nonexistent"}});
}

// ---- config

TEST(ConfigCommand, DefaultWritesAFileThatATrainingReads) {
  TestFolder folder;
  const std::string file = folder.path("made/here/config.json");
  const FinishedProcess made =
      tessera_command({"config", "default", "--mixed_precision", "bf16", "--even-batches", "false",
                       "--cpu", "--output", file});
  EXPECT_EQ(made.code(), 0) << made;
  EXPECT_EQ(
      folder.read("made/here/config.json"),
      "{\n  \"mixed_precision\": \"bf16\",\n  \"cpu\": true,\n  \"even_batches\": false\n}\n");
  const FinishedProcess shown = tessera_command({"env", "--changed", "--config", file});
  EXPECT_TRUE(shown.printed("mixed_precision = bf16  (file " + file + ")")) << shown;
  // It is not replaced by mistake.
  const FinishedProcess again = tessera_command({"config", "default", "--output", file});
  EXPECT_EQ(again.code(), 1);
  EXPECT_TRUE(again.complained("--overwrite")) << again;
  EXPECT_EQ(tessera_command({"config", "default", "--output", file, "--overwrite"}).code(), 0);
  EXPECT_EQ(folder.read("made/here/config.json"), "{}\n");
}

TEST(ConfigCommand, DefaultGoesToTheUsersFolder) {
  TestFolder folder;
  const FinishedProcess made = tessera_command({"config", "default", "--seed", "3"},
                                               {{"XDG_CONFIG_HOME", folder.path("xdg")}});
  EXPECT_EQ(made.code(), 0) << made;
  EXPECT_EQ(folder.read("xdg/tessera/config.json"), "{\n  \"seed\": 3\n}\n");
}

TEST(ConfigCommand, TheQuestionnaireAsksAgainForWhatCannotBe) {
  TestFolder folder;
  const std::string file = folder.path("asked.json");
  // mixed_precision twice, its policy, what results are, accumulation, then all other questions
  // with empty answers.
  std::string input = "fp17\\nbf16\\n\\n\\n4\\n";
  for (int i = 0; i < 60; ++i) input += "\\n";
  const FinishedProcess asked = tessera_with_input(input, "config --output " + file);
  EXPECT_EQ(asked.code(), 0) << asked;
  EXPECT_TRUE(asked.printed("has to be one of no, bf16, fp16")) << asked;
  EXPECT_EQ(folder.read("asked.json"),
            "{\n  \"mixed_precision\": \"bf16\",\n  \"gradient_accumulation_steps\": 4\n}\n");
}

TEST(ConfigCommand, TheQuestionnaireWritesNothingWhereTheInputEnds) {
  TestFolder folder;
  const FinishedProcess asked =
      tessera_with_input("bf16\\n", "config --output " + folder.path("none.json"));
  EXPECT_EQ(asked.code(), 1) << asked;
  EXPECT_TRUE(asked.complained("the input ended")) << asked;
  EXPECT_FALSE(std::filesystem::exists(folder.path("none.json")));
}

TEST(ConfigCommand, UpdateRewritesOlderNames) {
  TestFolder folder;
  const std::string file =
      folder.write("old.json", R"({"num_processes": "2", "use_cpu": true, "even_batches": "yes"})");
  const FinishedProcess updated = tessera_command({"config", "update", file});
  EXPECT_EQ(updated.code(), 0) << updated;
  EXPECT_EQ(folder.read("old.json"), "{\n  \"cpu\": true,\n  \"ranks\": 2\n}\n");
  folder.write("bad.json", R"({"num_process": 2})");
  const FinishedProcess refused = tessera_command({"config", "update", folder.path("bad.json")});
  EXPECT_EQ(refused.code(), 1);
  EXPECT_TRUE(refused.complained("\"num_process\" (did you mean \"num_processes\"?)")) << refused;
}

TEST(ConfigCommand, CLI1_ImportSaysWhatBecameOfEachKeyAndTheFileLaunches) {
  TestFolder folder;
  const std::string yaml =
      folder.write("a.yaml",
                   "distributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 1\n"
                   "gpu_ids: '0,1'\nuse_cpu: true\nmain_process_port: null\n");
  const std::string json = folder.path("a.json");
  const FinishedProcess imported = tessera_command({"config", "import", yaml, "--output", json});
  EXPECT_EQ(imported.code(), 0) << imported;
  EXPECT_TRUE(imported.printed("mixed_precision = bf16")) << imported;
  EXPECT_TRUE(imported.printed("CUDA_VISIBLE_DEVICES")) << imported;
  const FinishedProcess launched =
      tessera_command({"launch", "--config", json, kCommand, "env", "--changed"});
  EXPECT_EQ(launched.code(), 0) << launched;
  EXPECT_TRUE(launched.printed("mixed_precision = bf16  (file " + json + ")")) << launched;
  EXPECT_EQ(tessera_command({"config", "import", yaml, "--output", json}).code(), 1);
  EXPECT_EQ(tessera_command({"config", "import", folder.path("no.yaml")}).code(), 1);
}

// What a file asks for and a training would not do is refused with the key, and nothing is written.
TEST(ConfigCommand, ImportsThatWouldTrainOtherwiseAreRefusedByKey) {
  TestFolder folder;
  const std::string json = folder.path("out.json");
  const auto refused = [&](const std::string& yaml, const std::string& key) {
    const FinishedProcess imported =
        tessera_command({"config", "import", folder.write("in.yaml", yaml), "--output", json});
    EXPECT_EQ(imported.code(), 1) << imported;
    EXPECT_TRUE(imported.complained(key)) << key << '\n' << imported;
    EXPECT_TRUE(imported.complained("nothing was written")) << imported;
    EXPECT_FALSE(std::filesystem::exists(json));
  };
  // MS-AMP, and Accelerate's templates deepspeed.yaml and fsdp.yaml.
  refused(
      "distributed_type: \"NO\"\nmixed_precision: \"fp8\"\nfp8_config:\n  backend: MSAMP\n"
      "  opt_level: O2\n",
      "fp8_config.backend: MSAMP");
  refused(
      "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
      "  offload_param_device: nvme\nnum_processes: 2\n",
      "deepspeed_config.offload_param_device: nvme");
  refused("distributed_type: MEGATRON_LM\nnum_processes: 2\n", "distributed_type: MEGATRON_LM");
  // What is the same training under another name passes.
  const FinishedProcess same = tessera_command(
      {"config", "import",
       folder.write("ok.yaml",
                    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 0\n"
                    "  gradient_clipping: auto\n  offload_param_device: none\nnum_processes: 2\n"),
       "--output", json});
  EXPECT_EQ(same.code(), 0) << same;
}

TEST(ConfigCommand, AFileOfSeveralMachinesEndsInASentenceAboutTheHostFile) {
  TestFolder folder;
  const std::string json = folder.path("out.json");
  const FinishedProcess imported = tessera_command(
      {"config", "import",
       folder.write("in.yaml",
                    "distributed_type: MULTI_GPU\nmachine_rank: 0\nmain_process_ip: 127.0.0.1\n"
                    "main_process_port: 0\nnum_machines: 2\nnum_processes: 4\n"),
       "--output", json});
  EXPECT_EQ(imported.code(), 0) << imported;
  EXPECT_TRUE(imported.printed("--hostfile")) << imported;
  const FinishedProcess launched = tessera_command({"launch", "--config", json, "true"});
  EXPECT_EQ(launched.code(), 1) << launched;
  EXPECT_TRUE(launched.complained("--hostfile FILE")) << launched;
  EXPECT_TRUE(launched.complained("nodes=2")) << launched;
  const FinishedProcess few =
      tessera_command({"launch", "--nodes", "3", "--hostfile",
                       folder.write("hosts", "localhost slots=4\n"), "-n", "3", "true"});
  EXPECT_EQ(few.code(), 1) << few;
  EXPECT_TRUE(few.complained("names 1")) << few;
}

TEST(ConfigCommand, AYamlFileWhereJsonIsReadPointsToTheImport) {
  TestFolder folder;
  const std::string yaml = folder.write("a.yaml", "mixed_precision: bf16\n");
  const FinishedProcess launched = tessera_command({"launch", "--config", yaml, "true"});
  EXPECT_EQ(launched.code(), 1) << launched;
  EXPECT_TRUE(launched.complained("tessera config import " + yaml)) << launched;
}

TEST(ConfigCommand, CLI4_ToFsdp2) {
  TestFolder folder;
  const std::string first =
      folder.write("v1.yaml",
                   "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
                   "  fsdp_backward_prefetch: BACKWARD_PRE\nnum_processes: 2\n");
  const std::string output = folder.path("v2.json");
  const auto convert = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"config", "to-fsdp2"});
    return tessera_command(words);
  };
  FinishedProcess done =
      convert({"--config_file", folder.path("no.yaml"), "--output_file", output});
  EXPECT_EQ(done.code(), 1);
  EXPECT_TRUE(done.complained("there is no file")) << done;
  done = convert({"--config_file", first});
  EXPECT_EQ(done.code(), 1);
  EXPECT_TRUE(done.complained("--output-file")) << done;
  done = convert({"--config_file", first, "--output_file", output});
  EXPECT_EQ(done.code(), 0) << done;
  EXPECT_TRUE(done.printed("fsdp_backward_prefetch") && done.printed("dropped")) << done;
  EXPECT_EQ(folder.read("v2.json"),
            "{\n  \"sharding\": \"fsdp\",\n  \"fsdp_reshard_after_forward\": false,\n  \"ranks\": "
            "2\n}\n");
  done = convert({"--config_file", first, "--output_file", output});
  EXPECT_EQ(done.code(), 1);
  EXPECT_TRUE(done.complained("exists")) << done;
  EXPECT_EQ(convert({"--config_file", first, "--output_file", output, "--overwrite"}).code(), 0);

  const std::string second =
      folder.write("v2.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n");
  done = convert({"--config_file", second, "--output_file", folder.path("unwritten.json")});
  EXPECT_EQ(done.code(), 0) << done;
  EXPECT_TRUE(done.printed("FSDP2 already")) << done;
  EXPECT_FALSE(std::filesystem::exists(folder.path("unwritten.json")));
  done = convert({"--config_file", folder.write("none.yaml", "use_cpu: true\n"), "--output_file",
                  folder.path("x.json")});
  EXPECT_TRUE(done.code() == 1 && done.complained("no fsdp_config")) << done;
}

// ---- launch

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
  for (const char* flag : {"--gradient_accumulation_steps", "--gradient-accumulation-steps",
                           "--gradient_accumulation-steps=4"}) {
    std::vector<std::string> words = {"launch", flag};
    if (words[1].find('=') == std::string::npos) words.push_back("4");
    words.insert(words.end(), {kCommand, "env", "--changed"});
    const FinishedProcess shown = tessera_command(words);
    EXPECT_TRUE(shown.printed("gradient_accumulation_steps = 4  (--gradient-accumulation-steps)"))
        << shown;
  }
}

TEST(LaunchFlags, CLI2_AFlagBeatsTheFile) {
  TestFolder folder;
  const std::string file =
      folder.write("a.json", R"({"mixed_precision": "fp16", "gradient_accumulation_steps": 2})");
  const FinishedProcess shown = tessera_command(
      {"launch", "--config", file, "--mixed_precision", "bf16", kCommand, "env", "--changed"});
  EXPECT_TRUE(shown.printed("mixed_precision = bf16  (--mixed-precision)")) << shown;
  EXPECT_TRUE(shown.printed("gradient_accumulation_steps = 2  (file " + file + ")")) << shown;
}

// With the other launcher a variable of the user was overwritten by the launcher's defaults.
TEST(LaunchFlags, VariablesOfTheUserReachTheRanksAsSuch) {
  const FinishedProcess shown =
      tessera_command({"launch", kCommand, "env", "--changed"},
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
    words.insert(words.end(), {kCommand, "env", "--changed"});
    const FinishedProcess shown = tessera_command(words);
    EXPECT_TRUE(shown.printed("even_batches = false  (--even-batches)")) << shown;
  }
  const FinishedProcess alone = tessera_command({"launch", "--cpu", kCommand, "env", "--changed"});
  EXPECT_TRUE(alone.printed("cpu = true  (--cpu)")) << alone;
}

TEST(LaunchFlags, MistakesAreToldBeforeAnythingStarts) {
  const FinishedProcess planned = tessera_command({"launch", "--tp_size", "2", "true"});
  EXPECT_TRUE(planned.code() == 1 && planned.complained("not available yet")) << planned;
  const FinishedProcess wrong = tessera_command({"launch", "--mixed_precision", "fp17", "true"});
  EXPECT_TRUE(wrong.code() == 1 && wrong.complained("--mixed-precision")) << wrong;
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
                                               {"--rdzv_backend", "static"}}) {
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
  EXPECT_TRUE(plain.printed("sharding from --sharding")) << plain;
  const FinishedProcess mesh =
      launched({"--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config",
                "--parallelism_config_dp_shard_size", "2"});
  EXPECT_TRUE(mesh.code() == 0 && mesh.printed("dp_shard_size from --")) << mesh;
  const FinishedProcess stages =
      launched({"--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "false",
                "--zero3_save_16bit_model", "true", "--offload_param_device", "none",
                "--deepspeed_multinode_launcher", "standard"});
  EXPECT_TRUE(stages.code() == 0 && stages.printed("zero_stage from --")) << stages;
  const FinishedProcess by_file =
      launched({"--use_deepspeed", "--gradient_clipping", "auto", "--deepspeed_config_file",
                R"({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"})"});
  EXPECT_TRUE(by_file.code() == 0 &&
              by_file.printed("zero_stage from file deepspeed_config, zero_optimization.stage"))
      << by_file;
  const FinishedProcess clipped = launched({"--use_deepspeed", "--gradient_clipping", "0.5"});
  EXPECT_TRUE(clipped.code() == 0 && clipped.printed("gradient_clipping from --")) << clipped;
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
  for (const char* key : {"fsdp_reshard_after_forward", "fsdp_wrap_modules", "fsdp_state_dict_type",
                          "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"}) {
    EXPECT_TRUE(all.printed(std::string(key) + " from --")) << key << '\n' << all;
  }
  EXPECT_FALSE(all.printed("fsdp_min_num_params from")) << all;
  EXPECT_TRUE(all.printed("agent") && all.printed("train")) << all;
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
           {{"--use_fsdp", "--sharding", "zero1"}, "contradicts --use-fsdp"},
           {{"--use_fsdp", "--fsdp_version", "3"}, "--fsdp-version has to be 1 or 2"},
           {{"--fsdp_sharding_strategy", "FULL_SHARD"}, "--use-fsdp"},
           {{"--fsdp_min_num_params", "10"}, "sharding=ddp"}}) {
    const FinishedProcess job = launched(flags);
    EXPECT_NE(job.code(), 0) << job;
    EXPECT_TRUE(job.complained(remedy)) << flags.back() << '\n' << job;
  }
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
  const std::string both = kCommand + " launch sh -c '" + script + "' & " + kCommand +
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

// ---- env

TEST(EnvCommand, ShowsTheMachineAndEverySettingWithItsOrigin) {
  const FinishedProcess shown =
      tessera_command({"env", "--all"}, {{"TESSERA_COLLECTIVE_TIMEOUT", "30"}});
  EXPECT_EQ(shown.code(), 0) << shown;
  for (const char* part : {"tessera:", "compiler:", "processor:", "extensions:", "kernels:",
                           "cores:", "memory:", "oneDNN:", "MPI:", "NCCL:", "CUDA:", "launcher:"}) {
    EXPECT_TRUE(shown.printed(part)) << part;
  }
  for (const accelerate::Setting& setting : accelerate::schema()) {
    EXPECT_TRUE(shown.printed("\n" + std::string(setting.key) + " = ")) << setting.key;
  }
  EXPECT_TRUE(shown.printed("collective_timeout = 30  (TESSERA_COLLECTIVE_TIMEOUT)")) << shown;
}

TEST(EnvCommand, ShowsWhatWasChangedUnlessAllIsAskedFor) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"env"}, {"env", "--changed"}}) {
    const FinishedProcess shown = tessera_command(words, {{"TESSERA_SEED", "4"}});
    EXPECT_TRUE(shown.printed("seed = 4  (TESSERA_SEED)")) << shown;
    EXPECT_FALSE(shown.printed("grace =")) << shown;
    EXPECT_TRUE(shown.printed("processor:")) << shown;
  }
}

TEST(EnvCommand, SaysWhatATrainingWouldRefuse) {
  const FinishedProcess planned = tessera_command({"env", "--changed"}, {{"TESSERA_TP_SIZE", "2"}});
  EXPECT_EQ(planned.code(), 1);
  EXPECT_TRUE(planned.printed("tp_size = 2  (TESSERA_TP_SIZE)")) << planned;
  EXPECT_TRUE(planned.printed("a training is refused")) << planned;
}

// ---- estimate-memory

const char* const kBertBaseCased = R"({"model_type": "bert", "hidden_size": 768,
  "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
  "vocab_size": 28996, "max_position_embeddings": 512, "type_vocab_size": 2})";

// Its parameters with a head of two classes, and without the tables of indices.
constexpr int64_t kBertTrained = 433249280 / 4 - 2 * 512 * 2 + 2 * 768 + 2;

nlohmann::json estimate(const std::vector<std::string>& words) {
  std::vector<std::string> command = {"estimate-memory", "--json"};
  command.insert(command.end(), words.begin(), words.end());
  const FinishedProcess process = tessera_command(command);
  EXPECT_EQ(process.code(), 0) << process;
  return nlohmann::json::parse(process.output);
}

TEST(EstimateMemory, CLI3_BertBaseCasedToTheByte) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  for (const std::string& path : {file, folder.path("")}) {
    const auto rows = estimate({path, "--dtypes", "float32,float16"})["dtypes"];
    EXPECT_EQ(rows[0]["largest_layer_bytes"], 90669056);
    EXPECT_EQ(rows[0]["total_bytes"], 433249280);
    EXPECT_EQ(rows[0]["training_bytes"], 4 * 433249280LL);
    EXPECT_EQ(rows[1]["largest_layer_bytes"], 90669056 / 2);
    EXPECT_EQ(rows[1]["total_bytes"], 433249280 / 2);
    EXPECT_EQ(rows[1]["training_bytes"], 4 * (433249280LL / 2));
  }
}

// The decoder of idefics-80b-instruct by the header of its file: what stays together is a layer,
// with the tables of its rotary embedding, and Accelerate's figure for it is 3 240 165 632 bytes.
TEST(EstimateMemory, CLI3_AModelOf80BWithBlocksThatStayTogether) {
  TestFolder folder;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> layer = {
      {"self_attn.q_proj.weight", {8192, 8192}},
      {"self_attn.k_proj.weight", {8192, 8192}},
      {"self_attn.v_proj.weight", {8192, 8192}},
      {"self_attn.o_proj.weight", {8192, 8192}},
      {"self_attn.rotary_emb.cos_cached", {2048, 128}},
      {"self_attn.rotary_emb.sin_cached", {2048, 128}},
      {"self_attn.rotary_emb.inv_freq", {64}},
      {"mlp.gate_proj.weight", {22016, 8192}},
      {"mlp.up_proj.weight", {22016, 8192}},
      {"mlp.down_proj.weight", {8192, 22016}},
      {"input_layernorm.weight", {8192}},
      {"post_attention_layernorm.weight", {8192}}};
  nlohmann::ordered_json header;
  int64_t end = 0;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    int64_t bytes = 4;
    for (const int64_t size : shape) bytes *= size;
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  };
  add("model.embed_tokens.weight", {32002, 8192});
  for (int i = 0; i < 80; ++i) {
    for (const auto& [name, shape] : layer) {
      add("model.layers." + std::to_string(i) + "." + name, shape);
    }
  }
  add("lm_head.weight", {32002, 8192});
  const std::string text = header.dump();
  std::ofstream file(folder.path("model.safetensors"), std::ios::binary);
  const uint64_t size = text.size();
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << text;
  file.close();
  std::filesystem::resize_file(folder.path("model.safetensors"),
                               8 + size + static_cast<uint64_t>(end));  // sparse
  const auto result = estimate({folder.path(""), "--dtypes", "float32,float16"});
  const auto rows = result["dtypes"];
  EXPECT_EQ(result["largest_layer"], "model.layers.0");
  EXPECT_EQ(rows[0]["largest_layer_bytes"], 3240165632);
  EXPECT_EQ(rows[1]["largest_layer_bytes"], 3240165632 / 2);
  EXPECT_EQ(rows[0]["total_bytes"], 80 * 3240165632LL + 2 * 4 * 32002LL * 8192);
}

TEST(EstimateMemory, RanksShareWhatTheirModeShards) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  const auto row = estimate({file, "--dtypes", "f32", "--num_processes", "4", "--batch-size", "8",
                             "--sequence-length", "128"})["dtypes"][0]["per_rank"];
  constexpr int64_t kSize = 4 * kBertTrained;
  EXPECT_EQ(row["DDP"]["parameters"], kSize);
  EXPECT_EQ(row["DDP"]["optimizer"], 2 * kSize);
  // Parts begin at cache lines, or are padded to whole rows.
  const auto is_about = [](int64_t bytes, int64_t expected) {
    return bytes >= expected && bytes < expected + expected / 1000;
  };
  EXPECT_TRUE(is_about(row["ZeRO-1"]["optimizer"], 2 * kSize / 4)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-1"]["gradients"], kSize)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-2"]["gradients"], kSize / 4)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-2"]["parameters"], kSize)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-3"]["parameters"], kSize / 4)) << row;
  // 8 * 128 tokens; a layer keeps 8 C + 2 F values and statistics, then 3 C + V.
  EXPECT_EQ(row["DDP"]["activations"],
            8 * 128 * (12 * ((8 * 768 + 2 * 3072) * 4 + 4 * 12) + (3 * 768 + 28996) * 4));
}

// In 16 bits there are two ways to train, and the default keeps parameters and gradients in f32.
TEST(EstimateMemory, RowsOf16BitsAreAutocastsAndPures) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  const auto row = estimate({file, "--dtypes", "bf16", "-n", "2"})["dtypes"][0];
  constexpr int64_t kElements = kBertTrained;
  // Of layers all but the norms, the pooler and the classifier.
  constexpr int64_t kCast = 12 * (7087872 - 4 * 768) + 590592 + 1538;
  const auto autocast = row["per_rank"]["DDP"], pure = row["per_rank_pure"]["DDP"];
  EXPECT_EQ(autocast["parameters"], 4 * kElements + 2 * kCast);  // what products read in 16 bits
  EXPECT_EQ(autocast["gradients"], 4 * kElements);
  EXPECT_EQ(autocast["optimizer"], 8 * kElements);
  EXPECT_EQ(pure["parameters"], 2 * kElements);
  EXPECT_EQ(pure["gradients"], 4 * kElements);
  EXPECT_EQ(pure["optimizer"], 12 * kElements);
  const FinishedProcess table = tessera_command({"estimate-memory", file, "--dtypes", "f32,bf16"});
  EXPECT_TRUE(table.printed("bf16 autocast (the default)")) << table;
  EXPECT_TRUE(table.printed("bf16 pure (precision_policy = pure)")) << table;
}

TEST(EstimateMemory, ParametersOfGpt2AndLlama) {
  TestFolder folder;
  const std::string gpt2 = folder.write(
      "gpt2.json", R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                       "n_positions": 1024, "vocab_size": 50257})");
  EXPECT_EQ(estimate({gpt2})["dtypes"][0]["total_bytes"], 4 * 124439808LL);
  // TinyLlama-1.1B: 1 100 048 384 parameters.
  const std::string llama = folder.write(
      "llama.json", R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
                        "num_hidden_layers": 22, "num_attention_heads": 32,
                        "num_key_value_heads": 4, "vocab_size": 32000})");
  EXPECT_EQ(estimate({llama})["dtypes"][0]["total_bytes"], 4 * 1100048384LL);
}

TEST(EstimateMemory, HeadersOfFilesAreEnough) {
  TestFolder folder;
  // A header that claims 80 GB, in a sparse file: reading the data would show.
  const std::string header =
      R"({"h.0.w":{"dtype":"F32","shape":[100000,100000],"data_offsets":[0,40000000000]},)"
      R"("h.1.w":{"dtype":"F32","shape":[100000,100000],"data_offsets":[40000000000,80000000000]}})";
  std::ofstream file(folder.path("model.safetensors"), std::ios::binary);
  const uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << header;
  file.close();
  std::filesystem::resize_file(folder.path("model.safetensors"), 8 + size + 80000000000ULL);
  const auto result = estimate({folder.path("")});
  EXPECT_EQ(result["dtypes"][0]["total_bytes"], 80000000000);
  EXPECT_EQ(result["dtypes"][0]["largest_layer_bytes"], 40000000000);
  EXPECT_EQ(result["largest_layer"], "h.0");
}

TEST(EstimateMemory, CLI3_ErrorsSayWhatIsMissing) {
  TestFolder folder;
  const auto complaint = [&](const std::vector<std::string>& words) {
    std::vector<std::string> command = {"estimate-memory"};
    command.insert(command.end(), words.begin(), words.end());
    const FinishedProcess process = tessera_command(command);
    EXPECT_EQ(process.code(), 1) << process;
    return process.error;
  };
  const auto mentions = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(mentions(complaint({"bert-base-uncased-that-is-not-here"}), "there is no "));
  std::filesystem::create_directories(folder.path("empty"));
  EXPECT_TRUE(mentions(complaint({folder.path("empty")}), "no config.json"));
  const std::string unknown = folder.write("u.json", R"({"model_type": "perceiver"})");
  EXPECT_TRUE(mentions(complaint({unknown}), "model_type \"perceiver\", which is unknown"));
  EXPECT_TRUE(mentions(complaint({folder.write("n.json", "{}")}), "\"model_type\""));
  EXPECT_TRUE(mentions(complaint({folder.write("m.json", R"({"model_type": "bert"})")}),
                       "no \"hidden_size\""));
  EXPECT_TRUE(mentions(complaint({folder.write("a.bin", "x")}), "neither"));
  EXPECT_TRUE(
      mentions(complaint({folder.write("b.json", kBertBaseCased), "--dtypes", "f12"}), "\"f12\""));
  EXPECT_TRUE(mentions(complaint({folder.write("c.json", kBertBaseCased), "--batch-size", "2"}),
                       "--sequence-length"));
}

// ---- plan

const char* const kGpt2Xl = R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25,
  "n_positions": 1024, "vocab_size": 50257})";

TEST(PlanCommand, SaysWhetherItFitsAndWhatItSends) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const FinishedProcess told =
      tessera_command({"plan", "--model", model, "--mesh", "dp_shard=8", "--batch_size", "4",
                       "--context", "1024", "--memory", "80GB", "--json", folder.path("p.json")});
  EXPECT_EQ(told.code(), 0) << told;
  for (const char* part : {"1,557,611,200 parameters", "fsdp", "fits:", "a step of a rank sends",
                           "reduce_scatter", "together"}) {
    EXPECT_TRUE(told.printed(part)) << part << "\n" << told;
  }
  const auto plan = nlohmann::json::parse(folder.read("p.json"));
  EXPECT_EQ(plan["parameters"], 1557611200);
  ASSERT_EQ(plan["ranks"].size(), 8u);
  EXPECT_EQ(plan["step_seconds"], nullptr);
  // The same rank without room.
  const FinishedProcess small = tessera_command({"plan", "--model", model, "--sharding", "ddp",
                                                 "--mesh", "dp_replicate=8", "--memory", "8GB"});
  EXPECT_TRUE(small.printed("DOES NOT FIT")) << small;
}

TEST(PlanCommand, SecondsComeFromAStatedNetwork) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const std::string network =
      folder.write("net.json", R"({"bandwidth_bytes_per_second": 5e10, "latency_seconds": 5e-6,
                      "flops_per_second": 4e14})");
  const std::vector<std::string> words = {
      "plan",         "--model", model,          "--sharding", "zero2",     "--mesh", "dp_shard=64",
      "--accumulate", "2",       "--batch-size", "1",          "--context", "512"};
  const auto seconds = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    more.insert(more.end(), {"--json", "-"});
    const FinishedProcess told = tessera_command(more);
    EXPECT_EQ(told.code(), 0) << told;
    return nlohmann::json::parse(told.output)["step_seconds"];
  };
  const auto by_file = seconds({"--network", network});
  EXPECT_EQ(by_file, seconds({"--bandwidth", "50", "--latency", "5", "--flops", "400"}));
  EXPECT_GT(by_file["communication"], 0);
  EXPECT_EQ(by_file["most"],
            by_file["communication"].get<double>() + by_file["compute"].get<double>());
}

TEST(PlanCommand, MistakesNameWhatIsWrong) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const auto complaint = [&](std::vector<std::string> words, int code = 1) {
    words.insert(words.begin(), {"plan", "--model", model});
    const FinishedProcess told = tessera_command(words);
    EXPECT_EQ(told.code(), code) << told;
    return told.error;
  };
  for (const auto& [words, part] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--mesh", "dp=8"}, "dp_shard and dp_replicate; got \"dp=8\""},
           {{"--mesh", "dp_shard=0"}, "dp_shard has to be a whole number above 0; got \"0\""},
           {{"--mesh", "dp_shard=2,dp_shard=2"}, "names dp_shard twice"},
           {{"--mesh", "dp_shard=4000000"}, "up to 65536"},
           {{"--mesh", "dp_replicate=8"}, "nothing to cut"},
           {{"--mesh", "dp_shard=2,dp_replicate=2", "--sharding", "zero1"}, "one axis"},
           {{"--mesh", "dp_shard=2", "--memory", "80gigs"}, "got \"80gigs\""},
           {{"--mesh", "dp_shard=2", "--batch-size", "2"}, "--context"},
           {{"--mesh", "dp_shard=2", "--batch-size", "2", "--context", "4096"}, "at most 1024"},
           {{"--mesh", "dp_shard=2", "--flops", "1"}, "need --bandwidth"},
           {{"--mesh", "dp_shard=2", "--wrap-modules", "Blok"}, "Blok"},
           {{"--mesh", "dp_shard=2", "--network", folder.write("n.json", "{}")},
            "bandwidth_bytes_per_second"}}) {
    EXPECT_NE(complaint(words).find(part), std::string::npos) << part << "\n" << complaint(words);
  }
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--optimizer", "adamv"}, 2).find("adamv"),
            std::string::npos);
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--sharing", "ddp"}, 2).find("--sharding"),
            std::string::npos);
}

// ---- merge-weights

class MergeWeights : public testing::Test {
 protected:
  MergeWeights() {
    for (int i = 0; i < 6; ++i) tensors_["layer." + std::to_string(i)] = randn({5, 3 + i});
    tensors_["half"] = randn({7}).to(kBF16);
    tensors_["none"] = zeros({0, 4});
    std::map<std::string, Tensor> first, second;
    nlohmann::json index = {{"metadata", {{"total_size", 1}}}};
    for (const auto& [name, tensor] : tensors_) {
      auto& shard = first.size() < 4 ? first : second;
      shard[name] = tensor;
      index["weight_map"][name] = &shard == &first ? "a.safetensors" : "b.safetensors";
    }
    std::filesystem::create_directories(folder_.path("in"));
    save_safetensors(folder_.path("in/a.safetensors"), first, {{"format", "pt"}});
    save_safetensors(folder_.path("in/b.safetensors"), second, {{"format", "pt"}});
    write_index(index);
  }
  void write_index(const nlohmann::json& index) {
    index_ = index;
    folder_.write("in/model.safetensors.index.json", index.dump());
  }
  FinishedProcess merge(std::vector<std::string> words) {
    words.insert(words.begin(), "merge-weights");
    return tessera_command(words);
  }
  void expect_refused(const std::string& part, const std::vector<std::string>& words = {}) {
    std::vector<std::string> all = {folder_.path("in"), folder_.path("refused.safetensors")};
    if (!words.empty()) all = words;
    const FinishedProcess process = merge(all);
    EXPECT_EQ(process.code(), 1) << process;
    EXPECT_TRUE(process.complained(part)) << part << "\n" << process;
    EXPECT_FALSE(std::filesystem::exists(folder_.path("refused.safetensors")));
  }
  void expect_tensors(const std::map<std::string, Tensor>& got) {
    ASSERT_EQ(got.size(), tensors_.size());
    for (const auto& [name, tensor] : tensors_) {
      ASSERT_EQ(got.at(name).dtype(), tensor.dtype());
      ASSERT_EQ(got.at(name).shape(), tensor.shape());
      EXPECT_EQ(got.at(name).to_vector<float>(), tensor.to_vector<float>()) << name;
    }
  }

  TestFolder folder_;
  std::map<std::string, Tensor> tensors_;
  nlohmann::json index_;
};

TEST_F(MergeWeights, ShardsBecomeOneFile) {
  const FinishedProcess merged = merge({folder_.path("in"), folder_.path("out.safetensors")});
  EXPECT_EQ(merged.code(), 0) << merged;
  expect_tensors(load_safetensors(folder_.path("out.safetensors")));
  EXPECT_EQ(SafeTensorsFile(folder_.path("out.safetensors")).metadata().at("format"), "pt");
  EXPECT_TRUE(std::filesystem::exists(folder_.path("in/a.safetensors")));
  // Into a folder, which is made, by the usual name; not over what is there.
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("to")}).code(), 0);
  EXPECT_TRUE(std::filesystem::exists(folder_.path("to/model.safetensors")));
  const FinishedProcess again = merge({folder_.path("in"), folder_.path("to")});
  EXPECT_TRUE(again.code() == 1 && again.complained("--overwrite")) << again;
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("to"), "--overwrite"}).code(), 0);
}

TEST_F(MergeWeights, OrFewerShardsWithTheirIndex) {
  const FinishedProcess merged =
      merge({folder_.path("in"), folder_.path("out"), "--max-shard-size", "150"});
  EXPECT_EQ(merged.code(), 0) << merged;
  const auto index = nlohmann::json::parse(folder_.read("out/model.safetensors.index.json"));
  std::map<std::string, Tensor> all;
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    files.insert(file.get<std::string>());
    all[name] = SafeTensorsFile(folder_.path("out/" + file.get<std::string>())).load(name);
  }
  expect_tensors(all);
  EXPECT_GT(files.size(), 3u);
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.numel() * size_of(tensor.dtype());
  EXPECT_EQ(index["metadata"]["total_size"], bytes);
  // Its own result can be merged again.
  EXPECT_EQ(merge({folder_.path("out"), folder_.path("one.safetensors")}).code(), 0);
  expect_tensors(load_safetensors(folder_.path("one.safetensors")));
}

TEST_F(MergeWeights, TheSourceGoesWhereThatIsAsked) {
  folder_.write("in/notes.txt", "keep me");
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("x.safetensors"), "--remove-source"}).code(),
            0);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("in/a.safetensors")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("in/model.safetensors.index.json")));
  EXPECT_EQ(folder_.read("in/notes.txt"), "keep me");
  expect_tensors(load_safetensors(folder_.path("x.safetensors")));
}

TEST_F(MergeWeights, WhatIsIncompleteOrContradictoryIsRefused) {
  const nlohmann::json whole = index_;
  nlohmann::json index = whole;
  index["weight_map"]["missing"] = "a.safetensors";
  write_index(index);
  expect_refused("lacks \"missing\"");
  index = whole;
  index["weight_map"].erase("half");
  write_index(index);
  expect_refused("\"half\", which the index does not know");
  index = whole;
  index["weight_map"]["half"] = "../b.safetensors";
  write_index(index);
  expect_refused("not the name of a file beside it");
  index = whole;
  index["weight_map"]["half"] = "c.safetensors";
  write_index(index);
  expect_refused("c.safetensors, which is not there");
  folder_.write("in/model.safetensors.index.json", "{}");
  expect_refused("weight_map");
  write_index(whole);
  std::filesystem::resize_file(folder_.path("in/b.safetensors"), 100);
  expect_refused("b.safetensors");
}

TEST_F(MergeWeights, ACheckpointGivesTheWeightsOfItsModels) {
  tensors_["large"] = randn({3000, 1000});  // of several chunks
  std::vector<distributed::SaveItem> items;
  for (const auto& [name, tensor] : tensors_) {
    items.push_back(distributed::SaveItem::whole("model.1." + name, tensor));
    items.push_back(distributed::SaveItem::whole("optimizer.0." + name, tensor));
  }
  distributed::CheckpointSaver saver;
  saver.save(folder_.path("saved"), items, {.metadata = {{"tied:model.1.head", "model.1.half"}}});
  const std::string out = folder_.path("of_checkpoint.safetensors");
  const FinishedProcess merged = merge({folder_.path("saved"), out, "--model", "1"});
  EXPECT_EQ(merged.code(), 0) << merged;
  expect_tensors(load_safetensors(out));
  EXPECT_EQ(SafeTensorsFile(out).metadata().at("head"), "half");  // tied: the other name stays
  expect_refused("no model with the number 0",
                 {folder_.path("saved"), folder_.path("refused.safetensors")});
  expect_refused("whole training", {folder_.path("saved"), folder_.path("refused.safetensors"),
                                    "--model", "1", "--remove-source"});
  // One byte of an element is enough.
  std::fstream chunk(folder_.path("saved/rank-0-0.bin"), std::ios::in | std::ios::out);
  chunk.seekp(4096 * 3 + 1);
  chunk.put('!');
  chunk.close();
  expect_refused("rank-0-0.bin",
                 {folder_.path("saved"), folder_.path("refused.safetensors"), "--model", "1"});
}

TEST_F(MergeWeights, MistakesOnTheCommandLineAreTold) {
  expect_refused("there is no", {folder_.path("nowhere"), folder_.path("refused.safetensors")});
  std::filesystem::create_directories(folder_.path("empty"));
  expect_refused("has 0 files", {folder_.path("empty"), folder_.path("refused.safetensors")});
  folder_.write("out.bin", "a file");
  expect_refused("*.safetensors", {folder_.path("in"), folder_.path("out.bin")});
  expect_refused("byte size",
                 {folder_.path("in"), folder_.path("out"), "--max-shard-size", "many"});
  expect_refused("OUT has to be a folder",
                 {folder_.path("in"), folder_.path("o.safetensors"), "--max-shard-size", "1GB"});
  expect_refused("among those that are read",
                 {folder_.path("in"), folder_.path("in"), "--max-shard-size", "1GB"});
  expect_refused("one of the shards",
                 {folder_.path("in"), folder_.path("in/a.safetensors"), "--overwrite"});
}

// ---- test

TEST(TestCommand, PassesHere) {
  for (const char* ranks : {"1", "2"}) {
    if (std::string(ranks) != "1") {
      SKIP_WITHOUT_MPI();
    }
    const FinishedProcess tested = tessera_command({"test", "-n", ranks});
    EXPECT_EQ(tested.code(), 0) << tested;
    EXPECT_TRUE(tested.printed("all passed")) << tested;
    EXPECT_FALSE(tested.printed("FAIL")) << tested;
  }
}

TEST(TestCommand, FailsWhereTheRanksCannotStart) {
  const FinishedProcess tested = tessera_command({"test", "-n", "2"}, {{"PATH", "/nonexistent"}});
  EXPECT_EQ(tested.code(), 1) << tested;
  EXPECT_TRUE(tested.printed("FAILED")) << tested;
}

TEST(TesseraCommand, WithoutASubcommandOrWithAnUnknownOneItSaysWhatThereIs) {
  EXPECT_NE(tessera_command({}).code(), 0);
  EXPECT_EQ(tessera_command({"--help"}).code(), 0);
  EXPECT_NE(tessera_command({"confgi"}).code(), 0);
}

}  // namespace
}  // namespace tessera::test_config_commands
