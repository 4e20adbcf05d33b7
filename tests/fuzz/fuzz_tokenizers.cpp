// Text through tokenizers with a small vocabulary: round trips, ids in range, streams.
#include <cstdio>
#include <string>

#include <tessera/data/text/bpe.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/wordpiece.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

namespace {

// The 256 bytes, then merges of pairs of letters and of those pairs.
BpeTokenizer make_bpe() {
  std::string vocabulary = "{", merges;
  int id = 0, next = 256;
  const auto add = [&](const std::string& token) {
    vocabulary += (id > 0 ? ",\"" : "\"") + token + "\":" + std::to_string(id);
    ++id;
  };
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    std::string token;
    append_utf8(static_cast<char32_t>(printable ? byte : next++), token);
    if (token == "\"" || token == "\\") token.insert(0, "\\");
    add(token);
  }
  const std::string letters = "abtse";
  for (const char a : letters) {
    for (const char b : letters) {
      add({a, b});
      merges += std::string{a, ' ', b, '\n'};
    }
  }
  for (const char a : letters) {
    add({a, a, a, a});
    merges += std::string{a, a, ' ', a, a, '\n'};
  }
  return BpeTokenizer::parse(vocabulary + "}", "v", merges, "m", {.special_tokens = {}});
}

WordPieceTokenizer make_wordpiece() {
  std::string vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n##a\n##b\nab\n.\n,\n\xE7\x94\x9F\n";
  for (char c = 'a'; c <= 'z'; ++c) vocabulary += std::string(1, c) + "\n";
  return WordPieceTokenizer::parse(vocabulary, "v", {.parse_special_tokens = true});
}

}  // namespace

FUZZ(text) {
  static const BpeTokenizer bpe = make_bpe();
  static const WordPieceTokenizer wordpiece = make_wordpiece();
  const std::vector<TokenId> ids = bpe.encode(text);
  fuzz::require(bpe.decode(ids) == text, "bytes come back");
  fuzz::require(!find_invalid_utf8(bpe.decode_text(ids)).has_value(), "text is UTF-8");
  Utf8Stream stream;
  std::string printed;
  for (const TokenId id : ids) printed += stream.push(bpe.token_bytes(id));
  printed += stream.finish();
  fuzz::require(printed == replace_invalid_utf8(text), "a stream prints what the whole text is");
  size_t length = 0;
  for (const std::string_view piece : split_gpt2(text)) length += piece.size();
  fuzz::require(length == text.size(), "pieces cover the text");
  for (const TokenId id : wordpiece.encode(text)) {
    fuzz::require(id >= 0 && id < wordpiece.vocab_size(), "ids are in the vocabulary");
  }
  clean_up_spaces(text);
  split_lines(text);
}
