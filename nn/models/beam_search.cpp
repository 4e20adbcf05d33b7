#include <tessera/nn/models/beam_search.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <tessera/nn/models/generation.h>

namespace tessera::nn::models {
namespace {

constexpr float kNone = -1e9F;  // the score of a beam that is none yet

struct Candidate {
  float sum;  // of log probabilities
  int64_t beam, token;
  bool ends = false;
};

void to_log_probabilities(std::span<float> logits) {
  const float largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - largest));
  const auto log_sum = static_cast<float>(std::log(sum)) + largest;
  for (float& logit : logits) logit -= log_sum;
}

// The search of one prompt.
class Beams {
 public:
  Beams(const BeamOptions& options, std::vector<int64_t> ends)
      : options_(options),
        ends_(std::move(ends)),
        sums_(static_cast<size_t>(options.num_beams), kNone) {
    sums_[0] = 0;  // at first all beams are the prompt, and one is enough
  }

  bool is_over() const { return is_over_; }
  const std::vector<Hypothesis>& found() const { return found_; }

  struct Step {
    int64_t beam, token;  // beam i is now beam `beam` with this token
  };
  // log_probabilities: of each running beam's next token. texts: new tokens of each running beam.
  std::vector<Step> advance(const std::vector<std::span<float>>& log_probabilities,
                            const std::vector<std::vector<int64_t>>& made) {
    const std::vector<Candidate> best = best_of(log_probabilities);
    const auto length = static_cast<int64_t>(made[0].size()) + 1;
    const bool is_last = length == options_.max_tokens;
    finish(best, made, length, is_last);
    std::vector<Step> steps;
    sums_.clear();
    for (const Candidate& each : best) {
      if (each.ends || steps.size() == static_cast<size_t>(options_.num_beams)) continue;
      steps.push_back({each.beam, each.token});
      sums_.push_back(each.sum);
    }
    if (is_last) {
      is_over_ = true;
    } else if (is_full()) {
      is_over_ = options_.early_stopping == EarlyStopping::kTrue || !can_improve(length);
    }
    return steps;
  }

 private:
  bool is_full() const { return found_.size() == static_cast<size_t>(options_.num_beams); }

  // So many that num_beams of them do not end.
  std::vector<Candidate> best_of(const std::vector<std::span<float>>& log_probabilities) const {
    const size_t kept = std::max<size_t>(2, 1 + ends_.size()) * sums_.size();
    std::vector<Candidate> all;
    for (size_t beam = 0; beam < sums_.size(); ++beam) {
      if (sums_[beam] == kNone) continue;
      const std::span<float> row = log_probabilities[beam];
      for (size_t token = 0; token < row.size(); ++token) {
        all.push_back(
            {sums_[beam] + row[token], static_cast<int64_t>(beam), static_cast<int64_t>(token)});
      }
    }
    const auto better = [](const Candidate& a, const Candidate& b) {
      return a.sum != b.sum     ? a.sum > b.sum
             : a.beam != b.beam ? a.beam < b.beam
                                : a.token < b.token;
    };
    const auto end = all.begin() + static_cast<int64_t>(std::min(kept, all.size()));
    std::partial_sort(all.begin(), end, all.end(), better);
    all.erase(end, all.end());
    for (Candidate& each : all) each.ends = std::ranges::find(ends_, each.token) != ends_.end();
    return all;
  }

  // Of the num_beams best candidates those that end join the found ones, of which the best stay.
  void finish(const std::vector<Candidate>& best, const std::vector<std::vector<int64_t>>& made,
              int64_t length, bool is_last) {
    const size_t count = std::min(best.size(), static_cast<size_t>(options_.num_beams));
    for (size_t i = 0; i < count; ++i) {
      if (!best[i].ends && !is_last) continue;
      Hypothesis text{made[static_cast<size_t>(best[i].beam)],
                      best[i].sum / std::pow(static_cast<double>(length), options_.length_penalty)};
      if (!best[i].ends) text.tokens.push_back(best[i].token);
      found_.push_back(std::move(text));
    }
    std::ranges::stable_sort(found_, std::ranges::greater(), &Hypothesis::score);
    if (found_.size() > static_cast<size_t>(options_.num_beams)) {
      found_.resize(static_cast<size_t>(options_.num_beams));
    }
  }

  bool can_improve(int64_t length) const {
    const bool longest =
        options_.early_stopping == EarlyStopping::kNever && options_.length_penalty > 0;
    const auto at = static_cast<double>(longest ? options_.max_tokens : length);
    return sums_[0] / std::pow(at, options_.length_penalty) > found_.back().score;
  }

  const BeamOptions& options_;
  const std::vector<int64_t> ends_;
  std::vector<float> sums_;        // of the running beams, largest first
  std::vector<Hypothesis> found_;  // best first
  bool is_over_ = false;
};

}  // namespace

std::vector<std::vector<Hypothesis>> beam_search(const LanguageModel& model,
                                                 const std::vector<std::vector<int64_t>>& prompts,
                                                 const BeamOptions& options) {
  TS_CHECK(options.repetition_penalty > 0, "beam_search",
           "needs a repetition_penalty above 0; got ", options.repetition_penalty);
  const EvaluationMode evaluation(*model.module);
  GrowingTexts texts(model, prompts, options.max_tokens, options.cache_dtype);
  std::vector<int64_t> ends = options.stop_ids;
  if (options.stop_at_end) ends.insert(ends.end(), model.ends.begin(), model.ends.end());
  std::ranges::sort(ends);
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  const auto candidates = static_cast<int64_t>(std::max<size_t>(2, 1 + ends.size()));
  TS_CHECK(options.num_beams >= 1 && options.num_beams <= model.vocab_size / candidates,
           "beam_search", "num_beams must be from 1 to ", model.vocab_size / candidates, ", a ",
           candidates, "th of the vocabulary; got ", options.num_beams);
  std::vector<Beams> searches(prompts.size(), Beams(options, ends));
  std::vector<size_t> running(prompts.size());  // searches; each has `width` texts in a row
  std::iota(running.begin(), running.end(), size_t{0});
  size_t width = 1;
  for (int64_t count = 0; count < options.max_tokens && !running.empty(); ++count) {
    texts.read();
    std::vector<int64_t> rows, tokens;
    std::vector<size_t> still;
    for (size_t i = 0; i < running.size(); ++i) {
      const auto prompt = static_cast<int64_t>(prompts[running[i]].size());
      std::vector<std::span<float>> logits;
      std::vector<std::vector<int64_t>> made;
      for (size_t beam = 0; beam < width; ++beam) {
        const std::vector<int64_t>& text = texts[i * width + beam];
        logits.push_back(texts.logits(i * width + beam));
        to_log_probabilities(logits.back());
        penalise_repetition(logits.back(), text, options.repetition_penalty);
        made.emplace_back(text.begin() + prompt, text.end());
      }
      Beams& search = searches[running[i]];
      const std::vector<Beams::Step> steps = search.advance(logits, made);
      if (search.is_over()) continue;
      still.push_back(running[i]);
      for (const Beams::Step& step : steps) {
        rows.push_back(static_cast<int64_t>(i * width) + step.beam);
        tokens.push_back(step.token);
      }
    }
    running = std::move(still);
    if (running.empty()) break;
    width = static_cast<size_t>(options.num_beams);
    texts.select(rows);
    for (size_t i = 0; i < tokens.size(); ++i) texts.push(i, tokens[i]);
  }
  std::vector<std::vector<Hypothesis>> result;
  for (const Beams& search : searches) result.push_back(search.found());
  return result;
}

}  // namespace tessera::nn::models
