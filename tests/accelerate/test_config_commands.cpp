// The tessera command as users run it: config, env, test. CLI-1 and CLI-4 are in the tests' names.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include <tessera/accelerate/settings/config.h>

#include "accelerate/tessera_command.h"
#include "message_of.h"

namespace tessera::test_config_commands {
namespace {

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
  // Ranks, how they share a model, mixed_precision twice, accumulation; then no section, of which
  // there are nine, but training's, where all answers are empty.
  std::string input = "2\\nzero2\\nfp17\\nbf16\\n4\\nyes\\n";
  for (int i = 0; i < 60; ++i) input += "\\n";
  const FinishedProcess asked = tessera_with_input(input, "config --output " + file);
  std::vector<size_t> places;
  for (const char* question :
       {"ranks (", "sharding (", "mixed_precision (", "gradient_accumulation_steps (",
        "settings of training?", "precision_policy (", "settings of launch?"}) {
    places.push_back(asked.output.find(question));
    EXPECT_NE(places.back(), std::string::npos) << question << '\n' << asked;
  }
  EXPECT_TRUE(std::is_sorted(places.begin(), places.end())) << asked;
  EXPECT_EQ(asked.code(), 0) << asked;
  EXPECT_TRUE(asked.printed("has to be one of no, bf16, fp16")) << asked;
  EXPECT_EQ(folder.read("asked.json"),
            "{\n  \"mixed_precision\": \"bf16\",\n  \"gradient_accumulation_steps\": 4,\n"
            "  \"sharding\": \"zero2\",\n  \"ranks\": 2\n}\n");
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
      tessera_command({"launch", "--config", json, kTesseraCommand, "env", "--changed"});
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
  refused(
      "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_eod_mask_loss: true\n"
      "num_processes: 2\n",
      "megatron_lm_config.megatron_lm_eod_mask_loss: true");
  refused("distributed_type: XLA\nnum_processes: 2\n", "distributed_type: XLA");
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

// A stage says how to shard in files as it does in a training; so does a DeepSpeed file.
TEST(ConfigCommand, FilesOfEveryStageAndWhatGoesWithItAreWritten) {
  TestFolder folder;
  const std::string json = folder.path("out.json");
  const std::string deepspeed =
      folder.write("ds.json", R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})");
  const auto written = [&](const std::vector<std::string>& words) {
    std::filesystem::remove(json);
    const FinishedProcess made = tessera_command(words);
    EXPECT_EQ(made.code(), 0) << made;
    const FinishedProcess shown = tessera_command({"env", "--config", json});
    EXPECT_EQ(shown.code(), 0) << shown;
    return made.code() == 0 ? folder.read("out.json") : "";
  };
  for (const std::string stage : {"1", "2", "3"}) {
    EXPECT_TRUE(mentions(written({"config", "default", "--zero_stage", stage, "--offload_optimizer",
                                  "true", "--output", json}),
                         "\"zero_stage\": " + stage));
    EXPECT_EQ(tessera_command({"config", "update", json}).code(), 0);
    EXPECT_TRUE(mentions(written({"config", "import",
                                  folder.write("in.yaml",
                                               "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
                                               "  zero_stage: " +
                                                   stage +
                                                   "\n  offload_optimizer_device: cpu\n"
                                                   "num_processes: 2\n"),
                                  "--output", json}),
                         "\"zero_stage\": " + stage));
  }
  written({"config", "default", "--deepspeed_config_file", deepspeed, "--offload_parameters",
           "true", "--output", json});
  // What a program may say is left to it.
  written({"config", "default", "--fsdp_wrap_modules", "Block", "--output", json});
  const FinishedProcess against =
      tessera_command({"config", "default", "--zero_stage", "2", "--sharding", "zero3"});
  EXPECT_TRUE(against.code() == 1 && against.complained("zero_stage=2")) << against;
  // Nothing is sharded, so that there are no units to speak of.
  for (const char* wrap : {"NO_WRAP", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"}) {
    EXPECT_EQ(written({"config", "import",
                       folder.write("in.yaml",
                                    "distributed_type: FSDP\nfsdp_config:\n"
                                    "  fsdp_sharding_strategy: NO_SHARD\n"
                                    "  fsdp_transformer_layer_cls_to_wrap: Block\n"
                                    "  fsdp_min_num_params: 20\n"
                                    "  fsdp_auto_wrap_policy: " +
                                        std::string(wrap) + "\nnum_processes: 2\n"),
                       "--output", json}),
              "{\n  \"ranks\": 2\n}\n");
  }
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
  EXPECT_EQ(done.code(), 2);
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

// ---- env

TEST(EnvCommand, ShowsTheMachineAndEverySettingWithItsOrigin) {
  const FinishedProcess shown =
      tessera_command({"env", "--all"}, {{"TESSERA_COLLECTIVE_TIMEOUT", "30"}});
  EXPECT_EQ(shown.code(), 0) << shown;
  for (const char* part :
       {"tessera:", "compiler:", "processor:", "extensions:", "kernels:", "cores:", "memory:",
        "oneDNN:", "MPI:", "NCCL:", "CUDA:", "fp8:", "launcher:"}) {
    EXPECT_TRUE(shown.printed(part)) << part;
  }
  for (const accelerate::Setting& setting : accelerate::schema()) {
    EXPECT_TRUE(shown.printed("\n" + std::string(setting.key) + " = ")) << setting.key;
  }
  EXPECT_TRUE(shown.printed("collective_timeout = 30  (TESSERA_COLLECTIVE_TIMEOUT)")) << shown;
  EXPECT_TRUE(shown.printed("emulated on the CPU, exactly")) << shown;
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
  const FinishedProcess planned = tessera_command({"env", "--changed"}, {{"TESSERA_CP_SIZE", "2"}});
  EXPECT_EQ(planned.code(), 1);
  EXPECT_TRUE(planned.printed("cp_size = 2  (TESSERA_CP_SIZE)")) << planned;
  EXPECT_TRUE(planned.printed("a training is refused")) << planned;
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

TEST(TestCommand, ChecksAModelWhoseLayersRanksShare) {
  SKIP_WITHOUT_MPI();
  for (const char* ranks : {"2", "4"}) {
    const FinishedProcess tested = tessera_command({"test", "-n", ranks, "--tp-size", "2"});
    EXPECT_EQ(tested.code(), 0) << tested;
    EXPECT_TRUE(tested.printed("layers on 2 ranks")) << tested;
    EXPECT_FALSE(tested.printed("FAIL")) << tested;
  }
  const FinishedProcess wrong = tessera_command({"test", "-n", "3", "--tp-size", "2"});
  EXPECT_EQ(wrong.code(), 2) << wrong;
}

TEST(TestCommand, FailsWhereTheRanksCannotStart) {
  const FinishedProcess tested = tessera_command({"test", "-n", "2"}, {{"PATH", "/nonexistent"}});
  EXPECT_EQ(tested.code(), 1) << tested;
  EXPECT_TRUE(tested.printed("FAILED")) << tested;
}

const char* const kSmallGpt2 = R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2,
  "n_positions": 16, "vocab_size": 50})";

// A value that cannot be is a mistake on the command line, whatever the option's kind.
TEST(TesseraCommand, ReturnsTwoForMistakesOnTheCommandLine) {
  TestFolder folder;
  const std::string json = folder.path("o.json");
  const std::string model = folder.write("c.json", kSmallGpt2);
  for (const std::vector<std::string>& flag :
       {std::vector<std::string>{"--mixed_precision", "fp17"},
        {"--cpu=maybe"},
        {"--seed", "many"},
        {"--gradient_accumulation_steps", "0"},
        {"--gradient_accumulation_steps", "1.5"},
        {"--sharding", "zero4"},
        {"--grace", "-1"},
        {"--transport", "pigeon"},
        {"--no_such_flag", "1"}}) {
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"launch"}, {"config", "default"}}) {
      std::vector<std::string> words = command;
      words.insert(words.end(), flag.begin(), flag.end());
      const std::vector<std::string> rest = command[0] == "launch"
                                                ? std::vector<std::string>{"true"}
                                                : std::vector<std::string>{"--output", json};
      words.insert(words.end(), rest.begin(), rest.end());
      const FinishedProcess told = tessera_command(words);
      EXPECT_EQ(told.code(), 2) << flag[0] << '\n' << told;
      EXPECT_TRUE(told.complained(flag[0].substr(2, 2))) << told;
      EXPECT_FALSE(std::filesystem::exists(json));
    }
  }
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"launch", "--use_fsdp", "--fsdp_sharding_strategy", "SOME",
                                 "true"},
        {"plan", "--model", model, "--mesh", "dp=8"},
        {"plan", "--model", model, "--mesh", "dp_shard=2", "--memory", "80"},
        {"plan", "--model", model, "--mesh", "dp_shard=2", "--flops", "1"},
        {"estimate-memory", model, "--dtypes", "f12"},
        {"estimate-memory", model, "--batch-size", "2"},
        {"env", "--all", "--changed"},
        {"test", "-n", "two"}}) {
    const FinishedProcess told = tessera_command(words);
    EXPECT_EQ(told.code(), 2) << words[0] << '\n' << told;
  }
}

// Standard output may be a file on a device without room.
TEST(TesseraCommand, FailsWhereItsOutputCannotBeWritten) {
  TestFolder folder;
  const std::string model = folder.write("c.json", kSmallGpt2);
  const std::string yaml = folder.write("a.yaml", "use_cpu: true\n");
  for (const std::string& words :
       {std::string("--help"), std::string("--version"), std::string("env"),
        std::string("config document"), "estimate-memory " + model,
        "config import " + yaml + " --output " + folder.path("o.json"),
        "plan --mesh dp_shard=2 --model " + model, std::string("launch --dry-run true")}) {
    const FinishedProcess full =
        run_process({"sh", "-c", kTesseraCommand + " " + words + " > /dev/full"},
                    {{"XDG_CONFIG_HOME", "/nonexistent"}});
    EXPECT_EQ(full.code(), 1) << words << '\n' << full;
    EXPECT_TRUE(full.complained("cannot write to the standard output")) << full;
  }
}

TEST(TesseraCommand, WithoutASubcommandOrWithAnUnknownOneItSaysWhatThereIs) {
  EXPECT_NE(tessera_command({}).code(), 0);
  EXPECT_EQ(tessera_command({"--help"}).code(), 0);
  EXPECT_NE(tessera_command({"confgi"}).code(), 0);
}

}  // namespace
}  // namespace tessera::test_config_commands
