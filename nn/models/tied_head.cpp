#include <tessera/nn/models/tied_head.h>

#include <cstdio>

#include <tessera/nn/tied_values.h>

namespace tessera::nn::models {

std::optional<std::string> own_head(const StateDict& weights, const std::string& table) {
  const Tensor *head = weights.find(kHead), *shared = weights.find(table);
  if (head == nullptr || shared == nullptr) return {};
  if (head->shape() != shared->shape()) return "another shape";
  return first_difference(*head, *shared, head->dtype());
}

bool is_head_tied(bool tied, const StateDict& weights, const std::string& table,
                  const std::string& folder) {
  if (!tied) return false;
  const auto differ = own_head(weights, table);
  if (!differ) return true;
  std::fprintf(stderr,
               "tessera: '%s': config.json ties %s to %s, and the weights differ (%s); they are "
               "two parameters now: tie_word_embeddings=false in config.json says so\n",
               folder.c_str(), kHead, table.c_str(), differ->c_str());
  return false;
}

}  // namespace tessera::nn::models
