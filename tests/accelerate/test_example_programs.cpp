// examples/gpt2 train and generate as a user runs them: options, logs, folders, exit codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <tessera/core/gpu/backend.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/data/text/text.h>

#include "finished_process.h"

namespace tessera::test_example_programs {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

constexpr int kSteps = 8, kHalf = 4;

class Programs : public testing::Test {
 protected:
  Programs() {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += std::to_string(i % 13) + " and " + std::to_string(i % 17) + " are " +
              std::to_string(i % 13 + i % 17) + ".\n";
    }
    folder_.write("text", text);
  }

  std::string path(const std::string& name) const { return folder_.path(name); }

  // Command-line words of a small training; what `more` gives stands instead of what is here.
  Words small(const Words& more) const {
    const std::vector<std::pair<std::string, std::string>> defaults = {
        {"--data", path("text")}, {"--tokenizer", "bytes"},
        {"--layers", "1"},        {"--width", "32"},
        {"--heads", "2"},         {"--context", "16"},
        {"--batch-size", "2"},    {"--steps", std::to_string(kSteps)},
        {"--warmup", "1"},        {"--eval-every", "4"},
        {"--threads", "1"}};
    Words words = {TESSERA_GPT2_TRAIN};
    for (const auto& [name, value] : defaults) {
      if (std::ranges::find(more, name) == more.end()) words.insert(words.end(), {name, value});
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  static Words generate(const std::string& model, const Words& more = {}) {
    Words words = {
        TESSERA_GPT2_GENERATE, "--model", model,    "--prompt", "1 and", "--tokens", "24",
        "--threads",           "1",       "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  std::vector<Json> rows(const std::string& log) const {
    std::vector<Json> result;
    std::ifstream file(path(log));
    for (std::string line; std::getline(file, line);) result.push_back(Json::parse(line));
    return result;
  }
  // What a run must repeat to the last digit; times differ.
  static Words digits(const std::vector<Json>& rows) {
    Words result;
    for (const Json& row : rows) {
      std::string text;
      for (const char* field : {"step", "loss", "val_loss", "grad_norm", "lr"}) {
        text += row.at(field).dump() + " ";
      }
      result.push_back(text);
    }
    return result;
  }
  std::vector<std::string> entries(const std::string& name) const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(path(name))) {
      result.push_back(entry.path().filename().string());
    }
    std::ranges::sort(result);
    return result;
  }
  // The command with files limited to `kilobytes`: writes fail as on a full disk.
  static Words limited(int kilobytes, const Words& command) {
    Words words = {"/bin/sh", "-c",
                   "trap '' XFSZ; ulimit -f " + std::to_string(2 * kilobytes) + "; exec \"$@\"",
                   "sh"};
    words.insert(words.end(), command.begin(), command.end());
    return words;
  }

  void expect_refusal(const FinishedProcess& process, const std::string& message) {
    EXPECT_NE(process.code(), 0) << process;
    EXPECT_EQ(process.status.signal, 0) << process;
    EXPECT_TRUE(process.complained(message)) << "expected '" << message << "'\n" << process;
  }

  TestFolder folder_;
};

TEST_F(Programs, ARowOfTheLogTellsEverythingOfAStep) {
  const auto process = run_process(small({"--save", path("model"), "--log", path("log.jsonl")}));
  ASSERT_EQ(process.code(), 0) << process;
  const std::vector<Json> log = rows("log.jsonl");
  ASSERT_EQ(log.size(), kSteps);
  for (int i = 0; i < kSteps; ++i) {
    const Json& row = log[static_cast<size_t>(i)];
    EXPECT_EQ(row.size(), 9U) << row;
    EXPECT_EQ(row.at("step"), i + 1);
    EXPECT_GT(row.at("loss").get<double>(), 0);
    EXPECT_EQ(row.at("val_loss").is_number(), (i + 1) % 4 == 0) << row;
    for (const char* field : {"grad_norm", "lr", "ms", "tokens_per_s"}) {
      EXPECT_GT(row.at(field).get<double>(), 0) << field << " of " << row;
    }
    // The parameters alone: 256 x 32 of the embedding, and gradients as large.
    EXPECT_GT(row.at("peak_bytes").get<int64_t>(), 2 * 4 * 256 * 32);
    EXPECT_EQ(row.at("peak_bytes_by_rank"), Json({row.at("peak_bytes")}));
  }
  EXPECT_LT(log.back().at("val_loss"), log[kHalf - 1].at("val_loss"));
  EXPECT_EQ(entries("model"), (Words{"config.json", "model.safetensors", "training"}));
}

TEST_F(Programs, AResumedTrainingWithoutSaveWritesNothingBack) {
  ASSERT_EQ(run_process(small({"--save", path("model"), "--stop-at", "2"})).code(), 0);
  const Words before = entries("model");
  const std::string model = folder_.read("model/model.safetensors");
  const auto process = run_process({TESSERA_GPT2_TRAIN, "--resume", path("model")});
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_EQ(entries("model"), before);
  EXPECT_TRUE(folder_.read("model/model.safetensors") == model);
}

TEST_F(Programs, AResumedTrainingRepeatsTheDigitsOfAnUninterruptedOne) {
  ASSERT_EQ(run_process(small({"--log", path("whole.jsonl"), "--save", path("whole")})).code(), 0);
  ASSERT_EQ(run_process(small({"--log", path("log.jsonl"), "--save", path("model"), "--stop-at",
                               std::to_string(kHalf)}))
                .code(),
            0);
  EXPECT_EQ(rows("log.jsonl").size(), kHalf);
  const auto process = run_process({TESSERA_GPT2_TRAIN, "--resume", path("model"), "--save",
                                    path("model"), "--log", path("log.jsonl")});
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_EQ(digits(rows("log.jsonl")), digits(rows("whole.jsonl")));
  EXPECT_TRUE(folder_.read("model/model.safetensors") == folder_.read("whole/model.safetensors"));
  EXPECT_EQ(entries("model"), entries("whole"));
}

TEST_F(Programs, ASignalSavesWhatATrainingThenGoesOnFrom) {
  for (const int signal : {SIGINT, SIGTERM}) {
    SCOPED_TRACE(signal);
    fs::remove_all(path("model"));
    fs::remove(path("log.jsonl"));
    bool sent = false;
    const auto stopped = run_process(
        small({"--save", path("model"), "--log", path("log.jsonl"), "--steps", "1000000",
               "--eval-every", "0", "--dropout", "0.1"}),
        {}, [&](pid_t pid, const std::string&) {
          if (sent || !fs::exists(path("log.jsonl")) || fs::file_size(path("log.jsonl")) == 0)
            return;
          sent = ::kill(pid, signal) == 0;
        });
    ASSERT_EQ(stopped.code(), 0) << stopped;
    ASSERT_TRUE(sent);
    const int64_t step = rows("log.jsonl").back().at("step");
    ASSERT_LT(step, 1000000);
    const std::string end = std::to_string(step + 2);
    const auto resumed = run_process({TESSERA_GPT2_TRAIN, "--resume", path("model"), "--save",
                                      path("model"), "--stop-at", end, "--log", path("log.jsonl")});
    ASSERT_EQ(resumed.code(), 0) << resumed;
    const auto whole =
        run_process(small({"--save", path("whole"), "--steps", "1000000", "--stop-at", end,
                           "--eval-every", "0", "--dropout", "0.1"}));
    ASSERT_EQ(whole.code(), 0) << whole;
    EXPECT_EQ(rows("log.jsonl").size(), static_cast<size_t>(step + 2));
    for (const char* file : {"/model.safetensors", "/training/rank-0-0.bin"}) {
      EXPECT_TRUE(folder_.read("model" + std::string(file)) ==
                  folder_.read("whole" + std::string(file)))
          << file;
    }
  }
}

TEST_F(Programs, ASavedModelIsGeneratedFromAndBegunWith) {
  ASSERT_EQ(run_process(small({"--save", path("model")})).code(), 0);

  const auto greedy = run_process(generate(path("model"), {"--temperature", "0"}));
  ASSERT_EQ(greedy.code(), 0) << greedy;
  EXPECT_TRUE(greedy.output.starts_with("1 and")) << greedy;
  EXPECT_EQ(run_process(generate(path("model"), {"--temperature", "0", "--seed", "7"})).output,
            greedy.output);
  const auto drawn = [&](const char* seed) {
    return run_process(generate(path("model"), {"--temperature", "2", "--seed", seed})).output;
  };
  EXPECT_EQ(drawn("1"), drawn("1"));
  EXPECT_NE(drawn("1"), drawn("2"));
  EXPECT_EQ(run_process(generate(path("model"), {"--top-k", "1", "--seed", "3"})).output,
            greedy.output);

  // Without warm-up, steps or decay the first loss is that of the given weights.
  const auto begun =
      run_process({TESSERA_GPT2_TRAIN, "--data", path("text"), "--init-from", path("model"),
                   "--steps", "1", "--log", path("begun.jsonl"), "--threads", "1"});
  ASSERT_EQ(begun.code(), 0) << begun;
  EXPECT_LT(rows("begun.jsonl").at(0).at("loss").get<double>(), 5.4);  // log(256) is 5.55
}

TEST_F(Programs, ASavedModelBringsItsVocabularyAlong) {
  // GPT-2's bytes without merges: printable ones stand for themselves, the others follow 255.
  Json vocabulary = Json::object();
  for (int byte = 0, moved = 256; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    std::string token;
    data::append_utf8(static_cast<char32_t>(printable ? byte : moved++), token);
    vocabulary[token] = byte;
  }
  vocabulary["<|endoftext|>"] = 256;
  fs::create_directory(path("words"));
  folder_.write("words/encoder.json", vocabulary.dump());
  folder_.write("words/vocab.bpe", "#version: 0.2\n");
  const auto trained =
      run_process(small({"--tokenizer", "gpt2", "--tokenizer-files", path("words"), "--save",
                         path("model"), "--stop-at", std::to_string(kHalf)}));
  ASSERT_EQ(trained.code(), 0) << trained;
  EXPECT_EQ(folder_.read("model/vocab.json"), folder_.read("words/encoder.json"));
  EXPECT_EQ(folder_.read("model/merges.txt"), folder_.read("words/vocab.bpe"));

  fs::remove_all(path("words"));
  const auto made = run_process(generate(path("model")));
  ASSERT_EQ(made.code(), 0) << made;
  EXPECT_TRUE(made.output.starts_with("1 and")) << made;
  const auto resumed = run_process({TESSERA_GPT2_TRAIN, "--resume", path("model")});
  EXPECT_EQ(resumed.code(), 0) << resumed;
  const auto begun = run_process(
      small({"--init-from", path("model"), "--tokenizer", "gpt2", "--save", path("next")}));
  ASSERT_EQ(begun.code(), 0) << begun;
  EXPECT_EQ(run_process(generate(path("next"))).code(), 0);
}

TEST_F(Programs, AGpuThatIsNotThereIsRefusedWithTheRemedy) {
  const std::string missing = gpu::device_count() == 0 ? "cuda" : "cuda:99";
  const std::string reason = gpu::device_count() == 0 ? gpu::unavailable_reason() : "there is no";
  const auto trained = run_process(small({"--device", missing, "--save", path("model")}));
  expect_refusal(trained, reason);
  EXPECT_FALSE(fs::exists(path("model")));
  expect_refusal(run_process(small({"--device", "tpu"})), "device (code) is cpu, cuda or cuda:N");
  expect_refusal(run_process(small({"--graph"})), "give --device cuda");
  ASSERT_EQ(run_process(small({"--save", path("model"), "--steps", "1"})).code(), 0);
  expect_refusal(run_process(generate(path("model"), {"--device", missing})), reason);
}

#ifdef TESSERA_GPT2_TRAIN_EMULATED
TEST_F(Programs, ADeviceTrainsSavesResumesAndGeneratesAsTheCpuDoes) {
  folder_.write("text", folder_.read("text").substr(0, 700));
  const auto on = [&](const Words& words, const std::string& program, const std::string& device) {
    Words all = words;
    all[0] = program;
    all.insert(all.end(), {"--device", device});
    return run_process(all);
  };
  const Words half = small({"--save", path("cuda"), "--log", path("cuda.jsonl"), "--stop-at", "2",
                            "--steps", "4", "--accumulate", "2", "--eval-every", "0"});
  const auto begun = on(half, TESSERA_GPT2_TRAIN_EMULATED, "cuda");
  ASSERT_EQ(begun.code(), 0) << begun;
  const auto resumed = on({"", "--resume", path("cuda"), "--save", path("cuda"), "--log",
                           path("cuda.jsonl"), "--log-every", "2"},
                          TESSERA_GPT2_TRAIN_EMULATED, "cuda:1");
  ASSERT_EQ(resumed.code(), 0) << resumed;
  const Words whole = small({"--save", path("cpu"), "--log", path("cpu.jsonl"), "--steps", "4",
                             "--accumulate", "2", "--eval-every", "0"});
  ASSERT_EQ(run_process(whole).code(), 0);

  const std::vector<Json> got = rows("cuda.jsonl"), expected = rows("cpu.jsonl");
  ASSERT_EQ(got.size(), 3U);  // the resumed run logs every second step
  for (const Json& row : got) {
    const Json& same = expected.at(row.at("step").get<size_t>() - 1);
    for (const char* field : {"loss", "grad_norm"}) {
      const double value = same.at(field);
      EXPECT_NEAR(row.at(field).get<double>(), value, 1e-5 * value) << row;
    }
  }
  const auto tensors = load_safetensors(path("cuda/model.safetensors"));
  EXPECT_EQ(tensors.size(), load_safetensors(path("cpu/model.safetensors")).size());

  const Words greedy = {"--temperature", "0"};
  const auto here = run_process(generate(path("cuda"), greedy));
  const auto there = on(generate(path("cuda"), greedy), TESSERA_GPT2_GENERATE_EMULATED, "cuda");
  ASSERT_EQ(there.code(), 0) << there;
  EXPECT_EQ(there.output, here.output);
}

TEST_F(Programs, GraphsTrainToTheSameBitsWithEitherOptimizer) {
  for (const char* optimizer : {"adamw", "muon"}) {
    SCOPED_TRACE(optimizer);
    for (const bool graph : {false, true}) {
      Words words = small({"--save", path(graph ? "graph" : "step"), "--optimizer", optimizer,
                           "--steps", "6", "--width", "8", "--context", "4", "--dropout", "0.1",
                           "--eval-every", "0", "--device", "cuda", "--deterministic"});
      words[0] = TESSERA_GPT2_TRAIN_EMULATED;
      if (graph) words.emplace_back("--graph");
      folder_.write("text", folder_.read("text").substr(0, 300));
      const auto process = run_process(words);
      ASSERT_EQ(process.code(), 0) << process;
    }
    for (const char* file : {"/model.safetensors", "/training/rank-0-0.bin"}) {
      EXPECT_TRUE(folder_.read("graph" + std::string(file)) ==
                  folder_.read("step" + std::string(file)))
          << file;
    }
  }
}

// Before the ranks meet: one of them has no GPU, or all are to have the same.
TEST_F(Programs, RanksWithoutAGpuEachAreRefused) {
  const auto second_of_two = [&](const std::string& device) {
    Words words = {"env",
                   "TESSERA_EMULATED_DEVICES=1",
                   "OMPI_COMM_WORLD_RANK=1",
                   "OMPI_COMM_WORLD_SIZE=2",
                   "OMPI_COMM_WORLD_LOCAL_RANK=1",
                   "OMPI_COMM_WORLD_LOCAL_SIZE=2"};
    Words train = small({"--device", device});
    train[0] = TESSERA_GPT2_TRAIN_EMULATED;
    words.insert(words.end(), train.begin(), train.end());
    return run_process(words);
  };
  expect_refusal(second_of_two("cuda"),
                 "rank 1 is number 1 of its node, which has 1 GPU; start fewer ranks there");
  expect_refusal(second_of_two("cuda:0"), "device (code) names cuda:0 and this node has 2 ranks");
}
#endif

TEST_F(Programs, WhatCannotBeReadIsNamedBeforeAnythingIsWritten) {
  const Words save = {"--save", path("model")};
  const auto refused = [&](Words more, const std::string& message) {
    more.insert(more.end(), save.begin(), save.end());
    expect_refusal(run_process(small(more)), message);
    EXPECT_FALSE(fs::exists(path("model"))) << message;
  };
  refused({"--data", path("missing")}, "cannot read the text '" + path("missing") + "'");
  refused({"--data", path("")}, "cannot read the text");
  refused({"--data", "/proc/self/mem"}, "cannot read the text");  // opens; reading fails
  folder_.write("short", "too short");
  refused({"--data", path("short")}, "windows of 16 need more");
  refused({"--tokenizer", "words"}, "--tokenizer");
  refused({"--tokenizer", "gpt2"}, "gpt2 needs its vocabulary");
  refused({"--init-from", path("missing")}, path("missing"));
  refused({"--heads", "3"}, "width must be a multiple of heads");
  refused({"--layers", "-1"}, "--layers");
  refused({"--no-such-option"}, "--no-such-option");
  expect_refusal(run_process(generate(path("missing"))), path("missing"));
}

TEST_F(Programs, AConfigThatAsksForMoreThanTheWeightsHoldIsRefused) {
  ASSERT_EQ(run_process(small({"--save", path("model"), "--steps", "1"})).code(), 0);
  const std::string config = folder_.read("model/config.json");
  const int64_t billion = 1000000000;
  for (const auto& [field, value] :
       {std::pair("n_layer", billion), std::pair("n_embd", billion * billion),
        std::pair("n_embd", billion), std::pair("vocab_size", billion),
        std::pair("n_positions", billion), std::pair("n_inner", -billion)}) {
    Json changed = Json::parse(config);
    changed[field] = value;
    folder_.write("model/config.json", changed.dump());
    expect_refusal(run_process(generate(path("model"))), path("model/config.json"));
  }
}

TEST_F(Programs, ABadFolderToResumeFromIsNamed) {
  const auto resume = [&] { return run_process({TESSERA_GPT2_TRAIN, "--resume", path("model")}); };
  expect_refusal(resume(), path("model"));

  ASSERT_EQ(run_process(small({"--save", path("model"), "--steps", "1"})).code(), 0);
  expect_refusal(
      run_process({TESSERA_GPT2_TRAIN, "--resume", path("model"), "--init-from", path("model")}),
      "exclude each other");
  const std::string options = folder_.read("model/training/options.json");
  folder_.write("model/training/options.json", options + "\n");
  expect_refusal(resume(), "options.json");  // not as it was saved
  folder_.write("model/training/options.json", "{\"data\": 1}");
  expect_refusal(resume(), "the field 'data' does not fit");
  folder_.write("model/training/options.json", "{");
  expect_refusal(resume(), "is not JSON");
  folder_.write("model/training/options.json", options);
  EXPECT_EQ(resume().code(), 0);
  const std::string state = path("model/training/rank-0-0.bin");
  fs::resize_file(state, fs::file_size(state) - 8);
  expect_refusal(resume(), state);
  fs::remove(state);
  expect_refusal(resume(), state);

  // A folder of another program, or of an earlier version of this one.
  fs::remove_all(path("model/training"));
  expect_refusal(resume(), "--resume needs a folder that train saved");
  folder_.write("model/training-1.json", "{}");
  expect_refusal(resume(), "earlier versions");
  expect_refusal(resume(), "--init-from");
}

TEST_F(Programs, AFolderThatCannotBeWrittenIsRefusedBeforeTheFirstStep) {
  const auto refused = [&](const std::string& folder) {
    const auto process = run_process(small({"--save", folder, "--log", path("log.jsonl")}));
    expect_refusal(process, folder);
    EXPECT_FALSE(fs::exists(path("log.jsonl"))) << process;
  };
  refused(path("text"));        // a file stands there
  refused(path("text/model"));  // and is no folder
  refused("/proc/tessera");
  expect_refusal(run_process(small({"--log", path("missing/log.jsonl")})), path("missing/log"));
  expect_refusal(run_process(small({"--log", "/dev/full"})), "cannot write the log '/dev/full'");
}

TEST_F(Programs, ASaveThatIsCutOffBeforeItsModelIsGoneOnFrom) {
  ASSERT_EQ(run_process(small({"--save", path("whole")})).code(), 0);
  ASSERT_EQ(run_process(small({"--save", path("model"), "--stop-at", "4"})).code(), 0);
  fs::create_directories(path("next/config.json/in the way"));
  expect_refusal(run_process({TESSERA_GPT2_TRAIN, "--resume", path("model"), "--save", path("next"),
                              "--stop-at", "6"}),
                 path("next/config.json"));
  // As it would be where a model had been saved there with step 4.
  fs::remove_all(path("next/config.json"));
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::copy(path("model") + "/" + file, path("next"));
  }
  const auto resumed = run_process({TESSERA_GPT2_TRAIN, "--resume", path("next"), "--save",
                                    path("next"), "--log", path("log.jsonl")});
  ASSERT_EQ(resumed.code(), 0) << resumed;
  EXPECT_EQ(rows("log.jsonl").at(0).at("step"), 7);
  EXPECT_TRUE(folder_.read("next/model.safetensors") == folder_.read("whole/model.safetensors"));
}

TEST_F(Programs, AFullDiskLeavesTheSaveBeforeItWhole) {
  ASSERT_EQ(run_process(small({"--log", path("whole.jsonl")})).code(), 0);
  ASSERT_EQ(run_process(small({"--save", path("model"), "--log", path("log.jsonl"), "--stop-at",
                               std::to_string(kHalf)}))
                .code(),
            0);
  const Words before = entries("model");
  const std::string model = folder_.read("model/model.safetensors");
  const auto model_kilobytes = static_cast<int>(model.size() / 1024);
  const Words resume = {TESSERA_GPT2_TRAIN, "--resume", path("model"),    "--save",
                        path("model"),      "--log",    path("log.jsonl")};

  // Room for the model but not for the optimizer's state, which is twice as large; then for
  // neither.
  for (const int kilobytes : {model_kilobytes * 3 / 2, model_kilobytes / 2}) {
    expect_refusal(run_process(limited(kilobytes, resume)), "File too large");
    EXPECT_TRUE(folder_.read("model/model.safetensors") == model);
    for (const std::string& name : before) EXPECT_TRUE(fs::exists(path("model/" + name))) << name;
    for (const std::string& name : entries("model")) {
      EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
    }
  }
  const auto process = run_process(resume);
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_EQ(digits(rows("log.jsonl")), digits(rows("whole.jsonl")));
}

}  // namespace
}  // namespace tessera::test_example_programs
