#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <tuple>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/byte_chars.h>
#include <tessera/data/text/json_error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>
#include <tessera/data/tokenizer_json/added_tokens.h>
#include <tessera/data/tokenizer_json/chat_template_cache.h>
#include <tessera/data/tokenizer_json/decoders.h>
#include <tessera/data/tokenizer_json/normalizers.h>
#include <tessera/data/tokenizer_json/post_processors.h>
#include <tessera/data/tokenizer_json/pre_tokenizers.h>
#include <tessera/data/tokenizer_json/pretrained_config.h>
#include <tessera/data/tokenizer_json/token_model.h>
#include <tessera/data/tokenizer_json/truncation.h>

namespace tessera::data {
namespace {

// Places in a text are u32, and normalizers make it at most some times longer.
constexpr size_t kMostTextBytes = size_t{1} << 27;
// By normalizers and pre-tokenizers: decomposed characters are up to 11 times as long.
constexpr size_t kMostGrowth = 16, kMostGrowthBytes = size_t{1} << 20;

// Where each token of a text is in it, and its spaces where the post-processor asks for them.
struct Places {
  std::vector<ByteSpan> spans;
  bool counts_spaces = false;
  std::vector<uint32_t> leading_spaces, trailing_spaces;
};

bool is_space_of_token(char32_t c) { return c == kCharOfByte[' '] || is_white_space(c); }

void count_spaces(std::string_view token, Places& places) {
  uint32_t leading = 0, run = 0;
  bool only_spaces = true;
  for (size_t place = 0; place < token.size();) {
    const CodePoint c = decode_utf8(token, place);
    place += c.length;
    if (is_space_of_token(c.value)) {
      ++run;
    } else {
      run = 0;
      only_spaces = false;
    }
    if (only_spaces) leading = run;
  }
  places.leading_spaces.push_back(leading);
  places.trailing_spaces.push_back(run);
}

// From byte spans to characters, as the package converts them.
std::vector<TokenOffset> characters_of(std::string_view text, const std::vector<ByteSpan>& spans) {
  std::vector<uint32_t> character(text.size());
  uint32_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i > 0 && (text[i] & 0xC0) != 0x80) ++count;
    character[i] = count;
  }
  std::vector<TokenOffset> offsets;
  offsets.reserve(spans.size());
  for (const ByteSpan& span : spans) {
    if (span.begin >= text.size() || (span.end > text.size() && span.end != span.begin)) {
      offsets.push_back({span.begin, span.end});
      continue;
    }
    const int64_t end = span.end < text.size() ? character[span.end] : character[span.end - 1] + 1;
    offsets.push_back({character[span.begin], end});
  }
  return offsets;
}

}  // namespace

struct PretrainedTokenizer::Model {
  std::unique_ptr<Normalizer> normalizer;
  PreTokenizers pre_tokenizers;
  std::unique_ptr<TokenModel> model;
  AddedTokens added;
  std::optional<PostProcessor> post_processor;
  Decoder decoder;  // empty: tokens are joined by spaces
  bool decodes_byte_level = false;
  std::optional<Truncation> truncation;
  std::optional<Padding> padding;
  PretrainedConfig config;
  std::vector<std::string> bytes;  // of each token
  bool always_tracked = false;
  mutable WordCachePool caches;

  // The token as decoders get it; nullptr: there is none.
  const std::string* written(TokenId id) const {
    if (const AddedToken* const token = added.token(id)) return &token->matched;
    return model->vocabulary().token(id);
  }
  int64_t size() const { return std::max(model->vocabulary().end(), added.end()); }

  const std::string& checked(TokenId id) const {
    const std::string* const token = written(id);
    TS_CHECK_INDEX(token != nullptr, kPretrained, "ids are those of tokens, 0 to ", size() - 1,
                   "; got ", id, "; was the text encoded with another tokenizer?");
    return *token;
  }

  // `text` is valid UTF-8. places: nullptr where nobody asks.
  void tokenize(std::string_view text, std::vector<TokenId>& ids, Places* places) const {
    TS_CHECK(text.size() <= kMostTextBytes, kPretrained, "a text has at most ", kMostTextBytes,
             " bytes; got ", text.size(), "; cut it.");
    WordCachePool::Lease cache(caches);
    if (!added.any(false)) return tokenize_segment(text, 0, *cache, ids, places);
    std::vector<Piece> segments;
    added.find(text, false, segments);
    for (const Piece& segment : segments) {
      const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
      if (segment.id < 0) {
        tokenize_segment(part, segment.begin, *cache, ids, places);
        continue;
      }
      ids.push_back(segment.id);
      if (places == nullptr) continue;
      places->spans.push_back({segment.begin, segment.end});
      if (places->counts_spaces) count_spaces(part, *places);
    }
  }

  void tokenize_segment(std::string_view text, uint32_t origin, WordCache& cache,
                        std::vector<TokenId>& ids, Places* places) const {
    PreTokenized work;
    work.text.tracked = places != nullptr || always_tracked;
    work.text.most_bytes = kMostGrowth * text.size() + kMostGrowthBytes;
    work.text.append_original(text, origin);
    if (normalizer != nullptr) normalizer->run(work.text, origin);
    if (work.text.text.empty()) return;
    added.find(work.text.text, true, work.pieces);
    for (Piece& piece : work.pieces) {
      piece.origin = work.text.tracked ? work.text.spans[piece.begin].begin : origin + piece.begin;
    }
    for (const auto& step : pre_tokenizers.steps) step->run(work);
    std::vector<ByteSpan> local;
    for (const Piece& piece : work.pieces) {
      const std::string_view view = work.view(piece);
      if (piece.id >= 0) {
        ids.push_back(piece.id);
        if (places == nullptr) continue;
        places->spans.push_back(original_span(work.text, piece, {0, piece.end - piece.begin}));
        if (places->counts_spaces) count_spaces(view, *places);
        continue;
      }
      if (places == nullptr) {
        model->encode_cached(view, work.text.text.size() - piece.begin, cache, ids);
        continue;
      }
      local.clear();
      const size_t before = ids.size();
      model->encode(view, ids, &local);
      for (size_t i = 0; i < local.size(); ++i) {
        places->spans.push_back(original_span(work.text, piece, local[i]));
        if (places->counts_spaces) {
          count_spaces(*model->vocabulary().token(ids[before + i]), *places);
        }
      }
    }
  }

  static ByteSpan original_span(const AlignedText& text, const Piece& piece,
                                const ByteSpan& local) {
    if (local.begin == local.end) return {piece.origin + local.begin, piece.origin + local.end};
    if (local.end > piece.end - piece.begin) return local;
    return {text.spans[piece.begin + local.begin].begin,
            text.spans[piece.begin + local.end - 1].end};
  }

  EncodingPart encode_part(std::string_view text, TokenId type_id) const {
    EncodingPart part;
    Places places;
    places.counts_spaces = post_processor && post_processor->trims;
    tokenize(text, part.encoding.ids, &places);
    const size_t count = part.encoding.ids.size();
    part.encoding.type_ids.assign(count, type_id);
    part.encoding.attention_mask.assign(count, 1);
    part.encoding.special_tokens_mask.assign(count, 0);
    part.encoding.offsets = characters_of(text, places.spans);
    part.leading_spaces = std::move(places.leading_spaces);
    part.trailing_spaces = std::move(places.trailing_spaces);
    part.leading_spaces.resize(count, 0);
    part.trailing_spaces.resize(count, 0);
    return part;
  }

  // What is kept of the texts, and behind it, if asked for, what overflows.
  std::vector<PretrainedEncoding> encode_unpadded(std::string_view first,
                                                  const std::string_view* second,
                                                  const PretrainedEncodeOptions& options,
                                                  bool overflowing) const {
    std::vector<EncodingPart> parts;
    for (const std::string_view* text : {&std::as_const(first), second}) {
      if (text == nullptr) continue;
      const auto type_id = static_cast<TokenId>(parts.size());
      const bool valid = !find_invalid_utf8(*text);
      parts.push_back(valid ? encode_part(*text, type_id)
                            : encode_part(replace_invalid_utf8(*text), type_id));
    }
    const auto& how = options.truncation ? options.truncation : truncation;
    if (!how) return {whole_of(std::move(parts), options)};
    const int64_t added_tokens = !options.add_special_tokens || !post_processor ? 0
                                 : parts.size() == 1 ? post_processor->added_single
                                                     : post_processor->added_pair;
    const std::vector<int64_t> lengths = kept_lengths(parts, *how, added_tokens);
    if (!overflowing) {
      for (size_t i = 0; i < parts.size(); ++i) truncate(parts[i], lengths[i], how->left);
      return {whole_of(std::move(parts), options)};
    }
    std::vector<std::vector<EncodingPart>> stretches;
    for (size_t i = 0; i < parts.size(); ++i) {
      stretches.push_back(stretches_of(parts[i], lengths[i], how->stride, how->left));
    }
    std::vector<PretrainedEncoding> result;
    if (parts.size() == 1) {
      for (EncodingPart& stretch : stretches[0]) result.push_back(whole_of({stretch}, options));
      return result;
    }
    // The package's order: what is kept; each stretch that overflows the first text with all of the
    // second; what is kept of the first with the others of the second.
    const auto& [a, b] = std::tie(stretches[0], stretches[1]);
    result.push_back(whole_of({a[0], b[0]}, options));
    for (size_t i = 1; i < a.size(); ++i) {
      for (const EncodingPart& other : b) result.push_back(whole_of({a[i], other}, options));
    }
    for (size_t j = 1; j < b.size(); ++j) result.push_back(whole_of({a[0], b[j]}, options));
    return result;
  }

  // Truncated texts with special tokens.
  PretrainedEncoding whole_of(std::vector<EncodingPart> parts,
                              const PretrainedEncodeOptions& options) const {
    if (post_processor) post_processor->run(parts, options.add_special_tokens);
    PretrainedEncoding whole;
    for (EncodingPart& part : parts) {
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(whole.ids, part.encoding.ids);
      append(whole.type_ids, part.encoding.type_ids);
      append(whole.attention_mask, part.encoding.attention_mask);
      append(whole.special_tokens_mask, part.encoding.special_tokens_mask);
      append(whole.offsets, part.encoding.offsets);
    }
    return whole;
  }

  std::vector<PretrainedEncoding> encode_one(std::string_view first, const std::string_view* second,
                                             const PretrainedEncodeOptions& options,
                                             bool overflowing = false) const {
    std::vector<PretrainedEncoding> encodings =
        encode_unpadded(first, second, options, overflowing);
    if (const auto& how = options.padding ? options.padding : padding) {
      pad_all(encodings, {encodings.data(), 1}, *how);
    }
    return encodings;
  }

  // What each token adds inside of a text: the decoder's answer to it behind another one.
  void read_bytes() {
    bytes.resize(static_cast<size_t>(size()));
    for (TokenId id = 0; id < size(); ++id) {
      const std::string* const token = written(id);
      if (token == nullptr) continue;
      std::string& out = bytes[static_cast<size_t>(id)];
      if (decodes_byte_level) {
        out = bytes_of(*token).value_or(*token);
        continue;
      }
      unsigned byte = 0;
      if (token->size() == 6 && std::sscanf(token->c_str(), "<0x%2X>", &byte) == 1 &&
          added.token(id) == nullptr) {
        out = static_cast<char>(byte);
        continue;
      }
      constexpr std::string_view kSpaceMark = "\xE2\x96\x81";
      for (size_t place = 0; place < token->size();) {
        const bool is_space = std::string_view(*token).substr(place).starts_with(kSpaceMark);
        out += is_space ? ' ' : (*token)[place];
        place += is_space ? kSpaceMark.size() : 1;
      }
    }
  }
};

PretrainedTokenizer::PretrainedTokenizer(std::unique_ptr<Model> model)
    : model_(std::move(model)), chat_templates_(std::make_shared<ChatTemplateCache>()) {}
PretrainedTokenizer::PretrainedTokenizer(PretrainedTokenizer&&) noexcept = default;
PretrainedTokenizer& PretrainedTokenizer::operator=(PretrainedTokenizer&&) noexcept = default;
PretrainedTokenizer::~PretrainedTokenizer() = default;

PretrainedTokenizer PretrainedTokenizer::parse(std::string_view text, const std::string& name) {
  std::string why;
  const Json json = parse_bounded_json(text, name, &why);
  TS_CHECK_AS(FormatError, !json.is_discarded(), kPretrained, "'", name,
              "' must be JSON: ", replace_invalid_utf8(why), "; get the file again.");
  const std::string place = "'" + name + "' ";
  JsonFields fields(json, "'" + name + "'");
  if (const Json* const version = fields.find("version"); version && *version != Json("1.0")) {
    fields.refuse("the version " + version->dump());
  }
  auto model = std::make_unique<Model>();
  if (const Json* const value = fields.find("normalizer")) {
    model->normalizer = read_normalizer(*value, place + "normalizer");
  }
  const Json& model_json = fields.at("model");
  if (const Json* const value = fields.find("pre_tokenizer")) {
    model->pre_tokenizers =
        read_pre_tokenizers(*value, place + "pre_tokenizer", model_takes_bytes(model_json));
  }
  model->always_tracked = model->pre_tokenizers.needs_spans;
  model->model = read_model(model_json, place + "model", model->pre_tokenizers.bytes);
  if (const Json* const value = fields.find("added_tokens")) {
    model->added.read(*value, place + "added_tokens", model->model->vocabulary(),
                      model->normalizer.get());
  }
  if (const Json* const value = fields.find("post_processor")) {
    model->post_processor = read_post_processor(*value, place + "post_processor");
  }
  if (const Json* const value = fields.find("decoder")) {
    model->decoder = read_decoder(*value, place + "decoder");
    model->decodes_byte_level = value->value("type", "") == "ByteLevel";
  }
  if (fields.find("truncation") != nullptr) {
    model->truncation = read_truncation(fields.object("truncation"));
  }
  if (fields.find("padding") != nullptr) model->padding = read_padding(fields.object("padding"));
  fields.finish();
  model->read_bytes();
  return PretrainedTokenizer(std::move(model));
}

PretrainedTokenizer PretrainedTokenizer::from_file(const std::string& path) {
  const MappedFile file(path);
  return parse(file.text(), path);
}

PretrainedTokenizer PretrainedTokenizer::from_pretrained(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder) / "tokenizer.json";
  for (const char* const other : {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model"}) {
    TS_CHECK_AS(UnsupportedError,
                std::filesystem::exists(path) ||
                    !std::filesystem::exists(std::filesystem::path(folder) / other),
                kPretrained, "'", folder, "' has a SentencePiece model ('", other,
                "') and no tokenizer.json; read it with data::SentencePieceTokenizer, or make a "
                "tokenizer.json with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder).");
  }
  PretrainedTokenizer tokenizer = from_file(path.string());
  tokenizer.model_->config = read_pretrained_config(folder);
  return tokenizer;
}

int64_t PretrainedTokenizer::vocab_size() const { return model_->size(); }
const PretrainedConfig& PretrainedTokenizer::config() const { return model_->config; }

void PretrainedTokenizer::encode(std::string_view text, std::vector<TokenId>& ids) const {
  reserve_more(ids, text.size() / 3);
  if (find_invalid_utf8(text)) {
    model_->tokenize(replace_invalid_utf8(text), ids, nullptr);
  } else {
    model_->tokenize(text, ids, nullptr);
  }
}

PretrainedEncoding PretrainedTokenizer::encode_text(std::string_view text,
                                                    const PretrainedEncodeOptions& options) const {
  return std::move(model_->encode_one(text, nullptr, options)[0]);
}

PretrainedEncoding PretrainedTokenizer::encode_pair(std::string_view first, std::string_view second,
                                                    const PretrainedEncodeOptions& options) const {
  return std::move(model_->encode_one(first, &second, options)[0]);
}

std::vector<PretrainedEncoding> PretrainedTokenizer::encode_overflowing(
    std::string_view first, const std::optional<std::string_view>& second,
    const PretrainedEncodeOptions& options) const {
  return model_->encode_one(first, second ? &*second : nullptr, options, true);
}

std::vector<PretrainedEncoding> PretrainedTokenizer::encode_batch(
    std::span<const std::string> first, std::span<const std::string> second,
    const PretrainedEncodeOptions& options) const {
  TS_CHECK(!first.empty(), kPretrained, "a batch has at least one text; got none.");
  TS_CHECK(second.empty() || second.size() == first.size(), kPretrained,
           "a batch of pairs has as many second as first texts; got ", first.size(), " and ",
           second.size(), ".");
  std::vector<PretrainedEncoding> encodings;
  for (size_t i = 0; i < first.size(); ++i) {
    const std::string_view other = second.empty() ? std::string_view() : second[i];
    encodings.push_back(std::move(
        model_->encode_unpadded(first[i], second.empty() ? nullptr : &other, options, false)[0]));
  }
  if (const auto& how = options.padding ? options.padding : model_->padding) {
    pad_all(encodings, encodings, *how);
  }
  return encodings;
}

std::string PretrainedTokenizer::decode(std::span<const TokenId> ids) const {
  return decode(ids, false);
}

std::string PretrainedTokenizer::decode(std::span<const TokenId> ids,
                                        bool skip_special_tokens) const {
  if (model_->decodes_byte_level) {  // the decoder's answer, without its list of texts
    std::string text;
    text.reserve(ids.size() * 4);
    for (const TokenId id : ids) {
      const std::string& token = model_->checked(id);
      if (skip_special_tokens && model_->added.is_special(token)) continue;
      text += model_->bytes[static_cast<size_t>(id)];
    }
    return find_invalid_utf8(text) ? replace_invalid_utf8(text) : text;
  }
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const TokenId id : ids) {
    const std::string& token = model_->checked(id);
    if (!skip_special_tokens || !model_->added.is_special(token)) tokens.push_back(token);
  }
  if (model_->decoder) model_->decoder(tokens);
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && !model_->decoder) text += ' ';
    text += tokens[i];
  }
  return text;
}

std::string_view PretrainedTokenizer::token_bytes(TokenId id) const {
  model_->checked(id);
  return model_->bytes[static_cast<size_t>(id)];
}

std::optional<TokenId> PretrainedTokenizer::end_of_text() const {
  const std::optional<std::string>& name = model_->config.eos_token;
  return name ? token_to_id(*name) : std::nullopt;
}

std::optional<TokenId> PretrainedTokenizer::token_to_id(std::string_view token) const {
  if (const AddedToken* const added = model_->added.find_content(token)) return added->id;
  return model_->model->vocabulary().find(token);
}

std::optional<std::string> PretrainedTokenizer::id_to_token(TokenId id) const {
  if (const AddedToken* const token = model_->added.token(id)) return token->content;
  if (const std::string* const token = model_->model->vocabulary().token(id)) return *token;
  return std::nullopt;
}

}  // namespace tessera::data
