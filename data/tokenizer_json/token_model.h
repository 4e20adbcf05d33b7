// The models of a tokenizer.json: what makes tokens of pieces. Included by this folder's .cpp files
// only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <tessera/data/text/tokenizer.h>
#include <tessera/data/text/word_cache.h>
#include <tessera/data/tokenizer_json/aligned_text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

// Tokens as the file writes them, and their ids, which may have gaps.
class Vocabulary {
 public:
  // A JSON object from token to id. FormatError: no id, or one that two tokens have.
  void read(const Json& object, const std::string& place);
  void add(std::string token, TokenId id);
  std::optional<TokenId> find(std::string_view token) const {
    const auto found = ids_.find(token);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }
  // nullptr: no token has the id.
  const std::string* token(TokenId id) const {
    const bool inside = id >= 0 && static_cast<size_t>(id) < tokens_.size();
    return inside ? tokens_[static_cast<size_t>(id)] : nullptr;
  }
  size_t size() const { return ids_.size(); }
  TokenId end() const { return static_cast<TokenId>(tokens_.size()); }  // every id is smaller

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, TokenId, Hash, std::equal_to<>> ids_;  // its keys stay in place
  std::vector<const std::string*> tokens_;
};

class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // Appends the ids of a piece, and where they are in it to `places` if that is not nullptr.
  // FormatError where the vocabulary lacks the token for what is unknown.
  virtual void encode(std::string_view piece, std::vector<TokenId>& ids,
                      std::vector<ByteSpan>* places) const = 0;

  // The same without places, with the ids of words that were met before; `readable` bytes may be
  // read from the piece's start.
  void encode_cached(std::string_view piece, size_t readable, WordCache& cache,
                     std::vector<TokenId>& ids) const {
    if (piece.size() > WordCache::kMaxBytes) return encode_long(piece, cache, ids);
    const WordCache::Key key = WordCache::key_of(piece, readable);
    WordCache::Entry& entry = cache.place(key);
    if (WordCache::holds(entry, key)) [[likely]] {
      ids.insert(ids.end(), entry.ids, entry.ids + entry.count);
      return;
    }
    const size_t before = ids.size();
    encode(piece, ids, nullptr);
    const size_t count = ids.size() - before;
    if (count <= WordCache::kMaxIds) WordCache::store(entry, key, ids.data() + before, count);
  }

  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  virtual void encode_long(std::string_view piece, WordCache&, std::vector<TokenId>& ids) const {
    encode(piece, ids, nullptr);
  }
  Vocabulary vocabulary_;
};

// `bytes`: pieces are bytes, where the vocabulary writes each as a character. UnsupportedError for
// a type or a setting, FormatError for fields.
std::unique_ptr<TokenModel> read_model(const Json& value, const std::string& place, bool bytes);
// Whether it can take bytes.
bool model_takes_bytes(const Json& value);

std::unique_ptr<TokenModel> read_bpe(JsonFields& fields, bool bytes);
std::unique_ptr<TokenModel> read_unigram(JsonFields& fields);
std::unique_ptr<TokenModel> read_word_piece(JsonFields& fields);

}  // namespace tessera::data
