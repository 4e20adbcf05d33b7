// Tokens that stand for themselves in a text, such as <|endoftext|> or [MASK].
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

#include <tessera/data/text/token_matcher.h>
#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

class SpecialTokens {
 public:
  // ValueError for an empty text.
  void add(std::string_view text, TokenId id) {
    matcher_.add(text, static_cast<size_t>(id));
    ids_.insert(id);
  }
  bool empty() const { return matcher_.empty(); }
  bool contains(TokenId id) const { return ids_.contains(id); }

  // Calls plain(text) for what lies between special tokens and special(id) for each of them, in
  // order. Where several start at one place the longest is taken.
  template <class Plain, class Special>
  void split(std::string_view text, Plain&& plain, Special&& special) const {
    size_t position = 0;
    while (const auto match = matcher_.find(text, position)) {
      if (match->begin > position) plain(text.substr(position, match->begin - position));
      special(static_cast<TokenId>(match->index));
      position = match->end;
    }
    if (position < text.size()) plain(text.substr(position));
  }

 private:
  TokenMatcher matcher_;
  std::unordered_set<TokenId> ids_;
};

}  // namespace tessera::data
