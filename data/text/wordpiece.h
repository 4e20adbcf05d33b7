// WordPiece as BERT uses it (uncased by default).
//
//     auto tokenizer = WordPieceTokenizer::from_pretrained("bert-base-cased");  // a folder
//     auto plain = WordPieceTokenizer::from_file("vocab.txt");
//     Encoding pair = tokenizer.encode_pair("Is it raining?", "Take an umbrella.");
//     pair.ids;  // [CLS] is it raining ? [SEP] take an umbrella . [SEP]
//
// Control characters are dropped, CJK ideographs become words, accents are dropped (NFD without
// category Mn), letters become lower case; words are cut at white space and punctuation, and each
// is covered from the left by the longest pieces that the vocabulary has (J. Devlin et al., "BERT",
// 2018). Bytes that are not UTF-8 are dropped. A word without cover, or of more than 100
// characters, is [UNK].
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

struct WordPieceOptions {
  bool lower_case = true;  // and drop accents
  int64_t max_word_characters = 100;
  // true: the special tokens below become their ids where a text holds them, as in "a [MASK] day".
  bool parse_special_tokens = false;
  std::string padding = "[PAD]", unknown = "[UNK]", first = "[CLS]", separator = "[SEP]",
              mask = "[MASK]";
};

// One sequence for a model, with [CLS] and [SEP].
struct Encoding {
  std::vector<TokenId> ids;
  std::vector<TokenId> type_ids;        // 0 in the first text, 1 in the second
  std::vector<TokenId> attention_mask;  // 1 for tokens, 0 for padding
};

// Several sequences, padded on the right to one length. All tensors are i64[B, T] on the CPU.
struct EncodingBatch {
  Tensor ids, type_ids, attention_mask;
};

struct EncodeOptions {
  // Longest sequence, special tokens included; 0: no limit. Longer ones lose tokens at the end; of
  // a pair the longer text loses first, until both are equally long.
  int64_t max_length = 0;
  // Pad up to this length; a batch is padded to its longest sequence at least.
  int64_t pad_to = 0;
};

class WordPieceTokenizer : public Tokenizer {
 public:
  // `vocabulary`: one token a line, the line's number from 0 is the id. IoError; FormatError naming
  // file, line and remedy: not UTF-8, a token twice, an empty line, a special token missing.
  static WordPieceTokenizer from_file(const std::string& vocabulary,
                                      const WordPieceOptions& options = {});
  // vocab.txt of a folder of transformers, as its tokenizer_config.json says: do_lower_case, which is
  // true where nothing is said (then what tokenizer.json has), and the names of special tokens; of
  // `options` the rest counts. UnsupportedError: strip_accents unlike do_lower_case,
  // tokenize_chinese_chars or do_basic_tokenize false. FormatError, IoError.
  static WordPieceTokenizer from_pretrained(const std::string& folder,
                                            const WordPieceOptions& options = {});
  static WordPieceTokenizer parse(std::string_view vocabulary, std::string_view name,
                                  const WordPieceOptions& options = {});

  WordPieceTokenizer(WordPieceTokenizer&&) noexcept;
  WordPieceTokenizer& operator=(WordPieceTokenizer&&) noexcept;
  ~WordPieceTokenizer() override;

  int64_t vocab_size() const override;

  // Ids of the text alone, without [CLS] and [SEP].
  using Tokenizer::encode;
  void encode(std::string_view text, std::vector<TokenId>& ids) const override;

  // [CLS] text [SEP], or [CLS] first [SEP] second [SEP]. ValueError for a max_length that has no
  // room for the special tokens.
  Encoding encode_text(std::string_view text, const EncodeOptions& options = {}) const;
  Encoding encode_pair(std::string_view first, std::string_view second,
                       const EncodeOptions& options = {}) const;
  // A batch of texts, or of pairs (then second.size() == first.size()). ValueError if empty.
  EncodingBatch encode_batch(std::span<const std::string> first,
                             std::span<const std::string> second = {},
                             const EncodeOptions& options = {}) const;

  // Pieces joined to words, words joined by spaces, spaces before punctuation taken out.
  std::string decode(std::span<const TokenId> ids) const override;
  struct DecodeOptions {
    bool skip_special_tokens = false;
    bool clean_up_spaces = true;
  };
  std::string decode(std::span<const TokenId> ids, const DecodeOptions& options) const;

  // The token as the vocabulary writes it; pieces inside a word start with ##.
  std::string_view token_bytes(TokenId id) const override;

  TokenId padding_id() const;
  TokenId unknown_id() const;
  TokenId first_id() const;      // [CLS]
  TokenId separator_id() const;  // [SEP]
  TokenId mask_id() const;

 private:
  struct Model;
  explicit WordPieceTokenizer(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

}  // namespace tessera::data
