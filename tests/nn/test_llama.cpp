// nn::models::Llama, as Llama, Mistral and Qwen2: against transformers, cached and not, their
// folders both ways, adapters.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/generation.h>
#include <tessera/optim/optimizers.h>

#include "autograd/op_checks.h"
#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::nn::models::test_llama {
namespace {

using tests::difference;
using tests::golden_json;
using tests::golden_path;
using tests::largest;
using Json = nlohmann::json;

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(golden_path("llama.safetensors"));
  return file;
}
const Json& cases() {
  static const Json json = golden_json("llama.json");
  return json;
}
Json read_json(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file);
}

// The model of a case: a folder as transformers wrote it, with other rope_parameters where the case
// has some.
std::unique_ptr<Llama> model_of(const std::string& name) {
  const std::string folder = golden_path(cases().at(name).at("folder"));
  if (cases().at(name).at("rope_parameters").is_null()) return Llama::from_pretrained(folder);
  TestFolder changed;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::filesystem::copy(entry.path(), changed.path(entry.path().filename().string()));
  }
  Json config = read_json(folder + "/config.json");
  config["rope_parameters"] = cases().at(name).at("rope_parameters");
  changed.write("config.json", config.dump());
  return Llama::from_pretrained(changed.path(""));
}

// All tokens are read, as transformers does it: frequencies of "dynamic" go by the length.
Tensor loss_of(Llama& model, const Tensor& ids) {
  const int64_t T = ids.size(1);
  const Tensor none = full({ids.size(0), 1}, -100, {.dtype = kI64});
  return model(ids, cat({ids.narrow(1, 1, T - 1), none}, 1)).loss;
}

class EveryCase : public testing::TestWithParam<const char*> {};

TEST_P(EveryCase, LogitsAndLossAreThoseOfTransformers) {
  const auto model = model_of(GetParam());
  const Tensor ids = golden().load("input_ids");
  const auto expected = golden().load(GetParam() + std::string(".logits")).to_vector();
  const Tensor logits = (*model)(ids).logits;
  EXPECT_EQ(difference(logits.narrow(1, 16, 6), expected, 1e-5 * largest(expected)), "");
  const double loss = cases().at(GetParam()).at("loss");
  EXPECT_NEAR(loss_of(*model, ids).item(), loss, 1e-6 * loss);
}

TEST_P(EveryCase, GradientsHaveTheNormsThatTransformersHas) {
  const auto model = model_of(GetParam());
  loss_of(*model, golden().load("input_ids")).backward();
  const Json& norms = cases().at(GetParam()).at("norms");
  EXPECT_EQ(model->named_parameters().size(), norms.size());
  double all = 0;
  for (const auto& [name, value] : norms.items()) all = std::max(all, value.get<double>());
  for (const auto& [name, parameter] : model->named_parameters()) {
    const double expected = norms.at(name);
    // A bias of keys moves all scores alike but for the turns: small differences of larger terms.
    EXPECT_NEAR(std::sqrt(square(parameter.grad()).sum().item()), expected,
                2e-5 * expected + 1e-7 * all)
        << name;
  }
}

TEST_P(EveryCase, GreedyTokensOfTheCacheAreThoseOfTransformers) {
  const auto model = model_of(GetParam());
  const auto expected = golden().load(GetParam() + std::string(".greedy")).to_vector<int64_t>();
  auto tokens = golden().load("prompt").to_vector<int64_t>();
  const auto made = generate(
      *model, tokens,
      {.max_tokens = static_cast<int64_t>(expected.size() - tokens.size()), .temperature = 0});
  tokens.insert(tokens.end(), made.begin(), made.end());
  EXPECT_EQ(tokens, expected);
}

TEST_P(EveryCase, AFolderWrittenHereSaysWhatThatOfTransformersSays) {
  const auto model = model_of(GetParam());
  TestFolder folder;
  model->save_pretrained(folder.path("copy"), "20KB");
  EXPECT_TRUE(std::filesystem::exists(folder.path("copy/model.safetensors.index.json")));
  Json there = read_json(golden_path(cases().at(GetParam()).at("folder")) + "/config.json");
  const Json here = read_json(folder.path("copy/config.json"));
  if (const Json& rope = cases().at(GetParam()).at("rope_parameters"); !rope.is_null()) {
    there["rope_parameters"] = rope;
  }
  for (const auto& [key, value] : there.items()) {
    // Of transformers alone, or its defaults again.
    if (key == "transformers_version" || key == "use_cache" || key == "pad_token_id" ||
        key == "pretraining_tp" || key == "layer_types") {
      continue;
    }
    ASSERT_TRUE(here.contains(key)) << key;
    EXPECT_EQ(here.at(key), value) << key;
  }
  const auto again = Llama::from_pretrained(folder.path("copy"));
  const Tensor ids = golden().load("input_ids");
  EXPECT_EQ((*again)(ids).logits.to_vector(), (*model)(ids).logits.to_vector());
  const StateDict weights = load_weights(folder.path("copy"));
  for (const auto& [name, tensor] :
       load_weights(golden_path(cases().at(GetParam()).at("folder")))) {
    EXPECT_EQ(weights.at(name).to_vector(), tensor.to_vector()) << name;
  }
}

TEST_P(EveryCase, PiecesOfATextReadIntoTheCacheGiveTheLogitsOfTheWhole) {
  if (std::string(GetParam()) == "dynamic") return;  // its frequencies go by each call's length
  const NoGradGuard no_grad;
  const auto model = model_of(GetParam());
  const Tensor ids = golden().load("input_ids");
  const auto whole = (*model)(ids).logits.to_vector();
  llama::KvCache cache(model->config, 2, 22);
  TensorList pieces;
  for (int64_t begin = 0; const int64_t size : {3, 1, 8, 1, 9}) {
    pieces.push_back(
        (*model)(ids.narrow(1, begin, size).contiguous(), Tensor(), false, &cache).logits);
    begin += size;
  }
  EXPECT_EQ(cache.length(), 22);
  EXPECT_EQ(difference(cat(pieces, 1), whole, 1e-5 * largest(whole)), "");
  EXPECT_THROW((*model)(ids.narrow(1, 0, 1), Tensor(), false, &cache), ShapeError);
}

INSTANTIATE_TEST_SUITE_P(Llama, EveryCase,
                         testing::Values("llama", "mistral", "qwen2", "linear", "dynamic"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Llama, FieldsOfTransformers4AreReadToo) {
  Json config = read_json(golden_path("llama/config.json"));
  const LlamaConfig expected = LlamaConfig::read(golden_path("llama/config.json"));
  config["rope_scaling"] = config["rope_parameters"];
  config["rope_theta"] = config["rope_scaling"]["rope_theta"];
  config["rope_scaling"]["type"] = config["rope_scaling"]["rope_type"];
  for (const char* key : {"rope_type", "rope_theta"}) config["rope_scaling"].erase(key);
  config.erase("rope_parameters");
  TestFolder folder;
  folder.write("config.json", config.dump());
  const LlamaConfig old = LlamaConfig::read(folder.path("config.json"));
  EXPECT_EQ(old.rotary.theta, 500);
  EXPECT_EQ(old.rotary.scaling, nn::RotaryScaling::kLlama3);
  EXPECT_EQ(old.rotary.context, expected.rotary.context);
  EXPECT_EQ(old.rotary.factor, expected.rotary.factor);
  EXPECT_EQ(old.rotary.high_freq_factor, expected.rotary.high_freq_factor);
}

// transformers' Qwen3Attention: a norm of each head's queries and keys, before they are turned.
TEST(Llama, AQwen3NormalisesQueriesAndKeysOfEachHead) {
  Llama model(
      {.kind = "qwen3", .width = 32, .inner = 48, .layers = 1, .head_dim = 16, .head_norms = true});
  const llama::Attention& attention = model.model.layers.at<llama::DecoderLayer>(0).self_attn;
  EXPECT_EQ(attention.q_norm->weight.shape(), Shape{16});
  const Tensor ids = randint(0, 256, {2, 9}, kI64, RandomStream{5, 0});
  const Tensor before = model(ids).logits.detach();
  const auto change = [&](const Tensor& weight, double factor) {
    const NoGradGuard no_grad;
    mul_(weight, Scalar(factor));
    return max(abs(model(ids).logits - before)).item();
  };
  EXPECT_LT(change(attention.q_proj->weight, 4), 1e-3) << "only directions count";
  EXPECT_LT(change(attention.k_proj->weight, 3), 1e-3);
  EXPECT_GT(change(attention.q_norm->weight, 3), 1e-3);
  TestFolder folder;
  model.save_pretrained(folder.path("copy"));
  const auto again = Llama::from_pretrained(folder.path("copy"));
  EXPECT_EQ(again->config.kind, "qwen3");
  EXPECT_EQ((*again)(ids).logits.to_vector(), model(ids).logits.to_vector());
}

TEST(Llama, WhatTheModelDoesNotKnowIsNamed) {
  const auto refused = [](const Json& change, const std::string& why) {
    Json config = read_json(golden_path("qwen2/config.json"));
    config.update(change);
    TestFolder folder;
    folder.write("config.json", config.dump());
    const std::string path = folder.path("config.json");
    const std::string message = message_of<Error>([&] { LlamaConfig::read(path); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
    EXPECT_NE(message.find("config.json"), std::string::npos) << message;
  };
  refused({{"model_type", "gemma3n"}}, "gemma3n");
  refused({{"model_type", "gemma3"}}, "text_config");
  refused({{"hidden_act", "relu"}}, "hidden_act");
  refused({{"rope_parameters", {{"rope_type", "axial"}}}}, "axial");
  refused({{"rope_parameters", {{"rope_type", "yarn"}}}}, "'factor'");
  refused({{"rope_parameters", {{"rope_type", "linear"}, {"factor", "2"}}}}, "factor");
  refused({{"layer_types", {"sliding_attention", "chunked_attention"}}}, "chunked_attention");
  refused({{"layer_types", {"sliding_attention"}}}, "layer_types");
  refused({{"quantization_config", {{"bits", 4}}}}, "quantization_config");
  refused({{"attention_bias", true}}, "attention_bias");
  refused({{"use_bidirectional_attention", true}}, "use_bidirectional_attention");
  refused({{"num_key_value_heads", 3}}, "num_key_value_heads");
  refused({{"hidden_size", -4}}, "hidden_size");
  refused({{"head_dim", 7}}, "even number");
}

TEST(Llama, AConfigThatAsksForMoreThanTheWeightsHoldIsRefusedBeforeItIsMade) {
  TestFolder folder;
  Llama::from_pretrained(golden_path("mistral"))->save_pretrained(folder.path("model"));
  Json config = read_json(folder.path("model/config.json"));
  config["vocab_size"] = int64_t{1} << 30;
  folder.write("model/config.json", config.dump());
  EXPECT_THROW(Llama::from_pretrained(folder.path("model")), FormatError);
}

TEST(Llama, AdaptersLearnWhileTheBaseStaysAndMergeIntoTheSameModel) {
  const auto model = model_of("qwen2");
  const auto before = model->model.embed_tokens.weight.to_vector();
  nn::add_lora(*model, {.names = {"all-linear"}, .rank = 2, .alpha = 4});
  optim::AdamW optimizer(nn::trainable_parameters(*model), {.lr = 0.02});
  const Tensor ids = golden().load("input_ids");
  const double first = loss_of(*model, ids).item();
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    loss_of(*model, ids).backward();
    optimizer.step();
  }
  const double last = loss_of(*model, ids).item();
  EXPECT_LT(last, 0.7 * first);
  EXPECT_EQ(model->model.embed_tokens.weight.to_vector(), before);
  TestFolder folder;
  nn::save_lora(*model, folder.path("adapter"));
  const auto fresh = model_of("qwen2");
  nn::load_lora(*fresh, folder.path("adapter"));
  EXPECT_NEAR(loss_of(*fresh, ids).item(), last, 1e-6 * last);
  nn::merge_lora(*fresh);
  nn::remove_lora(*fresh);
  fresh->save_pretrained(folder.path("merged"));
  EXPECT_NEAR(loss_of(*Llama::from_pretrained(folder.path("merged")), ids).item(), last,
              1e-5 * last);
}

// ---- What config.json leaves unsaid --------------------------------------------------------------

// The config of a golden folder with fields taken away (discarded) or changed.
LlamaConfig config_with(const std::string& name, const Json& changes,
                        const std::vector<std::string>& without = {}) {
  Json config = read_json(golden_path(name + "/config.json"));
  config.update(changes);
  for (const std::string& field : without) config.erase(field);
  TestFolder folder;
  folder.write("config.json", config.dump());
  return LlamaConfig::read(folder.path("config.json"));
}

TEST(Llama, FieldsThatAreNotThereAreThoseOfTransformersClasses) {
  EXPECT_EQ(config_with("mistral", Json::object(), {"sliding_window"}).window, 4096);
  EXPECT_EQ(config_with("mistral", {{"sliding_window", nullptr}}).window, 0);
  EXPECT_EQ(config_with("qwen2", Json::object(), {"sliding_window", "layer_types"}).window, 4096);
  EXPECT_EQ(config_with("qwen2", {{"sliding_window", nullptr}}).window, 0);
  EXPECT_EQ(config_with("qwen2", {{"use_sliding_window", false}}).window, 0);
  EXPECT_EQ(config_with("qwen2", {{"use_sliding_window", nullptr}}).window, 0);
  EXPECT_EQ(config_with("qwen2", Json::object(), {"use_sliding_window"}).window, 0);
  EXPECT_EQ(config_with("qwen2", Json::object(), {"max_window_layers", "layer_types"}).windowed,
            std::vector<bool>(2, false));
  EXPECT_EQ(config_with("qwen2", {{"max_window_layers", 0}}, {"layer_types"}).window_of(0), 4);
  for (const auto& [name, context, keys, begin] :
       {std::tuple("llama", 2048, 4, 1), std::tuple("mistral", 131072, 8, 1),
        std::tuple("qwen2", 32768, 32, -1)}) {
    const LlamaConfig config = config_with(
        name, {{"num_attention_heads", 32}, {"head_dim", 8}, {"rope_parameters", nullptr}},
        {"max_position_embeddings", "bos_token_id", "eos_token_id"});
    EXPECT_EQ(config.context, context) << name;
    EXPECT_EQ(config.begin_of_text, begin) << name;
    EXPECT_EQ(config.end_of_text.empty(), begin < 0) << name;
    EXPECT_EQ(
        config_with(name, {{"num_attention_heads", 32}, {"head_dim", 8}}, {"num_key_value_heads"})
            .keys(),
        keys == 4 ? 32 : keys)
        << name;
  }
}

TEST(Llama, HowPositionsTurnIsReadAsTransformersReadsIt) {
  const auto rotary = [](const Json& changes) { return config_with("mistral", changes).rotary; };
  const auto theta = [&](const Json& changes) { return rotary(changes).theta; };
  EXPECT_EQ(theta({{"rope_parameters", {{"rope_theta", 700}}}}), 700);
  EXPECT_EQ(theta({{"rope_parameters", Json::object()}, {"rope_theta", 800}}), 800);
  EXPECT_EQ(theta({{"rope_parameters", nullptr}, {"rope_scaling", Json::object()}}), 10000);
  EXPECT_EQ(theta({{"rope_parameters", {{"rope_theta", 700}}}, {"rope_scaling", nullptr}}), 700);
  const Json linear = {{"type", "linear"}, {"factor", 3}};
  EXPECT_EQ(rotary({{"rope_parameters", Json::object()}, {"rope_scaling", linear}}).factor, 3);
  EXPECT_EQ(rotary({{"rope_parameters", {{"rope_type", "linear"}, {"factor", 3}}},
                    {"rope_scaling", linear}})
                .factor,
            3);
  const auto refused = [&](const Json& changes, const std::string& why) {
    const std::string message = message_of<FormatError>([&] { rotary(changes); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    const auto only = [&](const Json& value) {
      Json changes = {{"rope_parameters", nullptr}};
      changes[field] = value;
      return changes;
    };
    for (const char* type : {"linear", "dynamic", "llama3"}) {
      refused(only({{"rope_type", type}}), "'factor'");
      refused(only({{"type", type}, {"factor", nullptr}}), "'factor'");
    }
    refused(only({{"rope_type", "llama3"}, {"factor", 2}}), "'low_freq_factor'");
    refused(only({{"factor", 2}}), "rope_type");
    refused(only("linear"), field);
    EXPECT_THROW(rotary(only({{"full_attention", {{"rope_theta", 5}}}})), UnsupportedError);
    EXPECT_THROW(rotary(only({{"rope_theta", 700}, {"partial_rotary_factor", 0.5}})),
                 UnsupportedError);
  }
  refused({{"rope_parameters", {{"rope_theta", 700}}}, {"rope_scaling", linear}}, "contradict");
  refused({{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2}}}, {"rope_scaling", linear}},
          "contradict");
  refused({{"tie_word_embeddings", "true"}}, "tie_word_embeddings");
}

// ---- Heads that config.json ties -----------------------------------------------------------------

TEST(Llama, AHeadThatIsTiedInTheConfigAloneIsOneOfItsOwn) {
  const Tensor ids = golden().load("input_ids");
  TestFolder folder;
  auto tensors = load_safetensors(golden_path("qwen2/model.safetensors"));
  const auto save_with = [&](const Tensor& head) {
    tensors["lm_head.weight"] = head;
    std::filesystem::create_directories(folder.path("model"));
    save_safetensors(folder.path("model/model.safetensors"), tensors, {{"format", "pt"}});
    std::filesystem::copy_file(golden_path("qwen2/config.json"), folder.path("model/config.json"),
                               std::filesystem::copy_options::overwrite_existing);
    testing::internal::CaptureStderr();
    auto model = Llama::from_pretrained(folder.path("model"));
    return std::pair(std::move(model), testing::internal::GetCapturedStderr());
  };
  const Tensor table = tensors.at("model.embed_tokens.weight");
  const auto [same, silence] = save_with(table.clone());
  EXPECT_TRUE(same->lm_head.weight.is(same->model.embed_tokens.weight));
  EXPECT_EQ(silence, "");

  const Tensor other = table * 2;
  const auto [apart, warning] = save_with(other);
  EXPECT_NE(warning.find("tie_word_embeddings"), std::string::npos) << warning;
  EXPECT_NE(warning.find("at [0, 0]"), std::string::npos) << warning;
  EXPECT_EQ(apart->lm_head.weight.to_vector(), other.to_vector());
  EXPECT_EQ(apart->model.embed_tokens.weight.to_vector(), table.to_vector());
  EXPECT_FALSE(apart->config.tied);
  const auto doubled = (*same)(ids).logits * 2;
  EXPECT_EQ((*apart)(ids).logits.to_vector(), doubled.to_vector());
  apart->save_pretrained(folder.path("copy"));
  EXPECT_FALSE(LlamaConfig::read(folder.path("copy/config.json")).tied);

  // A file with the head alone has the table, too.
  tensors.erase("model.embed_tokens.weight");
  const auto [alone, nothing] = save_with(table);
  EXPECT_EQ((*alone)(ids).logits.to_vector(), (*same)(ids).logits.to_vector());
  EXPECT_EQ(nothing, "");
}

TEST(Llama, AnAdapterThatIsMergedIntoATiedWeightComesBackWithItsFolder) {
  const Tensor ids = golden().load("input_ids");
  for (const char* const adapted : {"lm_head", "embed_tokens"}) {
    const auto model = model_of("qwen2");
    const auto before = (*model)(ids).logits.to_vector();
    nn::add_lora(*model, {.names = {adapted}, .rank = 2, .alpha = 4});
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : nn::trainable_parameters(*model)) {
      tensor.copy_(full(tensor.shape(), 0.25));
    }
    nn::merge_lora(*model);
    nn::remove_lora(*model);
    const auto merged = (*model)(ids).logits.to_vector();
    EXPECT_NE(merged, before) << adapted;
    TestFolder folder;
    model->save_pretrained(folder.path("merged"));
    EXPECT_FALSE(LlamaConfig::read(folder.path("merged/config.json")).tied) << adapted;
    testing::internal::CaptureStderr();
    EXPECT_EQ((*Llama::from_pretrained(folder.path("merged")))(ids).logits.to_vector(), merged);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << adapted;
  }
}

TEST(Llama, ATextEndsAtAnyOfItsEnds) {
  const auto whole = model_of("llama");
  const auto prompt = golden().load("prompt").to_vector<int64_t>();
  const auto made = generate(*whole, prompt, {.max_tokens = 8, .temperature = 0});
  ASSERT_EQ(made.size(), 8U);
  LlamaConfig config = whole->config;
  config.end_of_text = {60, made[3]};
  Llama model(config);
  model.load_state_dict(whole->state_dict());
  const auto shorter = generate(model, prompt, {.max_tokens = 8, .temperature = 0});
  EXPECT_EQ(shorter, std::vector<int64_t>(made.begin(), made.begin() + 3));
  EXPECT_THROW(generate(model, {}, {}), ValueError);
}

TEST(Llama, ATextEndsWhereTheCallerSaysSo) {
  const auto model = model_of("llama");
  const auto prompt = golden().load("prompt").to_vector<int64_t>();
  std::vector<int64_t> seen;
  const auto made =
      generate(*model, prompt, {.max_tokens = 8, .temperature = 0}, [&](int64_t token) {
        seen.push_back(token);
        return seen.size() < 3;
      });
  EXPECT_EQ(made.size(), 3U);
  EXPECT_EQ(seen, made);
}

}  // namespace
}  // namespace tessera::nn::models::test_llama
