#include <tessera/nn/models/language_model.h>

#include <algorithm>
#include <filesystem>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/models/config_reader.h>

namespace tessera::nn::models {

LanguageModel language_model(Gpt& model) {
  const GptConfig& config = model.config;
  const Tensor& table = model.transformer.wte.weight;
  LanguageModel result{
      .module = &model,
      .logits =
          [&model](const Tensor& tokens, bool last_only, KvCache* cache, const Tensor& padding) {
            return model(tokens, Tensor(), last_only ? Logits::kLast : Logits::kAll, cache, padding)
                .logits;
          },
      .cache = {.layers = config.layers,
                .heads = config.heads,
                .width = config.width / config.heads},
      .table = &table,
      .vocab_size = config.vocab_size,
      .context = config.context,
      .is_limited = true};
  if (config.end_of_text >= 0) result.ends = {config.end_of_text};
  return result;
}

LanguageModel language_model(Llama& model) {
  const LlamaConfig& config = model.config;
  const Tensor& table = model.model.embed_tokens.weight;
  const bool is_long = config.rotary.scaling == RotaryScaling::kLongRope;
  return {
      .module = &model,
      .logits =
          [&model](const Tensor& tokens, bool last_only, KvCache* cache, const Tensor& padding) {
            return model(tokens, Tensor(), last_only, cache, padding).logits;
          },
      .cache = {.layers = config.layers, .heads = config.keys(), .width = config.head()},
      .table = &table,
      .vocab_size = config.vocab_size,
      .ends = config.end_of_text,
      .context = config.context,
      .turns_anew_after = is_long ? config.rotary.context : 0};
}

LanguageModel LanguageModel::from_pretrained(const std::string& folder) {
  const ConfigReader reader((std::filesystem::path(folder) / "config.json").string());
  const auto made = [](auto model) {
    LanguageModel result = language_model(*model);
    result.owner = std::move(model);
    return result;
  };
  if (reader.text("model_type") == "gpt2") return made(Gpt::from_pretrained(folder));
  return made(Llama::from_pretrained(folder));
}

namespace {

std::vector<std::vector<int64_t>> checked(std::vector<std::vector<int64_t>> texts) {
  TS_CHECK(!texts.empty(), "generate", "there is no prompt; give at least one");
  for (const auto& text : texts) {
    TS_CHECK(!text.empty(), "generate", "the prompt is empty; give at least one token");
  }
  return texts;
}

int64_t longest_of(const std::vector<std::vector<int64_t>>& texts) {
  size_t longest = 0;
  for (const auto& text : texts) longest = std::max(longest, text.size());
  return static_cast<int64_t>(longest);
}

KvCacheShape room_for(const LanguageModel& model, const std::vector<std::vector<int64_t>>& texts,
                      int64_t more) {
  KvCacheShape shape = model.cache;
  shape.batch = static_cast<int64_t>(texts.size());
  shape.capacity = longest_of(texts) + std::max<int64_t>(more, 0);
  TS_CHECK(!model.is_limited || shape.capacity <= model.context, "generate",
           "the model reads texts of ", model.context, " tokens, and the longest prompt with ",
           more, " more has ", shape.capacity, "; ask for fewer");
  return shape;
}

}  // namespace

Tensor host_logits(const Tensor& logits) { return logits.to(kF32).cpu().contiguous(); }

GrowingTexts::GrowingTexts(const LanguageModel& model, std::vector<std::vector<int64_t>> texts,
                           int64_t more, std::optional<DType> cache_dtype)
    : model_(model),
      texts_(checked(std::move(texts))),
      cache_(room_for(model, texts_, more), cache_dtype.value_or(model.dtype()), model.device()) {
  const int64_t longest = longest_of(texts_);
  for (const auto& text : texts_) padding_.push_back(longest - static_cast<int64_t>(text.size()));
}

Tensor GrowingTexts::padding() const {
  if (std::ranges::all_of(padding_, [](int64_t each) { return each == 0; })) return {};
  const auto count = static_cast<int64_t>(padding_.size());
  return tensor(std::span<const int64_t>(padding_), {count}).to(model_.device());
}

void GrowingTexts::select(const std::vector<int64_t>& rows) {
  const auto pick = [&](const auto& from) {
    auto to = std::decay_t<decltype(from)>();
    for (const int64_t row : rows) to.push_back(from[static_cast<size_t>(row)]);
    return to;
  };
  texts_ = pick(texts_);
  padding_ = pick(padding_);
  const auto count = static_cast<int64_t>(rows.size());
  cache_.select(tensor(std::span<const int64_t>(rows), {count}).to(model_.device()));
}

void GrowingTexts::read() {
  const NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(texts_.size());
  const int64_t total = padding_[0] + static_cast<int64_t>(texts_[0].size());
  const int64_t limit = model_.turns_anew_after;
  if (limit > 0 && cache_.length() <= limit && total > limit) cache_.clear();
  const int64_t past = cache_.length(), fresh = total - past;
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < texts_.size(); ++i) {
    // Any token does for padding, which nobody sees.
    for (int64_t at = past; at < total; ++at) {
      tokens.push_back(at < padding_[i] ? 0 : texts_[i][static_cast<size_t>(at - padding_[i])]);
    }
  }
  const Tensor input = tensor(std::span<const int64_t>(tokens), {count, fresh}).to(model_.device());
  logits_ = host_logits(model_.logits(input, true, &cache_, padding()));
}

std::span<float> GrowingTexts::logits(size_t i) {
  const auto size = static_cast<size_t>(model_.vocab_size);
  return {static_cast<float*>(logits_.data()) + i * size, size};
}

}  // namespace tessera::nn::models
