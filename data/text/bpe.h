// Byte-level byte pair encoding, as GPT-2 uses it.
//
//     auto tokenizer = BpeTokenizer::from_files("encoder.json", "vocab.bpe");
//     std::vector<TokenId> ids = tokenizer.encode("Hello world");  // 15496, 995
//
// A text is cut into pieces by the published pattern
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and in each piece neighboring tokens are merged, the earliest rule of the merge list first
// (A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; R. Sennrich et
// al., 2016). A piece of n bytes costs O(n log n). Any bytes can be encoded, and decoding gives
// them back: bytes that are not UTF-8 count as symbols.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

struct BpeOptions {
  // Members of the vocabulary that no merge makes. The first one is end_of_text().
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  // true: special tokens that occur in a text become their ids. false: they are ordinary text, so
  // that a text from a stranger cannot end a document.
  bool parse_special_tokens = false;
};

class BpeTokenizer : public Tokenizer {
 public:
  // `vocabulary`: JSON object from token to id (encoder.json, vocab.json), ids 0 to n - 1.
  // `merges`: one rule a line, most important first (vocab.bpe, merges.txt).
  // IoError; FormatError naming file, line or token, and remedy: not JSON, an id twice or outside
  // 0 to n - 1, a byte without token, a merge of tokens that the vocabulary lacks, a special token
  // that it lacks.
  static BpeTokenizer from_files(const std::string& vocabulary, const std::string& merges,
                                 const BpeOptions& options = {});
  // A folder that holds vocab.json and merges.txt, or encoder.json and vocab.bpe.
  static BpeTokenizer from_folder(const std::string& folder, const BpeOptions& options = {});
  // The paths of its files. IoError where it has neither vocabulary; the merges are not looked for.
  struct Files {
    std::string vocabulary, merges;
  };
  static Files files_in(const std::string& folder);
  // From the contents of the two files; the names stand in errors.
  static BpeTokenizer parse(std::string_view vocabulary, std::string_view vocabulary_name,
                            std::string_view merges, std::string_view merges_name,
                            const BpeOptions& options = {});

  BpeTokenizer(BpeTokenizer&&) noexcept;
  BpeTokenizer& operator=(BpeTokenizer&&) noexcept;
  ~BpeTokenizer() override;

  using Tokenizer::encode;
  int64_t vocab_size() const override;
  void encode(std::string_view text, std::vector<TokenId>& ids) const override;
  std::string decode(std::span<const TokenId> ids) const override;
  std::string_view token_bytes(TokenId id) const override;
  std::optional<TokenId> end_of_text() const override;

  // The id of a token given by its bytes, if there is one.
  std::optional<TokenId> find(std::string_view token) const;

 private:
  struct Model;
  explicit BpeTokenizer(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

// The pieces into which GPT-2's pattern cuts a text, in order; they cover it.
std::vector<std::string_view> split_gpt2(std::string_view text);

}  // namespace tessera::data
