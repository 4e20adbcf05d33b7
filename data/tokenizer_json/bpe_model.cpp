// Byte pair encoding with the settings of the tokenizers package.
//
// [Note: words of a long piece]
// Files of SentencePiece's kind have no pre-tokenizer: the whole text is one piece, in which "▁"
// stands for each space. A character before "▁" and the "▁" can only come into one token if there
// is a merge whose left token ends with that character and whose right one begins with "▁". Where
// there is none the text is cut: the words are encoded one by one, from the cache where they are in
// it, and the ids are those of the whole piece.
#include <algorithm>
#include <array>
#include <cstdio>
#include <unordered_set>

#include <tessera/core/error.h>
#include <tessera/data/text/bpe_merges.h>
#include <tessera/data/text/byte_chars.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/token_model.h>

namespace tessera::data {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // "▁"

std::string last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (text[begin] & 0xC0) == 0x80) --begin;
  return std::string(text.substr(begin));
}

class BpeModel : public TokenModel {
 public:
  BpeModel(JsonFields& fields, bool bytes) : bytes_(bytes) {
    vocabulary_.read(fields.at("vocab"), fields.place() + ".vocab");
    read_settings(fields);
    read_symbols();
    read_merges(fields);
  }

  void encode(std::string_view piece, std::vector<TokenId>& ids,
              std::vector<ByteSpan>* places) const override {
    if (ignore_merges_) {
      if (const std::optional<TokenId> whole = find_piece(piece)) {
        ids.push_back(*whole);
        if (places != nullptr) places->push_back({0, static_cast<uint32_t>(piece.size())});
        return;
      }
    }
    const size_t before = ids.size();
    std::vector<uint32_t> lengths;
    add_symbols(piece, ids, places != nullptr ? &lengths : nullptr);
    const size_t count =
        merge_tokens(merges_, ids.data() + before, places != nullptr ? lengths.data() : nullptr,
                     ids.size() - before);
    ids.resize(before + count);
    if (places == nullptr) return;
    uint32_t place = 0;
    for (size_t i = 0; i < count; ++i) {
      places->push_back({place, place + lengths[i]});
      place += lengths[i];
    }
  }

 protected:
  // see [Note: words of a long piece]
  void encode_long(std::string_view piece, WordCache& cache,
                   std::vector<TokenId>& ids) const override {
    if (!cuts_at_spaces_) return encode(piece, ids, nullptr);
    for (size_t begin = 0; begin < piece.size();) {
      size_t end = begin;
      do {
        end = std::min(piece.find(kSpaceMark, end + 1), piece.size());
      } while (end < piece.size() &&
               joins_space_.contains(last_character(piece.substr(begin, end - begin))));
      const std::string_view word = piece.substr(begin, end - begin);
      if (word.size() <= WordCache::kMaxBytes) {
        encode_cached(word, piece.size() - begin, cache, ids);
      } else {
        encode(word, ids, nullptr);
      }
      begin = end;
    }
  }

 private:
  void read_settings(JsonFields& fields) {
    if (const Json* const dropout = fields.find("dropout")) {
      if (!dropout->is_number() || dropout->get<double>() != 0) {
        fields.refuse("dropout, which makes ids by chance");
      }
    }
    unknown_name_ = fields.optional_text("unk_token");
    if (unknown_name_) unknown_ = vocabulary_.find(*unknown_name_);
    prefix_ = fields.optional_text("continuing_subword_prefix").value_or("");
    suffix_ = fields.optional_text("end_of_word_suffix").value_or("");
    fuse_unknown_ = fields.flag("fuse_unk", false);
    byte_fallback_ = fields.flag("byte_fallback", false);
    ignore_merges_ = fields.flag("ignore_merges", false);
  }

  void read_symbols() {
    for (int byte = 0; byte < 256; ++byte) {
      std::string character;
      append_utf8(kCharOfByte[static_cast<size_t>(byte)], character);
      by_byte_[static_cast<size_t>(byte)] = vocabulary_.find(character).value_or(-1);
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
      fallbacks_[static_cast<size_t>(byte)] = vocabulary_.find(name).value_or(-1);
    }
    for (TokenId id = 0; id < vocabulary_.end(); ++id) {
      const std::string* const token = vocabulary_.token(id);
      if (token == nullptr || token->empty()) continue;
      const CodePoint c = decode_utf8(*token, 0);
      if (c.length != token->size() || c.value == kInvalidCodePoint) continue;
      if (c.value >= by_character_.size()) by_character_.resize(c.value + 1, -1);
      by_character_[c.value] = id;
    }
    if (!bytes_ || !ignore_merges_) return;
    for (TokenId id = 0; id < vocabulary_.end(); ++id) {
      const std::string* const token = vocabulary_.token(id);
      if (token == nullptr) continue;
      if (std::optional<std::string> raw = bytes_of(*token)) pieces_.emplace(std::move(*raw), id);
    }
  }

  void read_merges(JsonFields& fields) {
    const Json& list = fields.array("merges");
    const std::string place = fields.place() + ".merges";
    merges_.reserve(list.size());
    cuts_at_spaces_ = !bytes_ && !ignore_merges_ && prefix_.empty() && suffix_.empty() &&
                      vocabulary_.find(kSpaceMark).has_value();
    uint32_t rank = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const Json& entry = list[i];
      const bool is_pair =
          entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string();
      std::string_view left, right;
      if (is_pair) {
        left = entry[0].get_ref<const std::string&>();
        right = entry[1].get_ref<const std::string&>();
      } else if (entry.is_string()) {
        const std::string_view line = entry.get_ref<const std::string&>();
        if (line.starts_with("#version")) continue;
        const size_t space = line.find(' ');
        left = line.substr(0, space);
        right = space == line.npos ? std::string_view() : line.substr(space + 1);
        if (right.find(' ') != right.npos) right = {};
      }
      TS_CHECK_AS(FormatError, !left.empty() && right.size() > prefix_.size(), kPretrained, place,
                  "[", i, "] must be a pair of tokens, or two with a space between; it is ",
                  entry.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80),
                  "; get the file again.");
      add_merge(left, right, rank++, place, i);
    }
  }

  void add_merge(std::string_view left, std::string_view right, uint32_t rank,
                 const std::string& place, size_t index) {
    const auto id_of = [&](std::string_view token) {
      const std::optional<TokenId> id = vocabulary_.find(token);
      TS_CHECK_AS(FormatError, id.has_value(), kPretrained, place, "[", index, "] needs '",
                  token.substr(0, 60), "', which the vocabulary lacks; get the file again.");
      return *id;
    };
    const TokenId left_id = id_of(left), right_id = id_of(right);
    const TokenId merged = id_of(std::string(left).append(right.substr(prefix_.size())));
    merges_.insert_or_assign(left_id, right_id, {rank, merged});
    if (!cuts_at_spaces_) return;
    if (right.starts_with(kSpaceMark)) joins_space_.insert(last_character(left));
    // The last character of such a token's name is none of the text.
    const auto stands_for_other = [&](TokenId id) {
      return id == unknown_ ||
             std::find(fallbacks_.begin(), fallbacks_.end(), id) != fallbacks_.end();
    };
    if (stands_for_other(left_id) || stands_for_other(right_id)) cuts_at_spaces_ = false;
  }

  std::optional<TokenId> find_piece(std::string_view piece) const {
    if (!bytes_) return vocabulary_.find(piece);
    const auto found = pieces_.find(std::string(piece));
    if (found == pieces_.end()) return std::nullopt;
    return found->second;
  }

  void add_symbols(std::string_view piece, std::vector<TokenId>& ids,
                   std::vector<uint32_t>* lengths) const {
    uint32_t unknown_length = 0;  // of what waits for the next known symbol: it may grow
    const auto add = [&](TokenId id, uint32_t length) {
      ids.push_back(id);
      if (lengths != nullptr) lengths->push_back(length);
    };
    const auto flush = [&] {
      if (unknown_length > 0) add(*unknown_, unknown_length);
      unknown_length = 0;
    };
    std::string written;
    for (size_t place = 0; place < piece.size();) {
      const CodePoint c = bytes_ ? CodePoint{0, 1} : decode_utf8(piece, place);
      const std::string_view bytes = piece.substr(place, c.length);
      TokenId id = -1;
      written.clear();
      if (bytes_) {
        id = by_byte_[static_cast<unsigned char>(bytes[0])];
      } else if (prefix_.empty() && suffix_.empty()) {
        id = c.value < by_character_.size() ? by_character_[c.value] : -1;
      } else {
        if (place > 0) written = prefix_;
        written += bytes;
        if (place + c.length == piece.size()) written += suffix_;
        id = vocabulary_.find(written).value_or(-1);
      }
      place += c.length;
      if (id >= 0) {
        flush();
        add(id, c.length);
        continue;
      }
      if (byte_fallback_) {
        const std::string_view fallen = written.empty() ? bytes : std::string_view(written);
        const auto id_of = [&](char byte) { return fallbacks_[static_cast<unsigned char>(byte)]; };
        if (std::all_of(fallen.begin(), fallen.end(), [&](char b) { return id_of(b) >= 0; })) {
          for (const char byte : fallen) add(id_of(byte), 1);
          continue;
        }
      }
      if (!unknown_name_) continue;  // the package drops it
      TS_CHECK_AS(FormatError, unknown_.has_value(), kPretrained, "the vocabulary lacks '",
                  *unknown_name_, "', its token for what is unknown, and '", bytes,
                  "' is; get the file again.");
      if (!fuse_unknown_) flush();
      unknown_length += c.length;
    }
    flush();
  }

  bool bytes_;
  std::optional<std::string> unknown_name_;
  std::optional<TokenId> unknown_;
  std::string prefix_, suffix_;
  bool fuse_unknown_ = false, byte_fallback_ = false, ignore_merges_ = false;
  std::array<TokenId, 256> by_byte_{}, fallbacks_{};
  std::vector<TokenId> by_character_;
  std::unordered_map<std::string, TokenId> pieces_;  // as bytes
  MergeTable merges_;
  bool cuts_at_spaces_ = false;
  std::unordered_set<std::string> joins_space_;
};

}  // namespace

std::unique_ptr<TokenModel> read_bpe(JsonFields& fields, bool bytes) {
  return std::make_unique<BpeModel>(fields, bytes);
}

}  // namespace tessera::data
