#include <tessera/nn/models/generation.h>

#include <algorithm>
#include <cmath>

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

}  // namespace

int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position) {
  if (options.temperature == 0) return std::ranges::max_element(logits) - logits.begin();
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
  constexpr uint64_t kStream = uint64_t{0x5A11} << 40;
  const auto bits = philox4x32(options.seed, kStream, static_cast<uint64_t>(position));
  double threshold = uniform_from_bits64(bits[0], bits[1]) * kept;
  for (size_t i = 0; i + 1 < count; ++i) {
    threshold -= ranking[i].weight;
    if (threshold < 0) return ranking[i].id;
  }
  return ranking[count - 1].id;
}

void check_request(std::span<const int64_t> prompt, const GenerateOptions& options) {
  TS_CHECK(!prompt.empty(), "generate", "the prompt is empty; give at least one token");
  TS_CHECK(options.temperature >= 0 && options.top_k >= 0 && options.top_p > 0, "generate",
           "needs temperature >= 0, top_k >= 0 and top_p > 0; got ", options.temperature, ", ",
           options.top_k, ", ", options.top_p);
}

std::vector<int64_t> generate(Gpt& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each) {
  check_request(prompt, options);
  const NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const int64_t context = model.config.context;
  const Device device = model.transformer.wte.weight.device();
  gpt2::KvCache cache(model.config, 1, model.transformer.wte.weight.dtype(), device);
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
    const Tensor logits =
        model(tensor(fresh, {1, pending}).to(device), Tensor(), Logits::kLast, &cache).logits;
    const auto numbers = logits.to_vector<float>();
    const int64_t token = sample(numbers, options, static_cast<int64_t>(made.size()));
    ended = options.stop_at_end && token == model.config.end_of_text;
    if (ended) continue;
    made.push_back(token);
    text.push_back(token);
    pending = 1;
    ended = (each && !each(token)) || static_cast<int64_t>(made.size()) >= options.max_tokens;
  }
  model.train(was_training);
  return made;
}

std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each) {
  check_request(prompt, options);
  const NoGradGuard no_grad;
  const bool was_training = model.is_training();
  if (was_training) model.eval();
  const Tensor& table = model.model.embed_tokens.weight;
  const auto length = static_cast<int64_t>(prompt.size());
  llama::KvCache cache(model.config, 1, length + options.max_tokens, table.dtype(), table.device());
  Tensor fresh = tensor(prompt, {1, length}).to(table.device());
  std::vector<int64_t> made;
  const std::vector<int64_t>& ends = model.config.end_of_text;
  while (static_cast<int64_t>(made.size()) < options.max_tokens) {
    const Tensor logits = model(fresh, Tensor(), /*last_only=*/true, &cache).logits;
    const auto numbers = logits.to_vector<float>();
    const int64_t token = sample(numbers, options, static_cast<int64_t>(made.size()));
    if (options.stop_at_end && std::ranges::find(ends, token) != ends.end()) break;
    made.push_back(token);
    if (each && !each(token)) break;
    fresh = full({1, 1}, token, {.dtype = kI64, .device = table.device()});
  }
  if (was_training) model.train();
  return made;
}

}  // namespace tessera::nn::models
