#include <tessera/data/tokenizer_json/added_tokens.h>

#include <algorithm>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data {
namespace {

size_t start_of_last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (text[begin] & 0xC0) == 0x80) --begin;
  return begin;
}

bool ends_with_word(std::string_view text) {
  return is_word_character(decode_utf8(text, start_of_last_character(text)).value);
}
bool starts_with_word(std::string_view text) {
  return is_word_character(decode_utf8(text, 0).value);
}

}  // namespace

void AddedTokens::read(const Json& list, const std::string& place, const Vocabulary& vocabulary,
                       const Normalizer* normalizer) {
  TS_CHECK_AS(FormatError, list.is_array(), kPretrained, place,
              " must be an array; get the file again.");
  auto next_id = static_cast<TokenId>(vocabulary.size());
  std::unordered_map<std::string, TokenId> known;
  for (size_t i = 0; i < list.size(); ++i) {
    JsonFields fields(list[i], place + "[" + std::to_string(i) + "]");
    AddedToken token;
    token.content = fields.text("content");
    token.single_word = fields.flag("single_word", false);
    token.strip_left = fields.flag("lstrip", false);
    token.strip_right = fields.flag("rstrip", false);
    token.normalized = fields.flag("normalized", true);
    token.special = fields.flag("special", false);
    token.id = token_id_of(fields.at("id"), fields.place());
    fields.finish();
    if (token.content.empty()) continue;
    // The package numbers tokens itself: those of the vocabulary as that does, others behind it.
    const auto same = known.find(token.content);
    const TokenId given =
        same != known.end() ? same->second : vocabulary.find(token.content).value_or(next_id);
    if (given == next_id) ++next_id;
    TS_CHECK_AS(FormatError, given == token.id, kPretrained, fields.place(), " ('", token.content,
                "') has id ", token.id, ", and the vocabulary makes it ", given,
                "; get the file again.");
    known.emplace(token.content, given);
    token.matched = token.content;
    if (token.normalized && normalizer != nullptr) {
      AlignedText text;
      text.most_bytes = 16 * token.content.size() + (1 << 16);
      text.append_original(token.content, 0);
      normalizer->run(text, 0);
      token.matched = std::move(text.text);
    }
    if (token.special) special_.insert(token.content);
    end_ = std::max(end_, token.id + 1);
    const auto [at, is_new] = by_id_.try_emplace(token.id, tokens_.size());
    if (is_new) {
      tokens_.push_back(std::move(token));
    } else {
      tokens_[at->second] = std::move(token);
    }
  }
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i].matched.empty()) continue;
    matchers_[tokens_[i].normalized ? 1 : 0].add(tokens_[i].matched, i);
  }
}

const AddedToken* AddedTokens::find_content(std::string_view content) const {
  for (const AddedToken& token : tokens_) {
    if (token.content == content) return &token;
  }
  return nullptr;
}

void AddedTokens::find(std::string_view text, bool normalized, std::vector<Piece>& pieces) const {
  const TokenMatcher& matcher = matchers_[normalized ? 1 : 0];
  const auto push = [&](size_t begin, size_t end, TokenId id) {
    const auto first = static_cast<uint32_t>(begin);
    pieces.push_back({first, static_cast<uint32_t>(end), first, id});
  };
  size_t covered = 0;
  size_t at = 0;
  while (const auto match = matcher.find(text, at)) {
    const AddedToken& token = tokens_[match->index];
    size_t begin = match->begin, end = match->end;
    at = end;
    if (token.single_word && ((begin > 0 && ends_with_word(text.substr(0, begin))) ||
                              (end < text.size() && starts_with_word(text.substr(end))))) {
      continue;
    }
    if (token.strip_left) {
      while (begin > 0) {
        const size_t last = start_of_last_character(text.substr(0, begin));
        if (!is_white_space(decode_utf8(text, last).value)) break;
        begin = last;
      }
      begin = std::max(begin, covered);
    }
    if (token.strip_right) {
      while (end < text.size()) {
        const CodePoint c = decode_utf8(text, end);
        if (!is_white_space(c.value)) break;
        end += c.length;
      }
    }
    if (covered < begin) push(covered, begin, -1);
    push(begin, end, token.id);
    covered = end;
  }
  if (covered != text.size()) push(covered, text.size(), -1);
}

}  // namespace tessera::data
