// Text to token ids and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

using TokenId = int32_t;

// A tokenizer may be used by several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;  // ids are 0 to vocab_size() - 1

  // Appends the ids of `text`. Any bytes are accepted.
  virtual void encode(std::string_view text, std::vector<TokenId>& ids) const = 0;
  std::vector<TokenId> encode(std::string_view text) const {
    std::vector<TokenId> ids;
    encode(text, ids);
    return ids;
  }

  // The bytes that the ids stand for. IndexError for an id outside the vocabulary.
  virtual std::string decode(std::span<const TokenId> ids) const = 0;
  // As text: bytes that are not UTF-8 (half a character at a cut) become U+FFFD.
  std::string decode_text(std::span<const TokenId> ids) const;

  // The bytes of one id, for text that is printed while it is made. They may be a part of a
  // character: gather them in an Utf8Stream. The view lives as long as the tokenizer.
  virtual std::string_view token_bytes(TokenId id) const = 0;

  // The id that separates documents, if the vocabulary has one.
  virtual std::optional<TokenId> end_of_text() const { return std::nullopt; }
};

// Every byte is a token: 256 ids, no file needed.
class ByteTokenizer : public Tokenizer {
 public:
  using Tokenizer::encode;
  int64_t vocab_size() const override { return 256; }
  void encode(std::string_view text, std::vector<TokenId>& ids) const override;
  std::string decode(std::span<const TokenId> ids) const override;
  std::string_view token_bytes(TokenId id) const override;
};

// Gives bytes on as whole characters: what comes out is always UTF-8.
class Utf8Stream {
 public:
  // The text that is complete after these bytes. Bytes that can never become a character are
  // U+FFFD; a character's beginning is kept for the next call.
  std::string push(std::string_view bytes);
  // What is left at the end: a beginning without an end is U+FFFD.
  std::string finish();

 private:
  std::string pending_;
};

// Room for `count` ids more. Grows at least by half, so that many calls that append stay linear.
inline void reserve_more(std::vector<TokenId>& ids, size_t count) {
  const size_t needed = ids.size() + count;
  if (needed > ids.capacity()) ids.reserve(std::max(needed, ids.capacity() + ids.capacity() / 2));
}

// Takes out the spaces that joining tokens puts before punctuation and English contractions:
// "do n't , he 's" becomes "don't, he's". What transformers calls clean_up_tokenization_spaces.
std::string clean_up_spaces(std::string_view text);

}  // namespace tessera::data
