// Finds tokens that stand for themselves in a text. Included by tokenizers' files only.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

class TokenMatcher {
 public:
  // Of equal tokens the first one counts. ValueError for an empty text.
  void add(std::string_view text, size_t index);
  bool empty() const { return tokens_.empty(); }

  struct Match {
    size_t begin, end;
    size_t index;  // as it was added
  };
  // The first token from `from` on; where several start at one place, the longest. Linear in the
  // text, times the tokens that begin with one byte.
  std::optional<Match> find(std::string_view text, size_t from) const;

 private:
  struct Token {
    std::string text;
    size_t index;
  };
  std::vector<Token> tokens_;
  std::array<std::vector<size_t>, 256> by_byte_;  // in tokens_, longest first
};

}  // namespace tessera::data
