// nn::models::Gpt: against transformers, its cache, its files, its way through training.
#include <gtest/gtest.h>

#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>

#include <tessera/autograd/autograd.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/generation.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/summary.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "autograd/op_checks.h"
#include "golden_files.h"
#include "nn/call_counts.h"

namespace tessera::nn::models::test_gpt2 {
namespace {

using tests::difference;
using tests::golden_json;
using tests::golden_path;
using tests::largest;

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(golden_path("gpt2.safetensors"));
  return file;
}

std::unique_ptr<Gpt> golden_model() { return Gpt::from_pretrained(golden_path("gpt2")); }

// The token ids and the ids one further.
struct Shifted {
  explicit Shifted(const Tensor& ids)
      : inputs(ids.narrow(1, 0, ids.size(1) - 1).contiguous()),
        targets(ids.narrow(1, 1, ids.size(1) - 1).contiguous()) {}
  Tensor inputs, targets;
};

bool is_transposed(const std::string& name) {
  return name.find(".c_") != std::string::npos && name.ends_with(".weight");
}

class Folder {
 public:
  Folder()
      : path_(std::filesystem::path(testing::TempDir()) /
              ("tessera_gpt2_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(Gpt2, LogitsAndLossAreThoseOfTransformers) {
  const auto model = golden_model();
  const Tensor ids = golden().load("input_ids");
  const auto logits = golden().load("logits").to_vector();
  EXPECT_EQ(difference((*model)(ids).logits, logits, 1e-5 * largest(logits)), "");
  const Shifted batch(ids);
  const double loss = golden_json("gpt2.json")["loss"];
  EXPECT_NEAR((*model)(batch.inputs, batch.targets).loss.item(), loss, 1e-6 * loss);
  const GptOutput both = (*model)(batch.inputs, batch.targets, Logits::kAll);
  EXPECT_NEAR(both.loss.item(), loss, 1e-6 * loss);
  EXPECT_EQ(both.logits.shape(), (Shape{2, 20, 97}));
}

TEST(Gpt2, EveryGradientIsWithinAHundredThousandthOfItsLargest) {
  const Shifted batch(golden().load("input_ids"));
  for (const Logits logits : {Logits::kWithoutLoss, Logits::kAll}) {
    const auto model = golden_model();
    (*model)(batch.inputs, batch.targets, logits).loss.backward();
    for (const auto& [name, parameter] : model->named_parameters()) {
      const Tensor reference = golden().load("grad." + name);
      const Tensor gradient =
          is_transposed(name) ? parameter.grad().transpose(0, 1) : parameter.grad();
      const auto values = reference.to_vector();
      EXPECT_EQ(difference(gradient, values, 1e-5 * largest(values)), "") << name;
    }
  }
}

TEST(Gpt2, TenClippedAdamWStepsFollowTorch) {
  const auto reference = golden_json("gpt2.json");
  const auto& options = reference["steps"];
  const auto model = golden_model();
  NamedTensors matrices, others;
  for (const auto& named : model->named_parameters()) {
    (named.tensor.dim() >= 2 ? matrices : others).push_back(named);
  }
  optim::AdamWOptions decayed{.lr = options["lr"],
                              .betas = {options["betas"][0], options["betas"][1]},
                              .eps = options["eps"],
                              .weight_decay = options["weight_decay"]};
  optim::AdamWOptions plain = decayed;
  plain.weight_decay = 0;
  optim::AdamW optimizer({{matrices, decayed}, {others, plain}});
  const Tensor batches = golden().load("batches");
  for (int64_t step = 0; step < batches.size(0); ++step) {
    const Shifted batch(batches.select(0, step));
    const Tensor loss = (*model)(batch.inputs, batch.targets).loss;
    loss.backward();
    const double norm =
        optim::clip_grad_norm(model->parameters(), options["max_norm"], {.fold_into = &optimizer})
            .item();
    optimizer.step();
    optimizer.zero_grad();
    const double expected = reference["losses"][static_cast<size_t>(step)];
    EXPECT_NEAR(loss.item(), expected, 1e-5 * expected) << "step " << step;
    const double expected_norm = reference["norms"][static_cast<size_t>(step)];
    EXPECT_NEAR(norm, expected_norm, 1e-5 * expected_norm) << "step " << step;
  }
}

TEST(Gpt2, GreedyTokensWithTheCacheAreThoseOfTransformers) {
  const auto model = golden_model();
  const auto prompt = golden().load("prompt").to_vector<int64_t>();
  auto expected = golden().load("greedy").to_vector<int64_t>();
  expected.erase(expected.begin(), expected.begin() + static_cast<int64_t>(prompt.size()));
  const auto made = generate(*model, prompt,
                             {.max_tokens = static_cast<int64_t>(expected.size()),
                              .temperature = 0,
                              .stop_at_end = false});
  EXPECT_EQ(made, expected);
}

TEST(Gpt2, TheCacheGivesTheLogitsOfTheWholeText) {
  const auto model = golden_model();
  model->eval();
  const NoGradGuard no_grad;
  const Tensor ids = golden().load("input_ids");
  const Tensor whole = (*model)(ids).logits;
  gpt2::KvCache cache(model->config, 2);
  // In parts of 7, 5 and single tokens.
  for (int64_t begin = 0, count = 7; begin < ids.size(1); begin += count) {
    if (begin > 0) count = begin == 7 ? 5 : 1;
    const Tensor part =
        (*model)(ids.narrow(1, begin, count).contiguous(), Tensor(), Logits::kAll, &cache).logits;
    const auto expected = whole.narrow(1, begin, count).contiguous().to_vector();
    EXPECT_EQ(difference(part, expected, 1e-5 * largest(expected)), "") << "at " << begin;
  }
  EXPECT_EQ(cache.length(), ids.size(1));
}

TEST(Gpt2, TheCacheRefusesMoreThanItsContext) {
  const auto model = golden_model();
  gpt2::KvCache cache(model->config, 1);
  const NoGradGuard no_grad;
  (*model)(zeros({1, 32}, {.dtype = kI64}), Tensor(), Logits::kLast, &cache);
  EXPECT_THROW((*model)(zeros({1, 1}, {.dtype = kI64}), Tensor(), Logits::kLast, &cache),
               ShapeError);
}

TEST(Gpt2, GenerationGoesOnBeyondTheContext) {
  const auto model = golden_model();
  const std::vector<int64_t> prompt = {5};
  const GenerateOptions options{.max_tokens = 80, .top_k = 5, .seed = 3, .stop_at_end = false};
  const auto made = generate(*model, prompt, options);
  EXPECT_EQ(made.size(), 80u);
  EXPECT_EQ(made, generate(*model, prompt, options)) << "the same seed, the same text";
  EXPECT_TRUE(model->is_training()) << "the mode is as before";
}

TEST(Gpt2, SamplingFollowsTemperatureTopKAndTopP) {
  const std::vector<float> logits = {0, 2, 1, 2};
  EXPECT_EQ(sample(logits, {.temperature = 0}, 0), 1) << "the first of equals";
  for (const size_t place : {0, 15, 16, 511, 512, 1023, 1029}) {  // in blocks, and behind the last
    std::vector<float> many(1030, -2);
    many[place] = -1;
    if (place > 0) many[place - 1] = std::numeric_limits<float>::quiet_NaN();
    many.back() = -1;
    EXPECT_EQ(sample(many, {.temperature = 0}, 0), static_cast<int64_t>(place));
  }
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(sample(std::vector<float>{kNone, kNone}, {.temperature = 0}, 0), 0);
  std::array<int, 4> counts{};
  for (int i = 0; i < 4000; ++i) {
    ++counts[static_cast<size_t>(sample(logits, {.temperature = 1}, i))];
  }
  const double e = std::exp(1), total = 1 + e + 2 * e * e;
  EXPECT_NEAR(counts[0] / 4000.0, 1 / total, 0.02);
  EXPECT_NEAR(counts[1] / 4000.0, e * e / total, 0.04);
  EXPECT_NEAR(counts[2] / 4000.0, e / total, 0.03);
  for (int i = 0; i < 200; ++i) {
    const int64_t of_two = sample(logits, {.top_k = 2}, i);
    EXPECT_TRUE(of_two == 1 || of_two == 3);
    EXPECT_EQ(sample(logits, {.top_p = 0.01}, i), 1);
    EXPECT_NE(sample(logits, {.top_p = 0.9}, i), 0);
  }
}

// The same token as a walk down the sorted vocabulary finds.
TEST(Gpt2, SamplingRanksTokensAsASortDoes) {
  std::vector<float> logits;
  for (int i = 0; i < 500; ++i) logits.push_back(static_cast<float>(i * 37 % 101) / 16);  // ties
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t id) { return logits[id]; });
  const auto rank_of = [&](int64_t id) {
    return std::ranges::find(order, static_cast<size_t>(id)) - order.begin();
  };
  for (const GenerateOptions& options :
       {GenerateOptions{}, GenerateOptions{.top_k = 7}, GenerateOptions{.top_p = 0.5},
        GenerateOptions{.temperature = 3, .top_k = 100, .top_p = 0.8},
        GenerateOptions{.top_k = 1000}}) {
    const size_t most = options.top_k > 0 ? static_cast<size_t>(options.top_k) : order.size();
    std::vector<double> weights;
    for (size_t i = 0; i < std::min(most, order.size()); ++i) {
      weights.push_back(std::exp(logits[order[i]] / options.temperature));
    }
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    double kept = 0;
    size_t count = 0;
    while (count < weights.size() && kept < options.top_p * total) kept += weights[count++];
    std::ptrdiff_t most_seen = 0;
    double sum = 0, expected = 0;
    constexpr int kDraws = 2000;
    for (int i = 0; i < kDraws; ++i) {
      const auto rank = rank_of(sample(logits, options, i));
      most_seen = std::max(most_seen, rank);
      sum += static_cast<double>(rank);
    }
    for (size_t i = 0; i < count; ++i) expected += static_cast<double>(i) * weights[i] / kept;
    EXPECT_LT(most_seen, static_cast<std::ptrdiff_t>(count));
    // The mean of kDraws ranks, whose deviation is below their largest.
    EXPECT_NEAR(sum / kDraws, expected, 4 * static_cast<double>(count) / std::sqrt(kDraws));
  }
}

TEST(Gpt2, SavesWhatItLoads) {
  const Folder folder;
  const auto model = golden_model();
  model->save_pretrained(folder.path());
  const auto original = load_safetensors(golden_path("gpt2/model.safetensors"));
  const auto saved = load_safetensors(folder.file("model.safetensors"));
  ASSERT_EQ(saved.size(), original.size());
  for (const auto& [name, tensor] : original) {
    ASSERT_TRUE(saved.contains(name)) << name;
    EXPECT_EQ(saved.at(name).shape(), tensor.shape()) << name;
    EXPECT_EQ(saved.at(name).to_vector(), tensor.to_vector()) << name;
  }
  const GptConfig config = GptConfig::read(folder.file("config.json"));
  EXPECT_EQ(config.vocab_size, 97);
  EXPECT_EQ(config.context, 32);
  EXPECT_EQ(config.layers, 2);
  EXPECT_EQ(SafeTensorsFile(folder.file("model.safetensors")).metadata().at("format"), "pt");
}

TEST(Gpt2, LoadsNamesWithoutPrefixAndPassesOverMaskBuffers) {
  const Folder folder;
  std::map<std::string, Tensor> renamed;
  for (const auto& [name, tensor] : load_safetensors(golden_path("gpt2/model.safetensors"))) {
    renamed[name.substr(std::string("transformer.").size())] = tensor;
  }
  renamed["h.0.attn.bias"] = ones({1, 1, 32, 32});
  renamed["h.0.attn.masked_bias"] = tensor({-1e4});
  save_safetensors(folder.file("model.safetensors"), renamed);
  std::filesystem::copy_file(golden_path("gpt2/config.json"), folder.file("config.json"));
  const auto model = Gpt::from_pretrained(folder.path());
  EXPECT_EQ(model->transformer.wte.weight.to_vector(),
            golden_model()->transformer.wte.weight.to_vector());
}

TEST(Gpt2, AHeadThatIsTiedInTheConfigAloneIsOneOfItsOwn) {
  const Folder folder;
  auto tensors = load_safetensors(golden_path("gpt2/model.safetensors"));
  const Tensor table = tensors.at("transformer.wte.weight");
  std::filesystem::copy_file(golden_path("gpt2/config.json"), folder.file("config.json"));
  const auto loaded_with = [&](const Tensor& head) {
    tensors["lm_head.weight"] = head;
    save_safetensors(folder.file("model.safetensors"), tensors);
    testing::internal::CaptureStderr();
    auto model = Gpt::from_pretrained(folder.path());
    return std::pair(std::move(model), testing::internal::GetCapturedStderr());
  };
  const auto [same, silence] = loaded_with(table.clone());
  EXPECT_TRUE(same->lm_head.weight.is(same->transformer.wte.weight));
  EXPECT_EQ(silence, "");
  const auto [apart, warning] = loaded_with(table * 2);
  EXPECT_NE(warning.find("tie_word_embeddings"), std::string::npos) << warning;
  const Tensor ids = golden().load("input_ids");
  const auto expected = ((*same)(ids).logits * 2).to_vector();
  EXPECT_EQ((*apart)(ids).logits.to_vector(), expected);
  EXPECT_EQ(apart->named_parameters().size(), same->named_parameters().size() + 1);

  apart->save_pretrained(folder.path());
  EXPECT_FALSE(GptConfig::read(folder.file("config.json")).tied);
  EXPECT_EQ((*Gpt::from_pretrained(folder.path()))(ids).logits.to_vector(), expected);
}

TEST(Gpt2, AnAdapterThatIsMergedIntoATiedWeightComesBackWithItsFolder) {
  const Tensor ids = golden().load("input_ids");
  for (const char* const adapted : {"lm_head", "wte"}) {
    const auto model = golden_model();
    const NoGradGuard no_grad;
    add_lora(*model, {.names = {adapted}, .rank = 2, .alpha = 4});
    for (const auto& [name, tensor] : trainable_parameters(*model)) {
      tensor.copy_(full(tensor.shape(), 0.25));
    }
    merge_lora(*model);
    remove_lora(*model);
    const auto merged = (*model)(ids).logits.to_vector();
    const Folder folder;
    model->save_pretrained(folder.path());
    EXPECT_FALSE(GptConfig::read(folder.file("config.json")).tied) << adapted;
    EXPECT_EQ((*Gpt::from_pretrained(folder.path()))(ids).logits.to_vector(), merged) << adapted;
  }
}

TEST(Gpt2, BadFoldersAreErrorsThatNameFileAndField) {
  const Folder folder;
  const auto message = [&](const std::string& config) -> std::string {
    std::ofstream(folder.file("config.json")) << config;
    try {
      Gpt::from_pretrained(folder.path());
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THROW(Gpt::from_pretrained(folder.file("missing")), IoError);
  EXPECT_NE(message("{").find("config.json"), std::string::npos);
  EXPECT_NE(message("[]").find("JSON object"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "gpt2"})").find("'vocab_size' is missing"),
            std::string::npos);
  EXPECT_NE(message(R"({"model_type": "bert"})").find("'model_type'"), std::string::npos);
  const std::string fields = R"("vocab_size": 97, "n_positions": 32, "n_embd": 48, "n_layer": 2)";
  EXPECT_NE(message("{" + fields + R"(, "n_head": 5})").find("multiple of heads"),
            std::string::npos);
  EXPECT_NE(message("{" + fields + R"(, "n_head": "4"})").find("'n_head' must be an integer"),
            std::string::npos);
  EXPECT_NE(message("{" + fields + R"(, "n_head": 4})").find("model.safetensors"),
            std::string::npos);
  std::map<std::string, Tensor> short_one = {{"transformer.wte.weight", ones({96, 48})}};
  save_safetensors(folder.file("model.safetensors"), short_one);
  const std::string report = message("{" + fields + R"(, "n_head": 4})");
  EXPECT_NE(report.find("the state has f32[96, 48] cpu"), std::string::npos) << report;
  EXPECT_NE(report.find("transformer.ln_f.bias"), std::string::npos) << report;
}

TEST(Gpt2, InitialWeightsHaveGpt2sDeviations) {
  manual_seed(5);
  const Gpt model({.vocab_size = 500, .context = 16, .width = 64, .layers = 8, .heads = 4});
  const auto deviation = [&](const std::string& name) {
    const auto values = model.get_parameter(name).to_vector();
    double sum = 0;
    for (const double v : values) sum += v * v;
    return std::sqrt(sum / static_cast<double>(values.size()));
  };
  EXPECT_NEAR(deviation("transformer.wte.weight"), 0.02, 0.0005);
  EXPECT_NEAR(deviation("transformer.h.3.mlp.c_fc.weight"), 0.02, 0.0005);
  EXPECT_NEAR(deviation("transformer.h.3.mlp.c_proj.weight"), 0.02 / 4, 0.0002);
  EXPECT_EQ(deviation("transformer.h.3.mlp.c_fc.bias"), 0);
  EXPECT_EQ(deviation("transformer.h.3.ln_1.weight"), 1);
}

TEST(Gpt2, LearnsASequenceInBf16WithMasterWeights) {
  manual_seed(1);
  Gpt model({.vocab_size = 16, .context = 16, .width = 32, .layers = 2, .heads = 2});
  model.to(kBF16);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  std::vector<int64_t> ids(34);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * i % 11);
  const Shifted batch(tensor(std::span<const int64_t>(ids), {2, 17}));
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const Tensor loss = model(batch.inputs, batch.targets).loss;
    loss.backward();
    optim::clip_grad_norm(model.parameters(), 1, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    (step == 0 ? first : last) = loss.item();
  }
  EXPECT_NEAR(first, std::log(16.0), 0.2);
  EXPECT_LT(last, 0.3);
}

// Hooks on each module: each is called, and no fused op goes around it.
TEST(Gpt2, EveryModuleIsCalledOnceAForwardAndTheResultsAreThoseOfTheFusedOps) {
  const auto fused = golden_model(), called = golden_model();
  const Shifted batch(golden().load("input_ids"));
  tests::CallCounts counts(*called);
  EXPECT_EQ(counts.size(), 24u);  // model, transformer, embeddings, 2 blocks of 9, ln_f, head
  const double loss = (*fused)(batch.inputs, batch.targets).loss.item();
  const Tensor hooked = (*called)(batch.inputs, batch.targets).loss;
  EXPECT_EQ(counts.not_called(1), "");
  EXPECT_NEAR(hooked.item(), loss, 1e-6 * loss);

  (*fused)(batch.inputs, batch.targets).loss.backward();
  hooked.backward();
  for (const auto& [name, parameter] : fused->named_parameters()) {
    const auto values = parameter.grad().to_vector();
    EXPECT_EQ(difference(called->get_parameter(name).grad(), values, 1e-5 * largest(values)), "")
        << name;
  }
  EXPECT_EQ(counts.not_called(0), "");

  for (const Logits logits : {Logits::kAll, Logits::kLast}) {
    const auto expected = (*fused)(batch.inputs, batch.targets, logits).logits.to_vector();
    const GptOutput output = (*called)(batch.inputs, batch.targets, logits);
    EXPECT_EQ(difference(output.logits, expected, 1e-5 * largest(expected)), "");
    EXPECT_NEAR(output.loss.item(), loss, 1e-6 * loss);
    EXPECT_EQ(counts.not_called(1), "");
  }

  const std::vector<int64_t> prompt = {3, 1, 4};
  const GenerateOptions greedy{.max_tokens = 6, .temperature = 0};
  const auto expected = generate(*fused, prompt, greedy, [](int64_t) { return true; });
  int forwards = 0;
  EXPECT_EQ(generate(*called, prompt, greedy, [&](int64_t) { return ++forwards > 0; }), expected);
  EXPECT_EQ(forwards, 6);
  EXPECT_EQ(counts.not_called(forwards), "");
}

TEST(Gpt2, DropoutIsForTrainingAloneAndFollowsTheSeed) {
  const GptConfig config{.vocab_size = 16, .context = 8, .width = 16, .layers = 2, .heads = 2};
  GptConfig dropping = config;
  dropping.dropout = 0.5;
  Gpt model(dropping), plain(config);
  const Tensor ids = ones({2, 8}, {.dtype = kI64});
  const NoGradGuard no_grad;
  const auto logits = [&](uint64_t seed) {
    manual_seed(seed);
    return model(ids).logits.to_vector();
  };
  EXPECT_EQ(logits(3), logits(3));
  EXPECT_NE(logits(3), logits(4));
  model.eval();
  EXPECT_EQ(logits(3), plain(ids).logits.to_vector());
}

TEST(Gpt2, TheHeadIsALinearOfTheEmbeddingsWeight) {
  const auto model = golden_model();
  EXPECT_TRUE(model->lm_head.weight.is(model->transformer.wte.weight));
  EXPECT_TRUE(model->state_dict().contains("lm_head.weight"));
  const Folder folder;
  model->save_pretrained(folder.path());
  EXPECT_FALSE(SafeTensorsFile(folder.file("model.safetensors")).contains("lm_head.weight"));
  const auto copy = model->clone();
  EXPECT_TRUE(copy->lm_head.weight.is(copy->transformer.wte.weight));
}

TEST(Gpt2, SummaryCountsParametersAndArithmeticWithoutAllocating) {
  nn::ParameterDefaultsGuard guard({.device = kMeta});
  Gpt model({});
  const nn::Summary summary =
      nn::summary(model, empty({2, 1024}, {.dtype = kI64, .device = kMeta}));
  EXPECT_EQ(summary.parameters, 124439808);  // GPT-2 small, head tied
  // 2 N per token for the products (without position embeddings), and attention.
  const double tokens = 2 * 1024;
  const double products = 2 * tokens * (124439808 - 1024 * 768 - 12 * 13 * 768);
  EXPECT_GT(summary.flops, products * 0.99);
  EXPECT_LT(summary.flops, products + 12 * 4 * tokens * 1024 * 768 * 1.01);
  EXPECT_NE(summary.table(2).find("wte: Embedding"), std::string::npos) << summary.table(2);
}

}  // namespace
}  // namespace tessera::nn::models::test_gpt2
