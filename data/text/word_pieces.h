// The pieces of a WordPiece vocabulary, and how they cover a word. Included by tokenizers' .cpp
// files only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

class WordPieces {
 public:
  // `prefix` marks the pieces that continue a word. Words of more characters are unknown.
  WordPieces(std::string prefix, size_t most_characters)
      : prefix_(std::move(prefix)), most_characters_(most_characters) {}

  // The token must live as long. False if it is there already.
  bool add(std::string_view token, TokenId id) {
    if (!starts_.emplace(token, id).second) return false;
    longest_start_ = std::max(longest_start_, token.size());
    if (token.starts_with(prefix_) && token.size() > prefix_.size()) {
      const std::string_view rest = token.substr(prefix_.size());
      continuations_.emplace(rest, id);
      longest_continuation_ = std::max(longest_continuation_, rest.size());
    }
    return true;
  }
  // Its id; nullptr if there is none.
  const TokenId* find(std::string_view token) const {
    const auto found = starts_.find(token);
    return found == starts_.end() ? nullptr : &found->second;
  }

  // Appends the longest pieces from the left, and where they end in the word to `ends` if that is
  // not nullptr. False, and nothing is appended, for a word that is unknown.
  bool encode(std::string_view word, std::vector<TokenId>& out,
              std::vector<size_t>* ends = nullptr) const {
    const size_t before = out.size();
    if (word.size() > most_characters_ && count_characters(word) > most_characters_) return false;
    for (size_t start = 0; start < word.size();) {
      const auto& pieces = start == 0 ? starts_ : continuations_;
      size_t length =
          std::min(start == 0 ? longest_start_ : longest_continuation_, word.size() - start);
      auto found = pieces.end();
      for (; length > 0; --length) {
        found = pieces.find(word.substr(start, length));
        if (found != pieces.end()) break;
      }
      if (length == 0) {
        out.resize(before);
        return false;
      }
      out.push_back(found->second);
      start += length;
      if (ends != nullptr) ends->push_back(start);
    }
    return true;
  }

 private:
  static size_t count_characters(std::string_view text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
  }

  std::string prefix_;
  size_t most_characters_;
  std::unordered_map<std::string_view, TokenId> starts_;  // as written
  std::unordered_map<std::string_view, TokenId>
      continuations_;                                    // those with the prefix, without it
  size_t longest_start_ = 0, longest_continuation_ = 0;  // bytes
};

}  // namespace tessera::data
