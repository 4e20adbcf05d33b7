// What stands beside a tokenizer.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::data {

// What tokenizer_config.json and special_tokens_map.json say of the model.
struct PretrainedConfig {
  std::optional<std::string> bos_token, eos_token, pad_token, unk_token, cls_token, sep_token,
      mask_token;
  // transformers adds these tokens where a file's post-processor does not; here that alone counts.
  std::optional<bool> add_bos_token, add_eos_token;
  std::optional<int64_t> model_max_length;  // absent where the file means no limit
  // Names and texts; one without a name is called default. PretrainedTokenizer runs them.
  std::vector<std::pair<std::string, std::string>> chat_templates;

  // The text of one; nullptr: there is none of the name.
  const std::string* chat_template(const std::string& name = "default") const;
};

// Of a folder's tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
// additional_chat_templates/NAME.jinja, those that are there. FormatError, IoError.
PretrainedConfig read_pretrained_config(const std::string& folder);

}  // namespace tessera::data
