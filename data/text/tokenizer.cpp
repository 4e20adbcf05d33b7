#include <tessera/data/text/tokenizer.h>

#include <array>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>

namespace tessera::data {

std::string Tokenizer::decode_text(std::span<const TokenId> ids) const {
  return replace_invalid_utf8(decode(ids));
}

void ByteTokenizer::encode(std::string_view text, std::vector<TokenId>& ids) const {
  reserve_more(ids, text.size());
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
}

std::string ByteTokenizer::decode(std::span<const TokenId> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const TokenId id : ids) text += token_bytes(id);
  return text;
}

std::string_view ByteTokenizer::token_bytes(TokenId id) const {
  static constexpr std::array<char, 256> kBytes = [] {
    std::array<char, 256> bytes{};
    for (int i = 0; i < 256; ++i) bytes[static_cast<size_t>(i)] = static_cast<char>(i);
    return bytes;
  }();
  TS_CHECK_INDEX(id >= 0 && id < 256, "ByteTokenizer", "ids are 0 to 255; got ", id,
                 "; was the text encoded with another tokenizer?");
  return {&kBytes[static_cast<size_t>(id)], 1};
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_.append(bytes);
  // A beginning that bytes to come can complete is at most 3 bytes long and ends the text.
  size_t keep = 0;
  for (size_t length = 1; length <= 3 && length <= pending_.size(); ++length) {
    const size_t start = pending_.size() - length;
    const auto lead = static_cast<unsigned char>(pending_[start]);
    if ((lead & 0xC0) == 0x80) continue;
    const CodePoint c = decode_utf8(pending_, start);
    const size_t full = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (c.value == kInvalidCodePoint && c.length == length && lead >= 0xC2 && lead <= 0xF4 &&
        length < full) {
      keep = length;
    }
    break;
  }
  std::string out =
      replace_invalid_utf8(std::string_view(pending_).substr(0, pending_.size() - keep));
  pending_.erase(0, pending_.size() - keep);
  return out;
}

std::string Utf8Stream::finish() { return replace_invalid_utf8(std::exchange(pending_, {})); }

std::string clean_up_spaces(std::string_view text) {
  // One after the other over the whole text, as transformers does it: the order is visible in
  // texts like " ' ,".
  static constexpr std::pair<std::string_view, std::string_view> kRules[] = {
      {" .", "."},     {" ?", "?"},   {" !", "!"},   {" ,", ","},     {" ' ", "'"},
      {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  std::string current(text);
  for (const auto& [from, to] : kRules) {
    std::string next;
    next.reserve(current.size());
    size_t position = 0;
    for (size_t found; (found = current.find(from, position)) != current.npos;
         position = found + from.size()) {
      next.append(current, position, found - position).append(to);
    }
    next.append(current, position);
    current = std::move(next);
  }
  return current;
}

}  // namespace tessera::data
