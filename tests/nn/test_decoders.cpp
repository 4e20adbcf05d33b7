// nn::models::Llama as every kind of decoder that it reads (tests/golden/decoders): what it calculates
// and generates against transformers, its folders, its caches.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/beam_search.h>
#include <tessera/nn/models/generation.h>
#include <tessera/nn/models/gguf.h>

#include "autograd/op_checks.h"
#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::nn::models::test_decoders {
namespace {

using tests::difference;
using tests::golden_json;
using tests::golden_path;
using tests::largest;
using Json = nlohmann::json;
using Texts = std::vector<std::vector<int64_t>>;

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(golden_path("decoders.safetensors"));
  return file;
}
const Json& cases() {
  static const Json json = golden_json("decoders.json");
  return json;
}
std::string folder_of(const std::string& name) { return golden_path("decoders/" + name); }
Json config_of(const std::string& name) {
  std::ifstream file(folder_of(name) + "/config.json");
  return Json::parse(file);
}

// The files hold bf16, and all that is compared is calculated in f32.
std::unique_ptr<Llama> model_of(const std::string& name) {
  auto model = Llama::from_pretrained(folder_of(name));
  model->to(kF32);
  return model;
}
Tensor ids() { return golden().load("input_ids"); }
Tensor loss_of(Llama& model) {
  const Tensor none = full({2, 1}, -100, {.dtype = kI64});
  return model(ids(), cat({ids().narrow(1, 1, 21), none}, 1)).loss;
}

class EveryDecoder : public testing::TestWithParam<const char*> {
 protected:
  const std::string name_ = GetParam();
  const Json& golden_ = cases().at(name_);
  const std::unique_ptr<Llama> model_ = model_of(name_);
};

TEST_P(EveryDecoder, LogitsAndLossAreThoseOfTransformers) {
  const auto expected = golden().load(name_ + ".logits").to_vector();
  EXPECT_EQ(
      difference((*model_)(ids()).logits.narrow(1, 16, 6), expected, 1e-5 * largest(expected)), "");
  const double loss = golden_.at("loss");
  EXPECT_NEAR(loss_of(*model_).item(), loss, 2e-6 * loss);
}

TEST_P(EveryDecoder, GradientsHaveTheNormsThatTransformersHas) {
  loss_of(*model_).backward();
  const Json& norms = golden_.at("norms");
  EXPECT_EQ(model_->named_parameters().size(), norms.size());
  double all = 0;
  for (const auto& [name, value] : norms.items()) all = std::max(all, value.get<double>());
  for (const auto& [name, parameter] : model_->named_parameters()) {
    ASSERT_TRUE(norms.contains(name)) << name;
    const double expected = norms.at(name);
    EXPECT_NEAR(std::sqrt(square(parameter.grad()).sum().item()), expected,
                5e-5 * expected + 1e-6 * all)
        << name;
  }
}

TEST_P(EveryDecoder, AFolderWrittenHereSaysWhatThatOfTransformersSays) {
  TestFolder folder;
  model_->save_pretrained(folder.path("copy"));
  std::ifstream file(folder.path("copy/config.json"));
  const Json here = Json::parse(file), there = config_of(name_);
  for (const auto& [key, value] : there.items()) {
    // Of transformers alone, and what the model above changed.
    if (key == "transformers_version" || key == "use_cache" || key == "pretraining_tp" ||
        key == "dtype" || key == "_sliding_window_pattern" || key == "resid_pdrop" ||
        key == "embd_pdrop" || key == "sliding_window_pattern") {
      continue;
    }
    if (key == "max_window_layers") continue;  // beside layer_types it says nothing
    if (key == "use_bidirectional_attention" && (value.is_null() || value == false)) continue;
    ASSERT_TRUE(here.contains(key)) << key;
    if (key == "rope_parameters") continue;  // below: what they mean
    EXPECT_EQ(here.at(key), value) << key;
  }
  const LlamaConfig read = LlamaConfig::read(folder.path("copy/config.json"));
  EXPECT_EQ(read.rotary, model_->config.rotary);
  EXPECT_EQ(read.window_rotary, model_->config.window_rotary);
  EXPECT_EQ(read.rotated, model_->config.rotated);
  EXPECT_EQ(read.windowed, model_->config.windowed);
  const auto again = Llama::from_pretrained(folder.path("copy"));
  EXPECT_EQ((*again)(ids()).logits.to_vector(), (*model_)(ids()).logits.to_vector());
  // For tests/golden/check_saved.py.
  if (const char* const kept = std::getenv("TESSERA_DECODER_COPIES")) {
    model_->save_pretrained(std::string(kept) + "/" + name_);
    for (const auto& [type, ending] :
         {std::pair(GgufType::kF32, ".gguf"), std::pair(GgufType::kQ8_0, ".q8_0.gguf")}) {
      try {
        save_gguf(*model_, std::string(kept) + "/" + name_ + ending, {.type = type});
      } catch (const UnsupportedError& error) {
        std::printf("%s: %s\n", name_.c_str(), error.what());
      }
    }
  }
  const StateDict weights = load_weights(folder.path("copy"));
  for (const auto& [name, tensor] : load_weights(folder_of(name_))) {
    EXPECT_EQ(weights.at(name).to_vector(), tensor.to_vector()) << name;
  }
}

// ---- Generation ----------------------------------------------------------------------------------

TEST_P(EveryDecoder, PromptsOfDifferentLengthsGetTheGreedyTokensOfTransformers) {
  const Texts prompts = golden_.at("prompts");
  const GenerateOptions options{.max_tokens = 14, .temperature = 0, .stop_ids = golden_.at("ends")};
  Texts seen(prompts.size());
  const Texts made =
      generate(language_model(*model_), prompts, options, [&](size_t prompt, int64_t token) {
        seen[prompt].push_back(token);
        return true;
      });
  EXPECT_EQ(made, golden_.at("greedy").get<Texts>());
  EXPECT_EQ(seen, made);
  if (name_ == "phi3_long") return;  // a padded text is longer, and turns anew sooner
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(generate(*model_, prompts[i], options), made[i]) << i;
  }
}

TEST_P(EveryDecoder, BeamsFindTheTextsOfTransformers) {
  for (const Json& found : golden_.at("beams")) {
    const Json early = found.value("early_stopping", Json(false));
    const auto texts = beam_search(language_model(*model_), golden_.at("prompts"),
                                   {.max_tokens = 14,
                                    .num_beams = found.at("num_beams"),
                                    .length_penalty = found.value("length_penalty", 1.0),
                                    .early_stopping = early == "never" ? EarlyStopping::kNever
                                                      : early == true  ? EarlyStopping::kTrue
                                                                       : EarlyStopping::kFalse,
                                    .stop_ids = golden_.at("ends")});
    ASSERT_EQ(texts.size(), found.at("texts").size());
    for (size_t i = 0; i < texts.size(); ++i) {
      const std::string what = found.dump() + " " + std::to_string(i);
      ASSERT_FALSE(texts[i].empty()) << what;
      EXPECT_EQ(texts[i][0].tokens, found.at("texts")[i].get<std::vector<int64_t>>()) << what;
      const double score = found.at("scores")[i];
      EXPECT_NEAR(texts[i][0].score, score, 2e-5 * std::abs(score)) << what;
    }
  }
}

TEST_P(EveryDecoder, RepetitionCostsWhatItCostsInTransformers) {
  const Tensor prompt = ids().narrow(1, 0, 5).contiguous();
  const auto tokens = prompt.to_vector<int64_t>();
  const Texts prompts = {{tokens.begin(), tokens.begin() + 5}, {tokens.begin() + 5, tokens.end()}};
  const Texts made = generate(language_model(*model_), prompts,
                              {.max_tokens = 12, .temperature = 0, .repetition_penalty = 1.7});
  EXPECT_EQ(made, golden_.at("repetition").get<Texts>());
}

TEST_P(EveryDecoder, PiecesReadIntoACacheGiveTheLogitsOfTheWhole) {
  if (name_ == "phi3_long") return;  // frequencies go by each call's length
  const NoGradGuard no_grad;
  const auto whole = (*model_)(ids()).logits.to_vector();
  const auto by_pieces = [&](DType dtype) {
    llama::KvCache cache(model_->config, 2, 22, dtype);
    TensorList pieces;
    for (int64_t begin = 0; const int64_t size : {3, 1, 8, 1, 9}) {
      pieces.push_back(
          (*model_)(ids().narrow(1, begin, size).contiguous(), Tensor(), false, &cache).logits);
      begin += size;
    }
    return cat(pieces, 1);
  };
  EXPECT_EQ(difference(by_pieces(kF32), whole, 1e-5 * largest(whole)), "");
  // 8 bits: a 510th of each vector's range, and through three layers of these small models less than
  // a tenth of the logits' range; bf16 rounds by up to a 256th of each element.
  EXPECT_EQ(difference(by_pieces(kU8), whole, 0.1 * largest(whole)), "");
  EXPECT_EQ(difference(by_pieces(kBF16), whole, 0.1 * largest(whole)), "");
  EXPECT_NE(difference(by_pieces(kU8), whole, 1e-7 * largest(whole)), "");
}

// Of random weights logits lie close together, so that texts part sooner or later. 19 to 24 of these 24
// tokens are the same.
TEST_P(EveryDecoder, GreedyTextsBesideEightBitsAreMostlyThoseOfAnExactCache) {
  const Texts prompts = golden_.at("prompts").get<Texts>();
  const auto made = [&](std::optional<DType> cache) {
    return generate(
        language_model(*model_), prompts,
        {.max_tokens = 8, .temperature = 0, .stop_at_end = false, .cache_dtype = cache});
  };
  const Texts exact = made(std::nullopt), rough = made(kU8);
  size_t equal = 0, all = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    for (size_t at = 0; at < exact[i].size(); ++at, ++all) equal += exact[i][at] == rough[i][at];
  }
  EXPECT_GE(3 * equal, 2 * all) << equal << " of " << all;
}

// ---- What the library does with modules ----------------------------------------------------------

TEST_P(EveryDecoder, CheckpointedLayersGiveTheSameGradients) {
  const auto gradients = [&] {
    for (const auto& [name, parameter] : model_->named_parameters()) parameter.zero_grad();
    loss_of(*model_).backward();
    std::vector<double> all;
    for (const auto& [name, parameter] : model_->named_parameters()) {
      const auto one = parameter.grad().to_vector();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  };
  const auto plain = gradients();
  std::vector<HookHandle> handles;
  for (size_t i = 0; i < model_->model.layers.size(); ++i) {
    handles.push_back(model_->model.layers.at<llama::DecoderLayer>(i).checkpoint_calls());
  }
  EXPECT_EQ(gradients(), plain);
}

TEST_P(EveryDecoder, AdaptersHaveTheNamesOfTheModulesOfTransformers) {
  nn::add_lora(*model_, {.names = {"all-linear"}, .rank = 2, .alpha = 4});
  const bool joined = name_.starts_with("phi3");
  std::set<std::string> adapted;
  for (const auto& [name, parameter] : nn::trainable_parameters(*model_)) {
    if (const size_t at = name.find(".layers.0."); at != std::string::npos) {
      adapted.insert(name.substr(at + 10, name.find(".lora") - at - 10));
    }
  }
  EXPECT_EQ(adapted,
            joined ? std::set<std::string>({"self_attn.qkv_proj", "self_attn.o_proj",
                                            "mlp.gate_up_proj", "mlp.down_proj"})
                   : std::set<std::string>({"self_attn.q_proj", "self_attn.k_proj",
                                            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                                            "mlp.up_proj", "mlp.down_proj"}));
}

INSTANTIATE_TEST_SUITE_P(Decoders, EveryDecoder,
                         testing::Values("llama1", "llama_yarn", "mistral_heads", "mistral_full",
                                         "qwen2_layers", "qwen3", "qwen3_yarn", "gemma", "gemma2",
                                         "gemma3", "gemma3_capped", "phi3", "phi3_long",
                                         "phi3_part"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Norm, AWeightThatIsAddedToOneCountsInSixteenBitsToo) {
  nn::RMSNorm norm(64, nn::RmsNormOptions{.eps = 1e-6, .plus_one = true});
  const Tensor x = randn({8, 64}, {}, RandomStream{6, 0}).to(kBF16);
  EXPECT_EQ(norm.weight.to_vector(), std::vector<double>(64, 0.0));
  const NoGradGuard no_grad;
  norm.weight.copy_(full({64}, 0.003));
  norm.to(kBF16);
  // 1.003 is 1 in bf16.
  EXPECT_NE(norm(x).to_vector(), rms_norm(x, {64}, Tensor(), 1e-6).to_vector());
  const auto [sum, normalized] = nn::residual_rms_norm(norm, x, x);
  EXPECT_EQ(normalized.to_vector(), norm(x + x).to_vector());
}

// ---- The cache -----------------------------------------------------------------------------------

TEST(KvCache, EightBitsAreOffByAtMostA510thOfTheRangeOfAVector) {
  KvCache cache({.layers = 1, .batch = 2, .heads = 3, .capacity = 9, .width = 16}, kU8, kCpu);
  const Tensor keys = randn({2, 3, 5, 16}, {}, RandomStream{4, 0}) * 3 + 1;
  const Tensor values = full({2, 3, 5, 16}, 0.3);
  const auto held = cache.append(0, keys, values);
  const Tensor range = amax(keys, {-1}, true) - amin(keys, {-1}, true);
  EXPECT_LE(max(abs(held.keys - keys) / range).item(), 1.0 / 510 + 1e-6);
  EXPECT_GE(max(abs(held.keys - keys) / range).item(), 0.9 / 510);
  EXPECT_EQ(held.values.to_vector(), values.to_vector()) << "of one number nothing is lost";
  EXPECT_EQ(cache.bytes(), 2 * 2 * 3 * 9 * (16 + 8));
  EXPECT_THROW(KvCache({.layers = 1}, kI64, kCpu), DTypeError);
}

// Few queries read the bytes as they lie: the same numbers as those of what the bytes mean, and no
// further from those of what was appended than the header says.
TEST(KvCache, AttentionToEightBitsKeepsToItsBound) {
  const NoGradGuard no_grad;
  constexpr double kEps = 1.1920929e-7;
  constexpr int64_t kBatch = 2, kHeads = 6, kKeyHeads = 2;
  for (const auto& [past, count, width] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 8, 64}, {37, 1, 64}, {300, 3, 20}, {63, 1, 7}}) {
    const int64_t total = past + count;
    const KvCacheShape shape{
        .layers = 1, .batch = kBatch, .heads = kKeyHeads, .capacity = total + 5, .width = width};
    const auto random = [&](int64_t heads, int64_t tokens, uint64_t seed) {
      return randn({kBatch, heads, tokens, width}, {}, RandomStream{seed, 0});
    };
    const Tensor query = random(kHeads, count, 1);
    const Tensor keys = random(kKeyHeads, total, 2) + 0.5, values = random(kKeyHeads, total, 3) * 2;
    const VisibleKeys visible{.past = past, .count = count};
    const AttentionOptions options{.mask = mask_of(visible, kCpu), .enable_gqa = true};
    KvCache cache(shape, kU8, kCpu);
    if (past > 0) cache.append(0, keys.narrow(2, 0, past), values.narrow(2, 0, past));
    cache.advance(past);
    const Tensor k = keys.narrow(2, past, count), v = values.narrow(2, past, count);
    const Tensor output = cache.attend(0, query, k, v, options);
    const auto held = cache.append(0, k, v);  // the same once more, converted
    const std::string what = std::to_string(past) + " + " + std::to_string(count);
    // Of one calculation beside the other: rounding of scores, of up to twice the sums' terms.
    const Tensor meant = scaled_dot_product_attention(query, held.keys, held.values, options);
    const double most_value = max(abs(held.values)).item(), most_key = max(abs(keys)).item();
    const double query_sum = max(abs(query).sum({-1})).item();
    const double scale = 1 / std::sqrt(static_cast<double>(width));
    const double rounding = 4 * kEps *
                            (std::sqrt(static_cast<double>(width)) * scale * query_sum * most_key +
                             std::sqrt(static_cast<double>(total))) *
                            most_value;
    EXPECT_LE(max(abs(output - meant)).item(), rounding) << what;
    // Beside what was appended.
    const auto step = [](const Tensor& x) {
      return max(amax(x, {-1}) - amin(x, {-1})).item() / 255;
    };
    const double score = scale * step(keys) / 2 * query_sum;
    const double bound = std::expm1(2 * score) * most_value + step(values) / 2 + rounding;
    const Tensor exact = scaled_dot_product_attention(query, keys, values, options);
    EXPECT_LE(max(abs(output - exact)).item(), bound) << what;
    EXPECT_GE(max(abs(output - exact)).item(), 1e-4) << what << ": nothing was in 8 bits";
  }
}

TEST(KvCache, AttentionToEightBitsKnowsDtypesAndGradients) {
  const KvCacheShape shape{.layers = 1, .batch = 1, .heads = 2, .capacity = 9, .width = 16};
  const Tensor x = randn({1, 2, 3, 16}, {}, RandomStream{5, 0});
  std::vector<double> of_f32;
  for (const DType dtype : {kF32, kF64, kBF16, kF16}) {
    KvCache cache(shape, kU8, kCpu);
    const Tensor given = x.to(dtype);
    const Tensor output = cache.attend(0, given, given, given, {});
    EXPECT_EQ(output.dtype(), dtype);
    if (dtype == kF32) of_f32 = output.to_vector();
    // Numbers of 16 bits may fall to the next of 255 steps: a 60th, of a range of 4; and bf16 rounds by
    // up to a 256th of each.
    EXPECT_EQ(difference(output, of_f32, dtype == kF64 ? 1e-5 : 0.03), "") << dtype;
  }
  KvCache cache(shape, kU8, kCpu);
  const Tensor query = x.clone().set_requires_grad();
  cache.attend(0, query, x, x, {}).sum().backward();
  EXPECT_GT(max(abs(query.grad())).item(), 0);
  cache.advance(3);
  EXPECT_THROW(
      cache.attend(0, randn({1, 2, 7, 16}), randn({1, 2, 7, 16}), randn({1, 2, 7, 16}), {}),
      ShapeError);
}

TEST(KvCache, SelectedRowsAreThoseTextsAndTheirNumberMayChange) {
  for (const DType dtype : {kF32, kBF16, kU8}) {
    KvCache cache({.layers = 2, .batch = 2, .heads = 1, .capacity = 4, .width = 2}, dtype, kCpu);
    const Tensor keys = arange(0, 12, 1, kF32).view({2, 1, 3, 2});
    for (const size_t layer : {0, 1}) cache.append(layer, keys, keys * 2);
    cache.advance(3);
    cache.select(tensor(std::vector<int64_t>{1, 1, 0}, {3}));
    const Tensor next = full({3, 1, 1, 2}, 9);
    for (const size_t layer : {0, 1}) {
      const auto held = cache.append(layer, next, next);
      EXPECT_EQ(
          difference(held.keys.select(0, 0).narrow(1, 0, 3), keys.select(0, 1).to_vector(), 0.01),
          "");
      EXPECT_EQ(difference(held.values.select(0, 2).narrow(1, 0, 3),
                           (keys.select(0, 0) * 2).to_vector(), 0.01),
                "");
      EXPECT_EQ(held.keys.narrow(2, 3, 1).to_vector(), next.to_vector());
    }
  }
}

// ---- Padding -------------------------------------------------------------------------------------

TEST(Padding, TokensBehindItAreThoseOfTheTextAloneAlsoInALoss) {
  for (const char* name : {"mistral_heads", "gemma2", "phi3_part"}) {
    const auto model = model_of(name);
    const Tensor alone = ids().narrow(0, 0, 1).narrow(1, 4, 9).contiguous();
    const Tensor padded = cat({full({1, 3}, 7, {.dtype = kI64}), alone}, 1);
    const Tensor padding = tensor(std::vector<int64_t>{3}, {1});
    const auto expected = (*model)(alone).logits.to_vector();
    const Tensor logits = (*model)(padded, Tensor(), false, nullptr, padding).logits;
    EXPECT_EQ(difference(logits.narrow(1, 3, 9), expected, 1e-5 * largest(expected)), "") << name;
    EXPECT_THROW((*model)(padded, Tensor(), false, nullptr, zeros({2}, {.dtype = kI64})),
                 ShapeError);
  }
}

TEST(Padding, GptReadsPromptsOfDifferentLengthsTogether) {
  Gpt model({.vocab_size = 40, .context = 24, .width = 16, .layers = 2, .heads = 2});
  const NoGradGuard no_grad;
  for (const auto& [name, parameter] : model.named_parameters()) {
    parameter.copy_(randn(parameter.shape(), {}, RandomStream{std::hash<std::string>{}(name), 0}));
  }
  const Texts prompts = {{3, 4, 5, 6, 7}, {8, 9}, {10, 11, 12}};
  const GenerateOptions options{.max_tokens = 8, .temperature = 0};
  const Texts together = generate(language_model(model), prompts, options);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(generate(model, prompts[i], options), together[i]) << i;
  }
  EXPECT_THROW(generate(language_model(model), prompts, {.max_tokens = 20}), ValueError);
}

}  // namespace
}  // namespace tessera::nn::models::test_decoders
