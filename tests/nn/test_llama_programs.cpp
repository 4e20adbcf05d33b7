// examples/llama train and generate as a user runs them: from nothing, on, with adapters.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "finished_process.h"

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
