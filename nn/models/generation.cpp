#include <tessera/nn/models/generation.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <tessera/autograd/autograd.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>

namespace tessera::nn::models {

namespace {

// Tokens from the most likely on, with their weights. A heap hands them out one after the other, as
// many as are asked for, where a sort would order the whole vocabulary.
class Ranking {
 public:
  struct Token {
    int64_t id;
    double weight;
  };

  Ranking(std::span<const float> logits, double temperature) : rate_(1 / temperature) {
    heap_.reserve(logits.size());
    for (const float logit : logits) heap_.push_back({logit, static_cast<int32_t>(heap_.size())});
    std::make_heap(heap_.begin(), heap_.end());
    largest_ = heap_.front().logit;
  }

  double weight(float logit) const { return std::exp((logit - largest_) * rate_); }

  const Token& operator[](size_t rank) {
    while (taken_.size() <= rank) {
      std::pop_heap(heap_.begin(), heap_.end());
      taken_.push_back({heap_.back().id, weight(heap_.back().logit)});
      heap_.pop_back();
    }
    return taken_[rank];
  }

 private:
  struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const {
      return logit != other.logit ? logit < other.logit : id > other.id;
    }
  };
  double rate_, largest_;
  std::vector<Candidate> heap_;
  std::vector<Token> taken_;
};

void check_options(const GenerateOptions& options) {
  TS_CHECK(options.temperature >= 0 && options.top_k >= 0 && options.top_p > 0, "generate",
           "needs temperature >= 0, top_k >= 0 and top_p > 0; got ", options.temperature, ", ",
           options.top_k, ", ", options.top_p);
  TS_CHECK(options.min_p >= 0 && options.min_p <= 1 && options.repetition_penalty > 0, "generate",
           "needs min_p from 0 to 1 and a repetition_penalty above 0; got ", options.min_p, " and ",
           options.repetition_penalty);
}

// The first of the largest; NaN never is. Blocks, whose largest the compiler finds in registers: a
// search element by element takes 3 cycles for each word.
int64_t most_likely(std::span<const float> logits) {
  constexpr size_t kBlock = 512, kLanes = 16;
  float most = -std::numeric_limits<float>::infinity();
  size_t at = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const std::span<const float> block =
        logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, most);
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float x = block[i + lane];
        lanes[lane] = x > lanes[lane] ? x : lanes[lane];
      }
    }
    for (; i < block.size(); ++i) lanes[0] = block[i] > lanes[0] ? block[i] : lanes[0];
    const float largest = *std::max_element(lanes, lanes + kLanes);
    if (largest > most) most = largest, at = begin;
  }
  while (at < logits.size() && !(logits[at] == most)) ++at;
  return at < logits.size() ? static_cast<int64_t>(at) : 0;
}

bool is_in(const std::vector<int64_t>& ids, int64_t token) {
  return std::ranges::find(ids, token) != ids.end();
}

}  // namespace

int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position,
               int64_t text) {
  if (options.temperature == 0) return most_likely(logits);
  Ranking ranking(logits, options.temperature);
  size_t count = logits.size();
  double kept = 0;
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < count) {
    count = static_cast<size_t>(options.top_k);
    for (size_t i = 0; i < count; ++i) kept += ranking[i].weight;
  } else {
    for (const float logit : logits) kept += ranking.weight(logit);
  }
  if (options.top_p < 1) {
    // The token that crosses top_p still takes part.
    const double wanted = options.top_p * kept;
    size_t rank = 0;
    for (kept = 0; rank < count && (rank == 0 || kept < wanted); ++rank) {
      kept += ranking[rank].weight;
    }
    count = rank;
  }
  if (options.min_p > 0) {  // weights are parts of the largest, which is 1
    size_t rank = 0;
    for (kept = 0; rank < count && ranking[rank].weight >= options.min_p; ++rank) {
      kept += ranking[rank].weight;
    }
    count = rank;
  }
  constexpr uint64_t kStream = uint64_t{0x5A11} << 40;
  const auto bits = philox4x32(options.seed, kStream + static_cast<uint64_t>(text),
                               static_cast<uint64_t>(position));
  double threshold = uniform_from_bits64(bits[0], bits[1]) * kept;
  for (size_t i = 0; i + 1 < count; ++i) {
    threshold -= ranking[i].weight;
    if (threshold < 0) return ranking[i].id;
  }
  return ranking[count - 1].id;
}

void check_request(std::span<const int64_t> prompt, const GenerateOptions& options) {
  TS_CHECK(!prompt.empty(), "generate", "the prompt is empty; give at least one token");
  check_options(options);
}

void penalise_repetition(std::span<float> logits, std::span<const int64_t> text, double penalty) {
  if (penalty == 1) return;
  std::vector<int64_t> present(text.begin(), text.end());
  std::ranges::sort(present);
  present.erase(std::unique(present.begin(), present.end()), present.end());
  for (const int64_t token : present) {
    float& logit = logits[static_cast<size_t>(token)];
    logit = static_cast<float>(logit > 0 ? logit / penalty : logit * penalty);
  }
}

std::vector<int64_t> generate(Gpt& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each) {
  check_request(prompt, options);
  const NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const int64_t context = model.config.context;
  const Device device = model.transformer.wte.weight.device();
  gpt2::KvCache cache(model.config, 1,
                      options.cache_dtype.value_or(model.transformer.wte.weight.dtype()), device);
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  auto pending = static_cast<int64_t>(std::min(text.size(), static_cast<size_t>(context)));
  std::vector<int64_t> made;
  bool ended = options.max_tokens <= 0;
  while (options.together ? options.together(!ended) : !ended) {
    if (ended) {  // another rank's call
      cache.clear();
      const std::span<const int64_t> last(text.end() - 1, text.end());
      model(tensor(last, {1, 1}).to(device), Tensor(), Logits::kLast, &cache);
      continue;
    }
    if (cache.length() + pending > context) {
      cache.clear();
      pending = std::max<int64_t>(1, context / 2);
    }
    const std::span<const int64_t> fresh(text.end() - pending, text.end());
    const Tensor logits = host_logits(
        model(tensor(fresh, {1, pending}).to(device), Tensor(), Logits::kLast, &cache).logits);
    const std::span<float> numbers(static_cast<float*>(logits.data()),
                                   static_cast<size_t>(logits.numel()));
    penalise_repetition(numbers, text, options.repetition_penalty);
    const int64_t token = sample(numbers, options, static_cast<int64_t>(made.size()));
    ended = (options.stop_at_end && token == model.config.end_of_text) ||
            is_in(options.stop_ids, token);
    if (ended) continue;
    made.push_back(token);
    text.push_back(token);
    pending = 1;
    ended = (each && !each(token)) || static_cast<int64_t>(made.size()) >= options.max_tokens;
  }
  return made;
}

std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each) {
  std::function<bool(size_t, int64_t)> of_batch;
  if (each) of_batch = [&](size_t, int64_t token) { return each(token); };
  return generate(language_model(model), {std::vector<int64_t>(prompt.begin(), prompt.end())},
                  options, of_batch)[0];
}

std::vector<std::vector<int64_t>> generate(
    const LanguageModel& model, const std::vector<std::vector<int64_t>>& prompts,
    const GenerateOptions& options, const std::function<bool(size_t prompt, int64_t token)>& each) {
  check_options(options);
  const EvaluationMode evaluation(*model.module);
  GrowingTexts texts(model, prompts, options.max_tokens, options.cache_dtype);
  std::vector<std::vector<int64_t>> made(prompts.size());
  std::vector<int64_t> prompt_of(prompts.size());  // of each text that still grows
  std::iota(prompt_of.begin(), prompt_of.end(), 0);
  for (int64_t count = 0; count < options.max_tokens && !prompt_of.empty(); ++count) {
    texts.read();
    std::vector<int64_t> going, going_prompts;
    for (size_t i = 0; i < prompt_of.size(); ++i) {
      const auto prompt = static_cast<size_t>(prompt_of[i]);
      const std::span<float> logits = texts.logits(i);
      penalise_repetition(logits, texts[i], options.repetition_penalty);
      const int64_t token = sample(logits, options, count, prompt_of[i]);
      if ((options.stop_at_end && is_in(model.ends, token)) || is_in(options.stop_ids, token)) {
        continue;
      }
      made[prompt].push_back(token);
      texts.push(i, token);
      if (each && !each(prompt, token)) continue;
      going.push_back(static_cast<int64_t>(i));
      going_prompts.push_back(prompt_of[i]);
    }
    if (going.size() < prompt_of.size() && !going.empty()) texts.select(going);
    prompt_of = std::move(going_prompts);
  }
  return made;
}

}  // namespace tessera::nn::models
