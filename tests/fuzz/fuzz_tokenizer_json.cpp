// A tokenizer.json of a stranger and a text: what it reads gives the same ids with and without
// offsets, which lie in the text.
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  const std::string_view file = fuzz::take_part(text);
  fuzz::feed([&] {
    const PretrainedTokenizer tokenizer = PretrainedTokenizer::parse(file, "input");
    const std::vector<TokenId> ids = tokenizer.encode(text);
    fuzz::feed([&] { tokenizer.decode(ids, true); });
    PretrainedEncodeOptions options{.add_special_tokens = false};
    options.truncation = Truncation{.max_length = 1 << 20};
    options.padding = Padding{};
    const PretrainedEncoding encoding = tokenizer.encode_text(text, options);
    fuzz::require(encoding.ids == ids, "offsets change no ids");
    fuzz::require(encoding.offsets.size() == ids.size(), "each id has offsets");
    fuzz::feed([&] { tokenizer.encode_pair(text, file.substr(0, 100)); });
  });
}
