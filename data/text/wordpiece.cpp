#include <tessera/data/text/wordpiece.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/special_tokens.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>
#include <tessera/data/text/word_cache.h>
#include <tessera/data/text/word_pieces.h>

namespace tessera::data {
namespace {

constexpr std::string_view kWordPiece = "WordPieceTokenizer";

enum class AsciiKind : uint8_t { kWord, kPunctuation, kSpace, kDropped };

// Everything of the punctuation blocks counts, also symbols such as $ and ^.
constexpr std::array<AsciiKind, 128> kAsciiKind = [] {
  std::array<AsciiKind, 128> table{};
  for (int c = 0; c < 128; ++c) {
    const bool word = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    table[c] = c < 32 || c == 127 ? AsciiKind::kDropped
               : word             ? AsciiKind::kWord
                                  : AsciiKind::kPunctuation;
  }
  for (int c : {' ', '\t', '\n', '\r'}) table[c] = AsciiKind::kSpace;
  return table;
}();

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
AsciiKind kind_of(char c) { return kAsciiKind[static_cast<unsigned char>(c)]; }

// Control characters out, ideographs apart, white space to ' '.
std::string clean(std::string_view text) {
  std::string out;
  for (size_t position = 0; position < text.size();) {
    const CodePoint c = decode_utf8(text, position);
    const std::string_view bytes = text.substr(position, c.length);
    position += c.length;
    if (c.value == 0 || c.value == 0xFFFD || c.value == kInvalidCodePoint) continue;
    if (c.value < 0x80) {
      const AsciiKind kind = kAsciiKind[c.value];
      if (kind == AsciiKind::kSpace) {
        out += ' ';
      } else if (kind != AsciiKind::kDropped) {
        out += bytes;
      }
    } else if (is_control(c.value)) {
      continue;
    } else if (char_class(c.value) == CharClass::kSpace) {
      out += ' ';
    } else if (is_cjk_ideograph(c.value)) {
      out.append(" ").append(bytes).append(" ");
    } else {
      out += bytes;
    }
  }
  return out;
}

std::string lower_without_accents(std::string_view text) {
  const std::string decomposed = decompose(text);
  std::string out;
  for (size_t position = 0; position < decomposed.size();) {
    const CodePoint c = decode_utf8(decomposed, position);
    position += c.length;
    if (c.value < 0x80) {
      out += c.value >= 'A' && c.value <= 'Z' ? static_cast<char>(c.value + 32)
                                              : static_cast<char>(c.value);
    } else if (!is_nonspacing_mark(c.value)) {
      append_lower_case(c.value, out);
    }
  }
  return out;
}

}  // namespace

struct WordPieceTokenizer::Model {
  std::string text;  // the vocabulary's file
  std::vector<std::string_view> tokens;
  WordPieces pieces;
  TokenId padding = 0, unknown = 0, first = 0, separator = 0, mask = 0;
  SpecialTokens special;
  bool lower_case = true, parse_special = false;
  mutable WordCachePool caches;

  explicit Model(const WordPieceOptions& options)
      : pieces("##", static_cast<size_t>(options.max_word_characters)) {}

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }

  std::string_view token(TokenId id) const {
    TS_CHECK_INDEX(id >= 0 && id < size(), kWordPiece, "ids are 0 to ", size() - 1, "; got ", id,
                   "; was the text encoded with another tokenizer?");
    return tokens[static_cast<size_t>(id)];
  }

  void encode_word(std::string_view word, std::vector<TokenId>& out) const {
    if (!word.empty() && !pieces.encode(word, out)) out.push_back(unknown);
  }

  // A stretch without ASCII white space, all ASCII.
  void encode_ascii(std::string_view stretch, std::string& word, std::vector<TokenId>& out) const {
    word.clear();
    for (const char c : stretch) {
      const AsciiKind kind = kind_of(c);
      if (kind == AsciiKind::kWord) {
        word += lower_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
      } else if (kind == AsciiKind::kPunctuation) {
        encode_word(word, out);
        word.clear();
        encode_word({&c, 1}, out);
      }
    }
    encode_word(word, out);
  }

  // A stretch without ASCII white space. Decomposition never reaches across such white space.
  void encode_unicode(std::string_view stretch, std::string& word,
                      std::vector<TokenId>& out) const {
    std::string text = clean(stretch);
    if (lower_case) text = lower_without_accents(text);
    word.clear();
    for (size_t position = 0; position < text.size();) {
      const CodePoint c = decode_utf8(text, position);
      const std::string_view bytes = std::string_view(text).substr(position, c.length);
      position += c.length;
      const bool space = c.value < 0x80 ? kAsciiKind[c.value] == AsciiKind::kSpace
                                        : char_class(c.value) == CharClass::kSpace;
      const bool punctuation =
          !space && (c.value < 0x80 ? kAsciiKind[c.value] == AsciiKind::kPunctuation
                                    : is_punctuation(c.value));
      if (space || punctuation) {
        encode_word(word, out);
        word.clear();
        if (punctuation) encode_word(bytes, out);
      } else {
        word += bytes;
      }
    }
    encode_word(word, out);
  }

  void encode_plain(std::string_view source, WordCache& cache, std::vector<TokenId>& out) const {
    std::string word;
    for (size_t start = 0; start < source.size();) {
      size_t end = start;
      bool ascii = true;
      while (end < source.size()) {
        if (!is_ascii(source[end])) {
          ascii = false;
        } else if (kind_of(source[end]) == AsciiKind::kSpace) {
          break;
        }
        ++end;
      }
      const std::string_view stretch = source.substr(start, end - start);
      const size_t readable = source.size() - start;
      start = end + 1;
      if (stretch.empty()) continue;
      const bool cachable = stretch.size() <= WordCache::kMaxBytes;
      WordCache::Key key{};
      WordCache::Entry* entry = nullptr;
      if (cachable) {
        key = WordCache::key_of(stretch, readable);
        entry = &cache.place(key);
        if (WordCache::holds(*entry, key)) {
          out.insert(out.end(), entry->ids, entry->ids + entry->count);
          continue;
        }
      }
      const size_t before = out.size();
      if (ascii) {
        encode_ascii(stretch, word, out);
      } else {
        encode_unicode(stretch, word, out);
      }
      const size_t count = out.size() - before;
      if (cachable && count <= WordCache::kMaxIds) {
        WordCache::store(*entry, key, out.data() + before, count);
      }
    }
  }

  Encoding assemble(std::vector<TokenId> a, std::vector<TokenId>* b,
                    const EncodeOptions& options) const {
    const int64_t specials = b != nullptr ? 3 : 2;
    const auto length_of = [](const std::vector<TokenId>& ids) {
      return static_cast<int64_t>(ids.size());
    };
    if (options.max_length != 0) {
      TS_CHECK(options.max_length >= specials, kWordPiece, "max_length must leave room for ",
               specials, " special tokens; got ", options.max_length, "; raise it.");
      const int64_t room = options.max_length - specials;
      const int64_t total = length_of(a) + (b != nullptr ? length_of(*b) : 0);
      if (b == nullptr) {
        a.resize(static_cast<size_t>(std::min(length_of(a), room)));
      } else if (total > room) {
        // The longer one loses until both are equal, then they share; an odd token goes to the one
        // that was longer, to the second of two equals.
        const bool a_is_shorter = length_of(a) <= length_of(*b);
        std::vector<TokenId>& shorter = a_is_shorter ? a : *b;
        std::vector<TokenId>& longer = a_is_shorter ? *b : a;
        const int64_t keep = std::min(length_of(shorter), room / 2);
        shorter.resize(static_cast<size_t>(keep));
        longer.resize(static_cast<size_t>(room - keep));
      }
    }
    Encoding encoding;
    encoding.ids.push_back(first);
    encoding.ids.insert(encoding.ids.end(), a.begin(), a.end());
    encoding.ids.push_back(separator);
    encoding.type_ids.assign(encoding.ids.size(), 0);
    if (b != nullptr) {
      encoding.ids.insert(encoding.ids.end(), b->begin(), b->end());
      encoding.ids.push_back(separator);
      encoding.type_ids.resize(encoding.ids.size(), 1);
    }
    encoding.attention_mask.assign(encoding.ids.size(), 1);
    pad(encoding, options.pad_to);
    return encoding;
  }

  void pad(Encoding& encoding, int64_t length) const {
    if (length <= static_cast<int64_t>(encoding.ids.size())) return;
    encoding.ids.resize(static_cast<size_t>(length), padding);
    encoding.type_ids.resize(static_cast<size_t>(length), 0);
    encoding.attention_mask.resize(static_cast<size_t>(length), 0);
  }
};

WordPieceTokenizer::WordPieceTokenizer(std::unique_ptr<Model> model) : model_(std::move(model)) {}
WordPieceTokenizer::WordPieceTokenizer(WordPieceTokenizer&&) noexcept = default;
WordPieceTokenizer& WordPieceTokenizer::operator=(WordPieceTokenizer&&) noexcept = default;
WordPieceTokenizer::~WordPieceTokenizer() = default;

WordPieceTokenizer WordPieceTokenizer::parse(std::string_view vocabulary, std::string_view name,
                                             const WordPieceOptions& options) {
  TS_CHECK(options.max_word_characters > 0, kWordPiece,
           "max_word_characters must be positive; got ", options.max_word_characters, ".");
  check_utf8(vocabulary, kWordPiece, name);
  auto model = std::make_unique<Model>(options);
  model->text = strip_byte_order_mark(vocabulary);
  model->tokens = split_lines(model->text);
  TS_CHECK_AS(FormatError, model->tokens.size() < (size_t{1} << 31), kWordPiece, "'", name,
              "' has more than 2^31 lines; give the right file.");
  for (size_t i = 0; i < model->tokens.size(); ++i) {
    const std::string_view token = model->tokens[i];
    const auto id = static_cast<TokenId>(i);
    TS_CHECK_AS(FormatError, !token.empty(), kWordPiece, "every line is a token; '", name,
                "' line ", i + 1, " is empty; get the file again.");
    TS_CHECK_AS(FormatError, model->pieces.add(token, id), kWordPiece,
                "every token must stand once; '", name, "' line ", i + 1, " repeats '", token,
                "'; get the file again.");
  }
  const auto special = [&](const std::string& token) {
    const TokenId* const found = model->pieces.find(token);
    TS_CHECK_AS(FormatError, found != nullptr, kWordPiece,
                "special tokens must be in the vocabulary; '", name, "' lacks '", token,
                "'; give the right file or set the token's name in the options.");
    model->special.add(token, *found);
    return *found;
  };
  model->padding = special(options.padding);
  model->unknown = special(options.unknown);
  model->first = special(options.first);
  model->separator = special(options.separator);
  model->mask = special(options.mask);
  model->lower_case = options.lower_case;
  model->parse_special = options.parse_special_tokens;
  return WordPieceTokenizer(std::move(model));
}

WordPieceTokenizer WordPieceTokenizer::from_file(const std::string& vocabulary,
                                                 const WordPieceOptions& options) {
  const MappedFile file(vocabulary);
  return parse(file.text(), vocabulary, options);
}

namespace {

using Json = nlohmann::json;

// A JSON object of the folder; empty where there is no such file.
Json object_in(const std::filesystem::path& file) {
  if (!std::filesystem::exists(file)) return Json::object();
  Json json = read_bounded_json(file.string());
  TS_CHECK_AS(FormatError, json.is_object(), kWordPiece, "'", file.string(),
              "' must be a JSON object; it is not; get the file again.");
  return json;
}

// A boolean field; nothing where it is absent or null.
std::optional<bool> flag_in(const Json& json, const char* field, const std::string& where) {
  const auto found = json.find(field);
  if (found == json.end() || found->is_null()) return {};
  TS_CHECK_AS(FormatError, found->is_boolean(), kWordPiece, "the field '", field, "' of '", where,
              "' must be true or false; it is ", found->dump(), "; get the file again.");
  return found->get<bool>();
}

}  // namespace

WordPieceTokenizer WordPieceTokenizer::from_pretrained(const std::string& folder,
                                                       const WordPieceOptions& options) {
  const std::filesystem::path path(folder);
  const std::string config_path = (path / "tokenizer_config.json").string();
  const Json config = object_in(config_path);
  WordPieceOptions read = options;
  std::optional<bool> lower = flag_in(config, "do_lower_case", config_path);
  if (!lower) {
    const std::string whole_path = (path / "tokenizer.json").string();
    const Json normalizer = object_in(whole_path).value("normalizer", Json());
    if (normalizer.is_object()) lower = flag_in(normalizer, "lowercase", whole_path);
  }
  read.lower_case = lower.value_or(true);
  const auto require = [&](const char* field, bool value) {
    const auto word = [](bool is) { return is ? "true" : "false"; };
    TS_CHECK_AS(UnsupportedError, flag_in(config, field, config_path).value_or(value) == value,
                kWordPiece, "'", config_path, "' has ", field, " ", word(!value),
                "; this tokenizer knows ", word(value), " where do_lower_case is ",
                word(read.lower_case), ".");
  };
  require("strip_accents", read.lower_case);
  require("tokenize_chinese_chars", true);
  require("do_basic_tokenize", true);
  for (const auto& [field, token] :
       {std::pair("pad_token", &read.padding), std::pair("unk_token", &read.unknown),
        std::pair("cls_token", &read.first), std::pair("sep_token", &read.separator),
        std::pair("mask_token", &read.mask)}) {
    Json value = config.value(field, Json());
    if (value.is_object()) value = Json(value.value("content", Json()));
    if (value.is_string()) *token = value.get<std::string>();
  }
  return from_file((path / "vocab.txt").string(), read);
}

int64_t WordPieceTokenizer::vocab_size() const { return model_->size(); }

void WordPieceTokenizer::encode(std::string_view text, std::vector<TokenId>& ids) const {
  WordCachePool::Lease cache(model_->caches);
  if (!model_->parse_special) {
    model_->encode_plain(text, *cache, ids);
    return;
  }
  model_->special.split(
      text, [&](std::string_view plain) { model_->encode_plain(plain, *cache, ids); },
      [&](TokenId id) { ids.push_back(id); });
}

Encoding WordPieceTokenizer::encode_text(std::string_view text,
                                         const EncodeOptions& options) const {
  return model_->assemble(encode(text), nullptr, options);
}

Encoding WordPieceTokenizer::encode_pair(std::string_view first, std::string_view second,
                                         const EncodeOptions& options) const {
  std::vector<TokenId> b = encode(second);
  return model_->assemble(encode(first), &b, options);
}

EncodingBatch WordPieceTokenizer::encode_batch(std::span<const std::string> first,
                                               std::span<const std::string> second,
                                               const EncodeOptions& options) const {
  TS_CHECK(!first.empty(), kWordPiece, "a batch has at least one text; got none.");
  TS_CHECK(second.empty() || second.size() == first.size(), kWordPiece,
           "a batch of pairs has as many second as first texts; got ", first.size(), " and ",
           second.size(), ".");
  std::vector<Encoding> encodings;
  size_t length = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    encodings.push_back(second.empty() ? encode_text(first[i], options)
                                       : encode_pair(first[i], second[i], options));
    length = std::max(length, encodings.back().ids.size());
  }
  const Shape shape{static_cast<int64_t>(first.size()), static_cast<int64_t>(length)};
  EncodingBatch batch{raw::empty(shape, kI64), raw::empty(shape, kI64), raw::empty(shape, kI64)};
  auto* ids = batch.ids.data_as<int64_t>();
  auto* type_ids = batch.type_ids.data_as<int64_t>();
  auto* mask = batch.attention_mask.data_as<int64_t>();
  for (Encoding& encoding : encodings) {
    model_->pad(encoding, static_cast<int64_t>(length));
    ids = std::copy(encoding.ids.begin(), encoding.ids.end(), ids);
    type_ids = std::copy(encoding.type_ids.begin(), encoding.type_ids.end(), type_ids);
    mask = std::copy(encoding.attention_mask.begin(), encoding.attention_mask.end(), mask);
  }
  return batch;
}

std::string WordPieceTokenizer::decode(std::span<const TokenId> ids) const {
  return decode(ids, DecodeOptions());
}

std::string WordPieceTokenizer::decode(std::span<const TokenId> ids,
                                       const DecodeOptions& options) const {
  std::string text;
  for (const TokenId id : ids) {
    std::string_view token = model_->token(id);
    if (options.skip_special_tokens && model_->special.contains(id)) continue;
    if (!text.empty()) {
      if (token.starts_with("##")) {
        token.remove_prefix(2);
      } else {
        text += ' ';
      }
    }
    text += token;
  }
  return options.clean_up_spaces ? tessera::data::clean_up_spaces(text) : text;
}

std::string_view WordPieceTokenizer::token_bytes(TokenId id) const { return model_->token(id); }
TokenId WordPieceTokenizer::padding_id() const { return model_->padding; }
TokenId WordPieceTokenizer::unknown_id() const { return model_->unknown; }
TokenId WordPieceTokenizer::first_id() const { return model_->first; }
TokenId WordPieceTokenizer::separator_id() const { return model_->separator; }
TokenId WordPieceTokenizer::mask_id() const { return model_->mask; }

}  // namespace tessera::data
