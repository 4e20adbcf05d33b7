// config.json of the models: every field there and back, the values of fields that are not there,
// and every bound.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>

#include "finished_process.h"
#include "refusals.h"

namespace tessera::nn::test_model_configs {
namespace {

using Json = nlohmann::json;
using models::BertConfig;
using models::GptConfig;
using models::LlamaConfig;

constexpr int64_t kSize = int64_t{1} << 31;  // the first that is too large

template <class Config>
Config read(const Json& json) {
  TestFolder folder;
  folder.write("config.json", json.dump());
  return Config::read(folder.path("config.json"));
}
template <class Config>
Json written(const Config& config) {
  TestFolder folder;
  config.write(folder.path("config.json"), kBF16);
  return Json::parse(folder.read("config.json"));
}
// What is written says what is expected, and reads back as what was written.
template <class Config>
void expect_round_trip(const Config& config, const Json& expected) {
  const Json json = written(config);
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(json.at(key), value) << key;
  EXPECT_EQ(json.size(), expected.size());
  EXPECT_EQ(written(read<Config>(json)), json);
}
template <class Config>
Config with(Config config, const std::function<void(Config&)>& change) {
  change(config);
  return config;
}
template <class Config>
Refusal refused(const Config& config, const char* says,
                const std::function<void(Config&)>& change) {
  return {says, [=] { with(config, change).check(); }};
}
template <class Config>
Refusal not_read(Json json, const Json& change, const char* says) {
  json.update(change);
  return {says, [=] { read<Config>(json); }};
}

// ---- GPT-2 -------------------------------------------------------------------------------------

const GptConfig kGpt = {.vocab_size = 7, .context = 6, .width = 8, .layers = 2, .heads = 4};
const Json kGptFields = {
    {"vocab_size", 7}, {"n_positions", 6}, {"n_embd", 8}, {"n_layer", 2}, {"n_head", 4}};

TEST(GptConfig, EveryFieldThereAndBack) {
  GptConfig config = kGpt;
  config.inner = 24, config.dropout = 0.25, config.layer_norm_eps = 0.5;
  config.initializer_range = 0.125, config.tied = false, config.end_of_text = 0;
  config.tokenizer = "bytes";
  Json expected = {{"activation_function", "gelu_new"},
                   {"architectures", {"GPT2LMHeadModel"}},
                   {"attn_pdrop", 0.25},
                   {"bos_token_id", 0},
                   {"dtype", "bfloat16"},
                   {"embd_pdrop", 0.25},
                   {"eos_token_id", 0},
                   {"initializer_range", 0.125},
                   {"layer_norm_epsilon", 0.5},
                   {"model_type", "gpt2"},
                   {"n_embd", 8},
                   {"n_head", 4},
                   {"n_inner", 24},
                   {"n_layer", 2},
                   {"n_positions", 6},
                   {"resid_pdrop", 0.25},
                   {"tie_word_embeddings", false},
                   {"tokenizer", "bytes"},
                   {"vocab_size", 7}};
  expect_round_trip(config, expected);
  config.inner = 0, config.end_of_text = -1, config.tokenizer = "";
  for (const char* key : {"n_inner", "bos_token_id", "eos_token_id"}) expected[key] = Json();
  expected.erase("tokenizer");
  expect_round_trip(config, expected);
}

TEST(GptConfig, WhatIsNotThereIsAsTransformersHasIt) {
  const GptConfig config = read<GptConfig>(kGptFields);
  EXPECT_EQ(config.inner, 0);
  EXPECT_EQ(config.inner_width(), 32);
  EXPECT_EQ(config.dropout, 0.1);
  EXPECT_EQ(config.layer_norm_eps, 1e-5);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_TRUE(config.tied);
  EXPECT_EQ(config.end_of_text, 50256);
  EXPECT_EQ(config.tokenizer, "");
}

TEST(GptConfig, BoundsAndWhatTheModelCannotDo) {
  const auto of = [](const char* says, const std::function<void(GptConfig&)>& change) {
    return refused<GptConfig>(kGpt, says, change);
  };
  const auto no = [](const Json& change, const char* says) {
    return not_read<GptConfig>(kGptFields, change, says);
  };
  for (const double dropout : {0.0, std::nextafter(1.0, 0.0)}) {
    EXPECT_NO_THROW(with<GptConfig>(kGpt, [=](auto& c) { c.dropout = dropout; }).check());
  }
  for (const int64_t layers : {1, 1024}) {
    EXPECT_NO_THROW(with<GptConfig>(kGpt, [=](auto& c) { c.layers = layers; }).check());
  }
  EXPECT_NO_THROW(with<GptConfig>(kGpt, [](auto& c) { c.vocab_size = kSize - 1; }).check());
  expect_refusals({
      of("vocab_size must be positive; got 0", [](auto& c) { c.vocab_size = 0; }),
      of("context must be positive; got 0", [](auto& c) { c.context = 0; }),
      of("width must be positive; got 0", [](auto& c) { c.width = 0; }),
      of("layers must be positive; got 0", [](auto& c) { c.layers = 0; }),
      of("heads must be positive; got 0", [](auto& c) { c.heads = 0; }),
      of("below 2^31", [](auto& c) { c.vocab_size = kSize; }),
      of("below 2^31", [](auto& c) { c.context = kSize; }),
      of("below 2^31", [](auto& c) { c.width = kSize; }),
      of("below 2^31", [](auto& c) { c.inner = kSize; }),
      of("below 2^31", [](auto& c) { c.inner = -1; }),
      of("a multiple of heads; got 8 and 3", [](auto& c) { c.heads = 3; }),
      of("dropout must be in [0, 1)", [](auto& c) { c.dropout = 1; }),
      of("dropout must be in [0, 1)", [](auto& c) { c.dropout = -1e-9; }),
      of("at most 1024 layers; got 1025", [](auto& c) { c.layers = 1025; }),
      of("weights; its sizes make",
         [](auto& c) { c.width = c.vocab_size = int64_t{1} << 25, c.layers = 1; }),
      no({{"model_type", "bert"}}, "'model_type'"),
      no({{"activation_function", "relu"}}, "'activation_function' is \"relu\""),
      no({{"scale_attn_weights", false}}, "'scale_attn_weights'"),
      no({{"scale_attn_by_inverse_layer_idx", true}}, "'scale_attn_by_inverse_layer_idx'"),
      no({{"add_cross_attention", true}}, "'add_cross_attention'"),
      no({{"resid_pdrop", "0.1"}}, "'resid_pdrop' must be a number"),
      no({{"tie_word_embeddings", 1}}, "'tie_word_embeddings' must be true or false"),
      no({{"n_layer", 2.5}}, "'n_layer' must be an integer"),
      no({{"n_layer", nullptr}}, "'n_layer' is missing"),
      no({{"n_head", 3}}, "config.json: gpt2: width"),
  });
  EXPECT_NO_THROW(read<GptConfig>(Json::parse(R"({"vocab_size": 7, "n_positions": 6, "n_embd": 8,
      "n_layer": 2, "n_head": 4, "model_type": "gpt2", "activation_function": "gelu_new",
      "scale_attn_weights": true, "add_cross_attention": false, "resid_pdrop": 0})")));
}

// ---- BERT --------------------------------------------------------------------------------------

const BertConfig kBert = {.vocab_size = 7, .width = 8, .layers = 2, .heads = 4, .context = 6};
const Json kBertFields = {{"vocab_size", 7},         {"hidden_size", 8},
                          {"num_hidden_layers", 2},  {"num_attention_heads", 4},
                          {"intermediate_size", 24}, {"max_position_embeddings", 6}};

TEST(BertConfig, EveryFieldThereAndBack) {
  BertConfig config = kBert;
  config.inner = 24, config.types = 3, config.labels = 2, config.dropout = 0.25;
  config.attention_dropout = 0.5, config.classifier_dropout = 0, config.layer_norm_eps = 0.75;
  config.initializer_range = 0.125, config.padding = 5, config.label_names = {"no", "yes"};
  Json expected = {{"architectures", {"BertForSequenceClassification"}},
                   {"attention_probs_dropout_prob", 0.5},
                   {"classifier_dropout", 0.0},
                   {"dtype", "bfloat16"},
                   {"hidden_act", "gelu"},
                   {"hidden_dropout_prob", 0.25},
                   {"hidden_size", 8},
                   {"id2label", {{"0", "no"}, {"1", "yes"}}},
                   {"initializer_range", 0.125},
                   {"intermediate_size", 24},
                   {"label2id", {{"no", 0}, {"yes", 1}}},
                   {"layer_norm_eps", 0.75},
                   {"max_position_embeddings", 6},
                   {"model_type", "bert"},
                   {"num_attention_heads", 4},
                   {"num_hidden_layers", 2},
                   {"pad_token_id", 5},
                   {"position_embedding_type", "absolute"},
                   {"type_vocab_size", 3},
                   {"vocab_size", 7}};
  expect_round_trip(config, expected);
  config.inner = 0, config.classifier_dropout = -1, config.label_names = {};
  expected["intermediate_size"] = 32;
  expected["classifier_dropout"] = Json();
  expected["id2label"] = {{"0", "LABEL_0"}, {"1", "LABEL_1"}};
  expected["label2id"] = {{"LABEL_0", 0}, {"LABEL_1", 1}};
  expect_round_trip(config, expected);
}

TEST(BertConfig, WhatIsNotThereIsAsTransformersHasIt) {
  const BertConfig config = read<BertConfig>(kBertFields);
  EXPECT_EQ(config.inner, 24);
  EXPECT_EQ(config.types, 2);
  EXPECT_EQ(config.labels, 2);
  EXPECT_EQ(config.dropout, 0.1);
  EXPECT_EQ(config.attention_dropout, 0.1);
  EXPECT_EQ(config.classifier_dropout, -1);
  EXPECT_EQ(config.layer_norm_eps, 1e-12);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_EQ(config.padding, 0);
  EXPECT_TRUE(config.label_names.empty());
  Json three = kBertFields;
  three["num_labels"] = 3;
  EXPECT_EQ(read<BertConfig>(three).labels, 3);
}

TEST(BertConfig, BoundsAndWhatTheModelCannotDo) {
  const auto of = [](const char* says, const std::function<void(BertConfig&)>& change) {
    return refused<BertConfig>(kBert, says, change);
  };
  const auto no = [](const Json& change, const char* says) {
    return not_read<BertConfig>(kBertFields, change, says);
  };
  for (const auto& fits : std::vector<std::function<void(BertConfig&)>>{
           [](auto& c) { c.padding = 6; }, [](auto& c) { c.dropout = c.attention_dropout = 0; },
           [](auto& c) { c.classifier_dropout = -2; },
           [](auto& c) {
             c.label_names = {"a", "b"};
           },
           [](auto& c) { c.types = 1, c.labels = 1; }, [](auto& c) { c.vocab_size = kSize - 1; }}) {
    EXPECT_NO_THROW(with<BertConfig>(kBert, fits).check());
  }
  const char* const dropouts = "dropouts must be in [0, 1)";
  const char* const padding = "must be in the vocabulary of 7";
  expect_refusals({
      of("vocab_size must be positive", [](auto& c) { c.vocab_size = 0; }),
      of("width must be positive", [](auto& c) { c.width = 0; }),
      of("layers must be positive", [](auto& c) { c.layers = 0; }),
      of("heads must be positive", [](auto& c) { c.heads = 0; }),
      of("context must be positive", [](auto& c) { c.context = 0; }),
      of("types must be positive", [](auto& c) { c.types = 0; }),
      of("labels must be positive", [](auto& c) { c.labels = 0; }),
      of("below 2^31", [](auto& c) { c.vocab_size = kSize; }),
      of("below 2^31", [](auto& c) { c.width = kSize; }),
      of("below 2^31", [](auto& c) { c.heads = kSize; }),
      of("below 2^31", [](auto& c) { c.context = kSize; }),
      of("below 2^31", [](auto& c) { c.types = kSize; }),
      of("below 2^31", [](auto& c) { c.labels = kSize; }),
      of("below 2^31", [](auto& c) { c.inner = kSize; }),
      of("below 2^31", [](auto& c) { c.inner = -1; }),
      of("at most 1024 layers; got 1025", [](auto& c) { c.layers = 1025; }),
      of("a multiple of heads; got 8 and 3", [](auto& c) { c.heads = 3; }),
      of(dropouts, [](auto& c) { c.dropout = 1; }),
      of(dropouts, [](auto& c) { c.dropout = -0.1; }),
      of(dropouts, [](auto& c) { c.attention_dropout = 1; }),
      of(dropouts, [](auto& c) { c.attention_dropout = -0.1; }),
      of(dropouts, [](auto& c) { c.classifier_dropout = 1; }),
      of(padding, [](auto& c) { c.padding = -1; }),
      of(padding, [](auto& c) { c.padding = 7; }),
      of("a name for each of 2 labels", [](auto& c) { c.label_names = {"a"}; }),
      no({{"model_type", "gpt2"}}, "'model_type'"),
      no({{"hidden_act", "relu"}}, "'hidden_act'"),
      no({{"position_embedding_type", "relative_key"}}, "'position_embedding_type'"),
      no({{"is_decoder", true}}, "'is_decoder'"),
      no({{"add_cross_attention", true}}, "'add_cross_attention'"),
      no({{"id2label", {{"0", "a"}, {"2", "b"}}}}, "2 entries and no text for 1"),
      no({{"id2label", {{"0", 1}}}}, "1 entries and no text for 0"),
      no({{"num_attention_heads", 3}}, "config.json: bert: width"),
  });
}

// ---- Llama and its kin -------------------------------------------------------------------------

LlamaConfig llama(const std::string& kind) {
  LlamaConfig config;
  config.kind = kind, config.vocab_size = 7, config.context = 6, config.width = 8;
  config.inner = 12, config.layers = 3, config.heads = 4, config.kv_heads = 2;
  config.head_dim = 6, config.rms_norm_eps = 0.5, config.initializer_range = 0.125;
  config.tied = false, config.rotary.theta = 500, config.rotary.context = 6;
  config.begin_of_text = 3, config.end_of_text = {4};
  return config;
}
Json llama_fields(const std::string& kind) {
  return {{"model_type", kind},      {"vocab_size", 7},         {"hidden_size", 8},
          {"intermediate_size", 12}, {"num_hidden_layers", 3},  {"num_attention_heads", 4},
          {"head_dim", 6},           {"num_key_value_heads", 2}};
}

TEST(LlamaConfig, BoundsAndWhatTheModelCannotDo) {
  const auto of = [](const char* says, const std::function<void(LlamaConfig&)>& change) {
    return refused<LlamaConfig>(llama("llama"), says, change);
  };
  const auto no = [](const Json& change, const char* says) {
    return not_read<LlamaConfig>(llama_fields("qwen2"), change, says);
  };
  for (const auto& fits : std::vector<std::function<void(LlamaConfig&)>>{
           [](auto& c) { c.head_dim = 0; }, [](auto& c) { c.head_dim = 6, c.width = 7; },
           [](auto& c) { c.kv_heads = 0; }, [](auto& c) { c.kv_heads = 1; },
           [](auto& c) { c.window = 0; }, [](auto& c) { c.vocab_size = kSize - 1; }}) {
    EXPECT_NO_THROW(with<LlamaConfig>(llama("llama"), fits).check());
  }
  const char* const even = "an even number of features";
  const char* const window = "must not be negative";
  const Json types = {"full_attention", "full_attention", "sliding_attention"};
  const auto windowed = [](const Json& layer_types) {
    return Json{{"use_sliding_window", true}, {"sliding_window", 4}, {"layer_types", layer_types}};
  };
  const auto rope = [](const Json& fields) { return Json{{"rope_parameters", fields}}; };
  expect_refusals({
      of("vocab_size must be positive", [](auto& c) { c.vocab_size = 0; }),
      of("vocab_size must be positive and below 2^31", [](auto& c) { c.vocab_size = kSize; }),
      of("max_position_embeddings must be", [](auto& c) { c.context = 0; }),
      of("hidden_size must be", [](auto& c) { c.width = 0; }),
      of("intermediate_size must be", [](auto& c) { c.inner = 0; }),
      of("num_hidden_layers must be", [](auto& c) { c.layers = 0; }),
      of("num_attention_heads must be", [](auto& c) { c.heads = 0; }),
      of(even, [](auto& c) { c.head_dim = kSize; }),
      of(even, [](auto& c) { c.head_dim = 7; }),
      of(even, [](auto& c) { c.head_dim = 0, c.width = 9; }),
      of(even, [](auto& c) { c.head_dim = 0, c.width = 4; }),
      of("multiple of num_key_value_heads; got 4 and 3", [](auto& c) { c.kv_heads = 3; }),
      of(window, [](auto& c) { c.window = -1; }),
      of("at most 1024 layers", [](auto& c) { c.layers = 1025; }),
      no(rope(3), "'rope_parameters' must be an object; it is 3"),
      no(rope({{"full_attention", {{"rope_theta", 1}}}}), "values for 'full_attention' alone"),
      no(rope({{"factor", 2}}), "does not say of which rope_type"),
      no(rope({{"rope_type", 3}}), "not one of default, linear, dynamic, llama3"),
      no(rope({{"rope_type", "linear"}}), "lacks 'factor'"),
      no(rope({{"rope_type", "llama3"}, {"factor", 2}}), "lacks 'low_freq_factor'"),
      no(rope({{"rope_type", "llama3"}, {"factor", 2}, {"low_freq_factor", 2}}),
         "lacks 'high_freq_factor'"),
      no(rope({{"rope_theta", "x"}}), "'rope_theta' of the rotary scaling must be a number"),
      no(rope({{"partial_rotary_factor", 0.5}}), "only a phi3 rotates a part"),
      no({{"partial_rotary_factor", 0.5}}, "only a phi3 rotates a part"),
      no({{"rope_parameters", {{"rope_theta", 5}}}, {"rope_scaling", {{"rope_theta", 6}}}},
         "contradict each other"),
  });
  Json fields = llama_fields("qwen2");
  fields.update(windowed(types));
  EXPECT_EQ(read<LlamaConfig>(fields).window_of(1), 0);
  EXPECT_EQ(read<LlamaConfig>(fields).window_of(2), 4);
}

}  // namespace
}  // namespace tessera::nn::test_model_configs
