#include <tessera/data/text/special_tokens.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::data {

void SpecialTokens::add(std::string text, TokenId id) {
  TS_CHECK(!text.empty(), "SpecialTokens",
           "a special token has at least one character; the one of id ", id,
           " is empty; remove it.");
  tokens_.emplace_back(std::move(text), id);
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
}

bool SpecialTokens::contains(TokenId id) const {
  return std::any_of(tokens_.begin(), tokens_.end(),
                     [id](const auto& token) { return token.second == id; });
}

}  // namespace tessera::data
