#include <tessera/data/text/token_matcher.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::data {

void TokenMatcher::add(std::string_view text, size_t index) {
  TS_CHECK(!text.empty(), "TokenMatcher", "a special token has at least one character; number ",
           index, " is empty; remove it.");
  std::vector<size_t>& same_byte = by_byte_[static_cast<unsigned char>(text[0])];
  const auto place = std::upper_bound(
      same_byte.begin(), same_byte.end(), text.size(),
      [&](size_t size, size_t other) { return size > tokens_[other].text.size(); });
  same_byte.insert(place, tokens_.size());
  tokens_.push_back({std::string(text), index});
}

std::optional<TokenMatcher::Match> TokenMatcher::find(std::string_view text, size_t from) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t at = from; at < text.size(); ++at) {
    for (const size_t i : by_byte_[static_cast<unsigned char>(text[at])]) {
      const Token& token = tokens_[i];
      if (text.substr(at).starts_with(token.text))
        return Match{at, at + token.text.size(), token.index};
    }
  }
  return std::nullopt;
}

}  // namespace tessera::data
