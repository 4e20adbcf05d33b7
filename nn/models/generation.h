// Text from a model, token by token, with a cache of keys and values.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>

namespace tessera::nn::models {

struct GenerateOptions {
  int64_t max_tokens = 100;  // newly generated tokens
  double temperature = 1;    // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely; 0: all
  double top_p = 1;          // only the most likely tokens with this total probability
  uint64_t seed = 0;
  bool stop_at_end = true;  // at the model's end_of_text, which is not returned
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
// Draws one token from the distribution of logits, as a pure function of (options, position). The
// first of equal logits counts as larger, as in transformers' greedy search.
int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position);

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

}  // namespace tessera::nn::models
