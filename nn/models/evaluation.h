// What a language model makes of given texts: its perplexity, and the likelihood of continuations.
//
//     const auto any = nn::models::LanguageModel::from_pretrained("folder");
//     const std::vector<int64_t> text = {15043, 306, 626}, question = {1, 2}, yes = {3}, no = {4};
//     const auto found = nn::models::perplexity(any, text, {.window = 1024, .stride = 512});
//     std::printf("%f\n", found.perplexity());
//     auto answers = nn::models::continuation_likelihoods(any, {{question, yes}, {question, no}});
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <tessera/nn/models/language_model.h>

namespace tessera::nn::models {

struct PerplexityOptions {
  int64_t window = 0;  // tokens that are read together; 0: the model's context
  // A window begins so many tokens behind the one before it, and of its tokens only those count that
  // no window before had: smaller gives each token more context and takes longer. 0: half a window.
  int64_t stride = 0;
  int64_t batch_size = 1;  // windows that go through the model together
};
struct Perplexity {
  double negative_log_likelihood = 0;  // the sum over `tokens`
  int64_t tokens = 0;                  // all but the text's first, which nothing precedes
  double perplexity() const;
};
// ValueError: fewer than two tokens, a window below 2, a stride that is not from 1 to window - 1 (so
// that each token has one before it), and a window that a limited model cannot read.
Perplexity perplexity(const LanguageModel& model, std::span<const int64_t> ids,
                      const PerplexityOptions& options = {});

struct Continuation {
  std::vector<int64_t> context, tokens;
};
struct Likelihood {
  double log_likelihood = 0;  // of all tokens of the continuation, behind the context
  bool is_greedy = false;     // each is the most likely token at its place
};
// ValueError: an empty context or continuation; both together longer than a limited model reads.
std::vector<Likelihood> continuation_likelihoods(const LanguageModel& model,
                                                 const std::vector<Continuation>& continuations,
                                                 int64_t batch_size = 8);

}  // namespace tessera::nn::models
