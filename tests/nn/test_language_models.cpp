// What is done with language models: tokens drawn from logits, perplexity and likelihoods, GGUF.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/models/evaluation.h>
#include <tessera/nn/models/generation.h>
#include <tessera/nn/models/gguf.h>

#include "autograd/op_checks.h"
#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::nn::models::test_language_models {
namespace {

using tests::difference;
using tests::golden_path;
using tests::largest;

std::unique_ptr<Llama> decoder(const std::string& name) {
  auto model = Llama::from_pretrained(golden_path("decoders/" + name));
  model->to(kF32);
  return model;
}

// ---- Drawing -------------------------------------------------------------------------------------

std::vector<float> some_logits() {
  std::vector<float> logits;
  for (int i = 0; i < 40; ++i) logits.push_back(static_cast<float>(2.5 * std::sin(1.7 * i + 0.3)));
  return logits;
}

// What transformers' processors leave of a distribution, one after the other.
std::vector<double> distribution(const std::vector<float>& logits, const GenerateOptions& options) {
  std::vector<size_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p;  // in that order
  for (const size_t i : order) p.push_back(std::exp(logits[i] / options.temperature));
  const auto normalise = [&] {
    double sum = 0;
    for (const double each : p) sum += each;
    for (double& each : p) each /= sum;
  };
  normalise();
  if (options.top_k > 0) {
    for (size_t i = static_cast<size_t>(options.top_k); i < p.size(); ++i) p[i] = 0;
    normalise();
  }
  double before = 0;
  for (double& each : p) {
    const double own = each;
    if (before >= options.top_p) each = 0;
    before += own;
  }
  normalise();
  for (double& each : p) each = each < options.min_p * p[0] ? 0 : each;
  normalise();
  std::vector<double> result(logits.size());
  for (size_t i = 0; i < order.size(); ++i) result[order[i]] = p[i];
  return result;
}

TEST(Sampling, FrequenciesAreThoseOfTheDistributionByChiSquare) {
  const std::vector<float> logits = some_logits();
  const GenerateOptions kinds[] = {{},
                                   {.temperature = 0.6},
                                   {.top_k = 7},
                                   {.top_p = 0.7},
                                   {.min_p = 0.3},
                                   {.temperature = 1.5, .top_k = 20, .top_p = 0.8, .min_p = 0.2}};
  for (const GenerateOptions& options : kinds) {
    for (const int64_t text : {0, 3}) {
      const std::vector<double> expected = distribution(logits, options);
      constexpr int64_t kDraws = 20000;
      std::vector<int64_t> counts(logits.size());
      for (int64_t i = 0; i < kDraws; ++i) {
        ++counts[static_cast<size_t>(sample(logits, options, i, text))];
      }
      double chi_square = 0;
      int kept = -1;  // degrees of freedom
      for (size_t i = 0; i < counts.size(); ++i) {
        if (expected[i] == 0) {
          EXPECT_EQ(counts[i], 0) << i;
          continue;
        }
        const double wanted = expected[i] * kDraws;
        chi_square += std::pow(static_cast<double>(counts[i]) - wanted, 2) / wanted;
        ++kept;
      }
      // Wilson and Hilferty: the cube root of chi^2 / k is nearly normal. 3.7 deviations: 1e-4.
      const double part = 2.0 / (9 * kept);
      EXPECT_LT(std::cbrt(chi_square / kept), 1 - part + 3.7 * std::sqrt(part))
          << options.top_k << " " << options.top_p << " " << options.min_p;
      EXPECT_GT(std::cbrt(chi_square / kept), 1 - part - 3.7 * std::sqrt(part));
    }
  }
}

TEST(Sampling, TextsOfABatchDrawOtherNumbersAndTheSeedDecidesThem) {
  const auto model = decoder("phi3_part");
  const std::vector<std::vector<int64_t>> prompts(3, {5, 6, 7});
  const auto draw = [&](uint64_t seed) {
    return generate(language_model(*model), prompts, {.max_tokens = 12, .seed = seed});
  };
  const auto made = draw(1);
  EXPECT_NE(made[0], made[1]);
  EXPECT_NE(made[1], made[2]);
  EXPECT_EQ(draw(1), made);
  EXPECT_NE(draw(2), made);
  // The first text of a batch is that of its prompt alone.
  EXPECT_EQ(generate(*model, prompts[0], {.max_tokens = 12, .seed = 1}), made[0]);
}

TEST(Sampling, RepetitionIsDividedOutAboveZeroAndMultipliedBelow) {
  std::vector<float> logits = {2, -2, 3, 1};
  penalise_repetition(logits, std::vector<int64_t>{0, 1, 1, 0}, 2);
  EXPECT_EQ(logits, (std::vector<float>{1, -4, 3, 1}));
  for (const GenerateOptions& wrong :
       {GenerateOptions{.min_p = 1.5}, {.min_p = -1}, {.repetition_penalty = 0}, {.top_k = -1}}) {
    EXPECT_THROW(check_request(std::vector<int64_t>{1}, wrong), ValueError);
  }
}

// ---- Evaluation ----------------------------------------------------------------------------------

// log softmax(logits)[target] at each place of a text, one call for each.
double by_hand(Llama& model, const std::vector<int64_t>& text, size_t begin, size_t end,
               size_t first) {
  const std::vector<int64_t> part(text.begin() + static_cast<int64_t>(begin),
                                  text.begin() + static_cast<int64_t>(end));
  const auto count = static_cast<int64_t>(part.size());
  const NoGradGuard no_grad;
  const Tensor all = log_softmax(model(tensor(part, {1, count})).logits, -1);
  double sum = 0;
  for (size_t i = first; i < end; ++i) {
    sum += all.select(0, 0)
               .select(0, static_cast<int64_t>(i - begin) - 1)
               .select(0, part[i - begin])
               .item();
  }
  return sum;
}

std::vector<int64_t> some_text(size_t count) {
  std::vector<int64_t> text;
  for (size_t i = 0; i < count; ++i) text.push_back(static_cast<int64_t>((i * i * 7 + 3 * i) % 61));
  return text;
}

TEST(Evaluation, EachTokenOfATextCountsOnceBehindWhatItsWindowHas) {
  const auto model = decoder("mistral_full");
  const std::vector<int64_t> text = some_text(23);
  // Windows [0, 10), [4, 14), [8, 18), [12, 22), [16, 23).
  double expected = by_hand(*model, text, 0, 10, 1) + by_hand(*model, text, 4, 14, 10) +
                    by_hand(*model, text, 8, 18, 14) + by_hand(*model, text, 12, 22, 18) +
                    by_hand(*model, text, 16, 23, 22);
  for (const int64_t batch : {1, 3}) {
    const Perplexity found =
        perplexity(language_model(*model), text, {.window = 10, .stride = 4, .batch_size = batch});
    EXPECT_EQ(found.tokens, 22);
    EXPECT_NEAR(found.negative_log_likelihood, -expected, 1e-4);
    EXPECT_NEAR(found.perplexity(), std::exp(-expected / 22), 1e-3);
  }
  const Perplexity whole = perplexity(language_model(*model), text);
  EXPECT_NEAR(whole.negative_log_likelihood, -by_hand(*model, text, 0, 23, 1), 1e-4);
  const LanguageModel any = language_model(*model);
  EXPECT_THROW(perplexity(any, {text.data(), 1}), ValueError);
  EXPECT_THROW(perplexity(any, text, {.window = 4, .stride = 4}), ValueError);
  EXPECT_THROW(perplexity(any, text, {.window = 1}), ValueError);
}

TEST(Evaluation, ContinuationsHaveTheLikelihoodOfTheirTokensWhateverIsBesideThem) {
  const auto model = decoder("qwen2_layers");
  const std::vector<int64_t> context = {4, 9, 33};
  const auto greedy = generate(*model, context, {.max_tokens = 4, .temperature = 0});
  const std::vector<Continuation> all = {
      {context, {7}}, {context, greedy}, {{1}, {2, 3, 4, 5, 6, 7, 8}}};
  for (const int64_t batch : {1, 2, 8}) {
    const auto found = continuation_likelihoods(language_model(*model), all, batch);
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<int64_t> text = all[i].context;
      text.insert(text.end(), all[i].tokens.begin(), all[i].tokens.end());
      EXPECT_NEAR(found[i].log_likelihood,
                  by_hand(*model, text, 0, text.size(), all[i].context.size()), 1e-4);
      EXPECT_EQ(found[i].is_greedy, i == 1) << i;
    }
  }
  EXPECT_THROW(continuation_likelihoods(language_model(*model), {{{}, {1}}}), ValueError);
  EXPECT_THROW(continuation_likelihoods(language_model(*model), {{{1}, {}}}), ValueError);
}

// ---- What generation asks of a model ------------------------------------------------------------

TEST(LanguageModels, HaveTheDtypeOfTheModelAfterItWasConverted) {
  const auto model = decoder("qwen2_layers");
  const LanguageModel any = language_model(*model);
  EXPECT_EQ(any.dtype(), kF32);
  model->to(kBF16);
  EXPECT_EQ(any.dtype(), kBF16);
  Gpt gpt({.vocab_size = 16, .context = 8, .width = 8, .layers = 1, .heads = 2});
  const LanguageModel other = language_model(gpt);
  gpt.to(kF16);
  EXPECT_EQ(other.dtype(), kF16);
}

// ---- GGUF ----------------------------------------------------------------------------------------

struct Gguf {
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  struct Entry {
    std::vector<uint64_t> sizes;
    uint32_t type;
    uint64_t offset;
  };
  std::map<std::string, Entry> tensors;
  std::string data;  // from the first tensor on
};

Gguf read_gguf(const std::string& bytes) {
  size_t at = 0;
  const auto take = [&]<class T>(T) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    at += sizeof value;
    return value;
  };
  const auto text = [&] {
    const auto size = static_cast<size_t>(take(uint64_t{}));
    at += size;
    return bytes.substr(at - size, size);
  };
  Gguf file;
  EXPECT_EQ(bytes.substr(0, 4), "GGUF");
  at = 4;
  EXPECT_EQ(take(uint32_t{}), 3U);
  const uint64_t tensors = take(uint64_t{}), values = take(uint64_t{});
  for (uint64_t i = 0; i < values; ++i) {
    const std::string key = text();
    switch (take(uint32_t{})) {
      case 4:
        file.numbers[key] = take(uint32_t{});
        break;
      case 6:
        file.numbers[key] = take(float{});
        break;
      case 8:
        file.texts[key] = text();
        break;
      default:
        ADD_FAILURE() << key;
    }
  }
  for (uint64_t i = 0; i < tensors; ++i) {
    Gguf::Entry& entry = file.tensors[text()];
    entry.sizes.resize(take(uint32_t{}));
    for (uint64_t& size : entry.sizes) size = take(uint64_t{});
    entry.type = take(uint32_t{});
    entry.offset = take(uint64_t{});
    EXPECT_EQ(entry.offset % 32, 0U);
  }
  file.data = bytes.substr((at + 31) / 32 * 32);
  return file;
}

TEST(GgufFile, HoldsTheSizesAndWeightsOfTheModelWithLlamaCppsNames) {
  TestFolder folder;
  const auto model = decoder("gemma2");
  save_gguf(*model, folder.path("model.gguf"), {.type = GgufType::kF32});
  const Gguf file = read_gguf(folder.read("model.gguf"));
  EXPECT_EQ(file.texts.at("general.architecture"), "gemma2");
  EXPECT_EQ(file.numbers.at("gemma2.block_count"), 3);
  EXPECT_EQ(file.numbers.at("gemma2.attention.head_count_kv"), 2);
  EXPECT_EQ(file.numbers.at("gemma2.attention.key_length"), 8);
  EXPECT_EQ(file.numbers.at("gemma2.attention.sliding_window"), 5);
  EXPECT_EQ(file.numbers.at("gemma2.attn_logit_softcapping"), 2);
  EXPECT_EQ(file.tensors.size(), model->named_parameters().size());
  const auto expect = [&](const char* name, const Tensor& tensor) {
    const Gguf::Entry& entry = file.tensors.at(name);
    EXPECT_EQ(entry.type, 0U);
    EXPECT_EQ(entry.sizes.front(), static_cast<uint64_t>(tensor.size(-1))) << name;
    std::vector<float> values(static_cast<size_t>(tensor.numel()));
    std::memcpy(values.data(), file.data.data() + entry.offset, 4 * values.size());
    EXPECT_EQ(values, tensor.to_vector<float>()) << name;
  };
  const auto& layer = model->model.layers.at<llama::DecoderLayer>(1);
  expect("token_embd.weight", model->model.embed_tokens.weight);
  expect("blk.1.attn_q.weight", layer.self_attn.q_proj->weight);
  expect("blk.1.ffn_down.weight", layer.mlp.down_proj.weight);
  expect("blk.1.ffn_norm.weight", layer.pre_feedforward_layernorm->weight + 1);
  expect("blk.1.post_attention_norm.weight", layer.post_attention_layernorm.weight + 1);
  expect("output.weight", model->lm_head.weight);
}

TEST(GgufFile, HeadsOfLlamaAreInterleavedAndEightBitsAreScaled) {
  TestFolder folder;
  Llama model({.width = 64, .inner = 96, .layers = 1, .heads = 4, .kv_heads = 2});
  save_gguf(model, folder.path("f16"));
  save_gguf(model, folder.path("q8"), {.type = GgufType::kQ8_0});
  save_gguf(model, folder.path("bf16"), {.type = GgufType::kBF16});
  const Gguf q8 = read_gguf(folder.read("q8")), f16 = read_gguf(folder.read("f16"));
  EXPECT_EQ(read_gguf(folder.read("bf16")).tensors.at("blk.0.ffn_up.weight").type, 30U);
  EXPECT_EQ(f16.tensors.at("blk.0.attn_q.weight").type, 1U);
  EXPECT_EQ(f16.tensors.count("output.weight"), 0U) << "the head is tied";
  const Gguf::Entry& entry = q8.tensors.at("blk.0.attn_k.weight");
  EXPECT_EQ(entry.type, 8U);
  const auto& attention = model.model.layers.at<llama::DecoderLayer>(0).self_attn;
  const auto weight = attention.k_proj->weight.to_vector<float>();
  for (size_t row = 0; row < 32; ++row) {
    // Row 2 i + j of a head of 16 is row i + 8 j.
    const size_t head = row / 16, place = row % 16, given = head * 16 + place / 2 + place % 2 * 8;
    for (size_t block = 0; block < 2; ++block) {
      const char* const bytes = q8.data.data() + entry.offset + (row * 2 + block) * 34;
      Tensor scale = empty({1}, {.dtype = kF16});
      std::memcpy(scale.data(), bytes, 2);
      float most = 0;
      for (size_t i = 0; i < 32; ++i) {
        most = std::max(most, std::abs(weight[given * 64 + block * 32 + i]));
      }
      EXPECT_NEAR(scale.item(), most / 127, most / 127 / 1000);
      for (size_t i = 0; i < 32; ++i) {
        const double value = scale.item() * static_cast<signed char>(bytes[2 + i]);
        EXPECT_NEAR(value, weight[given * 64 + block * 32 + i], 0.6 * scale.item());
      }
    }
  }
}

TEST(GgufFile, RotationsAreScaledAsLlamaCppScalesThem) {
  TestFolder folder;
  save_gguf(*decoder("llama_yarn"), folder.path("yarn"));
  const Gguf yarn = read_gguf(folder.read("yarn"));
  EXPECT_EQ(yarn.texts.at("llama.rope.scaling.type"), "yarn");
  EXPECT_EQ(yarn.numbers.at("llama.rope.scaling.factor"), 4);
  EXPECT_EQ(yarn.numbers.at("llama.rope.scaling.original_context_length"), 8);
  EXPECT_EQ(yarn.numbers.at("llama.rope.scaling.attn_factor"), 1) << "llama.cpp has yarn's own";
  save_gguf(*decoder("phi3_long"), folder.path("long"));
  const Gguf far = read_gguf(folder.read("long"));
  EXPECT_NEAR(far.numbers.at("phi3.rope.scaling.attn_factor"),
              std::sqrt(1 + std::log(32.0 / 12) / std::log(12.0)), 1e-6);
  EXPECT_EQ(far.tensors.at("rope_factors_long.weight").sizes, std::vector<uint64_t>{4});
}

TEST(GgufFile, WhatItHasNoFieldForIsRefused) {
  TestFolder folder;
  const auto refused = [&](LlamaConfig config, const std::string& why) {
    const Llama model(config);
    const std::string message =
        message_of<UnsupportedError>([&] { save_gguf(model, folder.path("model.gguf")); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
    EXPECT_FALSE(std::filesystem::exists(folder.path("model.gguf")));
  };
  const LlamaConfig small{.width = 32, .inner = 32, .layers = 1};
  LlamaConfig config = small;
  config.mlp_bias = true;
  refused(config, "mlp_bias");
  config = small;
  config.rotary = {.scaling = RotaryScaling::kDynamic, .factor = 2, .context = 128};
  refused(config, "dynamic");
  config = small;
  config.window = 8;
  refused(config, "layer_types");
}

}  // namespace
}  // namespace tessera::nn::models::test_language_models
