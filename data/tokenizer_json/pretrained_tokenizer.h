// The tokenizers of pretrained models, from HuggingFace's tokenizer.json.
//
//     auto tokenizer = PretrainedTokenizer::from_pretrained("Llama-3.2-1B");  // a folder
//     PretrainedEncoding encoding = tokenizer.encode_text("Hello world");
//     encoding.ids;      // 128000, 9906, 1917: with <|begin_of_text|>, as the file says
//     encoding.offsets;  // [0, 0), [0, 5), [5, 11): characters of the text
//
// It gives the ids, offsets and texts of the tokenizers package (docs/data.md lists the supported
// normalizers, pre-tokenizers, models, post-processors and decoders). An unsupported setting of a
// file is an UnsupportedError that names it, so that no other ids come out. Bytes that are not
// UTF-8 count as U+FFFD. Unicode's properties are ICU's, or the package's if those are older.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/text/tokenizer.h>
#include <tessera/data/tokenizer_json/chat.h>
#include <tessera/data/tokenizer_json/pretrained_config.h>
#include <tessera/data/tokenizer_json/pretrained_encoding.h>

namespace tessera::data {

class PretrainedTokenizer : public Tokenizer {
 public:
  // A folder with tokenizer.json and optionally tokenizer_config.json, special_tokens_map.json and
  // chat_template.jinja. IoError, and the errors of parse().
  static PretrainedTokenizer from_pretrained(const std::string& folder);
  static PretrainedTokenizer from_file(const std::string& tokenizer_json);
  // FormatError naming the file's place and remedy; UnsupportedError naming an unsupported setting;
  // ConfigError for a regular expression that PCRE2 refuses.
  static PretrainedTokenizer parse(std::string_view tokenizer_json, const std::string& name);

  PretrainedTokenizer(PretrainedTokenizer&&) noexcept;
  PretrainedTokenizer& operator=(PretrainedTokenizer&&) noexcept;
  ~PretrainedTokenizer() override;

  int64_t vocab_size() const override;  // the greatest id, of added tokens too, and 1

  // Ids of the text alone: no special tokens except those in the text, not truncated, not padded.
  using Tokenizer::encode;
  void encode(std::string_view text, std::vector<TokenId>& ids) const override;

  // With special tokens, truncated and padded. ValueError if there is no room for the special
  // tokens, or the strategy may not shorten a text enough.
  PretrainedEncoding encode_text(std::string_view text,
                                 const PretrainedEncodeOptions& options = {}) const;
  PretrainedEncoding encode_pair(std::string_view first, std::string_view second,
                                 const PretrainedEncodeOptions& options = {}) const;
  // The same, and behind it what truncation takes away, in stretches of at most max_length with
  // special tokens: the package's encoding and its overflowing ones, transformers'
  // return_overflowing_tokens. Padding is to the first one's length. ValueError also for a stride
  // that leaves nothing new.
  std::vector<PretrainedEncoding> encode_overflowing(
      std::string_view first, const std::optional<std::string_view>& second = {},
      const PretrainedEncodeOptions& options = {}) const;
  // For a batch of texts or of pairs (then second.size() == first.size()). ValueError if empty.
  std::vector<PretrainedEncoding> encode_batch(std::span<const std::string> first,
                                               std::span<const std::string> second = {},
                                               const PretrainedEncodeOptions& options = {}) const;

  // One text of a conversation, by the model's chat template, and its ids: what transformers'
  // apply_chat_template gives. ValueError for a tokenizer without a template, a conversation that
  // the template refuses or that does not fit it; the errors of ChatTemplate.
  //
  //     Chat chat = tokenizer.apply_chat_template({{"user", "Hi"}}, {.add_generation_prompt = true});
  Chat apply_chat_template(const std::vector<ChatMessage>& messages,
                           const ChatOptions& options = {}) const;
  // `messages`: a JSON array of objects.
  Chat apply_chat_template_json(std::string_view messages, const ChatOptions& options = {}) const;
  // The text alone, and the characters of it that the template marks by {% generation %}.
  RenderedChat render_chat(std::string_view messages, const ChatOptions& options = {}) const;
  bool marks_generation(const ChatOptions& options = {}) const;  // whether the template has marks

  // The text that the file's decoder makes. IndexError for an id without a token.
  std::string decode(std::span<const TokenId> ids) const override;
  std::string decode(std::span<const TokenId> ids, bool skip_special_tokens) const;

  // The bytes that the token adds inside a text: "▁" is a space, <0x0A> a byte.
  std::string_view token_bytes(TokenId id) const override;
  std::optional<TokenId> end_of_text() const override;  // eos_token

  // The id of a token as the file writes it, and the reverse; absent if there is none.
  std::optional<TokenId> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(TokenId id) const;

  const PretrainedConfig& config() const;

 private:
  struct Model;
  explicit PretrainedTokenizer(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
  std::shared_ptr<class ChatTemplateCache> chat_templates_;
};

}  // namespace tessera::data
