// Examples for fine-tuning: which tokens are learned, what is too long, batches, and lines that are
// wrong.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/fine_tuning.h>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::data::test_fine_tuning {
namespace {

std::string template_of(const std::string& name) {
  std::ifstream file(tests::golden_path("chat_templates/" + name + ".jinja"));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Llama-2's settings: <s> before a text, spaces as a mark.
class FineTuning : public testing::Test {
 protected:
  FineTuning() {
    // The templates' tokens are added, as the models of these templates have them.
    auto file = tests::golden_json("tokenizers/llama2/tokenizer.json");
    auto id = PretrainedTokenizer::parse(file.dump(), "llama2").vocab_size();
    for (const char* const token :
         {"<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>", "<|user|>",
          "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>"}) {
      file["added_tokens"].push_back({{"id", id++},
                                      {"content", token},
                                      {"special", true},
                                      {"normalized", false},
                                      {"single_word", false},
                                      {"lstrip", false},
                                      {"rstrip", false}});
    }
    folder_.write("tokenizer.json", file.dump());
    configure(R"({"bos_token": "<s>", "eos_token": "</s>"})");
  }
  void configure(const std::string& config) {
    folder_.write("tokenizer_config.json", config);
    tokenizer_.emplace(PretrainedTokenizer::from_pretrained(folder_.path("")));
  }
  std::optional<FineTuningExample> example(const std::string& line,
                                           const FineTuningOptions& options = {}) const {
    return fine_tuning_example(line, "'file' line 7", *tokenizer_, options);
  }
  // What is learned, and what is not, as texts.
  std::string learned(const std::string& line, const FineTuningOptions& options = {},
                      bool wanted = true) const {
    const auto made = example(line, options);
    if (!made) return "nothing";
    std::string text;
    for (size_t i = 0; i < made->ids.size(); ++i) {
      if (made->learned[i] == wanted) text += tokenizer_->token_bytes(made->ids[i]);
    }
    return text;
  }
  static FineTuningOptions with_template(const std::string& name) {
    FineTuningOptions options;
    options.chat.chat_template = template_of(name);
    return options;
  }
  template <class E>
  void refused(const std::string& line, const std::string& part,
               const FineTuningOptions& options = {}) const {
    const std::string message = message_of<E>([&] { example(line, options); });
    EXPECT_TRUE(mentions(message, part)) << message;
  }

  TestFolder folder_;
  std::optional<PretrainedTokenizer> tokenizer_;
};

const std::string kPair =
    R"({"prompt": "What is the war?", "completion": " A peace of it.", "id": 3})";

TEST_F(FineTuning, OnlyCompletionsAreLearnedWithTheirEnd) {
  EXPECT_EQ(learned(kPair), " A peace of it.</s>");
  EXPECT_EQ(learned(kPair, {}, false), "<s> What is the war?");
  EXPECT_EQ(learned(kPair, {.append_eos = false}), " A peace of it.");
  EXPECT_EQ(learned(kPair, {.answers_only = false}), "<s> What is the war? A peace of it.</s>");
  // Ids of the whole text, as the tokenizer makes them.
  EXPECT_EQ(example(kPair)->ids,
            tokenizer_->encode_text("What is the war? A peace of it.</s>").ids);
  EXPECT_EQ(example(kPair)->padding, *tokenizer_->token_to_id("</s>"));
  configure(R"({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"})");
  EXPECT_EQ(example(kPair)->padding, *tokenizer_->token_to_id("<unk>"));
  configure("{}");
  refused<ConfigError>(kPair, "eos_token");
}

const std::string kChat = R"({"messages": [{"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]})";

// Llama-2's tokenizer puts a space behind each special token.
TEST_F(FineTuning, OfMessagesTheAnswersAreLearned) {
  EXPECT_EQ(learned(kChat, with_template("marked")),
            "Hello there<|im_end|> \nSo long<|im_end|> \n");
  // Without marks: behind the beginning of an answer, up to what follows it.
  EXPECT_EQ(learned(kChat, with_template("qwen2")), "Hello there<|im_end|> \nSo long<|im_end|> \n");
  EXPECT_EQ(learned(kChat, with_template("llama3")), "Hello there<|eot_id|>So long<|eot_id|>");
  EXPECT_EQ(learned(kChat, with_template("phi3")), "Hello there<|end|> \nSo long<|end|> \n</s>");
  EXPECT_EQ(learned(kChat, with_template("llama2")), " Hello there </s> So long </s>");
  FineTuningOptions all = with_template("llama3");
  all.answers_only = false;
  EXPECT_EQ(learned(kChat, all, false), "");
  // The template has all special tokens: none is added.
  EXPECT_EQ(
      example(kChat, with_template("llama3"))->ids,
      tokenizer_->encode(
          tokenizer_
              ->apply_chat_template_json(
                  R"([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "Bye"},
                    {"role": "assistant", "content": "So long"}])",
                  with_template("llama3").chat)
              .text));
}

TEST_F(FineTuning, APromptOfMessagesHasNoAnswers) {
  EXPECT_EQ(
      learned(
          R"({"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"},
                        {"role": "user", "content": "And?"}],
                        "completion": [{"role": "assistant", "content": "yes"}]})",
          with_template("qwen2")),
      "yes<|im_end|> \n");
}

TEST_F(FineTuning, ToolsOfALineReachTheTemplate) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}],
                               "tools": [{"z": 1, "a": 2}]})";
  EXPECT_NE(learned(line, with_template("qwen2"), false).find(R"({"z": 1, "a": 2})"),
            std::string::npos);
}

TEST_F(FineTuning, WhatATemplateChangesLaterIsRefused) {
  refused<FormatError>(R"({"messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": "<think>\nHm\n</think>\n\nb"}, {"role": "user", "content": "c"},
      {"role": "assistant", "content": "d"}]})",
                       "{% generation %}", with_template("qwen3"));
}

TEST_F(FineTuning, LongExamplesAreCutLeftOutOrRefused) {
  const auto whole = example(kPair)->ids;
  const auto size = static_cast<int64_t>(whole.size());
  const auto cut = [&](TooLong how, int64_t most) {
    return example(kPair, {.max_length = most, .too_long = how});
  };
  EXPECT_EQ(cut(TooLong::kRefuse, size)->ids, whole);
  EXPECT_EQ(cut(TooLong::kTruncateRight, size - 1)->ids,
            std::vector<TokenId>(whole.begin(), whole.end() - 1));
  EXPECT_EQ(cut(TooLong::kTruncateLeft, size - 1)->ids,
            std::vector<TokenId>(whole.begin() + 1, whole.end()));
  EXPECT_TRUE(cut(TooLong::kTruncateLeft, size - 1)->learned.back());
  EXPECT_FALSE(cut(TooLong::kSkip, size - 1));
  EXPECT_FALSE(cut(TooLong::kTruncateRight, 3)) << "no target is left";
  refused<ValueError>(kPair, "'file' line 7 has",
                      {.max_length = size - 1, .too_long = TooLong::kRefuse});
}

TEST_F(FineTuning, WrongLinesAreNamed) {
  for (const auto& [line, part] : std::vector<std::pair<std::string, std::string>>{
           {"[1]", "JSON object"},
           {"{", "JSON object"},
           {"{}", "has neither"},
           {R"({"prompt": "a"})", "has neither"},
           {R"({"prompt": "a", "completion": 1})", "two texts"},
           {R"({"messages": []})", "at least one"},
           {R"({"messages": "a"})", "at least one"},
           {R"({"messages": [{"role": "user", "content": "a"}]})", "no message of the role"},
           {R"({"messages": [{"role": "user", "content": "a"}], "tools": 1})", "tools"}}) {
    refused<FormatError>(line, part, with_template("qwen2"));
    refused<FormatError>(line, "'file' line 7", with_template("qwen2"));
  }
  folder_.write("data.jsonl", kPair + "\n\n" + "{\"messages\": [{\"role\": \"user\"}]}\n");
  const std::string message = message_of<FormatError>(
      [&] { FineTuningDataset(folder_.path("data.jsonl"), *tokenizer_, with_template("llama3")); });
  EXPECT_TRUE(mentions(message, "data.jsonl' line 3")) << message;
}

TEST_F(FineTuning, BatchesAreFilledUpAndPredictTheNextToken) {
  folder_.write("data.jsonl", kPair + "\n" + R"({"prompt": "Who?", "completion": " I"})" + "\n" +
                                  R"({"prompt": "Who?", "completion": ""})" + "\n");
  const FineTuningDataset dataset(folder_.path("data.jsonl"), *tokenizer_, {.append_eos = false});
  EXPECT_EQ(dataset.size(), 2);
  EXPECT_EQ(dataset.skipped(), 1);
  const FineTuningExample longer = dataset.get(0), shorter = dataset.get(1);
  EXPECT_EQ(dataset.longest(), static_cast<int64_t>(longer.ids.size()));
  DataLoader<FineTuningExample> loader(std::make_shared<FineTuningDataset>(dataset),
                                       {.batch_size = 2});
  for (const TokenExample& batch : loader) {
    const auto width = static_cast<int64_t>(longer.ids.size()) - 1;
    ASSERT_EQ(batch.inputs.shape(), (Shape{2, width}));
    ASSERT_EQ(batch.targets.shape(), (Shape{2, width}));
    const auto* inputs = batch.inputs.data_as<int64_t>();
    const auto* targets = batch.targets.data_as<int64_t>();
    int64_t learned = 0;
    for (int64_t row = 0; row < 2; ++row) {
      const FineTuningExample& example = row == 0 ? longer : shorter;
      for (int64_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(i);
        const bool has = at < example.ids.size(), next = at + 1 < example.ids.size();
        EXPECT_EQ(inputs[row * width + i], has ? example.ids[at] : example.padding);
        EXPECT_EQ(targets[row * width + i],
                  next && example.learned[at + 1] ? example.ids[at + 1] : kIgnoreTarget);
        learned += targets[row * width + i] != kIgnoreTarget;
      }
    }
    EXPECT_EQ(learned, dataset.num_targets());
  }
  folder_.write("data.jsonl", R"({"prompt": "Who?", "completion": ""})");
  EXPECT_TRUE(mentions(message_of<ValueError>([&] {
                         FineTuningDataset(folder_.path("data.jsonl"), *tokenizer_,
                                           {.append_eos = false});
                       }),
                       "none is left"));
}

}  // namespace
}  // namespace tessera::data::test_fine_tuning
