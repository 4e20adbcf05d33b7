#include <tessera/nn/models/llama_generation.h>

#include <algorithm>

#include <tessera/autograd/autograd.h>

namespace tessera::llama {

std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const gpt2::GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each) {
  gpt2::check_request(prompt, options);
  const NoGradGuard no_grad;
  const bool was_training = model.is_training();
  if (was_training) model.eval();
  const Tensor& table = model.model.embed_tokens.weight;
  const auto length = static_cast<int64_t>(prompt.size());
  KvCache cache(model.config, 1, length + options.max_tokens, table.dtype(), table.device());
  Tensor fresh = tensor(prompt, {1, length}).to(table.device());
  std::vector<int64_t> made;
  const std::vector<int64_t>& ends = model.config.end_of_text;
  while (static_cast<int64_t>(made.size()) < options.max_tokens) {
    const Tensor logits = model(fresh, Tensor(), /*last_only=*/true, &cache).logits;
    const auto numbers = logits.to_vector<float>();
    const int64_t token = gpt2::sample(numbers, options, static_cast<int64_t>(made.size()));
    if (options.stop_at_end && std::ranges::find(ends, token) != ends.end()) break;
    made.push_back(token);
    if (each && !each(token)) break;
    fresh = full({1, 1}, token, {.dtype = kI64, .device = table.device()});
  }
  if (was_training) model.train();
  return made;
}

}  // namespace tessera::llama
