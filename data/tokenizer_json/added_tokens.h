// The added tokens of a tokenizer.json, which stand for themselves in a text. Included by this
// folder's .cpp files only.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <tessera/data/text/token_matcher.h>
#include <tessera/data/tokenizer_json/aligned_text.h>
#include <tessera/data/tokenizer_json/json_fields.h>
#include <tessera/data/tokenizer_json/normalizers.h>
#include <tessera/data/tokenizer_json/token_model.h>

namespace tessera::data {

struct AddedToken {
  std::string content;
  std::string matched;  // what is looked for: the content, or what the normalizer makes of it
  TokenId id = 0;
  bool single_word = false, strip_left = false, strip_right = false, normalized = false,
       special = false;
};

class AddedTokens {
 public:
  // FormatError for fields, and for an id that is not the one that the vocabulary gives the token.
  // `normalizer` may be nullptr.
  void read(const Json& list, const std::string& place, const Vocabulary& vocabulary,
            const Normalizer* normalizer);

  // Cuts a text; normalized: for the tokens that are looked for in normalized text, else for the
  // others. Pieces are relative to the text; between tokens they have no id. The leftmost token is
  // found first, of several the longest.
  void find(std::string_view text, bool normalized, std::vector<Piece>& pieces) const;
  bool any(bool normalized) const { return !matchers_[normalized ? 1 : 0].empty(); }

  const AddedToken* token(TokenId id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : &tokens_[found->second];
  }
  const AddedToken* find_content(std::string_view content) const;
  bool is_special(const std::string& written) const { return special_.contains(written); }
  TokenId end() const { return end_; }  // every id is smaller

 private:
  std::vector<AddedToken> tokens_;
  std::unordered_map<TokenId, size_t> by_id_;
  std::unordered_set<std::string> special_;
  std::array<TokenMatcher, 2> matchers_;  // [1]: in normalized text
  TokenId end_ = 0;
};

}  // namespace tessera::data
