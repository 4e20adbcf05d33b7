// The decoders of a tokenizer.json: what makes a text of tokens. Included by this folder's .cpp
// files only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

// Changes a list of tokens; what it leaves is joined.
using Decoder = std::function<void(std::vector<std::string>&)>;

// UnsupportedError for a type, FormatError for fields.
Decoder read_decoder(const Json& value, const std::string& place);

}  // namespace tessera::data
