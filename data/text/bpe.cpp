#include <tessera/data/text/bpe.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/bpe_merges.h>
#include <tessera/data/text/byte_chars.h>
#include <tessera/data/text/gpt2_pattern.h>
#include <tessera/data/text/json_error.h>
#include <tessera/data/text/special_tokens.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/word_cache.h>

namespace tessera::data {
namespace {

constexpr std::string_view kBpe = "BpeTokenizer";

// Reads {"token": id, ...} without a tree, and sees what a tree would hide: a key that comes twice.
class VocabularyHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit VocabularyHandler(std::string_view file) : file_(file) {}

  std::vector<std::pair<std::string, int64_t>> take() { return std::move(entries_); }

  bool start_object(size_t) override {
    if (depth_++ > 0) refuse("an object");
    return true;
  }
  bool end_object() override { return true; }
  bool key(string_t& value) override {
    key_ = value;
    return true;
  }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override {
    return add(value > uint64_t{INT64_MAX} ? INT64_MAX : static_cast<int64_t>(value));
  }
  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_float(number_float_t, const string_t&) override { return refuse("a fraction"); }
  bool string(string_t&) override { return refuse("a string"); }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool start_array(size_t) override { return refuse("an array"); }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    TS_THROW(FormatError, kBpe, "the vocabulary must be a JSON object; '", file_, "' byte offset ",
             position, ": ", json_reason(error), "; get the file again.");
  }

 private:
  bool add(int64_t id) {
    if (depth_ == 0) refuse("a number");
    entries_.emplace_back(std::move(key_), id);
    return true;
  }
  [[noreturn]] bool refuse(std::string_view what) {
    TS_THROW(FormatError, kBpe, "the vocabulary must be a JSON object from token to id; '", file_,
             "' has ", what,
             depth_ > 0 ? " for token '" + key_ + "'" : std::string(" at its start"),
             "; give the right file.");
  }

  std::string_view file_;
  std::vector<std::pair<std::string, int64_t>> entries_;
  std::string key_;
  int depth_ = 0;
};

}  // namespace

struct BpeTokenizer::Model {
  std::string text;            // the bytes of all tokens, one after the other
  std::vector<uint32_t> ends;  // where each token ends in text
  std::unordered_map<std::string_view, TokenId> ids;  // views into text
  std::array<TokenId, 256> byte_ids{};
  MergeTable merges;
  SpecialTokens special;
  bool parse_special = false;
  std::optional<TokenId> end_of_text;
  mutable WordCachePool caches;

  int64_t size() const { return static_cast<int64_t>(ends.size()); }

  std::string_view bytes(TokenId id) const {
    TS_CHECK_INDEX(id >= 0 && id < size(), kBpe, "ids are 0 to ", size() - 1, "; got ", id,
                   "; was the text encoded with another tokenizer?");
    const auto i = static_cast<size_t>(id);
    const uint32_t start = i == 0 ? 0 : ends[i - 1];
    return std::string_view(text).substr(start, ends[i] - start);
  }

  void encode_plain(std::string_view source, WordCache& cache, std::vector<TokenId>& out) const {
    for (size_t start = 0; start < source.size();) {
      const size_t end = end_of_gpt2_piece(source, start);
      const std::string_view piece = source.substr(start, end - start);
      if (piece.size() <= WordCache::kMaxBytes) [[likely]] {
        const WordCache::Key key = WordCache::key_of(piece, source.size() - start);
        WordCache::Entry& entry = cache.place(key);
        if (WordCache::holds(entry, key)) [[likely]] {
          out.insert(out.end(), entry.ids, entry.ids + entry.count);
        } else {
          const size_t before = out.size();
          merge(piece, out);
          const size_t count = out.size() - before;
          if (count <= WordCache::kMaxIds) WordCache::store(entry, key, &out[before], count);
        }
      } else {
        merge(piece, out);
      }
      start = end;
    }
  }

  void merge(std::string_view piece, std::vector<TokenId>& out) const {
    const size_t before = out.size();
    out.resize(before + piece.size());
    TokenId* const tokens = out.data() + before;
    for (size_t i = 0; i < piece.size(); ++i) {
      tokens[i] = byte_ids[static_cast<unsigned char>(piece[i])];
    }
    out.resize(before + merge_tokens(merges, tokens, nullptr, piece.size()));
  }
};

BpeTokenizer::BpeTokenizer(std::unique_ptr<Model> model) : model_(std::move(model)) {}
BpeTokenizer::BpeTokenizer(BpeTokenizer&&) noexcept = default;
BpeTokenizer& BpeTokenizer::operator=(BpeTokenizer&&) noexcept = default;
BpeTokenizer::~BpeTokenizer() = default;

BpeTokenizer BpeTokenizer::parse(std::string_view vocabulary, std::string_view vocabulary_name,
                                 std::string_view merges, std::string_view merges_name,
                                 const BpeOptions& options) {
  VocabularyHandler handler(vocabulary_name);
  nlohmann::json::sax_parse(vocabulary.begin(), vocabulary.end(), &handler);
  const std::vector<std::pair<std::string, int64_t>> entries = handler.take();
  TS_CHECK_AS(FormatError, vocabulary.size() < (size_t{1} << 31), kBpe, "'", vocabulary_name,
              "' has more than 2^31 bytes; give the right file.");
  const auto is_special = [&](const std::string& token) {
    return std::find(options.special_tokens.begin(), options.special_tokens.end(), token) !=
           options.special_tokens.end();
  };

  auto model = std::make_unique<Model>();
  std::unordered_map<std::string_view, TokenId> written;  // as the files write tokens
  std::vector<const std::string*> by_id(entries.size(), nullptr);
  for (const auto& [token, id] : entries) {
    TS_CHECK_AS(FormatError, id >= 0 && id < static_cast<int64_t>(entries.size()), kBpe,
                "ids must be 0 to the number of tokens less 1; '", vocabulary_name, "' has id ", id,
                " for '", token, "' among ", entries.size(), " tokens; get the file again.");
    TS_CHECK_AS(FormatError, by_id[static_cast<size_t>(id)] == nullptr, kBpe,
                "every id must stand once; '", vocabulary_name, "' gives id ", id, " to '",
                *by_id[static_cast<size_t>(id)], "' and '", token, "'; get the file again.");
    by_id[static_cast<size_t>(id)] = &token;
    TS_CHECK_AS(FormatError, written.emplace(token, static_cast<TokenId>(id)).second, kBpe,
                "every token must stand once; '", vocabulary_name, "' has '", token,
                "' twice; get the file again.");
  }
  for (size_t id = 0; id < by_id.size(); ++id) {
    std::optional<std::string> bytes = bytes_of(*by_id[id]);
    if (!bytes && is_special(*by_id[id])) bytes = *by_id[id];
    TS_CHECK_AS(FormatError, bytes.has_value(), kBpe,
                "tokens are written in the characters that GPT-2 uses for bytes; '",
                vocabulary_name, "' has '", *by_id[id], "' (id ", id,
                "); name it in special_tokens if it is one, or give a byte-level vocabulary.");
    model->text += *bytes;
    model->ends.push_back(static_cast<uint32_t>(model->text.size()));
  }
  for (TokenId id = 0; id < model->size(); ++id) model->ids.emplace(model->bytes(id), id);
  for (int c = 0; c < kByteChars; ++c) {
    if (kByteOfChar[static_cast<size_t>(c)] < 0) continue;
    std::string token;
    append_utf8(static_cast<char32_t>(c), token);
    const auto found = written.find(token);
    TS_CHECK_AS(FormatError, found != written.end(), kBpe, "every byte needs a token; '",
                vocabulary_name, "' has none for byte ", kByteOfChar[static_cast<size_t>(c)], " ('",
                token, "'); give a byte-level vocabulary.");
    model->byte_ids[static_cast<size_t>(kByteOfChar[static_cast<size_t>(c)])] = found->second;
  }

  std::vector<std::string_view> lines = split_lines(merges);
  model->merges.reserve(lines.size());
  uint32_t rank = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string_view line = lines[i];
    if (line.empty() || (i == 0 && line.starts_with("#version"))) continue;
    const size_t space = line.find(' ');
    TS_CHECK_AS(FormatError,
                space != line.npos && space > 0 && space + 1 < line.size() &&
                    line.find(' ', space + 1) == line.npos,
                kBpe, "a merge is two tokens with a space between; '", merges_name, "' line ",
                i + 1, " is '", line.substr(0, 60), "'; get the file again.");
    const auto id_of = [&](std::string_view token) {
      const auto found = written.find(token);
      TS_CHECK_AS(FormatError, found != written.end(), kBpe,
                  "merges must be made of and make tokens of the vocabulary; '", merges_name,
                  "' line ", i + 1, " needs '", token.substr(0, 60), "', which '", vocabulary_name,
                  "' lacks; give two files that belong together.");
      return found->second;
    };
    const std::string_view left = line.substr(0, space), right = line.substr(space + 1);
    const Merge merge = {rank++, id_of(std::string(left).append(right))};
    TS_CHECK_AS(FormatError, model->merges.insert(id_of(left), id_of(right), merge), kBpe,
                "every merge must stand once; '", merges_name, "' line ", i + 1, " repeats '",
                line.substr(0, 60), "'; get the file again.");
  }

  for (const std::string& token : options.special_tokens) {
    const auto found = written.find(token);
    TS_CHECK_AS(FormatError, found != written.end(), kBpe,
                "special tokens must be in the vocabulary; '", vocabulary_name, "' lacks '", token,
                "'; leave it out of special_tokens or add it to the file.");
    model->special.add(token, found->second);
    if (!model->end_of_text) model->end_of_text = found->second;
  }
  model->parse_special = options.parse_special_tokens;
  return BpeTokenizer(std::move(model));
}

BpeTokenizer BpeTokenizer::from_files(const std::string& vocabulary, const std::string& merges,
                                      const BpeOptions& options) {
  const MappedFile vocabulary_file(vocabulary), merges_file(merges);
  return parse(vocabulary_file.text(), vocabulary, merges_file.text(), merges, options);
}

BpeTokenizer BpeTokenizer::from_folder(const std::string& folder, const BpeOptions& options) {
  const Files files = files_in(folder);
  return from_files(files.vocabulary, files.merges, options);
}

BpeTokenizer::Files BpeTokenizer::files_in(const std::string& folder) {
  const std::filesystem::path base(folder);
  for (const auto& [vocabulary, merges] :
       {std::pair("vocab.json", "merges.txt"), std::pair("encoder.json", "vocab.bpe")}) {
    if (std::filesystem::exists(base / vocabulary)) {
      return {(base / vocabulary).string(), (base / merges).string()};
    }
  }
  TS_THROW(IoError, kBpe, "'", folder,
           "' must hold vocab.json and merges.txt, or encoder.json and vocab.bpe; it has neither; "
           "check the path.");
}

int64_t BpeTokenizer::vocab_size() const { return model_->size(); }

void BpeTokenizer::encode(std::string_view text, std::vector<TokenId>& ids) const {
  WordCachePool::Lease cache(model_->caches);
  reserve_more(ids, text.size() / 3);  // English is about 4 bytes a token
  if (!model_->parse_special) {
    model_->encode_plain(text, *cache, ids);
    return;
  }
  model_->special.split(
      text, [&](std::string_view plain) { model_->encode_plain(plain, *cache, ids); },
      [&](TokenId id) { ids.push_back(id); });
}

std::string BpeTokenizer::decode(std::span<const TokenId> ids) const {
  std::string text;
  text.reserve(ids.size() * 4);
  for (const TokenId id : ids) text += model_->bytes(id);
  return text;
}

std::string_view BpeTokenizer::token_bytes(TokenId id) const { return model_->bytes(id); }
std::optional<TokenId> BpeTokenizer::end_of_text() const { return model_->end_of_text; }

std::optional<TokenId> BpeTokenizer::find(std::string_view token) const {
  const auto found = model_->ids.find(token);
  if (found == model_->ids.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string_view> split_gpt2(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (size_t start = 0; start < text.size();) {
    const size_t end = end_of_gpt2_piece(text, start);
    pieces.push_back(text.substr(start, end - start));
    start = end;
  }
  return pieces;
}

}  // namespace tessera::data
