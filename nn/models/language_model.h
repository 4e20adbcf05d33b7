// What generation and evaluation need of a model that predicts the next token, whichever it is.
//
//     nn::models::Llama llama({.layers = 2});
//     nn::models::LanguageModel one = nn::models::language_model(llama);
//     nn::models::LanguageModel any = nn::models::LanguageModel::from_pretrained("folder");
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/kv_cache.h>
#include <tessera/nn/models/llama.h>

namespace tessera::nn::models {

struct LanguageModel {
  ModuleBase* module = nullptr;  // lives longer than this, unless `owner` has it
  std::shared_ptr<ModuleBase> owner = {};
  // Logits for tokens [B, T] behind a cache (or null): [B, T, V], or [B, 1, V] of the last tokens.
  std::function<Tensor(const Tensor& tokens, bool last_only, KvCache* cache, const Tensor& padding)>
      logits = {};
  KvCacheShape cache = {};        // without batch and capacity
  const Tensor* table = nullptr;  // the model's, of tokens
  int64_t vocab_size = 0;
  std::vector<int64_t> ends = {};  // any of them ends a text
  int64_t context = 0;             // the length that the model was made for
  bool is_limited = false;         // longer texts are an error, as of GPT-2's table of positions
  // Rotary positions of the type longrope turn otherwise in longer texts: keys in a cache are
  // calculated again where a text grows past this. 0: never.
  int64_t turns_anew_after = 0;

  // Those of the model as it is now, however it was converted and moved.
  DType dtype() const { return table->dtype(); }
  const Device& device() const { return table->device(); }
  // A folder of transformers, GPT-2 or Llama-like. UnsupportedError for other model types.
  static LanguageModel from_pretrained(const std::string& folder);
};
LanguageModel language_model(Gpt& model);
LanguageModel language_model(Llama& model);

// Puts a model into evaluation mode while it lives. Threads that share a model do that before, and
// then it writes nothing.
class EvaluationMode {
 public:
  explicit EvaluationMode(ModuleBase& module)
      : module_(module), was_training_(module.is_training()) {
    if (was_training_) module.eval();
  }
  ~EvaluationMode() {
    if (was_training_) module_.train();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  ModuleBase& module_;
  const bool was_training_;
};

// As f32 in rows on the CPU, which may be those of the model.
Tensor host_logits(const Tensor& logits);

// Texts that grow by a token at a time, beside a cache. Shorter ones are padded at the left.
class GrowingTexts {
 public:
  // Room for `more` tokens behind each. cache_dtype: of keys and values, kU8 for 8 bits. ValueError:
  // no text, an empty one, or one that would get longer than a limited model can read.
  GrowingTexts(const LanguageModel& model, std::vector<std::vector<int64_t>> texts, int64_t more,
               std::optional<DType> cache_dtype);

  size_t size() const { return texts_.size(); }
  const std::vector<int64_t>& operator[](size_t i) const { return texts_[i]; }
  void push(size_t i, int64_t token) { texts_[i].push_back(token); }
  // Text i is what text rows[i] was; the number of texts may change.
  void select(const std::vector<int64_t>& rows);
  // Reads what all texts, equally often, got since the last call.
  void read();
  // For the token that follows a text, after read(). [V], may be written to.
  std::span<float> logits(size_t i);

 private:
  Tensor padding() const;

  const LanguageModel& model_;
  std::vector<std::vector<int64_t>> texts_;
  std::vector<int64_t> padding_;  // of each text
  KvCache cache_;
  Tensor logits_;  // host_logits()
};

}  // namespace tessera::nn::models
