#include <tessera/data/text/bpe.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  const std::string_view vocabulary = fuzz::take_part(text);
  const std::string_view merges = fuzz::take_part(text);
  fuzz::feed([&] {
    const BpeTokenizer tokenizer =
        BpeTokenizer::parse(vocabulary, "v.json", merges, "m.txt", {.special_tokens = {}});
    fuzz::require(tokenizer.decode(tokenizer.encode(text)) == text, "the text comes back");
  });
}
