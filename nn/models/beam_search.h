// Beam search: of all continuations of a prompt those with the largest sum of log probabilities, as
// far as a number of partial ones at a time finds them.
//
//     const auto any = nn::models::LanguageModel::from_pretrained("folder");
//     auto found = nn::models::beam_search(any, {{15043, 306}}, {.num_beams = 4});
//     std::vector<int64_t> best = found[0][0].tokens;  // of the first prompt
//
// Which ones are kept, and when a search ends, is as in transformers 5 (GenerationMixin), so both
// find the same texts.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/nn/models/language_model.h>

namespace tessera::nn::models {

// When a search ends that has num_beams ended texts.
enum class EarlyStopping {
  kFalse,  // once no running beam would be better if it ended now
  kTrue,   // at once
  kNever,  // once no running beam could get better, at the longest length if length_penalty is above 0
};
struct BeamOptions {
  int64_t max_tokens = 100;
  int64_t num_beams = 4;
  // The score of a text is the sum of log probabilities over length^length_penalty, where length
  // counts new tokens with the one that ends it. Above 0 prefers longer texts.
  double length_penalty = 1;
  EarlyStopping early_stopping = EarlyStopping::kFalse;
  double repetition_penalty = 1;       // of log probabilities, as in transformers
  bool stop_at_end = true;             // at the model's ends
  std::vector<int64_t> stop_ids = {};  // and at these
  std::optional<DType> cache_dtype = {};
};
struct Hypothesis {
  std::vector<int64_t> tokens;  // new ones, without the one that ended them
  double score = 0;
};
// For each prompt its ended texts, the best first, at most num_beams. A text that gets max_tokens
// long ends there. ValueError: as generate(), and num_beams below 1 or so many that
// the vocabulary has no 2 (with n ends 1 + n) candidates for each.
std::vector<std::vector<Hypothesis>> beam_search(const LanguageModel& model,
                                                 const std::vector<std::vector<int64_t>>& prompts,
                                                 const BeamOptions& options);

}  // namespace tessera::nn::models
