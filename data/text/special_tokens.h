// Tokens that stand for themselves in a text, such as <|endoftext|> or [MASK].
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

class SpecialTokens {
 public:
  // ValueError for an empty text.
  void add(std::string text, TokenId id);
  bool empty() const { return tokens_.empty(); }
  bool contains(TokenId id) const;

  // Calls plain(text) for what lies between special tokens and special(id) for each of them, in
  // order. Where several start at one place the longest is taken. Linear in text.size().
  template <class Plain, class Special>
  void split(std::string_view text, Plain&& plain, Special&& special) const {
    std::vector<size_t> next(tokens_.size(), 0);  // where each token occurs next
    for (size_t i = 0; i < tokens_.size(); ++i) next[i] = text.find(tokens_[i].first);
    size_t position = 0;
    for (;;) {
      size_t first = 0;  // tokens are sorted by length, longest first: ties go to the first
      for (size_t i = 0; i < tokens_.size(); ++i) {
        if (next[i] != text.npos && next[i] < position) {
          next[i] = text.find(tokens_[i].first, position);
        }
        if (next[i] < next[first]) first = i;
      }
      if (tokens_.empty() || next[first] == text.npos) break;
      if (next[first] > position) plain(text.substr(position, next[first] - position));
      special(tokens_[first].second);
      position = next[first] + tokens_[first].first.size();
    }
    if (position < text.size()) plain(text.substr(position));
  }

 private:
  std::vector<std::pair<std::string, TokenId>> tokens_;
};

}  // namespace tessera::data
