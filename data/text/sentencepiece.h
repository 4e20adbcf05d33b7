// SentencePiece's own files (tokenizer.model, spiece.model): BPE, unigram, words and characters.
// SentencePieceTokenizer::from_file(path) reads one, and its encode(text) gives ids. (tessera.h leaves this header
// out.)
//
// Google's library (https://github.com/google/sentencepiece) reads and encodes, so ids and texts are those
// of its Python package. It is optional: has_sentencepiece() says whether this build has it. Ids of the text
// alone come out, as from the package's encode(): no bos and eos, which a model's tokenizer_config.json asks
// for. A folder that has tokenizer.json needs none of this (tokenizer_json/pretrained_tokenizer.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

bool has_sentencepiece();

class SentencePieceTokenizer : public Tokenizer {
 public:
  // IoError; FormatError: it is no such file. UnsupportedError: the library was built without
  // SentencePiece; the message says what to install.
  static SentencePieceTokenizer from_file(const std::string& path);

  SentencePieceTokenizer(SentencePieceTokenizer&&) noexcept;
  SentencePieceTokenizer& operator=(SentencePieceTokenizer&&) noexcept;
  ~SentencePieceTokenizer() override;

  int64_t vocab_size() const override;
  // Bytes that are not UTF-8 count as U+FFFD.
  using Tokenizer::encode;
  void encode(std::string_view text, std::vector<TokenId>& ids) const override;
  // As the package's decode(): control pieces (<s>, </s>) are left out, the unknown one is " ⁇ ".
  std::string decode(std::span<const TokenId> ids) const override;
  // "▁" is a space, <0x0A> a byte; control pieces are as the file writes them.
  std::string_view token_bytes(TokenId id) const override;
  std::optional<TokenId> end_of_text() const override;  // eos

  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> pad_id() const;
  std::optional<TokenId> unk_id() const;
  // The id of a piece as the file writes it, and the reverse; absent if there is none.
  std::optional<TokenId> token_to_id(std::string_view piece) const;
  std::optional<std::string> id_to_token(TokenId id) const;

 private:
  struct Model;
  explicit SentencePieceTokenizer(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

}  // namespace tessera::data
