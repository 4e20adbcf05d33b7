// Files that come from elsewhere and want to run away: patterns, deep JSON, sizes of any size. Each
// ends at once, in a typed error.
#include <gtest/gtest.h>

#include <filesystem>

#include <nlohmann/json.hpp>

#include <tessera/core/regex.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::nn::test_hostile_files {
namespace {

using tests::golden_path;
using Json = nlohmann::json;

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}
std::string nested(int levels) { return repeated("(", levels) + "a" + repeated(")", levels); }

// Each is no expression, or would take the age of the universe with what it is given.
const std::pair<std::string, std::string> kHostile[] = {
    {nested(20000), "a"},
    {nested(100), "a"},
    {"(a+)+$", repeated("a", 60) + "b"},
    {"(.*a){25}", repeated("a", 200)},
    {"(*LIMIT_MATCH=4000000000)(a+)+$", repeated("a", 60) + "b"},
    {"(?:a{0,65535}){0,65535}", "a"},
    {repeated("(", 50) + "a" + repeated("){1,99}", 50), "aaa"},
    {"(?R)?a", "aa"},
    {"[", "a"},
    {"a{2,1}", "a"},
    {repeated("a", 5000), "a"},
    {"\xff", "a"},
};

TEST(Regex, PatternsThatRunAwayEndInAnErrorThatNamesThem) {
  for (const auto& [pattern, text] : kHostile) {
    const std::string message =
        message_of<ConfigError>([&, &p = pattern, &t = text] { Regex(p, "origin").matches(t); });
    EXPECT_TRUE(mentions(message, "origin")) << message;
    EXPECT_TRUE(mentions(message, pattern.substr(0, 20))) << message;
    EXPECT_LT(message.size(), 1000u);
  }
}

TEST(Regex, MatchesAsPythonsReDoes) {
  const auto matches = [](const char* pattern, std::string_view text) {
    return Regex(pattern, "test").matches(text);
  };
  EXPECT_TRUE(matches(".*\\.layers\\.(0|1)\\.q", "model.layers.1.q"));
  EXPECT_FALSE(matches(".*\\.layers\\.(0|1)\\.q", "model.layers.1.q_proj"));
  EXPECT_FALSE(matches("layers", "model.layers"));
  EXPECT_TRUE(matches("(?P<x>ab)(?P=x)", "abab"));
  EXPECT_TRUE(matches("(?!.*lm_head).*", "model.q"));
  EXPECT_FALSE(matches("(?!.*lm_head).*", "lm_head"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_TRUE(matches("a|ab", "ab")) << "the whole decides, not the first way";
  EXPECT_TRUE(matches(".", "\u00e9")) << "a character, not a byte";
  EXPECT_FALSE(matches("a", "\xff")) << "a name of other bytes is no fault";
  const Regex layer(".*?\\.[^.]*\\.(?P<idx>\\d+)\\.", "test");
  EXPECT_EQ(layer.group("model.layers.12.mlp.experts.3.up", "idx"), "12");
  EXPECT_EQ(layer.group("model.norm", "idx"), std::nullopt);
}

TEST(Regex, FindsEveryMatchFromTheLeft) {
  const auto matches = [](const char* pattern, std::string_view text) {
    std::string all;
    Regex(pattern, "test", {.unicode = true, .many_matches = true})
        .for_each_match(text, [&](size_t begin, size_t end) {
          all += std::to_string(begin) + "-" + std::to_string(end) + " ";
        });
    return all;
  };
  EXPECT_EQ(matches("a+", "aabca"), "0-2 4-5 ");
  EXPECT_EQ(matches("a*", "aab"), "0-2 3-3 ") << "as Oniguruma, nothing where a match ended";
  EXPECT_EQ(matches("x*", "\u00e9a"), "0-0 2-2 3-3 ") << "by characters";
  EXPECT_EQ(matches("\\s+(?!\\S)|\\s+", "a   b "), "1-3 3-4 5-6 ");
  EXPECT_EQ(matches("\\d", "7\u0667"), "0-1 1-3 ");
  EXPECT_EQ(matches("(?i:k)", "kK\u212a"), "0-1 1-2 2-5 ");
  EXPECT_EQ(matches("a", ""), "");
  const std::string message =
      message_of<ConfigError>([&] { matches("(a+)+[bc]", repeated("a", 60)); });
  EXPECT_TRUE(mentions(message, "(a+)+[bc]")) << message;
}

TEST(HostileFiles, PatternsOfAnAdapterEndInAnError) {
  TestFolder folder;
  save_safetensors(folder.path("adapter_model.safetensors"), {});
  const auto refused = [&](const Json& changes) {
    Json config = {{"peft_type", "LORA"}, {"target_modules", {repeated("a", 60) + "b"}}};
    config.update(changes);
    folder.write("adapter_config.json", config.dump());
    struct Model : Module<Model> {
      Model() { add<Linear>(repeated("a", 60) + "b", 2, 2); }
    } model;
    return message_of<ConfigError>([&] { load_lora(model, folder.path("")); });
  };
  for (const std::string& pattern : {nested(20000), std::string("(a+)+$"), std::string("[")}) {
    EXPECT_TRUE(mentions(refused({{"target_modules", pattern}}), "pattern"));
    EXPECT_TRUE(mentions(refused({{"rank_pattern", {{pattern, 4}}}}), "rank_pattern"));
    EXPECT_TRUE(mentions(refused({{"alpha_pattern", {{pattern, 4}}}}), "alpha_pattern"));
    if (pattern == "(a+)+$") continue;  // it needs a text before the number
    EXPECT_TRUE(
        mentions(refused({{"layers_to_transform", 0}, {"layers_pattern", pattern}}), "layers"));
  }
  Json many = Json::object();
  for (int i = 0; i < 300; ++i) many["(a|b)" + std::to_string(i)] = 4;
  EXPECT_TRUE(mentions(refused({{"rank_pattern", many}}), "256 regular expressions"));
}

// nlohmann_json copies and shows a value by calling itself for each level of it.
TEST(HostileFiles, JsonOfManyLevelsIsRefusedByEveryReader) {
  TestFolder folder;
  for (const int levels : {100, 100'000}) {
    const std::string deep = repeated("[", levels) + repeated("]", levels);
    const auto refused = [&](const std::string& name, const std::string& text, const auto& read) {
      folder.write(name, text);
      const std::string message =
          message_of<FormatError>([&] { read(folder.path(name), folder.path("")); });
      EXPECT_TRUE(mentions(message, name)) << message;
      EXPECT_TRUE(mentions(message, "levels")) << message;
    };
    const std::string config = R"({"model_type": "KIND", "vocab_size": )" + deep + "}";
    const auto of_kind = [&](const std::string& kind) {
      return std::string(config).replace(config.find("KIND"), 4, kind);
    };
    refused("config.json", of_kind("llama"),
            [](const auto& path, const auto&) { models::LlamaConfig::read(path); });
    refused("config.json", of_kind("gpt2"),
            [](const auto& path, const auto&) { models::GptConfig::read(path); });
    refused("config.json", of_kind("bert"),
            [](const auto& path, const auto&) { models::BertConfig::read(path); });
    refused("model.safetensors.index.json", R"({"weight_map": )" + deep + "}",
            [](const auto&, const auto& root) { load_weights(root); });
    refused("adapter_config.json", R"({"peft_type": "LORA", "r": )" + deep + "}",
            [](const auto&, const auto& root) {
              Linear layer(2, 2);
              load_lora(layer, root);
            });
  }
}

TEST(HostileFiles, SizesWhoseProductsAreNoNumbersAreRefused) {
  const auto refused = [](const std::string& folder, const Json& changes) {
    std::ifstream file(golden_path(folder + "/config.json"));
    Json config = Json::parse(file);
    config.update(changes);
    TestFolder made;
    made.write("config.json", config.dump());
    const std::string path = made.path("config.json");
    return message_of<Error>([&] {
      if (folder == "gpt2") return static_cast<void>(models::GptConfig::read(path));
      if (folder == "bert") return static_cast<void>(models::BertConfig::read(path));
      models::LlamaConfig::read(path);
    });
  };
  const int64_t most = (int64_t{1} << 31) - 64;
  EXPECT_TRUE(mentions(refused("llama", {{"num_hidden_layers", 100'000}}), "1024 layers"));
  EXPECT_TRUE(mentions(refused("gpt2", {{"n_layer", 100'000}}), "1024 layers"));
  EXPECT_TRUE(mentions(refused("bert", {{"num_hidden_layers", 100'000}}), "1024 layers"));
  const Json wide = {{"hidden_size", most}, {"vocab_size", most}, {"intermediate_size", most}};
  EXPECT_TRUE(mentions(refused("llama", wide), "weights"));
  EXPECT_TRUE(mentions(refused("bert", wide), "weights"));
  EXPECT_TRUE(mentions(refused("gpt2", {{"n_embd", most}, {"vocab_size", most}}), "weights"));
  EXPECT_TRUE(mentions(refused("bert", {{"hidden_size", int64_t{1} << 40}}), "2^31"));
  for (const char* folder : {"llama", "bert", "gpt2"}) {
    EXPECT_TRUE(mentions(refused(folder, {{"vocab_size", UINT64_MAX}}), "'vocab_size'"));
  }
}

TEST(HostileFiles, ABertWhoseConfigAsksForMoreThanTheWeightsHoldIsRefusedBeforeItIsMade) {
  TestFolder folder;
  std::filesystem::copy(golden_path("bert"), folder.path("model"));
  std::ifstream file(golden_path("bert/config.json"));
  Json config = Json::parse(file);
  config["vocab_size"] = int64_t{1} << 30;
  folder.write("model/config.json", config.dump());
  EXPECT_THROW(models::Bert::from_pretrained(folder.path("model")), FormatError);
}

}  // namespace
}  // namespace tessera::nn::test_hostile_files
