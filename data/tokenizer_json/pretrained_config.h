// What stands beside a tokenizer.json. Included by this folder's .cpp files only.
#pragma once

#include <string>

#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::data {

// tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a folder, those that are
// there. FormatError, IoError.
PretrainedConfig read_pretrained_config(const std::string& folder);

}  // namespace tessera::data
