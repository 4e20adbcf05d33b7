// `tessera convert`, `tessera tokenize` and `tessera evaluate`: a model's files and texts.
#include <gtest/gtest.h>

#include <filesystem>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/torch_file.h>
#include <tessera/data/text/token_file.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>
#include <tessera/nn/init.h>
#include <tessera/nn/models/evaluation.h>

#include "accelerate/tessera_command.h"
#include "golden_files.h"

namespace tessera::test_convert {
namespace {

namespace fs = std::filesystem;
using tests::golden_path;

class Convert : public testing::Test {
 protected:
  FinishedProcess convert(std::vector<std::string> words) {
    words.insert(words.begin(), "convert");
    return tessera_command(words);
  }
  std::string path(const std::string& name) { return folder_.path(name); }
  void expect_golden(const StateDict& got, const std::string& reference, size_t below = 0,
                     const std::string& key = "") {
    size_t count = 0;
    for (const auto& [name, tensor] : load_safetensors(golden_path(reference))) {
      if (!name.starts_with(key)) continue;
      const Tensor& same = got.at(name.substr(below));
      ASSERT_EQ(same.dtype(), tensor.dtype()) << name;
      ASSERT_EQ(same.shape(), tensor.shape()) << name;
      EXPECT_EQ(same.to_vector(), tensor.to_vector()) << name;
      ++count;
    }
    EXPECT_EQ(got.size(), count);
  }
  void expect_refused(const std::vector<std::string>& words, const std::string& why, int code = 1) {
    const FinishedProcess process = convert(words);
    EXPECT_EQ(process.code(), code) << process;
    EXPECT_TRUE(process.complained(why)) << why << "\n" << process;
  }
  TestFolder folder_;
};

TEST_F(Convert, AFileOfTorchBecomesTheSameTensors) {
  const auto process = convert({golden_path("torch/state.pt"), path("out/state.safetensors")});
  ASSERT_EQ(process.code(), 0) << process;
  expect_golden(load_weights(path("out/state.safetensors")), "torch/state.safetensors");
  const SafeTensorsFile file(path("out/state.safetensors"));
  EXPECT_FALSE(file.contains("same"));  // once, under the first of its names
  EXPECT_EQ(file.metadata().at("same"), "base");
  EXPECT_TRUE(file.contains("transposed"));
  EXPECT_TRUE(process.printed("out/state.safetensors")) << process;
}

TEST_F(Convert, OneKeyOfACheckpointIsTakenWithoutItsName) {
  const auto process =
      convert({golden_path("torch/checkpoint.pt"), path("model.safetensors"), "--key", "model"});
  ASSERT_EQ(process.code(), 0) << process;
  expect_golden(load_weights(path("model.safetensors")), "torch/checkpoint.safetensors", 6,
                "model.");
  const auto all = convert({golden_path("torch/checkpoint.pt"), path("all.safetensors")});
  ASSERT_EQ(all.code(), 0) << all;
  EXPECT_TRUE(all.printed("left out")) << all;
  EXPECT_TRUE(all.printed(" epoch")) << all;
  expect_golden(load_weights(path("all.safetensors")), "torch/checkpoint.safetensors");
  expect_refused({golden_path("torch/checkpoint.pt"), path("no.safetensors"), "--key", "mode"},
                 "no tensors below the key mode");
}

TEST_F(Convert, AFolderOfTransformersBecomesOne) {
  fs::create_directories(path("in"));
  fs::copy(golden_path("torch/state.pt"), path("in/pytorch_model.bin"));
  folder_.write("in/config.json", "{}");
  folder_.write("in/vocab.txt", "a\n");
  folder_.write("in/training.log", "no");
  const auto process = convert({path("in"), path("out"), "--max-shard-size", "200"});
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_TRUE(fs::exists(path("out/model.safetensors.index.json")));
  EXPECT_EQ(folder_.read("out/config.json"), "{}");
  EXPECT_TRUE(fs::exists(path("out/vocab.txt")));
  EXPECT_FALSE(fs::exists(path("out/training.log")));
  expect_golden(load_weights(path("out")), "torch/state.safetensors");

  // Shards with an index; into the folder itself.
  fs::rename(path("in/pytorch_model.bin"), path("in/pytorch_model-00001-of-00002.bin"));
  fs::copy(golden_path("torch/checkpoint.pt"), path("in/pytorch_model-00002-of-00002.bin"));
  folder_.write("in/pytorch_model.bin.index.json",
                R"({"weight_map": {"base": "pytorch_model-00001-of-00002.bin",
                                   "model.weight": "pytorch_model-00002-of-00002.bin"}})");
  ASSERT_EQ(convert({path("in"), path("in")}).code(), 0);
  const StateDict both = load_weights(path("in/model.safetensors"));
  EXPECT_TRUE(both.contains("base"));
  EXPECT_TRUE(both.contains("model.weight"));
}

TEST_F(Convert, WhatIsBesideTheTensorsIsLeftOutAndNamed) {
  const auto process = convert({golden_path("torch/beside.pt"), path("w.safetensors")});
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_EQ(load_weights(path("w.safetensors")).size(), 4u);
  for (const char* name :
       {" args", " settings", " foreign.int16 (torch.ShortStorage)", " sparse"}) {
    EXPECT_TRUE(process.printed(name)) << process;
  }
  const auto huge = convert({golden_path("torch/huge.pt"), path("huge.safetensors")});
  ASSERT_EQ(huge.code(), 0) << huge;
  EXPECT_LT(fs::file_size(path("huge.safetensors")), 1000u);
  EXPECT_TRUE(huge.printed("w (4294967296 bytes that repeat 4)")) << huge;
}

TEST_F(Convert, WhatCannotBeConvertedLeavesNothingBehind) {
  const std::string out = path("x.safetensors");
  expect_refused({golden_path("torch/call.pt"), out}, "posix.system");
  expect_refused({golden_path("torch/complex.pt"), out}, "torch.ComplexFloatStorage");
  expect_refused({path("missing.pt"), out}, "there is no");
  EXPECT_FALSE(fs::exists(out));
  folder_.write("x.safetensors", "mine");
  expect_refused({golden_path("torch/state.pt"), out}, "--overwrite");
  EXPECT_EQ(folder_.read("x.safetensors"), "mine");
  EXPECT_EQ(convert({golden_path("torch/state.pt"), out, "--overwrite"}).code(), 0);
  folder_.write("text", "mine");
  expect_refused({golden_path("torch/state.pt"), path("text")}, "OUT has to be");
  expect_refused({golden_path("torch/state.pt"), path("y.safetensors"), "--max-shard-size", "1MB"},
                 "folder", 2);
  fs::create_directories(path("empty"));
  expect_refused({path("empty"), path("z")}, "neither");
  folder_.write("empty/pytorch_model.bin.index.json",
                R"({"weight_map": {"a": "../../etc/passwd"}})");
  expect_refused({path("empty"), path("z")}, "beside it");
  EXPECT_FALSE(fs::exists(path("z")));
}

class Tokenize : public testing::Test {
 protected:
  FinishedProcess tokenize(const std::string& words, const std::string& input) {
    folder_.write("input", input);
    return run_process(
        {"sh", "-c",
         kTesseraCommand + " tokenize --tokenizer " + words + " < " + folder_.path("input")},
        {{"XDG_CONFIG_HOME", "/nonexistent"}});
  }
  const std::string family_ = golden_path("tokenizers/bert_cased");
  TestFolder folder_;
};

TEST_F(Tokenize, AnswersEachLineAsThePackageDoes) {
  const auto cases = tests::golden_json("tokenizers/bert_cased/cases.json");
  std::string texts, answers, with_offsets, ids, decoded;
  for (const auto& c : cases["texts"]) {
    texts += c["text"].dump() + "\n";
    answers += nlohmann::json{{"ids", c["ids"]}}.dump() + "\n";
    ids += c["ids"].dump() + "\n";
    decoded += c["decoded"].dump() + "\n";
    nlohmann::json pairs = nlohmann::json::array();
    for (size_t i = 0; i < c["offsets"].size(); i += 2) {
      pairs.push_back({c["offsets"][i], c["offsets"][i + 1]});
    }
    with_offsets += nlohmann::json{{"ids", c["ids"]}, {"offsets", pairs}}.dump() + "\n";
  }
  EXPECT_EQ(tokenize(family_ + " --json", texts).output, answers);
  EXPECT_EQ(tokenize(family_ + "/tokenizer.json --json --offsets", texts).output, with_offsets);
  EXPECT_EQ(tokenize(family_ + " --json --decode", answers).output, decoded);
  EXPECT_EQ(tokenize(family_ + " --json --decode", ids).output, decoded);
}

TEST_F(Tokenize, TakesLinesOfText) {
  const std::string gpt2 = golden_path("tokenizers/gpt2");
  const FinishedProcess ids = tokenize(gpt2 + " --no-special-tokens", "the war\n\nthe\n");
  ASSERT_EQ(ids.code(), 0) << ids;
  const FinishedProcess texts = tokenize(gpt2 + " --decode --skip-special-tokens", ids.output);
  EXPECT_EQ(texts.output, "the war\n\nthe\n") << ids << texts;
}

TEST_F(Tokenize, ConversationsGoThroughTheChatTemplate) {
  const std::string folder = golden_path("finetune");
  const std::string lines =
      "[{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": "
      "\"yes\"}]\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n";
  const FinishedProcess both = tokenize(folder + " --chat --json", lines);
  ASSERT_EQ(both.code(), 0) << both;
  const size_t end = both.output.find('\n');
  const auto first = nlohmann::json::parse(both.output.substr(0, end));
  EXPECT_EQ(first["text"],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n");
  EXPECT_EQ(first["assistant_mask"].size(), first["ids"].size());
  EXPECT_EQ(first["assistant_mask"].back(), 1);
  EXPECT_EQ(first["assistant_mask"].front(), 0);
  const FinishedProcess prompt = tokenize(folder + " --chat --generation-prompt", lines);
  const FinishedProcess text =
      tokenize(folder + " --decode", prompt.output.substr(prompt.output.find('\n') + 1));
  EXPECT_TRUE(text.output.starts_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"))
      << text;
  EXPECT_TRUE(tokenize(folder + " --chat", "{}\n").complained("line 1"));
  EXPECT_EQ(tokenize(folder + " --chat --offsets", lines).code(), 2);
  EXPECT_EQ(tokenize(folder + " --generation-prompt", lines).code(), 2);
}

TEST_F(Tokenize, WritesTheIdsOfAllLinesIntoATokenFile) {
  const std::string folder = golden_path("finetune");
  const auto tokenizer = data::PretrainedTokenizer::from_pretrained(folder);
  std::string lines;
  std::vector<data::TokenId> ids;
  for (int i = 0; i < 500; ++i) {
    const std::string line = i % 7 == 0 ? "" : "the war of " + std::to_string(i) + " and the peace";
    lines += line + "\n";
    const auto more = tokenizer.encode_text(line).ids;
    ids.insert(ids.end(), more.begin(), more.end());
    ids.push_back(*tokenizer.end_of_text());
  }
  const std::string out = folder_.path("out.tokens");
  const FinishedProcess process = tokenize(folder + " --end-of-text --output " + out, lines);
  ASSERT_EQ(process.code(), 0) << process;
  EXPECT_TRUE(process.output.starts_with("500 documents")) << process;
  const auto tokens = data::TokenArray::open(out);
  EXPECT_EQ(tokens.vocab_size(), tokenizer.vocab_size());
  ASSERT_EQ(tokens.size(), static_cast<int64_t>(ids.size()));
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(tokens[static_cast<int64_t>(i)], ids[i]) << i;

  const std::string other = folder_.path("other.tokens");
  EXPECT_TRUE(tokenize(folder + " --json --output " + other, "\"a\"\nb\n").complained("line 2"));
  EXPECT_FALSE(fs::exists(other));
  EXPECT_EQ(tokenize(folder + " --end-of-text", "a\n").code(), 2);
  EXPECT_EQ(tokenize(folder + " --decode --output " + other, "1\n").code(), 2);
}

TEST_F(Tokenize, NamesTheLineThatItCannotTake) {
  const auto expect_complaint = [&](const std::string& words, const std::string& input,
                                    const std::string& part, int code = 1) {
    const FinishedProcess process = tokenize(words, input);
    EXPECT_EQ(process.code(), code) << process;
    EXPECT_TRUE(process.complained(part)) << process;
  };
  expect_complaint(family_ + " --json", "\"a\"\nb\n", "line 2");
  expect_complaint(family_ + " --json", "\"a\"\n[1]\n", "line 2");
  expect_complaint(family_ + " --json --decode", "{\"idz\": [1]}\n", "line 1");
  expect_complaint(family_ + " --json --decode", "[1, -1]\n", "-1");
  expect_complaint(family_ + " --decode", "1 x\n", "line 1");
  expect_complaint(family_ + " --decode", "100000\n", "100000");
  expect_complaint(family_ + " --offsets", "a\n", "--offsets", 2);
  expect_complaint(folder_.path("none"), "a\n", "none");
}

class Evaluate : public testing::Test {
 protected:
  Evaluate() {
    for (const auto& [name, parameter] : model_.named_parameters()) {
      if (parameter.dim() > 1) nn::init::normal(parameter, 0, 0.3, RandomStream{name.size(), 0});
    }
    model_.save_pretrained(folder_.path("model"));
  }
  FinishedProcess evaluate(std::vector<std::string> words) {
    words.insert(words.begin(), {"evaluate", folder_.path("model"), "--threads", "1"});
    return tessera_command(words);
  }
  static std::vector<int64_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

  nn::models::Llama model_{{.width = 16, .inner = 24, .layers = 1, .heads = 2, .kv_heads = 1}};
  TestFolder folder_;
};

TEST_F(Evaluate, PerplexityIsThatOfTheLibrary) {
  const std::string text = "What is the perplexity of a text that nobody wrote?";
  folder_.write("text", text);
  const auto process =
      evaluate({"--text", folder_.path("text"), "--window", "16", "--stride", "6", "--json"});
  ASSERT_EQ(process.code(), 0) << process;
  const auto json = nlohmann::json::parse(process.output);
  const auto expected = nn::models::perplexity(nn::models::language_model(model_), bytes(text),
                                               {.window = 16, .stride = 6});
  EXPECT_EQ(json.at("tokens"), text.size() - 1);
  EXPECT_NEAR(json.at("perplexity").get<double>(), expected.perplexity(),
              1e-4 * expected.perplexity());
}

TEST_F(Evaluate, AnswersCountWhereTheyAreTheMostLikelyChoice) {
  const std::vector<std::string> choices = {" yes", " no", " perhaps so"};
  std::vector<nn::models::Continuation> all;
  for (const std::string& each : choices) all.push_back({bytes("Is it?"), bytes(each)});
  const auto found = nn::models::continuation_likelihoods(nn::models::language_model(model_), all);
  size_t best = 0;
  for (size_t i = 1; i < 3; ++i) {
    if (found[i].log_likelihood > found[best].log_likelihood) best = i;
  }
  const auto line = [&](size_t answer) {
    return nlohmann::json{{"context", "Is it?"}, {"choices", choices}, {"answer", answer}}.dump() +
           "\n";
  };
  folder_.write("questions", line(best) + "\n" + line((best + 1) % 3) + line(best) + line(best));
  const auto process = evaluate({"--choices", folder_.path("questions"), "--json"});
  ASSERT_EQ(process.code(), 0) << process;
  const auto json = nlohmann::json::parse(process.output);
  EXPECT_EQ(json.at("accuracy"), 0.75);
  EXPECT_EQ(json.at("questions"), 4);
}

TEST_F(Evaluate, WhatCannotBeReadIsNamedWithItsLine) {
  const auto complains = [&](const std::string& line, const std::string& why) {
    folder_.write("questions", line + "\n");
    const auto process = evaluate({"--choices", folder_.path("questions")});
    EXPECT_EQ(process.code(), 1) << process;
    EXPECT_TRUE(process.complained("line 1")) << process;
    EXPECT_TRUE(process.complained(why)) << process;
  };
  complains("{", "no JSON");
  complains(R"({"context": "a", "choices": ["b"], "answer": 0})", "at least two");
  complains(R"({"context": "a", "choices": ["b", "c"], "answer": 2})", "index");
  complains(R"({"context": "a", "choices": ["b", ""], "answer": 0})", "adds no token");
  EXPECT_EQ(evaluate({}).code(), 2);
  EXPECT_EQ(evaluate({"--text", folder_.path("missing")}).code(), 1);
}

}  // namespace
}  // namespace tessera::test_convert
