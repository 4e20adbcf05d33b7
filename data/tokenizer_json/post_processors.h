// The post-processors of a tokenizer.json: what adds special tokens to the ids of one or two texts.
// Included by this folder's .cpp files only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/data/tokenizer_json/json_fields.h>
#include <tessera/data/tokenizer_json/pretrained_encoding.h>

namespace tessera::data {

// A stretch of the result, and of each token how many spaces its text begins and ends with.
struct EncodingPart {
  PretrainedEncoding encoding;
  std::vector<uint32_t> leading_spaces, trailing_spaces;
};

struct PostProcessor {
  std::function<void(std::vector<EncodingPart>&, bool add_special_tokens)> run;
  int64_t added_single = 0, added_pair = 0;  // special tokens
  bool trims = false;                        // offsets, by the spaces of tokens
};

// UnsupportedError for a type, FormatError for fields.
PostProcessor read_post_processor(const Json& value, const std::string& place);

}  // namespace tessera::data
