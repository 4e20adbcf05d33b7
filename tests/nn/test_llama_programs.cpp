// examples/llama train, generate and finetune as a user runs them: from nothing, on, with adapters,
// and beside PEFT.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::test_llama_programs {
namespace {

using Words = std::vector<std::string>;

class LlamaPrograms : public testing::Test {
 protected:
  LlamaPrograms() {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += std::to_string(i % 13) + " and " + std::to_string(i % 17) + " are " +
              std::to_string(i % 13 + i % 17) + ".\n";
    }
    folder_.write("text", text);
    std::ranges::replace(text, '.', '!');
    folder_.write("other", text);
  }
  std::string path(const std::string& name) const { return folder_.path(name); }
  // The program with `more`, and with those of the defaults that are not among it.
  static Words with_defaults(const Words& defaults, const Words& more) {
    Words words = {defaults[0]};
    for (size_t i = 1; i < defaults.size(); i += 2) {
      if (std::ranges::find(more, defaults[i]) != more.end()) continue;
      words.insert(words.end(), {defaults[i], defaults[i + 1]});
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  FinishedProcess train(const Words& more) const {
    return run_process(with_defaults({TESSERA_LLAMA_TRAIN, "--data", path("text"), "--context",
                                      "32", "--threads", "1", "--batch-size", "4"},
                                     more));
  }
  FinishedProcess train_new(const Words& more) const {
    Words words = {"--layers", "2", "--width",    "32", "--inner", "64",
                   "--heads",  "2", "--kv-heads", "1",  "--lr",    "5e-3"};
    words.insert(words.end(), more.begin(), more.end());
    return train(words);
  }
  std::string text_of(const Words& more) const {
    const FinishedProcess process =
        run_process(with_defaults({TESSERA_LLAMA_GENERATE, "--model", path("model"), "--tokens",
                                   "24", "--threads", "1", "--temperature", "0"},
                                  more));
    EXPECT_EQ(process.code(), 0) << process;
    return process.output;
  }
  // What is said after "after: validation loss ", or before.
  static double loss(const FinishedProcess& process, const std::string& when) {
    const std::string words = when + ": validation loss ";
    const size_t at = process.output.find(words);
    EXPECT_NE(at, std::string::npos) << process;
    return at == std::string::npos ? 0 : std::stod(process.output.substr(at + words.size()));
  }

  // The least one.
  static double evaluation_loss(const FinishedProcess& process) {
    const std::string words = ": evaluation loss ";
    double least = 1e9;
    for (size_t at = 0; (at = process.output.find(words, at)) != std::string::npos;) {
      at += words.size();
      least = std::min(least, std::stod(process.output.substr(at)));
    }
    EXPECT_LT(least, 1e9) << process;
    return least;
  }

  TestFolder folder_;
};

TEST_F(LlamaPrograms, ATrainedModelWritesSentencesOfItsText) {
  const auto trained = train_new({"--steps", "120", "--save", path("model")});
  ASSERT_EQ(trained.code(), 0) << trained;
  EXPECT_GT(loss(trained, "before"), 5.4);  // log(256) is 5.55
  EXPECT_LT(loss(trained, "after"), 1.2);
  const std::string text = text_of({"--prompt", "1 and"});
  EXPECT_TRUE(text.starts_with("1 and ")) << text;
  EXPECT_NE(text.find(" are "), std::string::npos) << text;

  // Adapters learn another ending; the model's folder stays as it was.
  const std::string before = folder_.read("model/model.safetensors");
  const Words lora = {"--data", path("other"), "--model", path("model"), "--lora",
                      "4",      "--steps",     "80",      "--lr",        "1e-2"};
  const auto with = [&](Words more) {
    more.insert(more.end(), lora.begin(), lora.end());
    return train(more);
  };
  const auto adapted = with({"--save", path("adapter")});
  ASSERT_EQ(adapted.code(), 0) << adapted;
  EXPECT_GT(loss(adapted, "before"), 1.5 * loss(adapted, "after"));
  EXPECT_TRUE(std::filesystem::exists(path("adapter/adapter_config.json")));
  EXPECT_EQ(folder_.read("model/model.safetensors"), before);
  EXPECT_EQ(text.find('!'), std::string::npos) << text;
  const std::string other = text_of({"--prompt", "1 and", "--adapter", path("adapter")});
  EXPECT_NE(other.find('!'), std::string::npos) << other;

  // Merged they are a model like any other.
  ASSERT_EQ(with({"--merge", "--save", path("merged")}).code(), 0);
  EXPECT_EQ(text_of({"--prompt", "1 and", "--model", path("merged")}), other);
  EXPECT_EQ(text_of({"--ids", "49 32 97", "--tokens", "2"}).substr(0, 8), "49 32 97");
}

// tests/golden/finetune: peft and transformers on the same weights and batches (bench/compare).
class FineTune : public LlamaPrograms {
 protected:
  FinishedProcess finetune(const Words& more) const {
    const std::string folder = tests::golden_path("finetune");
    return run_process(with_defaults({TESSERA_LLAMA_FINETUNE,
                                      "--model",
                                      folder,
                                      "--data",
                                      folder + "/data.jsonl",
                                      "--eval",
                                      folder + "/data.jsonl",
                                      "--output",
                                      path("out"),
                                      "--batch-size",
                                      "2",
                                      "--lr",
                                      "5e-3",
                                      "--schedule",
                                      "constant",
                                      "--max-length",
                                      "40",
                                      "--threads",
                                      "1",
                                      "--log",
                                      path("log")},
                                     more));
  }
  std::vector<double> logged() const {
    std::istringstream text(folder_.read("log"));
    std::vector<double> losses;
    for (double loss; text >> loss;) losses.push_back(loss);
    return losses;
  }
  void expect_losses(const char* kind) const {
    const auto expected =
        tests::golden_json("finetune/losses.json")[kind].get<std::vector<double>>();
    const std::vector<double> losses = logged();
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]) << "step " << i;
    }
  }
};

TEST_F(FineTune, FiftyStepsHaveTheLossesOfPeftAndTransformers) {
  const std::string adapter = tests::golden_path("finetune/adapter");
  const auto lora = finetune({"--adapter", adapter, "--epochs", "5", "--in-order", "--merge"});
  ASSERT_EQ(lora.code(), 0) << lora;
  expect_losses("lora");
  EXPECT_TRUE(std::filesystem::exists(path("out/adapter/adapter_model.safetensors"))) << lora;
  // The merged folder is a model with a tokenizer: its loss is the adapted one's.
  const double after = evaluation_loss(lora);
  const auto again = finetune({"--model", path("out/model"), "--lora", "2", "--epochs", "0.1",
                               "--lr", "0", "--output", path("again")});
  ASSERT_EQ(again.code(), 0) << again;
  EXPECT_NEAR(evaluation_loss(again), after, 1e-4);

  const auto full =
      finetune({"--lora", "0", "--epochs", "5", "--in-order", "--output", path("full")});
  ASSERT_EQ(full.code(), 0) << full;
  expect_losses("full");
  EXPECT_TRUE(std::filesystem::exists(path("full/model/model.safetensors")));
  EXPECT_TRUE(std::filesystem::exists(path("full/model/tokenizer.json")));
}

// PEFT adapts every linear layer but the output layer.
TEST_F(FineTune, AllLinearMeansWhatPeftMeans) {
  const auto adapted =
      tests::golden_json("finetune/losses.json")["adapted"].get<std::vector<std::string>>();
  const auto run = finetune({"--lora", "4", "--epochs", "0.1"});
  ASSERT_EQ(run.code(), 0) << run;
  EXPECT_TRUE(mentions(run.output, "adapters on " + std::to_string(adapted.size()) + " layers"))
      << run;
  EXPECT_EQ(std::ranges::count(adapted, "lm_head"), 0);
}

TEST_F(FineTune, AStoppedRunGoesOnWithTheSameLosses) {
  const auto with = [&](Words more) {
    more.insert(more.end(), {"--lora", "4", "--dropout", "0.1"});
    const auto run = finetune(more);
    EXPECT_EQ(run.code(), 0) << run;
    return logged();
  };
  const std::vector<double> whole = with({"--epochs", "1.2", "--output", path("whole")});
  ASSERT_EQ(whole.size(), 12u);
  // In the middle of an epoch.
  const std::vector<double> first = with({"--epochs", "0.7", "--output", path("part")});
  std::filesystem::remove(path("log"));
  const std::vector<double> rest = with({"--epochs", "1.2", "--output", path("part"), "--resume"});
  ASSERT_EQ(first.size(), 7u);
  ASSERT_EQ(rest.size(), 5u);
  EXPECT_EQ(first, std::vector<double>(whole.begin(), whole.begin() + 7));
  EXPECT_EQ(rest, std::vector<double>(whole.begin() + 7, whole.end()));
}

TEST_F(FineTune, TheBestCheckpointIsKeptInEitherDirection) {
  // A rate that spoils the model: the first evaluation is the best one, and the last the worst.
  const Words words = {"--lora", "4", "--lr", "0.5", "--epochs", "1", "--eval-every", "5"};
  const auto best = [&](const Words& more, const std::string& output) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    all.insert(all.end(), {"--output", path(output)});
    const auto run = finetune(all);
    EXPECT_EQ(run.code(), 0) << run;
    return run.output.substr(run.output.find("the best is"));
  };
  const std::string least = best({}, "least"),
                    most = best({"--greater-is-better", "--metric", "perplexity"}, "most");
  EXPECT_NE(least.substr(least.rfind('_')), most.substr(most.rfind('_'))) << least << most;
}

TEST_F(LlamaPrograms, WhatCannotBeUsedIsNamed) {
  const auto refused = [](const FinishedProcess& process, const std::string& why) {
    EXPECT_NE(process.code(), 0) << process;
    EXPECT_EQ(process.status.signal, 0) << process;
    EXPECT_TRUE(process.complained(why)) << why << "\n" << process;
  };
  refused(train({"--data", path("missing")}), path("missing"));
  refused(train({"--context", "100000"}), "need more");
  refused(train({"--kv-heads", "3"}), "num_key_value_heads");
  refused(train({"--model", path("missing")}), path("missing"));
  refused(run_process({TESSERA_LLAMA_GENERATE, "--model", path("missing"), "--prompt", "a"}),
          path("missing"));
}

}  // namespace
}  // namespace tessera::test_llama_programs
