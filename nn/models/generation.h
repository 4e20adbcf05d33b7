// Text from a model, token by token, with a cache of keys and values: the most likely token, drawn
// ones, or the most likely sequence of a beam (beam_search.h).
//
//     nn::models::Llama llama({.layers = 2});
//     const std::vector<int64_t> prompt = {15043, 306};
//     nn::models::generate(llama, prompt, {.max_tokens = 40, .top_p = 0.9}, [&](int64_t token) {
//       std::printf("%d ", int(token));
//       return true;
//     });
//     const auto any = nn::models::language_model(llama);
//     auto answers = nn::models::generate(any, {prompt, {1}}, {.temperature = 0});
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <tessera/nn/models/language_model.h>

namespace tessera::nn::models {

struct GenerateOptions {
  int64_t max_tokens = 100;  // newly generated tokens
  double temperature = 1;    // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely; 0: all
  double top_p = 1;          // only the most likely tokens with this total probability
  double min_p = 0;          // only tokens with this part of the most likely one's probability
  // Logits of tokens that are in the text are divided by it where they are above 0, else multiplied
  // (Keskar et al. 2019).
  double repetition_penalty = 1;
  uint64_t seed = 0;
  bool stop_at_end = true;             // at the model's end_of_text, which is not returned
  std::vector<int64_t> stop_ids = {};  // these end a text, too, and are not returned
  // Of the keys and values that are kept: absent, that of the model; kU8: 8 bits (kv_cache.h).
  std::optional<DType> cache_dtype = {};
  // For a sharded model, where all ranks call generate(), each for its own text. It is called
  // before each token with whether this rank wants one. While it returns true, the same on all
  // ranks, the model is called, also for a rank whose text has ended, since the others' calls need
  // its shards (transformers' synced_gpus). distributed::any_rank() gives such an answer. Without
  // it all ranks must generate texts of the same length: calls that some ranks skip are a
  // DistributedError.
  std::function<bool(bool wants)> together = {};
};

// ValueError for an empty prompt and for invalid options.
void check_request(std::span<const int64_t> prompt, const GenerateOptions& options);
// Draws one token from the distribution of logits, as a pure function of (options, position, text).
// Options apply in the order of transformers: temperature, top_k, top_p, min_p. The first of equal
// logits counts as larger, as in transformers' greedy search. Without a sort of the vocabulary: a
// heap gives as many tokens as take part.
int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position,
               int64_t text = 0);
// The repetition_penalty.
void penalise_repetition(std::span<float> logits, std::span<const int64_t> text, double penalty);

// Returns the new tokens. `each` sees every token as it is made and may end generation by returning
// false. Past the model's context the window moves: the latest half of it is processed again. The
// model is put into evaluation mode for the call. Throws ValueError for an empty prompt.
std::vector<int64_t> generate(Gpt& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each = {});

// Returns the new tokens; the option `together` is ignored. `each` sees every token as it is made
// and may end generation by returning false. The model is put into evaluation mode for the call;
// threads that share a model do that before. ValueError: an empty prompt.
std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each = {});

// The new tokens of each prompt, which all go through the model together: prompts of different
// lengths are padded at the left, and texts that ended are left out. The tokens are those that each
// prompt alone would get, within rounding of the logits; what is drawn for prompt i depends on
// (seed, i). The option `together` is ignored. `each` sees every token as it is made, and ends its
// text by returning false. ValueError: no prompt, an empty one, and with GPT-2 texts over its
// context.
std::vector<std::vector<int64_t>> generate(
    const LanguageModel& model, const std::vector<std::vector<int64_t>>& prompts,
    const GenerateOptions& options,
    const std::function<bool(size_t prompt, int64_t token)>& each = {});

}  // namespace tessera::nn::models
