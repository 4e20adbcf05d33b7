// Heads that share their weight with the token embedding, in folders of transformers.
#pragma once

#include <optional>
#include <string>

#include <tessera/core/state/state_dict.h>

namespace tessera::nn::models {

// If "lm_head.weight" has other values than the embedding of that name: the first place and both
// values. Nothing if they agree or one of them is missing. Works on any device.
std::optional<std::string> own_head(const StateDict& weights, const std::string& table);

// Whether the head is tied, from the config of a folder (`tied`) and its weights: transformers
// makes two parameters of a pair that the config ties and the file stores with different values. A
// line on stderr says so.
bool is_head_tied(bool tied, const StateDict& weights, const std::string& table,
                  const std::string& folder);

inline constexpr const char* kHead = "lm_head.weight";

}  // namespace tessera::nn::models
