#include <tessera/nn/models/generation.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <tessera/autograd/autograd.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>

namespace tessera::nn::models {

int64_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position) {
  if (options.temperature == 0) return std::ranges::max_element(logits) - logits.begin();
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto logit = [&](int64_t id) { return logits[static_cast<size_t>(id)]; };
  std::ranges::stable_sort(order, std::greater(), logit);
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(order.size())) {
    order.resize(static_cast<size_t>(options.top_k));
  }
  std::vector<double> weights;
  double total = 0;
  for (const int64_t id : order) {
    weights.push_back(
        std::exp((static_cast<double>(logit(id)) - logit(order[0])) / options.temperature));
    total += weights.back();
  }
  // The token that crosses top_p still takes part.
  double kept = 0;
  size_t count = 0;
  while (count < weights.size() && (count == 0 || kept < options.top_p * total)) {
    kept += weights[count++];
  }
  constexpr uint64_t kStream = uint64_t{0x5A11} << 40;
  const auto bits = philox4x32(options.seed, kStream, static_cast<uint64_t>(position));
  double threshold = uniform_from_bits64(bits[0], bits[1]) * kept;
  for (size_t i = 0; i + 1 < count; ++i) {
    threshold -= weights[i];
    if (threshold < 0) return order[i];
  }
  return order[count - 1];
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
