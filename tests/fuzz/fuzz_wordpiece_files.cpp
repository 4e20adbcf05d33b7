#include <tessera/data/text/text.h>
#include <tessera/data/text/wordpiece.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  const std::string_view vocabulary = fuzz::take_part(text);
  fuzz::feed([&] {
    const WordPieceTokenizer tokenizer = WordPieceTokenizer::parse(
        std::string("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n").append(vocabulary), "v.txt");
    const Encoding encoding = tokenizer.encode_pair(text, vocabulary, {.max_length = 16});
    fuzz::require(encoding.ids.size() <= 16, "the limit holds");
    fuzz::require(!find_invalid_utf8(tokenizer.decode(encoding.ids)).has_value(),
                  "decodes to text");
  });
}
