// Truncation and padding of PretrainedTokenizer: what a file says of them, and what they do.
// Included by this folder's .cpp files only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <tessera/data/tokenizer_json/json_fields.h>
#include <tessera/data/tokenizer_json/post_processors.h>
#include <tessera/data/tokenizer_json/pretrained_encoding.h>

namespace tessera::data {

// UnsupportedError for a strategy or a direction, FormatError for fields.
Truncation read_truncation(JsonFields fields);
Padding read_padding(JsonFields fields);

// How many ids of each text are kept, so that with `added` special tokens there are at most
// max_length. ValueError where that cannot be.
std::vector<int64_t> kept_lengths(const std::vector<EncodingPart>& parts, const Truncation& how,
                                  int64_t added);

// The stretch of a text that is kept, and those that overflow it, in the package's order: each has
// `length` ids, of which the first `stride` (the last ones with `left`) stand in the one before it,
// too. ValueError for a stride that is not less than the length.
std::vector<EncodingPart> stretches_of(const EncodingPart& part, int64_t length, int64_t stride,
                                       bool left);
void truncate(EncodingPart& part, int64_t length, bool left);

// `for_all`: the encodings whose longest one sets the length.
void pad_all(std::span<PretrainedEncoding> encodings, std::span<const PretrainedEncoding> for_all,
             const Padding& how);

}  // namespace tessera::data
