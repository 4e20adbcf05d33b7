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
  int64_t max_tokens = 100;  // new ones
  double temperature = 1;    // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely; 0: all
  double top_p = 1;          // only the most likely that together have this probability
  uint64_t seed = 0;
  bool stop_at_end = true;  // at the model's end_of_text, which is not returned
  // Of a model that several ranks hold in parts, who all call generate(), each for a text of its
  // own. Asked before each token with whether this rank wants one; while the answer is true, the
  // same on all ranks, the model is called, also for a rank whose text has come to its end: the
  // others' calls need its parts (transformers' synced_gpus). distributed::any_rank() is such an
  // answer. Without it ranks have to make texts of the same length: calls that some leave out are a
  // DistributedError.
  std::function<bool(bool wants)> together = {};
};

// ValueError for an empty prompt and for options that cannot work.
void check_request(std::span<const int64_t> prompt, const GenerateOptions& options);
// One token of a distribution given by logits, a pure function of (options, position). Of equal
// logits the first counts as larger, as in transformers' greedy search.
int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position);

// The new tokens. `each` sees every one as it is made and may end generation by returning false.
// Past the model's context the window moves: the latest half of it is read again. The model is put
// into evaluation mode for the call. Throws ValueError for an empty prompt.
std::vector<int64_t> generate(Gpt& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each = {});

// The new tokens; of the options `together` has no meaning here. `each` sees every one as it is
// made and may end generation by returning false. The model is put into evaluation mode for the
// call; threads that share a model do that before, and find it so. ValueError: an empty prompt.
std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each = {});

}  // namespace tessera::nn::models
