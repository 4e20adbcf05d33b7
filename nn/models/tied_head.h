// Heads that share their weight with the table of tokens, in folders of transformers.
#pragma once

#include <optional>
#include <string>

#include <tessera/core/state/state_dict.h>

namespace tessera::nn::models {

// Where "lm_head.weight" has other values than the table of that name: the first place and both
// values. Nothing where they agree or one of them is not there. Of any device.
std::optional<std::string> own_head(const StateDict& weights, const std::string& table);

// Whether the head is the table's, as the config of a folder says (`tied`) and as its weights are:
// transformers makes two parameters of a pair that its config ties and its file holds apart. A line
// on stderr says so.
bool is_head_tied(bool tied, const StateDict& weights, const std::string& table,
                  const std::string& folder);

inline constexpr const char* kHead = "lm_head.weight";

}  // namespace tessera::nn::models
